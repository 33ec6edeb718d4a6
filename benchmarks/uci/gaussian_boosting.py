"""Gradient boosting with a Gaussian for each row: NGBoost and CatBoost."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy import ndarray
from sklearn.tree import DecisionTreeRegressor

from benchmarks.uci.protocol import Gaussians, Predict, Task, hold_out

TREES, SHRINKAGE, PATIENCE = 2_000, 0.05, 50
"""Maximum number of trees, learning rate, and patience of early stopping on held-out rows, in trees."""
STOPPED_BY = 0.1  # share of the rows that stop CatBoost where nothing is tuned
NGBOOST_DEPTHS, CATBOOST_DEPTHS = (3, 5), (4, 6)  # configurations to choose from on held-out rows

HeldOutLosses = Callable[[int, Int[ndarray, " f"], Int[ndarray, " h"]], Sequence[float]]
"""(depth, rows to fit, rows held out) to a loss after each tree."""


def ngboost(X: ndarray, y: ndarray, task: Task) -> Predict:
    from ngboost import NGBRegressor

    def model(depth: int, trees: int) -> Any:
        base = DecisionTreeRegressor(criterion="friedman_mse", max_depth=depth, random_state=task.seed)
        words = {"learning_rate": SHRINKAGE, "random_state": task.seed, "verbose": False}
        return NGBRegressor(Base=base, n_estimators=trees, **words)

    def losses(depth: int, fit: ndarray, held: ndarray) -> Sequence[float]:
        tried = model(depth, TREES)
        tried.fit(X[fit], y[fit], X_val=X[held], Y_val=y[held], early_stopping_rounds=PATIENCE)
        return tried.evals_result["val"]["LOGSCORE"]

    fitted = model(*_chosen(losses, NGBOOST_DEPTHS, len(X), task)).fit(X, y)

    def predict(X: ndarray) -> Gaussians:
        found = fitted.pred_dist(X).params
        return Gaussians(found["loc"][None], np.square(found["scale"])[None])

    return predict


def catboost(X: ndarray, y: ndarray, task: Task) -> Predict:
    def model(depth: int, trees: int, **parameters: Any) -> Any:
        return _catboost(task, learning_rate=SHRINKAGE, depth=depth, iterations=trees, **parameters)

    def losses(depth: int, fit: ndarray, held: ndarray) -> Sequence[float]:
        tried = model(depth, TREES, early_stopping_rounds=PATIENCE, use_best_model=False)
        tried.fit(X[fit], y[fit], eval_set=(X[held], y[held]))
        return tried.get_evals_result()["validation"]["RMSEWithUncertainty"]

    return _gaussians(model(*_chosen(losses, CATBOOST_DEPTHS, len(X), task)).fit(X, y))


def untuned_catboost(X: ndarray, y: ndarray, task: Task) -> Predict:
    return _gaussians(_catboost(task).fit(X, y))


def stopped_catboost(X: ndarray, y: ndarray, task: Task) -> Predict:
    fit, held = hold_out(len(X), task.seed, STOPPED_BY)
    model = _catboost(task, early_stopping_rounds=PATIENCE)
    return _gaussians(model.fit(X[fit], y[fit], eval_set=(X[held], y[held])))


def _catboost(task: Task, **parameters: Any) -> Any:
    from catboost import CatBoostRegressor

    parameters |= {"random_seed": task.seed, "thread_count": torch.get_num_threads()}
    quiet = {"allow_writing_files": False, "verbose": False}
    return CatBoostRegressor(loss_function="RMSEWithUncertainty", **parameters, **quiet)


def _gaussians(fitted: Any) -> Predict:
    def predict(X: ndarray) -> Gaussians:
        mean, var = fitted.predict(X, prediction_type="RMSEWithUncertainty").T
        return Gaussians(mean[None], var[None])

    return predict


def _chosen(losses: HeldOutLosses, depths: Sequence[int], m: int, task: Task) -> tuple[int, int]:
    rows = hold_out(m, task.seed)
    tried = {depth: losses(depth, *rows) for depth in depths}
    best = min(depths, key=lambda depth: min(tried[depth]))
    return best, int(np.argmin(tried[best])) + 1
