"""Linear features phi_tilde and affine features phi = [phi_tilde, 1]; `MLP` makes the former."""

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.errors import InputError
from lastlayer.networks.mlp import ACTIVATIONS, MLP

__all__ = ["ACTIVATIONS", "MLP", "affine_features", "linear_features"]


def affine_features(phi_tilde: Float[Tensor, "*b m k"]) -> Float[Tensor, "*b m p"]:
    """phi = [phi_tilde, 1]: linear features with the bias as their last column. eq:Features_vs_augmented_Features"""
    return torch.cat([phi_tilde, phi_tilde.new_ones(*phi_tilde.shape[:-1], 1)], dim=-1)


def linear_features(Phi: Float[Tensor, "*b m p"]) -> Float[Tensor, "*b m k"]:
    """The linear features of affine ones: all but the last column, which must be ones."""
    bias = Phi[..., -1] if Phi.shape[-1] else Phi.new_zeros(1)
    if Phi.device.type != "cpu":
        torch._assert_async((bias == 1).all())
    elif not bool((bias == 1).all()):
        raise InputError(
            f"the last column of the affine features, of shape {tuple(Phi.shape)}, is not all ones: "
            "make them with lastlayer.features.affine_features(phi_tilde)"
        )
    return Phi[..., :-1]
