"""Data as it comes: numbers with signs and units, dates, labels of rows, packed files and spreadsheets."""

import gzip
import json
from datetime import datetime

import numpy as np
import openpyxl
import pyarrow as pa
import pytest
from helpers import refused, table
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from lastlayer.tables import Schema, Table, TableFile
from lastlayer.tables.cells import NumberFormat, calendar, dates, days
from lastlayer.tables.columns import DateColumn, NumberColumn, TextColumn


def learned(cells: list, **words) -> Schema:
    return Schema.infer(table(x=cells, y=list(range(len(cells)))), ["y"], **words)


@pytest.mark.parametrize(
    ("cells", "values", "format"),
    [
        (["1.5", "-2"], [1.5, -2], NumberFormat()),
        (["1,5", "-,25"], [1.5, -0.25], NumberFormat(",")),
        (["1,234.5", "12"], [1234.5, 12], NumberFormat(".", True)),
        (["1.234,5", "12"], [1234.5, 12], NumberFormat(",", True)),
        (["1,234", "5,678"], [1234, 5678], NumberFormat(".", True)),  # both readings are possible: a decimal point
        (["1 234,5", "1\u202f000"], [1234.5, 1000], NumberFormat(",")),
        (["1'234.5", "12"], [1234.5, 12], NumberFormat()),
        (["70.6 kg", "71 kg"], [70.6, 71], NumberFormat(unit="kg")),
        (["3 m3/h", "4m3/h"], [3, 4], NumberFormat(unit="m3/h")),
        (["12%", "3.5 %"], [12, 3.5], NumberFormat(unit="%")),
        (["$1,200.50", "-$3"], [1200.5, -3], NumberFormat(".", True, "$")),
        (["1,5 €", "20 €"], [1.5, 20], NumberFormat(",", unit="€")),
        (["\u22125 °C", "4 °C"], [-5, 4], NumberFormat(unit="°C")),
        (["1e3", "2.5E-1"], [1000, 0.25], NumberFormat()),
    ],
)
def test_numbers_are_read_as_people_write_them(cells, values, format):
    schema = learned(cells)
    assert schema.columns == (
        NumberColumn("x", float(min(values)), float(max(values)), float(np.median(values)), format),
    )
    np.testing.assert_allclose(schema.encode(table(x=cells)).X[:, 0], values)
    assert Schema.from_json(json.loads(json.dumps(schema.as_json()))) == schema
    assert len(schema.notes) == (format.decimal == ",") + (format.thousands or bool(format.unit))


@given(st.floats(-1e9, 1e9), st.sampled_from([".", ","]))
def test_grouped_numbers_come_back(value, decimal):
    text = f"{value:,.4f}".translate(str.maketrans(".,", ",.")) if decimal == "," else f"{value:,.4f}"
    assert NumberFormat(decimal, thousands=True).split(text) == (float(f"{value:.4f}"), "")


def test_a_column_that_says_nothing_is_read_as_the_others_are():
    t = table(a=["1,5", "2,5"], b=["1.234", "5.678"], y=["1", "2"])
    alone = table(b=["1,234", "5,678"], y=["1", "2"])
    by_semicolon = Table(alone.columns, separator=";")
    for learned_from, encoded, words, last in (
        (t, t, {}, [1234, 5678]),
        (alone, alone, {}, [1234, 5678]),
        (by_semicolon, alone, {}, [1.234, 5.678]),
        (t, t, {"decimal": ".", "text": ["a"]}, [1.234, 5.678]),
    ):
        schema = Schema.infer(learned_from, ["y"], **words)
        np.testing.assert_allclose(schema.encode(encoded).X[:, -1], last)
    schema = Schema.infer(t, ["y"])
    np.testing.assert_allclose(schema.encode(t).X[:, 0], [1.5, 2.5])
    assert schema.decimal == ","


def test_targets_are_read_so_too():
    t = table(a=["1", "2"], y=["1,5 kg", "2,5 kg"])
    schema = Schema.infer(t, ["y"])
    np.testing.assert_allclose(schema.targets_of(t), [[1.5], [2.5]])
    assert schema.notes == ["numbers have a decimal comma", "target 'y' is read as numbers in kg"]


