"""What the model says is the formula by hand; test_backends.py has the libraries that it is evaluated in."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from models import MODELS, data, far, fitted, merged, outside_the_data

from lastlayer import formula
from lastlayer.integrations.export import to_arrays
from lastlayer.integrations.export.bundle import Bundle
from lastlayer.settings.types import ADDITIVE, FOURIER

pytestmark = pytest.mark.usefixtures("small_process")

RTOL = 1e-9
KINDS = [*(kind for kind in MODELS if "missing" not in kind), "families, alpha tuned", "another alpha"]
KINDS += ["encoded inputs", "mixture, shared prior"]


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
    assert {family.encoding for family in families if family.trained} == {"raw", "piecewise"}
    assert families.count(FOURIER) == 1 < families.count(ADDITIVE)
    trusts = [curve.trust for curve in model.calibration_.curves.values()]
    assert max(trusts) > 1.2 * min(trusts)  # families that count differently
    process, additive = outside_the_data(model, X)
    assert 5 < (process > 0).sum() < 35
    assert (process > additive).any()  # each sees some point farther outside than the other
    assert (additive > process).any()


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
    value, p = model.fitted_, model.predictive(X)
    w, mean, cov = merged(model, X)
    function = merged(model, X, noise=False)[2]
    var, epistemic = (np.einsum("cmqq->cmq", each) for each in (cov, function))
    n, close = len(p.weights), partial(np.testing.assert_allclose, rtol=1e-7)
    assert n == len(value.members) * (2 if value.tails.share else 1)
    assert not w[n:].any()
    of_means = {"rtol": 1e-7, "atol": 1e-7 * np.abs(mean).max()}
    close(p.weights, w[:n])
    np.testing.assert_allclose(p.component_mean, mean[:n], **of_means)
    close(p.component_epistemic_var, epistemic[:n])
    close(p.component_noise_var, (var - epistemic)[:n])
    Z = value.standardized(X)
    costs = [
        member.posterior.variance_ratio(value.features(i, Z), value.log_alphas[i])
        for i, member in enumerate(value.members)
    ]
    close(p.affine_cost, np.mean(costs, axis=0))
    centre = (w[..., None] * mean).sum(0)
    np.testing.assert_allclose(p.mean, centre, **of_means)
    close(p.var, (w[..., None] * (var + np.square(mean - centre))).sum(0))


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
