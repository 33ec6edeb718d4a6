"""The default: a calibrated mixture of networks. What it says is, by brute force, what its members say."""

import copy
import dataclasses
import math
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from helpers import close, held_from, last_layer_rows, refused, reloaded, sine
from models import by_members, merged, regressor, widening
from scipy import stats
from scipy.optimize import brentq
from scipy.special import logsumexp, ndtr
from sklearn.base import clone
from sklearn.model_selection import GroupKFold, KFold, TimeSeriesSplit
from torch import nn

from lastlayer import BLLRegressor
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Statistics
from lastlayer.calibration.curve import Tails
from lastlayer.calibration.fit import fit_curves
from lastlayer.estimators.base import LastLayerRegressor
from lastlayer.predictor import revisions
from lastlayer.settings.resolve import PRIOR_PRECISIONS
from lastlayer.settings.types import ADDITIVE, FOURIER, LINEAR, Network
from lastlayer.training import StackedNetworks

pytestmark = pytest.mark.usefixtures("as_a_user", "small_process")

NEW = np.array([[-7.0], [-2.0], [0.1], [0.4], [5.0]])


def quick(**options) -> BLLRegressor:
    """The calibrated preset on a tiny budget."""
    tiny = {"hidden": (6,), "max_epochs": 30, "n_members": 3, "hidden_prior": 0.3, "random_state": 0}
    return regressor(**tiny | options)


def two_noises() -> tuple[np.ndarray, np.ndarray]:
    X, y = sine(120)
    return X, y + np.where(X[:, 0] > 0, 1.0, 0.0) * np.random.default_rng(0).normal(size=120)


ALONE = {"preset": "evidence", "n_members": "auto", "hidden_prior": "auto"}
KINDS = {
    "one": lambda: quick().fit(*sine()),  # 1-D targets
    "two": lambda: quick(noise="full", n_members=6).fit(*sine(q=2)),  # two partitions
    "plain": lambda: quick(calibration=None).fit(*sine(q=2)),
    "noisy": lambda: quick(noise="input").fit(*two_noises()),
    # networks and linear members, raw and encoded, and the process
    "mixed": lambda: quick(preset="fast", n_members="auto", hidden_prior="auto", hidden=(4,), max_epochs=10).fit(
        *sine(q=2)
    ),
    "single": lambda: quick(**ALONE).fit(*sine()),
    "single, full noise": lambda: quick(**ALONE, noise="full").fit(*sine(q=2)),
    "single, calibrated": lambda: quick(noise="full", n_members=1).fit(*sine(q=2)),
    "alpha": lambda: quick(calibration="alpha").fit(*sine(q=2)),
    "backbones": lambda: quick(backbone=random_network, n_members=2, max_epochs=5).fit(*sine(40)),
}
MIXTURES = ["one", "two", "plain", "noisy", "mixed"]
of_every_kind = pytest.mark.parametrize("model", [*MIXTURES, "single", "single, full noise"], indirect=True)


def random_network() -> nn.Module:
    """One that says something else in training mode, and changes when it is asked there."""
    return nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())


@cache
def fitted(kind: str) -> BLLRegressor:
    return KINDS[kind]()


@pytest.fixture
def model(request) -> BLLRegressor:
    """One of its own."""
    return copy.deepcopy(fitted(request.param))


def moved(model: BLLRegressor, by: float) -> BLLRegressor:
    """Every member's alpha times the same factor."""
    members = [dataclasses.replace(member, tuned=member.log_alpha + by) for member in model.members_]
    return model.with_fitted(dataclasses.replace(model.fitted_, members=tuple(members)))


def outputs(model: BLLRegressor) -> int:
    """As `sine` takes it: 0 for targets of one dimension."""
    return 0 if model.fitted_.y_ndim == 1 else model.fitted_.n_outputs


def slow_joint_cov(model: LastLayerRegressor, X: np.ndarray, *, noise: bool) -> np.ndarray:
    """(q, m, q, m): Phi Lambda^-1 Phi' of every member, stretched to the curve at both points, noise, and spread."""
    Z, tails = model.fitted_.standardized(X), Tails() if model.calibration_ is None else model.calibration_.tails
    w, mean, cov = by_members(model, X)
    c, q = len(model.members_), mean.shape[-1]
    w = w[:c] / (1 - tails.share)
    spread = mean[:c] - (w[..., None] * mean[:c]).sum(0)
    total = np.einsum("cm,cn,cmp,cnq->pmqn", np.sqrt(w), np.sqrt(w), spread, spread)
    for i, (member, log_alpha) in enumerate(zip(model.members_, model.fitted_.log_alphas, strict=True)):
        posterior = member.posterior
        Phi = model.fitted_.features(i, Z)
        z = (Phi[:, :-1] - posterior.equations.feature_mean).numpy()
        Lambda = posterior.equations.gram.numpy() + np.exp(-log_alpha) * np.eye(z.shape[1])
        K = z @ np.linalg.inv(Lambda) @ z.T + 1 / float(posterior.statistics.count)
        Sigma = posterior.Sigma_E.numpy() * np.outer(model.fitted_.targets.scale, model.fitted_.targets.scale)
        own = np.sqrt(np.diag(Sigma))
        correlation = Sigma / np.outer(own, own)
        function = by_members(model, X, noise=False)[2][i]
        std = np.sqrt(np.einsum("mqq->mq", function))  # of the function, by the curve
        R = K / np.sqrt(np.outer(np.diag(K), np.diag(K)))
        root = np.sqrt(tails.widening * w[i])[:, None] * std
        total += np.einsum("mp,nq,mn,pq->pmqn", root, root, R, correlation)
        if noise:
            alone = np.sqrt(np.einsum("mqq->mq", cov[i]) - std**2)
            extra = np.sqrt(tails.widening * w[i])[:, None] * alone
            for j in range(len(X)):
                total[:, j, :, j] += np.outer(extra[j], extra[j]) * correlation
    assert total.shape == (q, len(X), q, len(X))
    return total


