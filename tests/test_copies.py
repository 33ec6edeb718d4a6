"""Copies of rows: equal ones count as one row of more weight, in any order; near ones are held out together."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import held_from, sine
from models import CASES
from numpy import ndarray
from sklearn.model_selection import KFold

from lastlayer import BLLRegressor
from lastlayer.data.copies import SEARCHED_ROWS, distinct, near_groups
from lastlayer.errors import CopiesWarning
from lastlayer.settings.types import Given

pytestmark = pytest.mark.usefixtures("as_a_user", "small_process")

TINY = {"max_epochs": 3, "random_state": 0}
FAST = TINY | {"preset": "fast"}
ONE = TINY | {"n_members": 1, "hidden_prior": 0.3}


def rows(m: int = 30, d: int = 3, q: int = 2, seed: int = 0) -> tuple[ndarray, ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((m, d)), rng.standard_normal((m, q))


def same(*found: Given) -> None:
    """To the last bit, apart from where the rows of the user went."""
    first, *others = (vars(given) | {"place": None} for given in found)
    for other in others:
        for name, value in first.items():
            np.testing.assert_array_equal(other[name], value, err_msg=name)


@pytest.mark.parametrize("kind", CASES)
def test_order_copies_weights_and_rows_of_weight_zero_make_no_difference(kind):
    case, rng, m = CASES[kind](30), np.random.default_rng(1), 30
    count = rng.integers(1, 4, m)
    many = rng.permutation(np.repeat(np.arange(m), count))
    weighted, repeated = (distinct(one.given()) for one in (case.weighted(count), case.take(many)))
    same(weighted, repeated, distinct(case.weighted(count).take(rng.permutation(m)).given()))
    double, half = np.full(len(many), 2.0), np.full(len(many), 0.5)
    same(repeated, distinct(case.take(many).weighted(double).weighted(half).given()))
    with_none = case.take(np.repeat(np.arange(m), 2)).weighted(np.stack([count, 0 * count], 1).ravel())
    same(weighted, distinct(with_none.given()))
    assert len(repeated.X) == m
    assert repeated.weight.sum() == (count * case.by_row.get("sample_weight", 1.0)).sum()
    for given, rows in ((weighted, np.arange(m)), (repeated, many)):  # every row is found again, with its targets
        np.testing.assert_array_equal(given.X[given.place], case.X[rows])
        np.testing.assert_array_equal(given.y[given.place], case.y[rows])


def test_weights_of_one_are_none_and_rows_without_weight_have_no_place():
    case = CASES["missing"](30)
    assert distinct(case.weighted(np.ones(30)).given()).weight is None
    kept = np.arange(30) % 3 > 0
    found = distinct(case.weighted(kept.astype(float)).given())
    same(found, distinct(case.take(kept).given()))
    assert ((found.place >= 0) == kept).all()


@pytest.mark.parametrize("X", [np.arange(12) % 4, np.arange(12) % 4 + 2**60], ids=["ids", "long ids"])
def test_ids_and_inputs_of_any_shape_are_merged_by_all_their_numbers(X):
    images = np.random.default_rng(0).normal(size=(4, 2, 3, 3))[np.arange(12) % 4]
    for inputs in (X[:, None], images):
        found = distinct(Given(inputs, np.ones((12, 1)), is_table=False))
        assert found.weight.tolist() == [3.0] * 4
        np.testing.assert_array_equal(found.X[found.place], inputs)


def test_rows_that_differ_in_anything_are_no_copies():
    X = np.array([[0.0, 1.0], [0.0, 1.0], [np.nextafter(0.0, 1.0), 1.0], [1.0, 0.0]])
    y = np.array([[2.0, 3.0], [2.0, np.nextafter(3.0, 4.0)], [2.0, 3.0], [2.0, 3.0]])
    assert len(distinct(Given(X, y)).X) == 4
    one = Given(X[:1].repeat(2, 0), y[:1].repeat(2, 0))
    more = Given(X[3:], y[3:])  # one row that differs does not make a table
    for name, values in (("noise_std", np.array([[0.1, 0.2], [0.1, 0.3]])), ("groups", np.array([0, 1]))):
        assert len(distinct(replace(one, **{name: values})).X) == 2
    assert distinct(more) is more


def near_copies(m: int, n_copied: int, *, inputs: float = 1e-6, targets: float = 1e-6) -> tuple[ndarray, ...]:
    """m rows, a copy of the first ones that is off by so much, in any order; and the row that each came from."""
    Z, T = rows(m)
    origin = np.random.default_rng(1).permutation(np.r_[np.arange(m), np.arange(n_copied)])
    again = np.isin(np.arange(len(origin)), np.unique(origin, return_index=True)[1], invert=True)[:, None]
    return Z[origin] + inputs * again, T[origin] + targets * again, origin


def grouped_by(group: ndarray, origin: ndarray) -> bool:
    return bool(((group[:, None] == group) == (origin[:, None] == origin)).all())


@pytest.mark.parametrize(
    ("m", "n_copied", "off", "grouped"),
    [
        (50, 50, {}, True),
        (50, 17, {}, True),  # 34 of 67 rows have a copy: a new row may be one as well
        (50, 16, {}, False),  # 32 of 66
        (60, 20, {}, False),  # half of the rows is not most
        (50, 50, {"targets": 0.5e-3}, True),
        (50, 50, {"targets": 2e-3}, False),
        (50, 50, {"inputs": 0.0, "targets": 1.0}, True),  # equal inputs are copies whatever their targets
        (50, 50, {"inputs": 0.3}, False),
    ],
)
def test_rows_with_near_inputs_and_targets_are_grouped_where_most_rows_have_a_copy(m, n_copied, off, grouped):
    Z, T, origin = near_copies(m, n_copied, **off)
    group = near_groups(Z, T)
    if grouped:
        assert grouped_by(group, origin)
        assert sorted(set(group)) == list(range(m))
    else:
        assert group.tolist() == list(range(m + n_copied))


def test_a_long_trajectory_is_not_one_group():
    """Each row is close to the next, and the first is far from the last."""
    m = 2000
    t = np.linspace(0, 2 * np.pi, m)
    Z = np.stack([np.sin(t), np.cos(t), t / 2], 1)
    group = near_groups(Z, np.zeros((m, 1)))
    size = np.bincount(group)[0]
    assert 1 < size <= 20
    assert group.tolist() == (np.arange(m) // size).tolist()  # pieces of the same length, one after the other


def test_in_a_large_table_only_equal_inputs_are_copies():
    m = SEARCHED_ROWS // 2 + 1
    Z, T, origin = near_copies(m, m, inputs=0.0)
    group = near_groups(Z, T)
    assert group.max() + 1 == m
    assert len(set(zip(group, origin, strict=True))) == m
    Z, T, _ = near_copies(m, m)
    assert near_groups(Z, T).tolist() == list(range(2 * m))


def same_predictions(one: BLLRegressor, other: BLLRegressor) -> None:
    """To the last bit."""
    new = sine(20, d=2, seed=9)[0]
    np.testing.assert_array_equal(one.predict(new, return_std=True), other.predict(new, return_std=True))


@pytest.mark.parametrize(("kind", "preset"), [*((kind, "evidence") for kind in CASES), ("missing", "fast")])
@pytest.mark.filterwarnings("ignore::lastlayer.errors.CopiesWarning", "ignore::lastlayer.errors.MissingTargetsWarning")
def test_a_row_twice_is_a_row_of_weight_two_in_any_order(kind, preset):
    case, rng = CASES[kind](15), np.random.default_rng(1)
    count = rng.integers(0, 4, 15)
    forms = case.weighted(count).take(rng.permutation(15)), case.take(rng.permutation(np.repeat(np.arange(15), count)))
    models = [form.fitted(**TINY, preset=preset) for form in forms]
    same_predictions(*models)
    assert models[0].settings_ == models[1].settings_


def test_copies_do_not_make_a_table_larger():
    X, y = sine(50, d=2)
    with pytest.warns(CopiesWarning, match="150 rows .* one of 50"):
        repeated = BLLRegressor(**FAST).fit(X.repeat(3, 0), y.repeat(3))
    assert repeated.settings_.network.hidden == (50 // 6,) * 2


def test_near_copies_are_held_out_together_and_count_as_one_row():
    X, y = sine(60, d=2)
    rng = np.random.default_rng(1)
    X, y = np.concatenate([X, X + 1e-7 * rng.standard_normal(X.shape)]), np.concatenate([y, y])
    with pytest.warns(CopiesWarning, match="120 rows .* one of 60"):
        near = BLLRegressor(**FAST).fit(X, y)
    assert near.settings_.network.hidden == (10, 10)
    data = near.fitted_.data(X, y)
    unseen = np.stack([held_from(member, data) for member in near.members_])
    assert unseen.any(0).all()
    np.testing.assert_array_equal(unseen[:, :60], unseen[:, 60:])
    assert BLLRegressor(**ONE).fit(*sine(120, d=2)).settings_.network.hidden == (20, 20)


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
    np.testing.assert_array_equal(Z, data.X.numpy())
    np.testing.assert_array_equal(T, data.T.numpy())


def test_equal_rows_alone_are_one_group_and_can_be_fitted():
    assert near_groups(np.zeros((6, 2)), rows(6)[1]).tolist() == [0] * 6
    model = BLLRegressor(**TINY).fit(np.ones((6, 2)), np.full(6, 3.0))
    np.testing.assert_allclose(model.predict(np.ones((1, 2))), 3.0)


@pytest.mark.filterwarnings("error::lastlayer.errors.CopiesWarning")
def test_copies_that_are_exceptions_and_rows_of_weight_zero_are_not_warned_of():
    X, y = sine(24, d=2)
    BLLRegressor(**ONE).fit(np.concatenate([X, X[:4]]), np.concatenate([y, y[:4]]))
    BLLRegressor(**ONE).fit(*sine(40, d=2), sample_weight=np.repeat([1.0, 0.0], 20))
