"""Log predictive density of points that a posterior was computed without, as a function of alpha."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer._internal.density import gaussian_log_prob
from lastlayer.bayes.posterior import Posterior

LPD = Callable[[Float[ndarray, " a"]], Float[ndarray, " a"]]
"""Function that maps several log alphas to the mean log predictive density of held-out points."""


def held_out_lpd(
    posterior: Posterior, Phi: Float[Tensor, "r p"], T: Float[Tensor, "r q"], log_alpha: float | None = None
) -> float:
    """Compute the mean log density of held-out points, joint over the outputs. eq:Mean_predictive_probability.

    Parameters
    ----------
    posterior : Posterior
        A posterior that was computed without these points.
    Phi, T : Tensor of shape (r, p), Tensor of shape (r, q)
        Affine features of the points, and their targets; NaN where missing.
    log_alpha : float, default None
        Another log alpha for the variance; the mean does not depend on it. None: the posterior's own.
    """
    with torch.no_grad():
        own = float(posterior.log_alpha) if log_alpha is None else log_alpha
        return float(_lpd(posterior, Phi, T)(np.array([own]))[0])


def _lpd(posterior: Posterior, Phi: Tensor, T: Tensor) -> LPD:
    """LPD of validation points as a function of log alpha; terms that do not depend on it are computed once."""
    residual = (T.to(posterior.Sigma_E) - posterior.mean(Phi)).cpu().numpy()
    noise = posterior.Sigma_E.cpu().numpy()
    noise_var = np.diagonal(noise)
    std = np.sqrt(noise_var)
    correlation = noise / np.outer(std, std)  # a product of variances could underflow
    missing = T.isnan().cpu().numpy()

    def lpd(log_alphas: Float[ndarray, " a"]) -> Float[ndarray, " a"]:
        ratios = posterior.variance_ratios(Phi, torch.from_numpy(log_alphas).to(posterior.Sigma_E)).cpu().numpy()
        var = (1 + (ratios if ratios.ndim > 2 else ratios[..., None])) * noise_var
        return gaussian_log_prob(residual, var, correlation, missing=missing).mean(-1)

    return lpd


class HeldOut(NamedTuple):
    """A posterior, and points that it was computed without."""

    posterior: Posterior
    Phi: Float[Tensor, "r p"]
    T: Float[Tensor, "r q"]