@of_every_kind
@pytest.mark.parametrize("tuned", [False, True])
def test_the_prediction_is_the_mixture_of_its_members(model, tuned):
    if tuned:
        model = moved(model, 2.0)
    for noise in (True, False):
        w, mean, cov = by_members(model, NEW, noise=noise)
        p = model.predictive(NEW, noise=noise).with_output_axis()
        centre = (w[..., None] * mean).sum(0)
        spread = mean - centre
        total = (w[..., None, None] * (cov + spread[..., :, None] * spread[..., None, :])).sum(0)
        np.testing.assert_allclose(p.mean, centre, rtol=1e-7)
        np.testing.assert_allclose(p.cov(), total, rtol=1e-6)
        np.testing.assert_allclose(p.var, np.einsum("mqq->mq", total), rtol=1e-6)
        np.testing.assert_allclose(p.weights.sum(0), 1, rtol=1e-12)
    w, mean, cov = merged(model, NEW)
    y = p.mean + 0.3
    normal = stats.multivariate_normal
    each = [
        [normal(*parts).logpdf(t) for *parts, t in zip(*own, y, strict=True)] for own in zip(mean, cov, strict=True)
    ]
    p = model.predictive(NEW).with_output_axis()
    np.testing.assert_allclose(p.log_prob(y), logsumexp(each, axis=0, b=w), rtol=1e-6)
    std = np.sqrt(np.einsum("cmqq->cmq", cov))
    for level in (0.05, 0.8):
        quantile = p.quantile(level)
        for j, k in np.ndindex(quantile.shape):
            m, s = mean[:, j, k], std[:, j, k]
            cdf = lambda x: (w[:, j] * ndtr((x - m) / s)).sum() - level
            slow = brentq(cdf, m.min() - 50 * s.max(), m.max() + 50 * s.max())
            assert quantile[j, k] == pytest.approx(slow, rel=1e-6)
    draws = p.sample(20_000, random_state=0)
    assert (np.abs(draws.mean(0) - p.mean) < 6 * p.std / np.sqrt(20_000)).all()
    assert (draws < p.quantile(0.8)).mean(0) == pytest.approx(0.8, abs=0.02)


@of_every_kind
@pytest.mark.parametrize("tuned", [False, True])
def test_every_way_of_asking_gives_the_same_moments(model, tuned):
    if tuned:
        model = moved(model, 2.0)
    for noise in (True, False):
        p, joint = model.predictive(NEW, noise=noise), model.joint(NEW, noise=noise)
        np.testing.assert_allclose(np.diag(joint.cov()).reshape(-1, len(NEW)).T.reshape(p.shape), p.var, rtol=1e-7)
        np.testing.assert_array_equal(joint.mean, p.mean)
        q = p.n_outputs
        cov = joint.cov().reshape(q, len(NEW), q, len(NEW))
        np.testing.assert_allclose(cov, slow_joint_cov(model, NEW, noise=noise), rtol=1e-6)
        np.testing.assert_allclose(np.einsum("aibi->iab", cov), p.cov(), rtol=1e-7)
        between = joint.cov_of_outputs()
        np.testing.assert_allclose(between, np.einsum("aiaj->ija", cov).reshape(between.shape), rtol=1e-9)
        values = np.linalg.eigvalsh(joint.cov())
        assert values.min() > -1e-9 * values.max()
    mean, std = model.predict(NEW, return_std=True)
    p = model.predictive(NEW)
    np.testing.assert_allclose(mean.reshape(p.mean.shape), p.mean, rtol=1e-12)
    np.testing.assert_allclose(std.reshape(p.std.shape), p.std, rtol=1e-12)
    _, cov = model.predict(NEW, return_cov=True)
    np.testing.assert_allclose(np.diagonal(cov).T.reshape(p.var.shape), p.var, rtol=1e-7)
    np.testing.assert_allclose(model.joint(NEW[:1]).cov(), p.cov()[0], rtol=1e-7)
    some = np.ix_([0, 3], [0, 3])
    np.testing.assert_allclose(
        model.joint(NEW[[0, 3]]).cov_of_outputs(), model.joint(NEW).cov_of_outputs()[some], rtol=1e-9
    )


@of_every_kind
@pytest.mark.parametrize("noise", [True, False])
def test_draws_have_the_moments_of_the_joint_distribution(model, noise):
    n, atol = (40_000, 0.04) if len(model.members_) == 1 else (10_000, 0.08)
    joint = model.joint(NEW, noise=noise)
    spread = np.sqrt(np.diag(joint.cov()))
    draw = lambda n, seed: model.sample_y(NEW, n, random_state=seed, noise=noise).reshape(len(NEW), -1, n)
    by_joint = joint.sample(n, random_state=1).reshape(n, len(NEW), -1).transpose(1, 2, 0)
    for draws in (draw(n, 1), by_joint):
        vec = draws.transpose(1, 0, 2).reshape(-1, n)
        assert (np.abs(vec.mean(1) - joint.mean.T.ravel()) < 5 * spread / np.sqrt(n)).all()
        correlation = np.outer(spread, spread)
        np.testing.assert_allclose(np.cov(vec) / correlation, joint.cov() / correlation, atol=atol)
    np.testing.assert_array_equal(draw(2, 3), draw(2, 3))
    assert (draw(2, 3) != draw(2, 4)).all()


