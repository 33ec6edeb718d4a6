"""Counts and levels: masses of cells of a continuous variable, against sums over all values."""

import mpmath
import numpy as np
import pytest
from helpers import refused, reloaded
from hypothesis import given, settings
from hypothesis import strategies as st

from lastlayer import BLLRegressor
from lastlayer._internal.density import log_interval_mass
from lastlayer.data.observe import Derivative
from lastlayer.dynamics import DynamicsModel, Episode
from lastlayer.ensemble import likelihood
from lastlayer.ensemble.likelihood import best_held_out, candidates
from lastlayer.likelihoods import Counts, Gaussian, LogNormal, Ordinal
from lastlayer.likelihoods.base import HeldOutReadings, Predicted
from lastlayer.predictions import metrics
from lastlayer.predictions.discrete import LINKS, DiscretePrediction, Levels, Whole
from lastlayer.predictions.lognormal import LogPrediction
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.settings.types import Given

FAST = {"preset": "evidence", "hidden": (6,), "max_epochs": 30, "random_state": 0}
GRADES = Levels(np.array([-2.0, 0.5, 1.0, 4.0]))


def mixture(q: int = 2, scale: float = 1.0, seed: int = 0) -> MixturePrediction:
    rng = np.random.default_rng(seed)
    return MixturePrediction(
        component_mean=1.5 + scale * rng.normal(size=(2, 3, q)),
        component_epistemic_var=rng.uniform(0.05, 0.3, (2, 3, q)),
        component_noise_var=rng.uniform(0.05, 0.3, (2, 3, q)),
        affine_cost=np.arange(3.0),
        weights=np.array([[0.3, 0.5, 0.9], [0.7, 0.5, 0.1]]),
    )


def counts(n: int = 120, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (n, 2))
    return X, rng.poisson(np.exp(1 + np.sin(3 * X[:, 0]) + X[:, 1])).astype(float)


def grades(n: int = 120, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (n, 2))
    return X, np.clip(np.round(2 * X[:, 0] + X[:, 1] + 0.5 * rng.normal(size=n)), -2, 2) / 2 + 5


@settings(deadline=None)
@given(st.floats(-30, 30), st.floats(1e-6, 5))
def test_the_mass_of_an_interval_is_that_of_many_digits(low, width):
    with mpmath.workdps(260):
        exact = mpmath.log(mpmath.ncdf(low + width) - mpmath.ncdf(low))
    assert log_interval_mass(np.array(low), np.array(low + width)) == pytest.approx(float(exact), rel=1e-7, abs=1e-7)


def test_intervals_without_a_bound_are_tails():
    found = log_interval_mass(np.array([-np.inf, 3.0, -np.inf]), np.array([-40.0, np.inf, np.inf]))
    np.testing.assert_allclose(found, [float(mpmath.log(mpmath.ncdf(-40))), float(mpmath.log(mpmath.ncdf(-3))), 0])


