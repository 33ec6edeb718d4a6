"""The monitor's promise under no drift, by theorem and by simulation, and what it says when there is one."""

import numpy as np
import pytest
from helpers import refused
from scipy.signal import lfilter
from scipy.stats import kstest, norm

from lastlayer.online import DriftMonitor, drift
from lastlayer.online.drift import log_ratios


@pytest.mark.parametrize("ties", [False, True])
def test_ranks_are_uniform_and_independent_whatever_the_residuals(ties, monkeypatch):
    rng = np.random.default_rng(1)
    monitor = DriftMonitor(random_state=2)
    z = 5 + 3 * rng.standard_t(2, 3_000)  # a model that is badly off
    z = np.round(z) if ties else z
    scores = []
    monkeypatch.setattr(drift, "log_ratios", lambda x: scores.append(x) or log_ratios(x))
    monitor.update(z)
    u = norm.cdf(np.concatenate(scores))  # what the bets are made on
    assert len(u) == len(z)
    assert kstest(u, "uniform").pvalue > 0.01
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.05


def autocorrelated(rng: np.random.Generator, n: int, r: float) -> np.ndarray:
    """A stationary Gaussian process with a memory of one row."""
    z = rng.standard_normal(n)
    z[1:] *= np.sqrt(1 - r**2)
    return lfilter([1.0], [1.0, -r], z)


@pytest.mark.parametrize(
    ("r", "streams", "promise"), [(0.0, 100, 0.25), (-0.5, 25, 0.5), (0.5, 25, 0.5), (0.8, 25, 0.5)]
)
def test_false_alarms_are_as_rare_as_promised_where_neighbours_are_dependent_too(r, streams, promise):
    """P(alarm within n rows) <= n / false_alarm_every, for residuals of a model that is badly calibrated.

    Without an allowance for the dependence, nearly every stream alarms at r = 0.5.
    """
    rng, n = np.random.default_rng(3 if r == 0 else 8), 150
    residuals = lambda: rng.standard_t(3, n) if r == 0 else autocorrelated(rng, n, r)
    monitors = [DriftMonitor(false_alarm_every=round(n / promise), random_state=seed) for seed in range(streams)]
    alarms = np.mean([monitor.update(1 + 3 * residuals()).alarm for monitor in monitors])
    assert alarms < promise
    assert alarms > 0 or r  # the bound is no empty one


def test_bets_are_at_most_fair_to_exchangeable_rows_whatever_was_before():
    """E[f / max p] <= 1 given the rows before: what makes E[M_t] <= t."""
    rng = np.random.default_rng(9)
    for r in (0.0, 0.6, -0.6):
        monitor = DriftMonitor().restart()
        monitor.update(autocorrelated(rng, 100, r))
        grid = np.linspace(-12, 12, 2001)
        bets = np.exp([monitor._bets(np.array([x]))[0] for x in grid])
        mean = np.trapezoid(bets * norm.pdf(grid)[:, None], grid, axis=0)
        assert mean.max() < 1 + 1e-6
        assert mean.min() > 0.3  # and not much worse


def test_the_autocorrelation_is_that_of_the_scores(monkeypatch):
    monitor = DriftMonitor(random_state=1)
    scores = []
    bets = monitor._bets
    monkeypatch.setattr(monitor, "_bets", lambda x: scores.append(x) or bets(x))
    monitor.update(autocorrelated(np.random.default_rng(10), 400, 0.7))
    x = np.concatenate(scores) - np.mean(scores)
    np.testing.assert_allclose(monitor._autocorrelation(), (x[1:] @ x[:-1]) / (x @ x + drift.PRIOR_ROWS), rtol=1e-9)


def test_a_change_of_dependent_residuals_is_seen():
    z = autocorrelated(np.random.default_rng(11), 600, 0.5)
    z[300:] += 2.5
    seen = DriftMonitor(false_alarm_every=10_000).update(z)
    assert (seen.alarm, seen.kind, seen.since >= 290) == (True, "up", True)


@pytest.mark.parametrize(
    ("change", "kind"), [(lambda z: z + 1.5, "up"), (lambda z: z - 1.5, "down"), (lambda z: 3 * z, "larger")]
)
def test_a_change_is_seen_soon_and_named(change, kind):
    rng = np.random.default_rng(4)
    monitor = DriftMonitor(false_alarm_every=10_000)
    assert not monitor.update(0.3 + 2 * rng.standard_normal((300, 1))).alarm
    assert "no drift" in str(monitor.drift)
    for z in change(rng.standard_normal(200)) * 2 + 0.3:
        if monitor.update([z]).alarm:
            break
    drift = monitor.drift
    assert drift.alarm
    assert drift.n_rows < 300 + 60
    assert drift.kind == kind
    assert abs(drift.since - 300) < 25
    assert "Fit a new model" in str(drift)
    assert f"row {drift.since}" in str(drift)
    later = monitor.update(rng.standard_normal(20))
    assert (later.alarm, later.since, later.kind) == (True, drift.since, drift.kind)
    assert later.n_rows == drift.n_rows + 20
    assert monitor.restart().drift.n_rows == 0
    assert not monitor.drift.alarm


def test_a_reference_shows_a_change_in_the_first_row():
    rng = np.random.default_rng(5)
    shifted = 2 + rng.standard_normal(60)
    assert not DriftMonitor().update(shifted).alarm  # alike among themselves
    drift = DriftMonitor(reference=rng.standard_normal(300)).update(shifted)
    assert drift.alarm
    assert drift.since < 5


def test_outputs_are_watched_side_by_side():
    z = np.random.default_rng(6).standard_normal((400, 3))
    z[250:, 2] -= 2
    drift = DriftMonitor(n_outputs=3).update(z)
    assert (drift.alarm, drift.output, drift.kind) == (True, 2, "down")


def test_what_cannot_be_watched_is_refused(as_a_user):
    refused("false_alarm_every=0", DriftMonitor, false_alarm_every=0)
    refused("1 values that are not finite", DriftMonitor().update, [0.0, np.nan])
    refused(r"shape \(4, 2\).*\(n, 1\)", DriftMonitor().update, np.zeros((4, 2)))