@pytest.mark.parametrize("calibration", ["auto", None, "alpha"])
def test_a_single_network_stays_exactly_gaussian(calibration):
    model = quick(n_members=1, calibration=calibration).fit(*sine(q=2))
    p = model.predictive(NEW)
    assert p.component_mean.shape == (1, 5, 2)
    y = p.mean + 0.2
    np.testing.assert_allclose(p.log_prob(y), stats.norm(p.mean, p.std).logpdf(y).sum(1), rtol=1e-12)
    np.testing.assert_allclose(p.quantile(0.9), stats.norm(p.mean, p.std).ppf(0.9), rtol=1e-12)
    assert (model.calibration_ is None) == (calibration != "auto")
    if calibration == "auto":
        assert model.calibration_.tails == Tails()
        assert model.fitted_.curve(0).power != 1
    joint = model.joint(NEW)
    assert not joint.functions.dense
    np.testing.assert_allclose(np.diag(joint.cov()).reshape(2, 5).T, p.var, rtol=1e-8)


@of_every_kind
def test_extrapolation_is_the_mean_cost_of_the_members(model):
    far = model.extrapolation(NEW)
    costs = [
        member.posterior.variance_ratio(model.fitted_.features(i, model.fitted_.standardized(NEW))).numpy()
        for i, member in enumerate(model.members_)
    ]
    np.testing.assert_allclose(far.affine_cost, np.mean(costs, 0), rtol=1e-12)
    np.testing.assert_allclose(model.predictive(NEW).affine_cost, far.affine_cost, rtol=1e-12)
    assert far.quantile[0] == 1.0
    assert far.quantile[2] < 0.9


def test_the_default_cross_fits_members_of_every_family_and_the_best_come_first():
    X, y = sine(40)
    model = BLLRegressor(hidden=(3,), max_epochs=5, random_state=0).fit(X, y)
    families = [member.family for member in model.members_]
    networks = [Network(p, encoding) for p in PRIOR_PRECISIONS for encoding in ("raw", "piecewise")]
    wanted = dict.fromkeys([*networks, LINEAR, ADDITIVE], 20) | {FOURIER: 1}
    assert Counter(families) == wanted
    best = wanted[model.members_[0].family]
    assert families[:best] == [model.members_[0].family] * best
    assert list(model.calibration_.curves) == list(dict.fromkeys(families))
    assert model.noise_std_ == pytest.approx(
        np.mean([np.sqrt(m.posterior.Sigma_E.numpy()[0]) for m in model.members_[:best]]) * model.fitted_.targets.scale
    )
    assert model.members_[0].family == max(model.fitted_.family_scores, key=model.fitted_.family_scores.get)
    assert model.fitted_.family_scores.keys() == wanted.keys()
    assert model.calibration_ is not None
    # the outer 60, 40 and 20 per cent are shells
    assert sorted(model.calibration_.points.kind) == ["blocked"] * 40 + ["random"] * 40 + ["shell"] * 48
    assert 0 < model.calibration_.tails.share < 0.5
    assert str(model.fitted_.curve(0)) in str(model.calibration_)


def test_held_out_points_are_predicted_by_networks_that_left_them_out(monkeypatch):
    """The promised LPD is that of the mixture at rows it did not see, in standardised units, by brute force."""
    seen = []
    fit = lambda points, **words: seen.append(points) or fit_curves(points, **words)
    monkeypatch.setattr(revisions, "fit_curves", fit)
    quick().fit(*sine())
    held, found = seen[0], fitted("one").calibration_
    assert found.points.kind.tolist() == ["random"] * 60 + ["blocked"] * 60 + ["shell"] * 72
    noise, mean, t = held.noise_var[0].numpy(), held.mean[0].numpy(), held.readings.values.numpy()
    assert len(np.unique(noise)) == 13  # one network per row: of five random folds, five blocks and three shells
    var = noise * found.curve.factor(held.cost[0].numpy())
    centre = mean / var / (1 / var + found.shrinkage.precision)
    two_kinds = [
        np.log(share) + stats.norm(centre, np.sqrt(wide * var)).logpdf(t)
        for share, wide in ((1 - found.tails.share, 1.0), (found.tails.share, found.tails.factor))
    ]
    counts = [1.0] * 60 + [0.1] * 132  # points of a region err together
    assert found.lpd == pytest.approx(np.average(logsumexp(two_kinds, axis=0)[:, 0], weights=counts), rel=1e-6)
    before = stats.norm(mean, np.sqrt(noise * (1 + held.cost[0].numpy()[:, None]))).logpdf(t)[:, 0]
    assert found.lpd_before == pytest.approx(np.average(before, weights=counts), rel=1e-6)
    np.testing.assert_allclose(found.points.squared_error, (t - centre) ** 2 / noise, rtol=1e-6)
    assert found.lpd > found.lpd_before - 0.01


def lpd_of(model: LastLayerRegressor, X: np.ndarray, y: np.ndarray) -> float:
    """Mean log density of standardised targets."""
    return float(model.predictive(X).log_prob(y).mean() + np.log(model.fitted_.targets.scale.numpy()).sum())


