"""Tables of users: what is read, how it is encoded, and what is written."""

import copy
import csv
import functools
import itertools
import json
import operator
import resource
import runpy
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from fuzz_files import places
from helpers import refused, table
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

import lastlayer
from lastlayer._internal import files
from lastlayer._internal.files import ModelFileError
from lastlayer.errors import InputError
from lastlayer.tables import Schema, TableFile, TableRegressor, forecast, load_table, read, score
from lastlayer.tables.schema import NumberColumn, TextColumn
from lastlayer.tables.writing import guarded, write_table

ROOT = Path(__file__).parents[1]
PUMP, NEW = ROOT / "examples" / "pump.csv", ROOT / "examples" / "pump_new.csv"
TARGETS = ["head_m", "power_kw"]


assert_allclose = partial(np.testing.assert_allclose, rtol=1e-12)


@pytest.fixture(scope="module")
def fitted() -> TableRegressor:
    model = TableRegressor(preset="evidence", hidden=(8,), max_epochs=20, random_state=0)
    return model.fit(read(PUMP), target=TARGETS)


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_csv_with_any_separator_is_read_as_it_stands(tmp_path, separator):
    rows = [["a", "b, c" if separator != "," else "bc"], ["1.50", 'say "x"\nand y'], ["-2", "é"]]
    with (tmp_path / "t.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=separator).writerows(rows)
    found = {name: cells.tolist() for name, cells in read(tmp_path / "t.csv").columns.items()}
    assert found == {"a": ["1.50", "-2"], rows[0][1]: ['say "x"\nand y', "é"]}


def test_pieces_make_up_the_whole_and_know_their_place(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "".join(f"{i},x{i}\n" for i in range(25)) + "\n")
    parts = list(TableFile(path).chunks(10))
    assert [len(part) for part in parts] == [10, 10, 5]
    assert [part.row(0) for part in parts] == [1, 11, 21]
    assert np.concatenate([part.columns["b"] for part in parts]).tolist() == read(path).columns["b"].tolist()


def test_the_three_formats_say_the_same(tmp_path):
    csv_path, lines, arrow = (tmp_path / f"t.{end}" for end in ("csv", "jsonl", "parquet"))
    csv_path.write_text("n,k,t,b\n1.5,1,x,True\n,2,,False\n")
    lines.write_text('{"n": 1.5, "k": 1, "t": "x", "b": true}\n{"k": 2, "n": null, "t": "", "b": false}\n')
    columns = {"n": [1.5, None], "k": [1, 2], "t": ["x", None], "b": [True, False]}
    parquet.write_table(pa.table(columns), arrow)
    numbers = (NumberColumn(name, 0.0, 2.0, 9.0) for name in "nk")
    texts = TextColumn("t", ("x", "y"), "y"), TextColumn("b", ("False", "True"), "True")
    schema = Schema((*numbers, *texts), ("k",), impute=True)
    expected = [[1.5, 1, 1, 0, 0, 1], [9, 2, 0, 1, 1, 0]]
    for path in (csv_path, lines, arrow):
        np.testing.assert_array_equal(schema.encode(read(path)).X, expected, err_msg=str(path))


def test_columns_are_what_they_look_like():
    texts = {"code": ["007", "008", "007"], "fluid": ["oil", "water", "oil"], "no": ["", "", ""]}
    t = table(x=["1", " 2e1 ", "-3"], **texts, y=["1", "2", "4"])
    schema = Schema.infer(t, ["y"], text=["code"], drop=["no"])
    assert schema.columns == (
        NumberColumn("x", -3.0, 20.0, 1.0),
        TextColumn("code", ("007", "008"), "007"),
        TextColumn("fluid", ("oil", "water"), "oil"),
    )
    assert schema.features == ["x", "code=007", "code=008", "fluid=oil", "fluid=water"]
    np.testing.assert_array_equal(schema.encode(t).X, [[1, 1, 0, 1, 0], [20, 0, 1, 0, 1], [-3, 1, 0, 1, 0]])
    np.testing.assert_array_equal(schema.targets_of(t), [[1], [2], [4]])
    assert Schema.from_json(json.loads(json.dumps(schema.as_json()))) == schema


def test_tricks_in_cells_are_data():
    words = ["../../etc/passwd", "=1+1", "$(reboot)", "1_000", "0x10", "${x}"]
    t = table(word=[*words, *words], y=list(range(12)))
    assert Schema.infer(t, ["y"]).columns == (TextColumn("word", tuple(sorted(words)), words[0]),)


def test_missing_cells_are_filled_only_on_request():
    t = table(x=["1", "NA", "3", "5"], fluid=["oil", "oil", "", "NA"], y=["1", "2", "3", "4"])
    refused(r"'x' has 1 missing values \(first: row 2\).*--impute median", Schema.infer, t, ["y"])
    schema = Schema.infer(t, ["y"], impute=True)
    # "NA" is missing among numbers, and a word like any other among words
    np.testing.assert_array_equal(schema.encode(t).X, [[1, 0, 1], [3, 0, 1], [3, 0, 1], [5, 1, 0]])


def test_unknown_texts_follow_an_explicit_rule():
    schema = Schema((TextColumn("fluid", ("oil", "water"), "oil"),), ("y",), impute=False)
    t = table(fluid=["oil", "beer", "beer"])
    refused(r"'beer' in row 2, which no training row had \(oil, water\)", schema.encode, t)
    encoded = schema.encode(t, unknown="warn")
    np.testing.assert_array_equal(encoded.X, [[1, 0], [0, 0], [0, 0]])
    assert encoded.unknown == {"fluid": {"beer": 2}}
    np.testing.assert_array_equal(encoded.outside[:, 0], [False, True, True])


def test_the_example_is_what_its_script_makes(tmp_path):
    runpy.run_path(str(ROOT / "examples" / "make_pump.py"))["main"](tmp_path)
    for path in (PUMP, NEW):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_a_table_model_says_what_its_regressor_says_of_the_encoded_rows(fitted, tmp_path):
    t = read(NEW)
    X = np.column_stack(
        [t.columns[n].astype(float) for n in ("flow_m3h", "speed_rpm", "temperature_c")]
        + [(t.columns["fluid"] == fluid).astype(float) for fluid in ("glycol", "oil", "water")]
    )
    fitted.save(tmp_path / "m")
    plain = lastlayer.load(tmp_path / "m")  # the file is an ordinary model file too
    p, where = plain.predictive(X), plain.extrapolation(X)
    cells = forecast(load_table(tmp_path / "m"), t, level=0.9).cells
    lower, upper = p.interval(0.9)
    for i, name in enumerate(TARGETS):
        for word, values in {"mean": p.mean, "std": p.std, "lower": lower, "upper": upper}.items():
            np.testing.assert_array_equal(cells[f"{name}_{word}"], values[:, i])
    np.testing.assert_array_equal(cells["affine_cost"], where.affine_cost)
    np.testing.assert_array_equal(cells["extrapolation"], where.quantile)
    known, new = (table.columns["temperature_c"].astype(float) for table in (read(PUMP), t))
    outside = (new < known.min()) | (new > known.max())
    assert outside.any()
    assert [("temperature_c" in text) for text in cells["outside_range"]] == outside.tolist()


def test_pieces_are_predicted_as_the_whole(fitted):
    whole = forecast(fitted, read(NEW)).cells
    parts = [forecast(fitted, part).cells for part in TableFile(NEW).chunks(33)]
    for name, values in whole.items():
        compare = np.testing.assert_array_equal if values.dtype == object else assert_allclose
        compare(np.concatenate([part[name] for part in parts]), values)


def test_an_update_takes_rows_in_and_widens_the_ranges(tmp_path, fitted):
    fitted.save(tmp_path / "m")
    model, new = load_table(tmp_path / "m"), read(NEW)
    before = forecast(model, new)
    after = model.update(new)
    assert after is model
    again = forecast(after, new)
    assert before.outside.total() > 0 == again.outside.total()
    assert after.card_["rows"] == 560
    assert (again.cells["head_m_std"] < before.cells["head_m_std"]).all()
    y = after.schema_.targets_of(new)
    error = lambda cells: np.abs(cells["head_m_mean"] - y[:, 0]).mean()
    assert error(again.cells) < error(before.cells)


def test_scores_are_those_of_the_metrics(fitted):
    t = read(NEW)
    y, p = fitted.schema_.targets_of(t), fitted.predictive(t)
    scores = score(p, y, TARGETS)
    residual = y - p.mean
    assert [s.rmse for s in scores.targets] == pytest.approx(np.sqrt((residual**2).mean(0)))
    assert [s.r2 for s in scores.targets] == pytest.approx(1 - (residual**2).sum(0) / ((y - y.mean(0)) ** 2).sum(0))
    lower, upper = p.interval(0.95)
    assert scores.targets[1].width_95 == pytest.approx((upper - lower)[:, 1].mean())
    assert scores.lpd == pytest.approx(p.log_prob(y).mean())


def written(path: Path, *parts: dict) -> None:
    array = lambda cells: np.array(cells, dtype=object) if isinstance(cells, list) else cells
    write_table(path, [{name: array(cells) for name, cells in part.items()} for part in parts])


@pytest.mark.parametrize("end", ["csv", "jsonl", "parquet"])
def test_what_is_written_is_read_again(tmp_path, end):
    parts = [{"t": ['a, "b"\nc', "é"], "k": [1, 2], "x": np.array([0.1, 1e300])}]
    written(tmp_path / f"t.{end}", *parts, {"t": ["", "d"], "k": [3, 4], "x": np.ones(2)})
    found = read(tmp_path / f"t.{end}").columns
    assert [str(cell) for cell in found["t"]] == ['a, "b"\nc', "é", "", "d"]
    assert [int(cell) for cell in found["k"]] == [1, 2, 3, 4]
    np.testing.assert_array_equal(found["x"].astype(float), [0.1, 1e300, 1, 1])


@pytest.mark.parametrize(
    "cell", ["=1+1", "+A1", "-A1", "@SUM(A1)", "\t=1", "\r=1", "＝1", "-1+cmd|' /C calc'!A0", "+", "=1,2"]
)
def test_formulas_are_disarmed_for_spreadsheets(tmp_path, cell):
    written(tmp_path / "t.csv", {cell: [cell, "plain"]})
    shown = "'" + cell.replace("\r", "\n")  # a bare carriage return would begin a new row
    with (tmp_path / "t.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [[shown], [shown], ["plain"]]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_never_touched(value):
    assert guarded(repr(value)) == repr(value)
    assert guarded(f"{value:+.3e}") == f"{value:+.3e}"


@given(st.text())
def test_what_a_spreadsheet_might_run_begins_with_an_apostrophe(cell):
    shown = guarded(cell)
    kept = cell.replace("\r\n", "\n").replace("\r", "\n")
    assert shown in (kept, f"'{kept}")
    if shown == kept and cell[:1] in ("=", "@", "+", "-"):
        float(cell.replace(",", ".", 1))


@pytest.fixture
def little_space():
    """No file may grow beyond 10,000 bytes, as on a disk that is nearly full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("end", ["csv", "jsonl", "parquet"])
def test_a_full_disk_leaves_the_old_file(tmp_path, little_space, end):
    path = tmp_path / f"t.{end}"
    path.write_text("old")
    with pytest.raises(OSError, match="too large"):
        written(path, *[{"x": np.random.default_rng(i).normal(size=1000)} for i in range(5)])
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_rows_that_cannot_be_read_leave_the_old_file(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("old")

    def rows():
        yield {"x": np.ones(3)}
        raise InputError("line 17 is not CSV")

    refused("line 17", write_table, path, rows())
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_a_table_model_that_loads_can_predict(as_a_user, tmp_path, fitted):
    """Whatever a file says, with a digest that is right: it is refused, or it predicts."""
    path = tmp_path / "m"
    fitted.save(path)
    tensors, header = files.read(path)
    row = table(flow_m3h=[20], speed_rpm=[2000], temperature_c=[30], fluid=["oil"])
    odd = [torch.zeros(0), torch.full((3, 3), torch.nan), torch.ones(2, 2, 2), -torch.ones(6, dtype=torch.float64)]
    changed = [(tensors | {name: tensor}, header) for name in tensors for tensor in odd]
    for (*above, last), word in itertools.product(places({"table": header["table"]}), (None, [], "nan")):
        changed.append((tensors, copy.deepcopy(header)))
        functools.reduce(operator.getitem, above, changed[-1][1])[last] = word
    refused = 0
    for content in changed:
        files.write(path, *content)
        try:
            loaded = load_table(path, unknown="warn")
        except (ModelFileError, InputError):
            refused += 1
            continue
        if {column.name for column in loaded.schema_.columns} == set(row.columns):
            forecast(loaded, row)
    assert refused > len(changed) // 2
