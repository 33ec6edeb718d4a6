"""Learned dynamics in do-mpc: the model steps as it should, and constraints bite where they should."""

import sys
from functools import cache

import numpy as np
import pytest
from helpers import refused

from lastlayer import BLLRegressor
from lastlayer.dynamics import DynamicsModel, Episode, Lags, Linearized
from lastlayer.errors import MissingPackageError, need
from lastlayer.integrations import Controller, chance_constraint, to_do_mpc, trust_constraint, trust_cost, trust_limit

pytest.importorskip("casadi")
# casadi 3.8 announces a change of its NumPy support whenever do-mpc calls a NumPy function
pytestmark = pytest.mark.filterwarnings("ignore:\\s*casadi. a numpy function:FutureWarning")

QUIET = {"ipopt.print_level": 0, "print_time": 0, "ipopt.sb": "yes"}


@cache
def do_mpc():
    return need("do_mpc", extra="control")


@cache
def learned(lags=Lags(1, 1, increments=True), q=2):  # noqa: B008
    """y+ = 0.9 y + 0.5 u + noise, learned from inputs between -1 and 1; a second output of no interest."""
    rng = np.random.default_rng(0)
    episodes = []
    for _ in range(6):
        ys, u = [np.zeros(2)], rng.uniform(-1, 1, (15, 1))
        for (force,) in u:
            ys.append(np.array([0.9, 0.5]) * ys[-1] + np.array([0.5, 0.1]) * force)
        episodes.append(Episode.of((np.stack(ys) + 0.02 * rng.standard_normal((16, 2)))[:, :q], u))
    return DynamicsModel(lags, BLLRegressor((4,), preset="evidence", max_epochs=60, random_state=0)).fit(episodes)


def stepped(dynamics, state, u):
    """The state after an input, and the prediction of its outputs."""
    p, (F, G) = dynamics.next(dynamics.lags.join(state, u, 2)[None]), dynamics.lags.shift(2, 1)
    after = F @ state + G @ u
    after[:2] = p.mean[0]
    return after, p


def set_up(dynamics, **words):
    model = to_do_mpc(dynamics, **words)
    model.setup()
    return model


def controller(*constraints, horizon=5, target=50.0, extra=lambda model: 0, **words):
    """Pushes the first output as high as it may."""
    model = set_up(learned())
    mpc = do_mpc().controller.MPC(model)
    mpc.settings.n_horizon, mpc.settings.t_step, mpc.settings.nlpsol_opts = horizon, 1.0, QUIET
    cost = 0.01 * (model.x["y"][0] - target) ** 2
    mpc.set_objective(mterm=cost, lterm=cost + extra(model))
    mpc.set_rterm(u=1e-3)
    mpc.bounds["lower", "_u", "u"], mpc.bounds["upper", "_u", "u"] = -3.0, 3.0
    for add in constraints:
        add(mpc)
    return Controller(mpc, learned(), **words)


