"""Rows of the tables: lastlayer by default and without some of its parts, and the peers with their tuning."""

from typing import Any

from numpy import ndarray

from benchmarks.uci import boosting, gaussian_boosting, gaussian_processes, last_layers, networks
from benchmarks.uci.protocol import HELD_OUT, Fit, Method, Predict, Task, hold_out
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.settings.types import TrainingOptions

BARE: dict[str, Any] = {"n_members": 1, "calibration": None, "hidden_prior": 0.0}
STOPPED: dict[str, Any] = {"early_stopping": True, "patience": 1000, "validation_fraction": 0.2}
PAPER: dict[str, Any] = {**BARE, "input_skip": False, "max_epochs": 10_000}
PAPER["training"] = TrainingOptions(bias_prior="shared", learning_rate=1e-3, **STOPPED)
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
    return lambda X, y, task: _regressor(parameters, task).fit(X, y).predictive


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

_TREES = (
    f"at most {gaussian_boosting.TREES:,} trees, learning rate {gaussian_boosting.SHRINKAGE:g}; held-out likelihood "
    "chooses their number and the depth"
)


def _by(package: str, module: str | None = None) -> dict[str, Any]:
    return {"packages": (package,), "modules": (module or package,)}


PEERS = (
    Method(
        "vbll",
        "neural",
        "variational last layer (dense covariance, prior scale 1, Wishart scale 0.1) as in its regression tutorial: "
        "AdamW, weight decay 1e-4 on the features, gradients clipped at 1; batches of 64 at 1e-2 with a cosine "
        "schedule, at most 600 epochs or, if that is more, 8,000 steps; held-out likelihood chooses the epoch and ReLU "
        "or the tutorial's ELU",
        last_layers.vbll,
        **_by("vbll"),
    ),
    Method(
        "laplace-torch",
        "neural",
        "squared error and weight decay by Adam (1e-2, cosine, batches of 100, at most 800 epochs); held-out error "
        "chooses the epoch, held-out likelihood of the approximation the decay (0, 1e-5, 1e-4, 1e-3) and ReLU or "
        "tanh; last layer, full Hessian; prior precision and noise by 1,000 steps on the marginal likelihood as in "
        "its regression example",
        last_layers.laplace,
        **_by("laplace-torch", "laplace"),
    ),
    Method(
        "deep ensemble",
        "neural",
        "five networks with mean and variance, Gaussian likelihood, Adam (2e-2, cosine, batches of 100, at most "
        "1,200 epochs), no adversarial rows; held-out likelihood of the mixture chooses the epoch and the weight "
        "decay (0, 1e-5, 1e-4, 1e-3)",
        networks.deep_ensemble,
    ),
    Method(
        "MC dropout",
        "neural",
        "dropout at inputs and hidden units, Adam (3e-3, cosine, batches of 100, at most 2,000 epochs), length "
        "scale 1e-2; held-out likelihood chooses the epoch, the rate (0.005, 0.01, 0.05, 0.1) and the noise (25 "
        "values of tau); 200 passes as a mixture",
        networks.mc_dropout,
    ),
    Method(
        "conformal network",
        "neural",
        "a plain network by squared error (Adam 1e-2, cosine, batches of 100, at most 800 epochs; epoch and weight "
        "decay by held-out error); absolute errors of another 20% of the training rows, which it never saw, give "
        "symmetric intervals; no density, so no LPD",
        networks.conformal,
    ),
    Method(
        "Gaussian process",
        "other",
        "GPyTorch, Matern 5/2 with one length scale per input, 200 steps of Adam (0.1, cosine) on the exact marginal "
        "likelihood; above 3,000 rows these on 3,000 random rows and then 5 on all; above 10,000 rows SVGP with 500 "
        "inducing points, 100 epochs of 1,024 rows, Adam 1e-2",
        gaussian_processes.gaussian_process,
        packages=("gpytorch", "linear_operator"),
        modules=("gpytorch",),
    ),
    Method(
        "boosted quantiles",
        "other",
        "scikit-learn's histogram gradient boosting, one model for each of 21 levels and one for the mean, learning "
        "rate 0.05, at most 500 trees; held-out pinball loss chooses the number of trees, the leaves (8, 31) and "
        "the minimum number of rows per leaf (5, 20); no density, so no LPD",
        boosting.boosting,
    ),
    *(
        Method(name, "other", f"{loss}, {_TREES} {depths}", fit, **_by(name.lower()))
        for name, loss, depths, fit in (
            ("NGBoost", "Gaussian", gaussian_boosting.NGBOOST_DEPTHS, gaussian_boosting.ngboost),
            ("CatBoost", "RMSEWithUncertainty", gaussian_boosting.CATBOOST_DEPTHS, gaussian_boosting.catboost),
        )
    ),
)
METHODS: dict[str, Method] = {method.name: method for method in (*OURS, *PEERS)}
