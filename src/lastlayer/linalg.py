"""Two factorisations of a positive definite matrix behind one face, in float64.

`Cholesky` serves one matrix; `Spectrum` serves A + ridge I for every ridge at once.
Both are written for leading batch dimensions, so that many small problems go through as one.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

EPS = torch.finfo(torch.float64).eps
TINY = math.sqrt(torch.finfo(torch.float64).tiny)
"""A positive number whose inverse can still be squared."""


class Factor(Protocol):
    """A positive definite matrix A, factored."""

    def half(self, Z: Float[Tensor, "*b r k"]) -> Float[Tensor, "*b r k"]:
        """Rows h with h h' = z A^-1 z'."""

    def solve(self, B: Float[Tensor, "*b k c"]) -> Float[Tensor, "*b k c"]:
        """A^-1 B."""

    def logdet(self) -> Float[Tensor, "*b"]:
        """log det A."""


@dataclass(frozen=True)
class Cholesky:
    """A = L L'. Accurate whatever the scales of the columns."""

    L: Float[Tensor, "*b k k"]

    @classmethod
    def of(cls, A: Float[Tensor, "*b k k"]) -> "Cholesky":
        # cholesky_ex does not wait for the device; a failure would show as nan, but callers add a ridge above rounding
        return cls(torch.linalg.cholesky_ex(A).L)

    def half(self, Z: Float[Tensor, "*b r k"]) -> Float[Tensor, "*b r k"]:
        return torch.linalg.solve_triangular(self.L, Z.mT, upper=False).mT

    def back_half(self, E: Float[Tensor, "*b k c"]) -> Float[Tensor, "*b k c"]:
        """L'^-1 E: columns with covariance A^-1 if those of E are standard normal."""
        return torch.linalg.solve_triangular(self.L.mT, E, upper=True)

    def solve(self, B: Float[Tensor, "*b k c"]) -> Float[Tensor, "*b k c"]:
        return torch.cholesky_solve(B, self.L)

    def logdet(self) -> Float[Tensor, "*b"]:
        return 2 * self.L.diagonal(dim1=-2, dim2=-1).log().sum(-1)


@dataclass(frozen=True)
class Spectrum:
    """A = V diag(values) V' with values clipped at zero; `shifted(ridge)` is the factor of A + ridge I."""

    values: Float[Tensor, "*b k"]
    vectors: Float[Tensor, "*b k k"]

    @classmethod
    def of(cls, A: Float[Tensor, "*b k k"]) -> "Spectrum":
        values, vectors = torch.linalg.eigh(A)
        return cls(values.clamp_min(0), vectors)

    def shifted(self, ridge: Float[Tensor, "*b"]) -> "Spectrum":
        return Spectrum(self.values + ridge[..., None], self.vectors)

    def half(self, Z: Float[Tensor, "*b r k"]) -> Float[Tensor, "*b r k"]:
        return Z @ self.vectors / self.values.sqrt()[..., None, :]

    def solve(self, B: Float[Tensor, "*b k c"]) -> Float[Tensor, "*b k c"]:
        return self.vectors @ ((self.vectors.mT @ B) / self.values[..., None])

    def logdet(self) -> Float[Tensor, "*b"]:
        return self.values.log().sum(-1)
