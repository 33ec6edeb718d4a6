"""The command line as its users meet it: the path from a table to a report, and everything that can be wrong."""

import errno
import json
import os
import pickle
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import Result
from pyarrow import parquet
from typer.testing import CliRunner

import lastlayer
from lastlayer.cli import app
from lastlayer.tables import TableRegressor, facts, forecast, load_table, read
from lastlayer.training.engine import Adam

pytestmark = pytest.mark.usefixtures("as_a_user")

ROOT = Path(__file__).parents[1]
PUMP, NEW = ROOT / "examples" / "pump.csv", ROOT / "examples" / "pump_new.csv"
TARGETS = ["--target", "head_m,power_kw"]
SMALL = ["--preset", "evidence", "--hidden", "6", "--max-epochs", "5"]


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def done(*words: object) -> Result:
    """The result of a command that succeeds."""
    result = run(*words)
    assert result.exit_code == 0, result.output
    return result


def refused(*words: object) -> str:
    """The message of a command that fails."""
    result = run(*words)
    assert result.exit_code == 1, result.output
    return said(result)


def answer(*words: object) -> dict[str, Any]:
    """The answer of a command as JSON."""
    return json.loads(done(*words, "--json").stdout)


def says(result: Result, *words: str) -> None:
    for each in words:
        assert each in said(result), said(result)


def said(result: Result) -> str:
    """Without the frames and line breaks of a terminal."""
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "pump.lastlayer"
    done("fit", PUMP, *TARGETS, *SMALL, "--model", path)
    return path


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_from_a_table_to_a_report(here):
    fit = done("fit", PUMP, *TARGETS, *SMALL)
    says(
        fit, "400 rows, 6 columns", "fluid text glycol, oil, water", "speed_rpm number 1,406 to 2,895", "head_m target"
    )
    done("predict", "pump.lastlayer", NEW)
    report = done("report", "pump.lastlayer", NEW, "--group", "fluid")
    assert said(report).startswith("The 90% intervals ")
    assert sorted(p.name for p in here.iterdir()) == ["pump.lastlayer", "pump.report.html", "pump_new.predicted.csv"]
    given, predicted = read(NEW).columns, read(Path("pump_new.predicted.csv")).columns
    for name, cells in given.items():
        assert predicted[name].tolist() == cells.tolist()
    for name, values in forecast(load_table("pump.lastlayer"), read(NEW)).cells.items():
        np.testing.assert_array_equal(predicted[name].astype(values.dtype), values)
    done("fit", PUMP, *TARGETS, *SMALL, "--model", "again")  # the same seed gives the same model
    one, other = (lastlayer.load(name) for name in ("pump.lastlayer", "again"))
    X = np.zeros((1, one.n_features_in_))
    np.testing.assert_array_equal(one.predict(X), other.predict(X))


def test_every_command_speaks_json(here, model):
    words = {"fit": [PUMP, *TARGETS, *SMALL], "update": [model, NEW, "--out", "updated"]}
    words |= {command: [model, NEW] for command in ("predict", "evaluate", "report")}
    words |= {command: [model] for command in ("explain", "export")}
    answers = {command: answer(command, *more) for command, more in words.items()}
    assert answers["fit"]["model"] == "pump.lastlayer"
    assert [row["target"] for row in answers["fit"]["targets"]] == ["head_m", "power_kw"]
    assert (answers["predict"]["rows"], answers["predict"]["outside_range"]["speed_rpm"]) == (160, 12)
    assert answers["evaluate"]["targets"] == answers["report"]["targets"]
    assert answers["update"]["rows"] == 560 == load_table("updated").card_["rows"]
    explained, plain = answers["explain"], {"decimal": ".", "thousands": False, "unit": ""}
    speed = {"kind": "number", "name": "speed_rpm", "low": 1406, "high": 2895, "fill": 2176, "format": plain}
    assert explained["inputs"][1] == speed
    assert explained["alpha"] == pytest.approx(lastlayer.load(model).alpha_)
    assert explained["features"]["count"] == 6 + 6
    assert explained["settings"] == json.loads(json.dumps(lastlayer.load(model).settings_.to_json()))
    failed = CliRunner().invoke(app, ["explain", "nothing", "--json"])
    assert failed.exit_code == 1
    assert "is not a file" in json.loads(failed.stdout)["error"]