@pytest.mark.parametrize(
    ("cells", "new", "words"),
    [
        (["70 kg", "80 kg"], "900 g", "in kg, not in g; convert"),
        (["70", "80"], "900 g", "this column had no unit in training.*'g'"),
        (["7%", "8%"], "0.07", "had the unit %"),
        (["1,5", "2,5"], "1.75", "a decimal comma, no thousands separators"),
        (["1.5", "2.5"], "1,75", "a decimal point, no thousands separators.*--decimal ','"),
        (["1.5", "2.5"], "much", "fix it"),
        (["2024-01-01", "2024-02-01"], "soon", "write it as.*2024-12-31"),
    ],
)
def test_new_cells_are_read_as_the_training_table_was(cells, new, words):
    schema = learned(cells)
    refused(rf"row 2 has '{new}'.*{words}", schema.encode, table(x=[cells[0], new]))


def test_a_number_without_its_unit_is_in_it_and_another_decimal_sign_can_be_said():
    schema = learned(["70 kg", "80", "90 kg"])
    np.testing.assert_allclose(schema.encode(table(x=["75", 76.0, "77 kg"])).X[:, 0], [75, 76, 77])
    new = Table({"x": np.array(["1.75"], dtype=object)}, decimal=".")
    np.testing.assert_allclose(learned(["1,5", "2,5"]).encode(new).X, [[1.75]])


def test_codes_and_words_stay_texts():
    codes = ["1a", "1b", "2a", "1a", "1b", "2a"]
    assert learned(codes).columns == (TextColumn("x", ("1a", "1b", "2a"), "1a"),)
    assert learned(["true", "false"] * 3).columns[0].kind == "text"


def test_all_problems_are_said_at_once():
    t = table(a=["1", "2", "x", "4"], b=["", "2", "3", "4"], d=["2024-02-30", "2024-02-01"] * 2, y=["1", "2", "3", "z"])
    words = "'a' contains numbers except in 1", "'b' has 1 missing", "'d' contains dates, but 2", "'y' must be a number"
    refused("^the table has 4 problems:\n  - column " + r"(.|\n)*".join(words), Schema.infer, t, ["y"])
    schema = learned(["1", "2"])
    both = Schema((*schema.columns, NumberColumn("z", 0.0, 1.0, 0.0)), ("y",), impute=False)
    refused(r"2 problems:(.|\n)*'x' must be a number(.|\n)*needs column 'z'", both.encode, table(x=["a"]))


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ("ymd", "2024-03-05 17:30"),
        ("ymd", "2024/3/5T17:30:00Z"),
        ("ymd", "2024-03-05 17:30:00.000+01:00"),
        ("dmy", "05.03.2024 17:30"),
        ("dmy", "5/3/24 5:30 pm"),
        ("mdy", "03/05/2024 05:30 PM"),
    ],
)
def test_dates_are_read_in_their_order(order, text):
    found, wrong = dates(np.array([text, "", "NA"], dtype=object), order)
    assert str(found[0]) == "2024-03-05T17:30:00.000000"
    assert np.isnat(found[1:]).all()
    assert not wrong.any()


def test_the_order_of_dates_is_what_all_of_them_allow():
    for first, second, words, order in (
        ("01/02/2024", "13/02/2024", {}, "dmy"),
        ("01/02/2024", "02/13/2024", {}, "mdy"),
        ("01.02.2024", "03.04.2024", {}, "dmy"),
        ("01/02/2024", "03/04/2024", {"date_order": "mdy"}, "mdy"),
    ):
        assert learned([first, second], **words).columns[0].order == order
    refused("--date-order dmy or mdy", learned, ["01/02/2024", "03/04/2024"])


