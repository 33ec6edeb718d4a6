"""What the model says is the formula by hand; test_backends.py has the libraries that it is evaluated in."""

import copy
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from models import data, far

from lastlayer import BLLRegressor, TrainingOptions, formula
from lastlayer.calibration.fit import SHARPNESS
from lastlayer.integrations.export import to_arrays
from lastlayer.integrations.export.bundle import Bundle
from lastlayer.settings.types import ADDITIVE, FOURIER

pytestmark = pytest.mark.usefixtures("small_process")

RTOL = 1e-9
SMALL = {"hidden": (5, 4), "max_epochs": 25, "random_state": 0}
THREE = {**SMALL, "n_members": 3, "hidden_prior": 0.3}
KINDS = {
    "mixture of families": lambda: BLLRegressor(**SMALL | {"hidden": (4,), "max_epochs": 10}, preset="fast"),
    "mixture of families, tuned alpha": None,  # the same fit, see `fitted`
    "encoded inputs": lambda: BLLRegressor(**THREE, encoding="piecewise"),
    "noise by input": lambda: BLLRegressor(**THREE, noise="input"),
    "full noise": lambda: BLLRegressor(**THREE, noise="full"),
    "tuned alpha": lambda: BLLRegressor(**THREE),
    "another alpha": lambda: BLLRegressor(**THREE),
    "one network, tuned alpha": lambda: BLLRegressor(**SMALL, preset="evidence"),
    "shared bias prior": lambda: BLLRegressor(**THREE, training=TrainingOptions(bias_prior="shared")),
    "uncalibrated": lambda: BLLRegressor(**THREE, calibration=None),
}


@cache
def fitted(kind):
    X, y = data()
    if kind == "mixture of families, tuned alpha":
        return copy.deepcopy(fitted("mixture of families")).tune_alpha(far(X, 60), y)
    model = KINDS[kind]().fit(X, y)
    if kind == "another alpha":  # a tuned one may be infinite
        return model.at_alpha(math.log(model.alpha_star_) + 1.5)
    return model.tune_alpha(far(X, 60), y) if "tuned" in kind else model


