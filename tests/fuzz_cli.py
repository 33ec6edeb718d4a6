"""Hostile runs of the command line: odd tables, names, options, outputs over inputs, junk for models (fuzz.py).

Of each run must be true: no traceback, a message where the exit code is not zero, no file of the user's changed unless
`--force` was given or the command is to change it, nothing half-written left behind, and an end within a minute.
"""

import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from click.testing import Result
from pyarrow import parquet
from typer.testing import CliRunner

from lastlayer.cli import app
from lastlayer.errors import LastLayerError

SECONDS = 60
BUDGETS = [
    ["--preset", "evidence", "--hidden", "3", "--max-epochs", "1"],
    ["--preset", "fast", "--hidden", "3", "--max-epochs", "1", "--members", "2"],
]
listed = str.split
NAMES = listed("t.csv t.tsv t.jsonl t.parquet [red]x.csv [bold].csv ü.csv $x^{.csv -t.csv t.CSV t.txt t %s.csv 'q'.csv")
NAMES += ["a b.csv", "x" * 200 + ".csv", "\udcff.csv", "\x1b[2J.csv", "a\nb.csv"]
COLUMNS = ["a b", *listed('a b =a $a_{ [red] [/red] ä a,b " affine_cost y_mean -1 nan')]
CELLS = ["", "\x00", *listed("1 -2.5 1e308 1e-308 1e999 nan x =1+1 1,5 2024-01-01 1_0 inf 0x10")]
COMMANDS = listed("fit fit fit predict predict evaluate report explain update export study")
OUTPUTS = listed("good.csv link.csv hard.csv model.lastlayer ./model.lastlayer other.lastlayer page.html photo.png")
OUTPUTS += listed("folder none/x.csv new.csv new.html new.jsonl new.parquet new.onnx new.png new /dev/null loop.csv")
OUTPUTS.append("[/red].csv")
TABLES = listed("good.csv none.csv folder loop.csv link.csv model.lastlayer notes.txt photo.png /dev/null")
TABLES += ["", "x" * 5000]
MODELS = ["", *listed("cut.lastlayer good.csv none folder notes.txt /dev/zero")]
OPTIONS = {
    "--drop": "a z a,b,c y",
    "--text": "a z",
    "--impute": "median x",
    "--groups": "c a z",
    "--noise": "full input loud",
    "--seed": "1 -1 x",
    "--hidden": "0 auto 2,2 x",
    "--members": "0 2 1000",
}
Rows = list[list[str]]


class Slow(BaseException):
    """A run that took longer than a minute."""


def good(rng: np.random.Generator, n: int) -> Rows:
    """A header and rows that can be learned from."""
    numbers, colors = rng.standard_normal((n, 3)), rng.choice(["red", "blue"], n)
    cells = [[f"{a:.4g}", f"{b:.4g}", color, f"{y:.4g}"] for (a, b, y), color in zip(numbers, colors, strict=True)]
    return [["a", "b", "c", "y"], *cells]


def odd(rng: np.random.Generator, rows: Rows) -> Rows:
    """The same with something wrong in it."""
    rows = [list(row) for row in rows]
    any_row, any_column = int(rng.integers(len(rows))), int(rng.integers(min(map(len, rows))))
    kind = rng.integers(12)
    if kind < 2:
        rows[0][any_column] = str(rng.choice(COLUMNS))
    elif kind < 5:
        rows[any_row][any_column] = str(rng.choice(CELLS))
    elif kind == 5:
        for row in rows[1:]:
            row[any_column] = str(rng.choice(CELLS))
    elif kind == 6:
        rows[any_row] = rows[any_row][:-1] if rng.random() < 0.5 else [*rows[any_row], "1"]
    elif kind == 7:
        rows[0][any_column] = str(rng.choice(["", " ", rows[0][0], "y", "\t", "x" * 100_000]))
    elif kind == 8:
        for row in rows[1:]:
            row[any_column] = "5" if rng.random() < 0.98 else "5.0000001"
    elif kind == 9:
        rows = [["a", "y"]] + [[f"text {i}", f"word {i}"] for i in range(len(rows))]
    elif kind == 10:
        rows = rows[: int(rng.integers(0, 3))]
    else:
        scale = float(rng.choice([1e-200, 1e-12, 1e140, 1e200, 1e307]))
        for row in rows[1:]:
            with contextlib.suppress(ValueError):
                row[any_column] = repr(float(row[any_column]) * scale)
    return rows


