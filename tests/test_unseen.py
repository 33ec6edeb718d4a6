"""Rows that a member was held back from: it forgets what it has seen of them and nothing else."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from helpers import close, held_from, refused, reloaded, sine
from numpy import ndarray

from lastlayer import BLLRegressor
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Readings, Statistics
from lastlayer.data.rows import Points
from lastlayer.predictor.member import NOTHING, Unseen
from lastlayer.settings.types import ADDITIVE, FOURIER, LINEAR

pytestmark = pytest.mark.usefixtures("as_a_user", "small_process")

M = 30
X, Y = sine(M, q=2, d=2)
NEW_X, NEW_Y = sine(8, q=2, d=2, seed=5)
WEIGHT = np.random.default_rng(3).integers(1, 4, M).astype(float)


def fitted(dtype: str = "float64", weighted: bool = False) -> BLLRegressor:
    """A mixture of its own, of members that have seen all rows and of others that have not."""
    return copy.copy(_fitted(dtype, weighted))  # its fitted value is frozen


@cache
def _fitted(dtype: str, weighted: bool) -> BLLRegressor:
    model = BLLRegressor(hidden=(3,), preset="fast", max_epochs=3, random_state=0, dtype=dtype)
    return model.fit(X, Y, sample_weight=WEIGHT if weighted else None)


def unseen_rows(model: BLLRegressor) -> ndarray:
    """(members, rows) that each has not seen."""
    return np.stack([held_from(member, model.fitted_.data(X, Y)) for member in model.members_])


def two_of_a_fold(model: BLLRegressor) -> list[int]:
    """Rows that the same members have not seen."""
    hidden = unseen_rows(model)
    return np.flatnonzero(hidden[hidden.any(1)][0])[:2].tolist()


def data(X: list, T: list, weight: list | None = None) -> Points:
    of = lambda x: torch.tensor(x, dtype=torch.float64)
    return Points(of(X), Readings(of(T)), None if weight is None else of(weight))


def holds(model: BLLRegressor, before: BLLRegressor, weight: ndarray, new=0.0, *, loose=100.0) -> None:
    """Every last layer is that of the rows with these weights, as far as it had seen them, and of new rows.

    Moments were added and subtracted, which costs two digits.
    """
    every = model.fitted_.data(np.concatenate([X, NEW_X]), np.concatenate([Y, NEW_Y]))
    for i, hidden in enumerate(unseen_rows(before)):
        seen = torch.from_numpy(np.concatenate([np.where(hidden, 0.0, weight), np.full(len(NEW_X), new)]))
        Phi, found = model.fitted_.features(i, every.X), model.members_[i].posterior
        at = seen > 0
        moments = Statistics.from_features(Phi[at], every.T[at], sample_weight=seen[at])
        by_hand = Posterior(moments, found.log_alpha, found.Sigma_E, checked=False)
        assert float(found.statistics.count) == pytest.approx(float(seen.sum()))
        close(found.mean(Phi), by_hand.mean(Phi), loose=loose)
        close(found.variance_ratio(Phi), by_hand.variance_ratio(Phi), loose=loose)


def without(*rows: int, weight: ndarray | float = 1.0) -> ndarray:
    left = weight * np.ones(M)
    left[list(rows)] = 0
    return left


def test_a_mixture_has_members_that_have_seen_all_rows_and_others_that_have_not():
    unseen = unseen_rows(fitted())
    assert unseen.any(0).all()
    assert set(unseen.sum(1)) == {0, M // 5}
    for member, hidden in zip(fitted().members_, unseen, strict=True):
        # the process is of every row; two features are few for the rows, six bins and two are not
        assert not hidden.any() or member.family not in (FOURIER, LINEAR)
        assert hidden.any() or member.family != ADDITIVE
    holds(fitted(), fitted(), np.ones(M))


def test_what_is_left_is_the_last_layer_of_the_remaining_rows():
    before = fitted()
    rows = [3, *two_of_a_fold(before), 25]
    after = fitted().remove(X[rows], Y[rows])
    holds(after, before, without(*rows))
    for a, b in zip(after.members_, before.members_, strict=True):
        assert torch.equal(a.posterior.Sigma_E, b.posterior.Sigma_E)
        assert a.posterior.log_alpha == b.posterior.log_alpha
    single, hidden = fitted(), unseen_rows(before)
    for row in rows:
        single.remove(X[[row]], Y[[row]])
    holds(single, before, without(*rows))
    hidden[:, rows] = False
    for model in (after, single):
        np.testing.assert_array_equal(unseen_rows(model), hidden)


def test_a_float32_model_forgets_rows_too():
    """Its features are rounded, in another way for other numbers of rows at once."""
    rows = [3, 17, 25]
    after = fitted("float32", weighted=True).remove(X[rows], Y[rows], sample_weight=WEIGHT[rows])
    holds(after, fitted("float32", weighted=True), without(*rows, weight=WEIGHT), loose=1e6)
    assert not unseen_rows(after)[:, rows].any()


def test_a_member_that_never_saw_a_row_is_left_as_it_is():
    before = fitted()
    rows = two_of_a_fold(before)
    after = fitted().remove(X[rows], Y[rows])
    never = unseen_rows(before)[:, rows].all(1)
    assert never.any()
    assert not never.all()
    Phi = [before.fitted_.features(i, before.fitted_.data(X, Y).X) for i in range(len(never))]
    for a, b, phi, untouched in zip(after.members_, before.members_, Phi, never, strict=True):
        assert torch.equal(a.posterior.mean(phi), b.posterior.mean(phi)) == untouched
        assert (a.posterior is b.posterior) == untouched


def test_a_part_of_the_weight_can_be_removed():
    before, rows = fitted(weighted=True), np.flatnonzero(WEIGHT == 3)[:2]
    part = fitted(weighted=True).remove(X[rows], Y[rows], sample_weight=[2.0, 1.0])
    left = WEIGHT.copy()
    left[rows] = [1.0, 2.0]
    holds(part, before, left)
    np.testing.assert_array_equal(unseen_rows(part), unseen_rows(before))
    rest = part.remove(X[rows], Y[rows], sample_weight=[1.0, 2.0])
    holds(rest, before, without(*rows, weight=WEIGHT))
    assert not unseen_rows(rest)[:, rows].any()
    rows = np.flatnonzero(WEIGHT == 2)[:1].repeat(2)  # a row twice is one of weight two
    twice = fitted(weighted=True).remove(X[rows], Y[rows])
    holds(twice, before, without(*rows, weight=WEIGHT))
    assert not unseen_rows(twice)[:, rows].any()


def test_a_row_with_another_target_was_never_in():
    model = fitted()
    before, hidden = model.predict(NEW_X), unseen_rows(model)
    refused("were not all added before", model.remove, X[[3]], Y[[3]] + 1e3)
    np.testing.assert_array_equal(model.predict(NEW_X), before)
    np.testing.assert_array_equal(unseen_rows(model), hidden)


def test_a_row_that_was_updated_later_is_removed_from_every_member():
    model = fitted().update(NEW_X, NEW_Y)
    holds(model, fitted(), np.ones(M), new=1.0)
    holds(model.remove(NEW_X, NEW_Y), fitted(), np.ones(M))


def test_forgetting_scales_rows_that_were_not_seen_too():
    before = fitted()
    rows = two_of_a_fold(before)
    model = fitted().update(NEW_X, NEW_Y, forgetting=0.5)
    untouched = unseen_rows(before)[:, rows].all(1)
    updated = list(model.members_)
    for member, old in zip(updated, before.members_, strict=True):
        np.testing.assert_array_equal(member.unseen.weight, 0.5 * old.unseen.weight)
    model.remove(X[rows], Y[rows], sample_weight=[0.5, 0.5])
    holds(model, before, without(*rows, weight=0.5), new=1.0)
    assert not unseen_rows(model)[:, rows].any()
    assert untouched.any()
    for a, b, none in zip(model.members_, updated, untouched, strict=True):
        assert (a.posterior is b.posterior) == none


def test_a_saved_model_removes_the_same(tmp_path):
    model, rows = fitted(weighted=True), [3, 17, 25]
    again = reloaded(model, tmp_path)
    for a, b in zip(again.members_, model.members_, strict=True):
        np.testing.assert_array_equal(a.unseen.keys, b.unseen.keys)
        np.testing.assert_array_equal(a.unseen.weight, b.unseen.weight)
    for each in (model, again):
        each.remove(X[rows], Y[rows], sample_weight=WEIGHT[rows])
    holds(again, fitted(weighted=True), without(*rows, weight=WEIGHT))
    np.testing.assert_array_equal(again.predict(NEW_X, return_std=True), model.predict(NEW_X, return_std=True))


def test_rows_that_differ_have_other_keys():
    rng = np.random.default_rng(0)
    first = rng.standard_normal((200, 3))
    close_by = [np.where(np.arange(3) == j, np.nextafter(first, 9.0), first) for j in range(3)]
    others = [first, *close_by, first[:, ::-1], first[:, [1, 0, 2]], -first, 2 * first, np.roll(first, 1, 0) + first]
    grid = np.stack(np.meshgrid(*[np.arange(-4.0, 5.0)] * 3), -1).reshape(-1, 3)
    every = np.concatenate([*others, grid])
    assert len(np.unique(every, axis=0)) == len(every)
    found = data(every[:, :2].tolist(), every[:, 2:].tolist()).keys()
    assert len(set(found)) == len(every)


def test_a_fingerprint_is_of_the_row_alone():
    X, T = np.random.default_rng(0).standard_normal((2, 20, 2))
    every = data(X.tolist(), T.tolist()).keys()
    order = np.random.default_rng(1).permutation(20)
    np.testing.assert_array_equal(data(X[order].tolist(), T[order].tolist(), [2.0] * 20).keys(), every[order])


def test_there_is_one_zero_and_rows_of_more_dimensions_have_keys_of_all_numbers():
    zeros = data([[0.0, 1.0], [-0.0, 1.0], [0.0, 1.0]], [[0.0], [0.0], [-0.0]]).keys()
    assert len(set(zeros)) == 1
    X = torch.arange(24.0, dtype=torch.float64).reshape(2, 3, 4)
    T = torch.zeros(2, 1, dtype=torch.float64)
    np.testing.assert_array_equal(Points(X, Readings(T)).keys(), Points(X.flatten(1), Readings(T)).keys())


def test_no_rows_are_known_by_nothing():
    rows = data([[0.0], [1.0]], [[0.0], [1.0]])
    rest, weight = NOTHING.without(rows.keys(), None)
    assert (len(rest.keys), weight.tolist()) == (0, [1.0, 1.0])


def test_weights_of_equal_rows_add_up_and_are_taken_in_turn():
    keys = lambda *x: data([[each] for each in x], [[0.0]] * len(x)).keys()
    known = Unseen(keys(1.0, 2.0, 1.0), np.array([0.5, 2.0, 1.0]))
    rest, weight = known.without(keys(1.0, 3.0, 1.0, 2.0, 1.0), torch.tensor([1.0, 5.0, 1.0, 2.0, 0.25]))
    assert (len(rest.keys), weight.tolist()) == (0, [0.0, 5.0, 0.5, 0.0, 0.25])
    rest, weight = known.without(keys(1.0), None)
    assert (sorted(rest.weight), weight.tolist()) == ([0.5, 2.0], [0.0])
    assert known.weight.tolist() == [0.5, 2.0, 1.0]  # the value itself does not change
    assert known.scaled(0.5).weight.tolist() == [0.25, 1.0, 0.5]
