"""Scores of predictive distributions, averaged over points."""

from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer.errors import InputError
from lastlayer.predictions.prediction import Prediction, align

LEVELS = np.linspace(0.05, 0.95, 19)


def log_predictive_density(
    prediction: Prediction, y: ndarray, *, scale: Float[ndarray, " q"] | float = 1.0, per_output: bool = False
) -> Any:
    """Compute the mean log predictive density (LPD); larger is better. eq:Mean_predictive_probability.

    Parameters
    ----------
    prediction, y : Prediction, ndarray of shape (m,) or (m, q)
        The predictive distribution, and the targets.
    scale : float or ndarray of shape (q,), default 1.0
        Standard deviations of the targets, to convert the LPD to standardised units: the density of y / scale.
    per_output : bool, default False
        Whether to return one number per output instead of the joint LPD.
    """
    log_scale = np.log(np.broadcast_to(np.asarray(scale, float), (prediction.n_outputs,)))
    mean = prediction.with_output_axis().log_prob(y, per_output=per_output).mean(0)
    return mean + log_scale if per_output else float(mean + log_scale.sum())


def rmse(prediction: Prediction | ndarray, y: ndarray, *, per_output: bool = False) -> Any:
    """Compute the root mean squared error of `Prediction.point`; smaller is better.

    Parameters
    ----------
    prediction, y : Prediction or ndarray, ndarray of shape (m,) or (m, q)
        The predictive distribution, or predicted numbers, and the targets.
    per_output : bool, default False
        Whether to return one number per output instead of one over points and outputs.
    """
    if isinstance(prediction, Prediction):
        mean = prediction.with_output_axis().point
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
    prediction, y : Prediction, ndarray of shape (m,) or (m, q)
        The predictive distribution, and the targets.
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
    """Compute the mean width of central intervals plus 2 / (1 - level) times the distance of targets outside.

    Parameters
    ----------
    prediction, y : Prediction, ndarray of shape (m,) or (m, q)
        The predictive distribution, and the targets.
    level : float, default 0.9
        Probability of the intervals.
    per_output : bool, default False
        Whether to return one number per output instead of their mean.
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
    prediction, y : Prediction, ndarray of shape (m,) or (m, q)
        The predictive distribution, and the targets.
    levels : ndarray of shape (l,), default LEVELS
        Probabilities of the intervals: 0.05, 0.1, ..., 0.95.
    """
    p, levels = prediction.with_output_axis(), np.asarray(levels)
    below = p.cdf(y)[..., None]
    inside = np.abs(2 * below - 1) <= levels
    if p.discrete:  # the share of the probability of the value
        mass = np.exp(p.log_prob(y, per_output=True))[..., None]
        common = np.minimum(below, (1 + levels) / 2) - np.maximum(below - mass, (1 - levels) / 2)
        inside = np.maximum(common, 0.0) / np.maximum(mass, np.finfo(float).tiny)
    return float(np.abs(inside.mean((0, 1)) - levels).mean())


def crps(prediction: Prediction, y: ndarray, *, per_output: bool = False) -> Any:
    """Compute the continuous ranked probability score (CRPS), averaged over points; smaller is better.

    Parameters
    ----------
    prediction, y : Prediction, ndarray of shape (m,) or (m, q)
        The predictive distribution, and the targets.
    per_output : bool, default False
        Whether to return one number per output instead of their mean.
    """
    score = prediction.with_output_axis().crps(y)
    return score.mean(0) if per_output else float(score.mean())
