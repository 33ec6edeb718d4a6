"""Two factorisations of a positive definite matrix with a common interface, in float64."""

from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from lastlayer.errors import PrecisionError


@dataclass(frozen=True)
class Cholesky:
    """A = L L'. Accurate whatever the scales of the columns."""

    L: Float[Tensor, "*b k k"]

    @classmethod
    def of(cls, A: Float[Tensor, "*b k k"]) -> "Cholesky":
        """Factor a matrix; the result is NaN if it is not positive definite."""
        # cholesky_ex does not synchronise with the device; callers add a ridge above rounding errors
        return cls(torch.linalg.cholesky_ex(A).L)

    def whiten(self, Z: Float[Tensor, "... r k"]) -> Float[Tensor, "... r k"]:
        """Rows h with h h' = z A^-1 z'."""
        return torch.linalg.solve_triangular(self.L, Z.mT, upper=False).mT

    def unwhiten(self, E: Float[Tensor, "... k c"]) -> Float[Tensor, "... k c"]:
        """L'^-1 E: columns with covariance A^-1 if those of E are standard normal."""
        return torch.linalg.solve_triangular(self.L.mT, E, upper=True)

    def solve(self, B: Float[Tensor, "... k c"]) -> Float[Tensor, "... k c"]:
        """A^-1 B."""
        if self.L.is_cuda:  # cholesky_solve synchronises, so no CUDA graph can capture it
            return self.unwhiten(torch.linalg.solve_triangular(self.L, B, upper=False))
        return torch.cholesky_solve(B, self.L)

    def inverse(self) -> Float[Tensor, "*b k k"]:
        """A^-1."""
        if not self.L.is_cuda:
            try:
                return torch.cholesky_inverse(self.L)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                pass  # a pivot of zero: below, only the inverse of that matrix of the batch is not finite
        H = self.whiten(torch.eye(self.L.shape[-1], dtype=self.L.dtype, device=self.L.device))
        return H @ H.mT

    def logdet(self) -> Float[Tensor, "*b"]:
        """log det A."""
        return 2 * self.L.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @staticmethod
    def perturbation(u: Float[Tensor, "*b r k"], energy: Float[Tensor, "*b k"]) -> Float[Tensor, "*b r"]:
        """Bound on u'Eu for rounding errors |E_ij| <= sqrt(energy_i energy_j): each column has its own scale."""
        return (energy.sqrt()[..., None, :] * u.abs()).sum(-1).square()


@dataclass(frozen=True)
class Spectrum:
    """A = V diag(values) V', positive semidefinite; `shifted(ridge)` is the factor of A + ridge I."""

    values: Float[Tensor, "*a k"]
    vectors: Float[Tensor, "*#a k k"]

    @classmethod
    def of(cls, A: Float[Tensor, "*b k k"], resolution: Float[Tensor, "*b"]) -> "Spectrum":
        """Decompose a matrix; eigenvalues up to the resolution are rounding errors and set to zero."""
        values, vectors = eigh(A)
        return cls(torch.where(values > resolution[..., None], values, 0.0), vectors)

    def shifted(self, ridge: Float[Tensor, "..."]) -> "Spectrum":
        """The spectrum of A + ridge I."""
        return Spectrum(self.values + ridge[..., None], self.vectors)

    def whiten(self, Z: Float[Tensor, "... r k"]) -> Float[Tensor, "... r k"]:
        """Rows h with h h' = z A^-1 z'."""
        return Z @ self.vectors / self.values.sqrt()[..., None, :]

    def unwhiten(self, E: Float[Tensor, "... k c"]) -> Float[Tensor, "... k c"]:
        """V values^-1/2 E: columns with covariance A^-1 if those of E are standard normal."""
        return self.vectors @ (E / self.values.sqrt()[..., None])

    def solve(self, B: Float[Tensor, "... k c"]) -> Float[Tensor, "... k c"]:
        """A^-1 B."""
        return self.vectors @ ((self.vectors.mT @ B) / self.values[..., None])

    def logdet(self) -> Float[Tensor, "*b"]:
        """log det A."""
        return self.values.log().sum(-1)

    @staticmethod
    def perturbation(u: Float[Tensor, "*b r k"], energy: Float[Tensor, "*b k"]) -> Float[Tensor, "*b r"]:
        """Bound on u'Eu for rounding errors |E| <= sum(energy): the largest column determines the scale of all."""
        return energy.sum(-1)[..., None] * u.square().sum(-1)


Factor: TypeAlias = Cholesky | Spectrum


def eigh(A: Float[Tensor, "*b k k"]) -> tuple[Float[Tensor, "*b k"], Float[Tensor, "*b k k"]]:
    """Eigenvalues and eigenvectors; on the processor if the GPU's solver does not converge."""
    for here in (lambda: A, A.cpu):
        with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            values, vectors = torch.linalg.eigh(here())
            return values.to(A.device), vectors.to(A.device)
    raise PrecisionError(
        "the eigenvalues of a matrix of moments could not be computed in float64: the features or targets are not "
        "finite, or their sizes differ too much; rescale them, or drop outlying rows"
    )


def eigvalsh(A: Float[Tensor, "*b k k"]) -> Float[Tensor, "*b k"]:
    """Eigenvalues alone, with the same fallback."""
    try:
        return torch.linalg.eigvalsh(A)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return eigh(A)[0]


def diagonal(A: Shaped[Tensor, "*b k k"]) -> Shaped[Tensor, "*b k"]:
    """Diagonals of a batch of matrices."""
    return A.diagonal(dim1=-2, dim2=-1)


def trace(A: Float[Tensor, "*b k k"]) -> Float[Tensor, "*b"]:
    """Traces of a batch of matrices."""
    return diagonal(A).sum(-1)
