"""What a row costs that is learned as it comes, and what is learned: microseconds and errors in one run.

`python -m benchmarks.online` streams rows one by one, each predicted first and learned after, through last layers that
follow by the recursion, through `BLLRegressor.update`, through a last layer made anew from all rows so far, and through
scikit-learn's incremental regressors; first a function that stays as it is, then one whose gain and offset creep away.
Every method starts from the same fitted rows; step sizes of the linear ones are chosen on rows of their own beforehand.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from sklearn.linear_model import SGDRegressor
from sklearn.neural_network import MLPRegressor

from benchmarks.timing import describe_machine
from lastlayer import BLLRegressor
from lastlayer.estimators.base import LastLayerRegressor
from lastlayer.online import ExponentialForgetting, OnlineModel, SlidingWindow
from lastlayer.posterior import Posterior
from lastlayer.statistics import Statistics

FITTED, D, NOISE = 1_000, 8, 0.1
STEPS = (1e-4, 1e-3, 1e-2, 1e-1)


def rows(m: int, seed: int, creep: float) -> tuple[ndarray, ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(m, D))
    moved = creep * np.arange(m) / m
    y = (1 + moved) * (np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.5 * X[:, 3]) + moved
    return X, y + NOISE * rng.standard_normal(m)


@dataclass(frozen=True)
class Learner:
    """One way of learning: what predicts a row, what takes it in."""

    name: str
    predict: Callable[[ndarray], ndarray]
    learn: Callable[[ndarray, ndarray], object]


@dataclass(frozen=True)
class Result:
    name: str
    learn_us: float
    predict_us: float
    rmse: float


def run(learner: Learner, X: ndarray, y: ndarray) -> Result:
    """Means over the rows, factorisations now and then included; processor time, so that other work hardly counts."""
    learned, predicted, squared = 0.0, 0.0, []
    for i in range(len(X)):
        row, target = X[i : i + 1], y[i : i + 1]
        start = time.process_time()
        mean = learner.predict(row)
        middle = time.process_time()
        learner.learn(row, target)
        learned += time.process_time() - middle
        predicted += middle - start
        squared.append(float(np.square(mean - target)[0]))
    micro = 1e6 / len(X)
    return Result(learner.name, micro * learned, micro * predicted, float(np.sqrt(np.mean(squared))))


def last_layer_anew(model: BLLRegressor, X: ndarray, y: ndarray) -> Learner:
    """All rows so far go into new statistics, which are factored: features are kept, only the algebra is done anew."""
    fitted, old = model.fitted_, model.posterior_
    targets = fitted.targets
    state: dict[str, Any] = {"posterior": old}

    def features(Z: ndarray) -> torch.Tensor:
        return fitted.features(0, fitted.standardized(Z))

    Phi, T = [features(X)], [targets.forward(torch.from_numpy(y)[:, None])]

    def learn(row: ndarray, target: ndarray) -> None:
        Phi.append(features(row))
        T.append(targets.forward(torch.from_numpy(target)[:, None]))
        statistics = Statistics.from_features(torch.cat(Phi), torch.cat(T))
        state["posterior"] = Posterior(statistics, old.log_alpha, old.noise_cov, rtol=np.inf)
        _ = state["posterior"].precision.weights

    def predict(row: ndarray) -> ndarray:
        mean: torch.Tensor = state["posterior"].mean(features(row)) * targets.scale + targets.mean
        return mean[:, 0].numpy()

    return Learner("one network: last layer of all rows anew", predict, learn)


def of(name: str, model: OnlineModel | LastLayerRegressor) -> Learner:
    return Learner(name, model.predict, model.update)


class Scaled:
    """A regressor of scikit-learn on standardised inputs, or features, and targets."""

    def __init__(self, regressor: Any, features: Callable[[ndarray], ndarray], X: ndarray, y: ndarray) -> None:
        self.features, self.regressor = features, regressor
        Z = features(X)
        self.mean, self.scale = Z.mean(0), Z.std(0) + 1e-12
        self.centre, self.unit = y.mean(), y.std()
        regressor.fit(self.inputs(X), (y - self.centre) / self.unit)

    def inputs(self, X: ndarray) -> ndarray:
        return (self.features(X) - self.mean) / self.scale

    def predict(self, X: ndarray) -> ndarray:
        mean: ndarray = self.regressor.predict(self.inputs(X)) * self.unit + self.centre
        return mean

    def learn(self, X: ndarray, y: ndarray) -> None:
        self.regressor.partial_fit(self.inputs(X), (y - self.centre) / self.unit)


def incremental(X: ndarray, y: ndarray, creep: float, model: BLLRegressor) -> list[Learner]:
    """Each with the step size that did best on another stream of the same kind."""
    other = rows(500, 77, creep)
    plain: Callable[[ndarray], ndarray] = lambda Z: Z
    fitted = model.fitted_
    deep: Callable[[ndarray], ndarray] = lambda Z: fitted.features(0, fitted.standardized(Z))[:, :-1].numpy()
    makers: dict[str, tuple[Callable[[float], Any], Callable[[ndarray], ndarray]]] = {
        "SGDRegressor, inputs": (lambda eta: SGDRegressor(learning_rate="constant", eta0=eta, random_state=0), plain),
        "SGDRegressor, the network's features": (
            lambda eta: SGDRegressor(learning_rate="constant", eta0=eta, random_state=0),
            deep,
        ),
        "passive-aggressive, the network's features": (
            lambda eta: SGDRegressor(
                loss="epsilon_insensitive", penalty=None, learning_rate="pa1", eta0=eta, random_state=0
            ),
            deep,
        ),
        "MLPRegressor": (
            lambda eta: MLPRegressor(
                hidden_layer_sizes=(50, 50), learning_rate_init=eta, max_iter=300, random_state=0, tol=0.0
            ),
            plain,
        ),
    }
    learners = []
    for name, (make, features) in makers.items():
        tried = {}
        for eta in STEPS[1:3] if name == "MLPRegressor" else STEPS:
            try:
                way = Scaled(make(eta), features, X, y)
                tried[eta] = run(Learner(name, way.predict, way.learn), *other).rmse
            except ValueError:  # it overflowed
                tried[eta] = np.inf
        best = min(tried, key=lambda eta: tried[eta])
        way = Scaled(make(best), features, X, y)
        learners.append(Learner(f"{name} (step {best:g})", way.predict, way.learn))
    return learners


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000, help="of each stream")
    parser.add_argument("--epochs", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    import warnings

    from sklearn.exceptions import ConvergenceWarning

    warnings.simplefilter("ignore", ConvergenceWarning)  # of MLPRegressor, which is to go on learning anyway
    print(describe_machine())
    X, y = rows(FITTED, 0, 0.0)
    single = BLLRegressor(preset="evidence", max_epochs=options.epochs, random_state=0).fit(X, y)
    mixture = BLLRegressor(max_epochs=options.epochs, random_state=0).fit(X, y)
    fresh, c = lambda model: OnlineModel(model).model(), len(mixture.members_)
    for title, creep in (("a function that stays", 0.0), ("a function that creeps away", 1.0)):
        stream = rows(options.rows, 1, creep)
        start = (X, y)
        ways = [
            of("one network: OnlineModel, all rows", OnlineModel(single)),
            of("one network: OnlineModel, ExponentialForgetting(300)", OnlineModel(single, ExponentialForgetting(300))),
            of("one network: OnlineModel, SlidingWindow(500)", OnlineModel(single, SlidingWindow(500), start=start)),
            of("one network: BLLRegressor.update", fresh(single)),
            last_layer_anew(single, X, y),
            of(f"mixture of {c}: OnlineModel, all rows", OnlineModel(mixture)),
            of(
                f"mixture of {c}: OnlineModel, ExponentialForgetting(300)",
                OnlineModel(mixture, ExponentialForgetting(300)),
            ),
            of(f"mixture of {c}: BLLRegressor.update", fresh(mixture)),
            *incremental(X, y, creep, single),
        ]
        results = [run(way, *stream) for way in ways]
        base = results[0]
        print(f"\n{title}: {options.rows:,} rows, {single.posterior_.statistics.n_linear} features, noise {NOISE}")
        print(f"{'':<52}{'learn us':>10}{'/ first':>9}{'predict us':>12}{'RMSE':>8}{'/ first':>9}")
        for r in results:
            ratios = f"{r.learn_us / base.learn_us:9.2f}", f"{r.rmse / base.rmse:9.2f}"
            print(f"{r.name:<52}{r.learn_us:10.0f}{ratios[0]}{r.predict_us:12.0f}{r.rmse:8.3f}{ratios[1]}", flush=True)


if __name__ == "__main__":
    main()
