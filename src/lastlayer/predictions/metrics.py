"""Scores of predictive distributions, Gaussian or mixture, averaged over points."""

from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import log_ndtr, ndtr

from lastlayer.errors import InputError
from lastlayer.predictions.lognormal import LARGEST_LOG, LogPrediction
from lastlayer.predictions.prediction import Prediction
from lastlayer.predictions.shapes import align

LEVELS = np.linspace(0.05, 0.95, 19)


def log_predictive_density(
    prediction: Prediction, y: ndarray, *, scale: Float[ndarray, " q"] | float = 1.0, per_output: bool = False
) -> Any:
    """Compute the mean log predictive density (LPD); larger is better. eq:Mean_predictive_probability.

    Parameters
    ----------
    prediction : Prediction
        The predictive distribution of m points and q outputs.
    y : ndarray of shape (m,) or (m, q)
        The targets.
    scale : float or ndarray of shape (q,), default 1.0
        Standard deviations of the targets, to convert the LPD to standardised units: the density of y / scale.
    per_output : bool, default False
        Whether to return one number per output instead of the joint LPD.
    """
    log_scale = np.log(np.broadcast_to(np.asarray(scale, float), (prediction.n_outputs,)))
    mean = prediction.with_output_axis().log_prob(y, per_output=per_output).mean(0)
    return mean + log_scale if per_output else float(mean + log_scale.sum())


def rmse(prediction: Prediction | ndarray, y: ndarray, *, per_output: bool = False) -> Any:
    """Compute the root mean squared error of the predicted mean; smaller is better.

    Parameters
    ----------
    prediction : Prediction or ndarray of shape (m,) or (m, q)
        The predictive distribution, or predicted means.
    y : ndarray of shape (m,) or (m, q)
        The targets.
    per_output : bool, default False
        Whether to return one number per output instead of one over points and outputs.
    """
    if isinstance(prediction, Prediction):
        mean = prediction.with_output_axis().mean
    else:
        mean = np.asarray(prediction, float)
        if mean.ndim not in (1, 2):
            raise InputError(f"the prediction has shape {mean.shape}: give (m,) or (m, q)")
        mean = mean[:, None] if mean.ndim == 1 else mean
    error = np.square(mean - align(y, mean.shape))
    return np.sqrt(error.mean(0)) if per_output else float(np.sqrt(error.mean()))


def coverage(prediction: Prediction, y: ndarray, level: float = 0.9, *, per_output: bool = False) -> Any:
    """Compute the share of targets inside their central interval; it should equal `level`.

    Parameters
    ----------
    prediction : Prediction
        The predictive distribution of m points and q outputs.
    y : ndarray of shape (m,) or (m, q)
        The targets.
    level : float, default 0.9
        Probability of the intervals.
    per_output : bool, default False
        Whether to return one number per output instead of one over points and outputs.
    """
    lower, upper = prediction.with_output_axis().interval(level)
    y = align(y, lower.shape)
    inside = (y >= lower) & (y <= upper)
    return inside.mean(0) if per_output else float(inside.mean())


def interval_score(prediction: Prediction, y: ndarray, level: float = 0.9, *, per_output: bool = False) -> Any:
    """Compute the mean width of the central intervals plus a penalty for each target outside; smaller is better.

    The penalty is 2 / (1 - level) times the distance to the interval, so that the expected score is smallest for the
    true quantiles (Gneiting and Raftery, 2007).

    Parameters
    ----------
    prediction : Prediction
        The predictive distribution of m points and q outputs.
    y : ndarray of shape (m,) or (m, q)
        The targets.
    level : float, default 0.9
        Probability of the intervals.
    per_output : bool, default False
        Whether to return one number per output, (q,), instead of their mean.

    Examples
    --------
    >>> import numpy as np
    >>> p = Prediction.gaussian(
    ...     np.zeros(2), epistemic_var=np.ones(2), noise_var=np.zeros(2), affine_cost=np.ones(2)
    ... )
    >>> round(interval_score(p, np.array([0.0, 2.0])), 3)
    6.841
    """
    lower, upper = prediction.with_output_axis().interval(level)
    y = align(y, lower.shape)
    outside = np.maximum(lower - y, 0) + np.maximum(y - upper, 0)
    score = upper - lower + 2 / (1 - level) * outside
    return score.mean(0) if per_output else float(score.mean())


