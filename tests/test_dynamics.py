"""Learned dynamics: episodes and lags, splits by episode, predictions many steps ahead against Monte Carlo."""

import copy
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from helpers import refused, sine
from sklearn.exceptions import NotFittedError

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.dynamics import (
    DynamicsModel,
    Episode,
    EpisodeFolds,
    Lags,
    Linearized,
    SampledWeights,
    Unscented,
    best_propagation,
    multi_step_scores,
    one_step_scores,
)
from lastlayer.dynamics.plots import density_by_step, trajectories
from lastlayer.dynamics.rollout import Draws
from lastlayer.predictions.mixture import MixturePrediction

pytestmark = pytest.mark.usefixtures("small_process")

FAST = {"preset": "evidence", "max_epochs": 30, "random_state": 0}
A = np.array([[0.9, 0.2], [-0.15, 0.8]])
B = np.array([[0.1], [0.5]])
ONE = Lags(1, 1)


def numbered(n_episodes=4, steps=9):
    """Episodes whose every number says where it is from: episode, kind, step."""
    return [
        Episode.of(np.arange(steps + 1)[:, None] + 1000.0 * e + [0, 0.5], np.arange(steps)[:, None] + 1000.0 * e + 0.25)
        for e in range(n_episodes)
    ]


def pendulum(n_episodes=8, steps=25, seed=0, noise=0.01):
    """A damped pendulum, angle and speed measured."""
    rng = np.random.default_rng(seed)
    episodes = []
    for _ in range(n_episodes):
        xs, u = [rng.uniform(-1, 1, 2)], rng.uniform(-1, 1, (steps, 1))
        for (force,) in u:
            angle, speed = xs[-1]
            xs.append(xs[-1] + 0.2 * np.array([speed, -np.sin(2 * angle) - 0.3 * speed + force]))
        episodes.append(Episode.of(np.stack(xs) + noise * rng.standard_normal((steps + 1, 2)), u))
    return episodes


@cache
def mixture():
    words = {"hidden": (8,), "n_members": 3, "hidden_prior": 0.3, "max_epochs": 100, "random_state": 0}
    return DynamicsModel(Lags(1, 1, increments=True), BLLRegressor(**words)).fit(pendulum())


@pytest.mark.parametrize("lags", [Lags(1, 1), Lags(3, 1), Lags(1, 3), Lags(2, 3), Lags(3, 3, increments=True)])
def test_rows_hold_the_lags_in_order_and_never_cross_a_border(lags):
    table = lags.table(numbered())
    assert len(table.X) == 4 * (9 - lags.first)
    for row, after, target, episode in zip(table.X, table.next_outputs, table.targets, table.episode, strict=True):
        k = row[0] - 1000 * episode  # the present step
        y = [[1000 * episode + k - i, 1000 * episode + k - i + 0.5] for i in range(lags.outputs)]
        u = [[1000 * episode + k - i + 0.25] for i in range(lags.inputs)]
        assert row.tolist() == [x for part in y + u for x in part]
        assert 0 <= k - lags.first
        assert after.tolist() == [1000 * episode + k + 1, 1000 * episode + k + 1.5]
        assert target.tolist() == ([1.0, 1.0] if lags.increments else after.tolist())


@pytest.mark.parametrize("lags", [Lags(1, 1), Lags(3, 2), Lags(2, 3)])
def test_a_state_stepped_by_its_shift_is_the_next_state(lags):
    episode = numbered(1)[0]
    F, G = lags.shift(2, 1)
    for k in range(lags.first, len(episode)):
        stepped = F @ lags.state(episode, k) + G @ episode.inputs[k]
        stepped[:2] += episode.outputs[k + 1]
        np.testing.assert_array_equal(stepped, lags.state(episode, k + 1))
        row = lags.join(lags.state(episode, k), episode.inputs[k], 2)
        np.testing.assert_array_equal(row, lags.table(episode).X[k - lags.first])


def test_windows_are_stretches_of_one_episode_and_cutting_it_shares_no_measurement():
    windows = Lags(2, 1).windows(numbered(), 4)
    assert windows.starts.shape == (8, 4)
    first = windows.starts[:, 0]
    np.testing.assert_array_equal(windows.outputs[:, :, 0], first[:, None] + np.arange(1, 5))
    np.testing.assert_array_equal(windows.inputs[:, :, 0], first[:, None] + np.arange(4) + 0.25)
    parts = numbered(1, steps=20)[0].cut(4)
    seen = np.concatenate([part.outputs[:, 0] for part in parts])
    assert len(set(seen)) == len(seen) == 21
    for part in parts:
        np.testing.assert_array_equal(part.inputs[:, 0], part.outputs[:-1, 0] + 0.25)


