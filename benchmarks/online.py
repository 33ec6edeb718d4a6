"""Cost and accuracy of online learning: microseconds per row and errors, measured in one run.

Rows go one by one through `OnlineModel`, `BLLRegressor.update`, a last layer recomputed from all rows so far, river's
Bayesian linear regression on the same features, and scikit-learn's incremental regressors, for a constant function and
for one that drifts. They are only learned, only predicted, or predicted first and then learned. Every method starts
from the same fitted rows; step sizes of the linear ones are chosen beforehand on separate rows.
"""

import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from river.linear_model import BayesianLinearRegression
from scipy.linalg import get_blas_funcs
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import SGDRegressor
from sklearn.neural_network import MLPRegressor

from benchmarks.runner import options_of
from benchmarks.timing import describe_machine
from lastlayer import BLLRegressor
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Statistics
from lastlayer.integrations.river import RiverRegressor
from lastlayer.online import DriftMonitor, ExponentialForgetting, OnlineModel, SlidingWindow

FITTED, TUNING, D, NOISE = 1_000, 500, 8, 0.1
STEPS = (1e-4, 1e-3, 1e-2, 1e-1)
Form = Callable[[ndarray, ndarray], tuple[list[Any], list[Any]]]
PASSES = ("learn", "predict", "both")


def rows(m: int, seed: int, creep: float) -> tuple[ndarray, ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(m, D))
    moved = creep * np.arange(m) / m
    y = (1 + moved) * (np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.5 * X[:, 3]) + moved
    return X, y + NOISE * rng.standard_normal(m)


@dataclass(frozen=True)
class Learner:
    name: str
    state: Any  # initial state, copied before each stream
    predict: Callable[[Any, Any], Any]  # (state, row) -> mean, or mean and standard deviation
    learn: str  # method of the state that learns a row and its target
    form: Form  # converts rows and targets to the method's format; not timed


def as_arrays(X: ndarray, y: ndarray) -> tuple[list[Any], list[Any]]:
    return [X[i : i + 1] for i in range(len(X))], [y[i : i + 1] for i in range(len(X))]


