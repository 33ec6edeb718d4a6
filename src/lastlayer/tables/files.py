"""Tables read and written a piece at a time: CSV, JSON lines and Parquet. Cells stay what they were in the file.

What is written stands there whole or not at all, and is safe to open in a spreadsheet.
"""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO, SupportsInt, TypeAlias

import numpy as np
from numpy import ndarray

from lastlayer.errors import InputError, check_writable
from lastlayer.files import replacing

CHUNK_ROWS = 16_384
LONGEST_LINE = 10_000_000
MOST_COLUMNS = 20_000
SEPARATORS = ";\t|,"
"""The one that makes most columns of the first line; if two do, the rarer one: names contain commas."""
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
FORMULA = tuple("=+-@\t\r\n＝＋－＠")
"""What a spreadsheet may take for the beginning of a formula."""
Cells = dict[str, ndarray]
"""Column by column: texts and numbers; None for a missing cell."""
Write: TypeAlias = Callable[[Cells], None]


@dataclass(frozen=True)
class Table:
    """Some rows of a table."""

    columns: Cells
    first: int = 0
    """How many rows of the file come before these."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __str__(self) -> str:
        """The names of its columns, as in a message."""
        shown, n = ", ".join(map(repr, islice(self.columns, 20))), len(self.columns)
        return f"{shown}, ... ({n} columns)" if n > 20 else shown

    def cells(self, name: str, what: str) -> ndarray:
        """One column; the error for a column that is missing begins with `what` it was wanted for."""
        if name not in self.columns:
            near = {known.lower(): known for known in self.columns}.get(name.strip().lower())
            hint = f"; did you mean {near!r}?" if near else ""
            raise InputError(f"{what} column {name!r} is not in the table: it has {self}{hint}")
        return self.columns[name]

    def row(self, i: SupportsInt) -> int:
        """The number of row i in messages: counted from one, without the header."""
        return self.first + int(i) + 1


def chunks(path: Path, rows: int = CHUNK_ROWS) -> Iterator[Table]:
    """The table in pieces of `rows` rows; there is at least one row."""
    suffix = path.suffix.lower()
    if not path.exists():
        raise InputError(f"there is no file {path}")
    if not path.is_file():
        raise InputError(f"{path} is not a file: give the path of a table ({', '.join(ROWS)}, .parquet)")
    if suffix not in (*ROWS, ".parquet"):
        raise InputError(
            f"{path} ends in {path.suffix!r}: a table is CSV (.csv, .tsv), JSON lines (.jsonl) or Parquet (.parquet); "
            "unpack or convert it first"
        )
    first = 0
    try:
        for columns in _parquet(path, rows) if suffix == ".parquet" else _blocks(ROWS[suffix](path), rows, path):
            yield (piece := Table(columns, first))
            first += len(piece)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text (byte {error.object[error.start]:#04x}): save the table as UTF-8, "
            "in Excel as 'CSV UTF-8'"
        ) from error
    except PermissionError as error:
        raise InputError(f"{path} may not be read: {error.strerror}") from error
    if not first:
        raise InputError(f"{path} has no rows: there is nothing below its header")


def read(path: Path) -> Table:
    """The whole table."""
    parts = list(chunks(path))
    return Table({name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns})


def _blocks(rows: Iterator[Sequence[Any]], size: int, path: Path) -> Iterator[Cells]:
    """Rows, the first of which names the columns, column by column."""
    names = list(next(rows, []))
    _check_names(names, path)
    while block := list(islice(rows, size)):
        yield {n: np.array(cells, dtype=object) for n, cells in zip(names, zip(*block, strict=True), strict=True)}


def _csv(path: Path) -> Iterator[list[str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        head = file.readline(LONGEST_LINE)
        file.seek(0)
        separator = _separator(head)
        reader = csv.reader(_lines(file, path), delimiter=separator, strict=True)
        try:
            names = [name.strip() for name in next(reader, [])]
            if not any(names):
                raise InputError(f"{path} begins with an empty line: its first line must name the columns")
            if all(NUMBER.fullmatch(name) for name in names):
                raise InputError(
                    f"the first line of {path} is {separator.join(names)!r}, numbers only: put a line with the names "
                    "of the columns above it"
                )
            yield names
            for cells in filter(None, reader):
                if len(cells) != len(names):
                    raise InputError(
                        f"line {reader.line_num} of {path} has {len(cells)} cells, its header has {len(names)}: fix "
                        f"that line; a cell that contains {separator!r} must stand in double quotes"
                    )
                yield cells
        except csv.Error as error:
            raise InputError(f"line {reader.line_num} of {path} is not CSV: {error}") from error


def _separator(head: str) -> str:
    def columns(separator: str) -> int:
        try:
            return len(next(csv.reader([head], delimiter=separator), []))
        except csv.Error:  # a cell without end
            return 0

    return max(SEPARATORS, key=columns)


def _json_lines(path: Path) -> Iterator[list[Any]]:
    names: list[str] = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(_lines(file, path), 1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"line {number} of {path} is not JSON: {error}") from error
            if not isinstance(row, dict) or not row:
                raise InputError(
                    f"line {number} of {path} is not an object with named values: JSON lines look like "
                    '{"flow": 1.5, "fluid": "water"}, one per line'
                )
            if not names:
                yield (names := list(row))
            if strange := [name for name in row if name not in names]:
                raise InputError(f"line {number} of {path} has the name {strange[0]!r}, which the first line has not")
            for name, value in row.items():
                if not isinstance(value, str | int | float | None):
                    raise InputError(
                        f"{name!r} in line {number} of {path} is a {type(value).__name__}: a cell is a number, a text "
                        "or null; spread it over columns of its own"
                    )
            yield [str(cell) if isinstance(cell, bool) else cell for cell in map(row.get, names)]


ROWS: dict[str, Callable[[Path], Iterator[Sequence[Any]]]] = dict.fromkeys((".csv", ".tsv"), _csv)
ROWS |= dict.fromkeys((".jsonl", ".ndjson", ".json"), _json_lines)


def arrow() -> tuple[Any, Any]:
    """pyarrow and its Parquet module."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise InputError("Parquet needs pyarrow: pip install pyarrow, or convert the table to CSV") from error
    return pa, parquet