def same(found, expected):
    """Relative to the largest entry of a column."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert np.all(np.abs(found - expected) <= RTOL * np.abs(expected).max(0))


def test_the_mixture_of_families_has_all_kinds_of_members():
    """What the other tests say of it, they say of encoded networks, of sums of functions and of the process: one member
    that sees some of the points inside the data and others outside."""
    model, X = fitted("mixture of families"), far(data()[0])
    families = [member.family for member in model.fitted_.members]
    networks = [family for family in families if family.trained]
    assert {family.encoding for family in networks} == {"raw", "piecewise"}
    assert ADDITIVE in families
    assert families.count(FOURIER) == 1
    assert families.count(ADDITIVE) > 1
    trusts = [curve.trust for curve in model.calibration_.curves.values()]
    assert max(trusts) > 1.2 * min(trusts)  # families that count differently
    i, value = families.index(FOURIER), model.fitted_
    said = value.members[i].posterior.predict(value.features(i, value.standardized(X)))
    assert 5 < (said.variance_ratio > model.calibration_.outside.inside).sum() < 35


def test_where_no_member_is_a_process_the_additive_model_tells_what_lies_outside(tmp_path):
    """As for large tables: nothing is added to the variance, and disagreement counts where it says so."""
    value, X = fitted("mixture of families").fitted_, far(data()[0])
    value = replace(value, calibration=replace(value.calibration, outside=None))
    ((places, inside),) = value.references
    Z = value.standardized(X)
    u = np.mean([value.members[i].posterior.variance_ratio(value.features(i, Z)) for i in places], axis=0)
    outside, where, p = u > inside, value.extrapolation(X), value.predictive(X)
    assert outside.any()
    assert not outside.all()
    assert (where.quantile[outside] == 1).all()
    apart = replace(value, calibration=replace(value.calibration, additive_inside=None)).predictive(X)
    change = np.abs(p.component_mean - apart.component_mean).max((0, 2))
    np.testing.assert_array_equal(change > 1e-9 * np.abs(p.component_mean).max(), outside)
    np.savez(tmp_path / "m.npz", **to_arrays(value))
    by_numpy = Bundle(tmp_path / "m.npz").predict(X)
    for name in ("mean", "std", "component_mean", "component_var"):
        same(getattr(by_numpy, name), getattr(p, name))
    np.testing.assert_array_equal(by_numpy.extrapolation, where.quantile)


@pytest.mark.parametrize("kind", KINDS)
def test_the_formula_by_hand(kind):
    """From posteriors and calibration, member by member and point by point; nothing of the formula is called."""
    model, X = fitted(kind), far(data()[0])
    value, calibration = model.fitted_, model.calibration_
    Z = value.standardized(X)
    scale, centre = value.targets.scale.numpy(), value.targets.mean.numpy()
    means, epistemics, noises, trusted, costs = [], [], [], [], []
    families = [member.family for member in value.members]
    outside = None if calibration is None else calibration.outside
    assert (outside is not None) == ("mixture of families" in kind)
    if outside is not None:  # how far the process, at its own alpha, sees the points outside the data
        process = value.members[families.index(FOURIER)].posterior
        said = process.predict(value.features(families.index(FOURIER), Z))
        process_noise = np.sqrt(np.prod(said.noise_cov.diagonal().numpy() * scale**2))
        beyond = process_noise * np.maximum(0.0, said.variance_ratio.numpy() - outside.inside)
    for i, (member, log_alpha) in enumerate(zip(value.members, value.log_alphas, strict=True)):
        posterior, Phi = member.posterior, value.features(i, Z)
        said = posterior.predict(Phi)
        noise_var = said.noise_cov.diagonal().numpy() * scale**2
        mean = said.mean.numpy() * scale + centre
        star, used = said.variance_ratio.numpy(), posterior.variance_ratio(Phi, log_alpha).numpy()
        a, b, power, reach, trust = np.ones(2), np.ones(2), 1.0, np.inf, 1.0
        if calibration is not None:
            curve = calibration.curves[member.family]
            a, b, power, reach, trust = curve.noise, curve.slope, curve.power, curve.reach, curve.trust
            trust = trust / families.count(member.family)
        factor = np.ones((len(X), 2))
        if calibration is not None and calibration.head is not None:
            head = calibration.head
            clipped = np.clip(Z.numpy(), head.low.numpy(), head.high.numpy())
            factor = np.exp(np.tanh(clipped @ head.U.numpy() + head.u.numpy()) @ head.V.numpy())
        added = 0.0
        if outside is not None:
            own = np.exp(-1.5) if member.family == FOURIER else 1.0
            added = outside.factor * own / np.sqrt(np.prod(noise_var * b)) * beyond
        inside = lambda v: np.where(v <= reach, v**power, reach**power * (v / reach if np.isfinite(reach) else 1.0))
        grown = lambda v: inside(v) + added
        noise = noise_var * a * factor
        total = noise_var * b * grown(star)[:, None] + noise
        if calibration is not None:
            alone = noise_var * b * inside(star)[:, None] + noise  # without what the process adds
            mean = centre + (mean - centre) / (1 + calibration.shrinkage.precision * alone / scale**2)
        means.append(mean)
        epistemics.append(noise_var * b * grown(used)[:, None])
        noises.append(noise)
        costs.append(used)
        trusted.append(trust * np.prod(total, axis=1) ** (-SHARPNESS / 2 * (calibration is not None)))
    weights = np.stack(trusted) / np.sum(trusted, axis=0)
    p, c, tails = model.predictive(X), len(means), value.tails
    mean = (weights[..., None] * means).sum(0)
    between = (weights[..., None] * np.square(np.stack(means) - mean)).sum(0)
    within = (weights[..., None] * (np.stack(epistemics) + noises)).sum(0) * (1 + tails.share * (tails.factor - 1))
    # outside the data, the spread of the means is part of every member's variance
    outer = np.zeros((len(X), 1))
    if outside is not None:
        for family, inside in ((FOURIER, outside.inside), (ADDITIVE, calibration.additive_inside)):
            own = [i for i, other in enumerate(families) if other == family]
            u = np.mean([value.members[i].posterior.variance_ratio(value.features(i, Z)) for i in own], axis=0)
            fraction = np.maximum(0.0, 1 - inside / u)[:, None]
            assert (fraction > outer).any()  # each of them sees some point farther outside than the other
            outer = np.maximum(outer, fraction)
    # with tails, every member stands twice: as it is, and wider
    share = (1 - tails.share) if tails.share else 1.0
    close = lambda found, expected: np.testing.assert_allclose(found, expected, rtol=1e-7)
    drawn_in = mean + np.sqrt(1 - outer) * (np.stack(means) - mean)
    np.testing.assert_allclose(p.component_mean[:c], drawn_in, rtol=1e-7, atol=1e-7 * np.abs(means).max())
    close(p.component_epistemic_var[:c], np.stack(epistemics) + outer * between)
    close(p.component_noise_var[:c], noises)
    close(p.weights[:c], share * weights)
    close(p.affine_cost, np.mean(costs, axis=0))
    if tails.share:
        np.testing.assert_array_equal(p.component_mean[c:], p.component_mean[:c])
        close(p.component_var[c:], tails.factor * (np.stack(epistemics) + noises) + outer * between)
        close(p.weights[c:], tails.share * weights)
    np.testing.assert_allclose(p.mean, mean, rtol=1e-7, atol=1e-7 * np.abs(means).max())
    close(p.var, within + between)


def test_extrapolation_is_the_share_of_training_rows_that_cost_less_or_one_where_a_reference_sees_a_point_outside():
    sample_cost = np.array([0.1, 0.2, 0.2, 0.3, 0.7])
    mean = np.array([0.05, 0.1, 0.2, 0.25, 0.7, 9.0])
    cost = np.stack([mean, mean])[..., None]  # two members that agree
    share = [sum(other < own for other in sample_cost) / 5 for own in mean]
    assert share == [0.0, 0.0, 0.2, 0.6, 0.8, 1.0]
    np.testing.assert_array_equal(formula.extrapolation(np, [], sample_cost, cost), share)
    apart = cost + 0.08 * np.array([1.0, -1.0])[:, None, None]  # the same on average
    found = formula.extrapolation(np, [([0], 0.3), ([1], 0.15)], sample_cost, apart)
    np.testing.assert_array_equal(found, [0.0, 0.0, 0.2, 1.0, 1.0, 1.0])  # the fourth costs 0.33 and 0.17
    np.testing.assert_array_equal(formula.extrapolation(np, [([0, 1], 0.26)], sample_cost, apart), [*share[:4], 1, 1])
