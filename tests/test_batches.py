"""Predictions batch by batch, as engines ask for them: those of `predictive`, in order, by a model loaded once."""

import pickle

import numpy as np
import pandas as pd
import pytest
from helpers import refused, sine

from lastlayer import BLLRegressor
from lastlayer._internal.files import ModelFileError
from lastlayer.errors import InputError
from lastlayer.integrations.batches import BatchPredictor, load_once
from lastlayer.tables import Table, TableRegressor

FAST = {"preset": "evidence", "hidden": (8,), "max_epochs": 20, "random_state": 0}
NAMES = ["a", "b"]
OUTPUTS = [f"{y}_{word}" for y in ("y0", "y1") for word in ("mean", "std", "lower", "upper")] + ["affine_cost"]


@pytest.fixture(scope="module")
def model() -> BLLRegressor:
    X, y = sine(40, q=2, d=2)
    return BLLRegressor(**FAST).fit(pd.DataFrame(X, columns=NAMES), y)


@pytest.fixture
def predict(model, tmp_path) -> BatchPredictor:
    model.save(tmp_path / "m.lastlayer")
    return BatchPredictor(tmp_path / "m.lastlayer", level=0.9)


def batch(X: np.ndarray) -> dict[str, np.ndarray]:
    """The columns are not in the order of the model's inputs, and there are more than it needs."""
    ids = np.array([f"row {i}" for i in range(len(X))], dtype=object)
    return {"more": X[:, 0] * 2, "b": X[:, 1], "id": ids, "a": X[:, 0]}


def assert_says(found, model: BLLRegressor, X: np.ndarray, level: float = 0.9) -> None:
    """All numbers are those of `predictive`."""
    p = model.predictive(pd.DataFrame(X, columns=NAMES))
    lower, upper = p.interval(level)
    for i, name in enumerate(("y0", "y1")):
        for word, values in {"mean": p.mean, "std": p.std, "lower": lower, "upper": upper}.items():
            np.testing.assert_allclose(found[f"{name}_{word}"], values[:, i], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found["affine_cost"], p.affine_cost, rtol=1e-12)


def test_arrays_in_arrays_out_and_frames_in_frames_out(predict, model):
    X, _ = sine(30, q=2, d=2, seed=2)
    arrays = predict(batch(X))
    assert predict.input_columns == NAMES
    assert list(arrays) == [*batch(X), *OUTPUTS] == [*batch(X), *predict.output_columns]
    assert_says(arrays, model, X)
    assert arrays["id"][7] == "row 7"
    frame = pd.DataFrame(batch(X), index=np.arange(30) + 100).sample(frac=1, random_state=0)
    found = predict(frame)
    assert list(found) == [*frame, *OUTPUTS]
    assert found.index.equals(frame.index)
    assert found[list(frame)].equals(frame)
    assert_says(found, model, frame[NAMES].to_numpy())


def test_batches_of_any_size_are_the_whole(predict, model):
    X, _ = sine(25, q=2, d=2, seed=3)
    frame = pd.DataFrame(batch(X))
    parts = [predict(frame.iloc[start:stop]) for start, stop in ((0, 1), (1, 1), (1, 20), (20, 25))]
    assert parts[1].dtypes.drop("id").eq(float).all()
    assert_says(pd.concat(parts), model, X)


def test_numbers_of_any_kind_are_taken(predict, model):
    X = np.array([[1, 0], [2, 1], [-1, 1]])
    asked = {"id": ["x", "y", "z"], "a": X[:, 0].astype(np.int8), "b": X[:, 1].astype(bool)}
    assert_says(predict(asked), model, X.astype(float))
    assert_says(predict(pd.DataFrame(asked).convert_dtypes()), model, X.astype(float))


