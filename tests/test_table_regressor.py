"""`TableRegressor`: DataFrames in, the same model as on the command line, and all that scikit-learn asks."""

import numpy as np
import pandas as pd
import polars as pl
import pytest
from helpers import refused
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from typer.testing import CliRunner

import lastlayer
from lastlayer import BLLRegressor, TableRegressor
from lastlayer.cli import app
from lastlayer.errors import InputError
from lastlayer.tables.frames import as_table

FAST = {"preset": "evidence", "hidden": (6,), "max_epochs": 10, "random_state": 0}
NEW = slice(40, 60)


def frame(n: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    x, kind = rng.uniform(-2, 2, n), np.array(["a", "b", "c"])[rng.integers(0, 3, n)]
    when = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.permutation(n), unit="D")
    y = np.sin(x) + (kind == "b") + 0.01 * np.arange(n) + 0.05 * rng.standard_normal(n)
    return pd.DataFrame({"id": range(n), "x": x, "kind": pd.Categorical(kind), "when": when, "on": x > 0, "y": y})


@pytest.fixture(scope="module")
def fitted() -> TableRegressor:
    return TableRegressor(**FAST).fit(frame(), target="y")


def test_columns_of_every_kind_become_inputs(fitted):
    kinds = {column.name: column.kind for column in fitted.schema_.columns}
    assert kinds == {"x": "number", "kind": "text", "when": "date", "on": "text"}
    assert fitted.input_names_[:4] == ["x", "kind=a", "kind=b", "kind=c"]
    assert fitted.n_features_in_ == len(fitted.input_names_)
    notes = [note.split(":")[0] for note in fitted.notes_]
    assert notes == ["column 'id' is excluded", "column 'when' is read as dates; inputs"]


def test_pandas_polars_and_dictionaries_say_the_same(fitted):
    new = frame().iloc[NEW]
    expected = fitted.predict(new)
    assert expected.shape == (20,)
    without = pl.from_pandas(new.drop(columns="y"))
    for other in (pl.from_pandas(new), without, dict(new), new.astype({"kind": "string"})):
        np.testing.assert_array_equal(fitted.predict(other), expected)
    texts = new.assign(when=new["when"].dt.strftime("%Y-%m-%d"), on=new["on"].map(str), x=new["x"].map(repr))
    np.testing.assert_allclose(fitted.predict(texts), expected)
    polars = TableRegressor(**FAST).fit(pl.from_pandas(frame()), target="y")
    np.testing.assert_array_equal(polars.predict(pl.from_pandas(new)), expected)


def test_targets_may_stand_apart(fitted):
    X, y = frame().drop(columns="y"), frame()["y"]
    for given in (y, y.to_numpy(), y.tolist()):
        apart = TableRegressor(**FAST).fit(X, given)
        np.testing.assert_array_equal(apart.predict(X), fitted.predict(frame()))
    two = TableRegressor(**FAST).fit(X, pd.DataFrame({"u": y, "v": -y}))
    assert two.schema_.targets == ("u", "v")
    assert two.predict(X).shape == (60, 2)


