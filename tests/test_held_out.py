"""Held-out predictions of the training rows: by networks that never saw them, in the order of the table."""

import pickle

import numpy as np
import pytest
from helpers import close, refused, sine
from sklearn.model_selection import TimeSeriesSplit

from lastlayer import BLLRegressor

pytestmark = pytest.mark.usefixtures("as_a_user", "small_process")

QUICK = {"hidden": (4,), "preset": "fast", "max_epochs": 10, "random_state": 0}


def table(m=50, q=2):
    X, y = sine(m, q=q, d=2)
    return np.concatenate([X, X[:5]]), np.concatenate([y, y[:5]])  # copies are merged in fit


def test_rows_are_predicted_by_the_networks_that_left_them_out():
    """Fold by fold, with the model of the fold alone; copies of a row are left out together."""
    X, y = table()
    held_out = BLLRegressor(**QUICK).fit(X, y).held_out_
    assert held_out.rows.tolist() == list(range(55))
    p = held_out.predictive(X)
    for i in (0, 17, 52):
        fold = held_out.folds[held_out.fold[i]]
        assert i in fold.held
        assert i not in fold.train
        assert sorted([*fold.held, *fold.train]) == list(range(55))
        one = fold.model.predictive(X[[i]])
        for name in ("mean", "std", "affine_cost"):
            close(getattr(p, name)[[i]], getattr(one, name))
    np.testing.assert_array_equal(held_out.fold[50:], held_out.fold[:5])
    close(p.log_prob(y)[52], p.log_prob(y)[2])


def test_targets_of_a_row_do_not_reach_its_held_out_prediction():
    """With its features at hand: a row whose target is absurd pulls the model, but not what is said of the row."""
    X, y = sine(40, q=1, d=2)
    y = y[:, 0]
    absurd = y.copy()
    absurd[3] += 30 * y.std()
    held_out = BLLRegressor(**QUICK).fit(X, absurd).held_out_
    assert abs(np.ravel(held_out.predictive(X).mean)[3] - absurd[3]) > 15 * y.std()


def test_a_splitter_of_the_user_says_what_is_held_out():
    X, y = sine(40, q=1, d=2)
    held_out = BLLRegressor(**QUICK, calibration=TimeSeriesSplit(3)).fit(X, y).held_out_
    assert held_out.rows.tolist() == list(range(10, 40))  # the first rows are in every training set
    assert all(fold.train.max() < fold.held.min() for fold in held_out.folds)


def test_some_rows_in_another_order():
    X, y = table()
    held_out = BLLRegressor(**QUICK).fit(X, y).held_out_
    some = np.array([30, 2, 54])
    close(held_out.take(some).predictive(X[some]).std, held_out.predictive(X).std[some])
    refused(r"X has 2 rows, but 3 were held out", held_out.take(some).predictive, X[:2])


def test_what_has_no_held_out_rows():
    X, y = sine(30, q=1, d=2)
    assert BLLRegressor(preset="evidence", hidden=(3,), max_epochs=2).fit(X, y).held_out_ is None
    model = BLLRegressor(**QUICK, noise="full").fit(*table())
    assert model.held_out_.predictive(table()[0]).correlation is not None
    again = pickle.loads(pickle.dumps(model))
    assert again.held_out_ is None
    close(again.predict(X), model.predict(X))
