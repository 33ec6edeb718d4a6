"""Scores of predictions of a table against the true values."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer.errors import InputError
from lastlayer.predictions.metrics import calibration_error, coverage, crps, log_predictive_density, rmse
from lastlayer.predictions.prediction import Prediction
from lastlayer.tables.numbers import percent, written


@dataclass(frozen=True)
class TargetScores:
    """Scores of one target, in its units; LPD and CRPS judge mean and uncertainty together."""

    target: str
    rmse: float
    r2: float
    """Share of the variance of the target that the mean explains."""
    lpd: float
    crps: float
    coverage_50: float
    coverage_95: float
    """Share of true values inside their intervals, like `coverage_50`."""
    width_95: float


@dataclass(frozen=True)
class Scores:
    """Scores of all targets."""

    rows: int
    """Number of rows."""
    targets: tuple[TargetScores, ...]
    """Scores of each target."""
    lpd: float
    """Mean log predictive density, joint over the targets."""
    calibration_error: float
    """Mean absolute difference between the level of intervals and the share of targets inside."""

    def table(self) -> list[list[str]]:
        """A header and one line per target."""
        head = ["target", "RMSE", "R2", "LPD", "CRPS", "in 50%", "in 95%", "width of 95%"]
        words = ("rmse", "r2", "lpd", "crps", "coverage_50", "coverage_95", "width_95")
        shown = lambda s, word: (percent if word.startswith("coverage") else written)(getattr(s, word))
        return [head, *([s.target, *(shown(s, word) for word in words)] for s in self.targets)]


def score(p: Prediction, y: Float[ndarray, "m q"], names: Sequence[str]) -> Scores:
    """Score predictions against the true values of all targets."""
    if len(y) < 2:
        raise InputError(f"scores need at least two rows, but the table has {len(y)}")
    p = p.with_output_axis()
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
    of_target = lambda i: {word: float(values[i]) for word, values in columns.items()}
    targets = tuple(TargetScores(name, **of_target(i)) for i, name in enumerate(names))
    return Scores(len(y), targets, log_predictive_density(p, y), calibration_error(p, y))
