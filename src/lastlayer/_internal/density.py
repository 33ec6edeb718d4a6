"""Log densities of Gaussians and masses of intervals, in NumPy."""

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray
from scipy.special import log_ndtr

from lastlayer._internal.numbers import LOG_2PI


def gaussian_log_prob(
    residual: Float[ndarray, "*#b r q"],
    var: Float[ndarray, "*b r q"],
    correlation: Float[ndarray, "*#c q q"] | None = None,
    *,
    missing: Bool[ndarray, "r q"] | None = None,
) -> Float[ndarray, "*b r"]:
    """Compute the log density of N(0, D C D) with D^2 = var, joint over the outputs that are not missing."""
    if correlation is not None and correlation.ndim <= var.ndim:  # one matrix for all points
        correlation = correlation[..., None, :, :]
    if missing is not None and missing.any():
        # a missing target counts as an independent one of density 1, which leaves the marginal of the others
        residual, var = np.where(missing, 0.0, residual), np.where(missing, 0.5 / np.pi, var)
        if correlation is not None:
            both = ~missing[:, :, None] & ~missing[:, None]
            correlation = correlation * both + np.eye(var.shape[-1]) * missing[:, None]
    scaled = residual / np.sqrt(var)
    log_det = np.log(var).sum(-1)
    if correlation is not None:
        L = np.linalg.cholesky(correlation)
        scaled = np.linalg.solve(L, np.broadcast_to(scaled, var.shape)[..., None])[..., 0]
        log_det = log_det + 2 * np.log(np.diagonal(L, axis1=-2, axis2=-1)).sum(-1)
    density: ndarray = -0.5 * (np.square(scaled).sum(-1) + log_det + LOG_2PI * residual.shape[-1])
    return density


def log_interval_mass(lower: ndarray, upper: ndarray) -> ndarray:
    """Log of the probability that a standard normal variable lies between two bounds, also far in a tail."""
    flip = lower > 0
    low, high = np.where(flip, -upper, lower), np.where(flip, -lower, upper)
    top = log_ndtr(high)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(top + np.log(-np.expm1(np.minimum(log_ndtr(low) - top, 0.0))))
