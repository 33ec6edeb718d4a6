"""Which inputs matter, and what predictions do as one varies: against models whose answers are known."""

import sys
from copy import copy

import numpy as np
import pytest
from helpers import close, refused, table
from numpy import ndarray

from lastlayer import plots
from lastlayer._internal.files import ModelFileError
from lastlayer.errors import InputError
from lastlayer.explain import Input, partial_dependence, permutation_importance
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.tables import Table, TableRegressor, compare, dependence, held_out_importance, importance, keep_back
from lastlayer.tables.importance import Ranking, columns_of, extremes_table, saved_ranking
from lastlayer.tables.schema import Schema

pytestmark = pytest.mark.usefixtures("as_a_user", "small_process")

WEIGHTS = np.array([[3.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [1.0, 0.0]])
NOISE = np.array([0.5, 2.0])


class Linear:
    """y = X W, with an epistemic variance that grows with the first input."""

    def predictive(self, X: ndarray) -> MixturePrediction:
        assert np.array_equal(X[:, 2] + X[:, 3], np.ones(len(X)))  # a category is never torn apart
        cost = np.square(X[:, 0])
        epistemic = cost[:, None] * np.ones(2)
        return MixturePrediction.gaussian(X @ WEIGHTS, epistemic_var=epistemic, noise_var=NOISE**2, affine_cost=cost)


INPUTS = [Input("a", (0,)), Input("b", (1,)), Input("kind", (2, 3), np.eye(2), ("low", "high"))]


def rows(m: int = 300) -> ndarray:
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 2, m)
    return np.column_stack([rng.normal(size=(m, 2)), 1 - kind, kind])


def test_importance_is_the_rise_of_the_rmse():
    """Of a linear function without noise: sqrt(2) times the weight times the standard deviation of the input."""
    X = rows(2000)
    found = permutation_importance(Linear(), X, X @ WEIGHTS, inputs=INPUTS, n_repeats=3)
    assert [one.name for one in found] == ["a", "b", "kind"]
    for one, weights, j in zip(found, ([3.0, 0.0], [0.0, 1.0], [2.0, 0.0]), (0, 1, 3), strict=True):
        np.testing.assert_allclose(one.rmse, np.sqrt(2) * np.array(weights) * X[:, j].std(), rtol=0.05, atol=1e-12)
    a, b, _ = found
    assert b.lpd[0] == 0 < b.lpd[1]
    assert 0 < a.rmse_std[0] < 0.2


def test_the_lpd_that_is_lost_is_that_of_the_shuffled_rows():
    X = rows()
    y = X @ WEIGHTS + np.random.default_rng(1).normal(size=(len(X), 2))
    (one,) = permutation_importance(Linear(), X, y, inputs=INPUTS[:1], n_repeats=1, random_state=4)
    shuffled = X.copy()
    shuffled[:, 0] = X[np.random.default_rng(4).permutation(len(X)), 0]
    before, after = (Linear().predictive(x).log_prob(y, per_output=True).mean(0) for x in (X, shuffled))
    close(one.lpd, before - after)


def test_missing_targets_are_left_out():
    X = rows(50)
    y = X @ WEIGHTS
    y[::2, 0], y[1::2, 1] = np.nan, np.nan
    (one,) = permutation_importance(Linear(), X, y, inputs=INPUTS[1:2])
    assert one.rmse[0] == 0
    assert one.rmse[1] > 0.5


def test_what_cannot_be_explained_is_refused():
    X = rows(20)
    refused(r"X has 20 rows, y has 3", permutation_importance, Linear(), X, np.zeros(3))
    with pytest.raises(InputError, match=r"'far' has columns \(4,\), counted from 0, but X has 4"):
        permutation_importance(Linear(), X, X @ WEIGHTS, inputs=[Input("far", (4,))])
    refused("give it a grid", partial_dependence, Linear(), X, inputs=[Input("kind", (2, 3))])
    refused("need a table", partial_dependence, Linear(), X[:, 0])


def test_dependence_is_an_average_over_rows():
    X = rows(60)
    a, b, kind = partial_dependence(Linear(), X, inputs=INPUTS, n=7)
    assert (a.x[0], a.x[-1], len(a.x)) == (X[:, 0].min(), X[:, 0].max(), 7)
    others = (X @ WEIGHTS)[:, 0] - 3 * X[:, 0]
    close(a.mean[:, 0], 3 * a.x + others.mean())
    close(a.epistemic_std[:, 0], np.abs(a.x))
    close(a.std, np.sqrt(np.square(a.x)[:, None] + NOISE**2))
    close(b.epistemic_std, np.full((7, 2), np.sqrt(np.square(X[:, 0]).mean())))
    assert kind.labels == ("low", "high")
    close(np.diff(kind.mean[:, 0]), [2.0])
    lower, upper = a.band(0.9, noise=False)
    close(upper - lower, 2 * 1.6448536269514722 * a.epistemic_std)


