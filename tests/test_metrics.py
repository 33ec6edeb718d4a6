"""Scores against their definitions, other libraries and what they must be on samples of the prediction itself."""

from dataclasses import replace

import numpy as np
import pytest
import scoringrules
from helpers import close, prediction
from hypothesis import given
from hypothesis import strategies as st
from numpy import ndarray
from scipy import stats
from sklearn.metrics import root_mean_squared_error

from lastlayer.predictions.metrics import LEVELS, calibration_error, coverage, crps, log_predictive_density, rmse
from lastlayer.predictions.mixture import MixturePrediction

SCORES = (log_predictive_density, rmse, coverage, crps)


def targets(p: MixturePrediction, seed: int = 1) -> ndarray:
    return p.sample(1, random_state=seed)[0]


def standardised(p: MixturePrediction, scale: ndarray) -> MixturePrediction:
    """The same prediction of y / scale."""
    return replace(
        p,
        component_mean=p.component_mean / scale,
        component_epistemic_var=p.component_epistemic_var / scale**2,
        component_noise_var=p.component_noise_var / scale**2,
    )


def test_lpd_is_the_mean_of_the_points_log_densities() -> None:
    p = prediction()
    y, cov = targets(p), p.cov()
    joint = [stats.multivariate_normal(p.mean[i], cov[i]).logpdf(y[i]) for i in range(len(y))]
    close(np.float64(log_predictive_density(p, y)), np.mean(joint))
    close(log_predictive_density(p, y, per_output=True), stats.norm(p.mean, p.std).logpdf(y).mean(0))


def test_lpd_of_independent_outputs_adds_up() -> None:
    p = prediction(correlated=False)
    y, scale = targets(p), np.array([0.1, 30.0])
    total = log_predictive_density(p, y, scale=scale, per_output=True).sum()
    close(np.float64(log_predictive_density(p, y, scale=scale)), total)


@pytest.mark.parametrize("c", [1, 3])
@pytest.mark.parametrize("per_output", [False, True])
def test_scale_gives_the_lpd_of_the_standardised_problem(c: int, per_output: bool) -> None:
    p = prediction(c)
    y, scale = targets(p), np.array([0.02, 500.0])
    score = log_predictive_density(p, y, scale=scale, per_output=per_output)
    expected = log_predictive_density(standardised(p, scale), y / scale, per_output=per_output)
    close(np.asarray(score), np.asarray(expected))


def test_one_scale_serves_all_outputs() -> None:
    p = prediction(q=3)
    y = targets(p)
    one, each = (log_predictive_density(p, y, scale=scale) for scale in (2.5, np.full(3, 2.5)))
    close(np.float64(one), np.float64(each))


@pytest.mark.parametrize("c", [1, 3])
def test_rmse_is_that_of_scikit_learn(c: int) -> None:
    p = prediction(c)
    y = targets(p)
    each = root_mean_squared_error(y, p.mean, multioutput="raw_values")
    close(rmse(p, y, per_output=True), each)
    close(np.float64(rmse(p, y)), np.sqrt(np.mean(each**2)))  # over points and outputs, not a mean of roots
    assert rmse(p.mean, y) == rmse(p, y)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_coverage_counts_targets_in_the_central_interval(level: float) -> None:
    p = prediction(m=200)
    y = targets(p)
    rank = stats.norm(p.mean, p.std).cdf(y)
    inside = (rank > (1 - level) / 2) & (rank < (1 + level) / 2)
    close(coverage(p, y, level, per_output=True), inside.mean(0))
    assert coverage(p, y, level) == inside.mean()


def test_bounds_are_inside() -> None:
    p = prediction(c=2)
    for bound in p.interval(0.8):
        assert coverage(p, bound, 0.8) == 1.0


@pytest.mark.parametrize("c", [1, 3])
def test_calibration_error_is_the_mean_error_of_the_coverages(c: int) -> None:
    p = prediction(c, m=50)
    y, levels = targets(p), np.array([0.2, 0.55, 0.9])
    for given_levels in (levels, LEVELS):
        slow = np.mean([abs(coverage(p, y, float(level)) - level) for level in given_levels])
        close(np.float64(calibration_error(p, y, given_levels)), slow)
    close(np.float64(calibration_error(p, y)), slow)


@pytest.mark.parametrize("c", [1, 3])
def test_targets_from_the_prediction_are_calibrated(c: int) -> None:
    p = prediction(c, m=20_000)
    assert calibration_error(p, targets(p)) < 5 * 0.5 / np.sqrt(p.mean.size)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_wrong_widths_show_as_the_calibration_error_of_theory(factor: float) -> None:
    """A standard deviation `factor` times the right one covers 2 Phi(factor z) - 1 in place of 2 Phi(z) - 1."""
    p = prediction(m=20_000)
    wrong = replace(
        p,
        component_epistemic_var=factor**2 * p.component_epistemic_var,
        component_noise_var=factor**2 * p.component_noise_var,
    )
    z = stats.norm.ppf((1 + LEVELS) / 2)
    expected = np.abs(2 * stats.norm.cdf(factor * z) - 1 - LEVELS).mean()
    assert abs(calibration_error(wrong, targets(p)) - expected) < 5 * 0.5 / np.sqrt(p.mean.size)
    assert expected > 0.3


@given(c=st.integers(1, 5), m=st.integers(1, 4), q=st.integers(1, 3), seed=st.integers(0, 99))
def test_crps_of_a_mixture_is_that_of_scoringrules(c: int, m: int, q: int, seed: int) -> None:
    p = prediction(c, m, q, seed)
    y, std = targets(p), np.sqrt(p.component_epistemic_var + p.component_noise_var)
    w = np.broadcast_to(p.weights[..., None], p.component_mean.shape)
    each = scoringrules.crps_mixnorm(y, p.component_mean, std, w, m_axis=0, backend="numpy")
    close(crps(p, y, per_output=True), each.mean(0))
    close(np.float64(crps(p, y)), each.mean())


def test_crps_has_the_units_of_the_targets() -> None:
    p = prediction(3)
    y, scale = targets(p), np.array([0.02, 500.0])
    close(crps(p, y, per_output=True), scale * crps(standardised(p, scale), y / scale, per_output=True))


@pytest.mark.parametrize("score", [*SCORES, calibration_error])
def test_scores_are_plain_numbers_and_whole_numbers_are_targets_too(score) -> None:
    p = prediction(c=2)
    y = np.round(targets(p))
    assert score(p, y.astype(int)) == score(p, y)
    assert type(score(p, y)) is float
