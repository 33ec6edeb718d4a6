"""Quantiles by gradient boosting: one of scikit-learn's models per level, or one of chimeraboost for all."""

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.metrics import mean_pinball_loss, mean_squared_error

from benchmarks.uci.protocol import Predict, Quantiles, Task, hold_out

LEVELS = np.array([0.025, *np.linspace(0.05, 0.95, 19), 0.975])
TRIED_LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)  # levels by which the configuration is chosen
TREES = 500
SHRINKAGE = 0.05
SHAPES = ((8, 5), (8, 20), (31, 5), (31, 20))  # configurations: leaves per tree and minimum number of rows per leaf


_Part = tuple[ndarray, ndarray]


def boosting(X: ndarray, y: ndarray, task: Task) -> Predict:
    fit, held = ((X[rows], y[rows]) for rows in hold_out(len(X), task.seed))
    searches = [[_staged(fit, held, shape, task.seed, level) for level in (*TRIED_LEVELS, None)] for shape in SHAPES]
    chosen = int(np.argmin([sum(loss for loss, _ in losses[:-1]) for losses in searches]))
    counts = [count for _, count in searches[chosen][:-1]]
    trees = np.interp(LEVELS, TRIED_LEVELS, counts).round().astype(int)
    each = zip(trees.tolist(), LEVELS.tolist(), strict=True)
    models = [_model(SHAPES[chosen], n, task.seed, level).fit(X, y) for n, level in each]
    best = int(np.argmin([losses[-1][0] for losses in searches]))
    mean = _model(SHAPES[best], searches[best][-1][1], task.seed, None).fit(X, y)

    def predict(X: ndarray) -> Quantiles:
        values = np.sort([model.predict(X) for model in models], axis=0)  # quantiles must not cross
        return Quantiles(LEVELS, values, np.asarray(mean.predict(X), float))

    return predict


def chimeraboost(X: ndarray, y: ndarray, task: Task) -> Predict:
    from chimeraboost import ChimeraBoostQuantileRegressor

    model = ChimeraBoostQuantileRegressor(random_state=task.seed, thread_count=torch.get_num_threads()).fit(X, y)
    return lambda X: Quantiles(model.quantiles_, model.predict(X).T, model.predict(X, kind="mean"))


def _model(shape: tuple[int, int], trees: int, seed: int, level: float | None) -> Any:
    loss = {"loss": "squared_error"} if level is None else {"loss": "quantile", "quantile": level}
    size = {"max_iter": trees, "max_leaf_nodes": shape[0], "min_samples_leaf": shape[1]}
    words = {"learning_rate": SHRINKAGE, "early_stopping": False, "random_state": seed}
    return HistGradientBoostingRegressor(**loss, **size, **words)


def _staged(fit: _Part, held: _Part, shape: tuple[int, int], seed: int, level: float | None) -> tuple[float, int]:
    """Lowest held-out loss and the corresponding number of trees."""
    model = _model(shape, TREES, seed, level).fit(*fit)
    loss = mean_squared_error if level is None else partial(mean_pinball_loss, alpha=level)
    losses = [loss(held[1], prediction) for prediction in model.staged_predict(held[0])]
    best = int(np.argmin(losses))
    return losses[best], best + 1