def test_folds_hold_whole_episodes_out_and_blocks_of_alike_ones():
    rng = np.random.default_rng(0)
    amplitude = np.repeat(np.linspace(1, 5, 10), 300)
    X = rng.standard_normal((3000, 2)) * amplitude[:, None]
    groups = np.repeat(np.arange(10), 300)
    splits = list(EpisodeFolds(5).split(X, None, groups))
    assert len(splits) == 7
    for train, held in splits:
        assert not set(groups[train]) & set(groups[held])
        assert len(train) + len(held) == 3000
    assert sorted(np.concatenate([held for _, held in splits[:5]])) == list(range(3000))
    ends = [set(groups[held]) for _, held in splits[5:]]
    assert sorted(ends, key=min) == [{0, 1}, {8, 9}]  # the smallest and the largest amplitudes leave together


def test_calibration_holds_out_whole_episodes(monkeypatch):
    """Leakage: with lags, neighbours in time share measurements; no network may be judged on its own episode."""
    seen, original = [], EpisodeFolds.split
    split = lambda self, X, y, groups: seen.append(groups) or original(self, X, y, groups)
    monkeypatch.setattr(EpisodeFolds, "split", split)
    words = {"hidden": (3,), "n_members": 1, "hidden_prior": 0.3, "max_epochs": 3, "random_state": 0}
    model = DynamicsModel(Lags(2, 1), BLLRegressor(**words)).fit(pendulum(4, 10))
    np.testing.assert_array_equal(seen[0], np.repeat(np.arange(4), 9))
    assert set(model.regressor_.calibration_.points.kind.tolist()) == {"given"}
    assert model.regressor.calibration == "auto"


class Linear:
    """A known linear system in the place of a regressor: constant covariances, outputs correlated."""

    Q = np.array([[0.02, 0.005], [0.005, 0.01]])
    R = 2 * Q

    def predictive(self, X):
        var, std = np.diag(self.Q), np.sqrt(np.diag(self.Q))
        words = {"noise_var": np.diag(self.R), "correlation": self.Q / np.outer(std, std)}
        mean, one = X[:, :2] @ A.T + X[:, 2:] @ B.T, np.ones(len(X))
        return MixturePrediction.gaussian(mean, epistemic_var=one[:, None] * var, affine_cost=one, **words)


@dataclass(frozen=True)
class Known:
    """The least that a propagation needs of a model."""

    regressor_: object
    lags: Lags = ONE
    n_outputs_: int = 2
    n_inputs_: int = 1

    @property
    def state_scale_(self):
        return np.ones(self.lags.n_state(2, 1))

    def next(self, X):
        return self.regressor_.predictive(X)


@pytest.mark.parametrize("by", [Linearized(), Unscented()])
@pytest.mark.parametrize("noise", ["process", "measurement"])
def test_a_linear_system_is_propagated_exactly(by, noise):
    rng = np.random.default_rng(0)
    starts, inputs = rng.standard_normal((3, 2)), rng.standard_normal((3, 12, 1))
    rollout = by.run(Known(Linear()), starts, inputs, noise)
    Q, R = Linear.Q, Linear.R
    for b in range(3):
        m, P = starts[b], np.zeros((2, 2)) if noise == "process" else R
        for k in range(12):
            m, P = A @ m + B @ inputs[b, k], A @ P @ A.T + Q
            np.testing.assert_allclose(rollout.mean[b, k], m, atol=1e-9)
            np.testing.assert_allclose(rollout.cov[b, k], P + R, atol=1e-9)
            P = P + R if noise == "process" else P


class Lagged:
    """A second-order system in one lagged output: the covariance between lags matters."""

    def predictive(self, X):
        mean = np.stack([1.6 * X[:, 0] - 0.8 * X[:, 2], 0.5 * X[:, 1] + 0.2 * X[:, 2] + X[:, 4]], 1)
        noise, zero = np.array([0.04, 0.01]), 0 * mean
        return MixturePrediction.gaussian(mean, epistemic_var=zero, noise_var=noise, affine_cost=zero[:, 0])


@pytest.mark.parametrize("by", [Linearized(), Unscented()])
def test_lags_carry_their_covariances(by):
    rng, n = np.random.default_rng(0), 100_000
    start, inputs = np.array([1.0, 0.5, 0.8, 0.4]), rng.standard_normal((10, 1))
    x = np.tile(start, (n, 1))
    for u in inputs:
        rows = np.column_stack([x, np.tile(u, (n, 1))])
        y = Lagged().predictive(rows).mean + rng.standard_normal((n, 2)) * [0.2, 0.1]
        x = np.column_stack([y, x[:, :2]])
    rollout = by.run(Known(Lagged(), Lags(2, 1)), start[None], inputs[None], "process")
    np.testing.assert_allclose(rollout.mean[0, -1], x[:, :2].mean(0), atol=0.01)
    np.testing.assert_allclose(rollout.cov[0, -1], np.cov(x[:, :2].T), rtol=0.03, atol=0.002)


