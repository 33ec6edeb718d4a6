"""Nothing is lost: which files an output may replace, and how it is written."""

import errno
import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from click.testing import Result
from fuzz import fuzz
from helpers import refused
from typer.testing import CliRunner

import lastlayer
from lastlayer import BLLRegressor, TrainingOptions
from lastlayer._internal import files, work
from lastlayer._internal.files import ModelFileError
from lastlayer.cli import app, console
from lastlayer.errors import InputError
from lastlayer.studies import paper
from lastlayer.tables import TableRegressor, load_table
from lastlayer.training.engine import Adam

pytestmark = pytest.mark.usefixtures("as_a_user", "small_process")

ROOT = Path(__file__).parents[1]
DATA = "a,b,y\n" + "".join(f"{i % 7},{i % 5}.5,{i * i % 11 + i / 100}\n" for i in range(30))
SMALL = ["--preset", "fast", "--hidden", "3", "--max-epochs", "1"]


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "data.csv").write_text(DATA)
    result = run("fit", folder / "data.csv", "-t", "y", *SMALL, "--model", folder / "model.lastlayer")
    assert result.exit_code == 0, result.output
    return folder / "model.lastlayer"


@pytest.fixture
def here(tmp_path, monkeypatch, model) -> Path:
    """A folder with a table, links to it, a model, and files of the user's."""
    monkeypatch.chdir(tmp_path)
    Path("data.csv").write_text(DATA)
    Path("link.csv").symlink_to("data.csv")
    os.link("data.csv", "hard.csv")
    Path("m.lastlayer").write_bytes(model.read_bytes())
    for name in ("mine.html", "mine.png", "mine.csv", "mine.onnx", "mine.c", "mine.txt"):
        Path(name).write_text("mine")
    Path("folder").mkdir()
    Path("folder/predict.py").write_text("mine")
    return tmp_path


FIT = ["fit", "data.csv", "-t", "y", *SMALL]
REFUSED = [
    *([*FIT, "--model", name] for name in ("data.csv", "./data.csv", "link.csv", "hard.csv", "mine.txt")),
    *(["predict", "m.lastlayer", "data.csv", "--out", name] for name in ("link.csv", "m.lastlayer", "mine.csv")),
    *(["report", "m.lastlayer", "data.csv", "--out", name] for name in ("data.csv", "m.lastlayer", "mine.html")),
    *(["update", "m.lastlayer", "data.csv", "--out", name] for name in ("data.csv", "hard.csv", "mine.txt")),
    ["explain", "m.lastlayer", "--curves", "mine.png"],
    ["export", "m.lastlayer", "mine.onnx"],
    ["export", "m.lastlayer", "mine.c"],
    ["export", "m.lastlayer", "folder"],
]


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_a_users_file_is_not_replaced(here, words, monkeypatch):
    monkeypatch.setattr(TableRegressor, "fit", mock.Mock(side_effect=AssertionError("training began")))
    monkeypatch.setattr("lastlayer.tables.load_table", mock.Mock(side_effect=AssertionError("a model was read")))
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    result = run(*words)
    assert result.exit_code == 1, result.output
    assert "--force to replace it" in " ".join(result.output.split())
    assert before == {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}


def test_force_replaces_it(here):
    assert run("predict", "m.lastlayer", "data.csv", "--out", "mine.csv", "--force").exit_code == 0
    assert run("update", "m.lastlayer", "data.csv", "--out", "mine.txt", "--force").exit_code == 0
    assert load_table("mine.txt").card_["rows"] == 60


@pytest.mark.parametrize(
    "words",
    [
        [*FIT, "--model", "new.lastlayer"],
        *(["predict", "m.lastlayer", "data.csv", "--out", f"new.{end}"] for end in ("csv", "jsonl", "parquet")),
        ["report", "m.lastlayer", "data.csv", "--out", "new.html"],
        ["explain", "m.lastlayer", "--curves", "new.png"],
        ["export", "m.lastlayer", "new.c"],
        ["export", "m.lastlayer", "new-folder"],
        ["update", "m.lastlayer", "data.csv"],
    ],
    ids=" ".join,
)
def test_what_lastlayer_wrote_is_replaced(here, words):
    Path("new.csv").touch()  # an empty file is nobody's loss
    for _ in range(2):
        result = run(*words)
        assert result.exit_code == 0, result.output


def test_an_onnx_graph_is_known_again(tmp_path):
    """Written by protobuf in the order of its fields: the version of the format, then the producer."""
    (tmp_path / "ours").write_bytes(b"\x08\x0a\x12\x09lastlayer\x1a\x01x")
    (tmp_path / "theirs").write_bytes(b"\x08\x0a\x12\x07pytorch\x1a\x01x")
    assert files.ONNX_GRAPH.recognizes(tmp_path / "ours")
    assert not files.ONNX_GRAPH.recognizes(tmp_path / "theirs")


def test_a_study_does_not_replace_a_users_table(tmp_path):
    (tmp_path / "table1.csv").write_text("mine")
    refused(r"table1\.csv exists", paper.check_results, tmp_path)
    (tmp_path / "study.json").write_text("{}")
    refused("is not the record of a study", paper.check_results, tmp_path)
    paper.check_results(tmp_path, force=True)
    (tmp_path / "study.json").write_text('{\n "studies": []}')
    paper.check_results(tmp_path)


