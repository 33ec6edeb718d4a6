"""How good predictions of a table are, target by target."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer.errors import InputError
from lastlayer.metrics import calibration_error, coverage, crps, log_predictive_density, rmse
from lastlayer.prediction import Prediction


@dataclass(frozen=True)
class TargetScores:
    """Of one target, in its units; LPD and CRPS judge mean and uncertainty together."""

    target: str
    rmse: float
    r2: float
    """Share of the target's variance that the mean explains."""
    lpd: float
    """Mean log predictive density, larger is better."""
    crps: float
    coverage_50: float
    coverage_95: float
    """Share of targets inside their intervals."""
    width_95: float
    """Mean width of these."""


@dataclass(frozen=True)
class Scores:
    """Of all targets."""

    rows: int
    targets: tuple[TargetScores, ...]
    lpd: float
    """Joint over the targets."""
    calibration_error: float
    """Mean distance between the level of intervals and the share of targets inside."""


def score(p: Prediction, y: Float[ndarray, "m q"], names: Sequence[str]) -> Scores:
    if len(y) < 2:
        raise InputError(f"scores need two rows or more, and {len(y)} is there")
    each_rmse, (lower, upper) = rmse(p, y, per_output=True), p.interval(0.95)
    columns = {
        "rmse": each_rmse,
        "r2": 1 - np.square(each_rmse) / np.maximum(y.var(0), np.finfo(float).tiny),
        "lpd": log_predictive_density(p, y, per_output=True),
        "crps": crps(p, y, per_output=True),
        "coverage_50": coverage(p, y, 0.5, per_output=True),
        "coverage_95": ((y >= lower) & (y <= upper)).mean(0),
        "width_95": (upper - lower).mean(0),
    }
    targets = tuple(
        TargetScores(name, **{word: float(values[i]) for word, values in columns.items()})
        for i, name in enumerate(names)
    )
    return Scores(len(y), targets, log_predictive_density(p, y), calibration_error(p, y))
