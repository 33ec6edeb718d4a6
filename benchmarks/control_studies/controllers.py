"""Controllers of the study: one optimisation problem with four levels of knowledge about the plant."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from benchmarks.control_studies import reactor
from lastlayer.dynamics import DynamicsModel, Episode, Lags
from lastlayer.errors import need
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.integrations.do_mpc import Controller, chance_constraint, to_do_mpc, trust_constraint, trust_limit

HORIZON = 20
PENALTY = 1e3  # penalty per kelvin above the bound, at every stage
MARGIN = 0.1  # safety margin of the controller that knows the plant, since its integrator is coarser
PROBABILITY = 0.95
BACK_OFF_STEPS = 5  # number of steps over which the covariance of a plan grows
TRUST_QUANTILE = 0.95  # quantile of the training points' affine cost that is the trust limit
TRUST_PENALTY = 1e3
KINDS = ("true plant", "plain network", "chance constraint", "chance and trust")


def learn(episodes: Sequence[Episode], *, max_epochs: int = 500) -> DynamicsModel:
    """Fit one network to the experiments: increments of concentration and temperature, calibrated by episode."""
    regressor = BLLRegressor((20, 20), n_members=1, max_epochs=max_epochs, random_state=0)
    return DynamicsModel(Lags(1, 1, increments=True), regressor).fit(episodes)


@dataclass
class Timed:
    """A timed controller: called with a measurement, it returns the coolant temperature."""

    controller: Any
    seconds: list[float] = field(default_factory=list)
    unsolved: int = 0

    def __call__(self, measured: reactor.State) -> float:
        start = time.perf_counter()
        u = float(self.controller.make_step(measured)[0])
        self.seconds.append(time.perf_counter() - start)
        self.unsolved += not self.controller.mpc.solver_stats["success"]
        return u

    def reset(self) -> None:
        self.controller.reset(np.array([reactor.COOLANT_START]))


def make_controller(kind: str, dynamics: DynamicsModel, *, horizon: int = HORIZON) -> Timed:
    """Make one of KINDS. The plain network uses its mean only; the true plant knows the plant and its state."""
    model = true_model() if kind == "true plant" else to_do_mpc(dynamics)
    model.setup()
    mpc = need("do_mpc", extra="control").controller.MPC(model)
    mpc.settings.n_horizon, mpc.settings.t_step, mpc.settings.store_full_solution = horizon, reactor.STEP_MIN, False
    quiet = {"ipopt.print_level": 0, "print_time": 0, "ipopt.sb": "yes"}
    mpc.settings.nlpsol_opts = quiet | {"ipopt.max_iter": 100, "expand": True}
    error = 100 * (model.x["y"][0] - reactor.WANTED) ** 2
    mpc.set_objective(mterm=error, lterm=error)
    mpc.set_rterm(u=1e-3)
    mpc.bounds["lower", "_u", "u"], mpc.bounds["upper", "_u", "u"] = reactor.COOLANT
    mpc.scaling["_x", "y"] = np.array([1.0, 300.0])
    if kind in ("true plant", "plain network"):
        upper = reactor.LIMIT - (MARGIN if kind == "true plant" else 0.0)
        chance_constraint(mpc, 1, upper=upper, probability=0.5, penalty=PENALTY)
        return Timed(Certain(mpc))
    chance_constraint(mpc, 1, upper=reactor.LIMIT, probability=PROBABILITY, penalty=PENALTY)
    if kind == "chance and trust":
        trust_constraint(mpc, trust_limit(dynamics, TRUST_QUANTILE), penalty=TRUST_PENALTY)
    return Timed(Controller(mpc, dynamics, noise="measurement", steps=BACK_OFF_STEPS))


class Certain:
    def __init__(self, mpc: Any) -> None:
        self.mpc, self._started = mpc, False
        template = mpc.get_tvp_template()
        mpc.set_tvp_fun(lambda _: template)
        mpc.setup()

    def reset(self, before: Float[ndarray, " d"]) -> None:
        self.mpc.reset_history()
        self.mpc.u0, self._started = before.reshape(-1, 1), False

    def make_step(self, state: reactor.State) -> Float[ndarray, " d"]:
        x0 = np.asarray(state, float).reshape(-1, 1)
        if not self._started:
            self.mpc.x0 = x0
            self.mpc.set_initial_guess()
            self._started = True
        u: ndarray = np.asarray(self.mpc.make_step(x0))[:, 0]
        return u


def true_model(substeps: int = 10) -> Any:
    """Make a model from the plant itself instead of the learned dynamics."""
    ca, plant = need("casadi", extra="control"), reactor.Reactor()
    model = need("do_mpc", extra="control").model.Model("discrete", "MX")
    y, u = model.set_variable("_x", "y", (2, 1)), model.set_variable("_u", "u", (1, 1))
    model.set_variable("_tvp", "predicted_std", (2, 1))

    def slope(x: Any) -> Any:
        rate = plant.k0_per_min * ca.exp(-plant.activation_k / x[1]) * x[0]
        heating = plant.heat_k_l_per_mol * rate + plant.cooling_per_min * (u - x[1])
        return ca.vertcat(1 - x[0] - rate, plant.feed_k - x[1] + heating)

    model.set_rhs("y", reactor.runge_kutta(slope, y, reactor.STEP_MIN, substeps))
    return model