def test_a_model_of_the_command_line_takes_frames_and_the_other_way(fitted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = frame()
    data.to_csv("t.csv", index=False)
    words = ["--preset", "evidence", "--hidden", "6", "--max-epochs", "10"]
    run = lambda *words: CliRunner().invoke(app, list(words))
    done = run("fit", "t.csv", "-t", "y", *words, "-m", "by_command")
    assert done.exit_code == 0, done.output
    loaded = lastlayer.load("by_command")
    assert isinstance(loaded, TableRegressor)
    np.testing.assert_allclose(loaded.predict(data), fitted.predict(data), rtol=1e-9)
    fitted.save("in_python")
    assert run("predict", "in_python", "t.csv", "--out", "out.csv").exit_code == 0
    np.testing.assert_allclose(pd.read_csv("out.csv")["y_mean"], fitted.predict(data), rtol=1e-9)
    again = lastlayer.load("in_python")
    assert again.schema_ == fitted.schema_
    np.testing.assert_array_equal(again.predict(data), fitted.predict(data))


def test_everything_that_a_regressor_can_do_takes_frames(fitted):
    new = frame().iloc[NEW]
    X = fitted.schema_.encode(as_table(new)).X
    np.testing.assert_array_equal(fitted.predictive(new).std, fitted.predictive(X).std)
    np.testing.assert_array_equal(fitted.extrapolation(new).affine_cost, fitted.extrapolation(X).affine_cost)
    assert fitted.joint(new).cov().shape == (20, 20)
    assert fitted.sample_y(new, 3).shape == (20, 3)
    model = TableRegressor(**FAST).fit(frame(), target="y").conformalize(new, new["y"])
    assert np.isfinite(model.predictive(new).interval(0.5, method="conformal")[0]).all()


def test_scores_are_of_the_frame_and_targets_may_have_other_names_later(fitted):
    new = frame().iloc[NEW]
    scores = fitted.evaluate(new)
    assert scores.targets[0].target == "y"
    assert scores.lpd == pytest.approx(fitted.predictive(new).log_prob(new["y"].to_numpy()).mean())
    assert fitted.evaluate(new.drop(columns="y"), new["y"]) == scores
    renamed = new.rename(columns={"y": "measured"})
    assert fitted.evaluate(renamed, target="measured") == scores
    one, other = (TableRegressor(**FAST).fit(frame().iloc[:40], target="y") for _ in range(2))
    means = [one.update(new).predict(new), other.update(renamed, target="measured").predict(new)]
    np.testing.assert_array_equal(*means)
    refused("--target gives 2", fitted.evaluate, renamed, target=["measured", "x"])


def test_a_schema_of_another_model_is_used_as_it_is(fitted):
    few = frame().iloc[:30]
    assert TableRegressor(**FAST).fit(few, target="y").schema_ != fitted.schema_
    model = TableRegressor(**FAST).fit(few, schema=fitted.schema_)
    assert model.schema_ is fitted.schema_
    assert model.card_["rows"] == 30


def test_rows_too_far_out_for_finite_predictions_are_refused(fitted):
    refused(r"farther than 1e\+50 standard deviations", fitted.predict, frame().assign(x=1e80))


def test_scikit_learn_can_clone_and_cross_validate():
    X, y = frame().drop(columns="y"), frame()["y"]
    model = TableRegressor(drop=["id"], impute="median", **FAST)
    same = clone(model)
    assert same.get_params() == model.get_params()
    assert same.get_params().keys() - BLLRegressor().get_params().keys() == {
        "drop", "keep", "text", "impute", "decimal", "date_order", "unknown",
    }  # fmt: skip
    assert "hidden=(6,)" in repr(model)
    assert "dtype" not in repr(model)
    assert np.isfinite(cross_val_score(model.set_params(unknown="warn"), X, y, cv=2)).all()
    assert np.isfinite(cross_val_score(model, pl.from_pandas(X), y.to_numpy(), cv=2)).all()


def test_missing_values_are_filled_only_on_request():
    data = frame()
    data.loc[3, "x"], data.loc[4, "kind"], data.loc[5, "when"] = np.nan, None, pd.NaT
    refused(r'3 problems:(.|\n)*impute="median"', TableRegressor(**FAST).fit, data, target="y")
    model = TableRegressor(impute="median", **FAST).fit(data, target="y")
    assert np.isfinite(model.predict(data)).all()
    nulls = pl.from_pandas(data)
    np.testing.assert_array_equal(model.predict(nulls), model.predict(data))


def test_rows_that_belong_together_and_rows_for_validation(fitted, monkeypatch):
    seen = {}

    def fit(self, X, y, **given):
        seen.update(given, calibration=self.calibration, d=X.shape[1])
        raise InputError("this is enough")

    monkeypatch.setattr(BLLRegressor, "fit", fit)
    data = frame().assign(run=["p", "q", "r"] * 20)
    refused("enough", TableRegressor().fit, data, target="y", groups="run", validation_data=(data.iloc[:7], None))
    assert seen["groups"].tolist() == ["p", "q", "r"] * 20
    assert seen["d"] == fitted.n_features_in_  # groups are no input
    assert seen["calibration"].get_n_splits(groups=seen["groups"]) == 3
    X, y = seen["validation_data"]
    assert X.shape == (7, seen["d"])
    np.testing.assert_array_equal(y, data["y"].iloc[:7])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f,), r'fit\(frame, target="y"\)'),
        (lambda f: (f.to_numpy(), f["y"]), "it is a ndarray"),
        (lambda f: (f, f["y"]), "X and y both have a column 'y'"),
        (lambda f: (f.drop(columns="y"), f["y"][:9]), "X has 60 rows and y has 9"),
        (lambda f: f.rename(columns={"x": 3}), "column name 3 is not a text"),
        (lambda f: f.assign(x=[[1]] * 60), "'x' holds a list"),
        (lambda f: f.assign(x=pd.to_timedelta(f["x"], unit="D")), "'x' holds a Timedelta"),
        (lambda f: f.iloc[:0], "no rows"),
        ({"unknown": "x"}, "unknown='x'"),
        ({"impute": "mean"}, "impute='mean'"),
        ({"keep": ["z"]}, "'z' is not in the table"),
    ],
)
def test_what_is_wrong_is_said(change, words, as_a_user):
    options, given = (change, frame()) if isinstance(change, dict) else ({}, change(frame()))
    given, target = (given, {}) if isinstance(given, tuple) else ((given,), {"target": "y"})
    refused(words, TableRegressor(**options).fit, *given, **target)
    refused("BLLRegressor.fit_source", TableRegressor().fit_source, None)


def test_strange_texts_follow_the_rule(fitted):
    new = frame().iloc[:2].astype({"kind": object}).assign(kind="d")
    refused("the text 'd' in row 1", fitted.predict, new)
    assert np.isfinite(clone(fitted).set_params(unknown="warn").fit(frame(), target="y").predict(new)).all()
