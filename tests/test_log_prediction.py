"""Models of log y: a distribution of y, exact in density and quantiles, with the moments of log-normals."""

import numpy as np
import pytest
import torch
from helpers import refused, reloaded
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import lognorm

import lastlayer
from lastlayer import BLLRegressor
from lastlayer.data.observe import Derivative
from lastlayer.dynamics import DynamicsModel, Episode
from lastlayer.ensemble.likelihood import candidates
from lastlayer.likelihoods import Gaussian, LogNormal
from lastlayer.online import OnlineModel
from lastlayer.predictions.lognormal import LogPrediction
from lastlayer.predictions.metrics import coverage, crps, log_predictive_density, rmse
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.settings.types import Given

FAST = {"preset": "evidence", "hidden": (6,), "max_epochs": 30, "random_state": 0}


def log_mixture(q: int = 2) -> MixturePrediction:
    rng = np.random.default_rng(0)
    correlation = None if q == 1 else np.stack([np.eye(q) + r * (1 - np.eye(q)) for r in (0.5, -0.6)])
    return MixturePrediction(
        component_mean=rng.normal(size=(2, 3, q)),
        component_epistemic_var=rng.uniform(0.05, 0.3, (2, 3, q)),
        component_noise_var=rng.uniform(0.05, 0.3, (2, 3, q)),
        affine_cost=np.arange(3.0),
        weights=np.array([[0.3, 0.5, 0.9], [0.7, 0.5, 0.1]]),
        correlation=correlation,
    )


def one(mean: float, epistemic_var: float, noise_var: float, m: int = 1) -> MixturePrediction:
    """A Gaussian of the logarithm, the same at every point."""
    of = lambda value: np.full((m, 1), value)
    parts = {"epistemic_var": of(epistemic_var), "noise_var": of(noise_var), "affine_cost": np.zeros(m)}
    return MixturePrediction.gaussian(of(mean), **parts)


def rows(n: int = 80) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (n, 2))
    return X, np.exp(1.5 * X[:, 0] - X[:, 1] + 0.2 * rng.standard_normal(n))


@pytest.fixture(scope="module")
def fitted() -> BLLRegressor:
    return BLLRegressor(likelihood="lognormal", **FAST).fit(*rows())


def test_a_single_component_is_scipys_log_normal():
    p, exact, y = LogPrediction(one(0.3, 0.2, 0.1)), lognorm(np.sqrt(0.3), scale=np.exp(0.3)), np.array([[1.7]])
    np.testing.assert_allclose(p.mean, exact.mean())
    np.testing.assert_allclose(p.var, exact.var())
    np.testing.assert_allclose(p.log_prob(y), exact.logpdf(1.7))
    np.testing.assert_allclose(p.cdf(y), [[exact.cdf(1.7)]])
    np.testing.assert_allclose(p.quantile(0.9), [[exact.ppf(0.9)]])
    np.testing.assert_allclose(np.ravel(p.interval(0.8)), exact.ppf([0.1, 0.9]))
    absolute = quad(lambda t: (exact.cdf(t) - (t >= 1.7)) ** 2, 0, 60, points=[1.7], limit=400)[0]
    assert crps(p, y) == pytest.approx(absolute, rel=1e-6)


def test_moments_densities_and_draws_of_a_mixture_agree():
    p = LogPrediction(log_mixture())
    draws = p.sample(200_000, random_state=0)
    np.testing.assert_allclose(draws.mean(0), p.mean, rtol=0.01)
    np.testing.assert_allclose(draws.var(0), p.var, rtol=0.1)
    cov = np.einsum("nmi,nmj->mij", draws - p.mean, draws - p.mean) / len(draws)
    np.testing.assert_allclose(cov, p.cov(), rtol=0.15, atol=0.02)
    np.testing.assert_allclose(np.diagonal(p.cov(), axis1=1, axis2=2), p.var)
    np.testing.assert_allclose((draws <= p.quantile(0.2)).mean(0), 0.2, atol=0.005)
    np.testing.assert_allclose(p.cdf(p.quantile(0.2)), 0.2)
    for i in range(2):
        density = lambda t, i=i: np.exp(p.log_prob(np.full((3, 2), t), per_output=True)[1, i])
        assert quad(density, 0, 200, limit=400)[0] == pytest.approx(1, abs=1e-4)
    y = p.quantile(0.6)
    distance = np.abs(draws - y).mean(0) - 0.5 * np.abs(draws[::2] - draws[1::2]).mean(0)
    np.testing.assert_allclose(crps(p, y, per_output=True), distance.mean(0), rtol=0.02)