@pytest.mark.parametrize(
    ("cells", "parts"),
    [
        (np.datetime64("2024-01-01T00:00") + np.arange(20) * np.timedelta64(1, "h"), ("days",)),
        (np.datetime64("2024-01-01T00:00") + np.arange(50) * np.timedelta64(1, "h"), ("days", "hour")),
        (np.datetime64("2024-01-01") + np.arange(13), ("days",)),
        (np.datetime64("2024-01-01") + np.arange(30), ("days", "weekday")),
        (np.datetime64("2020-01-01") + 7 * np.arange(110), ("days", "season")),
        (["08:00", "12:30", "23:59"], ("hour",)),
    ],
)
def test_calendar_parts_are_inputs_where_two_periods_are_seen(cells, parts):
    (column,) = learned(list(map(str, cells))).columns
    assert isinstance(column, DateColumn)
    assert column.parts == parts
    assert len(column.features) == sum(1 if part == "days" else 2 for part in parts)


def test_calendar_parts_are_periodic_and_tell_days_apart():
    at = lambda *times: days(np.array(times, dtype="datetime64[us]"))
    X = calendar(at("2024-01-01T12:00", "2024-01-02T12:00", "2024-01-08T12:00"), ["days", "hour", "weekday"])
    np.testing.assert_allclose(X[:, 0] - X[0, 0], [0, 1, 7])
    np.testing.assert_allclose(X[:, 1:3], [[0, -1]] * 3, atol=1e-12)
    np.testing.assert_allclose(X[0, 3:], X[2, 3:])  # both are Mondays
    np.testing.assert_allclose(X[1, 3:] @ X[0, 3:], np.cos(2 * np.pi / 7))
    evening = calendar(at("2024-01-01T20:00"), ["weekday"])
    np.testing.assert_array_equal(evening[0], X[0, 3:])  # a day is a day until midnight
    season = calendar(at("2023-01-01", "2024-01-01", "2024-07-02"), ["season"])
    np.testing.assert_allclose(season, [[0, 1], [0, 1], [0, -1]], atol=1e-9)


def test_dates_out_of_range_are_seen_and_taken_in():
    schema = learned(["2024-01-01", "2024-01-02", "2024-01-05"])
    new = table(x=["2024-01-05", "2024-01-06", "2023-12-31"])
    assert schema.encode(new).outside[:, 0].tolist() == [False, True, True]
    wider = schema.widened(new)
    assert not wider.encode(new).outside.any()
    assert str(wider.columns[0]) == "2023-12-31 to 2024-01-06"
    assert Schema.from_json(json.loads(json.dumps(wider.as_json()))) == wider


def test_missing_dates_are_filled_on_request():
    cells = ["2024-01-01", "", "2024-01-03", "2024-01-09"]
    refused("'x' has 1 missing values", learned, cells)
    X = learned(cells, impute=True).encode(table(x=cells)).X
    assert X[1, 0] == X[2, 0]


@pytest.mark.parametrize("name", ["id", "ID", "index", "patient_id", "RowId", "Unnamed: 0", "nr"])
def test_columns_that_count_the_rows_are_left_out(name):
    counting = list(range(5, 25))
    t = table(**{name: counting, "x": [i % 7 for i in counting], "y": counting})
    schema = Schema.infer(t, ["y"])
    assert [column.name for column in schema.columns] == ["x"]
    assert schema.notes == [f"column {name!r} is excluded: it counts the rows; use --keep if it matters"]
    assert len(Schema.infer(t, ["y"], keep=[name]).columns) == 2


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("day", list(range(20))),  # counts, but is not called so
        ("id", [*range(19), 25]),  # is called so, but does not count
        ("id", [*range(19), 3]),
        ("humid", list(range(20))),
        ("id", [f"p{min(i, 18)}" if i != 5 else "p6" for i in range(20)][:20]),
    ],
)
def test_other_columns_stay(name, cells):
    t = table(**{name: cells, "x": [i % 7 for i in range(20)], "y": list(range(20))})
    if isinstance(cells[0], str):
        refused("18 different texts", Schema.infer, t, ["y"])
    else:
        assert not Schema.infer(t, ["y"]).dropped


def test_texts_that_all_differ_and_an_index_without_a_name_are_left_out(tmp_path):
    t = table(name=[f"p{i}" for i in range(20)], x=list(range(20)), y=list(range(20)))
    assert Schema.infer(t, ["y"]).dropped == {"name": "every row has a different text"}
    (tmp_path / "t.csv").write_text(",x,y\n" + "".join(f"{i},{i % 7},{i % 5}\n" for i in range(20)))
    found = TableFile(tmp_path / "t.csv").read()
    assert list(found.columns) == ["index", "x", "y"]
    assert list(Schema.infer(found, ["y"]).dropped) == ["index"]


