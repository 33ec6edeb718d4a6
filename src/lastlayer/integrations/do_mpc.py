"""Learned dynamics in do-mpc: a discrete model, chance constraints from the propagated covariance, and trust.

model = to_do_mpc(dynamics)                     # states y (and their past), input u, what the model knows of itself
model.setup()
mpc = do_mpc.controller.MPC(model)              # horizon, objective, bounds: as ever in do-mpc
chance_constraint(mpc, 1, upper=360.0, probability=0.95, penalty=1e3)
trust_constraint(mpc, trust_limit(dynamics))
controller = Controller(mpc, dynamics)          # feeds the covariance of each plan to the constraints of the next
u = controller.make_step(state)
"""

from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import ndtri

from lastlayer.dynamics import DynamicsModel, Linearized
from lastlayer.dynamics.rollout import Feedback, Propagation
from lastlayer.errors import InputError, check_choice, need
from lastlayer.integrations.casadi import to_casadi
from lastlayer.predictor.fitted import as_fitted

if TYPE_CHECKING:
    import do_mpc

SymVarType = Literal["MX", "SX"]


def to_do_mpc(dynamics: DynamicsModel, *, symvar_type: SymVarType = "MX") -> "do_mpc.model.Model":
    """A discrete do-mpc model of fitted dynamics; add what you like to it, then call its `setup()`.

    States `y` (the outputs), and with lags `y_past` and `u_past`, newest first: together they are the state that
    `dynamics.lags.state(episode)` returns. Input `u`. Auxiliary expressions `next_mean`, `next_cov` (column by column)
    and `affine_cost`, of one step from here. The time-varying parameter `predicted_std` is for chance constraints.

    Parameters
    ----------
    dynamics : fitted dynamics.
    symvar_type : as in do-mpc: with "MX" expressions keep their matrices, which is faster for networks; "SX" writes
        every number out, which do-mpc needs to linearise a model (`get_linear_system_matrices`, `linearize`, LQR) and
        to pickle it.

    Examples
    --------
    ::

        model = to_do_mpc(dynamics, symvar_type="SX")
        model.setup()
        linear = do_mpc.model.linearize(model, x_steady, u_steady, tvp0=np.zeros(2))
    """
    do, ca = need("do_mpc", extra="control"), need("casadi", extra="control")
    check_choice("symvar_type", symvar_type, get_args(SymVarType))
    one_step = to_casadi(dynamics.regressor_, name="one_step")
    lags, q, d = dynamics.lags, dynamics.n_outputs_, dynamics.n_inputs_
    model = do.model.Model("discrete", symvar_type)
    y = model.set_variable("_x", "y", (q, 1))
    parts = {"y": y}
    for name, length in (("y_past", (lags.outputs - 1) * q), ("u_past", (lags.inputs - 1) * d)):
        if length:
            parts[name] = model.set_variable("_x", name, (length, 1))
    u = model.set_variable("_u", "u", (d, 1))
    model.set_variable("_tvp", "predicted_std", (q, 1))
    k = lags.outputs * q
    state = ca.vertcat(*parts.values())
    change, cov, cost = one_step(ca.vertcat(state[:k], u, state[k:]))
    mean = y + change if lags.increments else change
    F, G = lags.shift(q, d)
    moved = ca.mtimes(ca.DM(F), state) + ca.mtimes(ca.DM(G), u)
    model.set_rhs("y", mean)
    for name, rows in (("y_past", slice(q, k)), ("u_past", slice(k, None))):
        if name in parts:
            model.set_rhs(name, moved[rows])
    model.set_expression("next_mean", mean)
    model.set_expression("next_cov", ca.reshape(cov, q * q, 1))
    model.set_expression("affine_cost", cost)
    return model


def chance_constraint(
    mpc: "do_mpc.controller.MPC",
    output: int,
    *,
    upper: float | None = None,
    lower: float | None = None,
    probability: float = 0.95,
    penalty: float | None = 1e3,
) -> None:
    """An output stays within bounds with that probability at every step of the plan, each step and bound for itself.

    The bound moves back by the quantile of a normal distribution times the predicted standard deviation. With a
    `penalty` an excess costs so much a unit, so that the problem stays solvable from a bad start; None makes it hard.
    `probability=0.5` is the plain constraint on the mean.
    """
    if not 0.5 <= probability < 1:
        raise InputError(f"probability={probability} must be at least 0.5 (the mean alone) and below 1")
    if upper is None and lower is None:
        raise InputError("a constraint needs upper=..., lower=... or both")
    y, std = mpc.model.x["y"], mpc.model.tvp["predicted_std"]
    if not 0 <= output < y.shape[0]:
        raise InputError(f"output={output}: the model has outputs 0 to {y.shape[0] - 1}")
    margin = float(ndtri(probability)) * std[output]
    for word, sign, bound in (("upper", 1.0, upper), ("lower", -1.0, lower)):
        if bound is not None:
            expression = sign * (y[output] - bound) + margin
            mpc.set_nl_cons(f"{word}_{output}", expression, ub=0.0, **_softness(penalty))