@pytest.mark.parametrize("n_members", [1, 3])
@pytest.mark.parametrize("noise", ["diagonal", "full", "input"])
def test_calibrate_promises_the_lpd_that_it_then_has(noise, n_members):
    (X, y), (X_val, y_val) = sine(q=2), sine(40, q=2, seed=5)
    model = quick(noise=noise, n_members=n_members).fit(X, y)
    assert model.calibrate(1.4 * X_val, y_val) is model
    assert model.calibration_.lpd == pytest.approx(lpd_of(model, 1.4 * X_val, y_val), rel=1e-9)
    assert set(model.calibration_.points.kind) == {"validation"}
    # also after an alpha was tuned: the curve maps the costs at alpha*
    first = copy.deepcopy(model)
    model.tune_alpha(1.4 * X_val, y_val).calibrate(1.4 * X_val, y_val)
    assert model.alpha_ == model.alpha_star_
    assert model.calibration_.lpd == pytest.approx(lpd_of(model, 1.4 * X_val, y_val), rel=1e-9)
    np.testing.assert_allclose(model.predictive(NEW).std, first.predictive(NEW).std, rtol=1e-9)


def test_correlated_outputs_are_promised_the_density_of_both_together():
    """Of a single network: one Gaussian over both outputs at each held-out point, by the joint distribution."""
    X_val, y_val = sine(40, q=2, seed=5)
    model = copy.deepcopy(fitted("single, calibrated")).calibrate(X_val, y_val)
    joint = [model.joint(x[None]) for x in X_val]
    normals = [stats.multivariate_normal(p.mean[0], p.cov()) for p in joint]
    together = [normal.logpdf(target) for normal, target in zip(normals, y_val, strict=True)]
    unit = np.log(model.fitted_.targets.scale.numpy()).sum()
    assert model.calibration_.lpd == pytest.approx(np.mean(together) + unit, rel=1e-9)
    alone = model.predictive(X_val).log_prob(y_val, per_output=True).sum(1).mean() + unit
    assert abs(model.calibration_.lpd - alone) > 0.01  # the correlation counts


@pytest.mark.parametrize("model", ["two", "single, calibrated"], indirect=True)
def test_with_correlated_noise_a_point_has_one_covariance_however_it_is_asked_for(model):
    assert model.calibration_ is not None
    cov = model.predictive(NEW).cov()
    for i in range(len(NEW)):
        np.testing.assert_allclose(cov[i], model.joint(NEW[i : i + 1]).cov(), rtol=1e-10)
    together = model.joint(NEW).cov().reshape(2, len(NEW), 2, len(NEW))
    np.testing.assert_allclose(np.einsum("aibi->iab", together), cov, rtol=1e-10)
    assert (np.abs(cov[:, 0, 1]) > 0.05 * np.sqrt(cov[:, 0, 0] * cov[:, 1, 1])).all()


@pytest.mark.parametrize("model", ["one", "two", "mixed"], indirect=True)
def test_the_lpd_before_is_that_of_the_uncalibrated_mixture_whose_families_count_alike(model):
    X, y = sine(40, q=outputs(model), seed=5)
    model.calibrate(X, y)
    assert model.calibration_.lpd == pytest.approx(lpd_of(model, X, y), rel=1e-9)
    before = model.with_fitted(dataclasses.replace(model.fitted_, calibration=None))
    size = Counter(member.family for member in model.members_)
    alike = np.array([1 / (len(size) * size[member.family]) for member in model.members_])
    np.testing.assert_allclose(before.predictive(X).weights, np.tile(alike[:, None], len(X)), rtol=1e-12)
    assert model.calibration_.lpd_before == pytest.approx(lpd_of(before, X, y), rel=1e-9)


def test_validation_data_take_the_place_of_rows_left_out():
    (X, y), (X_val, y_val) = sine(), sine(30, seed=5)
    model = quick().fit(X, y, validation_data=(X_val, y_val))
    assert model.calibration_.points.kind.tolist() == ["validation"] * 30
    again = copy.deepcopy(model).calibrate(X_val, y_val)
    np.testing.assert_array_equal(model.predictive(NEW).std, again.predictive(NEW).std)
    assert {float(member.posterior.statistics.count) for member in model.members_} == {len(X)}


@pytest.mark.parametrize(("options", "q"), [({"calibration": None}, 0), (ALONE, 0), (ALONE, 2)])
def test_without_a_curve_validation_data_are_algorithm_1_after_the_fit(options, q):
    (X, y), (X_val, y_val) = sine(q=q), sine(40, q=q, seed=5)
    plain = quick(**options).fit(X, y)
    star = plain.alpha_star_
    at_once = quick(**options).fit(X, y, validation_data=(1.7 * X_val, y_val))
    assert at_once.calibration_ is None
    assert at_once.alpha_star_ == star
    assert at_once.alpha_ == plain.tune_alpha(1.7 * X_val, y_val).alpha_ != star
    np.testing.assert_array_equal(at_once.predict(NEW, return_std=True), plain.predict(NEW, return_std=True))
    assert at_once.fit(X, y).alpha_ == star  # a new fit forgets the old tuning
    assert not hasattr(at_once, "alpha_curve_")


def test_alpha_calibration_is_algorithm_1_on_blocks():
    model = fitted("alpha")
    assert model.calibration_ is None
    assert len(set(model.fitted_.log_alphas)) == 1
    assert model.alpha_ == pytest.approx(math.exp(model.alpha_curve_.log_alpha))
    assert model.alpha_curve_.lpd >= max(model.alpha_curve_.lpds.max(), model.alpha_curve_.lpd_before) - 1e-9
    without = fitted("plain")
    np.testing.assert_allclose(model.predict(NEW), without.predict(NEW), rtol=1e-4)  # in another batch, float32
    assert model.alpha_star_ == pytest.approx(without.alpha_star_, rel=1e-3)
    assert (model.predictive(NEW).std != without.predictive(NEW).std).all()