FAST = ["--preset", "fast", "--hidden", "4", "--max-epochs", "5"]


@pytest.mark.usefixtures("small_process")
def test_fit_says_how_good_it_is_on_held_out_rows_and_what_matters(here):
    """In a table beside baselines; curves and LPD only on request; explain remembers what matters."""
    lines = PUMP.read_text().splitlines()
    Path("few.csv").write_text("\n".join(lines[:61]))
    fit = done("fit", "few.csv", *TARGETS, *FAST)
    assert "60 rows, each predicted by networks that were not trained on it" in said(fit)
    for method in ("lastlayer", "linear regression", "mean"):
        assert said(fit).count(f" {method} ") >= 2
    assert "head_m depends most on speed_rpm" in said(fit)
    assert "calibration: var" not in fit.output
    assert "LPD" not in fit.output
    verbose = answer("fit", "few.csv", *TARGETS, *FAST)
    scores = verbose["held_out"]
    assert (scores["rows"], scores["kept_back"], len(scores["methods"])) == (60, False, 6)
    first = scores["methods"][0]
    assert (first["target"], first["method"]) == ("head_m", "lastlayer")
    assert f"{first['r2']:.3f}" in fit.output
    assert verbose["calibration"]["lpd"]
    ranking = verbose["importance"]
    assert [one["input"] for one in ranking["inputs"]] == ["flow_m3h", "speed_rpm", "temperature_c", "fluid"]
    assert f"R2 {first['r2']:.3f}" in facts(load_table("few.lastlayer"))["held-out rows"]
    explained = done("explain", "few.lastlayer", "--importance", "i.png", "--dependence", "d.png")
    assert "60 held-out rows" in said(explained)
    assert all(Path(name).read_bytes().startswith(b"\x89PNG") for name in ("i.png", "d.png"))
    facts_of = answer("explain", "few.lastlayer")
    assert (facts_of["importance"], facts_of["held_out"]) == (ranking, scores)
    assert [one["name"] for one in facts_of["dependence"]] == ["flow_m3h", "speed_rpm", "temperature_c", "fluid"]
    assert facts_of["dependence"][3]["labels"] == ["glycol", "oil", "water"]
    given = run("explain", "few.lastlayer", "--data", NEW)
    assert "160 given rows" in said(given)


def test_fit_keeps_rows_back_on_request(here):
    fit = done("fit", PUMP, *TARGETS, *SMALL, "--holdout", "0.2", "--verbose")
    says(fit, "320 rows, 1 network,", "on 80 rows that were kept out of the fit", "held-out LPD", "80 held-out rows")
    assert load_table("pump.lastlayer").card_["rows"] == 320
    says(run("fit", PUMP, *TARGETS, *SMALL), "no held-out rows to score on: use --holdout 0.2")
    says(run("explain", "pump.lastlayer"), "give rows with --data")
    assert "with --data" in refused("explain", "pump.lastlayer", "--importance", "i.png")
    assert not Path("i.png").exists()


def test_explain_prints_what_every_auto_became(here, model):
    result = done("explain", model)
    settings = lastlayer.load(model).settings_
    lines = result.output.splitlines()
    first = lines.index("settings") + 1
    assert lines[first:] == str(settings).splitlines()
    for line in ("hidden: (6,)", "families: network 0.0", "n_members: 1", "plan: none", "max_epochs: 5"):
        assert line in lines[first:]
    assert not any(": auto" in line for line in lines[first:])