def test_few_values_are_taken_as_they_are_and_many_rows_are_sampled():
    X = rows(60)
    X[:, 1] = np.random.default_rng(2).integers(0, 3, 60)
    (b,) = partial_dependence(Linear(), X, inputs=INPUTS[1:2], max_rows=10)
    assert b.x.tolist() == [0, 1, 2]
    some = np.sort(np.random.default_rng(0).choice(60, 10, replace=False))
    close(b.epistemic_std[0, 0], np.sqrt(np.square(X[some, 0]).mean()))


def test_pictures_show_every_input_and_target():
    X = rows(30)
    found = permutation_importance(Linear(), X, X @ WEIGHTS, inputs=INPUTS)
    left, right = plots.importance(found, targets=["u", "v"]).axes
    assert [left.get_title(), right.get_title()] == ["u", "v"]
    assert [label.get_text() for label in left.get_yticklabels()][-1] == "a"
    close([bar.get_width() for bar in left.patches], sorted(one.rmse[0] for one in found))
    varied = partial_dependence(Linear(), X, inputs=INPUTS)
    axes = plots.partial_dependence(varied, targets=["u", "v"]).axes
    assert [ax.get_xlabel() for ax in axes] == ["a", "b", "kind"] * 2
    close(axes[0].get_lines()[0].get_ydata(), varied[0].mean[:, 0])
    assert [label.get_text() for label in axes[2].get_xticklabels()] == ["low", "high"]
    assert len({ax.get_ylim() for ax in axes[:3]}) == 1  # effects can be compared
    for draw in (plots.importance, plots.partial_dependence):
        refused("no input to draw", draw, [])


QUICK = {"hidden": (4,), "preset": "fast", "max_epochs": 10, "random_state": 0}


