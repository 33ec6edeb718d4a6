"""Random Fourier features, with which a last layer approximates a Gaussian process."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from lastlayer.networks.mlp import MLP, InputSkip

N_FREQUENCIES, FEW_DIMENSIONS = 256, 10
JITTER = 1e-9
"""Added to the diagonal of the kernel between points, which may lie close together."""


def fourier_network(
    log_length: Float[Tensor, " d"],
    log_linear: Float[Tensor, ""],
    n_frequencies: int = N_FREQUENCIES,
    *,
    generator: torch.Generator | None = None,
) -> InputSkip:
    """Make features [cos(w'a), sin(w'a), sqrt(rho n) a], a = x / length, of n random frequencies w.

    A last layer on them approximates the Gaussian process of `training.lengths` by n frequencies: a smooth function
    with the same prior variance everywhere, plus a linear one.

    Parameters
    ----------
    log_length, log_linear : Tensor of shape (d,), Tensor of shape ()
        Log length scales, and log rho.
    n_frequencies : int, default 256
        Number of frequencies.
    generator : torch.Generator, optional
        Source of the frequencies.
    """
    d, scale = len(log_length), (-log_length).exp()
    waves = (scale[:, None] * frequencies(d, n_frequencies, generator).to(scale)).mT
    network = MLP(d, (2 * n_frequencies,), activation="sin", dtype=log_length.dtype, generator=torch.Generator()).to(
        log_length.device
    )
    linear = network[0]
    assert isinstance(linear, nn.Linear)
    with torch.no_grad():
        linear.weight.copy_(torch.cat([waves, waves]))
        linear.bias[:n_frequencies] = 0.5 * math.pi  # makes these sines cosines
    return InputSkip(network, (0.5 * log_linear).exp() * math.sqrt(n_frequencies) * scale)


class ProcessFeatures(nn.Module):
    """Features of the same process whose kernel is exact between any point and the given points."""

    points: Tensor
    scale: Tensor
    linear: Tensor
    waves: Tensor
    root: Tensor

    def __init__(
        self,
        points: Float[Tensor, "n d"],
        log_length: Float[Tensor, " d"],
        log_linear: Float[Tensor, ""],
        n_frequencies: int = N_FREQUENCIES,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        d, scale = len(log_length), (-log_length).exp()
        self.register_buffer("scale", scale)
        self.register_buffer("points", points.to(scale) * scale)
        self.register_buffer("linear", log_linear.exp())
        self.register_buffer("waves", frequencies(d, n_frequencies, generator).to(scale))
        K = self._kernel(self.points)
        L = torch.linalg.cholesky(K + JITTER * torch.eye(len(K)).to(K))
        eye = torch.eye(len(K), dtype=K.dtype, device=K.device)
        inverse_root = torch.linalg.solve_triangular(L, eye, upper=False).mT
        rest = -torch.cholesky_solve(self._random(self.points), L)
        self.register_buffer("root", torch.cat([inverse_root, rest], 1))

    def forward(self, z: Float[Tensor, "m d"]) -> Float[Tensor, "m p"]:
        a = z * self.scale
        seen, random = self._kernel(a) @ self.root, self._random(a)
        n = len(self.points)
        return torch.cat([seen[:, :n], seen[:, n:] + random], 1)

    def _kernel(self, a: Float[Tensor, "m d"]) -> Float[Tensor, "m n"]:
        inner = a @ self.points.mT
        square = a.square().sum(-1, keepdim=True) + self.points.square().sum(-1)
        return (inner - 0.5 * square).clamp_max(0.0).exp() + self.linear * inner

    def _random(self, a: Float[Tensor, "m d"]) -> Float[Tensor, "m r"]:
        u, n = a @ self.waves, self.waves.shape[1]
        return torch.cat([torch.cos(u) / n**0.5, torch.sin(u) / n**0.5, self.linear.sqrt() * a], 1)


def fourier_features(
    x: Float[Tensor, "m d"], log_length: Float[Tensor, " d"], log_linear: Float[Tensor, ""], waves: Float[Tensor, "d n"]
) -> Float[Tensor, "m p"]:
    """Features of `fourier_network` as a function of the length scales, given standard normal frequencies."""
    a = x * (-log_length).exp()
    u = a @ waves
    return torch.cat([torch.cos(u), torch.sin(u), (0.5 * log_linear).exp() * math.sqrt(waves.shape[1]) * a], -1)


def frequencies(d: int, n: int, generator: torch.Generator | None) -> Float[Tensor, "d n"]:
    """Standard normal columns that are spread more evenly than independent ones."""
    if d <= FEW_DIMENSIONS:
        seed = int(torch.randint(2**31 - 1, (), generator=generator))
        uniform = SobolEngine(d, scramble=True, seed=seed).draw(n, dtype=torch.float64)
        return torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9)).mT
    normal = lambda: torch.randn(d, d, generator=generator, dtype=torch.float64)
    groups = [torch.linalg.qr(normal()).Q * normal().norm(dim=0) for _ in range(-(-n // d))]
    return torch.cat(groups, 1)[:, :n]
