"""Last layers whose rows come and go, one at a time: recursive least squares in square-root form, O(p^2) for a row.

In the affine features phi = [phi_tilde - centre, 1], whatever the bias prior, a row of weight w adds to the precision
matrix and nothing else changes,

    Lambda_bar <- Lambda_bar + s w phi'phi,      s = 1: the row comes, s = -1: it goes,

and with Lambda_bar^-1 = R'R, v = phi R', g = v R and c^2 = 1 + s w v v' everything follows from two products with R:

    R <- R - s w / (c (1 + c)) v'g,              W <- W + s w / c^2 g'(t - phi W).

R'R is positive definite however R was rounded. A row can go as long as c^2 > 0: then Lambda_bar stays it too.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.linalg import get_blas_funcs
from torch import Tensor

from lastlayer.precision import NormalEquations
from lastlayer.statistics import Statistics
from lastlayer.types import BiasPrior

ger = get_blas_funcs("ger", dtype=np.float64)
SPECTRAL = 1e4
"""How far above rounding alpha^-1 must be for Cholesky's factor; below, only the spectrum keeps the null space null."""


@dataclass(frozen=True)
class Whitened:
    """Rows as c last layers see them."""

    Phi: Float[ndarray, "c n p"]
    """Affine features around the centre."""
    V: Float[ndarray, "c n p"]
    """Phi R'"""

    @property
    def variance_ratio(self) -> Float[ndarray, "c n"]:
        """phi' Lambda_bar^-1 phi. eq:NN_BLL_distribution_c"""
        return np.einsum("cnp,cnp->cn", self.V, self.V)


@dataclass(frozen=True)
class Recursion:
    """Weights of c last layers, and a root of their posterior's covariance over the noise; `move` changes them."""

    R: Float[ndarray, "c p p"]
    W: Float[ndarray, "c p q"]
    centre: Float[ndarray, "c 1 k"]

    @classmethod
    def of(cls, statistics: Statistics, log_alpha: Float[Tensor, " c"], bias_prior: BiasPrior = "flat") -> "Recursion":
        """Factored anew, O(p^3): where every recursion starts."""
        equations = NormalEquations.of(statistics, bias_prior)
        precision = equations.at(log_alpha)
        eye = torch.eye(equations.n_penalised, dtype=equations.gram.dtype)
        R, W = precision.factor.whiten(eye).mT, precision.penalised_weights
        coarse = precision.ridge < SPECTRAL * equations.resolution
        if bool(coarse.any()):
            some = NormalEquations.of(statistics[coarse], bias_prior).spectral_at(log_alpha[coarse])
            R[coarse], W[coarse] = some.factor.whiten(eye).mT, some.penalised_weights
        centre = equations.feature_mean[:, None]
        if bias_prior == "shared":
            return cls(np.ascontiguousarray(R), np.ascontiguousarray(W), np.zeros(centre.shape))
        # around the mean of the rows the bias is independent of the other weights
        c, k = W.shape[:2]
        whole = np.zeros((c, k + 1, k + 1))
        whole[:, :k, :k] = R
        whole[:, k, k] = equations.bias_variance.sqrt()
        weights = np.concatenate([W, equations.target_mean[:, None]], axis=1)
        return cls(whole, np.ascontiguousarray(weights), np.ascontiguousarray(centre))

    def whitened(self, phi_tilde: Float[ndarray, "c n k"]) -> Whitened:
        """Rows that are asked about, or that are to come or go."""
        Phi = np.empty((len(self.R), phi_tilde.shape[1], self.R.shape[-1]))
        k = phi_tilde.shape[-1]
        np.subtract(phi_tilde, self.centre, out=Phi[..., :k])
        Phi[..., k] = 1.0
        return Whitened(Phi, Phi @ self.R.mT)

    def mean(self, rows: Whitened) -> Float[ndarray, "c n q"]:
        return rows.Phi @ self.W

    def move(
        self,
        row: Whitened,
        t: Float[ndarray, " q"],
        *,
        sign: float = 1.0,
        weight: float = 1.0,
        smallest_pivot: float = 0.0,
    ) -> bool:
        """Take in one row, or with `sign=-1` out; False, and nothing done, if a pivot c^2 would not be above that.

        A pivot is what the leverage of a row that goes leaves of one. Where it is not positive, the rest would not be
        positive definite: such a row cannot have been in. A small one costs digits.
        """
        if sign < 0 and not (1 - weight * row.variance_ratio > smallest_pivot).all():
            return False
        s = sign * weight
        for R, W, phi, v in zip(self.R, self.W, row.Phi[:, 0], row.V[:, 0], strict=True):
            pivot, g, error = 1 + s * v.dot(v), v.dot(R), t - phi.dot(W)
            # transposed they are in the order of Fortran, and BLAS changes them in place
            ger(-s / (pivot + math.sqrt(pivot)), g, v, a=R.T, overwrite_a=True)
            ger(s / pivot, error, g, a=W.T, overwrite_a=True)
        return True
