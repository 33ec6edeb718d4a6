"""What every likelihood of continuous targets promises, for every kind of rows."""

import numpy as np
import pytest
import torch
from scipy.integrate import quad

import lastlayer
from lastlayer import BLLRegressor
from lastlayer.bayes.statistics import Readings
from lastlayer.likelihoods import Student
from lastlayer.likelihoods.base import NO_TAILS, HeldOutReadings, Likelihood, Predicted
from lastlayer.likelihoods.student import FACTORS
from lastlayer.predictions.metrics import crps
from lastlayer.settings.types import Given

CONTINUOUS = {name: kind for name, kind in Likelihood.KINDS.items() if not kind.discrete}
KINDS = pytest.mark.parametrize("likelihood", [kind() for kind in CONTINUOUS.values()], ids=lambda kind: kind.name)
ROWS = pytest.mark.parametrize("rows", ["complete", "missing", "known noise", "correlated"])


def readings(rows: str, n: int = 7, q: int = 2) -> HeldOutReadings:
    rng = np.random.default_rng(0)
    t = rng.normal(size=(n, q))
    if rows == "missing":
        t[np.arange(n) % 3 == 0, 1] = np.nan
    known = torch.from_numpy(rng.uniform(0.1, 2, (n, q))) if rows == "known noise" else None
    C = np.broadcast_to(np.eye(q) + 0.6 * (1 - np.eye(q)), (3, n, q, q)) if rows == "correlated" else None
    return HeldOutReadings.of(Readings.of(torch.from_numpy(t), known), C)


def predicted(x: np.ndarray) -> Predicted:
    mean, epistemic, noise, log_weight = x[:42].reshape(3, 7, 2), x[42:84], x[84:126], x[126:].reshape(3, 7)
    epistemic, noise = epistemic.reshape(3, 7, 2), noise.reshape(3, 7, 2)
    return Predicted(mean, np.logaddexp(epistemic, noise), epistemic, noise, log_weight)


@KINDS
@ROWS
@pytest.mark.parametrize("tails", [NO_TAILS, (-1.0, 1.5)])
def test_slopes_of_a_held_out_density_are_those_of_differences(likelihood, rows, tails):
    """Those of the log of the whole variance reach both of its parts, as calibration adds them up."""
    r, rng = readings(rows), np.random.default_rng(1)
    x, rho = rng.normal(size=147), rng.uniform(size=(3, 7))
    value = lambda x, tails=tails: (rho * likelihood.log_marginal(r, predicted(x), tails).log_density).sum()
    p = predicted(x)
    by, part = likelihood.log_marginal(r, p, tails).slopes(rho), np.exp(p.log_epistemic - p.log_var)
    found = [by.mean, by.log_epistemic + by.log_var * part, by.log_noise + by.log_var * (1 - part)]
    found = np.concatenate([*(np.broadcast_to(each, p.mean.shape).ravel() for each in found), rho.ravel()])
    slow = [(value(x + 1e-6 * e) - value(x - 1e-6 * e)) / 2e-6 for e in np.eye(147)]
    np.testing.assert_allclose(found, slow, rtol=1e-6, atol=1e-7)
    if tails is not NO_TAILS:
        moved = [value(x, tuple(np.add(tails, s))) for s in ((1e-6, 0), (-1e-6, 0), (0, 1e-6), (0, -1e-6))]
        np.testing.assert_allclose(by.tails, [(moved[0] - moved[1]) / 2e-6, (moved[2] - moved[3]) / 2e-6], rtol=1e-5)


@KINDS
def test_what_is_read_is_what_is_drawn(likelihood):
    """Reading turns draws back into function plus noise, and missing targets stay missing."""
    rng, function = np.random.RandomState(0), np.random.default_rng(1).normal(size=(1, 6, 2))
    y = likelihood.draw(function, None, rng)[0]
    np.testing.assert_allclose(likelihood.read(Given(np.zeros((6, 1)), y)).t.numpy(), function[0], atol=1e-12)
    y[2, 0] = np.nan
    assert likelihood.read(Given(np.zeros((6, 1)), y)).values.isnan().sum() == 1
    noisy = likelihood.draw(np.zeros((20_000, 1, 2)), np.array([[[0.04, 0.01], [0.01, 0.09]]]), rng)[:, 0]
    working = likelihood.read(Given(np.zeros((20_000, 1)), noisy)).t.numpy()
    wider = np.dot(likelihood.shares, FACTORS) if isinstance(likelihood, Student) else 1.0  # than a typical target
    np.testing.assert_allclose(np.cov(working.T), wider * np.array([[0.04, 0.01], [0.01, 0.09]]), rtol=0.15)


@pytest.fixture(scope="module", params=[*CONTINUOUS], ids=str)
def model(request) -> BLLRegressor:
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (60, 1))
    y = np.exp(np.sin(3 * X[:, 0]) + 0.2 * rng.standard_normal(60))
    words = {"preset": "fast", "hidden": (4,), "max_epochs": 5, "random_state": 0}
    return BLLRegressor(likelihood=request.param, **words).fit(X, y)


def test_the_parts_of_a_prediction_belong_to_one_distribution(model):
    X = np.array([[-0.5], [0.1], [3.0]])
    p = model.predictive(X).with_output_axis()
    assert p.point_name == model.fitted_.likelihood.point_name
    np.testing.assert_allclose(model.predict(X), p.point[:, 0])
    np.testing.assert_allclose(model.predict(X, return_std=True)[1], p.std[:, 0])
    np.testing.assert_allclose(p.cdf(p.quantile(0.3)), 0.3, atol=1e-9)
    y = p.quantile(0.8)
    for i in range(2):
        density = lambda t, i=i: float(np.exp(p.log_prob(np.full((3, 1), t)))[i])
        inside = quad(density, *p.quantile([0.2, 0.8])[:, i, 0], limit=200)[0]
        assert inside == pytest.approx(0.6, abs=1e-6)
    draws = p.sample(20_000, random_state=0)
    apart = np.abs(draws - y).mean(0) - 0.5 * np.abs(draws[::2] - draws[1::2]).mean(0)
    np.testing.assert_allclose(p.crps(y)[:2], apart[:2], rtol=0.1)
    assert crps(p, y) == pytest.approx(p.crps(y).mean())
    drawn = model.sample_y(X[:2], 20_000)
    np.testing.assert_allclose(np.median(drawn, 1), p.quantile(0.5)[:2, 0], rtol=0.05, atol=0.02)


def test_files_keep_the_likelihood_and_its_numbers(model, tmp_path):
    X = np.array([[-0.5], [0.1], [3.0]])
    model.save(tmp_path / "m")
    loaded = lastlayer.load(tmp_path / "m")
    assert loaded.fitted_.likelihood == model.fitted_.likelihood
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    held_out = model.held_out_
    assert held_out.predictive(np.zeros((60, 1))).point.shape == (60,)
