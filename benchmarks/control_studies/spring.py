"""Three discs on springs, learned from motor amplitudes up to pi and tested up to 2 pi: one step and 100 steps ahead.

`python -m benchmarks.control_studies.spring` prints the tables and writes them with their figures into a folder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.control_studies.discs import NOISE_STD, Discs
from benchmarks.runner import markdown, options_of, write_files
from lastlayer.dynamics import (
    DynamicsModel,
    Episode,
    Lags,
    Linearized,
    Rollout,
    SampledWeights,
    StepScores,
    Unscented,
    best_propagation,
    multi_step_scores,
    one_step_scores,
)
from lastlayer.dynamics.plots import density_by_step, trajectories
from lastlayer.dynamics.rollout import Propagation
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.studies.baselines import BLRRegressor

LAGS = Lags(outputs=3, inputs=3)
HORIZON = 100
WAYS: dict[str, Propagation] = {
    "sampled weights, calibrated": SampledWeights(300),
    "sampled weights, posterior": SampledWeights(300, calibrated=False),
    "unscented": Unscented(),
    "linearised": Linearized(),
}
NAMES = ("angle 1 - mean / rad", "angle 2 - mean / rad", "angle 3 - mean / rad")


@dataclass(frozen=True)
class Budget:
    train_episodes: int = 12
    train_steps: int = 80
    test_episodes: int = 10
    horizon: int = HORIZON
    hidden: tuple[int, ...] = (20, 20)
    n_members: int = 5
    max_epochs: int = 500


@dataclass(frozen=True)
class Data:
    """Episodes of one seed; the amplitude of the motors is pi, and 2 pi for the test outside."""

    train: list[Episode]
    validation: list[Episode]
    """Validation episodes of the training amplitude, for alpha^max and the choice of a propagation."""
    inside: list[Episode]
    outside: list[Episode]

    @classmethod
    def of(cls, budget: Budget, seed: int) -> "Data":
        discs, steps = Discs(), budget.horizon + LAGS.first
        return cls(
            discs.episodes(budget.train_episodes, np.pi, budget.train_steps, 10 * seed),
            discs.episodes(3, np.pi, budget.train_steps, 10 * seed + 1),
            discs.episodes(budget.test_episodes, np.pi, steps, 10 * seed + 2),
            discs.episodes(budget.test_episodes, 2 * np.pi, steps, 10 * seed + 3),
        )


@dataclass(frozen=True)
class Row:
    one: tuple[StepScores, StepScores]  # inside the training amplitude, and outside
    many: tuple[StepScores, StepScores]
    rollout: Rollout  # rollout of a test episode outside the training amplitude
    by: Propagation


def models(budget: Budget, seed: int) -> dict[str, tuple[Any, bool]]:
    """Regressors by name, and whether alpha is tuned on the validation episodes (Algorithm 1)."""
    parameters: dict[str, Any] = {"hidden": budget.hidden, "max_epochs": budget.max_epochs, "random_state": seed}
    return {
        "BLL": (BLLRegressor(n_members=budget.n_members, **parameters), False),
        "BLL, one network, alpha^max": (BLLRegressor(preset="evidence", **parameters), True),
        "BLR, alpha*": (BLRRegressor(**parameters), False),
        "BLR, alpha^max": (BLRRegressor(**parameters), True),
        "linear": (BLLRegressor((), preset="evidence", random_state=seed), False),
    }


def fit(regressor: Any, tuned: bool, data: Data) -> DynamicsModel:
    model = DynamicsModel(LAGS, regressor).fit(data.train)
    if tuned:
        held = LAGS.table(data.validation)
        model.regressor_.tune_alpha(held.X, held.targets)
    return model


def score(model: DynamicsModel, data: Data, budget: Budget, by: Propagation) -> Row:
    """Score one step and many steps ahead; this plant has measurement noise, which does not move the discs."""
    many = lambda episodes: multi_step_scores(model, episodes, budget.horizon, by=by, noise="measurement")
    (inside, _), (outside, rollout) = many(data.inside), many(data.outside)
    one = one_step_scores(model, data.inside), one_step_scores(model, data.outside)
    return Row(one, (inside, outside), rollout, by)


def run(folder: Path, seeds: Sequence[int], budget: Budget) -> str:
    rows: dict[str, list[Row]] = {}
    ways: dict[str, list[Row]] = {}
    every = {seed: Data.of(budget, seed) for seed in seeds}
    words: dict[str, Any] = {"candidates": tuple(WAYS.values()), "noise": "measurement"}
    validation = budget.train_steps - LAGS.first  # horizon on validation episodes, such that each gives one window
    for seed, data in every.items():
        for name, (regressor, tuned) in models(budget, seed).items():
            model = fit(regressor, tuned, data)
            best = best_propagation(model, data.validation, validation, **words)
            rows.setdefault(name, []).append(score(model, data, budget, best))
            if name == "BLL":
                for way, by in WAYS.items():
                    ways.setdefault(way, []).append(score(model, data, budget, by))
            print(f"seed {seed}: {name}, by {best}", flush=True)
    text = report(rows, ways, budget)
    outputs = LAGS.windows(every[seeds[0]].outside, budget.horizon).outputs
    shown = {name: rows[name][0].rollout for name in ("BLL", "BLR, alpha*", "linear")}
    around = trajectories(shown, outputs, around_mean=True, names=NAMES, xlabel="steps of 0.1 s")
    by_step = density_by_step({name: rows[name][0].many[1].lpd_by_step for name in rows})
    write_files(folder, {"spring.md": text + "\n"}, {"spring-trajectory.png": around, "spring-lpd.png": by_step})
    return text


def report(rows: dict[str, list[Row]], ways: dict[str, list[Row]], budget: Budget) -> str:
    seeds = len(next(iter(rows.values())))
    h = budget.horizon
    mean = lambda of: lambda row: f"{np.mean([of(r) for r in row]):.3g}"
    each = lambda of: lambda row: " / ".join(f"{of(r):.2f}" for r in row)
    columns: dict[str, Callable[[list[Row]], str]] = {
        "LPD, 1 step, inside": mean(lambda r: r.one[0].lpd),
        "LPD, 1 step, outside": each(lambda r: r.one[1].lpd),
        "in 90%, 1 step, outside": mean(lambda r: r.one[1].coverage),
        f"LPD, {h} steps, inside": mean(lambda r: r.many[0].lpd),
        f"LPD, {h} steps, outside": each(lambda r: r.many[1].lpd),
        f"in 90%, {h} steps, inside": each(lambda r: r.many[0].coverage),
        f"in 90%, {h} steps, outside": each(lambda r: r.many[1].coverage),
        f"RMSE, {h} steps, outside": mean(lambda r: float(np.sqrt(np.mean(r.many[1].rmse ** 2)))),
    }
    chosen = lambda row: " / ".join(next(name for name, by in WAYS.items() if by == r.by) for r in row)
    notes = [
        f"Means over {seeds} seeds of data and networks, or one number per seed. LPD: summed over the angles, in rad.",
        f"Noise of the angles {NOISE_STD} rad; {budget.train_episodes} episodes of {budget.train_steps} steps for "
        f"training, {budget.test_episodes} of {h} for testing, 3 of "
        f"{budget.train_steps - LAGS.first} to choose the propagation.",
    ]
    parts = [_table("model", rows, columns | {"propagation": chosen}), f"BLL, {h} steps ahead, by propagation:"]
    later = {name: of for name, of in columns.items() if f"{h} steps" in name}
    return "\n\n".join([*parts, _table("propagation", ways, later), *notes])


def _table(head: str, rows: dict[str, list[Row]], columns: dict[str, Callable[[list[Row]], str]]) -> str:
    return markdown([[head, *columns], *([name, *(of(row) for of in columns.values())] for name, row in rows.items())])


def main(arguments: list[str] | None = None) -> None:
    parser = options_of(__doc__, out="results/spring")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of data and networks")
    parser.add_argument("--max-epochs", type=int, default=500, help="maximum number of epochs of every network")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"\n{run(asked.out, range(asked.seeds), Budget(max_epochs=asked.max_epochs))}")


if __name__ == "__main__":
    main()