@pytest.mark.parametrize("model", [*MIXTURES, "alpha", "single", "single, full noise"], indirect=True)
def test_tuning_moves_the_variance_alone_and_never_for_the_worse(model):
    X, y = sine(30, q=outputs(model), seed=3)
    X = 1.5 * X
    mean, before, stars = model.predict(NEW), lpd_of(model, X, y), model.alpha_star_
    for _ in range(2):
        assert model.tune_alpha(X, y) is model
        after = lpd_of(model, X, y)
        assert model.alpha_curve_.lpd_before == pytest.approx(before, rel=1e-7)
        assert model.alpha_curve_.lpd == pytest.approx(after, rel=1e-7)
        assert after >= before - 1e-8 * abs(before)
        np.testing.assert_array_equal(model.predict(NEW), mean)
        assert model.alpha_star_ == stars
        before = after


@pytest.mark.parametrize(
    ("splitter", "n_held"), [(KFold(3), 60), (TimeSeriesSplit(3), 45), (GroupKFold(3), 60)], ids=["k", "time", "groups"]
)
def test_a_splitter_decides_which_rows_calibrate(splitter, n_held):
    X, y = sine()
    groups = np.arange(60) // 10 if isinstance(splitter, GroupKFold) else None
    model = quick(calibration=splitter, n_members=2).fit(X, y, groups=groups)
    assert model.calibration_.points.kind.tolist() == ["given"] * n_held
    assert len(model.members_) == 2
    for member in model.members_:
        assert float(member.posterior.statistics.count) == 60
    assert np.isfinite(model.predictive(NEW).std).all()
    assert model.score(X, y) > 0.7


