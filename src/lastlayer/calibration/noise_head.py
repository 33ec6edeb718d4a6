"""Noise that depends on the input: a small network for its logarithm, fitted to held-out errors."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

UNITS = 10


@dataclass(frozen=True)
class NoiseHead:
    """log of noise variance over its usual value: V tanh(U x + u) for each output, x clipped to the range of the data.

    Outside that range the noise is that of the nearest edge: only the epistemic part grows with the distance.
    """

    low: Float[Tensor, " d"]
    high: Float[Tensor, " d"]
    U: Float[Tensor, "d h"]
    u: Float[Tensor, " h"]
    V: Float[Tensor, "h q"]

    @classmethod
    def initial(cls, Z: Float[Tensor, "n d"], n_outputs: int, seed: int = 0) -> "NoiseHead":
        """Units in all directions, no effect yet."""
        generator = torch.Generator().manual_seed(seed)
        d = Z.shape[1]
        U = torch.randn(d, UNITS, generator=generator, dtype=torch.float64) / d**0.5
        u = torch.randn(UNITS, generator=generator, dtype=torch.float64)
        Z = Z.double()
        return cls(Z.amin(0), Z.amax(0), U, u, torch.zeros(UNITS, n_outputs, dtype=torch.float64))

    def log_factor(self, Z: Float[Tensor, "m d"]) -> Float[Tensor, "m q"]:
        x = torch.minimum(torch.maximum(Z.to(self.low), self.low), self.high)
        return torch.tanh(x @ self.U + self.u) @ self.V

    def factor(self, Z: Float[Tensor, "m d"]) -> Float[ndarray, "m q"]:
        with torch.no_grad():
            return np.exp(self.log_factor(Z).numpy())

    @property
    def n_numbers(self) -> int:
        return self.U.numel() + self.u.numel() + self.V.numel()

    def numbers(self) -> Float[Tensor, " n"]:
        """What is learned of it."""
        return torch.cat([self.U.flatten(), self.u, self.V.flatten()])

    def with_numbers(self, numbers: Float[Tensor, " n"]) -> "NoiseHead":
        U, u, V = numbers.split([self.U.numel(), self.u.numel(), self.V.numel()])
        return NoiseHead(self.low, self.high, U.reshape(self.U.shape), u, V.reshape(self.V.shape))

    def energy(self) -> Float[Tensor, ""]:
        """-log density under N(0, 1 / fan_in) of the weights and N(0, 1) of the biases, up to a constant."""
        d, h = self.U.shape
        return 0.5 * (d * self.U.square().sum() + self.u.square().sum() + h * self.V.square().sum())