def encoded(rng: np.random.Generator, rows: Rows, name: str) -> bytes:
    """As the file's name promises, most of the time."""
    suffix = Path(name).suffix.lower()
    if suffix == ".jsonl" and rows:
        records = [dict(zip(rows[0], row, strict=False)) for row in rows[1:]]
        text = "\n".join(json.dumps(record) for record in records)
        return text.replace("red", "re\\ud800d" if rng.random() < 0.2 else "red").encode()
    if suffix == ".parquet" and rows and len({len(row) for row in rows}) == 1:
        with contextlib.suppress(Exception):
            sink = pa.BufferOutputStream()
            parquet.write_table(pa.table({n: list(c) for n, *c in zip(*rows, strict=True)}), sink)
            return bytes(sink.getvalue())
    separator = "\t" if suffix == ".tsv" else str(rng.choice([",", ",", ",", ";", "|"]))
    quoted = lambda cell: f'"{cell}"' if separator in cell and '"' not in cell else cell
    text = "".join(separator.join(map(quoted, row)) + "\n" for row in rows)
    how = rng.integers(12)
    encoding = {0: "utf-8-sig", 1: "utf-16", 2: "latin-1"}.get(int(how), "utf-8")
    content = text.encode(encoding, "replace")
    if how == 3:
        content = content.replace(b"\n", b"\r\n")
    if how == 4:
        content = content[: len(content) // 2]
    return content


def junk(rng: np.random.Generator) -> bytes:
    kinds = [b"", b"\x00" * 50, b"PK\x03\x04" + bytes(60), rng.bytes(300), b"{}\n", b"\xef\xbb\xbf", b"\n\n\n"]
    kinds.append(b"a,y\n")
    kinds += [b"," * 3_000_000 + b"\n1\n", b"x" * 2_000_000 + b",y\n1,2\n3,4\n5,9\n", b"\x89PNG\r\n", b"PAR1PAR1"]
    kinds.append(",".join(f"c{i}" for i in range(150_000)).encode() + b",y\n" + b"1," * 150_000 + b"2\n")
    return kinds[rng.integers(len(kinds))]


class Sandbox:
    """A folder with a user's files, and commands that do it harm."""

    def __init__(self, folder: Path, rng: np.random.Generator) -> None:
        self.folder, self.rng = folder, rng

    def fill(self, model: Path) -> None:
        """The user's files: tables, models, a page, a picture, notes, links."""
        rng = self.rng
        shutil.copy(model, "model.lastlayer")
        shutil.copy(model, "other.lastlayer")
        Path("cut.lastlayer").write_bytes(model.read_bytes()[: int(rng.integers(1, 5000))])
        self.table = "t.csv" if rng.random() < 0.3 else str(rng.choice(NAMES))
        rows = good(rng, int(rng.choice([3, 8, 25, 25, 25])))
        for _ in range(int(rng.integers(0, 3))):
            rows = odd(rng, rows) if rows else rows
        Path(self.table).write_bytes(junk(rng) if rng.random() < 0.15 else encoded(rng, rows, self.table))
        Path("good.csv").write_bytes(encoded(np.random.default_rng(7), good(rng, 25), "good.csv"))
        Path("folder").mkdir()
        Path("results").mkdir()
        mine = {"page.html": "<html>mine</html>", "photo.png": "\x89PNG mine"}
        for name in ("notes.txt", "folder/predict.py", "results/table1.csv", *mine):
            Path(name).write_text(mine.get(name, "mine"))
        Path("link.csv").symlink_to("good.csv")
        os.link("good.csv", "hard.csv")
        Path("loop.csv").symlink_to("loop.csv")

    def one(self, *choices: str) -> str:
        return str(self.rng.choice(choices))

    def data(self) -> str:
        return self.one(self.table, self.table, self.table, "good.csv", self.one(*TABLES))

    def model(self) -> str:
        return "model.lastlayer" if self.rng.random() < 0.85 else self.one(*MODELS)

    def output(self, option: str = "--out") -> list[str]:
        return [] if self.rng.random() < 0.5 else [option, self.one(*OUTPUTS, self.table, "x" * 300)]

    def words(self) -> list[str]:
        """A command line."""
        rng, pick = self.rng, self.one
        command = pick(*COMMANDS)
        words: list[str] = []
        if command == "fit":
            words = [self.data(), "-t", pick("y", "y", "y", "y", "a", "z", "", ",", "y,a", "Y", "c")]
            words += [*BUDGETS[int(rng.random() < 0.2)], *(self.output("--model") if rng.random() < 0.7 else [])]
            option = pick(*OPTIONS)
            words += [option, pick(*OPTIONS[option].split())] if rng.random() < 0.4 else []
        elif command in ("predict", "evaluate", "report", "update"):
            words = [self.model(), self.data(), *(self.output() if command != "evaluate" else [])]
            if command == "predict" and rng.random() < 0.3:
                words += ["--level", pick("0", "1", "0.5", "nan", "x", "-1")]
            if command == "update" and rng.random() < 0.3:
                words += ["--forgetting", pick("0", "1", "0.5", "nan", "2", "inf")]
            if command != "update" and rng.random() < 0.3:
                words += ["--unknown", pick("warn", "error", "x")]
            if command != "predict" and rng.random() < 0.3:
                words += ["--target", pick("y", "a", "z", "", "y,a")]
        elif command == "explain":
            words = [self.model(), *(self.output("--curves") if rng.random() < 0.6 else [])]
        elif command == "export":
            words = [self.model(), *self.output()]
        else:
            words = pick("--seeds 0", "--out good.csv", "--out results", "--max-epochs x", "--bnn-epochs 0").split()
        if rng.random() < 0.1:
            words.append(pick("--json", "--colour", "extra", "[/red]", "--help", "--force", "-"))
        words += ["--json"] if rng.random() < 0.2 else []
        return [command, *words]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def complaint(result: Result, words: list[str], before: dict[str, bytes], folder: Path) -> str | None:
    """What is wrong with a run; None: nothing."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if "Traceback" in result.output:
        return "a traceback"
    if "\x1b[2J" in result.output:
        return "control characters of a name on the terminal"
    if result.exit_code not in (0, 1, 2):
        return f"exit code {result.exit_code}"
    if result.exit_code and not ("error" in result.output.lower() or "usage" in result.output.lower()):
        return f"exit code {result.exit_code} without a message"
    if any(path.name.endswith(".part") for path in folder.rglob("*")):
        return "a .part file is left"
    # models are what fit and update write, and update changes its own
    may_change = {"other.lastlayer"} | ({"model.lastlayer"} if words[0] in ("update", "fit") else set())
    if "--force" in words:
        return None
    after = contents(folder)
    lost = [name for name in before if after.get(name) != before[name] and name not in may_change]
    return f"changed or lost: {lost}" if lost else None


def ring(*_: object) -> None:
    raise Slow


def fit_model(folder: Path) -> Path:
    """The model that all runs start from."""
    table, path = folder / "start.csv", folder / "start.lastlayer"
    table.write_bytes(encoded(np.random.default_rng(7), good(np.random.default_rng(0), 25), "start.csv"))
    result = CliRunner().invoke(app, ["fit", str(table), "-t", "y", *BUDGETS[1], "--model", str(path)])
    assert result.exit_code == 0, result.output
    return path


class Generator:
    """Runs in a sandbox that is filled anew for each; a `model` may be given."""

    def __init__(self, folder: Path, model: Path | None = None) -> None:
        self.model = fit_model(folder) if model is None else model

    def case(self, number: int) -> tuple[int, list[str]]:
        """The number of the run, and the command line."""
        with self.sandbox(number) as (sandbox, _):
            return number, [word[:60] for word in sandbox.words()]

    @contextlib.contextmanager
    def sandbox(self, number: int) -> Iterator[tuple[Sandbox, Path]]:
        with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
            sandbox = Sandbox(Path(name), np.random.default_rng([4, number]))
            sandbox.fill(self.model)
            yield sandbox, Path(name)

    def run(self, case: tuple[int, list[str]]) -> None:
        with self.sandbox(case[0]) as (sandbox, folder):
            before, words = contents(folder), sandbox.words()
            signal.signal(signal.SIGALRM, ring)
            signal.alarm(SECONDS)
            try:
                result = CliRunner().invoke(app, words)
            except Slow:
                raise AssertionError(f"no end within {SECONDS} s") from None
            finally:
                signal.alarm(0)
            if found := complaint(result, words, before, folder):
                raise AssertionError(found)
            if result.exit_code:
                raise LastLayerError(f"{words[0]}: exit code {result.exit_code}")
