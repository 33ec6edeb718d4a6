"""Rows of lastlayer: the default, and variants without some of its parts."""

from typing import Any

from numpy import ndarray

from benchmarks.uci.protocol import HELD_OUT, Fit, Method, Predict, Task, hold_out
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.settings.parameters import TrainingOptions

BARE: dict[str, Any] = {"n_members": 1, "calibration": None, "hidden_prior": 0.0}
PAPER: dict[str, Any] = {
    **BARE,
    "input_skip": False,
    "max_epochs": 10_000,
    "training": TrainingOptions(
        bias_prior="shared", learning_rate=1e-3, early_stopping=True, patience=1000, validation_fraction=0.2
    ),
}
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "lastlayer": ({}, "defaults"),
    "lastlayer, own network": ({"hidden": None}, "defaults, with the network of BLLRegressor()"),
    "lastlayer, one member": ({"n_members": 1}, "defaults, but a single network"),
    "lastlayer, evidence alone": (
        {**BARE, "training": TrainingOptions(early_stopping=False)},
        "a single network trained by the evidence, without calibration, prior on the hidden weights or early stopping",
    ),
}


def _with(parameters: dict[str, Any]) -> Fit:
    def fit(X: ndarray, y: ndarray, task: Task) -> Predict:
        return _regressor(parameters, task).fit(X, y).predictive

    return fit


def paper_recipe(X: ndarray, y: ndarray, task: Task) -> Predict:
    """Fit by Algorithm 1: train by the evidence on most rows, then tune alpha on the held-out ones."""
    fit, held = hold_out(len(X), task.seed)
    model = _regressor(PAPER, task).fit(X[fit], y[fit])
    return model.tune_alpha(X[held], y[held]).predictive


def _regressor(parameters: dict[str, Any], task: Task) -> BLLRegressor:
    asked = {"hidden": (task.hidden,), **parameters}
    if asked["hidden"] is None:
        del asked["hidden"]
    return BLLRegressor(**asked, device=task.device, random_state=task.seed)


def _config(parameters: dict[str, Any]) -> str:
    """Every parameter of the estimator, so that a changed default is a changed configuration."""
    own = {**parameters, "hidden": "own" if "hidden" in parameters else "task"}
    asked = {**BLLRegressor().get_params(deep=False), **own}
    shown = {name: asked[name] for name in sorted(asked) if name not in ("device", "random_state", "progress")}
    if "hidden" in parameters:
        shown["hidden"] = BLLRegressor().hidden
    return ", ".join(f"{name}={value}" for name, value in shown.items())


OURS = (
    *(
        Method(name, "other" if "hidden" in parameters else "neural", tuning, _with(parameters), _config(parameters))
        for name, (parameters, tuning) in ROWS.items()
    ),
    Method(
        "paper's recipe",
        "neural",
        "evidence with a prior on the bias, Adam at 1e-3 for at most 10,000 epochs with early stopping, no "
        f"inputs in the last layer; then alpha tuned on {HELD_OUT:.0%} held-out training rows (Algorithm 1)",
        paper_recipe,
        _config(PAPER),
    ),
)