def made(m: int = 60, seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    x, kind, run = rng.uniform(-1, 1, m), rng.choice(["a", "b"], m), np.arange(m) // 6
    y = 3 * x + 5 * (kind == "b") + 0.1 * rng.normal(size=m)
    return table(x=x, idle=rng.normal(size=m), kind=kind, run=run, y=y)


@pytest.fixture(scope="module")
def fitted() -> TableRegressor:
    return TableRegressor(drop=["run"], **QUICK).fit(made(), target="y")


def test_columns_of_a_table_are_explained_whole(fitted):
    ranking = held_out_importance(fitted, made())
    assert (ranking.rows, ranking.held_out, ranking.targets) == (60, True, ("y",))
    assert {one.name for one in ranking.ranked(0)[:2]} == {"x", "kind"}
    assert ranking.ranked(0)[2].name == "idle"
    assert ranking.sentences()[0].startswith("y depends most on kind, then on x")
    given = importance(fitted, made(seed=1))
    assert not given.held_out
    assert given.ranked(0)[0].name == "kind"
    again = Ranking.from_json(ranking.as_json())
    assert again.table() == ranking.table()
    fitted.card_["importance"] = ranking.as_json()
    assert saved_ranking(fitted).table() == ranking.table()
    damaged = copy(fitted)
    damaged.card_ = {"importance": {"targets": 3}}
    refused("damaged", saved_ranking, damaged, error=ModelFileError)


def test_of_a_wide_table_the_inputs_with_most_effect_are_measured(fitted, monkeypatch):
    """With four shuffles in all: two of each of two inputs."""
    module = sys.modules[Ranking.__module__]
    monkeypatch.setattr(module, "WORK", 0)
    monkeypatch.setattr(module, "FEWEST", 4)
    ranking = held_out_importance(fitted, made())
    assert [one.name for one in ranking.inputs] == ["x", "kind"]
    assert ranking.caption == "60 held-out rows (the 2 inputs with most effect of 3)"
    assert Ranking.from_json(ranking.as_json()).caption == ranking.caption


def test_dependence_of_a_table_goes_over_the_training_range_with_or_without_rows(fitted):
    for given in (None, made(seed=1)):
        x, _, kind = dependence(fitted, given)
        assert (x.x[0], x.x[-1]) == (min(made().columns["x"]), max(made().columns["x"]))
        assert kind.labels == ("a", "b")
        assert np.diff(kind.mean[:, 0])[0] == pytest.approx(5, abs=1.5)
    head, _, _, last = extremes_table(dependence(fitted), ["y"])
    assert head == ["target", "input", "lowest", "at", "highest", "at"]
    assert last[1] == "kind"
    assert (last[3], last[5]) == ("a", "b")


def test_a_column_of_dates_is_one_input_with_the_values_that_are_there():
    t = table(day=[f"2024-01-{1 + 5 * (i % 4):02}" for i in range(60)], **made().columns)
    schema = Schema.infer(t, ["y"], drop=["run"])
    day, *_ = columns_of(schema, t)
    assert (day.name, day.columns) == ("day", (0, 1, 2))
    assert day.labels == ("2024-01-01", "2024-01-06", "2024-01-11", "2024-01-16")
    close(day.grid, schema.encode(t).X[:4, :3])
    assert columns_of(schema)[0].grid is None


def test_baselines_are_fitted_to_the_rows_that_the_networks_saw(fitted):
    found = compare(fitted, made())
    assert (found.rows, found.kept_back) == (60, False)
    ours, linear, mean = found.methods
    assert [s.method for s in found.methods] == ["lastlayer", "linear regression", "mean"]
    held_out, X = fitted.held_out_, fitted.schema_.encode(made()).X
    y = fitted.schema_.targets_of(made())[:, 0]
    design = np.column_stack([X, np.ones(60)])
    errors, residuals = np.empty(60), np.empty(60)
    for fold in held_out.folds:
        solution = np.linalg.lstsq(design[fold.train], y[fold.train], rcond=None)[0]
        errors[fold.held] = y[fold.held] - design[fold.held] @ solution
        residuals[fold.held] = y[fold.held] - y[fold.train].mean()
    assert linear.rmse == pytest.approx(np.sqrt(np.square(errors).mean()))
    assert mean.rmse == pytest.approx(np.sqrt(np.square(residuals).mean()))
    assert mean.r2 < 0.05
    p = held_out.predictive(X)
    assert ours.rmse == pytest.approx(np.sqrt(np.square(y - np.ravel(p.mean)).mean()))
    assert ours.lpd == pytest.approx(p.log_prob(y).mean())
    lower, upper = (np.ravel(bound) for bound in p.interval(0.9))
    assert ours.coverage_90 == ((lower <= y) & (y <= upper)).mean()
    assert ours.width_90 == pytest.approx((upper - lower).mean())


def test_rows_kept_back_are_scored_and_not_learned(fitted):
    train, kept = keep_back(made(), 0.25, seed=3)
    assert (len(train), len(kept)) == (45, 15)
    again = keep_back(made(), 0.25, seed=3)[1]
    assert again.columns["x"].tolist() == kept.columns["x"].tolist()
    assert not set(train.columns["x"]) & set(kept.columns["x"])
    found = compare(fitted, train, kept)
    assert (found.rows, found.kept_back) == (15, True)
    error = kept.columns["y"].astype(float) - train.columns["y"].astype(float).mean()
    assert found.methods[2].rmse == pytest.approx(np.sqrt(np.square(error).mean()))
    train, kept = keep_back(made(), 0.3, groups="run")
    assert len(kept) == 18
    assert not set(train.columns["run"]) & set(kept.columns["run"])
    for share in (0.001, 1.0, -0.5):
        refused(r"--holdout .* would keep \d+ of 60 rows out of the fit", keep_back, made(), share)


def test_partly_missing_targets_are_scored_where_they_are_known():
    t = made()
    other = np.where(np.arange(60) % 3, t.columns["y"], None)
    both = Table(t.columns | {"z": other})
    model = TableRegressor(drop=["run"], **QUICK).fit(both, target=["y", "z"])
    found = compare(model, both)
    assert {s.target for s in found.methods} == {"y", "z"}
    assert all(np.isfinite([s.rmse, s.r2, s.coverage_90, s.width_90]).all() for s in found.methods)
    assert np.isfinite(held_out_importance(model, both).inputs[0].rmse).all()


def test_a_fit_that_leaves_nothing_out_has_no_held_out_scores():
    model = TableRegressor(drop=["run"], preset="evidence", hidden=(3,), max_epochs=2).fit(made(), target="y")
    assert compare(model, made()) is None
    assert held_out_importance(model, made()) is None