def test_fit_leaves_what_was_not_asked_for_to_the_library(here, monkeypatch):
    asked = []

    def remember(self, X, y, **data):
        asked.append(self.get_params(deep=False))
        raise lastlayer.errors.InputError("this is enough")

    monkeypatch.setattr(lastlayer.BLLRegressor, "fit", remember)
    run("fit", PUMP, *TARGETS)
    run("fit", PUMP, *TARGETS, "--hidden", "7", "--noise", "full", "--members", "2", "--max-epochs", "3")
    defaults = lastlayer.BLLRegressor().get_params(deep=False) | {"random_state": 0, "progress": True}
    assert asked[0] == defaults
    assert asked[1] == defaults | {"hidden": (7,), "noise": "full", "n_members": 2, "max_epochs": 3}


def test_a_model_becomes_what_the_suffix_says(here, model):
    onnx, _ = pytest.importorskip("onnx"), pytest.importorskip("casadi")
    for name in ("pump.onnx", "pump.c"):
        says(done("export", model, name), "fluid=oil")
    noted = {entry.key: entry.value for entry in onnx.load("pump.onnx").metadata_props}
    assert json.loads(noted["lastlayer"])["targets"] == ["head_m", "power_kw"]
    assert "int pump(" in Path("pump.c").read_text()
    assert "my-pump" in refused("export", model, "my-pump.c")  # no name of a function
    assert "give only one of them" in refused("export", model, "pump.onnx", "--out", "folder")


def test_evaluate_says_what_python_says(model):
    result = answer("evaluate", model, NEW)
    assert result == json.loads(json.dumps(asdict(load_table(model).evaluate(read(NEW))))) | {"notes": []}
    other = model.with_name("renamed.csv")
    other.write_text(NEW.read_text().replace("head_m", "h").replace("power_kw", "p"))
    assert answer("evaluate", model, other, "--target", "h,p")["lpd"] == result["lpd"]


def test_a_table_as_it_comes_from_a_spreadsheet(here):
    """Semicolons, decimal commas, units, dates and labels: read, said once, and written in the same way."""
    rng = np.random.default_rng(0)
    comma = lambda x: f"{x:.3f}".replace(".", ",")
    days = np.datetime64("2024-01-01") + np.arange(40)
    rows = [
        f"{i};{day.astype(object):%d.%m.%Y};{comma(x)} kg;{comma(-x)}\n"
        for i, (day, x) in enumerate(zip(days, rng.uniform(1, 9, 40), strict=True))
    ]
    Path("t.csv").write_text("nr;day;mass;y\n" + "".join(rows), encoding="cp1252")
    result = done("fit", "t.csv", "-t", "y", *SMALL)
    dates = "note: column 'day' is read as dates, day before month; inputs: days, day of the week"
    notes = [dates, "note: column 'mass' is read as numbers in kg", "note: numbers have a decimal comma"]
    notes += ["note: column 'nr' is excluded: it counts the rows", "day date 2024-01-01 to 2024-02-09", "nr excluded"]
    assert [said(result).count(words) for words in notes] == [1] * 6, said(result)
    done("predict", "t.lastlayer", "t.csv")
    lines = Path("t.predicted.csv").read_text().splitlines()
    head, first = (line.split(";") for line in lines[:2])
    assert head[:5] == ["nr", "day", "mass", "y", "y_mean"]
    assert first[:4] == rows[0].strip().split(";")
    expected = lastlayer.load("t.lastlayer").predict(read(Path("t.csv")))
    found = [float(line.split(";")[4].replace(",", ".")) for line in lines[1:]]
    np.testing.assert_array_equal(found, expected)
    Path("new.csv").write_text("day,mass\n2024-01-05,3.5\n")
    says(run("predict", "t.lastlayer", "new.csv"), "a decimal comma")
    done("predict", "t.lastlayer", "new.csv", "--decimal", ".", "--out", "new.tsv")
    assert Path("new.tsv").read_text().splitlines()[1].startswith("2024-01-05\t3.5\t-")
    done("update", "t.lastlayer", "t.csv")
    assert load_table("t.lastlayer").schema_.decimal == ","