def _monte_carlo(model, start, inputs, n=4000):
    """Fresh draws of the one-step prediction at every step: slow and obvious, for Gaussian propagation."""
    rng, y, out = np.random.default_rng(1), np.tile(start, (n, 1)), []
    for u in inputs:
        y = model.next(np.column_stack([y, np.tile(u, (n, 1))])).sample(1, random_state=rng)[0]
        out.append(y)
    return np.stack(out, 1)


@pytest.mark.parametrize(("by", "tolerance"), [(Unscented(), 0.15), (Linearized(), 0.25)])
def test_a_nonlinear_system_agrees_with_monte_carlo(by, tolerance):
    """Both are approximations: the tolerance is what they leave on this pendulum after 8 steps."""
    model, window = mixture(), Lags().windows(pendulum(2, 8, seed=5), 8)
    draws = _monte_carlo(model, window.starts[0], window.inputs[0])
    rollout = model.rollout(window.starts[0], window.inputs[0], by=by)
    std = draws.std(0)
    assert np.abs((rollout.mean[0] - draws.mean(0)) / std).max() < tolerance
    assert np.abs(rollout.std[0] / std - 1).max() < tolerance


def test_sampled_weights_are_exact_for_a_scalar_linear_model():
    """y+ = w y without noise fed back: after k steps y = w^k y0, whose moments a Gaussian w has in closed form."""
    rng = np.random.default_rng(0)
    before = rng.standard_normal(6)
    after = 0.9 * before + 0.3 * rng.standard_normal(6)
    episodes = [Episode.of(pair, [0.0]) for pair in zip(before, after, strict=True)]
    model = DynamicsModel(Lags(), BLLRegressor((), training=TrainingOptions(bias_prior="shared"), **FAST)).fit(episodes)
    draws = Draws.of(model.regressor_.fitted_, np.ones((1, 1)), 50_000, np.random.default_rng(0))
    value = lambda y: draws(np.broadcast_to([[y, 0.0]], (50_000, 1, 2)))[0][:, 0, 0]
    slope, bias = value(1.0) - value(0.0), value(0.0)  # each draw is one straight line
    rollout = model.rollout([2.0], np.zeros((5, 1)), by=SampledWeights(50_000), noise="measurement")
    noise = float(rollout.component_var[0, 0, 0, 0])
    p = model.next(np.array([[1.0, 0.0], [0.0, 0.0]]))
    np.testing.assert_allclose([(slope + bias).mean(), bias.mean()], p.mean[:, 0], atol=0.01)
    y = 2.0 + np.sqrt(noise) * np.random.default_rng(9).standard_normal(50_000)
    for k in range(5):
        y = slope * y + bias
        np.testing.assert_allclose(rollout.mean[0, k, 0], y.mean(), atol=6 * y.std() / np.sqrt(50_000))
        np.testing.assert_allclose(rollout.cov[0, k, 0, 0] - noise, y.var(), rtol=0.05)


def test_uncalibrated_draws_are_of_the_posterior_as_it_stands():
    model = mixture()
    window = Lags().windows(pendulum(1, 8, seed=5), 8)
    drawn = model.rollout(window.starts, window.inputs, by=SampledWeights(3000, calibrated=False))
    plain = copy.copy(model)
    plain.regressor_ = model.regressor_.with_fitted(replace(model.regressor_.fitted_, calibration=None))
    p = plain.next(np.concatenate([window.starts[0], window.inputs[0, 0]])[None])
    np.testing.assert_allclose(drawn.mean[0, 0], p.mean[0], atol=0.1 * p.std.max())
    np.testing.assert_allclose(drawn.std[0, 0], p.std[0], rtol=0.1)


