"""Last layers whose rows come and go: recursive least squares in square-root form, O(p^2 n) for n rows.

In the affine features phi = [phi_tilde - centre, 1], whatever the bias prior, rows only add to the precision matrix,

    Lambda_bar <- Lambda_bar + s U'U,    W <- W + s Lambda_bar^-1 U'(T - U W),    s = 1: rows come, s = -1: they go,

and with Lambda_bar^-1 = R'R, V = U R', C C' = I + s V V' (n x n) both follow from two products with R:

    R <- R - s V'(I + s V V' + C)^-1 V R,    Lambda_bar^-1 U' = (V R)'(C C')^-1.

R'R is positive definite however R was rounded. Rows can go as long as I - V V' is: then Lambda_bar stays it too.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.features import affine_features
from lastlayer.precision import NormalEquations
from lastlayer.statistics import Statistics
from lastlayer.types import BiasPrior

SPECTRAL = 1e4
"""How far above rounding alpha^-1 must be for Cholesky's factor; below, only the spectrum keeps the null space null."""


@dataclass(frozen=True)
class Recursion:
    """Weights and a root of the posterior's covariance over the noise; leading dimensions are models side by side."""

    R: Float[Tensor, "*b p p"]
    W: Float[Tensor, "*b p q"]
    centre: Float[Tensor, "*b k"]

    @classmethod
    def of(cls, statistics: Statistics, log_alpha: Float[Tensor, "*b"], bias_prior: BiasPrior = "flat") -> "Recursion":
        """Factored anew, O(p^3): where every recursion starts."""
        equations = NormalEquations.of(statistics, bias_prior)
        precision = equations.at(log_alpha)
        eye = torch.eye(equations.n_penalised, dtype=equations.gram.dtype, device=equations.gram.device)
        R, W = precision.factor.whiten(eye).mT.contiguous(), precision.penalised_weights
        coarse = precision.ridge < SPECTRAL * equations.resolution
        if bool(coarse.any()):
            some = NormalEquations.of(statistics[coarse], bias_prior).spectral_at(log_alpha[coarse])
            R[coarse], W[coarse] = some.factor.whiten(eye).mT, some.penalised_weights
        if bias_prior == "shared":
            return cls(R, W, torch.zeros_like(equations.feature_mean))
        # around the mean of the rows the bias is independent of the other weights
        k = equations.n_penalised
        whole = torch.zeros(*R.shape[:-2], k + 1, k + 1, dtype=R.dtype, device=R.device)
        whole[..., :k, :k] = R
        whole[..., k, k] = equations.bias_variance.sqrt()
        return cls(whole, torch.cat([W, equations.target_mean[..., None, :]], dim=-2), equations.feature_mean)

    def rows(self, phi_tilde: Float[Tensor, "*b n k"]) -> Float[Tensor, "*b n p"]:
        """Affine features around the centre."""
        return affine_features(phi_tilde.double() - self.centre[..., None, :])

    def mean(self, Phi: Float[Tensor, "*b n p"]) -> Float[Tensor, "*b n q"]:
        return Phi @ self.W

    def variance_ratio(self, Phi: Float[Tensor, "*b n p"]) -> Float[Tensor, "*b n"]:
        """phi' Lambda_bar^-1 phi. eq:NN_BLL_distribution_c"""
        return (Phi @ self.R.mT).square().sum(-1)

    def added(
        self, Phi: Float[Tensor, "*b n p"], T: Float[Tensor, "n q"], weight: Float[Tensor, " n"] | None = None
    ) -> "Recursion":
        """With more rows."""
        return self._moved(Phi, T, weight, 1.0)[0]

    def removed(
        self, Phi: Float[Tensor, "*b n p"], T: Float[Tensor, "n q"], weight: Float[Tensor, " n"] | None = None
    ) -> tuple["Recursion", Float[Tensor, "*b"]]:
        """Without some rows, and the smallest pivot of I - V V': what a row's leverage leaves of one.

        It is not positive (or nan) where the rest would not be positive definite: such rows cannot have been in.
        """
        less, C = self._moved(Phi, T, weight, -1.0)
        return less, C.diagonal(dim1=-2, dim2=-1).square().amin(-1)

    def _moved(self, Phi: Tensor, T: Tensor, weight: Tensor | None, s: float) -> tuple["Recursion", Tensor]:
        U, E = Phi, T - Phi @ self.W
        if weight is not None:
            root = weight.sqrt()[:, None]
            U, E = root * U, root * E
        V = U @ self.R.mT
        one_row = V.shape[-2] == 1  # then n x n is a number and needs no linear algebra
        eye = 1.0 if one_row else torch.eye(V.shape[-2], dtype=V.dtype, device=V.device)
        times = torch.mul if one_row else torch.matmul
        C = _root(eye + s * (V @ V.mT))
        half = _inverse(C)
        J = times(half, V @ self.R)
        turn = times(_inverse(eye + C).mT, J)  # I + s VV' + C = C (C' + I)
        R = torch.baddbmm(_flat(self.R), _flat(V).mT, _flat(turn), alpha=-s).reshape(self.R.shape)
        return Recursion(R, self.W + s * (J.mT @ times(half, E)), self.centre), C


def _root(A: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    """Lower C with C C' = A, nan where there is none."""
    if A.shape[-1] == 1:
        return A.sqrt()
    C, failed = torch.linalg.cholesky_ex(A)
    return torch.where((failed == 0)[..., None, None], C, torch.nan)


def _inverse(C: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    """Of a lower triangle."""
    if C.shape[-1] == 1:
        return C.reciprocal()
    return torch.linalg.solve_triangular(C, torch.eye(C.shape[-1], dtype=C.dtype, device=C.device), upper=False)


def _flat(A: Tensor) -> Tensor:
    return A if A.dim() == 3 else A.reshape(-1, *A.shape[-2:])
