"""Scores of predictive distributions, Gaussian or mixture. A mean over points; larger or smaller is better as said."""

from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import ndtr

from lastlayer.errors import InputError
from lastlayer.log_prediction import LogPrediction
from lastlayer.prediction import Prediction

LEVELS = np.linspace(0.05, 0.95, 19)


def log_predictive_density(
    prediction: Prediction, y: ndarray, *, scale: Float[ndarray, " q"] | float = 1.0, per_output: bool = False
) -> Any:
    """Mean log predictive density (LPD), larger is better. eq:Mean_predictive_probability

    Joint over the outputs, or with `per_output` one number each. In the units of y; `scale`, the targets' standard
    deviations, turns it into standardised units: a density of y / scale.
    """
    log_scale = np.log(np.broadcast_to(np.asarray(scale, float), prediction.mean.shape[1:]))
    mean = prediction.log_prob(y, per_output=per_output).mean(0)
    return mean + log_scale if per_output else float(mean + log_scale.sum())


def rmse(prediction: Prediction | ndarray, y: ndarray, *, per_output: bool = False) -> Any:
    """Root of the mean squared error of the mean, over points and outputs or for each output; smaller is better."""
    mean = prediction.mean if isinstance(prediction, Prediction) else np.asarray(prediction, float)
    error = np.square(mean - _like(y, mean))
    return np.sqrt(error.mean(0)) if per_output else float(np.sqrt(error.mean()))


def coverage(prediction: Prediction, y: ndarray, level: float = 0.9, *, per_output: bool = False) -> Any:
    """Share of targets inside their central interval; right if it equals `level`."""
    lower, upper = prediction.interval(level)
    y = _like(y, lower)
    inside = (y >= lower) & (y <= upper)
    return inside.mean(0) if per_output else float(inside.mean())


def calibration_error(prediction: Prediction, y: ndarray, levels: Float[ndarray, " l"] = LEVELS) -> float:
    """Mean distance between the levels of central intervals and the share of targets inside them; 0 is perfect."""
    inside = np.abs(2 * prediction.cdf(y) - 1)[..., None] <= np.asarray(levels)
    return float(np.abs(inside.mean((0, 1)) - levels).mean())


def crps(prediction: Prediction, y: ndarray, *, per_output: bool = False) -> Any:
    """Continuous ranked probability score in the units of y, averaged over points and outputs; smaller is better.

    For a mixture: sum_i w_i E|y - X_i| - 1/2 sum_ij w_i w_j E|X_i - X_j|, with X_i of component i.
    """
    mean, w = prediction.component_mean, prediction.weights[..., None]
    y = _like(y, mean[0])
    if isinstance(prediction, LogPrediction):
        mu, var = prediction.log.component_mean, prediction.log.component_var
        with np.errstate(divide="ignore"):
            to_y = _log_normal_distance(y, np.log(np.maximum(y, 0)), 0.0, mean, mu, var)
        between = lambda i: _log_normal_distance(mean[i], mu[i], var[i], mean, mu, var)
    else:
        var = prediction.component_var
        to_y = _mean_distance(y - mean, np.sqrt(var))
        between = lambda i: _mean_distance(mean[i] - mean, np.sqrt(var[i] + var))
    score = (w * to_y).sum(0)
    for i in range(len(w)):  # a row of pairs at a time keeps memory at c m q
        score = score - 0.5 * w[i] * (w * between(i)).sum(0)
    return score.mean(0) if per_output else float(score.mean())


def _mean_distance(d: ndarray, s: ndarray) -> ndarray:
    """E|d + s N(0, 1)|."""
    r = d / s
    return d * (2 * ndtr(r) - 1) + 2 * s * np.exp(-0.5 * np.square(r)) / np.sqrt(2 * np.pi)


def _log_normal_distance(m1: Any, mu1: Any, v1: Any, m2: Any, mu2: Any, v2: Any) -> ndarray:
    """E|X - Y| of independent log-normals of means m; the first may be a number, with v1 = 0 and mu1 its logarithm."""
    s = np.sqrt(v1 + v2)
    distance: ndarray = m1 * (2 * ndtr((mu1 - mu2 + v1) / s) - 1) + m2 * (1 - 2 * ndtr((mu1 - mu2 - v2) / s))
    return distance


def _like(y: ndarray, mean: ndarray) -> ndarray:
    y = np.asarray(y, dtype=float)
    y = y[:, None] if y.ndim == 1 and mean.shape[-1:] == (1,) and mean.ndim == 2 else y
    if y.shape != mean.shape:
        raise InputError(f"targets have shape {y.shape}, but the prediction has {mean.shape}")
    return y