def test_skewed_targets_are_fitted_by_their_logarithm(here):
    x = np.random.default_rng(0).normal(size=60)
    Path("t.csv").write_text("x,y\n" + "".join(f"{a:.4f},{np.exp(2 * a):.6f}\n" for a in x))
    result = done("fit", "t.csv", "-t", "y", *SMALL, "--likelihood", "auto")
    assert "their logarithm is modelled" in said(result)
    done("predict", "t.lastlayer", "t.csv")
    assert (read(Path("t.predicted.csv")).columns["y_lower"].astype(float) > 0).all()
    assert "noise std of the logarithm" in said(run("explain", "t.lastlayer"))
    done("evaluate", "t.lastlayer", "t.csv")
    done("report", "t.lastlayer", "t.csv")
    assert 'likelihood="lognormal"' in refused("export", "t.lastlayer")


def test_all_problems_of_a_table_are_said_at_once(here):
    Path("t.csv").write_text("a,b,y\n1,,1\n2,2,2\n3\n4,4,4\nx,5,z\n")
    result = run("fit", "t.csv", "-t", "y", *SMALL)
    assert result.exit_code == 1
    says(result, "4 problems", "row 3 has 1, not 3", "(first: row 5, 'x')", "'b' has 1 missing", "row 5 has 'z'")


def test_help_is_quick_and_whole():
    code = (
        "import sys, atexit; sys.argv = ['lastlayer', '--help']; atexit.register(lambda: print('torch' in sys.modules))"
    )
    command = [sys.executable, "-W", "error", "-c", f"{code}; from lastlayer.__main__ import main; main()"]
    help_ = subprocess.run(command, capture_output=True, text=True, check=True)
    assert help_.stdout.split()[-1] == "False"  # nothing heavy was imported
    for command in ("fit", "predict", "evaluate", "report", "explain", "update", "export", "study"):
        assert f" {command} " in help_.stdout
        done(command, "--help")
    for command in app.registered_commands:  # wrapped by the terminal alone
        assert all("\n" not in paragraph for paragraph in command.callback.__doc__.split("\n\n"))


@pytest.mark.parametrize(
    ("command", "old"),
    {"fit": "m", "predict": "m.csv", "report": "m.html", "update": "m", "export": "folder/model.npz"}.items(),
)
@pytest.mark.parametrize(
    "fault", [OSError(errno.ENOSPC, "No space left on device"), PermissionError(errno.EACCES, "Permission denied")]
)
def test_a_full_disk_or_a_closed_folder_leaves_old_files(here, model, monkeypatch, command, old, fault):
    Path(old).parent.mkdir(exist_ok=True)
    Path(old).write_text("old")
    inputs = {"fit": [PUMP, *TARGETS, *SMALL], "export": [model]}.get(command, [model, NEW])
    option = "--model" if command == "fit" else "--out"

    def failing(function, where):
        def call(what, *rest, **more):
            if where(what):
                raise fault
            return function(what, *rest, **more)

        return call

    if isinstance(fault, PermissionError):
        monkeypatch.setattr(os, "open", failing(os.open, lambda path: Path(path).resolve().is_relative_to(here)))
    else:
        ours = lambda handle: here.name in os.readlink(f"/proc/self/fd/{handle}")
        monkeypatch.setattr(os, "fsync", failing(os.fsync, ours))
    result = run(command, *inputs, option, "folder" if command == "export" else old, "--force")
    monkeypatch.undo()
    assert result.exit_code == 1, result.output
    says(result, fault.strerror)
    assert isinstance(result.exception, SystemExit)
    monkeypatch.chdir(here)
    assert Path(old).read_text() == "old"
    assert not [p for p in here.rglob("*") if p.name.endswith(".part")]


