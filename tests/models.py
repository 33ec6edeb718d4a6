"""Small fitted models of every kind, for all that must say what `predictive` says: modules, graphs, expressions."""

from functools import cache

import numpy as np
from helpers import sine, small_process
from sklearn.model_selection import GroupKFold

from lastlayer import BLLRegressor, TrainingOptions

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
