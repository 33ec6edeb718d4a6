"""Learn the dynamics of two tanks from experiments, and control them with a chance constraint.

    python examples/dynamics_mpc.py                       (needs pip install 'lastlayer[control]')

A pump fills the upper tank, which drains into the lower one, which drains into the sewer; both levels are measured with
noise. `DynamicsModel` learns the change of the levels in one step from a few experiments, with its uncertainty. do-mpc
then plans the inflow: the lower level is to rise as high as possible, and with a probability of 95% at each step it
must stay below its limit. The bound moves back by 1.64 predicted standard deviations. For comparison, the same problem
is solved with the constraint on the mean alone. The table gives mean and maximum of the lower level after the first
quarter of the run, and the share of steps above the limit.
"""

import argparse
import warnings
from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from lastlayer import BLLRegressor
from lastlayer.dynamics import DynamicsModel, Episode, Lags
from lastlayer.integrations import Controller, chance_constraint, to_do_mpc

with warnings.catch_warnings():  # do-mpc warns about its optional parts
    warnings.simplefilter("ignore")
    import do_mpc

LIMIT, NOISE, STEP_S = 0.8, 0.01, 5.0
"""Highest lower level, noise of the sensors (both in m), and length of a step."""
QUIET = {"ipopt.print_level": 0, "print_time": 0, "ipopt.sb": "yes"}


def next_levels(levels: ndarray, inflow: float, rng: np.random.Generator) -> ndarray:
    """The plant: inflow from 0 to 1, outflows by Torricelli's law, with disturbances."""
    upper, lower = np.array([0.9, 0.7]) * np.sqrt(levels) * (1 + 0.1 * rng.standard_normal(2))
    return np.maximum(levels + 0.04 * STEP_S * np.array([inflow - upper, upper - lower]), 0.0)


def experiments(n: int, rng: np.random.Generator) -> list[Episode]:
    """n experiments of 30 steps with random inflows, from random levels."""
    episodes = []
    for _ in range(n):
        levels, inflows = [rng.uniform(0.1, 0.9, 2)], rng.uniform(0, 1, 30)
        for inflow in inflows:
            levels.append(next_levels(levels[-1], inflow, rng))
        measured = np.array(levels) + NOISE * rng.standard_normal((31, 2))
        episodes.append(Episode.of(measured, inflows[:, None]))
    return episodes


def make_controller(dynamics: DynamicsModel, probability: float, horizon: int) -> Controller:
    """Raise the lower level as far as the constraint allows; a probability of 0.5 constrains the mean alone."""
    model = to_do_mpc(dynamics)
    model.setup()
    mpc = do_mpc.controller.MPC(model)
    mpc.settings.n_horizon, mpc.settings.t_step, mpc.settings.nlpsol_opts = horizon, STEP_S, QUIET
    distance = (model.x["y"][1] - 1.0) ** 2
    mpc.set_objective(mterm=distance, lterm=distance)
    mpc.set_rterm(u=1e-3)
    mpc.bounds["lower", "_u", "u"], mpc.bounds["upper", "_u", "u"] = 0.0, 1.0
    chance_constraint(mpc, 1, upper=LIMIT, probability=probability)
    return Controller(mpc, dynamics, steps=3)  # the inflow changes the lower level two steps later


def run(controller: Controller, steps: int, rng: np.random.Generator) -> ndarray:
    """Lower levels under control, both tanks at 0.3 m in the beginning."""
    levels = [np.array([0.3, 0.3])]
    for _ in range(steps):
        (inflow,) = controller.make_step(levels[-1] + NOISE * rng.standard_normal(2))
        levels.append(next_levels(levels[-1], float(inflow), rng))
    return np.array(levels)[:, 1]


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=10, help="experiments to learn from")
    parser.add_argument("--steps", type=int, default=200, help="steps under control")
    parser.add_argument("--epochs", type=int, default=200, help="passes over the experiments")
    parser.add_argument("--horizon", type=int, default=8, help="steps of a plan")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", r"\s*casadi: a numpy function", FutureWarning)  # of do-mpc's calls
    regressor = BLLRegressor((20,), n_members=1, max_epochs=options.epochs, random_state=0)
    dynamics = DynamicsModel(Lags(outputs=1, inputs=1, increments=True), regressor)
    dynamics.fit(experiments(options.experiments, np.random.default_rng(0)))
    print(f"{'':28}{'mean level':>12}{'maximum':>10}{'steps above limit':>20}")
    table = {}
    for name, probability in (("constraint on the mean", 0.5), ("chance constraint", 0.95)):
        levels = run(make_controller(dynamics, probability, options.horizon), options.steps, np.random.default_rng(1))
        risen = levels[options.steps // 4 :]
        table[name] = {"mean": risen.mean(), "maximum": risen.max(), "above": float(np.mean(risen > LIMIT))}
        print(f"{name:28}{risen.mean():12.3f}{risen.max():10.3f}{table[name]['above']:20.0%}")
    return table


if __name__ == "__main__":
    main()