def test_an_interrupted_fit_leaves_a_usable_model(here, monkeypatch):
    calls = []
    step = Adam.step

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(Adam, "step", interrupted)
    result = run("fit", PUMP, *TARGETS, *SMALL)
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert result.exit_code == 130, result.output
    assert "interrupted after 3 epochs" in said(result)
    assert "pump.lastlayer can be used" in said(result)
    assert load_table("pump.lastlayer").card_["interrupted"]
    done("evaluate", "pump.lastlayer", NEW)


def test_an_interrupt_outside_training_leaves_the_old_model(here, monkeypatch):
    Path("m").write_text("old")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(TableRegressor, "fit", interrupted)
    result = run("fit", PUMP, *TARGETS, "--model", "m", "--force")
    assert result.exit_code == 130
    assert "existing files are unchanged" in said(result)
    assert Path("m").read_text() == "old"


GOOD = "a,b,y\n" + "".join(f"{i % 7},{i % 5}.5,{i * i % 11}\n" for i in range(30))


class Bomb:
    """Says so if anyone unpickles it."""

    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


def table_of(text: str | bytes, name: str = "t.csv"):
    """A file, fitted."""
    return fitted_to(lambda path: path.write_bytes(text if isinstance(text, bytes) else text.encode()), name)


def fit_with(*more: object):
    def words(folder: Path, _: Path) -> list[object]:
        (folder / "t.csv").write_text(GOOD)
        return ["fit", folder / "t.csv", *([] if "-t" in more or "--target" in more else ["-t", "y"]), *more]

    return words


def rows_of(change, *more: object, command: str = "predict"):
    """The new rows of the example, changed."""

    def words(folder: Path, model: Path) -> list[object]:
        (folder / "t.csv").write_text(change(NEW.read_text()))
        return [command, model, folder / "t.csv", *more]

    return words


def model_by(make, command: str = "predict"):
    """A file for a model, made at its path from the path of a good one."""

    def words(folder: Path, model: Path) -> list[object]:
        make(folder / "m", model)
        return [command, folder / "m", *([NEW] if command == "predict" else [])]

    return words


def without_columns(path: Path, _: Path) -> None:
    X = np.random.default_rng(0).normal(size=(20, 2))
    lastlayer.BLLRegressor(preset="evidence", hidden=(3,), max_epochs=1).fit(X, X[:, 0] ** 3).save(path)


def fitted_to(make, name: str = "t.csv"):
    """A path that `make` puts something at."""

    def words(folder: Path, _: Path) -> list[object]:
        make(folder / name)
        return ["fit", folder / name, "-t", "y"]

    return words


def parquet_of(x: list) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({"x": x, "y": [1.0, 2.0]}), sink)
    return bytes(sink.getvalue())


def lines(*rows: str):
    return table_of("\n".join(rows), "t.jsonl")


