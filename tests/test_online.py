"""A model that learns while it runs against one whose last layers are made anew from the same rows."""

import copy
import math
import runpy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import held_from, refused, sine
from torch import nn

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.bayes.evidence import by_evidence
from lastlayer.bayes.statistics import Statistics
from lastlayer.calibration.curve import Shrinkage
from lastlayer.errors import PrecisionError
from lastlayer.online import DriftMonitor, ExponentialForgetting, KeepAll, OnlineModel, SlidingWindow
from lastlayer.online.layers import LayerStack
from lastlayer.predictor.member import NOTHING, Member
from lastlayer.settings import resolve
from lastlayer.settings.resolve import PRIOR_PRECISIONS
from lastlayer.settings.types import ADDITIVE, FOURIER, LINEAR, Network

pytestmark = pytest.mark.usefixtures("as_a_user")

X, Y = sine(900, q=2, seed=3, d=2)
NEW = sine(30, seed=5, d=2)[0] * 1.5
FITTED = 60


def quick(**words) -> BLLRegressor:
    return BLLRegressor(**({"hidden": (6,), "max_epochs": 15, "n_members": 4, "random_state": 0} | words))


@pytest.fixture(scope="module")
def mixed() -> BLLRegressor:
    """Members of every family under two prior precisions, and the process; two outputs with correlated noise.

    Precisions under which features are collinear are left out: there two refits have no digits in common either. The
    curves are wide: none of the rows is a surprise that would widen them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "FAST_PRECISIONS", PRIOR_PRECISIONS)
        fast = quick(preset="fast", hidden_prior="auto", n_members="auto", noise="full")
        model = fast.fit(X[:FITTED], Y[:FITTED])
    members = model.fitted_.members
    each = [member.family for member in members]
    weak, strong = (each.index(Network(precision)) for precision in (0.03, 0.3))
    kept = [weak, weak + 1, strong, *(each.index(family) for family in (ADDITIVE, LINEAR, FOURIER))]
    return wide(with_members(model, [members[i] for i in kept]))


def with_members(model: BLLRegressor, members: list[Member], **changes: Any) -> BLLRegressor:
    return model.with_fitted(replace(model.fitted_, members=tuple(members), **changes))


def seen_by_all(model: BLLRegressor, **changes: Any) -> BLLRegressor:
    """Rows that a window starts from are seen by every member, also those that `fit` had held back."""
    return with_members(model, [replace(member, unseen=NOTHING) for member in model.members_], **changes)


def wide(model: BLLRegressor) -> BLLRegressor:
    """With curves so wide that no row surprises them."""
    fitted = model.fitted_
    own = {member.family: fitted.curve(i) for i, member in enumerate(fitted.members)}
    curves = {family: replace(c, noise=4 * c.noise, slope=4 * c.slope) for family, c in own.items()}
    return model.with_fitted(replace(fitted, calibration=replace(fitted.calibration, curves=curves)))


@pytest.fixture(scope="module")
def single() -> BLLRegressor:
    shared = TrainingOptions(bias_prior="shared")
    return quick(preset="evidence", training=shared, n_members=1).fit(X[:FITTED], Y[:FITTED, 0])


@pytest.fixture(scope="module")
def noisy() -> BLLRegressor:
    return wide(quick(noise="input", hidden_prior=0.3).fit(X[:FITTED], Y[:FITTED, 0]))


MODELS = ["mixed", "single", "noisy"]


@pytest.fixture
def model(which: str, request) -> BLLRegressor:
    """A copy of the model of that name."""
    return copy.deepcopy(request.getfixturevalue(which))


def targets(model: BLLRegressor) -> np.ndarray:
    return Y if model.fitted_.y_ndim == 2 else Y[:, 0]


def refitted(model: BLLRegressor, weight: np.ndarray, rows: np.ndarray | None = None) -> BLLRegressor:
    """The last layers from rows, or all, with these weights alone: alpha, noise and curve as they are."""
    rows, weight = (np.flatnonzero(weight), weight[weight > 0]) if rows is None else (rows, weight)
    fitted = model.fitted_
    data, members = fitted.data(X[rows], targets(model)[rows]), []
    for i, member in enumerate(fitted.members):
        seen = torch.from_numpy(weight * ~held_from(member, data))
        statistics = Statistics.from_features(fitted.features(i, data.X), data.T, sample_weight=seen)
        members.append(replace(member, posterior=replace(member.posterior, statistics=statistics)))
    return with_members(model, members, conformal_scores=None)


def ones(*rows: slice) -> np.ndarray:
    weight = np.zeros(len(X))
    for some in rows:
        weight[some] = 1
    return weight


def same(a, b, *, rtol: float = 1e-8) -> None:
    """Means and variances at new points, to 1e-8 of the standard deviation and relatively."""
    p, q = a.predictive(NEW), b.predictive(NEW)
    for one, other in ((p.component_mean, q.component_mean), (p.mean, q.mean)):
        assert np.abs(one - other).max() < rtol * q.std.max()
    np.testing.assert_allclose(p.component_var, q.component_var, rtol=rtol)
    np.testing.assert_allclose(p.affine_cost, q.affine_cost, rtol=rtol)
    np.testing.assert_allclose(a.predictive(NEW, noise=False).var, b.predictive(NEW, noise=False).var, rtol=rtol)


def is_refit(online: OnlineModel, model: BLLRegressor, *rows: tuple[int, int]) -> None:
    """It is the model with last layers of these rows alone."""
    same(online, refitted(model, ones(*(slice(*each) for each in rows))))


def stream(online: OnlineModel, model: BLLRegressor, start: int, stop: int, step: int = 1) -> None:
    y = targets(model)
    for i in range(start, stop, step):
        rows = slice(i, min(i + step, stop))
        assert online.update(X[rows], y[rows]) is online


@pytest.fixture
def factorizations(monkeypatch) -> list[Statistics]:
    """The statistics that layers were factored from, all recursions between them left out."""
    seen: list[Statistics] = []
    factored = LayerStack.factored
    monkeypatch.setattr(LayerStack, "factored", lambda self, total: seen.append(total) or factored(self, total))
    return seen


@pytest.mark.parametrize("which", MODELS)
def test_it_starts_as_the_model_and_becomes_the_refit(model):
    before = model.predictive(NEW).std
    online = OnlineModel(model)
    same(online, model)
    stream(online, model, FITTED, FITTED + 40)
    stream(online, model, FITTED + 40, 650, step=25)  # more rows than the process has features: it is factored
    stream(online, model, 650, 850, step=200)
    stream(online, model, 850, 855)
    assert online.n_rows == 795
    is_refit(online, model, (0, 855))
    is_refit(online.model(), model, (0, 855))
    assert 0 < online.error < 1e-9
    np.testing.assert_array_equal(model.predictive(NEW).std, before)  # the model itself was left alone
    mean, std = online.predict(NEW, return_std=True)
    assert mean.shape == std.shape == targets(model)[: len(NEW)].shape


@pytest.mark.parametrize("which", MODELS)
def test_a_window_is_a_refit_on_its_rows_after_many_steps(model, factorizations):
    online = OnlineModel(model, SlidingWindow(50), start=(X[:FITTED], targets(model)[:FITTED]))
    model = seen_by_all(model)
    is_refit(online, model, (10, FITTED))
    stream(online, model, FITTED, 380)
    before = len(factorizations)
    stream(online, model, 380, 391)
    assert len(factorizations) == before  # carried by the recursion, not just factored
    is_refit(online, model, (341, 391))
    is_refit(online.model(), model, (341, 391))
    stream(online, model, 391, 395, step=2)
    is_refit(online, model, (345, 395))
    online.update(X[:70], targets(model)[:70])  # more than it holds
    is_refit(online, model, (20, 70))


def test_a_window_that_fills_up_holds_all_its_rows(single):
    filling = OnlineModel(single, SlidingWindow(100), start=(X[:5], Y[:5, 0]))
    stream(filling, single, 5, 60)
    is_refit(filling, single, (0, 60))


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize(("memory", "step", "end"), [(20, 1, 130), (400, 1, 258), (100, 9, 258)])
def test_forgetting_is_a_refit_with_weights_and_the_prior_does_not_fade(model, memory, step, end, factorizations):
    online, since = OnlineModel(model, ExponentialForgetting(memory)), 0
    interval = online.memory.interval(max(m.posterior.statistics.n_linear for m in model.members_))
    for i in range(FITTED, end, step):
        before, since = len(factorizations), since + step
        stream(online, model, i, i + step, step)
        if len(factorizations) > before:
            assert since >= interval or step > 1
            since = 0
    age = i + step - 1 - np.arange(len(X))
    fitted_rows_fade_together = np.minimum(age, i + step - FITTED)
    weight = np.where(age < 0, 0.0, np.exp((since - fitted_rows_fade_together) / memory))
    assert since < interval  # all rows together lose weight at every factorisation
    same(online, refitted(model, weight))


@pytest.mark.parametrize("which", MODELS)
def test_forgetting_does_not_see_how_a_stream_is_cut(model, monkeypatch):
    """Rows of a batch fade one by one: statistics, and the residuals that the curves remember."""
    monkeypatch.setattr("lastlayer.online.model.NOTICED", math.inf)  # else a batch is judged by the curve before it
    memory, y, found = ExponentialForgetting(40), targets(model), []
    for cuts in (range(60, 361), [60, 360], [60, 62, 140, 141, 240, 360]):
        online = OnlineModel(model, memory)
        for start, stop in pairwise(cuts):
            online.update(X[start:stop], y[start:stop])
        found.append(online)
        same(online, found[0])
        for family, curve in (online.fitted_.calibration.curves if online.fitted_.calibration else {}).items():
            assert curve.seen == pytest.approx(found[0].fitted_.calibration.curves[family].seen)


@pytest.mark.parametrize("memory", [1.0, 2.5])
def test_batches_of_many_memories_do_not_overflow(single, memory):
    online = OnlineModel(single, ExponentialForgetting(memory)).update(X, Y[:, 0])
    same(online, refitted(single, np.exp(-np.arange(len(X))[::-1] / memory)))


@pytest.mark.parametrize("which", ["mixed", "noisy"])
def test_rows_that_were_not_expected_widen_the_curves_as_an_update_does(model):
    online, rng = OnlineModel(model), np.random.default_rng(0)
    for start, error in ((100, 5.0), (120, 0.0)):
        rows, old = slice(start, start + 20), [c.widening for c in model.calibration_.curves.values()]
        y = model.predict(X[rows]) + error * rng.standard_normal(targets(model)[rows].shape)
        online.update(X[rows], y, sample_weight=np.linspace(0.5, 1.5, 20))
        model.update(X[rows], y, sample_weight=np.linspace(0.5, 1.5, 20))
        for family, curve in model.calibration_.curves.items():
            found = online.fitted_.calibration.curves[family]
            assert (found.seen, found.squares) == (pytest.approx(curve.seen), pytest.approx(curve.squares, rel=1e-6))
        new = [c.widening for c in model.calibration_.curves.values()]
        assert all(a > 1.1 * b for a, b in (zip(new, old, strict=True) if error else zip(old, new, strict=True)))
        same(online, model, rtol=1e-6)
        same(online.model(), model, rtol=1e-6)


@pytest.mark.parametrize(("memory", "left"), [(ExponentialForgetting(10), math.exp(-2)), (SlidingWindow(40), 0.5)])
def test_what_surprised_is_forgotten_with_the_rows(noisy, memory, left):
    online = OnlineModel(noisy, memory, start=(X[:FITTED], Y[:FITTED, 0]))

    def curve_after(start, error):
        rows = X[start : start + 20]
        online.update(rows, (online if error == 0 else noisy).predict(rows) + error)
        (curve,) = online.fitted_.calibration.curves.values()
        return curve

    surprised, then = curve_after(100, 5), curve_after(120, 0)
    assert (surprised.seen, surprised.widening > 2) == (pytest.approx((memory.weights(20) * np.ones(20)).sum()), True)
    assert then.seen == pytest.approx((1 + left) * (memory.weights(20) * np.ones(20)).sum())
    assert left * surprised.squares < then.squares < left * surprised.squares + 1
    assert [curve_after(start, 0) for start in range(140, 300, 20)][-1].widening == 1


def test_weights_count_as_rows(mixed):
    weighted, twice = OnlineModel(mixed), OnlineModel(mixed)
    weighted.update(X[100:103], Y[100:103], sample_weight=[2.0, 0.0, 1.0])
    twice.update(X[[100, 100, 102]], Y[[100, 100, 102]])
    same(weighted, twice)


@pytest.mark.parametrize("which", MODELS)
def test_what_comes_can_be_removed_again(model):
    y = targets(model)
    online = OnlineModel(model)
    stream(online, model, 100, 130)
    is_refit(online.remove(X[100:120], y[100:120]), model, (0, FITTED), (120, 130))
    after = copy.deepcopy(model).update(X[100:130], y[100:130]).remove(X[100:120], y[100:120])
    is_refit(after, model, (0, FITTED), (120, 130))
    fewer = copy.deepcopy(model).remove(X[:10], y[:10])
    is_refit(fewer, model, (10, FITTED))
    same(OnlineModel(model).remove(X[:10], y[:10]), fewer)


@pytest.mark.parametrize("kind", [OnlineModel, copy.deepcopy])
def test_rows_that_were_never_in_are_refused_and_nothing_happens(kind, mixed):
    model = kind(mixed)
    before = model.predictive(NEW).std
    refused("were not all added before", model.remove, X[:5] + 100, Y[:5])
    refused(r"cannot remove \d+ rows .* from \d+", model.remove, X[:FITTED], Y[:FITTED])
    np.testing.assert_array_equal(model.predictive(NEW).std, before)


@pytest.mark.parametrize("which", MODELS)
def test_alpha_and_noise_anew_are_those_of_the_last_layer_of_all_rows(model):
    online = OnlineModel(model)
    stream(online, model, FITTED, 300, step=30)
    again = online.reestimate().model()
    by_hand = refitted(model, ones(slice(0, 300)))
    for ours, theirs in zip(again.members_, by_hand.members_, strict=True):
        p = theirs.posterior
        prior = model.settings_.layer.noise_prior
        (best,) = by_evidence([p.statistics], noise=p.noise, bias_prior=p.bias_prior, noise_prior=prior)
        assert ours.posterior.log_alpha == pytest.approx(best.log_alpha, abs=1e-6)
        torch.testing.assert_close(ours.posterior.Sigma_E, best.Sigma_E, rtol=1e-7, atol=0)
        assert ours.posterior.nlml == pytest.approx(best.nlml, abs=1e-9)
    assert all(member.log_alpha == member.log_alpha_star for member in again.fitted_.members)
    for family, curve in {} if model.calibration_ is None else model.calibration_.curves.items():
        for name in ("noise", "slope", "power", "reach", "trust"):
            found = getattr(again.calibration_.curves[family], name)
            np.testing.assert_array_equal(found, getattr(curve, name), err_msg=name)
    assert not np.allclose(again.noise_std_, model.noise_std_)
    same(online, again)
    stream(online, model, 300, 310)
    same(online, again.update(X[300:310], targets(model)[300:310]))


def test_a_tuned_alpha_is_followed_and_keeps_its_distance(mixed):
    model = mixed.at_alpha(math.log(mixed.alpha_) + 1.5)
    online = OnlineModel(model)
    stream(online, model, FITTED, 90)
    is_refit(online, model, (0, 90))
    again = online.reestimate().model()
    stars = [member.log_alpha_star for member in again.fitted_.members]
    np.testing.assert_allclose(np.subtract(again.fitted_.log_alphas, stars), 1.5)
    refused("infinite alpha", OnlineModel, model.at_alpha(math.inf))


def test_frames_tensors_and_own_networks_go_in_too():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["a", "b"])
    make = lambda: nn.Sequential(nn.Linear(2, 5), nn.Tanh())
    model = quick(backbone=make, n_members=2, hidden_prior=0.3).fit(frame[:FITTED], Y[:FITTED, 0])
    assert [layer.places for layer in model.fitted_.state.layers] == [[0], [1]]
    online = OnlineModel(model)
    for i in range(100, 110):
        online.update(frame[i : i + 1], Y[i : i + 1, 0])
    frames = online.predictive(frame[:5]).std
    by_hand = copy.deepcopy(model).update(frame[100:110], torch.from_numpy(Y[100:110, 0]))
    np.testing.assert_allclose(frames, by_hand.predictive(frame[:5]).std, rtol=1e-8)
    refused("feature names", online.update, frame[["b", "a"]][:1], Y[:1, 0], error=ValueError)


def test_mistakes_are_told_and_change_nothing(single, as_a_user):
    online = OnlineModel(single, ExponentialForgetting(50))
    before = online.predictive(NEW).std
    for words, wrong in {
        "y has 1 NaN values": (X[:2], np.array([0.0, np.nan])),
        "X has 2 NaN values": (np.full((1, 2), np.nan), Y[:1, 0]),
        "features": (X[:1, :1], Y[:1, 0]),
        r"y has shape \(2, 2\): give \(2, 1\)": (X[:2], Y[:2]),
        r"y has shape \(2,\): give \(3, 1\)": (X[:3], Y[:2, 0]),
        "2D array": (X[0], Y[:1, 0]),
    }.items():
        refused(words, online.update, *wrong, error=ValueError)
    np.testing.assert_array_equal(online.predictive(NEW).std, before)
    refused(r"SlidingWindow\(rows=9\) needs initial rows", OnlineModel, single, SlidingWindow(9))
    refused("rows=1", SlidingWindow, 1)
    refused("memory=0", ExponentialForgetting, 0)
    refused("drops rows itself", OnlineModel(single, SlidingWindow(9), start=(X[:9], Y[:9, 0])).remove, X[:1], Y[:1, 0])
    refused(r"forgetting=1\.5", copy.deepcopy(single).update, X[:1], Y[:1, 0], forgetting=1.5)


def test_rows_of_high_leverage_leave_a_window_by_a_factorisation(single, factorizations):
    """One far row holds a direction alone: taking it out by the recursion would lose its digits."""
    far = X[:20].copy()
    far[0] *= 1e4
    online = OnlineModel(single, SlidingWindow(20), start=(far, Y[:20, 0]))
    before = len(factorizations)
    stream(online, single, 20, 21)
    assert len(factorizations) > before
    is_refit(online, single, (1, 21))


HOSTILE = [1e4, 1e8, 1e15, 1e40]


def hostile(y: np.ndarray, where: str, size: float) -> tuple[np.ndarray, np.ndarray]:
    """The first row, with a huge input or target."""
    x, t = X[:1].copy(), y[:1].copy()
    (x if where == "input" else t).reshape(-1)[0] = size
    return x, t


@pytest.mark.parametrize("size", HOSTILE)
@pytest.mark.parametrize("where", ["input", "target"])
@pytest.mark.parametrize("which", ["mixed", "single"])
def test_hostile_rows_leave_a_window_without_a_trace(model, where, size):
    """They come, and go 40 rows later: from then on the window is a refit on its rows to eight digits."""
    model = seen_by_all(model, calibration=None)  # without curves, which such rows would widen
    y, width = targets(model), 40
    online = OnlineModel(model, SlidingWindow(width), start=(X[:width], y[:width])).update(*hostile(y, where, size))
    stream(online, model, width, 2 * width - 1)
    for i in range(2 * width - 1, 2 * width + 2):
        stream(online, model, i, i + 1)
        is_refit(online, model, (i + 1 - width, i + 1))


@pytest.mark.parametrize("size", HOSTILE[:3])
@pytest.mark.parametrize("where", ["input", "target"])
def test_hostile_rows_are_removed_to_four_digits_or_refused(single, where, size):
    """The error is told before it is made, and the model stays as it was."""
    x, t = hostile(Y[:, 0], where, size)
    refused_ = 0
    for model in (single.with_fitted(single.fitted_), OnlineModel(single)):
        with_row = model.update(x, t).predict(NEW)
        try:
            model.remove(x, t)
        except PrecisionError as error:
            assert "Fit again" in str(error)  # noqa: PT017
            np.testing.assert_array_equal(model.predict(NEW), with_row)
            refused_ += 1
        else:
            same(model, single, rtol=1e-4)
    assert refused_ == (2 if size > 1e4 else 0)


@pytest.mark.parametrize("size", HOSTILE)
def test_rows_of_huge_leverage_come_as_in_a_refit(single, size):
    """By a factorisation, where the recursion would lose the digits of its root."""
    far = size * np.array([[1.0, -0.3]])
    online, updated = OnlineModel(single).update(far, [1.0]), single.with_fitted(single.fitted_).update(far, [1.0])
    for new in (NEW, far):
        p, q = online.predictive(new), updated.predictive(new)
        np.testing.assert_allclose(p.mean, q.mean, rtol=0, atol=1e-6 * q.std.max())
        np.testing.assert_allclose(p.epistemic_var, q.epistemic_var, rtol=1e-6)


@pytest.mark.parametrize("memory", [KeepAll(), ExponentialForgetting(50), SlidingWindow(30)])
def test_what_has_no_finite_square_is_refused_and_nothing_happens(single, memory):
    online = OnlineModel(single, memory, start=(X[:40], Y[:40, 0]), monitor=DriftMonitor())
    before, seen = online.predict(NEW, return_std=True), online.drift.n_rows
    for x, t, said in (
        (np.full((1, 2), 1e160), [0.0], "X has values farther than"),
        (np.full((1, 2), 1e305), [0.0], "X has values beyond"),
        (X[:1], [1e60], "y has values farther than"),
        (X[:1], [1e101], "y has values beyond"),
        (X[:1], [np.inf], "infinite"),
    ):
        refused(said, online.update, x, t)
    np.testing.assert_array_equal(online.predict(NEW, return_std=True), before)
    assert online.drift.n_rows == seen
    refused("farther than", online.predict, np.full((1, 2), 1e160))


def test_rows_that_a_network_has_no_features_for_are_refused():
    network = nn.Sequential(nn.Linear(2, 3, dtype=torch.float64), nn.Softplus())
    model = quick(preset="evidence", n_members=1, backbone=network).fit(X[:FITTED], Y[:FITTED, 0])
    online = OnlineModel(model)
    online._networks[0].network.own[0].bias.fill_(torch.nan)
    refused("features that are NaN", online.update, X[:1], Y[:1, 0])


def test_the_sensor_that_drifts_runs(tmp_path, capsys, as_a_user):
    path = Path(__file__).parents[1] / "examples" / "sensor_drift.py"
    main = runpy.run_path(str(path))["main"]
    words = {"rows": 120, "fitted": 30, "memory": 15, "epochs": 10, "out": tmp_path / "drift.png"}
    records = main([word for name, value in words.items() for word in (f"--{name}", str(value))])
    table = capsys.readouterr().out
    assert all(name in table for name in records)
    assert (tmp_path / "drift.png").stat().st_size > 10_000
    rmse = {name: np.sqrt(np.mean(np.square(record.errors[40:80]))) for name, record in records.items()}
    assert rmse["forgetting, memory 15"] < rmse["all rows"] < rmse["as fitted"]  # while it creeps


def test_partial_fit_fits_and_then_updates(single):
    by_parts, at_once = (quick(preset="evidence", n_members=1) for _ in range(2))
    by_parts.partial_fit(X[:FITTED], Y[:FITTED, 0]).partial_fit(X[60:80], Y[60:80, 0], sample_weight=np.full(20, 0.5))
    at_once.fit(X[:FITTED], Y[:FITTED, 0]).update(X[60:80], Y[60:80, 0], sample_weight=np.full(20, 0.5))
    np.testing.assert_array_equal(by_parts.predict(NEW), at_once.predict(NEW))
    online, updated = OnlineModel(single), OnlineModel(single)
    assert online.partial_fit(X[60:61], Y[60:61, 0], sample_weight=[0.5]) is online
    updated.update(X[60:61], Y[60:61, 0], sample_weight=[0.5])
    np.testing.assert_array_equal(online.predict(NEW), updated.predict(NEW))


@pytest.mark.parametrize("memory", [KeepAll(), ExponentialForgetting(3_000), SlidingWindow(500)], ids=str)
def test_ten_thousand_rows_one_by_one_are_a_refit_to_nine_digits(single, memory):
    """Weights and roots of the covariance, and what a curve in Python's numbers makes of them."""
    n, y = 10_000, Y[:, 0]
    again = np.concatenate([np.arange(FITTED), np.random.default_rng(7).integers(len(X), size=n)])
    online = OnlineModel(single, memory, start=(X[:FITTED], y[:FITTED]))
    for i in again[FITTED:]:
        online.update(X[i : i + 1], y[i : i + 1])
    interval, age = memory.interval(single.members_[0].posterior.statistics.n_linear), np.arange(FITTED + n)[::-1]
    weight = np.array([memory.kept(min(i, n) - n % interval) for i in age])  # all fade together at a factorisation
    if isinstance(memory, SlidingWindow):
        weight[: -memory.rows] = 0
    refit = refitted(single, weight, again)
    same(online, refit, rtol=1e-9)
    mean, std = (np.concatenate(parts) for parts in zip(*(online.predict(x[None], True) for x in NEW), strict=True))
    np.testing.assert_allclose(mean, refit.predict(NEW), rtol=1e-9)
    np.testing.assert_allclose(std, refit.predictive(NEW).std, rtol=1e-9)


def test_one_row_in_plain_numbers_is_that_row_among_many():
    """Calibrated and shrunk: the formula over Python's numbers and over arrays."""
    model = quick(n_members=1, hidden_prior=0.3, noise="diagonal").fit(X[:FITTED], Y[:FITTED, 0])
    calibration = replace(model.calibration_, shrinkage=Shrinkage(0.1))
    online = OnlineModel(model.with_fitted(replace(model.fitted_, calibration=calibration)))
    many = online.predictive(NEW * 3)
    alone = [online.predict(x[None], return_std=True) for x in NEW * 3]
    np.testing.assert_allclose([mean.item() for mean, _ in alone], many.mean, rtol=1e-12)
    np.testing.assert_allclose([std.item() for _, std in alone], many.std, rtol=1e-12)
    assert not np.allclose(many.mean, OnlineModel(model).predictive(NEW * 3).mean)  # it does shrink