@pytest.mark.parametrize("lags", [Lags(1, 1, increments=True), Lags(2, 1), Lags(2, 3)])
def test_a_step_of_the_model_is_a_step_of_the_dynamics(lags):
    dynamics = learned(lags)
    model = set_up(dynamics)
    rng = np.random.default_rng(0)
    state, u = rng.uniform(-1, 1, lags.n_state(2, 1)), rng.uniform(-1, 1, 1)
    zero = np.zeros(2)
    wanted, p = stepped(dynamics, state, u)
    after = model._rhs_fun(state, u, [], zero, [], []).full()[:, 0]
    np.testing.assert_allclose(after, wanted, rtol=1e-9, atol=1e-12)
    aux = model._aux_expression_fun(state, u, [], zero, []).full()[:, 0]
    names = ["next_mean"] * 2 + ["next_cov"] * 4 + ["affine_cost"]
    found = {name: aux[-7:][[n == name for n in names]] for name in set(names)}
    np.testing.assert_allclose(found["next_mean"], p.mean[0], rtol=1e-9)
    np.testing.assert_allclose(found["next_cov"], p.cov()[0].T.ravel(), rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(found["affine_cost"], p.affine_cost, rtol=1e-9)


def test_a_model_of_one_output_and_one_lag_steps():
    dynamics = learned(Lags(1, 1), 1)
    simulator = do_mpc().simulator.Simulator(set_up(dynamics))
    simulator.set_param(t_step=1.0)
    template = simulator.get_tvp_template()
    simulator.set_tvp_fun(lambda _: template)
    simulator.setup()
    simulator.x0 = np.array([[0.3]])
    expected = dynamics.regressor_.predict(np.array([[0.3, 0.2]]))
    np.testing.assert_allclose(simulator.make_step(np.array([[0.2]])).ravel(), expected.ravel(), rtol=1e-9)


@pytest.mark.parametrize("lags", [Lags(1, 1, increments=True), Lags(2, 2)])
def test_a_model_of_scalars_linearises(lags):
    """A and B are the derivatives of a step, by differences; do-mpc's own linear model and LQR take them."""
    dynamics, rng = learned(lags), np.random.default_rng(0)
    model = set_up(dynamics, symvar_type="SX")
    state, u, step = rng.uniform(-0.5, 0.5, lags.n_state(2, 1)), rng.uniform(-0.5, 0.5, 1), 1e-5
    A, B, _, _ = model.get_linear_system_matrices(state, u, tvp=np.zeros(2))
    after = lambda state, u: stepped(dynamics, state, u)[0]
    for exact, around in ((A, lambda e: (state + e, u)), (B, lambda e: (state, u + e))):
        moves = step * np.eye(exact.shape[1])
        slopes = np.stack([(after(*around(e)) - after(*around(-e))) / (2 * step) for e in moves], 1)
        np.testing.assert_allclose(exact, slopes, atol=1e-8)
    linear = do_mpc().model.linearize(model, state, u, tvp0=np.zeros(2))
    np.testing.assert_array_equal(linear.sys_A, A)
    np.testing.assert_array_equal(linear.sys_B, B)


def test_the_back_off_is_the_quantile_times_the_propagated_standard_deviation():
    dynamics = learned()
    cautious = controller(lambda mpc: chance_constraint(mpc, 0, upper=1.0, probability=0.95), noise="measurement")
    bold = controller(lambda mpc: chance_constraint(mpc, 0, upper=1.0, probability=0.5))
    plans = []
    for c in (cautious, bold):
        c.make_step(np.zeros(2))
        x = [float(c.mpc.opt_x_num_unscaled["_x", k, 0, -1, "y"][0]) for k in range(5)]
        plans.append(np.array(x))
    assert plans[1][-1] == pytest.approx(1.0, abs=1e-3)
    std = dynamics.rollout(np.zeros(2), cautious.planned_inputs, by=Linearized(), noise="measurement").std[0, :, 0]
    np.testing.assert_allclose(plans[0][-1], 1 - 1.645 * std[3], atol=0.02)
    assert (std > 0.01).all()


def test_the_standard_deviation_is_held_after_its_steps():
    c = controller(lambda mpc: chance_constraint(mpc, 0, upper=1.0), steps=2)
    c.make_step(np.zeros(2))
    assert (c.predicted_std[0] == 0).all()
    assert (c.predicted_std[1] < c.predicted_std[2]).all()
    assert (c.predicted_std[2:] == c.predicted_std[2]).all()
    c.reset(np.array([0.7]))
    assert (c.predicted_std == 0).all()
    assert float(c.mpc.u0.cat) == 0.7


def plan_costs(c):
    c.make_step(np.zeros(2))
    states = np.stack([c.mpc.opt_x_num_unscaled["_x", k, 0, -1].full()[:, 0] for k in range(5)])
    return learned().next(np.column_stack([states, c.planned_inputs])).affine_cost


def test_trust_holds_hard_soft_and_as_a_cost():
    limit = trust_limit(learned(), 0.9)
    free = plan_costs(controller())
    assert free.max() > 3 * limit  # without it, the plan leaves the data
    hard = plan_costs(controller(lambda mpc: trust_constraint(mpc, limit)))
    assert hard.max() <= 1.001 * limit
    assert hard.max() > 0.9 * limit  # and it is what stops it
    soft = plan_costs(controller(lambda mpc: trust_constraint(mpc, limit, penalty=1e4)))
    np.testing.assert_allclose(soft, hard, rtol=0.02)
    weak = plan_costs(controller(lambda mpc: trust_constraint(mpc, limit, penalty=1.0)))
    priced = plan_costs(controller(extra=lambda model: 5.0 * trust_cost(model, limit)))
    for costs in (weak, priced):
        assert hard.max() < costs.max() < free.max()


def test_the_limit_of_trust_is_a_quantile_of_the_training_points():
    dynamics = learned()
    limits = [trust_limit(dynamics, level) for level in (0.0, 0.5, 0.99, 1.0)]
    assert limits == sorted(limits)
    X = np.array([[0.0, 0.0, 0.0], [4.0, 0.0, 3.0]])
    near, far = dynamics.regressor_.extrapolation(X).affine_cost
    assert limits[0] * 0.5 < near < limits[2] < far
    assert trust_limit(dynamics, 0.5, factor=3.0) == 3 * limits[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mpc: chance_constraint(mpc, 0, upper=1.0, probability=0.3), "at least 0.5"),
        (lambda mpc: chance_constraint(mpc, 0), "upper"),
        (lambda mpc: chance_constraint(mpc, 2, upper=1.0), "outputs 0 to 1"),
        (lambda mpc: trust_constraint(mpc, 0.0), "trust_limit"),
        (lambda mpc: trust_limit(learned(), 1.5), "between 0 and 1"),
        (lambda mpc: Controller(mpc, learned(), steps=0), "1 or more"),
    ],
)
def test_mistakes_are_answered_with_advice(call, message):
    mpc = do_mpc().controller.MPC(set_up(learned()))
    mpc.settings.n_horizon, mpc.settings.t_step = 3, 1.0
    refused(message, call, mpc, error=ValueError)


def test_the_kind_of_symbols_is_checked_and_without_do_mpc_it_says_what_to_install(monkeypatch, as_a_user):
    refused("did you mean 'SX'", to_do_mpc, learned(), symvar_type="SXX", error=ValueError)
    monkeypatch.setitem(sys.modules, "do_mpc", None)
    refused(r"pip install 'lastlayer\[control\]'", to_do_mpc, learned(), error=MissingPackageError)
