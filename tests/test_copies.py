"""Copies of rows: equal ones count as one row of more weight, in any order; near ones are held out together."""

import warnings

import numpy as np
import pytest
from helpers import sine
from numpy import ndarray
from sklearn.model_selection import KFold

from lastlayer import BLLRegressor
from lastlayer.data.copies import SEARCHED_ROWS, distinct, near_groups
from lastlayer.errors import CopiesWarning
from lastlayer.settings.given import Given

pytestmark = pytest.mark.usefixtures("as_a_user", "small_process")

TINY = {"max_epochs": 3, "random_state": 0}
FAST = TINY | {"preset": "fast"}
ONE = TINY | {"n_members": 1, "hidden_prior": 0.3}


def rows(m: int = 30, d: int = 3, q: int = 2, seed: int = 0) -> tuple[ndarray, ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((m, d)), rng.standard_normal((m, q))


def merged(X: ndarray, y: ndarray, weight: ndarray | None) -> tuple:
    """Distinct rows with their weights; the place of every given row leads to one that is equal."""
    found = distinct(Given(X, y, weight))
    known = found.place >= 0
    assert known.all() if weight is None else (known == (weight > 0)).all()
    np.testing.assert_array_equal(found.X[found.place[known]], X[known])
    return found.X, found.y, found.weight


def same(a: tuple, b: tuple) -> None:
    """To the last bit."""
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_array_equal(x, y)


# equal rows ---------------------------------------------------------------------------------------------------------


def test_the_order_of_rows_makes_no_difference():
    X, y = rows()
    X[:15, 0] = X[15:, 0]  # a column alone does not decide
    weight = np.random.default_rng(1).integers(1, 4, len(X)).astype(float)
    for w in (None, weight):
        order = np.random.default_rng(2).permutation(len(X))
        first = merged(X, y, w)
        same(first, merged(X[order], y[order], None if w is None else w[order]))
        assert {tuple(row) for row in np.concatenate(first[:2], 1)} == {tuple(row) for row in np.concatenate([X, y], 1)}
    place = {tuple(row): w for row, w in zip(X, weight, strict=True)}
    one, _, found = merged(X, y, weight)
    assert found.tolist() == [place[tuple(row)] for row in one]


def test_copies_are_one_row_of_their_total_weight():
    X, y = rows()
    count = np.random.default_rng(1).integers(1, 4, len(X))
    many = np.random.default_rng(2).permutation(np.repeat(np.arange(len(X)), count))
    repeated = merged(X[many], y[many], None)
    same(repeated, merged(X, y, count.astype(float)))
    assert repeated[2].sum() == count.sum()
    assert len(repeated[0]) == len(X)
    same(merged(X[many], y[many], np.full(len(many), 0.5)), merged(X, y, 0.5 * count))


def test_rows_of_weight_zero_vanish():
    X, y = rows()
    weight = np.random.default_rng(1).integers(0, 3, len(X)).astype(float)
    kept = weight > 0
    assert 0 < kept.sum() < len(X)
    same(merged(X, y, weight), merged(X[kept], y[kept], weight[kept]))
    same(merged(X, y, kept.astype(float)), merged(X[kept], y[kept], None))


def test_weights_of_one_are_none():
    X, y = rows()
    same(merged(X, y, np.ones(len(X))), merged(X, y, None))
    assert merged(X, y, None)[2] is None
    twice = np.repeat(np.arange(len(X)), 2)
    same(merged(X[twice], y[twice], np.full(len(twice), 0.5)), merged(X, y, None))


def test_rows_that_differ_in_anything_are_no_copies():
    X = np.array([[0.0, 1.0], [0.0, 1.0], [np.nextafter(0.0, 1.0), 1.0], [1.0, 0.0]])
    y = np.array([[2.0, 3.0], [2.0, np.nextafter(3.0, 4.0)], [2.0, 3.0], [2.0, 3.0]])
    assert merged(X, y, None)[2] is None
    assert len(merged(X, y, None)[0]) == 4


# nearly equal rows --------------------------------------------------------------------------------------------------


def near_copies(m: int, n_copied: int, *, inputs: float = 1e-6, targets: float = 1e-6) -> tuple[ndarray, ...]:
    """m rows, a copy of the first ones that is off by so much, in any order; and the row that each came from."""
    Z, T = rows(m)
    origin = np.random.default_rng(1).permutation(np.r_[np.arange(m), np.arange(n_copied)])
    again = np.isin(np.arange(len(origin)), np.unique(origin, return_index=True)[1], invert=True)[:, None]
    return Z[origin] + inputs * again, T[origin] + targets * again, origin


def grouped_by(group: ndarray, origin: ndarray) -> bool:
    return bool(((group[:, None] == group) == (origin[:, None] == origin)).all())


def test_near_copies_are_grouped_where_most_rows_have_one():
    Z, T, origin = near_copies(50, 50)
    group = near_groups(Z, T)
    assert grouped_by(group, origin)
    assert sorted(set(group)) == list(range(50))


def test_copies_that_are_exceptions_are_not_grouped():
    """A new row may be such a copy as well: 34 of 67 rows have one, or 32 of 66."""
    Z, T, origin = near_copies(50, 17)
    assert grouped_by(near_groups(Z, T), origin)
    Z, T, _ = near_copies(50, 16)
    assert near_groups(Z, T).tolist() == list(range(66))


def test_half_of_the_rows_is_not_most():
    Z, T, _ = near_copies(60, 20)
    assert near_groups(Z, T).tolist() == list(range(80))


def test_rows_with_near_inputs_are_copies_only_with_near_targets_and_with_equal_inputs_always():
    Z, T, origin = near_copies(50, 50, targets=0.5e-3)
    assert grouped_by(near_groups(Z, T), origin)
    Z, T, _ = near_copies(50, 50, targets=2e-3)
    assert near_groups(Z, T).tolist() == list(range(100))
    Z, T, origin = near_copies(50, 50, inputs=0.0, targets=1.0)
    assert grouped_by(near_groups(Z, T), origin)


def test_rows_with_near_targets_are_copies_only_with_near_inputs():
    Z, T, _ = near_copies(50, 50, inputs=0.3)
    assert near_groups(Z, T).tolist() == list(range(100))


def test_a_long_trajectory_is_not_one_group():
    """Each row is close to the next, and the first is far from the last."""
    m = 2000
    t = np.linspace(0, 2 * np.pi, m)
    Z = np.stack([np.sin(t), np.cos(t), t / 2], 1)
    group = near_groups(Z, np.zeros((m, 1)))
    size = np.bincount(group)[0]
    assert 1 < size <= 20
    assert group.tolist() == (np.arange(m) // size).tolist()  # pieces of the same length, one after the other


def test_constant_inputs_are_one_group():
    assert near_groups(np.zeros((6, 2)), rows(6)[1]).tolist() == [0] * 6


def test_in_a_large_table_only_equal_inputs_are_copies():
    m = SEARCHED_ROWS // 2 + 1
    Z, T, origin = near_copies(m, m, inputs=0.0)
    group = near_groups(Z, T)
    assert group.max() + 1 == m
    assert len(set(zip(group, origin, strict=True))) == m
    Z, T, _ = near_copies(m, m)
    assert near_groups(Z, T).tolist() == list(range(2 * m))


# from end to end ----------------------------------------------------------------------------------------------------


def same_predictions(*models: BLLRegressor) -> None:
    """To the last bit."""
    new = sine(20, d=2, seed=9)[0]
    first, *others = (model.predict(new, return_std=True) for model in models)
    for other in others:
        same(first, other)


def test_a_row_twice_and_a_row_of_weight_two_give_the_same_model():
    X, y = sine(50, d=2)
    count = np.random.default_rng(1).integers(0, 4, len(X))
    many = np.random.default_rng(2).permutation(np.repeat(np.arange(len(X)), count))
    with pytest.warns(CopiesWarning, match=f"{len(many)} rows .* one of {(count > 0).sum()}"):
        repeated = BLLRegressor(**FAST).fit(X[many], y[many])
    weighted = BLLRegressor(**FAST).fit(X, y, sample_weight=count)
    same_predictions(repeated, weighted)
    assert repeated.settings_ == weighted.settings_
    assert repeated.settings_.hidden == ((count > 0).sum() // 6,) * 2  # copies do not make a table larger
    assert (count > 0).sum() // 6 < len(many) // 6


def test_rows_of_weight_zero_are_no_part_of_a_model_and_others_count():
    X, y = sine(30, d=2)
    weight = np.repeat([0.0, 1.0, 2.0], 10)
    kept = weight > 0
    weighted = BLLRegressor(**FAST).fit(X, y, sample_weight=weight)
    same_predictions(weighted, BLLRegressor(**FAST).fit(X[kept], y[kept], sample_weight=weight[kept]))
    plain = BLLRegressor(**FAST).fit(X[kept], y[kept])
    assert not np.allclose(plain.predict(X), weighted.predict(X))


@pytest.mark.parametrize("m", [12, 30])
def test_the_order_of_rows_makes_no_difference_to_a_model(m):
    X, y = sine(m, d=2)
    order = np.random.default_rng(2).permutation(m)
    same_predictions(BLLRegressor(**FAST).fit(X, y), BLLRegressor(**FAST).fit(X[order], y[order]))


def test_near_copies_are_held_out_together_and_count_as_one_row():
    X, y = sine(60, d=2)
    rng = np.random.default_rng(1)
    X, y = np.concatenate([X, X + 1e-7 * rng.standard_normal(X.shape)]), np.concatenate([y, y])
    with pytest.warns(CopiesWarning, match="120 rows .* one of 60"):
        near = BLLRegressor(**FAST).fit(X, y)
    assert near.settings_.hidden == (10, 10)
    data = near.fitted_.data(X, y)
    unseen = np.stack([member.unseen.has(data) for member in near.members_])
    assert unseen.any(0).all()
    np.testing.assert_array_equal(unseen[:, :60], unseen[:, 60:])
    assert BLLRegressor(**ONE).fit(*sine(120, d=2)).settings_.hidden == (20, 20)


@pytest.mark.filterwarnings("ignore::lastlayer.errors.CopiesWarning")
def test_a_splitter_is_given_the_rows_as_they_came():
    X, y = sine(24, d=2)
    X, y = np.concatenate([X, X]), np.concatenate([y, y])
    seen = []

    class Splitter:
        def split(self, X, y, groups=None):
            seen.append((X, y))
            return KFold(3).split(X)

    model = BLLRegressor(**FAST, calibration=Splitter()).fit(X, y)
    ((Z, T),) = seen
    data = model.fitted_.data(X, y)
    same((Z, T), (data.X.numpy(), data.T.numpy()))


def test_equal_rows_alone_can_be_fitted():
    model = BLLRegressor(**TINY).fit(np.ones((6, 2)), np.full(6, 3.0))
    np.testing.assert_allclose(model.predict(np.ones((1, 2))), 3.0)


def test_copies_that_are_exceptions_are_not_warned_of():
    X, y = sine(24, d=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        BLLRegressor(**ONE).fit(np.concatenate([X, X[:4]]), np.concatenate([y, y[:4]]))
    assert not [warning for warning in said if warning.category is CopiesWarning]


def test_rows_of_weight_zero_are_no_copies():
    X, y = sine(40, d=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        BLLRegressor(**ONE).fit(X, y, sample_weight=np.repeat([1.0, 0.0], 20))
    assert not [warning for warning in said if warning.category is CopiesWarning]