HOSTILE = {
    # files
    "no such file": (lambda f, m: ["fit", f / "none.csv", "-t", "y"], "there is no file"),
    "a folder": (lambda f, m: ["fit", f, "-t", "y"], "is not a file"),
    "a pipe that nobody writes to": (fitted_to(os.mkfifo), "is not a file"),
    "a device without end": (lambda f, m: ["fit", "/dev/zero", "-t", "y"], "is not a file"),
    "a link to itself": (fitted_to(lambda path: path.symlink_to(path)), "there is no file"),
    "a name too long": (lambda f, m: ["fit", f / ("x" * 5000), "-t", "y"], "name too long"),
    "an empty file": (table_of(""), "begins with an empty line"),
    "a header alone": (table_of("a,y\n"), "has no rows"),
    "no spreadsheet": (table_of(b"PK\x03\x04", "t.xlsx"), "not a complete Excel file"),
    "an old spreadsheet": (table_of(b"PK\x03\x04", "t.xls"), "ends in '.xls'"),
    "no gzip": (table_of(b"a,y\n1,2\n", "t.csv.gz"), "not a complete gzip file"),
    "an unknown encoding": (fit_with("--encoding", "utf-9"), "cp1252"),
    "the wrong encoding": (fit_with("--encoding", "utf-16"), "is not utf-16 text"),
    "no suffix": (table_of(GOOD, "table"), "a table is CSV"),
    "compressed bytes": (table_of(b"\x1f\x8b\x08\x00\xff\xfe" * 50), "not UTF-8"),
    "Latin-1": (table_of("größe,y\n1,2\n".encode("latin-1")), "--encoding cp1252"),
    "NUL bytes": (table_of("a,y\n1,\0\n2,3\n"), r"'\x00'"),
    "a very long line": (table_of("a,y\n" + "1" * 10_000_001), "not a table"),
    "a very long cell": (table_of(f"a,y\n{'1' * 200_000},2\n"), "is infinite"),
    # tables
    "a quote without end": (table_of('a,y\n"1,2\n3,4\n'), "never closed"),
    "a name twice": (table_of("a,a,y\n1,2,3\n"), "two columns called 'a'"),
    "a column without name": (table_of("a,,y\n0,1,2\n"), "column 2 of"),
    "control characters in a name": (table_of("a\x1b[2J,y\n1,2\n"), "control characters"),
    "no header": (table_of("1,2\n3,4\n"), "column names"),
    "a blank first line": (table_of("\na,y\n1,2\n"), "begins with an empty line"),
    "two units": (table_of("a,y\n1 kg,1\n20 g,2\n3 kg,3\n"), "kg in 2 rows, g in 1 rows"),
    "an unknown decimal sign": (fit_with("--decimal", ";"), "decimal=';'"),
    "an unknown order of dates": (fit_with("--date-order", "ydm"), "date_order='ydm'"),
    "an empty column": (table_of("a,y\n,1\n,2\n"), "is empty"),
    "names of persons": (table_of("a,y\n" + "".join(f"p{i},{i}\n" for i in range(30))), "every row has a different"),
    "a target of words": (table_of("a,y\n1,x\n2,z\n"), "lastlayer does regression"),
    "a target with holes": (table_of("a,y\n1,\n2,2\n3,3\n"), "cannot be imputed"),
    "a constant target": (table_of("a,y\n1,5\n2,5\n3,5\n"), "nothing to learn"),
    "giants": (table_of("a,y\n1,1\n1e200,2\n3,3\n"), "another unit"),
    "a target of atoms": (table_of("a,y\n1,1e-200\n2,2e-200\n3,0\n"), "another unit"),
    "targets alone": (table_of("y\n1\n2\n"), "no column is left"),
    # JSON lines and Parquet
    "broken JSON": (lines('{"a": 1, "y": 2}', '{"a": 1'), "line 2 of"),
    "a JSON array": (lines("[1, 2]"), "not an object"),
    "nested JSON": (lines('{"a": {"b": 1}, "y": 2}'), "is a dict"),
    "JSON without bottom": (lines("[" * 100_000), "is not JSON"),
    "a new name in JSON": (lines('{"a": 1, "y": 2}', '{"c": 1, "y": 2}'), "'c', which is not in the first line"),
    "a number beyond all": (lines('{"a": 1, "y": 1}', f'{{"a": 1{"0" * 400}, "y": 2}}', '{"a": 3, "y": 3}'), "row 2"),
    "no Parquet": (table_of(b"PAR1 but not really PAR1", "t.parquet"), "not a complete Parquet file"),
    "lists in Parquet": (table_of(parquet_of([[1, 2], [3]]), "t.parquet"), "numbers, texts or dates"),
    # options of fit
    "no target": (lambda f, m: ["fit", PUMP], "--target"),
    "an unknown target": (fit_with("-t", "z"), "it has 'a', 'b', 'y'"),
    "a target in capitals": (fit_with("-t", "Y"), "did you mean 'y'"),
    "a target twice": (fit_with("-t", "y,y"), "different columns"),
    "an empty target": (fit_with("-t", ","), "one or more"),
    "to drop what is not there": (fit_with("--drop", "z"), "--drop column 'z'"),
    "to drop the target": (fit_with("--drop", "y"), "can be neither dropped"),
    "text that is not there": (fit_with("--text", "z"), "--text column 'z'"),
    "groups that are not there": (fit_with("--groups", "z"), "'z' is not in the table"),
    "layers of words": (fit_with("--hidden", "a,b"), "--hidden 'a,b'"),
    "layers without end": (fit_with("--hidden", "999999999"), "from 1 to 10000"),
    "layers of nothing": (fit_with("--hidden", "0"), "--hidden '0'"),
    "an unknown preset": (fit_with("--preset", "calibrate"), "did you mean 'calibrated'"),
    "an unknown noise": (fit_with("--noise", "loud"), "noise='loud'"),
    "no members": (fit_with("--members", "0"), "--members"),
    "an unknown option": (fit_with("--colour", "red"), "--colour"),
    "an unknown command": (lambda f, m: ["fti", PUMP], "No such command"),
    "a model in no folder": (fit_with("--model", "none/m"), "there is no folder"),
    "a model that is a folder": (fit_with("--model", "."), "is a folder"),
    # models
    "no model": (lambda f, m: ["predict", f / "m", NEW], "is not a file"),
    "a pickle": (model_by(lambda m, _: m.write_bytes(pickle.dumps(Bomb()))), "not a complete lastlayer model file"),
    "half a model": (model_by(lambda m, good: m.write_bytes(good.read_bytes()[:-100]), "explain"), "use an older copy"),
    "a model without columns": (model_by(without_columns), "saved without the columns"),
    "arguments in the wrong order": (lambda f, m: ["predict", NEW, m], "not a complete lastlayer model file"),
    # new rows
    "a column that is not there": (rows_of(lambda t: t.replace("fluid", "liquid")), "needs column 'fluid'"),
    "an unknown rule for it": (rows_of(str, "--unknown", "ignore"), "unknown='ignore'"),
    "a hole in new rows": (rows_of(lambda t: t.replace("23.80", "")), "1 missing values"),
    "a name that predict adds": (rows_of(lambda t: t.replace("head_m", "head_m_std")), "already has a column"),
    "an interval of nothing": (rows_of(str, "--level", "0"), "strictly between 0 and 1"),
    "the table itself as output": (rows_of(str, "--out", "t.csv"), "is an input of this command"),
    "output of no kind": (rows_of(str, "--out", "o.xlsx"), "can be written as"),
    "scores without truth": (rows_of(lambda t: t.replace("head_m", "h"), command="evaluate"), "'head_m' is not in"),
    "scores of one row": (rows_of(lambda t: "\n".join(t.split("\n")[:2]), command="evaluate"), "at least two rows"),
    "groups of no column": (rows_of(str, "--group", "colour", command="report"), "colour"),
    "to forget everything": (rows_of(str, "--forgetting", "0", command="update"), "forgetting=0.0 must be above 0"),
    "an export over a file": (lambda f, m: ["export", m, "--out", m], "cannot create the folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_ends_with_one_helpful_message(as_a_user, here, model, name):
    words, message = HOSTILE[name]
    before = model.read_bytes()
    result = run(*words(here, model))
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert message in said(result), said(result)
    assert "Traceback" not in result.output
    assert said(result).lower().count("error") in (1, 2)  # its title, and perhaps a word in it
    assert "\x1b[2J" not in result.output
    assert model.read_bytes() == before
    assert not Path("exploded").exists()
    assert not [p for p in here.rglob("*") if p.name.endswith((".part", ".lastlayer", ".html"))]