def _parquet(path: Path, rows: int) -> Iterator[Cells]:
    pa, parquet = arrow()
    try:
        with parquet.ParquetFile(path) as file:
            _check_names(list(file.schema_arrow.names), path)
            for batch in file.iter_batches(rows):
                if len(batch):
                    yield {name: _cells(batch.column(name), name, path) for name in batch.schema.names}
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, PermissionError):
            raise
        raise InputError(f"{path} is not a whole Parquet file: {error}") from error


def _cells(column: Any, name: str, path: Path) -> ndarray:
    pa, types = arrow()[0], arrow()[0].types
    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_floating(kind) or types.is_decimal(kind):
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    known = (types.is_integer, types.is_string, types.is_large_string, types.is_boolean, types.is_null)
    if types.is_temporal(kind):
        column = column.cast(pa.string())
    elif not any(is_kind(kind) for is_kind in known):
        raise InputError(f"column {name!r} of {path} is of type {kind}: a column holds numbers or texts")
    return np.array([str(c) if isinstance(c, bool) else c for c in column.to_pylist()], dtype=object)


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    """Lines, but none that fills the memory."""
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise InputError(f"{path} has a line of more than {LONGEST_LINE:,} characters: that is not a table")
        yield line


def _check_names(names: list[str], path: Path) -> None:
    if len(names) > MOST_COLUMNS:
        raise InputError(
            f"{path} has {len(names):,} columns, and at most {MOST_COLUMNS:,} are read: is the table transposed? Keep "
            "the columns that are needed"
        )
    seen: set[str] = set()
    for i, name in enumerate(names, 1):
        if not name.strip():
            raise InputError(
                f"column {i} of {path} has no name: give it one or take the column out "
                "(pandas writes such a column unless to_csv has index=False)"
            )
        if not name.isprintable():
            raise InputError(f"column {i} of {path} is called {name!r}: give it a name without control characters")
        if name in seen:
            raise InputError(f"{path} has two columns called {name!r}: give each its own name")
        seen.add(name)


# writing


@contextmanager
def writing(path: Path) -> Iterator[Write]:
    """A function that takes rows; they stand in `path` once all are there, and until then an older file does."""
    check_writable(path)
    if path.suffix.lower() not in WRITERS:
        raise InputError(f"{path} ends in {path.suffix!r}: rows can be written as {', '.join(WRITERS)}")
    with replacing(path) as file, WRITERS[path.suffix.lower()](file) as write:
        yield write


def guarded(cell: str) -> str:
    """A text that a spreadsheet would run as a formula gets an apostrophe in front; numbers stay as they are."""
    if "\r" in cell:  # csv.writer would not quote it, and readers begin a new row there
        cell = cell.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{cell}" if cell.startswith(FORMULA) and not NUMBER.fullmatch(cell) else cell


@contextmanager
def _to_csv(file: BinaryIO) -> Iterator[Write]:
    text = io.TextIOWrapper(file, "utf-8", newline="")
    rows, named = csv.writer(text, lineterminator="\n"), False

    def write(cells: Cells) -> None:
        nonlocal named
        if not named:
            rows.writerow(map(guarded, cells))
            named = True
        columns = ([guarded(c) if isinstance(c, str) else c for c in column.tolist()] for column in cells.values())
        rows.writerows(zip(*columns, strict=True))

    yield write
    text.detach()  # flushes, and leaves the file open for its owner


@contextmanager
def _to_json_lines(file: BinaryIO) -> Iterator[Write]:
    def write(cells: Cells) -> None:
        for row in zip(*(column.tolist() for column in cells.values()), strict=True):
            plain = [None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row]
            file.write(json.dumps(dict(zip(cells, plain, strict=True)), ensure_ascii=False).encode() + b"\n")

    yield write


@contextmanager
def _to_parquet(file: BinaryIO) -> Iterator[Write]:
    pa, parquet = arrow()
    writer: Any = None

    def array(column: np.ndarray) -> Any:
        cells = column.tolist()
        return pa.array([str(cell) for cell in cells] if len({type(c) for c in cells if c is not None}) > 1 else cells)

    def write(cells: Cells) -> None:
        nonlocal writer
        try:
            batch = pa.table({name: array(column) for name, column in cells.items()})
            writer = parquet.ParquetWriter(file, batch.schema) if writer is None else writer
            writer.write_table(batch.cast(writer.schema))
        except pa.ArrowException as error:
            raise InputError(f"these rows do not fit one Parquet table, write CSV in its place: {error}") from error

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


WRITERS = {".csv": _to_csv, ".jsonl": _to_json_lines, ".ndjson": _to_json_lines, ".parquet": _to_parquet}
