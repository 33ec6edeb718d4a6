"""Learned dynamics in do-mpc: a discrete model, chance constraints from propagated covariance, trust regions."""

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
FIRST_PLANS = 3
"""Number of times the first plan is solved, since no covariance is available for the first solution."""


def to_do_mpc(dynamics: DynamicsModel, *, symvar_type: SymVarType = "MX") -> "do_mpc.model.Model":
    """Build a discrete do-mpc model of fitted dynamics; extend it as needed, then call its `setup()`.

    The states `y` and, with more than one lag, `y_past` and `u_past` together are what `dynamics.lags.state(episode)`
    returns; the input is `u`. The auxiliary expressions `next_mean`, `next_cov` (column by column) and `affine_cost`
    describe the next step, and chance constraints use the time-varying parameter `predicted_std`.

    Parameters
    ----------
    dynamics : DynamicsModel
        Fitted dynamics.
    symvar_type : {"MX", "SX"}, default "MX"
        Type of the symbols: "MX" is faster for networks, and "SX" is needed to linearise or pickle the model.
    """
    do, ca = need("do_mpc", extra="control"), need("casadi", extra="control")
    check_choice("symvar_type", symvar_type, get_args(SymVarType))
    one_step = to_casadi(dynamics.regressor_, name="one_step")
    lags, q, d = dynamics.lags, dynamics.n_outputs_, dynamics.n_inputs_
    model = do.model.Model("discrete", symvar_type)
    k, (F, G) = lags.outputs * q, lags.shift(q, d)
    ends = {"y": (0, q), "y_past": (q, k), "u_past": (k, len(F))}
    parts = {name: model.set_variable("_x", name, (b - a, 1)) for name, (a, b) in ends.items() if b > a}
    u = model.set_variable("_u", "u", (d, 1))
    model.set_variable("_tvp", "predicted_std", (q, 1))
    state = ca.vertcat(*parts.values())
    change, cov, cost = one_step(ca.vertcat(state[:k, 0], u, state[k:, 0]))
    mean = parts["y"] + change if lags.increments else change
    moved = ca.mtimes(ca.DM(F), state) + ca.mtimes(ca.DM(G), u)
    for name in parts:
        model.set_rhs(name, mean if name == "y" else moved[slice(*ends[name])])
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
    """Keep an output within bounds, each with a given probability at each step of the plan.

    Parameters
    ----------
    mpc, output : do_mpc.controller.MPC, int
        The controller, before `setup()`, and the index of the output.
    upper, lower : float, default None
        Bounds; each is tightened by a normal quantile times the predicted standard deviation.
    probability : float, default 0.95
        Probability of each bound, at least 0.5; 0.5 constrains the mean.
    penalty : float or None, default 1e3
        Cost per unit of violation, so that the problem stays feasible from a bad start. None: a hard constraint.
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
    """Return a quantile of the affine cost that the training points would have as new points, times a factor.

    Parameters
    ----------
    dynamics, quantile, factor : DynamicsModel, float, default 0.99 and 1.0
        Fitted dynamics, the fraction of the training points below the limit, and the factor on it.
    """
    if not 0 <= quantile <= 1:
        raise InputError(f"quantile={quantile} must lie between 0 and 1")
    return factor * float(np.quantile(as_fitted(dynamics.regressor_, "trust_limit").sample_cost.numpy(), quantile))


def trust_constraint(mpc: "do_mpc.controller.MPC", limit: float, *, penalty: float | None = None) -> None:
    """Keep the affine cost of every step of the plan below a limit, so that no step extrapolates farther.

    Parameters
    ----------
    mpc, limit : do_mpc.controller.MPC, float
        The controller, before `setup()`, and the largest affine cost, such as `trust_limit(dynamics)`.
    penalty : float, default None
        Cost of each factor of e above the limit. None: a hard constraint.
    """
    mpc.set_nl_cons("trust", _log_cost(mpc.model, limit), ub=0.0, **_softness(penalty))


def trust_cost(model: "do_mpc.model.Model", limit: float) -> Any:
    """Return a term for the stage cost: the squared excess of the log affine cost over that of the limit.

    Parameters
    ----------
    model, limit : do_mpc.model.Model, float
        A model made by `to_do_mpc`, and the affine cost below which the term is zero.
    """
    ca = need("casadi", extra="control")
    return ca.fmax(_log_cost(model, limit), 0) ** 2


class Controller:
    """A do-mpc controller that updates chance constraints with the covariance along its last plan, shifted by one step.

    Parameters
    ----------
    mpc, dynamics : do_mpc.controller.MPC, DynamicsModel
        The controller, with its constraints and before `setup()`, which is called here, and fitted dynamics.
    by, noise : Propagation, {"process", "measurement"}
        Propagation method of the covariance, by default `Linearized()`, and the noise, as in `DynamicsModel.rollout`.
    steps : int, default None
        Number of steps over which the covariance grows before it is held constant. None: the whole horizon.
    """

    def __init__(
        self,
        mpc: "do_mpc.controller.MPC",
        dynamics: DynamicsModel,
        *,
        by: Propagation | None = None,
        noise: Feedback = "process",
        steps: int | None = None,
    ) -> None:
        self.mpc, self.dynamics, self.noise = mpc, dynamics, noise
        self.by = Linearized() if by is None else by
        horizon = int(mpc.settings.n_horizon)
        self.steps = horizon if steps is None else min(int(steps), horizon)
        if self.steps < 1:
            raise InputError(f"steps={steps} must be 1 or more")
        self.predicted_std = np.zeros((horizon + 1, dynamics.n_outputs_))
        self._template = mpc.get_tvp_template()
        mpc.set_tvp_fun(self._parameters)
        mpc.setup()
        self.reset()

    def reset(self, before: Float[ndarray, " d"] | None = None) -> None:
        """Forget the last plan, to begin a new run.

        Parameters
        ----------
        before : ndarray of shape (d,), default None
            Input that was applied last.
        """
        self.mpc.reset_history()
        self.predicted_std[:] = 0
        self._started = False
        if before is not None:
            self.mpc.u0 = np.asarray(before, float).reshape(-1, 1)

    def make_step(self, state: Float[ndarray, " n"]) -> Float[ndarray, " d"]:
        """Solve for the plan from a state, and return its first input.

        Parameters
        ----------
        state : ndarray of shape (n,)
            Measured state, as `dynamics.lags.state(episode)` returns it.
        """
        x0 = np.asarray(state, float).reshape(-1, 1)
        if not self._started:
            before = self.mpc.u0.cat.full()
            self.mpc.x0 = x0
            self.mpc.set_initial_guess()
            for _ in range(FIRST_PLANS - 1):
                self.mpc.make_step(x0)
                self._propagate(x0)
                self.mpc.u0 = before  # nothing was applied yet
        self._started = True
        u = np.asarray(self.mpc.make_step(x0))[:, 0]
        self._propagate(x0, ahead=1)
        return u

    @property
    def planned_inputs(self) -> Float[ndarray, "h d"]:
        """Inputs of the last plan, (h, d)."""
        plan = self.mpc.opt_x_num_unscaled
        return np.stack([plan["_u", k, 0].full()[:, 0] for k in range(int(self.mpc.settings.n_horizon))])

    def _propagate(self, x0: Float[ndarray, "n 1"], *, ahead: int = 0) -> None:
        """Update the standard deviations along the plan, from its step `ahead`, whose state is then known."""
        start = self.mpc.opt_x_num_unscaled["_x", ahead, 0, -1].full()[:, 0] if ahead else x0[:, 0]
        inputs = self.planned_inputs[ahead : ahead + self.steps]
        std = self.dynamics.rollout(start, inputs, by=self.by, noise=self.noise).std[0]
        self.predicted_std[1:] = std[np.minimum(np.arange(len(self.predicted_std) - 1), len(std) - 1)]

    def _parameters(self, _: Any) -> Any:
        for k, std in enumerate(self.predicted_std):
            self._template["_tvp", k, "predicted_std"] = std
        return self._template


def _log_cost(model: "do_mpc.model.Model", limit: float) -> Any:
    """Log affine cost minus that of the limit; the cost itself spans too many orders of magnitude for a solver."""
    if not limit > 0:
        raise InputError(f"limit={limit} of the affine cost must be positive, such as trust_limit(dynamics)")
    ca = need("casadi", extra="control")
    return ca.log(model.aux["affine_cost"]) - float(np.log(limit))


def _softness(penalty: float | None) -> dict[str, Any]:
    return {} if penalty is None else {"soft_constraint": True, "penalty_term_cons": float(penalty)}