def test_only_states_of_training_are_cleared_and_they_are_no_models(tmp_path, model):
    files.write(tmp_path / "state", {}, {"training": {}})
    refused("is not a lastlayer model", files.check_output, tmp_path / "state", files.MODEL)
    files.check_output(model, files.MODEL)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    for name in ("training-notes.safetensors", "training-1-0.safetensors.bak", "training.txt"):
        (tmp_path / name).write_text("mine")
    options = {"preset": "evidence", "hidden": (3,), "max_epochs": 2, "batch_size": 30, "random_state": 0}
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    BLLRegressor(training=TrainingOptions(checkpoint=tmp_path), **options).fit(X, X[:, 0] + rng.normal(size=60))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_links_stay_and_modes_are_kept(tmp_path):
    target, link = tmp_path / "target", tmp_path / "folder" / "link"
    link.parent.mkdir()
    link.symlink_to(target)
    files.write(link, {}, {})  # the target is not there yet
    target.chmod(0o600)
    files.write(link, {}, {"n": 2})
    assert link.is_symlink()
    assert files.header_of(target)["n"] == 2
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert [path.name for path in link.parent.iterdir()] == ["link"]
    (tmp_path / ("n" * 250)).touch()
    files.write(tmp_path / ("n" * 250), {}, {})  # the name aside is no longer


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match="neither a file nor a folder"), files.replacing(tmp_path / "pipe"):
        pass
    for name, words in (("pipe", "neither a file"), ("loop", "leads to itself")):
        refused(words, files.check_output, tmp_path / name, files.MODEL)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "closed")

    monkeypatch.setattr(Path, "is_file", refuse)
    refused("cannot be read: Permission denied", lastlayer.load, tmp_path / "closed" / "m", error=ModelFileError)


@pytest.mark.parametrize("how", ["training", "writing"])
def test_sigterm_takes_the_way_of_an_interrupt(here, monkeypatch, how):
    place, name = (Adam, "step") if how == "training" else (os, "fsync")
    known = getattr(place, name)

    def terminated(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return known(*args)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(place, name, terminated)
    result = run("fit", "data.csv", "-t", "y", "--preset", "evidence", "--hidden", "3", "--max-epochs", "3")
    assert result.exit_code == 143, result.output
    assert "interrupted" in result.output
    assert Path("data.lastlayer").exists() == (how == "training")
    assert not [path for path in here.iterdir() if path.name.endswith(".part")]
    assert signal.getsignal(signal.SIGTERM) is before


def test_predictions_end_quietly_when_nobody_reads_on(here):
    assert run("export", "m.lastlayer", "bundle").exit_code == 0
    with open("many.csv", "w") as file:
        file.write("a,b\n" + "1,2.5\n" * 20_000)
    command = f"{sys.executable} bundle/predict.py many.csv | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("y_mean,")
    assert done.stderr == ""
    Path("other.csv").write_text("x\n1\n")
    for rows in ("none.csv", "other.csv", "m.lastlayer"):
        done = subprocess.run([sys.executable, "bundle/predict.py", rows], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr


def test_a_log_gets_a_line_a_minute(monkeypatch):
    clock, log = [0.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(work, "_log", None)
    monkeypatch.setattr(sys, "stderr", log)
    for _ in range(2):
        with work.progress_bar(total=300, desc="fit", miniters=1) as bar:
            for _ in range(300):
                clock[0] += 0.5
                bar.refresh()
    lines = log.getvalue().splitlines()
    assert len(lines) == 5  # of 300 seconds, two bars together
    assert "\r" not in log.getvalue()


@pytest.mark.parametrize(
    ("text", "said"),
    [("a\udcffb", r"a\udcffb"), ("\x1b[2J", r"\x1b[2J"), ("[/red]", "[/red]"), ("two\nlines", "two\nlines")],
)
def test_odd_texts_are_shown(text, said, capsys):
    assert console.shown(text) == said
    console.Output(as_json=False).words(text)
    assert said in capsys.readouterr().out


def test_long_messages_and_tables_are_cut(capsys):
    console.Output(as_json=False).note("x" * 10**6)
    console.Output(as_json=False).table([["n"], *([str(i)] for i in range(1000))])
    said = capsys.readouterr()
    assert len(said.err) < 5000
    assert "and 800 more" in said.out


def test_what_cannot_be_written_or_read_is_refused_with_words(here):
    """Curves are a PNG, half a surrogate pair is no text, and a table of 300,000 columns is refused at once."""
    result = run("explain", "m.lastlayer", "--curves", "curves.pdf")
    assert result.exit_code == 1
    assert "PNG file" in result.output
    cells = [{"a": i % 7, "c": "x\ud800" if i % 2 else "z", "y": i * i % 11} for i in range(30)]
    rows = "\n".join(map(json.dumps, cells))
    Path("s.jsonl").write_text(rows)
    options = ["-t", "y", "--preset", "evidence", "--hidden", "3", "--max-epochs", "1"]
    fit = run("fit", "s.jsonl", *options, "--json")
    assert fit.exit_code == 0, fit.output
    result = run("predict", "s.lastlayer", "s.jsonl")
    assert result.exit_code == 1
    assert "cannot be written as UTF-8" in " ".join(result.output.split())
    assert not Path("s.predicted.csv").exists()
    with open("wide.csv", "w") as file:
        file.write(",".join(f"c{i}" for i in range(300_000)) + "\n" + "1," * 299_999 + "1\n")
    result = run("fit", "wide.csv", "-t", "c1")
    assert result.exit_code == 1
    assert "300,000 columns" in result.output


def test_crafted_model_files_are_refused_or_predict():
    counts, _, wrong = fuzz("files", 120, 0, kinds=["single", "mixture, noise by input", "online", "table"])
    assert not wrong, wrong
    assert counts["refused"] > 24
    assert counts["fine"] > 24


def test_hostile_command_lines(model):
    counts, _, wrong = fuzz("cli", 25, 0, model=model)
    assert not wrong, wrong
    assert counts.total() == 25
