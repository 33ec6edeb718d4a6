"""Random Fourier features: sines and cosines of random frequencies, a Gaussian process in the eyes of a last layer."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from lastlayer.networks.mlp import MLP, InputSkip

N_FREQUENCIES, FEW_DIMENSIONS = 256, 10


def fourier_network(
    log_length: Float[Tensor, " d"],
    log_linear: Float[Tensor, ""],
    n_frequencies: int = N_FREQUENCIES,
    *,
    generator: torch.Generator | None = None,
) -> InputSkip:
    """Features [cos(w'a), sin(w'a), sqrt(rho n) a], a = x / length, of n random frequencies w.

    A last layer on them is the Gaussian process of `training.lengths`, seen through n frequencies: a smooth function,
    of the same variance everywhere before data, on top of a linear one.
    """
    d, scale = len(log_length), (-log_length).exp()
    waves = (scale[:, None] * frequencies(d, n_frequencies, generator).to(scale)).mT
    network = MLP(d, (2 * n_frequencies,), activation="sin", dtype=log_length.dtype).to(log_length.device)
    linear = network[0]
    assert isinstance(linear, nn.Linear)
    with torch.no_grad():
        linear.weight.copy_(torch.cat([waves, waves]))
        linear.bias[:n_frequencies] = 0.5 * math.pi  # the sines that are cosines
    return InputSkip(network, _linear_scale(log_linear, n_frequencies) * scale)


def fourier_features(
    x: Float[Tensor, "m d"], log_length: Float[Tensor, " d"], log_linear: Float[Tensor, ""], waves: Float[Tensor, "d n"]
) -> Float[Tensor, "m p"]:
    """The same features as a function of the lengths, given standard normal frequencies."""
    a = x * (-log_length).exp()
    u = a @ waves
    return torch.cat([torch.cos(u), torch.sin(u), _linear_scale(log_linear, waves.shape[1]) * a], -1)


def _linear_scale(log_linear: Float[Tensor, ""], n: int) -> Float[Tensor, ""]:
    """sqrt(rho n)"""
    return (0.5 * (log_linear + math.log(n))).exp()


def frequencies(d: int, n: int, generator: torch.Generator | None) -> Float[Tensor, "d n"]:
    """Standard normal columns that are spread better than independent ones.

    In few dimensions those of a Sobol sequence, whose error in the kernel is a tenth; in many, orthogonal in groups.
    """
    if d <= FEW_DIMENSIONS:
        seed = int(torch.randint(2**31 - 1, (), generator=generator))
        uniform = SobolEngine(d, scramble=True, seed=seed).draw(n, dtype=torch.float64)
        return torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9)).mT
    normal = lambda: torch.randn(d, d, generator=generator, dtype=torch.float64)
    groups = [torch.linalg.qr(normal()).Q * normal().norm(dim=0) for _ in range(-(-n // d))]
    return torch.cat(groups, 1)[:, :n]