def test_epistemic_variance_is_that_of_the_mean_given_the_function():
    """Law of total variance: Var y = Var E[y | f] + E Var(y | f), by draws of f."""
    log, rng = one(0.4, 0.2, 0.1), np.random.default_rng(0)
    p = LogPrediction(log)
    f = log.mean + np.sqrt(log.epistemic_var) * rng.standard_normal((400_000, 1, 1))
    given_f = np.exp(f + log.noise_var / 2)
    np.testing.assert_allclose(p.epistemic_var, given_f.var(0), rtol=0.02)
    np.testing.assert_allclose(p.noise_var, (given_f**2 * np.expm1(log.noise_var)).mean(0), rtol=0.02)


def test_a_missing_target_leaves_the_density_of_the_others_and_what_is_not_positive_has_none():
    p = LogPrediction(log_mixture(2))
    y = np.array([[1.0, np.nan], [np.nan, 2.0], [0.5, 3.0]])
    each = p.log_prob(np.nan_to_num(y, nan=1.0), per_output=True)
    np.testing.assert_allclose(p.log_prob(y)[:2], [each[0, 0], each[1, 1]])
    p = LogPrediction(log_mixture(1))
    y = np.array([0.0, -1.0, 1.0])
    assert np.isneginf(p.log_prob(y)).tolist() == [True, True, False]
    assert p.cdf(y)[:2, 0].tolist() == [0, 0]
    np.testing.assert_allclose(crps(p, np.full(3, -2.0)) - crps(p, np.zeros(3)), 2)  # as far as it is below


@pytest.mark.parametrize("std", [0.1, 3.0, 20.0])
def test_crps_is_exact_however_wide_the_distribution(std):
    """Against the squared distance between distribution functions, integrated over u = log t; the mean is exp(200) for
    a standard deviation of 20, and would swallow every digit."""
    var = np.array([[std**2], [std**2 / 4]])[..., None]
    log = MixturePrediction(np.zeros((2, 1, 1)), var, 0 * var, np.zeros(1), np.array([[0.7], [0.3]]))
    apart = lambda u: 0.7 * ndtr(-abs(u) / std) + 0.3 * ndtr(-2 * abs(u) / std)  # of the distribution functions; y = 1
    squared = lambda u: np.exp(u) * apart(u) ** 2
    lower, upper = (quad(squared, *limits, limit=1000)[0] for limits in ((-20 * std, 0), (0, 30 * std)))
    assert crps(LogPrediction(log), np.ones((1, 1))) == pytest.approx(lower + upper, rel=1e-6)


def test_far_outside_moments_stay_numbers():
    p = LogPrediction(MixturePrediction.mixture([one(0.0, 1e4, 1.0)] * 2))
    assert np.isfinite([p.mean, p.var, p.std, p.quantile(0.99), p.crps(np.ones((1, 1)))]).all()
    np.testing.assert_allclose(p.point, 1)


def test_a_component_of_hardly_any_weight_does_not_govern_the_scores():
    usual, wide = one(0.0, 0.2, 0.3), one(0.0, 150.0, 1.0)
    working = MixturePrediction.mixture([usual, wide], np.array([1 - 1e-5, 1e-5]))
    y, narrowed = np.array([[1.2]]), LogNormal().predict(working)
    assert LogPrediction(working).crps(y) > 1e5
    np.testing.assert_allclose(narrowed.crps(y), LogPrediction(usual).crps(y), rtol=1e-2)
    np.testing.assert_allclose(narrowed.log_prob(y), LogPrediction(working).log_prob(y), atol=1e-4)
    np.testing.assert_allclose(narrowed.log.component_var[1], 16 * ((1 - 1e-5) * 0.5 + 1e-5 * 151.0), rtol=1e-9)


def test_it_is_the_model_of_log_y(fitted):
    X, y = rows()
    of_log = BLLRegressor(**FAST).fit(X, np.log(y))
    p, log = fitted.predictive(X), of_log.predictive(X)
    assert isinstance(p, LogPrediction)
    np.testing.assert_array_equal(p.log.mean, log.mean)
    np.testing.assert_allclose(p.log_prob(y), log.log_prob(np.log(y)) - np.log(y))
    np.testing.assert_allclose(fitted.predict(X), np.exp(log.mean))
    point, std = fitted.predict(X, return_std=True)
    np.testing.assert_array_equal(point, fitted.predict(X))
    np.testing.assert_array_equal(std, p.std.reshape(-1))
    np.testing.assert_allclose(fitted.sample_y(X, 2), np.exp(of_log.sample_y(X, 2)))
    function = fitted.predictive(X, noise=False)
    np.testing.assert_allclose(function.quantile(0.5), np.exp(of_log.predictive(X, noise=False).mean))
    assert point.shape == y.shape
    assert fitted.settings_.layer.likelihood == "lognormal"
    assert coverage(p, y, 0.9) > 0.7


MIXTURE = {"preset": "fast", "hidden": (4,), "max_epochs": 5, "random_state": 0}