@pytest.mark.parametrize("name", ["mixture", "all families", "full noise", "noise by input"])
def test_the_first_step_of_sampled_weights_is_the_prediction(name):
    words = {"hidden": (6,), "max_epochs": 40, "random_state": 0, "hidden_prior": 0.3, "n_members": 3}
    if name == "all families":  # without a hidden layer, encoded, or a process: its variance is that of all outside
        words |= {"preset": "fast", "hidden_prior": "auto", "n_members": "auto", "max_epochs": 10}
    noise = {"full noise": "full", "noise by input": "input"}.get(name, "diagonal")
    regressor = BLLRegressor(**words, noise=noise).fit(*sine(60, q=2, d=2))
    assert (regressor.calibration_.outside is not None) == (name == "all families")
    points = np.array([[0.0, 0.0], [4.0, -1.0]])
    p = regressor.predictive(points)
    joint = regressor.joint(points).cov()
    n = 5_000 if name == "all families" else 20_000  # draws of the process have many weights
    draws = Draws.of(regressor.fitted_, p.weights, n, np.random.default_rng(0))
    value, noise_cov, _ = draws(np.broadcast_to(points, (n, 2, 2)))
    loose, normal = np.sqrt(20_000 / n), np.random.default_rng(1).standard_normal(value.shape)
    total = value + np.einsum("nbij,nbj->nbi", np.linalg.cholesky(noise_cov), normal)
    np.testing.assert_allclose(value.mean(0), p.mean, atol=0.05 * p.std.max())
    for b in range(2):
        np.testing.assert_allclose(np.cov(total[:, b].T), joint[b::2, b::2], atol=0.05 * loose * p.var.max())
        if name == "all families" and b == 1:
            continue  # outside the data, predictions merge what draws of single members keep apart
        for level in (0.05, 0.5, 0.95):
            below = (total[:, b] < p.quantile(level)[b]).mean(0)
            np.testing.assert_allclose(below, level, atol=0.012 * loose)


def test_scores_tell_a_good_model_from_a_poor_one_and_pictures_draw(tmp_path):
    model, test = mixture(), pendulum(3, 20, seed=7)
    poor = DynamicsModel(Lags(), BLLRegressor((), **FAST)).fit(pendulum(noise=0.3))
    one = one_step_scores(model, test)
    assert one.lpd > one_step_scores(poor, test).lpd
    assert one.rmse.shape == (2,)
    scores, rollout = multi_step_scores(model, test, 10)
    candidates = (SampledWeights(100), Linearized())
    best = best_propagation(model, test, 10, candidates=candidates)
    lpd = [multi_step_scores(model, test, 10, by=by)[0].lpd for by in candidates]
    assert best is candidates[int(np.argmax(lpd))]
    assert scores.lpd_by_step.shape == (10,)
    np.testing.assert_allclose(scores.lpd_by_step.mean(), scores.lpd)
    outputs = Lags().windows(test, 10).outputs
    inside = np.mean([(outputs >= rollout.interval(0.9)[0]) & (outputs <= rollout.interval(0.9)[1])])
    np.testing.assert_allclose(scores.coverage, inside)
    both = trajectories({"a": rollout, "b": rollout}, outputs, trajectory=1)
    for i, figure in enumerate((both, density_by_step({"a": scores.lpd_by_step}))):
        figure.savefig(tmp_path / f"{i}.png", dpi=40)
        assert (tmp_path / f"{i}.png").stat().st_size > 2000


MISTAKES = [
    (lambda: Episode.of([1.0], [1.0]), "at least 2 outputs"),
    (lambda: Episode.of(np.ones(5), np.ones(3)), "as many inputs or one fewer"),
    (lambda: Episode.of([1.0, np.nan], [1.0]), "NaN"),
    (lambda: Episode.of(np.ones((2, 2, 2)), np.ones(2)), "one row per step"),
    (lambda: Episode.of(np.ones(5), np.ones(4)).cut(4), "cannot be cut into 4"),
    (lambda: Lags(0, 1), "at least one of each"),
    (lambda: Lags(5, 1).table(numbered(1, 4)), "no episode is longer than its lags"),
    (lambda: Lags().windows(numbered(1, 4), 9), "no episode holds 9 steps"),
    (lambda: Lags(3).state(numbered(1)[0], 1), "past of 2"),
    (lambda: Lags().table([]), "nothing was given"),
    (lambda: Lags().table([np.ones(3)]), r"Episode\.of"),
    (lambda: Lags().table([*numbered(1), Episode.of(np.ones(3), np.ones(2))]), "different numbers"),
    (lambda: list(EpisodeFolds().split(np.ones((4, 1)))), "groups"),
    (lambda: list(EpisodeFolds().split(np.ones((4, 1)), None, np.zeros(4))), "cut"),
    (lambda: SampledWeights(1), "at least 2"),
    (lambda: mixture().rollout(np.ones(3), np.ones((4, 1))), "starts have shape"),
    (lambda: mixture().rollout(np.ones(2), np.ones((4, 1)), noise="both"), "process"),
    (lambda: SampledWeights().run(Known(Linear()), np.ones((1, 2)), np.ones((1, 2, 1)), "process"), "Unscented"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_mistakes_are_answered_with_advice(call, message, as_a_user):
    refused(message, call, error=ValueError)
    refused("fit", DynamicsModel().rollout, np.ones(2), np.ones((4, 1)), error=NotFittedError)
