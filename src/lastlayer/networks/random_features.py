"""Random Fourier features: cosines and sines of random frequencies, with a learned length for each input."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

LENGTH = math.exp(math.sqrt(2) - 3)
"""The most likely length under the prior, in units of the box of the inputs, times the root of their number."""
LOG_LENGTH_STD = math.sqrt(3)
"""Standard deviation of the logarithm of a length under its prior, under a prior precision of 1."""
UNIT = 1 / math.sqrt(12)
"""Standard deviation of inputs that fill the unit interval: what standardised inputs are divided by."""


class RandomFourierFeatures(nn.Module):
    """Features [cos(w'x), sin(w'x)] / sqrt(n), w = omega / length, for standardised inputs.

    A last layer on them is a Gaussian process with a squared exponential kernel, seen through n random frequencies
    (orthogonal in groups, which halves the error); every point has the same variance before data. The parameters are
    the logarithms of the lengths over their most likely value, in units of LOG_LENGTH_STD, so that
    `mlp.neg_log_hidden_prior` is the prior of BoTorch's default process, lengths that grow with the
    root of the number of inputs.
    """

    def __init__(self, n_inputs: int, n_frequencies: int = 128, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.omega: Tensor
        self.register_buffer("omega", frequencies(n_inputs, n_frequencies, generator))
        self.log_length = nn.Parameter(torch.zeros(n_inputs, dtype=torch.float64))
        self.likely = LENGTH * math.sqrt(n_inputs) / UNIT

    @property
    def lengths(self) -> Float[Tensor, " d"]:
        """In standardised units."""
        return self.likely * (LOG_LENGTH_STD * self.log_length).exp()

    def forward(self, z: Float[Tensor, "m d"]) -> Float[Tensor, "m k"]:
        return _fourier((z / self.lengths) @ self.omega)


class ProjectedFourierFeatures(nn.Module):
    """Random Fourier features of a few directions of the inputs, all of them learned: w = omega A.

    In hundreds of inputs random frequencies line up by chance far from any point, and a search finds such places; in
    few directions they do not. `mlp.neg_log_hidden_prior` is the prior: a direction has entries of variance one
    over the number of inputs, so that it moves by about one length.
    """

    def __init__(
        self, n_inputs: int, n_directions: int, n_frequencies: int = 128, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.omega: Tensor
        self.register_buffer("omega", frequencies(n_directions, n_frequencies, generator))
        start = torch.randn(n_directions, n_inputs, generator=generator, dtype=torch.float64) / math.sqrt(n_inputs)
        self.directions = nn.Parameter(start)

    def forward(self, z: Float[Tensor, "m d"]) -> Float[Tensor, "m k"]:
        return _fourier((z @ self.directions.mT) @ self.omega)


def _fourier(phase: Float[Tensor, "m n"]) -> Float[Tensor, "m k"]:
    return torch.cat([phase.cos(), phase.sin()], dim=-1) / math.sqrt(phase.shape[-1])


def frequencies(d: int, n: int, generator: torch.Generator | None) -> Float[Tensor, "d n"]:
    """Standard normal columns, orthogonal in groups of d."""
    normal = lambda: torch.randn(d, d, generator=generator, dtype=torch.float64)
    groups = [torch.linalg.qr(normal()).Q * normal().norm(dim=0) for _ in range(-(-n // d))]
    return torch.cat(groups, 1)[:, :n]