def test_groups_that_go_together_are_held_out_together():
    """Every row twice: random rows leak their twins, groups do not, so that errors look larger and are."""
    X, y = sine(30)
    X, y = np.repeat(X, 2, 0), np.repeat(y, 2)
    options = {"hidden": (20,), "max_epochs": 200, "hidden_prior": 0.0}
    leaking = quick(calibration=KFold(5, shuffle=True, random_state=0), **options).fit(X, y)
    grouped = quick(calibration=GroupKFold(5), **options).fit(X, y, groups=np.arange(60) // 2)
    assert np.mean(grouped.calibration_.points.squared_error) > 1.1 * np.mean(leaking.calibration_.points.squared_error)
    assert grouped.calibration_.lpd < leaking.calibration_.lpd


@pytest.mark.parametrize(("kind", "options"), [("one", {}), ("single", ALONE)], ids=["mixture", "single"])
def test_the_seed_decides_and_nothing_else_is_touched(kind, options):
    X, y = sine()
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    again, other = (quick(**options, random_state=seed).fit(X, y) for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002
    np.testing.assert_array_equal(again.predict(NEW, return_std=True), fitted(kind).predict(NEW, return_std=True))
    assert (other.predict(NEW) != again.predict(NEW)).all()


@pytest.mark.parametrize(
    ("kind", "options", "rtol", "rtol_std"),
    [("one", {}, 1e-5, 1e-3), ("single", ALONE, 1e-6, 1e-6)],  # the curve's optimum is flat
    ids=["mixture", "single"],
)
@pytest.mark.parametrize(("x_unit", "x_shift", "y_unit", "y_shift"), [(1e-9, 0.0, 1e12, 1e12), (1e6, 1e6, 1e-12, 0.0)])
def test_units_do_not_matter(kind, options, rtol, rtol_std, x_unit, x_shift, y_unit, y_shift):
    (X, y), new, plain = sine(), NEW * x_unit + x_shift, fitted(kind)
    model = quick(**options).fit(X * x_unit + x_shift, y * y_unit + y_shift)
    mean, std = model.predict(new, return_std=True)
    expected, expected_std = plain.predict(NEW, return_std=True)
    np.testing.assert_allclose((mean - y_shift) / y_unit, expected, rtol=rtol)
    np.testing.assert_allclose(std / y_unit, expected_std, rtol=rtol_std)
    np.testing.assert_allclose(model.noise_std_ / y_unit, plain.noise_std_, rtol=rtol)
    if plain.calibration_ is not None:
        assert model.calibration_.lpd == pytest.approx(plain.calibration_.lpd, abs=1e-6)
    else:
        assert model.alpha_ == pytest.approx(plain.alpha_, rel=1e-5)
        draws = (model.sample_y(new, 2) - y_shift) / y_unit
        np.testing.assert_allclose(draws, plain.sample_y(NEW, 2), rtol=1e-5)


@pytest.mark.parametrize("m", [2, 4, 5, 19])
@pytest.mark.filterwarnings("ignore::lastlayer.errors.FlooredNoiseWarning")
def test_few_rows_are_kept_for_training(m):
    X, y = sine(m)
    model = quick(n_members=2, hidden=(3,), max_epochs=5, hidden_prior="auto").fit(X, y)
    assert (model.calibration_ is None) == (m < 5)
    assert len(model.fitted_.family_scores) == (0 if m < 5 else len(PRIOR_PRECISIONS))
    assert np.isfinite(model.predictive(NEW).std).all()
    assert np.isfinite(model.joint(NEW).cov()).all()


OPTIONS = [
    {"n_members": 2, "calibration": KFold(2)} | options
    for options in [
        {"hidden_prior": "auto", "noise": "full", "bias_prior": "shared"},
        {"hidden": ()},
        {"dtype": "float32"},
        {"objective": "mse", "max_epochs": 15},
        {"encoding": "piecewise", "dtype": "float32"},
        {"encoding": "piecewise", "early_stopping": True, "max_epochs": 15},
        {"input_skip": False, "hidden": (8, 8)},
        {"early_stopping": True, "max_epochs": 15},
        {"max_epochs": 0},
        {"calibration": "alpha", "noise": "full", "activation": "relu", "hidden_prior": 0.0},
    ]
] + [
    ALONE | {"hidden": (8,), "max_epochs": 40} | options
    for options in [
        {"objective": "mse"},
        {"noise": "full"},
        {"bias_prior": "shared"},
        {"bias_prior": "shared", "noise": "full"},
        {"dtype": "float32"},
        {"dtype": "float32", "noise": "full"},
        {"dtype": "float32", "objective": "mse"},
        {"activation": "relu"},
        {"input_skip": False},
        {"early_stopping": True},
        {"hidden": ()},
        {"max_epochs": 0},
    ]
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_learns(options):
    """A sine over one period has a linear part, so that few epochs or no hidden layer at all still beat the mean."""
    X, y = sine(q=2)
    model = quick(**options).fit(X, y)
    assert model.score(X, y) > (0.1 if options.get("hidden") == () else 0.4)
    std = model.predict(X, return_std=True)[1]
    assert np.isfinite(std).all()
    assert std.min() > 0.03
    assert math.isfinite(model.nlml_)


def test_a_factory_makes_the_members_of_a_mixture():
    (X, y), made = sine(), []

    def factory() -> nn.Module:
        made.append(nn.Sequential(nn.Linear(1, 6), nn.Tanh()))
        return made[-1]

    model = quick(backbone=factory, n_members=2, max_epochs=15).fit(X, y)
    assert len(model.members_) == 2
    assert len(made) == 13  # five folds, five blocks and three shells
    a, b = (member.network[0].weight for member in model.members_)
    assert not torch.equal(a, b)
    assert model.calibration_ is not None
    assert model.members_[0].family.prior_precision == 0.3
    assert clone(model).backbone is factory
    again = quick(backbone=factory, n_members=2, max_epochs=15).fit(X, y)
    np.testing.assert_array_equal(again.predict(NEW), model.predict(NEW))


def test_a_backbone_is_one_network_calibrated_on_a_share_of_the_rows():
    X, y = sine()
    model = BLLRegressor(backbone=nn.Sequential(nn.Linear(1, 6), nn.Tanh()), max_epochs=20, random_state=0).fit(X, y)
    assert len(model.members_) == 1
    assert model.calibration_.points.kind.tolist() == ["random"] * 9  # 15% of 60
    assert model.members_[0].family.prior_precision == 0
    assert float(model.members_[0].posterior.statistics.count) == 60  # few features: the rows it was judged on join
    images = np.random.default_rng(0).normal(size=(30, 1, 4, 4))
    make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Tanh())
    flat = BLLRegressor(backbone=make, n_members=2, max_epochs=3, random_state=0).fit(images, images.sum((1, 2, 3)))
    assert set(flat.calibration_.points.kind) == {"random"}  # no blocks without a table


@of_every_kind
@pytest.mark.parametrize("forgetting", [1.0, 0.5])
def test_update_is_the_last_layers_of_all_rows(model, forgetting):
    before, q = copy.deepcopy(model), outputs(model)
    noisy = model.calibration_ is not None and model.calibration_.head is not None
    (X, y), (X_more, y_more) = two_noises() if noisy else sine(q=q), sine(25, q=q, seed=9)
    assert model.update(X_more + 3, y_more, forgetting=forgetting) is model
    for i, member in enumerate(model.members_):
        rows = [last_layer_rows(before, *pair, member=i) for pair in ((X, y), (X_more + 3, y_more))]
        seen = ~torch.from_numpy(held_from(before.members_[i], before.fitted_.data(X, y)))
        weight = torch.cat([forgetting * seen.double(), torch.ones(25, dtype=torch.float64)])
        both = Statistics.from_features(*(torch.cat(parts) for parts in zip(*rows, strict=True)), sample_weight=weight)
        old = before.members_[i].posterior
        by_hand = Posterior(both, old.log_alpha, old.Sigma_E, old.noise, checked=False)
        Phi = before.fitted_.features(i, before.fitted_.standardized(NEW))
        # sums in another order, times alpha; features that are collinear, as 513 of 85 rows, have few digits in common
        collinear = member.family == FOURIER or float(old.log_alpha) > 15
        loose = 1e6 if collinear else 1e3 if len(model.members_) > 1 else 100
        close(member.posterior.mean(Phi), by_hand.mean(Phi), loose=loose)
        close(member.posterior.variance_ratio(Phi), by_hand.variance_ratio(Phi), loose=loose)
        assert torch.equal(member.posterior.Sigma_E, old.Sigma_E)
    assert model.alpha_ == before.alpha_
    if len(model.members_) == 1:
        double = {"sample_weight": np.full(25, 2.0), "forgetting": forgetting}
        weighted = copy.deepcopy(before).update(X_more + 3, y_more, **double).predictive(NEW).affine_cost
        twice = model.update(X_more + 3, y_more).predictive(NEW).affine_cost
        np.testing.assert_allclose(weighted, twice, rtol=1e-8)
    assert model.calibration_ is before.calibration_ or model.fitted_.curve(0).power == before.fitted_.curve(0).power
    if forgetting == 1.0:
        assert (model.extrapolation(NEW).affine_cost < before.extrapolation(NEW).affine_cost).all()


@pytest.mark.parametrize("model", ["one", "two", "noisy", "mixed"], indirect=True)
@pytest.mark.parametrize("error", [0.0, 4.0])
def test_rows_that_were_not_expected_widen_the_curves(model, error):
    """By their squared residuals under the model that had not learned them, over the variance it gave them."""
    before = copy.deepcopy(model)
    q, seen, squares = outputs(before), 0.0, dict.fromkeys(before.calibration_.curves, 0.0)
    rng = np.random.default_rng(0)
    for n, forgetting in ((30, 1.0), (20, 0.5)):
        X, weight = rng.uniform(-3, 3, (n, 1)), rng.integers(1, 3, n).astype(float)
        y = model.predict(X) + error * rng.standard_normal((n, q) if q else n)
        c, (_, mean, cov) = len(model.members_), by_members(model, X)
        var = model.calibration_.tails.widening * np.einsum("cmqq->cmq", cov[:c])
        each = ((y.reshape(n, -1) - mean[:c]) ** 2 / var).mean(2) @ weight
        now = {family: widening(curve) for family, curve in model.calibration_.curves.items()}
        for family, old in squares.items():  # over the variance as it was calibrated
            own = [s for s, member in zip(each, model.members_, strict=True) if member.family == family]
            squares[family] = forgetting * old + now[family] * np.mean(own)
        seen = forgetting * seen + weight.sum()
        model.update(X, y, sample_weight=weight, forgetting=forgetting)
        for family, curve in model.calibration_.curves.items():
            assert (curve.seen, curve.squares) == (pytest.approx(seen), pytest.approx(squares[family], rel=1e-6))
            assert curve.widening == pytest.approx(widening(curve))
            assert (curve.widening > 1.5) == (error > 0)
    w, mean, cov = merged(model, NEW)
    p = model.predictive(NEW)
    np.testing.assert_allclose(p.mean, (w[..., None] * mean).sum(0).reshape(p.shape), rtol=1e-7)
    np.testing.assert_allclose(p.component_var, np.einsum("cmqq->cmq", cov), rtol=1e-6)


def test_a_noise_found_anew_is_not_widened_once_more():
    rng = np.random.default_rng(0)
    X, noise = rng.uniform(-3, 3, (700, 1)), rng.standard_normal(700)
    y = np.sin(X[:, 0]) + np.where(np.arange(700) < 100, 0.1, 0.3) * noise
    model, middle = quick(max_epochs=100).fit(X[:100], y[:100]), np.linspace(-2, 2, 9)[:, None]
    assert model.predictive(middle).std.mean() == pytest.approx(0.1, rel=0.3)
    model.update(X[100:], y[100:])
    assert model.predictive(middle).std.mean() == pytest.approx(0.3, rel=0.3)
    assert model.reestimate().predictive(middle).std.mean() == pytest.approx(0.3, rel=0.3)


@of_every_kind
def test_a_loaded_mixture_answers_to_the_last_bit(model, tmp_path):
    q = outputs(model)
    model.update(NEW, model.predict(NEW) + 2)  # a surprise
    model.tune_alpha(*sine(20, q=q, seed=4)).conformalize(*sine(20, q=q, seed=6))
    again = reloaded(model, tmp_path)
    a, b = model.predictive(NEW), again.predictive(NEW)
    for name in ("component_mean", "component_epistemic_var", "component_noise_var", "weights", "affine_cost"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    np.testing.assert_array_equal(a.cov(), b.cov())
    np.testing.assert_array_equal(a.interval(0.8, method="conformal"), b.interval(0.8, method="conformal"))
    np.testing.assert_array_equal(model.joint(NEW).cov(), again.joint(NEW).cov())
    np.testing.assert_array_equal(model.sample_y(NEW, 2), again.sample_y(NEW, 2))
    np.testing.assert_array_equal(model.extrapolation(NEW).quantile, again.extrapolation(NEW).quantile)
    assert again.members_[0].family == model.members_[0].family
    assert again.fitted_.family_scores == model.fitted_.family_scores
    assert (again.alpha_, again.alpha_star_, again.nlml_) == (model.alpha_, model.alpha_star_, model.nlml_)
    one, other = again.calibration_, model.calibration_
    assert (one is None) == (other is None)
    if other is not None:
        assert (one.lpd, one.lpd_before, str(one)) == (other.lpd, other.lpd_before, str(other))
        for name in ("cost", "squared_error", "kind"):
            np.testing.assert_array_equal(getattr(one.points, name), getattr(other.points, name))
    X, y = sine(5, q=q)
    np.testing.assert_array_equal(again.update(X, y).predict(NEW), copy.deepcopy(model).update(X, y).predict(NEW))


def test_a_model_whose_calibration_came_to_nothing_can_be_saved(tmp_path):
    """nan in the scores."""
    model = copy.deepcopy(fitted("one"))
    model = model.with_fitted(dataclasses.replace(model.fitted_, family_scores={Network(0.03): math.nan}))
    assert math.isnan(reloaded(model, tmp_path).fitted_.family_scores[Network(0.03)])


@of_every_kind
def test_conformal_intervals_cover_the_rows_they_were_made_from_as_often_as_they_must(model):
    q = outputs(model)
    X, y = sine(50, q=q, seed=8)
    X = 1.3 * X
    assert model.conformalize(X, y) is model
    for level in (0.5, 0.9):
        lower, upper = model.predictive(X).interval(level, method="conformal")
        slack = 1e-9 * (upper - lower)  # a row lies exactly on the bound
        inside = ((y >= lower - slack) & (y <= upper + slack)).sum(0)
        assert (inside == math.ceil(51 * level - 1e-9)).all()
    assert np.isinf(model.predictive(X).interval(0.99, method="conformal")[1]).all()  # 50 rows are too few
    refused("conformalize", model.predictive(X, noise=False).interval, 0.9, method="conformal")


def test_noise_follows_the_input():
    noisy = fitted("noisy")
    noise = np.sqrt(noisy.predictive(np.array([[-1.5], [1.5]])).noise_var)
    assert noise[1] > 2 * noise[0]
    edge, beyond = noisy.predictive(np.array([[3.0], [50.0]])).noise_var
    assert beyond == pytest.approx(edge, rel=0.2)  # members weigh otherwise, the head is clipped


@pytest.mark.parametrize("options", [{}, {"preset": "fast", "n_members": "auto", "hidden_prior": "auto"}], ids=str)
def test_an_interrupt_ends_training_with_a_usable_model(monkeypatch, options):
    calls, gradient = [], StackedNetworks.gradient

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return gradient(*args, **options)

    monkeypatch.setattr(StackedNetworks, "gradient", interrupted)
    X, y = sine()
    with pytest.warns(UserWarning, match="interrupted after 9 epochs"):
        model = quick(**options).fit(X, y)
    assert model.history_["stopped"] == "interrupted"
    assert model.score(X, y) > 0.3
    assert np.isfinite(model.predictive(NEW).std).all()


@pytest.mark.filterwarnings("ignore:the loss was not finite:UserWarning")
@pytest.mark.parametrize(
    ("options", "q"), [({}, 2), (ALONE, 0), (ALONE | {"early_stopping": True}, 0)], ids=["mixture", "single", "stopped"]
)
@pytest.mark.parametrize("max_epochs", [1, 40])
def test_a_hopeless_learning_rate_ends_in_a_finite_model(max_epochs, options, q):
    """Weights of 1e200 are finite numbers, but what two layers make of them is not."""
    X, y = sine(q=q)
    model = quick(hidden=(8, 8), activation="relu", learning_rate=1e200, max_epochs=max_epochs, **options).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    assert np.isfinite([mean, std]).all()
    assert std.min() > 0
    assert model.score(X, y) > 0.1


def test_a_view_at_another_alpha_is_what_tuning_to_it_gives():
    one, (X, y) = fitted("one"), sine(40, seed=3)
    X = 1.5 * X
    tuned = copy.deepcopy(one).tune_alpha(X, y)
    log_alpha = tuned.alpha_curve_.log_alpha
    before = one.predictive(NEW)
    assert np.isfinite(log_alpha)
    assert abs(log_alpha - np.mean(one.fitted_.log_alphas)) > 0.1
    view, expected = one.at_alpha(log_alpha).predictive(NEW), tuned.predictive(NEW)
    np.testing.assert_allclose(view.std, expected.std, rtol=1e-9)
    np.testing.assert_allclose(view.mean, before.mean, rtol=1e-9)
    np.testing.assert_array_equal(one.predictive(NEW).std, before.std)  # the model itself has not changed
    same = one.at_alpha(float(np.mean(one.fitted_.log_alphas))).predictive(NEW)
    np.testing.assert_allclose(same.std, before.std, rtol=1e-6)


@of_every_kind
def test_at_its_own_alpha_a_model_is_what_it_was(model):
    """Members under several prior precisions have alphas far apart: `alpha_` is that of the best ones."""
    view = model.at_alpha(math.log(model.alpha_))
    assert view.alpha_ == pytest.approx(model.alpha_, rel=1e-12)
    np.testing.assert_allclose(view.fitted_.log_alphas, model.fitted_.log_alphas, rtol=1e-12)
    np.testing.assert_allclose(view.predictive(NEW).std, model.predictive(NEW).std, rtol=1e-9)
    assert model.at_alpha(1.5).alpha_ == pytest.approx(math.exp(1.5), rel=1e-12)
    assert model.at_alpha(1.5).at_alpha(math.log(model.alpha_)).alpha_ == pytest.approx(model.alpha_, rel=1e-12)


def test_conformal_scores_belong_to_the_model_and_not_to_its_views():
    model, (X, y) = copy.deepcopy(fitted("one")), sine(30, seed=2)
    model.conformalize(X, y)
    view = model.at_alpha(math.log(model.alpha_))
    assert view.fitted_.conformal_scores is None
    refused("conformalize", view.predictive(NEW).interval, 0.9, method="conformal")
    assert model.fitted_.conformal_scores.shape == (30, 1)
    lower, upper = model.predictive(NEW).interval(0.9, method="conformal")
    assert (lower < upper).all()
    for change in ("update", "tune_alpha", "calibrate", "fit"):
        changed = getattr(copy.deepcopy(model), change)(X, y)
        assert changed.fitted_.conformal_scores is None


@pytest.mark.parametrize("model", ["backbones", "one", "mixed"], indirect=True)
def test_a_module_says_what_the_model_says_also_inside_a_parent_that_trains(model):
    p, module = model.predictive(NEW).with_output_axis(), model.module()
    parent = nn.Sequential(module).train()
    for _ in range(2):  # batch statistics would move
        out = parent(torch.from_numpy(NEW))
        for name in ("mean", "var", "epistemic_var", "noise_var", "affine_cost"):
            np.testing.assert_allclose(out[name].numpy(), getattr(p, name), rtol=1e-10)
    assert not any(part.training for part in module.modules())
    coarse = parent.float()(torch.from_numpy(NEW).float())["mean"].numpy()
    np.testing.assert_allclose(coarse, p.mean, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seen", [False, True])
def test_progress_tells_what_is_being_done(at_terminal, capsys, seen):
    quick(progress=seen, max_epochs=3).fit(*sine())
    said = capsys.readouterr().err
    assert ("training 5 networks" in said, "calibration" in said) == (seen, seen)