def test_predict_is_the_median_which_is_sane_far_outside():
    """The mean is astronomical there: it was above 1e100, and with it the RMSE."""
    X, y = rows(60)
    mixture = BLLRegressor(likelihood="lognormal", **MIXTURE).fit(X, y)
    for scale in (1, 50):
        p = mixture.predictive(scale * X)
        np.testing.assert_allclose(mixture.predict(scale * X), p.quantile(0.5))
        np.testing.assert_allclose(p.cdf(mixture.predict(scale * X)), 0.5)
    assert mixture.predict(50 * X).max() < 1e15
    assert rmse(p, y) < 1e15
    assert p.mean.max() > 1e50
    assert list(p.to_frame())[:2] == ["median", "std"]


@pytest.mark.usefixtures("as_a_user", "small_process")
def test_calibration_revisions_and_files(tmp_path):
    X, y = rows(120)
    model = BLLRegressor(likelihood="lognormal", **MIXTURE).fit(X[:80], y[:80])
    plain = BLLRegressor(**MIXTURE).fit(X[:80], np.log(y[:80]))
    same = lambda: np.testing.assert_allclose(model.predictive(X).log.mean, plain.predictive(X).mean)
    same()
    for each, targets in ((model, y), (plain, np.log(y))):
        each.update(X[80:90], targets[80:90]).tune_alpha(X[90:100], targets[90:100])
    same()
    assert model.alpha_ == pytest.approx(plain.alpha_)
    for each, targets in ((model, y), (plain, np.log(y))):
        each.calibrate(X[90:100], targets[90:100]).conformalize(X[100:], targets[100:])
    ours, theirs = (each.predictive(X).interval(0.5, method="conformal") for each in (model, plain))
    np.testing.assert_allclose(ours, np.exp(theirs), rtol=0.02)  # a few components are narrowed
    loaded = reloaded(model, tmp_path)
    assert loaded.likelihood == "lognormal"
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    assert log_predictive_density(model.predictive(X), y) > -5
    refused(r"zero or negative in 2 rows \(first: row 0\)", model.update, X[:2], -y[:2])


def test_auto_considers_the_logarithm_of_skewed_targets_alone():
    rng = np.random.default_rng(0)
    considered = lambda y: candidates("auto", Given(np.zeros((len(y), 1)), y))
    normal = rng.normal(10, 1, (200, 1))
    skewed = np.exp(rng.standard_normal((200, 1)))
    assert considered(skewed) == [LogNormal(), Gaussian()]
    assert considered(normal) == [Gaussian()]
    assert considered(skewed - skewed.min()) == [Gaussian()]  # one is zero
    assert considered(np.hstack([skewed, normal])) == [Gaussian()]
    some = np.where(rng.random((200, 1)) < 0.5, np.nan, skewed)
    assert considered(np.hstack([skewed, some])) == [LogNormal(), Gaussian()]
    assert considered(np.ones((5, 1))) == [Gaussian()]
    X, y = rows()
    model = BLLRegressor(likelihood="auto", **FAST | {"max_epochs": 1})
    assert model.fit(X, y).settings_.layer.likelihood == "lognormal"
    assert model.fit(X, np.log(y)).settings_.layer.likelihood == "gaussian"
    assert not isinstance(model.predictive(X), LogPrediction)


def test_targets_that_are_not_positive_are_refused(fitted):
    X, y = rows()
    model = fitted.with_fitted(fitted.fitted_)
    refused("needs positive targets, and y is zero or negative in 80 rows", model.fit, X, -y)
    refused(r"in 1 rows \(first: row 40\)", model.fit, X, np.where(np.arange(len(y)) == 40, -y, y))


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda m, X, y: m.joint(X), "joint needs Gaussian"),
        (lambda m, X, y: m.predict(X, return_cov=True), "joint needs Gaussian"),
        (lambda m, X, y: m.module(), r"module\(\) needs Gaussian"),
        (lambda m, X, y: m.predictive_of(Derivative(0), X), "a linear functional needs Gaussian"),
        (lambda m, X, y: m.update_observations([Derivative(0).at(X).observed(y)]), "an observation needs"),
        (lambda m, X, y: OnlineModel(m), "OnlineModel needs Gaussian"),
        (lambda m, X, y: m.fit(X, y, noise_std=0.1), "noise_std or observations needs Gaussian"),
        (lambda m, X, y: m.set_params(likelihood="sqrt").fit(X, y), "likelihood='sqrt'"),
        (lambda m, X, y: m.fit_source(lastlayer.sources.ArraySource(X, y)), "transform the targets of the source"),
        (lambda m, X, y: DynamicsModel(regressor=m).fit([Episode(y[:21, None], X[:20])]), "steps add up, needs Gauss"),
    ],
)
@pytest.mark.parametrize("kind", ["lognormal", "counts", "levels"])
def test_what_needs_a_gaussian_refuses_it(kind, act, words):
    X, y = rows()
    y = y if kind == "lognormal" else np.round(y) if kind == "counts" else np.minimum(np.round(y), 9)
    torch.manual_seed(0)
    refused(words, act, BLLRegressor(likelihood=kind, **FAST | {"max_epochs": 1}).fit(X, y), X, y)
