"""An Optuna sampler that models the objective by a lastlayer regressor.

    python examples/clients/optuna_sampler.py

A user writes `study = optuna.create_study(sampler=LastLayerSampler(seed=0))`; the search space may contain floats,
integers, logarithmic scales, steps and categories. After some random trials, each trial fits a Bayesian last layer to
all results so far and selects the candidate with the largest expected improvement over the best value. The script
minimises an artificial validation loss, and prints the best value found next to those of two samplers of Optuna.
"""

import argparse
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from numpy import ndarray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState
from scipy.special import ndtr

from lastlayer.errors import FlooredNoiseWarning
from lastlayer.estimators.base import LastLayerRegressor
from lastlayer.integrations.botorch import Surrogate


class LastLayerSampler(optuna.samplers.BaseSampler):  # type: ignore[misc]
    """Expected improvement by a Bayesian last layer; for one objective.

    Parameters
    ----------
    model : a regressor of lastlayer, such as `BLLRegressor(preset="fast")` for objectives with noise. None: the
        `Surrogate` for the few, almost exact values of an optimisation.
    n_startup_trials : trials at random before the first model.
    n_candidates : points that are compared in every trial, half of them near the best ones so far.
    """

    def __init__(
        self,
        model: LastLayerRegressor | None = None,
        *,
        n_startup_trials: int = 10,
        n_candidates: int = 2_000,
        seed: int | None = None,
    ) -> None:
        self.model = Surrogate(random_state=0) if model is None else model
        self.n_startup_trials, self.n_candidates = n_startup_trials, n_candidates
        self.rng = np.random.default_rng(seed)
        self.independent = optuna.samplers.RandomSampler(seed=seed)
        self.space = optuna.search_space.IntersectionSearchSpace()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Search space that all trials share, without parameters that have a single possible value."""
        return {name: d for name, d in self.space.calculate(study).items() if not d.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The candidate with the largest expected improvement."""
        done = [
            each
            for each in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            if each.value is not None and np.isfinite(each.value) and search_space.keys() <= each.params.keys()
        ]
        if not search_space or len(done) < max(self.n_startup_trials, 2):
            return {}
        sign = -1.0 if study.direction == StudyDirection.MAXIMIZE else 1.0
        y = sign * np.array([each.value for each in done])
        X = np.stack([encoded(each.params, search_space) for each in done])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FlooredNoiseWarning)  # values without noise are what is expected here
            self.model.fit(X, drawn_in(y))
        candidates = self._candidates(search_space, [done[i].params for i in np.argsort(y)[:5]])
        p = self.model.predictive(np.stack([encoded(each, search_space) for each in candidates]), noise=False)
        return candidates[int(np.argmax(expected_improvement(p.mean, p.std, drawn_in(y).min())))]

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self.independent.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        self.rng = np.random.default_rng()
        self.independent.reseed_rng()

    def _candidates(
        self, space: Mapping[str, BaseDistribution], best: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Candidates: half of them random, half of them the best trials with each parameter kept or moved a little."""
        anywhere = [
            {name: decoded(self.rng.random(), d) for name, d in space.items()} for _ in range(self.n_candidates // 2)
        ]
        near = []
        for i, width in enumerate(self.rng.choice([0.01, 0.05, 0.2], self.n_candidates - len(anywhere))):
            params = dict(best[i % len(best)])
            for name, d in space.items():
                if isinstance(d, CategoricalDistribution):
                    params[name] = decoded(self.rng.random(), d) if self.rng.random() < width else params[name]
                elif self.rng.random() < 0.7:
                    moved = unit(params[name], d) + width * self.rng.standard_normal()
                    params[name] = decoded(float(np.clip(moved, 0, 1 - 1e-9)), d)
            near.append({name: params[name] for name in space})
        return anywhere + near


def limits(d: FloatDistribution | IntDistribution) -> tuple[float, float]:
    """Range of a number; integers have half a step on either side."""
    half = 0.5 * (d.step or 0) if isinstance(d, IntDistribution) or d.step else 0.0
    low, high = d.low - half, d.high + half
    return (float(np.log(low)), float(np.log(high))) if d.log else (low, high)


def unit(value: float, d: FloatDistribution | IntDistribution) -> float:
    """A number between 0 and 1."""
    low, high = limits(d)
    return ((np.log(value) if d.log else value) - low) / (high - low)


def decoded(share: float, d: BaseDistribution) -> Any:
    """The value at a share of the way from the lowest to the highest."""
    if isinstance(d, CategoricalDistribution):
        return d.choices[int(share * len(d.choices))]
    assert isinstance(d, FloatDistribution | IntDistribution)
    low, high = limits(d)
    value = low + share * (high - low)
    value = float(np.clip(np.exp(value) if d.log else value, d.low, d.high))
    if d.step and not (isinstance(d, IntDistribution) and d.log):
        value = d.low + d.step * round((value - d.low) / d.step)
    value = min(value, d.high)
    return round(value) if isinstance(d, IntDistribution) else value


def encoded(params: Mapping[str, Any], space: Mapping[str, BaseDistribution]) -> ndarray:
    """A row of inputs: numbers between 0 and 1, and one column per category."""
    columns: list[float] = []
    for name, d in space.items():
        if isinstance(d, CategoricalDistribution):
            columns += [float(choice == params[name]) for choice in d.choices]
        else:
            assert isinstance(d, FloatDistribution | IntDistribution)
            columns.append(unit(params[name], d))
    return np.array(columns)


def drawn_in(y: ndarray) -> ndarray:
    """Values with large ones compressed: a diverged trial must not dominate the others."""
    scale = np.median(y) - y.min() + 1e-12
    return np.arcsinh((y - y.min()) / scale)


def expected_improvement(mean: ndarray, std: ndarray, best: float) -> ndarray:
    """E max(0, best - f) of a Gaussian."""
    z = (best - mean) / std
    return std * (z * ndtr(z) + np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi))


def objective(trial: optuna.Trial) -> float:
    """An artificial loss: 0 at a rate of 0.003, 3 layers, 96 units, the second optimizer and little dropout."""
    rate = np.log10(trial.suggest_float("learning_rate", 1e-5, 1e-1, log=True))
    layers, units = trial.suggest_int("layers", 1, 6), trial.suggest_int("units", 16, 256, step=16)
    kind, dropout = (
        trial.suggest_categorical("optimizer", ["sgd", "adam", "rmsprop"]),
        trial.suggest_float("dropout", 0, 0.6),
    )
    away = np.array([(rate + 2.5) / 1.5, (layers - 3) / 3, np.log(units / 96), (dropout - 0.1 * layers / 3) / 0.3])
    return float(np.sqrt(0.01 + away @ away) - 0.1 + {"sgd": 0.3, "adam": 0.0, "rmsprop": 0.1}[kind])


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = {
        "lastlayer": lambda seed: LastLayerSampler(seed=seed),
        "TPE": lambda seed: optuna.samplers.TPESampler(seed=seed),
        "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    }
    medians = {}
    for name, make in samplers.items():
        best = []
        for seed in range(options.seeds):
            study = optuna.create_study(sampler=make(seed))
            study.optimize(objective, n_trials=options.trials)
            best.append(study.best_value)
        medians[name] = float(np.median(best))
        print(f"{name:12}best loss after {options.trials} trials, median of {options.seeds} seeds: {medians[name]:.4f}")
    return medians


if __name__ == "__main__":
    main()