def as_dicts(X: ndarray, y: ndarray, names: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
    return [dict(zip(names, row, strict=True)) for row in X.tolist()], y.tolist()


def run(learner: Learner, X: ndarray, y: ndarray, passes: tuple[str, ...] = PASSES) -> dict[str, float]:
    """Run one stream per pass: microseconds per row in processor time, factorisations included, and the RMSE."""
    form, taken, said = learner.form(X, y), dict[str, float](), list[Any]()
    for way in passes:
        state = copy.deepcopy(learner.state)
        predict, learn = learner.predict, getattr(state, learner.learn)
        start = time.process_time()
        for row, target in zip(*form, strict=True):
            if way != "learn":
                said.append(predict(state, row))
            if way != "predict":
                learn(row, target)
        taken[way] = 1e6 * (time.process_time() - start) / len(X)
    means = np.array([np.ravel(one[0] if isinstance(one, tuple) else one)[0] for one in said[-len(X) :]])
    return taken | {"rmse": float(np.sqrt(np.mean(np.square(means - y))))}


def floor(p: int) -> float:
    """Microseconds of R <- R - v'g by BLAS alone."""
    ger, rng = get_blas_funcs("ger", dtype=np.float64), np.random.default_rng(0)
    R, v, g = rng.normal(size=(p, p)), rng.normal(size=p), rng.normal(size=p)
    n = 20_000
    start = time.process_time()
    for _ in range(n):
        ger(-1e-9, g, v, a=R.T, overwrite_a=True)
    return 1e6 * (time.process_time() - start) / n


class Anew:
    """Recomputes statistics and factorisation from all rows so far; features are kept."""

    def __init__(self, model: BLLRegressor, X: ndarray, y: ndarray) -> None:
        self.fitted, self.posterior = model.fitted_, model.members_[0].posterior
        self.Phi, self.T = [self.features(X)], [self.fitted.targets.forward(torch.from_numpy(y)[:, None])]

    def features(self, Z: ndarray) -> torch.Tensor:
        return self.fitted.features(0, self.fitted.standardized(Z))

    def learn(self, row: ndarray, target: ndarray) -> None:
        self.Phi.append(self.features(row))
        self.T.append(self.fitted.targets.forward(torch.from_numpy(target)[:, None]))
        statistics = Statistics.from_features(torch.cat(self.Phi), torch.cat(self.T))
        old = self.posterior
        self.posterior = Posterior(statistics, old.log_alpha, old.noise_cov, checked=False)
        _ = self.posterior.precision.weights

    def predict(self, row: ndarray) -> ndarray:
        targets = self.fitted.targets
        mean: torch.Tensor = self.posterior.mean(self.features(row)) * targets.scale + targets.mean
        return mean[:, 0].numpy()


def ours(name: str, model: Any) -> Learner:
    return Learner(name, model, lambda state, row: state.predict(row, return_std=True), "update", as_arrays)


def theirs(name: str, way: Any) -> Learner:
    return Learner(name, way, lambda state, row: state.predict(row), "learn", as_arrays)


def by_river(name: str, model: Any, form: Form) -> Learner:
    def predict(state: Any, row: dict[str, float]) -> tuple[float, float]:
        gaussian = state.predict_one(row, with_dist=True)
        return gaussian.mu, gaussian.sigma

    return Learner(name, model, predict, "learn_one", form)


def bayesian_linear(model: BLLRegressor, X: ndarray, y: ndarray) -> Learner:
    """Make river's regression on the network's features and a constant, computed outside the timing; noise is known."""
    fitted = model.fitted_
    features = lambda Z: fitted.features(0, fitted.standardized(Z)).numpy()
    names = tuple(f"phi{i}" for i in range(features(X[:1]).shape[1]))
    form = lambda Z, t: as_dicts(features(Z), t, names)
    regression = BayesianLinearRegression(alpha=1, beta=float(fitted.noise_std[0, 0]) ** -2)
    for row, target in zip(*form(X, y), strict=True):
        regression.learn_one(row, target)
    return by_river("river's BayesianLinearRegression, the network's features", regression, form)


class Scaled:
    """A scikit-learn regressor on standardised inputs, or features, and targets."""

    def __init__(self, regressor: Any, features: Callable[[ndarray], ndarray], X: ndarray, y: ndarray) -> None:
        self.features, self.regressor, Z = features, regressor, features(X)
        self.mean, self.scale, self.centre, self.unit = Z.mean(0), Z.std(0) + 1e-12, y.mean(), y.std()
        regressor.fit(*self.scaled(X, y))

    def scaled(self, X: ndarray, y: Any = 0.0) -> tuple[ndarray, ndarray]:
        return (self.features(X) - self.mean) / self.scale, (y - self.centre) / self.unit

    def predict(self, X: ndarray) -> ndarray:
        return self.regressor.predict(self.scaled(X)[0]) * self.unit + self.centre

    def learn(self, X: ndarray, y: ndarray) -> None:
        self.regressor.partial_fit(*self.scaled(X, y))


def incremental(X: ndarray, y: ndarray, creep: float, model: BLLRegressor) -> list[Learner]:
    """Make scikit-learn's regressors, each with the best step size on another stream of the same kind."""
    other = rows(TUNING, 77, creep)
    fitted = model.fitted_
    plain = lambda Z: Z
    deep = lambda Z: fitted.features(0, fitted.standardized(Z))[:, :-1].numpy()
    constant = lambda eta: SGDRegressor(learning_rate="constant", eta0=eta, random_state=0)
    passive = {"loss": "epsilon_insensitive", "penalty": None, "learning_rate": "pa1", "random_state": 0}
    network = {"hidden_layer_sizes": (50, 50), "max_iter": 300, "random_state": 0, "tol": 0.0}
    makers: dict[str, tuple[Callable[[float], Any], Callable[[ndarray], ndarray]]] = {
        "SGDRegressor, inputs": (constant, plain),
        "SGDRegressor, the network's features": (constant, deep),
        "passive-aggressive, the network's features": (lambda eta: SGDRegressor(eta0=eta, **passive), deep),
        "MLPRegressor": (lambda eta: MLPRegressor(learning_rate_init=eta, **network), plain),
    }
    learners = []
    for name, (make, features) in makers.items():
        tried = {}
        for eta in STEPS[1:3] if name == "MLPRegressor" else STEPS:
            try:
                way = Scaled(make(eta), features, X, y)
                tried[eta] = run(theirs(name, way), *other, passes=("both",))["rmse"]
            except ValueError:  # it overflowed
                tried[eta] = np.inf
        best = min(tried, key=lambda eta: tried[eta])
        learners.append(theirs(f"{name} (step {best:g})", Scaled(make(best), features, X, y)))
    return learners


def main(arguments: list[str] | None = None) -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rows", type=int, default=2_000, help="rows of each stream")
    parser.add_argument("--epochs", type=int, default=500, help="epochs of the initial fits")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)  # of MLPRegressor, which continues to learn anyway
    print(describe_machine())
    X, y = rows(FITTED, 0, 0.0)
    single = BLLRegressor(preset="evidence", max_epochs=options.epochs, random_state=0).fit(X, y)
    calibrated = BLLRegressor(n_members=1, max_epochs=options.epochs, hidden_prior=0.1, random_state=0).fit(X, y)
    mixture = BLLRegressor(max_epochs=options.epochs, random_state=0).fit(X, y)
    c, p = len(mixture.members_), single.members_[0].posterior.statistics.n_linear
    names = tuple(f"x{i}" for i in range(D))
    for title, creep in (("constant function", 0.0), ("drifting function", 1.0)):
        stream, of, fading = rows(options.rows, 1, creep), OnlineModel, ExponentialForgetting
        dicts = partial(as_dicts, names=names)
        ways = [
            ours("one network: OnlineModel, all rows", of(single)),
            ours("one network: OnlineModel, ExponentialForgetting(300)", of(single, fading(300))),
            ours("one network: OnlineModel, ExponentialForgetting(1000)", of(single, fading(1_000))),
            ours("one network: OnlineModel, SlidingWindow(500)", of(single, SlidingWindow(500), start=(X, y))),
            ours("one network: OnlineModel, with a DriftMonitor", of(single, monitor=DriftMonitor())),
            by_river("one network: RiverRegressor", RiverRegressor(single, feature_names=names), dicts),
            ours("one network, calibrated: OnlineModel, all rows", of(calibrated)),
            ours("one network: BLLRegressor.update", single),
            theirs("one network: last layer recomputed from all rows", Anew(single, X, y)),
            ours(f"mixture of {c}: OnlineModel, all rows", of(mixture)),
            ours(f"mixture of {c}: OnlineModel, ExponentialForgetting(300)", of(mixture, fading(300))),
            bayesian_linear(single, X, y),
            *incremental(X, y, creep, single),
        ]
        print(f"\n{title}: {options.rows:,} rows, {p} features, noise {NOISE}; microseconds per row")
        print(f"{'':<58}{'learn':>9}{'predict':>9}{'both':>9}{'/ first':>9}{'RMSE':>8}{'/ first':>9}")
        print(f"{f'lower bound: a rank-one update of {p + 1} x {p + 1} by BLAS':<58}{floor(p + 1):9.1f}")
        base: dict[str, float] = {}
        for way in ways:
            found = run(way, *stream)
            base, rmse = base or found, found["rmse"]
            times = "".join(f"{found[each]:9.1f}" for each in PASSES) + f"{found['both'] / base['both']:9.2f}"
            print(f"{way.name:<58}{times}{rmse:8.3f}{rmse / base['rmse']:9.2f}", flush=True)


if __name__ == "__main__":
    main()
