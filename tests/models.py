"""Small fitted models of every kind, for all that must say what `predictive` says: modules, graphs, expressions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from helpers import sine, small_process
from numpy import ndarray
from sklearn.model_selection import GroupKFold

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.data.observe import Derivative
from lastlayer.data.validation import validated
from lastlayer.settings.types import Given

SHARED = TrainingOptions(bias_prior="shared")
FAST = {"preset": "evidence", "max_epochs": 20, "random_state": 0}
SMALL = {"hidden": (6, 5), "max_epochs": 40, "random_state": 0, "hidden_prior": 0.3}


def data(q=2, d=3, m=60):
    X, y = sine(m, q=q, d=d)
    return X * np.array([1.0, 30.0, 0.1])[:d] + 5, y * 100


def holes(y, share=0.4):
    """Some targets missing, but not all of a row."""
    missing = np.random.default_rng(5).random(y.shape) < share
    missing[missing.all(1), 0] = False
    return np.where(missing, np.nan, y)


def far(X, n=40):
    """Points inside and far outside the data."""
    rng = np.random.default_rng(3)
    return X.mean(0) + rng.standard_normal((n, X.shape[1])) * X.std(0) * rng.choice([1, 5], (n, 1))


@cache
def fitted(name):
    with small_process():
        return MODELS[name](*data())


MODELS = {
    "single": lambda X, y: BLLRegressor(**FAST).fit(X, y),
    "shared prior, full noise": lambda X, y: BLLRegressor(**FAST, noise="full", training=SHARED).fit(X, y),
    "alpha tuned": lambda X, y: BLLRegressor(**FAST).fit(X, y).tune_alpha(far(X, 60), y),
    "no hidden layer": lambda X, y: BLLRegressor(hidden=(), **FAST).fit(X, y),
    "mixture": lambda X, y: BLLRegressor(**SMALL, n_members=3).fit(X, y),
    "mixture, full noise, alpha tuned": lambda X, y: (
        BLLRegressor(**SMALL, n_members=3, noise="full").fit(X, y).tune_alpha(far(X, 60), y)
    ),
    "mixture, noise by input": lambda X, y: BLLRegressor(**SMALL, n_members=3, noise="input").fit(X, y),
    "mixture of families": lambda X, y: BLLRegressor((4,), preset="fast", max_epochs=15, random_state=0).fit(X, y),
    "mixture, uncalibrated": lambda X, y: BLLRegressor(**SMALL, n_members=3, calibration=None).fit(X, y),
    "partly missing targets": lambda X, y: BLLRegressor((4,), preset="fast", max_epochs=15, random_state=0).fit(
        X, holes(y)
    ),
    "partly missing targets, shared prior, alpha tuned": lambda X, y: (
        BLLRegressor(**FAST, training=SHARED).fit(X, holes(y)).tune_alpha(far(X, 60), holes(y))
    ),
    "single, calibrated by groups": lambda X, y: BLLRegressor(**SMALL, n_members=1, calibration=GroupKFold(3)).fit(
        X, y, groups=np.arange(len(X)) // 10
    ),
}


@dataclass(frozen=True)
class Case:
    """Rows of a kind, as `fit` takes them."""

    X: ndarray
    y: ndarray
    by_row: dict[str, ndarray]
    """Arguments with one entry per row."""
    observations: tuple[Any, ...] = ()

    def take(self, rows: ndarray) -> "Case":
        of_rows = {name: values[rows] for name, values in self.by_row.items()}
        return replace(self, X=self.X[rows], y=self.y[rows], by_row=of_rows)

    def weighted(self, weight: ndarray) -> "Case":
        """With these weights, times those that the rows have."""
        weight = weight * self.by_row.get("sample_weight", 1.0)
        return replace(self, by_row=self.by_row | {"sample_weight": weight})

    def given(self) -> Given:
        words = {**self.by_row, "observations": self.observations}
        return validated(BLLRegressor(), self.X, self.y, words.pop("sample_weight", None), partly=True, **words)

    def fitted(self, **parameters: Any) -> BLLRegressor:
        return BLLRegressor(**parameters).fit(self.X, self.y, observations=self.observations, **self.by_row)


def _case(m: int, *, gaps: bool = False, observations: tuple[Any, ...] = (), **by_row: ndarray) -> Case:
    X, y = sine(m, q=2, d=2)
    return Case(X, holes(y, 0.2) if gaps else y, by_row, observations)


_SLOPES = Derivative(0).at([[0.0, 0.0], [1.0, 1.0]]).observed([1.0, 0.5], noise_std=0.1)
CASES: dict[str, Callable[[int], Case]] = {
    "complete": _case,
    "weights": lambda m: _case(m, sample_weight=1.0 + np.arange(m) % 3),
    "missing": lambda m: _case(m, gaps=True),
    "known noise": lambda m: _case(m, noise_std=np.linspace(0.05, 0.4, 2 * m).reshape(m, 2)),
    "missing and known noise": lambda m: _case(m, gaps=True, noise_std=np.linspace(0.05, 0.4, m)),
    "groups": lambda m: _case(m, groups=np.arange(m) // 3),
    "functionals": lambda m: _case(m, observations=(_SLOPES,)),
}
"""Rows of every kind, by their number."""