TEXT = "größe;datum;y\n1,5;01.02.2024;1\n2,5;03.04.2024;2\n"


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-8-sig"])
def test_encodings_are_read(tmp_path, encoding):
    (tmp_path / "t.csv").write_bytes(TEXT.encode(encoding))
    found = TableFile(tmp_path / "t.csv", "cp1252" if encoding == "cp1252" else None).read()
    expected = table(größe=["1,5", "2,5"], datum=["01.02.2024", "03.04.2024"], y=["1", "2"])
    assert {n: c.tolist() for n, c in found.columns.items()} == {n: c.tolist() for n, c in expected.columns.items()}


def test_packed_files_are_read(tmp_path):
    for name, content in {"t.csv.gz": "a,y\n" + "1,2\n" * 30, "t.jsonl.gz": '{"a": 1, "y": 2}\n' * 30}.items():
        (tmp_path / name).write_bytes(gzip.compress(content.encode()))
        assert [len(part) for part in TableFile(tmp_path / name).chunks(20)] == [20, 10]
    packed = TableFile(tmp_path / "t.csv.gz")
    assert (packed.stem, packed.suffix) == ("t", ".csv")
    (tmp_path / "half.csv.gz").write_bytes((tmp_path / "t.csv.gz").read_bytes()[:-12])
    refused("not a complete gzip file", TableFile(tmp_path / "half.csv.gz").read)


def test_spreadsheets_are_read_as_their_csv_would_be(tmp_path):
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.append(["when", "share", "kind", "y", None])
    sheet.append([datetime(2024, 1, 1), 0.125, "a", 1])
    for row in ([datetime(2024, 2, 1), 0.5, "b", 2], [None] * 4, [None, 0.75, "a", 3.5]):
        sheet.append(row)
    for cell in sheet["B"][1:]:
        cell.number_format = "0.0%"
    book.save(tmp_path / "t.xlsx")
    found = TableFile(tmp_path / "t.xlsx").read()
    assert (list(found.columns), len(found)) == (["when", "share", "kind", "y"], 3)
    assert found.columns["share"].tolist() == ["12.5%", "50%", "75%"]
    schema = Schema.infer(found, ["y"], impute=True)
    assert [column.kind for column in schema.columns] == ["date", "number", "text"]
    np.testing.assert_allclose(schema.encode(found).X[:, 3], [12.5, 50, 75])


def test_dates_of_parquet_are_dates(tmp_path):
    stamps = np.array(["2024-01-01T06:00", "2024-01-02T06:00"], dtype="datetime64[s]")
    zoned = pa.array(stamps).cast(pa.timestamp("s", tz="Europe/Berlin"))
    columns = {"naive": stamps, "day": pa.array(stamps).cast(pa.date32()), "zoned": zoned, "y": [1.0, 2.0]}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    found = TableFile(tmp_path / "t.parquet").read().columns
    assert str(found["naive"][0]) == "2024-01-01T06:00:00.000000"
    assert str(found["day"][1]) == "2024-01-02T00:00:00.000000"
    assert str(found["zoned"][0]) == "2024-01-01T07:00:00.000000"  # by the clock in Berlin


def test_rows_of_the_wrong_length_keep_the_numbers_of_the_others(tmp_path):
    (tmp_path / "t.csv").write_text("a,y\n1,1\n2\n3,3\n4,4,4\nx,5\n6,6\n7,7\n")
    problems: list[str] = []
    found = TableFile(tmp_path / "t.csv").read(problems=problems)
    assert "2 rows" in problems[0]
    assert "row 2 has 1, not 2; row 4 has 3, not 2" in problems[0]
    assert [found.row(i) for i in range(len(found))] == [1, 3, 5, 6, 7]
    refused("row 5, 'x'", Schema.infer, found, ["y"])
    refused(r"2 rows of .* wrong number of cells", TableFile(tmp_path / "t.csv").read)