def test_what_travels_is_small_and_the_model_is_loaded_once(predict, model):
    load_once.cache_clear()
    sent = pickle.dumps(predict)
    assert len(sent) < 1000
    assert load_once.cache_info().misses == 0  # made, but nothing was asked of it
    X, _ = sine(6, q=2, d=2, seed=4)
    for _ in range(3):
        assert_says(pickle.loads(sent)(batch(X)), model, X)  # a task of the same worker process
    assert load_once.cache_info().misses == 1


def test_a_file_that_was_replaced_is_loaded_anew(predict):
    X, y = sine(6, q=2, d=2, seed=4)
    before = predict(batch(X))["y0_mean"]
    other = BLLRegressor(**FAST | {"hidden": (5,)}).fit(pd.DataFrame(X, columns=NAMES), y + 7)
    other.save(predict.path)
    assert_says(predict(batch(X)), other, X)
    assert not np.allclose(before, other.predictive(pd.DataFrame(X, columns=NAMES)).mean[:, 0])


def test_models_of_tables_and_of_frames_know_their_columns(tmp_path):
    X, y = sine(40, q=2, d=2)
    kind = np.where(X[:, 1] > 0, "up", "down").astype(object)
    table = Table({"flow": X[:, 0], "kind": kind, "head": y[:, 0]})
    fitted = TableRegressor(**FAST).fit(table, target="head")
    fitted.save(tmp_path / "table")
    predict = BatchPredictor(tmp_path / "table")
    found = predict({"kind": kind, "flow": X[:, 0]})
    p = fitted.predictive(table)
    np.testing.assert_allclose(found["head_mean"], p.mean, rtol=1e-12)
    np.testing.assert_allclose(found["head_upper"], p.interval(0.95)[1], rtol=1e-12)
    strange = pd.DataFrame({"kind": ["up", "new"], "flow": [0.0, 1.0]})
    refused("'kind' has the text 'new'", predict, strange)
    assert len(BatchPredictor(tmp_path / "table", unknown="warn")(strange)) == 2
    frame = pd.DataFrame(X, columns=NAMES)
    named = BLLRegressor(**FAST).fit(frame, y[:, 0])
    named.save(tmp_path / "frame")
    found = BatchPredictor(tmp_path / "frame")(frame[["b", "a"]])
    assert list(found)[:4] == ["b", "a", "y_mean", "y_std"]
    np.testing.assert_allclose(found["y_std"], named.predictive(frame).std, rtol=1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": None}, r"no columns \['a'\]; it has \['more', 'b', 'id'\]"),
        ({"a": np.array([0.0, np.nan, 1.0])}, r"'a' has 1 missing values \(first: row 2\): .* before predicting"),
        ({"a": pd.Series([1, None, 2], dtype="Int64")}, r"'a' has 1 missing values \(first: row 2\)"),
        ({"b": np.array(["1", "x", "2"])}, r"'b' must be a number, but row 2 has .*'x'"),
        ({"b": np.zeros((3, 2))}, r"'b' is float64 of shape \(3, 2\)"),
        ({"b": np.zeros(3, dtype="M8[s]")}, r"'b' must be a number"),
        ({"y0_std": np.zeros(3)}, "'y0_std', which is the name of a prediction"),
    ],
)
def test_what_is_wrong_with_a_batch_is_said(predict, change, words, as_a_user):
    asked = {name: values for name, values in (batch(sine(3, d=2)[0]) | change).items() if values is not None}
    refused(words, predict, asked)


def test_what_is_wrong_with_a_predictor_is_said(tmp_path):
    refused(r"level=95.0 must lie", BatchPredictor, "m", level=95.0)
    refused("nowhere is not a file", BatchPredictor(tmp_path / "nowhere"), {"a": np.zeros(1)}, error=ModelFileError)
    BLLRegressor(**FAST).fit(*sine(40, q=2, d=2)).save(tmp_path / "unnamed")
    with pytest.raises(InputError, match="does not store the names of its inputs: fit the model to a DataFrame"):
        BatchPredictor(tmp_path / "unnamed")({"a": np.zeros(1)})