def calibration_error(prediction: Prediction, y: ndarray, levels: Float[ndarray, " l"] = LEVELS) -> float:
    """Compute the mean distance between levels and the share of targets inside the central intervals; 0 is perfect.

    Parameters
    ----------
    prediction : Prediction
        The predictive distribution of m points and q outputs.
    y : ndarray of shape (m,) or (m, q)
        The targets.
    levels : ndarray of shape (l,), default LEVELS
        Probabilities of the intervals; by default 0.05, 0.1, ..., 0.95.
    """
    inside = np.abs(2 * prediction.with_output_axis().cdf(y) - 1)[..., None] <= np.asarray(levels)
    return float(np.abs(inside.mean((0, 1)) - levels).mean())


def crps(prediction: Prediction, y: ndarray, *, per_output: bool = False) -> Any:
    """Compute the continuous ranked probability score (CRPS), averaged over points; smaller is better.

    For a mixture: sum_i w_i E|y - X_i| - 1/2 sum_ij w_i w_j E|X_i - X_j|, with X_i of component i. For a mixture of
    log-normals the same without their means, which may be astronomical, since abs(a - b) = a + b - 2 min(a, b):
    y - 2 sum_i w_i E min(y, X_i) + sum_ij w_i w_j E min(X_i, X_j).

    Parameters
    ----------
    prediction : Prediction
        The predictive distribution of m points and q outputs.
    y : ndarray of shape (m,) or (m, q)
        The targets.
    per_output : bool, default False
        Whether to return one number per output instead of their mean.
    """
    y, w = prediction.targets(y), prediction.weights[..., None]
    if isinstance(prediction, LogPrediction):
        mu, var = prediction.log.component_mean, prediction.log.component_var
        positive = np.where(y > 0, y, 1.0)
        score = y - 2 * np.where(y > 0, (w * _smaller_log_normal(np.log(positive), 0.0, mu, var)).sum(0), y)
        pairs = lambda i: -2 * _smaller_log_normal(mu[i], var[i], mu, var)
    else:
        mean, var = prediction.component_mean, prediction.component_var
        score = (w * _mean_distance(y - mean, np.sqrt(var))).sum(0)
        pairs = lambda i: _mean_distance(mean[i] - mean, np.sqrt(var[i] + var))
    for i in range(len(w)):  # one row of pairs at a time, to keep memory at c m q
        score = score - 0.5 * w[i] * (w * pairs(i)).sum(0)
    return score.mean(0) if per_output else float(score.mean())


def _mean_distance(d: ndarray, s: ndarray) -> ndarray:
    """E|d + s N(0, 1)|."""
    r = d / s
    return d * (2 * ndtr(r) - 1) + 2 * s * np.exp(-0.5 * np.square(r)) / np.sqrt(2 * np.pi)


def _smaller_log_normal(mu1: Any, v1: Any, mu2: Any, v2: Any) -> ndarray:
    """E min(X, Y) of independent log-normals; X may be a number, with v1 = 0 and mu1 its logarithm."""
    s = np.sqrt(v1 + v2)
    of_X = mu1 + v1 / 2 + log_ndtr((mu2 - mu1 - v1) / s)
    of_Y = mu2 + v2 / 2 + log_ndtr((mu1 - mu2 - v2) / s)
    smaller: ndarray = np.exp(np.minimum(of_X, LARGEST_LOG)) + np.exp(np.minimum(of_Y, LARGEST_LOG))
    return smaller
