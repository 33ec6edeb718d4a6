"""Quantiles by gradient boosting: one model per level, with scikit-learn's histogram trees."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from sklearn.ensemble import HistGradientBoostingRegressor

from benchmarks.uci.protocol import Predict, Quantiles, Task, hold_out, pinball

LEVELS = np.array([0.025, *np.linspace(0.05, 0.95, 19), 0.975])
TRIED_LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)  # levels by which the configuration is chosen
TREES = 500
SHRINKAGE = 0.05
SHAPES = ((8, 5), (8, 20), (31, 5), (31, 20))  # configurations: leaves per tree and minimum number of rows per leaf


@dataclass(frozen=True)
class _Part:
    X: ndarray
    y: ndarray


def boosting(X: ndarray, y: ndarray, task: Task) -> Predict:
    """Choose shape and number of trees on held-out rows, then fit every level to all rows."""
    fit, held = (_Part(X[rows], y[rows]) for rows in hold_out(len(X), task.seed))
    searches = [[_staged(fit, held, shape, task.seed, level) for level in (*TRIED_LEVELS, None)] for shape in SHAPES]
    chosen = int(np.argmin([sum(loss for loss, _ in losses[:-1]) for losses in searches]))
    counts = [count for _, count in searches[chosen][:-1]]
    trees = np.interp(LEVELS, TRIED_LEVELS, counts).round().astype(int)
    models = [
        _model(SHAPES[chosen], int(n), task.seed, float(level)).fit(X, y)
        for n, level in zip(trees, LEVELS, strict=True)
    ]
    best = int(np.argmin([losses[-1][0] for losses in searches]))
    mean = _model(SHAPES[best], searches[best][-1][1], task.seed, None).fit(X, y)

    def predict(X: ndarray) -> Quantiles:
        values = np.sort([model.predict(X) for model in models], axis=0)  # quantiles must not cross
        return Quantiles(LEVELS, values, np.asarray(mean.predict(X), float))

    return predict


def _model(shape: tuple[int, int], trees: int, seed: int, level: float | None) -> Any:
    leaves, rows = shape
    loss = {"loss": "squared_error"} if level is None else {"loss": "quantile", "quantile": level}
    return HistGradientBoostingRegressor(
        **loss,
        max_iter=trees,
        learning_rate=SHRINKAGE,
        max_leaf_nodes=leaves,
        min_samples_leaf=rows,
        early_stopping=False,
        random_state=seed,
    )


def _staged(fit: _Part, held: _Part, shape: tuple[int, int], seed: int, level: float | None) -> tuple[float, int]:
    """Lowest held-out loss and the corresponding number of trees."""
    model = _model(shape, TREES, seed, level).fit(fit.X, fit.y)
    losses = [_loss(np.asarray(p, float), held.y, level) for p in model.staged_predict(held.X)]
    best = int(np.argmin(losses))
    return losses[best], best + 1


def _loss(prediction: Float[ndarray, " m"], y: Float[ndarray, " m"], level: float | None) -> float:
    return float(np.square(prediction - y).mean()) if level is None else pinball(prediction, y, level)
