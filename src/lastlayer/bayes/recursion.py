"""Row-by-row updates of last layers: recursive least squares in square-root form, O(p^2) per row."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.linalg import get_blas_funcs
from torch import Tensor

from lastlayer.bayes.precision import NormalEquations
from lastlayer.bayes.statistics import Statistics
from lastlayer.settings.types import BiasPrior

ger = get_blas_funcs("ger", dtype=np.float64)
SPECTRAL = 1e4
"""Smallest ratio of alpha^-1 to rounding errors for Cholesky's factor; below, the spectrum keeps the null space."""


@dataclass(frozen=True)
class Whitened:
    """Rows as seen by c last layers."""

    Phi: Float[ndarray, "c n p"]
    """Affine features around the centre."""
    V: Float[ndarray, "c n p"]
    """Phi R'."""

    @property
    def variance_ratio(self) -> Float[ndarray, "c n"]:
        """phi' Lambda_bar^-1 phi. eq:NN_BLL_distribution_c."""
        return np.einsum("cnp,cnp->cn", self.V, self.V)


@dataclass(frozen=True)
class Recursion:
    """Weights of c last layers, and a square root of their posterior covariance over the noise; `move` updates them."""

    R: Float[ndarray, "c p p"]
    """Root of Lambda_bar^-1 = R'R."""
    W: Float[ndarray, "c p q"]
    """Weights, with the bias in the last row."""
    centre: Float[ndarray, "c 1 k"]
    """Centre of the linear features."""

    @classmethod
    def of(cls, statistics: Statistics, log_alpha: Float[Tensor, " c"], bias_prior: BiasPrior = "flat") -> "Recursion":
        """Start a recursion from a new factorisation, O(p^3).

        Parameters
        ----------
        statistics, log_alpha : Statistics, Tensor of shape (c,)
            Statistics of the rows, with a leading dimension for the last layers, and log alpha of each.
        bias_prior : "flat" or "shared", default "flat"
            Prior on the bias.
        """
        equations = NormalEquations.of(statistics, bias_prior)
        precision = equations.at(log_alpha)
        eye = torch.eye(equations.n_penalised, dtype=equations.gram.dtype)
        R, W = precision.factor.whiten(eye).mT, precision.penalised_weights
        coarse = precision.ridge < SPECTRAL * equations.resolution
        if bool(coarse.any()):
            some = NormalEquations.of(statistics[coarse], bias_prior).at(log_alpha[coarse], by_spectrum=True)
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
        """Whiten rows, to predict them or to add or remove them.

        Parameters
        ----------
        phi_tilde : ndarray of shape (c, n, k)
            Linear features of the rows in each last layer.
        """
        Phi = np.empty((len(self.R), phi_tilde.shape[1], self.R.shape[-1]))
        k = phi_tilde.shape[-1]
        np.subtract(phi_tilde, self.centre, out=Phi[..., :k])
        Phi[..., k] = 1.0
        return Whitened(Phi, Phi @ self.R.swapaxes(-1, -2))

    def mean(self, rows: Whitened) -> Float[ndarray, "c n q"]:
        """Compute the mean at whitened rows.

        Parameters
        ----------
        rows : Whitened
            The rows.
        """
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
        """Add one row, or remove one with `sign=-1`; False if it was rejected.

        Parameters
        ----------
        row, t : Whitened, ndarray of shape (q,)
            One row, and its targets.
        sign, weight : float, default 1.0
            1 to add the row, -1 to remove it, and its weight.
        smallest_pivot : float, default 0.0
            A row is not removed if its pivot, one minus its leverage, is at most this. A small pivot costs digits; a
            row that was added before has a positive one.
        """
        if sign < 0 and not (1 - weight * row.variance_ratio > smallest_pivot).all():
            return False
        s = sign * weight
        for R, W, phi, v in zip(self.R, self.W, row.Phi[:, 0], row.V[:, 0], strict=True):
            pivot, g, error = 1 + s * v.dot(v), v.dot(R), t - phi.dot(W)
            # transposed, they are in Fortran order, and BLAS changes them in place
            ger(-s / (pivot + math.sqrt(pivot)), g, v, a=R.T, overwrite_a=True)
            ger(s / pivot, error, g, a=W.T, overwrite_a=True)
        return True
