"""Linear features phi_tilde and affine features phi = [phi_tilde, 1]."""

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.errors import InputError


def affine_features(phi_tilde: Float[Tensor, "*b m k"]) -> Float[Tensor, "*b m p"]:
    """Append a column of ones to linear features: phi = [phi_tilde, 1]. eq:Features_vs_augmented_Features.

    Parameters
    ----------
    phi_tilde : Tensor of shape (..., m, k)
        Linear features.
    """
    return torch.cat([phi_tilde, phi_tilde.new_ones(*phi_tilde.shape[:-1], 1)], dim=-1)


def linear_features(Phi: Float[Tensor, "*b m p"]) -> Float[Tensor, "*b m k"]:
    """Remove the last column of affine features, which must be ones.

    Parameters
    ----------
    Phi : Tensor of shape (..., m, p)
        Affine features.
    """
    bias = Phi[..., -1] if Phi.shape[-1] else Phi.new_zeros(1)
    if Phi.device.type != "cpu":
        torch._assert_async((bias == 1).all())
    elif not bool((bias == 1).all()):
        raise InputError(
            f"the last column of the affine features, of shape {tuple(Phi.shape)}, is not all ones: "
            "make them with lastlayer.features.affine_features(phi_tilde)"
        )
    return Phi[..., :-1]
