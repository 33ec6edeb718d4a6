"""The shape of the noise: the head against slow forms and known truths, and what a model with it promises."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import refused
from numpy.testing import assert_allclose
from scipy.optimize import approx_fprime
from scipy.stats import norm

import lastlayer
from lastlayer import BLLRegressor
from lastlayer.calibration.shape import (
    OF_LARGE_TABLES,
    PENALTIES,
    Recipe,
    ShapePoints,
    ShapeProblem,
    continuous,
    fit_shape,
    is_gain,
    log_density,
    promising,
    weighted_quantile,
)
from lastlayer.integrations.casadi import to_casadi
from lastlayer.integrations.export import to_arrays
from lastlayer.integrations.export.bundle import Bundle
from lastlayer.integrations.onnx import to_onnx
from lastlayer.online import OnlineModel
from lastlayer.predictor import revisions

KINDS = [Recipe(0, PENALTIES[0], units=3), Recipe(12, PENALTIES[1], units=3)]


def points(n: int = 300, d: int = 2, seed: int = 0, *, humps: float = 0.0, skew: bool = False) -> ShapePoints:
    """A Gaussian at each point and targets drawn from it, or from two humps or a skewed distribution around it."""
    rng = np.random.default_rng(seed)
    z, mean, std = rng.normal(size=(n, d)), rng.normal(size=(n, 1)), np.exp(0.3 * rng.normal(size=(n, 1)))
    r = rng.normal(size=(n, 1))
    if humps:
        r = rng.choice([-humps, humps], (n, 1)) + (1 - humps**2) ** 0.5 * r
    if skew:
        r = rng.exponential(size=(n, 1)) - 1
    t = mean + std * r
    parts = z, t, mean, std, norm.logpdf(t, mean, std), np.ones(n), rng.exponential(size=n)
    return ShapePoints(*map(torch.from_numpy, parts))


def bimodal(n: int, seed: int = 2) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (n, 3))
    jump = np.where(rng.random(n) < 0.5, -0.6, 0.6)
    return X, np.sin(2 * X[:, 0]) + jump + 0.1 * rng.normal(size=n)


@pytest.fixture(scope="module")
def model() -> BLLRegressor:
    X, y = bimodal(500)
    return BLLRegressor(likelihood="auto", max_epochs=10, random_state=0).fit(X, y)


def without(fitted):
    return replace(fitted, calibration=replace(fitted.calibration, shape=None))


@pytest.mark.parametrize("recipe", KINDS)
def test_gradient_is_that_of_finite_differences(recipe):
    problem = ShapeProblem(points(40), recipe)
    x = problem.start.numpy() + 0.3 * np.random.default_rng(0).normal(size=len(problem.start))
    slow = approx_fprime(x, lambda x: problem.value(x)[0], 1e-6)
    assert np.abs(problem.value(x)[1] - slow).max() <= 1e-4 * np.abs(slow).max()


@pytest.mark.parametrize("recipe", KINDS)
def test_it_starts_near_the_mixture_and_without_other_weights_it_is_the_mixture(recipe):
    given = points()
    problem = ShapeProblem(given, recipe)
    start = problem.head(problem.start)
    gain = log_density(start, given) - given.log_density[:, 0]
    assert gain.min() > np.log(0.85)
    assert abs(gain.mean()) < 0.05
    v = start.v.clone()
    v[0, 1:] = -800.0
    other = replace(given, log_density=given.log_density + 0.1)
    assert_allclose(log_density(replace(start, v=v), other), other.log_density[:, 0])


def test_a_weight_of_k_is_k_copies():
    given = points(60, skew=True)
    times = torch.from_numpy(np.random.default_rng(0).integers(1, 4, 60))
    weighted, copied = replace(given, weight=times.double()), given[torch.arange(60).repeat_interleave(times)]
    for recipe in KINDS:
        one, two = ShapeProblem(weighted, recipe), ShapeProblem(copied, recipe)
        x = one.start.numpy() + 0.1
        assert_allclose(one.value(x)[0], two.value(x)[0])
        assert_allclose(one.value(x)[1], two.value(x)[1], atol=1e-9)
    level = torch.tensor([0.0, 0.3, 0.99])
    each = (weighted, copied)
    one, two = (weighted_quantile(p.cost, p.weight, level) for p in each)
    assert (one == two).all()
    gain = np.random.default_rng(1).normal(0.25, 1.0, 60)
    for sure in np.linspace(1.0, 4.0, 20).tolist():
        asked = {"least": 0.0, "sure": sure}
        assert is_gain(gain, times.double().numpy(), **asked) == is_gain(
            gain.repeat(times), np.ones(sum(times)), **asked
        )


def test_it_is_not_adopted_on_targets_drawn_from_the_mixture():
    assert [fit_shape(points(400, seed=seed)) for seed in range(10)] == [None] * 10


def test_humps_and_skew_are_worth_a_head_if_there_are_enough_points():
    skewed = points(400, skew=True)
    assert promising(skewed)
    assert fit_shape(skewed).gain > 0.1
    head, new = fit_shape(points(400, humps=0.9)), points(2000, seed=1, humps=0.9)
    assert (log_density(head, new) - new.log_density[:, 0]).mean() > 0.8 * head.gain > 0.1


def test_levels_are_not_continuous_and_bounds_are():
    y = np.random.default_rng(0).normal(size=200)
    assert continuous(y)
    assert continuous(np.minimum(y, 1.0))
    assert not continuous(np.round(y))
    assert not continuous(np.sign(y))
    assert not continuous(np.where(y > 0.5, 0.7, y) + (np.arange(200) == 0))


def test_large_tables_are_fitted_by_batches(monkeypatch):
    monkeypatch.setattr("lastlayer.calibration.shape.LARGE", 1000)
    small = OF_LARGE_TABLES._replace(units=20, knots=12, penalty=3.0)
    monkeypatch.setattr("lastlayer.calibration.shape.OF_LARGE_TABLES", small)
    head = fit_shape(points(1500, humps=0.9))
    assert head.gain > 0.1
    assert len(head.u) == 20


def test_two_humps_are_found_by_a_fit(model):
    X, y = bimodal(600, seed=3)
    shape = model.calibration_.shape
    assert shape.gain > 0.5
    assert "shape of" in str(model.calibration_)
    found, plain = (f.predictive(X).log_prob(y).mean() for f in (model.fitted_, without(model.fitted_)))
    assert found > -0.365 > -0.85 > plain


def test_density_integrates_to_one_and_quantiles_invert_the_cdf(model):
    X, _ = bimodal(5)
    p, grid = model.predictive(X), np.linspace(-6, 6, 6001)
    density = np.exp(np.stack([p.log_prob(np.full(5, y)) for y in grid]))
    assert_allclose(np.trapezoid(density, grid, axis=0), np.ones(5), rtol=1e-6)
    assert_allclose(np.trapezoid(density * grid[:, None], grid, axis=0), p.mean, atol=1e-6)
    assert_allclose(np.trapezoid(density * grid[:, None] ** 2, grid, axis=0) - p.mean**2, p.var, rtol=1e-5)
    for level in (0.01, 0.3, 0.5, 0.9):
        assert_allclose(p.cdf(p.quantile(level)), np.full(5, level), rtol=1e-6)


def test_variances_add_up_and_the_humps_are_noise(model):
    X, _ = bimodal(50)
    p, plain, function = model.predictive(X), without(model.fitted_).predictive(X), model.predictive(X, noise=False)
    assert_allclose(p.epistemic_var + p.noise_var, p.var)
    assert_allclose(p.epistemic_var, np.minimum(plain.epistemic_var, p.var))
    assert (p.component_epistemic_var <= p.component_var).all()
    assert_allclose(function.mean, p.mean)
    assert_allclose(function.var, plain.epistemic_var)
    frame = p.to_frame()
    assert_allclose(frame["epistemic_std"].to_numpy() ** 2, p.epistemic_var)
    both = type(p).mixture([p, p])
    assert_allclose(both.epistemic_var, p.epistemic_var)
    assert_allclose(both.var, p.var)


def test_every_way_to_predict_gives_the_same(model, tmp_path):
    X, _ = bimodal(20)
    p = model.predictive(X)
    mean, std = model.predict(X, return_std=True)
    assert_allclose(mean, p.mean)
    assert_allclose(std, p.std)
    assert_allclose(model.predict(X), p.mean)
    found = model.module()(torch.from_numpy(X))
    for name in ("mean", "var", "epistemic_var", "noise_var"):
        assert_allclose(found[name][:, 0], getattr(p, name), atol=1e-12)
    np.savez(tmp_path / "model.npz", **to_arrays(model))
    bundle = Bundle(tmp_path / "model.npz").predict(X)
    assert_allclose(bundle.mean, p.mean)
    assert_allclose(bundle.std, p.std)
    assert_allclose(bundle.quantile(0.2), p.quantile(0.2), rtol=1e-6)
    online = OnlineModel(model)
    assert_allclose(online.predict(X), p.mean)
    assert_allclose(online.predictive(X).quantile(0.2), p.quantile(0.2), rtol=1e-6)
    held_out = model.held_out_
    assert held_out.predictive(bimodal(500)[0][held_out.rows]).log_prob(bimodal(500)[1][held_out.rows]).mean() > -0.4


def test_exports_of_graphs_have_the_moments(tmp_path, as_a_user):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("casadi")
    model = BLLRegressor(likelihood="auto", n_members=1, max_epochs=10, random_state=0).fit(*bimodal(300))
    assert model.calibration_.shape is not None
    X, _ = bimodal(3)
    p = model.predictive(X)
    assert to_onnx(model, tmp_path / "model.onnx").exists()  # compared with the model before it is written
    for noise, var in ((True, p.var), (False, p.epistemic_var)):
        function = to_casadi(model, noise=noise)
        found = np.array([[float(value) for value in function(x)[:2]] for x in X])
        assert_allclose(found, np.stack([p.mean, var], 1), rtol=1e-7)


def test_outside_the_data_the_mixture_comes_back(model):
    X = 200.0 * np.ones((1, 3)) * np.array([[1.0, -1.0, 1.0]])
    p, plain = model.predictive(X), without(model.fitted_).predictive(X)
    n = len(model.calibration_.shape.follows) - 1
    assert p.weights[-n:].sum() < 0.02
    assert_allclose(p.std, plain.std, rtol=0.02)


def test_tuning_alpha_leaves_the_mean(model):
    X, y = bimodal(100, seed=5)
    tuned = copy.deepcopy(model).tune_alpha(X, y)
    moved = revisions.at_alpha(model.fitted_, 3.0)
    for other in (tuned.fitted_, moved):
        assert_allclose(other.point(X), model.fitted_.point(X))
        mean, std = other.point_and_std(X)
        p = other.predictive(X)
        assert_allclose(mean[:, 0], p.mean)
        assert_allclose(std[:, 0], p.std)


def test_files_and_updates_keep_it_and_calibration_fits_it_again(model, tmp_path):
    X, y = bimodal(100, seed=6)
    model.save(tmp_path / "model")
    loaded, changed = lastlayer.load(tmp_path / "model"), copy.deepcopy(model).update(X, y)
    assert (loaded.predictive(X).quantile([0.1, 0.6]) == model.predictive(X).quantile([0.1, 0.6])).all()
    assert changed.calibration_.shape is model.calibration_.shape or changed.calibration_.shape.gain > 0.5
    assert copy.deepcopy(model).calibrate(X, y).calibration_.shape is None  # too few
    assert copy.deepcopy(model).calibrate(*bimodal(400, seed=7)).calibration_.shape.gain > 0.5


def test_what_needs_bells_says_so(model):
    X, _ = bimodal(3)
    for ask in (model.joint, model.sample_y, lambda X: model.predict(X, return_cov=True)):
        refused("needs Gaussian noise, and calibration found another shape", ask, X)
    assert model.fitted_.alone(0).calibration.shape is None


def test_it_is_tried_only_with_an_automatic_likelihood_one_output_and_no_known_noise(caplog):
    X, y = bimodal(200)
    fast = {"max_epochs": 2, "random_state": 0, "n_members": 1}
    assert BLLRegressor(likelihood="gaussian", **fast).fit(X, y).calibration_.shape is None
    with caplog.at_level("INFO"):
        both = BLLRegressor(likelihood="auto", **fast).fit(X, np.column_stack([y, y**2 - X[:, 0]]))
        assert both.calibration_.shape is None
        known = BLLRegressor(likelihood="auto", **fast).fit(X, y, noise_std=np.full(200, 0.1))
        assert known.calibration_.shape is None
    assert caplog.text.count("one output, a table and no known noise") == 2
