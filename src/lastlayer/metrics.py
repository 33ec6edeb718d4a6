"""Scores of predictive distributions, Gaussian or mixture. A mean over points; larger or smaller is better as said."""

from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import ndtr

from lastlayer.errors import InputError
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

    For a mixture: sum_i w_i A(y - mu_i, s_i) - 1/2 sum_ij w_i w_j A(mu_i - mu_j, sqrt(s_i^2 + s_j^2)), with
    A(d, s) = E|d + s N(0, 1)|.
    """
    mean, var, w = prediction.component_mean, prediction.component_var, prediction.weights[..., None]
    score = (w * _mean_distance(_like(y, mean[0]) - mean, np.sqrt(var))).sum(0)
    for i in range(len(w)):  # a row of pairs at a time keeps memory at c m q
        pair = _mean_distance(mean[i] - mean, np.sqrt(var[i] + var))
        score = score - 0.5 * w[i] * (w * pair).sum(0)
    return score.mean(0) if per_output else float(score.mean())


def _mean_distance(d: ndarray, s: ndarray) -> ndarray:
    """E|d + s N(0, 1)|."""
    r = d / s
    return d * (2 * ndtr(r) - 1) + 2 * s * np.exp(-0.5 * np.square(r)) / np.sqrt(2 * np.pi)


def _like(y: ndarray, mean: ndarray) -> ndarray:
    y = np.asarray(y, dtype=float)
    y = y[:, None] if y.ndim == 1 and mean.shape[-1:] == (1,) and mean.ndim == 2 else y
    if y.shape != mean.shape:
        raise InputError(f"targets have shape {y.shape}, but the prediction has {mean.shape}")
    return y