@pytest.mark.parametrize(
    ("cells", "values"), [(GRADES, GRADES.values), *((Whole(link), np.arange(4000.0)) for link in LINKS)]
)
def test_moments_scores_and_quantiles_are_sums_over_all_values(cells, values):
    p = DiscretePrediction(mixture(1), (cells,))
    mass = np.exp([p.log_prob(np.full((3, 1), v)) for v in values])
    np.testing.assert_allclose(mass.sum(0), 1, atol=1e-9)
    mean = values @ mass
    np.testing.assert_allclose(p.mean[:, 0], mean, rtol=2e-3)
    np.testing.assert_allclose(p.var[:, 0], ((values[:, None] - mean) ** 2 * mass).sum(0), rtol=8e-3)
    np.testing.assert_allclose(p.epistemic_var + p.noise_var, p.var)
    y = values[[1, 2, 0]][:, None]
    below = mass.cumsum(0)
    steps = (below[:-1] - (values[:-1, None] >= y[:, 0])) ** 2 * np.diff(values)[:, None]
    np.testing.assert_allclose(p.crps(y)[:, 0], steps.sum(0), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(p.cdf(y)[:, 0], below[[1, 2, 0], range(3)], rtol=1e-8)
    for level in (0.03, 0.5, 0.9):
        smallest = values[(below >= level).argmax(0)]
        np.testing.assert_array_equal(p.quantile(level)[:, 0], smallest)


def test_large_counts_are_summed_at_some_values():
    working = MixturePrediction.gaussian(
        np.array([[6.0], [30.0]]),
        epistemic_var=np.full((2, 1), 0.3),
        noise_var=np.array([[0.2]]),
        affine_cost=np.ones(2),
    )
    p = DiscretePrediction(working, (Whole("log"),))
    np.testing.assert_allclose(p.mean[:, 0], np.exp(np.array([6.25, 30.25])), rtol=3e-3)
    y = np.full((2, 1), 500.0)
    np.testing.assert_allclose(p.crps(y), LogPrediction(working).crps(y), rtol=5e-3)  # counts are nearly continuous


def test_intervals_hold_their_probability_and_drop_a_value_where_the_rest_does():
    m, level = 300, 0.8
    mean, zero = np.random.default_rng(0).uniform(0, 4, (m, 2)), np.zeros((m, 2))
    words = {"epistemic_var": zero, "noise_var": zero + 0.4, "affine_cost": zero[:, 0]}
    p = DiscretePrediction(MixturePrediction.gaussian(mean, **words), (GRADES, Whole("sqrt")))
    mass_of = lambda lower, upper: p.cdf(upper) - p.cdf(lower) + np.exp(p.log_prob(lower, per_output=True))
    (lower, upper), (low, high) = p.interval(level), p.quantile([(1 - level) / 2, (1 + level) / 2])
    assert (mass_of(lower, upper) >= level).all()
    ends = np.exp([p.log_prob(low, per_output=True), p.log_prob(high, per_output=True)])
    spare = (mass_of(low, high) - level >= ends.min(0)) & (low < high)
    np.testing.assert_array_equal((lower > low) | (upper < high), spare)
    assert (lower > low).any()
    assert (upper < high).any()
    assert not ((lower > low) & (upper < high)).any()


def test_draws_are_values_and_what_is_no_value_has_no_mass():
    p = DiscretePrediction(mixture(), (GRADES, Whole("sqrt")))
    draws = p.sample(40_000, random_state=0)
    assert set(np.unique(draws[..., 0])) <= set(GRADES.values)
    assert (draws[..., 1] == np.round(draws[..., 1])).all()
    assert (draws[..., 1] >= 0).all()
    np.testing.assert_allclose(draws.mean(0), p.mean, atol=0.05)
    assert p.discrete
    y = np.array([[0.5, 1.0], [0.6, 1.0], [np.nan, 2.0]])
    found = p.log_prob(y)
    assert found[1] == -np.inf
    assert found[2] == pytest.approx(p.log_prob(y, per_output=True)[2, 1])
    both = (draws[:, 0] == y[0]).all(-1).mean()
    assert np.exp(found[0]) == pytest.approx(both, abs=0.01)
    assert list(p.to_frame().columns)[:2] == ["y0_mean", "y0_std"]


def test_the_calibration_error_of_targets_drawn_from_the_prediction_is_zero():
    m = 20_000
    mean, zero = np.random.default_rng(0).normal(1.5, 1, (m, 1)), np.zeros((m, 1))
    of = lambda var: MixturePrediction.gaussian(mean, epistemic_var=zero, noise_var=var + zero, affine_cost=zero[:, 0])
    p, narrow = (DiscretePrediction(of(var), (GRADES,)) for var in (0.5, 0.1))
    y = p.sample(1, random_state=0)[0]
    assert metrics.calibration_error(p, y) < 0.01
    assert metrics.calibration_error(narrow, y) > 0.05


@pytest.mark.parametrize("missing", [False, True])
def test_slopes_of_held_out_masses_are_differences(missing):
    rng, (c, n, q) = np.random.default_rng(0), (3, 5, 2)
    mean, e, v = (rng.normal(size=(c, n, q)) for _ in range(3))
    lower = np.where(rng.random((n, q)) < 0.3, -np.inf, rng.normal(size=(n, q)))
    upper = np.where(np.isinf(lower), 0.3, lower + 0.7)
    read = (rng.random((n, q)) < 0.7).astype(float) if missing else None
    r = HeldOutReadings(np.zeros((n, q)), read, np.full(n, 2), None, None, lower, upper)
    rho, weights = rng.random((c, n)), np.log(rng.random((c, n)))

    def value(numbers: np.ndarray, *, slopes: bool = False):
        parts = numbers[: 3 * c * n * q].reshape(3, c, n, q)
        p = Predicted(parts[0], np.logaddexp(parts[1], parts[2]), parts[1], parts[2], weights)
        found = Counts().log_marginal(r, p, tuple(numbers[-2:]))
        if not slopes:
            return (rho * found.log_density).sum()
        by, share = found.slopes(rho), np.exp(parts[1] - p.log_var)
        return np.concatenate([np.ravel(x) for x in (by.mean, by.log_var * share, by.log_var * (1 - share), by.tails)])

    x, h = np.concatenate([mean.ravel(), e.ravel(), v.ravel(), [-1.0, 0.8]]), 1e-6
    each = [(value(x + h * unit) - value(x - h * unit)) / (2 * h) for unit in np.eye(len(x))]
    np.testing.assert_allclose(value(x, slopes=True), each, atol=1e-7)


CASES = {
    "poisson": (lambda r, f: r.poisson(np.exp(1.5 + f)), Counts("sqrt")),
    "overdispersed": (lambda r, f: r.poisson(np.exp(2 + f) * r.gamma(2, 0.5, len(f))), Counts("log")),
    "grades": (lambda r, f: np.clip(np.round(2 * f + 0.5 * r.normal(size=len(f))), 0, 4) + 3, Ordinal),
    "binomial": (lambda r, f: r.binomial(10, 1 / (1 + np.exp(-2 * f))), Ordinal),
    "normal": (lambda r, f: f + 0.1 * r.normal(size=len(f)), Gaussian()),
    "skewed": (lambda r, f: np.exp(f + 0.5 * r.normal(size=len(f))), LogNormal()),
    "large whole numbers": (lambda r, f: np.round(1000 * (5 + f + 0.1 * r.normal(size=len(f)))), Gaussian()),
    "two values": (lambda r, f: (f > 0) + 0.0, Gaussian()),
}


@pytest.mark.parametrize("case", CASES)
def test_auto_chooses_by_held_out_probability(case):
    draw, wanted = CASES[case]
    rng = np.random.default_rng(1)
    X = rng.uniform(-1, 1, (400, 2))
    y = np.asarray(draw(rng, np.sin(3 * X[:, 0]) + X[:, 1]), float)[:, None]
    found = best_held_out(candidates("auto", Given(X, y)), Given(X, y))
    assert found == wanted or (isinstance(wanted, type) and isinstance(found, wanted))


@pytest.mark.parametrize("kind", ["counts", "levels"])
def test_the_working_variable_is_fitted_as_gaussian_targets(kind, tmp_path):
    X, y = (counts if kind == "counts" else grades)()
    model = BLLRegressor(likelihood=kind, **FAST).fit(X[:90], y[:90])
    link = LINKS[model.fitted_.likelihood.link][0] if kind == "counts" else np.asarray
    plain = BLLRegressor(likelihood="gaussian", **FAST).fit(X[:90], link(y[:90]))
    for one, z in ((model, y), (plain, link(y))):
        one.update(X[90:], z[90:])
    working, gaussian = model.fitted_.working(X), plain.predictive(X)
    np.testing.assert_allclose(working.mean, gaussian.mean, rtol=1e-9)
    np.testing.assert_allclose(working.var, gaussian.var, rtol=1e-9)
    again = reloaded(model, tmp_path)
    assert again.fitted_.likelihood == model.fitted_.likelihood
    np.testing.assert_array_equal(again.predictive(X).interval(0.9), model.predictive(X).interval(0.9))
    draws = model.fitted_.sample(X[:5], 20, np.random.RandomState(0))
    assert set(np.unique(draws)) <= set(np.arange(200.0)) | set(y)
    assert model.score(X, y) > 0


@pytest.mark.parametrize("kind", ["counts", "levels"])
def test_calibrated_models_hold_their_probability(kind):
    made = counts if kind == "counts" else grades
    (X, y), (Xt, yt) = made(300), made(1000, 1)
    words = {"preset": "fast", "max_epochs": 60, "random_state": 0}
    model = BLLRegressor(likelihood=kind, **words).fit(X, y)
    p, bell = model.predictive(Xt), BLLRegressor(likelihood="gaussian", **words).fit(X, y).predictive(Xt)
    half = 0.5 if kind == "counts" else 0.25
    assert 0.87 < metrics.coverage(p, yt, 0.9) < 0.99
    assert p.log_prob(yt).mean() > np.log(bell.cdf(yt + half) - bell.cdf(yt - half)).mean()
    assert metrics.crps(p, yt) < metrics.crps(bell, yt)
    lower, upper = model.conformalize(Xt[:500], yt[:500]).predictive(Xt[500:]).interval(0.9, method="conformal")
    assert ((lower <= yt[500:]) & (yt[500:] <= upper)).mean() > 0.87


def test_rows_of_every_kind():
    X, y = counts(60)
    both = np.column_stack([y, np.minimum(y, 3)])
    both[::4, 1] = np.nan
    model = BLLRegressor(likelihood="counts", n_members=2, **(FAST | {"preset": "calibrated"}))
    with pytest.warns(UserWarning, match="are missing"):
        p = model.fit(X, both, groups=np.arange(60) // 3).predictive(X)
    assert np.isfinite(p.log_prob(both)).all()
    twice = BLLRegressor(likelihood="counts", **FAST).fit(np.repeat(X, 2, 0), np.repeat(y, 2)).predictive(X)
    weighted = BLLRegressor(likelihood="counts", **FAST).fit(X, y, sample_weight=np.full(60, 2.0)).predictive(X)
    np.testing.assert_allclose(twice.mean, weighted.mean, rtol=1e-6)


def test_targets_that_are_no_values_are_refused():
    X, y = counts(40)
    half = BLLRegressor(likelihood="counts", **FAST)
    refused(
        r"whole numbers from 0 on, and y has other values in 1 rows \(first: -1 in row 0\)",
        half.fit,
        X,
        np.r_[-1, y[1:]],
    )
    refused("noise_std or observations needs Gaussian", half.fit, X, y, noise_std=0.1)
    refused("noise_std or observations needs", half.fit, X, y, observations=[Derivative(0).at(X[:3]).observed(y[:3])])
    refused(
        "at most 50 levels, and y has 60",
        BLLRegressor(likelihood="levels", **FAST).fit,
        *(2 * [np.arange(60.0)[:, None]]),
    )
    model = BLLRegressor(likelihood="levels", **FAST).fit(X, y % 3)
    refused("the levels that y had in fit", model.update, X, y + 7)


@pytest.mark.usefixtures("as_a_user")
def test_what_cannot_look_ahead_is_gaussian():
    X, y = counts(80)
    words = {"preset": "fast", "hidden": (4,), "max_epochs": 1, "random_state": 0}
    assert BLLRegressor(**words).fit(X, y).settings_.layer.likelihood == "counts"
    streamed = BLLRegressor(**words).partial_fit(X, y)
    assert (streamed.likelihood, streamed.settings_.layer.likelihood) == ("auto", "gaussian")
    episodes = [Episode(part[:, None], X[:19]) for part in y.reshape(4, 20)]
    learned = DynamicsModel(regressor=BLLRegressor(**words)).fit(episodes).regressor_.settings_.layer
    assert (learned.likelihood, learned.shape) == ("gaussian", False)
    asked = DynamicsModel(regressor=BLLRegressor(likelihood="counts", **words))
    refused("a DynamicsModel, whose steps add up, needs Gaussian", asked.fit, episodes)


def test_choosing_takes_some_rows_of_a_large_table_and_refusals_name_the_row(monkeypatch):
    monkeypatch.setattr(likelihood, "MOST_ROWS", 100)
    X, y = counts(400)
    folds = list(likelihood.held_out(Counts("log"), Given(X, y[:, None])))
    assert sum(len(fold.y) for fold in folds) == 100
    wrong = np.where(np.arange(400) == 321, 0.5, y)
    refused(
        r"other values in 1 rows \(first: 0.5 in row 321\)", BLLRegressor(likelihood="counts", **FAST).fit, X, wrong
    )
