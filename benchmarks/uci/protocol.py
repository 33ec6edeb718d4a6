"""Protocol of the benchmark: inputs and outputs of every method, and scores."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from sklearn.metrics import mean_pinball_loss

from lastlayer import metrics
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.predictions.prediction import Prediction

HELD_OUT = 0.2  # share of the training rows that a method may hold out to choose an epoch or a configuration

FULL_BUDGET_ROWS = 2_000
"""Above this many training rows the maximum number of epochs falls, so that the number of steps stays constant."""

RULES = (
    "One hidden layer of 50 units (100 for protein) for every neural method, except where the name says otherwise.",
    "Inputs and targets are standardised with the training rows; scores are in the units of the targets.",
    f"Tuning uses training rows only: a random {HELD_OUT:.0%} of them are held out to choose the epoch and one of a "
    "handful of configurations, by the method's own score; then the method is refitted to all training rows.",
    f"Mini-batch methods: above {FULL_BUDGET_ROWS:,} training rows the maximum number of epochs falls in proportion.",
    "One seed per split, the same for all methods; seconds include the tuning.",
)


@dataclass(frozen=True)
class Task:
    """One split of one data set, to be fitted by a method."""

    data: str
    kind: str
    split: int
    hidden: int = 50
    device: str = "cpu"

    @property
    def seed(self) -> int:
        return self.split + (1000 if self.kind == "outer" else 0)


@dataclass(frozen=True)
class Quantiles:
    """A prediction by quantiles and a mean: linear between levels, with the mass beyond placed at the outermost."""

    levels: Float[ndarray, " l"]
    values: Float[ndarray, "l m"]
    mean: Float[ndarray, " m"]

    def at(self, level: float) -> Float[ndarray, " m"]:
        right = int(np.searchsorted(self.levels, level).clip(1, len(self.levels) - 1))
        lo, hi = self.levels[right - 1], self.levels[right]
        share = float(np.clip((level - lo) / (hi - lo), 0, 1))
        value: ndarray = (1 - share) * self.values[right - 1] + share * self.values[right]
        return value


@dataclass(frozen=True)
class Gaussians:
    """A mixture of c Gaussians with equal weights at every point."""

    mean: Float[ndarray, "c m"]
    var: Float[ndarray, "c m"]

    def prediction(self) -> MixturePrediction:
        """A `Prediction` with all variance as noise, since only the sum is scored."""
        zero = np.zeros(self.mean.shape[1])
        one = partial(MixturePrediction.gaussian, epistemic_var=zero, affine_cost=zero)
        return MixturePrediction.mixture([one(m, noise_var=v) for m, v in zip(self.mean, self.var, strict=True)])


@dataclass(frozen=True)
class Scores:
    """Scores of a prediction. LPD: larger is better, None without a density; the others are as in `metrics`."""

    lpd: float | None
    rmse: float
    crps: float
    coverage_90: float
    calibration_error: float


@dataclass(frozen=True)
class Result:
    data: str
    kind: str
    split: int
    method: str
    config: str
    scores: Scores
    cpu_seconds: float  # processor seconds, tuning included
    seconds: float
    device: str
    versions: dict[str, str]


Predicted = Prediction | Gaussians | Quantiles
Predict = Callable[[ndarray], Predicted]  # a fitted method: predicts new rows
Fit = Callable[[ndarray, ndarray, Task], Predict]


@dataclass(frozen=True)
class Method:
    name: str
    family: str  # "neural": a network of the size set by the protocol; "other": anything else
    tuning: str  # description of the tuning, for the notes of the tables
    fit: Fit = field(repr=False)
    config: str = "1"  # version of the configuration; results of other versions are not reused
    packages: tuple[str, ...] = ()  # distributions needed in addition to those of lastlayer
    modules: tuple[str, ...] = ()  # import names of the same packages

    def missing(self) -> list[str]:
        return [module for module in self.modules if find_spec(module) is None]


def score(prediction: Predicted, y: Float[ndarray, " m"]) -> Scores:
    """Compute all scores of a prediction, in the units of y; raises an error if they are not finite."""
    if isinstance(prediction, Gaussians):
        prediction = prediction.prediction()
    scores = _quantile_scores(prediction, y) if isinstance(prediction, Quantiles) else _density_scores(prediction, y)
    if not np.isfinite([scores.rmse, scores.crps, 0.0 if scores.lpd is None else scores.lpd]).all():
        raise ArithmeticError(f"its prediction has no finite scores: {scores}")
    return scores


def _quantile_scores(prediction: Quantiles, y: Float[ndarray, " m"]) -> Scores:
    errors = [abs(_inside(prediction, y, level).mean() - level) for level in metrics.LEVELS]
    inside, rmse = float(_inside(prediction, y, 0.9).mean()), metrics.rmse(prediction.mean, y)
    return Scores(None, rmse, quantile_crps(prediction, y), inside, float(np.mean(errors)))


def _density_scores(p: Prediction, y: Float[ndarray, " m"]) -> Scores:
    lpd, rmse, crps = metrics.log_predictive_density(p, y), metrics.rmse(p, y), metrics.crps(p, y)
    return Scores(lpd, rmse, crps, metrics.coverage(p, y, 0.9), metrics.calibration_error(p, y))


def quantile_crps(prediction: Quantiles, y: Float[ndarray, " m"], n: int = 400) -> float:
    """Compute the CRPS as twice the pinball loss, averaged over the midpoints of n parts of (0, 1)."""
    levels = (np.arange(n) + 0.5) / n
    return float(2 * np.mean([mean_pinball_loss(y, prediction.at(level), alpha=level) for level in levels]))


def _inside(prediction: Quantiles, y: ndarray, level: float) -> ndarray:
    inside: ndarray = (y >= prediction.at((1 - level) / 2)) & (y <= prediction.at((1 + level) / 2))
    return inside


def most_epochs(epochs: int, m: int) -> int:
    return max(1, round(epochs * min(1.0, FULL_BUDGET_ROWS / m)))


def hold_out(m: int, seed: int, share: float = HELD_OUT) -> tuple[Int[ndarray, " f"], Int[ndarray, " h"]]:
    order = np.random.default_rng(seed).permutation(m)
    n = max(1, round(share * m))
    return order[n:], order[:n]
