"""Where the data end: variances along rays, the term of the process, flags, honest updates, curves of single inputs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import refused

import lastlayer
from lastlayer import BLLRegressor, metrics
from lastlayer.calibration.curve import Curve
from lastlayer.explain import additive_effects
from lastlayer.integrations.export import to_arrays
from lastlayer.integrations.export.bundle import Bundle
from lastlayer.online import ExponentialForgetting, OnlineModel, SlidingWindow
from lastlayer.plots import additive_curves
from lastlayer.settings.types import ADDITIVE, FOURIER

pytestmark = pytest.mark.usefixtures("as_a_user")


def rows(m, low=-1.0, high=1.0, seed=0, f=lambda X: np.sin(3 * X[:, 0]) + X[:, 1]):
    rng = np.random.default_rng(seed)
    X = np.c_[rng.uniform(low, high, m), rng.uniform(-1, 1, m)]
    return X, f(X) + 0.1 * rng.normal(size=m)


def fast(**words):
    """A mixture of every kind of members, and few of each."""
    return BLLRegressor(**{"preset": "fast", "random_state": 0} | words)


@pytest.fixture(scope="module")
def model():
    return fast(max_epochs=150).fit(*rows(60))


def linear_cost(member, z, d):
    """Affine cost of Bayesian linear regression on what the member passes on of the inputs, from moments alone."""
    posterior = member.posterior
    scatter, mean = posterior.statistics.scatter[:-1, :-1], posterior.statistics.mean[:-1]
    own = slice(len(mean) - d, None)  # inputs are the last features
    scale = 1.0 if getattr(member.network, "scale", None) is None else member.network.scale
    away = (z * scale).double() - mean[own]
    precision = scatter[own, own] + torch.eye(d).double() * math.exp(-float(posterior.log_alpha))
    return ((away @ torch.linalg.inv(precision)) * away).sum(-1) + 1 / posterior.statistics.count


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_along_a_ray_the_variance_of_the_mixture_is_never_below_a_square_of_the_distance(model, seed):
    """Var >= min over members of noise b v_lin, beyond the reach of their curves: theory/input_skip.md."""
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=2)
    distances = 2.0 ** np.arange(3, 14)
    X = distances[:, None] * direction / np.linalg.norm(direction)
    var = model.predictive(X, noise=False).var
    fitted, bounds = model.fitted_, []
    z = fitted.standardized(X)
    for i, member in enumerate(fitted.members):
        curve, noise = fitted.curve(i), fitted.noise_std[i, 0] ** 2
        cost = linear_cost(member, z, 2).numpy()
        known = np.minimum(cost, curve.reach)
        bounds.append(noise * curve.slope[0] * known**curve.power * (cost / known))
    assert (var >= np.min(bounds, 0) * (1 - 1e-9)).all()
    assert (np.diff(np.log(var)) > 0).all()  # never surer on the way out
    assert np.diff(np.log(var))[-3:] == pytest.approx(2 * math.log(2), abs=0.2)  # in the end by the square
    lower, upper = model.predictive(X).interval(0.9)
    assert (np.diff(upper - lower) > 0).all()


def test_every_member_sees_the_inputs_themselves(model):
    z = torch.full((1, 2), 1e6, dtype=torch.float64)
    assert {member.family.encoding for member in model.fitted_.members} == {"raw", "piecewise"}
    for member in model.fitted_.members:
        assert float(linear_cost(member, z, 2)) > 1e6, member.family


def _components(fitted, X):
    from lastlayer.predictor.fitted import as_arrays

    with torch.no_grad():
        return as_arrays(fitted.module().components(torch.tensor(X)))


def test_a_member_alone_keeps_the_process(model):
    """As rollouts take it: its moments are those it has in the mixture."""
    fitted, X = model.fitted_, rows(20, 1.5, 3, seed=4)[0]
    together = _components(fitted, X)
    for i in (0, len(fitted.members) - 1):
        alone = fitted.alone(i)
        np.testing.assert_allclose(_components(alone, X).epistemic[0], together.epistemic[i])
        joint = alone.joint(X, noise=False)
        np.testing.assert_allclose(np.diag(joint.cov()), alone.predictive(X, noise=False).var)


@pytest.mark.parametrize("i", [0, -1])
def test_a_member_alone_is_saved_exported_and_tuned_like_any_model(model, i, tmp_path):
    """With the process beside it, where that is not the member itself."""
    one, (X, y) = model.with_fitted(model.fitted_.alone(i)), rows(20, 1.5, 3, seed=4)
    assert (one.fitted_.process is None) == (one.members_[0].family == FOURIER)
    exact = one.predictive(X)
    one.save(tmp_path / "one.lastlayer")
    np.testing.assert_array_equal(lastlayer.load(tmp_path / "one.lastlayer").predictive(X).std, exact.std)
    np.savez(tmp_path / "one.npz", **to_arrays(one))
    np.testing.assert_allclose(Bundle(tmp_path / "one.npz").predict(X).std, exact.std, rtol=1e-9)
    np.testing.assert_allclose(one.module()(torch.tensor(X))["var"][:, 0], exact.var, rtol=1e-9)
    one.tune_alpha(X, y)
    assert np.isfinite(one.predictive(X).std).all()


def test_a_new_value_of_an_input_that_did_not_matter_lies_outside_the_data():
    """Learned features and length scales ignore such an input, the fixed features of the additive model do not."""
    rng = np.random.default_rng(0)
    X = np.c_[rng.uniform(-1, 1, 120), rng.choice([0.0, 1.0, 2.0], 120)]
    model = fast(max_epochs=150).fit(X, np.sin(3 * X[:, 0]) + 0.05 * rng.normal(size=120))
    new, calibration = np.c_[np.linspace(-0.8, 0.8, 20), np.full(20, 3.0)], model.calibration_
    families = [member.family for member in model.members_]
    cost = _components(model.fitted_, new).cost_star[..., 0]
    assert (cost[families.index(FOURIER)] < calibration.outside.inside).all()
    assert (cost[[family == ADDITIVE for family in families]].mean(0) > 2 * calibration.additive_inside).all()
    without = replace(model.fitted_, calibration=replace(calibration, additive_inside=None))
    assert (model.extrapolation(new).quantile == 1).all()
    assert (model.extrapolation(X).quantile == 1).mean() < 0.05
    p, without = model.predictive(new), without.predictive(new)
    assert (p.component_mean.std(0) < 0.75 * without.component_mean.std(0)).all()  # drawn together
    np.testing.assert_allclose(p.mean, without.mean, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(p.var, without.var, rtol=1e-9)


def test_points_beyond_what_was_calibrated_are_flagged(model):
    assert not model.predictive(rows(100, seed=5)[0]).beyond_reach.any()
    assert model.predictive(rows(10, 50, 60)[0]).beyond_reach.all()
    assert BLLRegressor(preset="evidence", max_epochs=2).fit(*rows(30)).predictive(rows(3)[0]).beyond_reach is None


@pytest.mark.parametrize("f", [lambda X: np.sin(3 * X[:, 0]) + X[:, 1], lambda X: (X[:, 0] > 1.3) + X[:, 1]])
def test_rows_of_a_new_region_make_the_model_no_less_honest(f):
    model = fast(max_epochs=60).fit(*rows(80, f=f))
    inside, new = rows(300, seed=1, f=f), rows(300, 1, 2, seed=2, f=f)
    for seed in (3, 4):
        model.update(*rows(80, 1, 2, seed=seed, f=f))
        for X, y in (inside, new):
            assert metrics.coverage(model.predictive(X), y, 0.9) > 0.8


def test_a_curve_widens_by_what_rows_missed_it_and_by_nothing_less():
    curve = Curve(np.ones(1), np.ones(1))
    assert replace(curve, seen=100, squares=130).widening == 1.0  # within three standard errors
    assert replace(curve, seen=100, squares=400).widening == pytest.approx(450 / 150)
    assert replace(curve, seen=100, squares=10).widening == 1.0
    wide = replace(curve, seen=100, squares=400)
    np.testing.assert_allclose(wide.factor(np.array([2.0])), 3 * curve.factor(np.array([2.0])))


def test_rows_as_expected_change_no_curve(model):
    after = model.with_fitted(model.fitted_).update(*rows(100, seed=8)).fitted_.calibration
    assert [curve.widening for curve in after.curves.values()] == [1.0] * len(after.curves)


@pytest.mark.parametrize("memory", [None, ExponentialForgetting(200), SlidingWindow(100)])
def test_a_stream_that_leaves_the_data_is_followed_honestly(model, memory):
    start = rows(100, seed=9) if isinstance(memory, SlidingWindow) else None
    online = OnlineModel(model, memory, start=start)
    X, y = rows(60, seed=10)
    for i in range(0, 60, 20):
        online.update(X[i : i + 20], y[i : i + 20] + 5.0)
    curves = online.fitted_.calibration.curves.values()
    assert all(curve.widening > 1.5 for curve in curves)
    new, _ = rows(50, seed=11)
    assert online.predictive(new).var.mean() > 1.5 * model.predictive(new).var.mean()
    np.testing.assert_allclose(online.model().predictive(new).var, online.predictive(new).var, rtol=0.1)


def test_effects_of_single_inputs_add_up_to_the_additive_member(model):
    fitted = model.fitted_
    places = [i for i, member in enumerate(fitted.members) if member.family == ADDITIVE]
    effects = additive_effects(model, n=7)
    grid = np.stack(np.meshgrid(effects[0].x, effects[1].x), -1).reshape(-1, 2)
    sums = (effects[0].mean[None] + effects[1].mean[:, None]).reshape(-1, 1)
    whole = []
    for i in places:
        member = fitted.members[i]
        z = fitted.standardized(grid)
        with torch.no_grad():
            T = member.posterior.mean(fitted.features(i, z))
        whole.append((T * fitted.targets.scale + fitted.targets.mean).numpy())
    whole = np.mean(whole, 0)
    np.testing.assert_allclose(sums - sums[0], whole - whole[0], atol=1e-8)
    assert (effects[0].std > 0).all()
    X = rows(60)[0]
    for j, effect in enumerate(effects):  # over the range of the training rows
        assert (effect.x[0], effect.x[-1]) == pytest.approx((X[:, j].min(), X[:, j].max()))


def test_curves_of_inputs_are_drawn_and_missing_ones_are_named(model):
    figure = additive_curves(model)
    assert len(figure.axes) == 2
    raw = fast(encoding="raw", max_epochs=5).fit(*rows(30))
    refused(r'no additive members.*encoding="auto"', additive_effects, raw)