def trust_limit(dynamics: DynamicsModel, quantile: float = 0.99, *, factor: float = 1.0) -> float:
    """The affine cost that this share of the training points would stay below if they were new, times a factor."""
    if not 0 <= quantile <= 1:
        raise InputError(f"quantile={quantile} must lie between 0 and 1")
    return factor * float(np.quantile(as_fitted(dynamics.regressor_).sample_cost.numpy(), quantile))


def trust_constraint(mpc: "do_mpc.controller.MPC", limit: float, *, penalty: float | None = None) -> None:
    """No step of the plan may extrapolate farther than `limit`: its affine cost stays below.

    Hard, or with a `penalty` soft: so much for every factor of e above the limit.
    """
    mpc.set_nl_cons("trust", _log_cost(mpc.model, limit), ub=0.0, **_softness(penalty))


def trust_cost(model: "do_mpc.model.Model", limit: float) -> Any:
    """For the stage cost: the square of how far log affine cost exceeds that of the limit, zero below it."""
    ca = need("casadi", extra="control")
    return ca.fmax(_log_cost(model, limit), 0) ** 2


class Controller:
    """A do-mpc controller whose chance constraints hear of the covariance along its last plan.

    Make it after the constraints: it calls `mpc.setup()`. Propagating within the optimisation would cost a derivative
    more of the network at every stage; along the last plan, shifted by a step, it costs one pass. The first plan is
    made `first_plans` times over.

    Parameters
    ----------
    by, noise : how the covariance is propagated (see `DynamicsModel.rollout`).
    steps : steps over which it grows; the controller measures again after one, so beyond a few it is held constant.
    """

    def __init__(
        self,
        mpc: "do_mpc.controller.MPC",
        dynamics: DynamicsModel,
        *,
        by: Propagation | None = None,
        noise: Feedback = "process",
        steps: int | None = None,
        first_plans: int = 3,
    ) -> None:
        self.mpc, self.dynamics, self.noise = mpc, dynamics, noise
        self.by = Linearized() if by is None else by
        horizon = int(mpc.settings.n_horizon)
        self.steps = horizon if steps is None else min(int(steps), horizon)
        if self.steps < 1 or first_plans < 1:
            raise InputError(f"steps={steps}, first_plans={first_plans}: both must be 1 or more")
        self.first_plans = first_plans
        self.predicted_std = np.zeros((horizon + 1, dynamics.n_outputs_))
        self._template = mpc.get_tvp_template()
        mpc.set_tvp_fun(self._parameters)
        mpc.setup()
        self.reset()

    def reset(self, before: Float[ndarray, " d"] | None = None) -> None:
        """Forget the last plan: a new run begins; `before` is the input that was applied last."""
        self.mpc.reset_history()
        self.predicted_std[:] = 0
        self._started = False
        if before is not None:
            self.mpc.u0 = np.asarray(before, float).reshape(-1, 1)

    def make_step(self, state: Float[ndarray, " n"]) -> Float[ndarray, " d"]:
        """The input to apply now."""
        x0 = np.asarray(state, float).reshape(-1, 1)
        if not self._started:
            before = self.mpc.u0.cat.full()
            self.mpc.x0 = x0
            self.mpc.set_initial_guess()
            for _ in range(self.first_plans - 1):
                self.mpc.make_step(x0)
                self._propagate(x0)
                self.mpc.u0 = before  # nothing was applied yet
        self._started = True
        u = np.asarray(self.mpc.make_step(x0))[:, 0]
        self._propagate(x0, ahead=1)
        return u

    @property
    def planned_inputs(self) -> Float[ndarray, "h d"]:
        """Of the last plan."""
        plan = self.mpc.opt_x_num_unscaled
        return np.stack([plan["_u", k, 0].full()[:, 0] for k in range(int(self.mpc.settings.n_horizon))])

    def _propagate(self, x0: Float[ndarray, "n 1"], *, ahead: int = 0) -> None:
        """Standard deviations along the plan; `ahead`: as seen from its next state, which will then be measured."""
        start = self.mpc.opt_x_num_unscaled["_x", ahead, 0, -1].full()[:, 0] if ahead else x0[:, 0]
        inputs = self.planned_inputs[ahead : ahead + self.steps]
        std = self.dynamics.rollout(start, inputs, by=self.by, noise=self.noise).std[0]
        self.predicted_std[1:] = std[np.minimum(np.arange(len(self.predicted_std) - 1), len(std) - 1)]

    def _parameters(self, _: Any) -> Any:
        for k, std in enumerate(self.predicted_std):
            self._template["_tvp", k, "predicted_std"] = std
        return self._template


def _log_cost(model: "do_mpc.model.Model", limit: float) -> Any:
    """The logarithm: a variance far outside the data is larger by many orders, which no solver likes."""
    if not limit > 0:
        raise InputError(f"limit={limit} of the affine cost must be positive; trust_limit(dynamics) gives one")
    ca = need("casadi", extra="control")
    return ca.log(model.aux["affine_cost"]) - float(np.log(limit))


def _softness(penalty: float | None) -> dict[str, Any]:
    return {} if penalty is None else {"soft_constraint": True, "penalty_term_cons": float(penalty)}
