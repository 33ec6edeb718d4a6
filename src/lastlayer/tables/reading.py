"""Tables of users, a piece at a time: CSV, JSON lines and Parquet. Cells stay what they were in the file."""

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, SupportsInt

import numpy as np
from numpy import ndarray

from lastlayer.errors import InputError

CHUNK_ROWS = 16_384
LONGEST_LINE = 10_000_000
SEPARATORS = ";\t|,"
"""The one that makes most columns of the first line; if two do, the rarer one: names contain commas."""
Cells = dict[str, ndarray]
"""Column by column: text, whole and broken numbers; None for a cell that is not there."""


@dataclass(frozen=True)
class Table:
    """Some rows of a table."""

    columns: Cells
    first: int = 0
    """How many rows of the file come before these."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @cached_property
    def names(self) -> list[str]:
        return list(self.columns)

    def row(self, i: SupportsInt) -> int:
        """What people call row i of these: they count from one, without the header."""
        return self.first + int(i) + 1


def chunks(path: Path, rows: int = CHUNK_ROWS) -> Iterator[Table]:
    """The table in pieces of so many rows; there is at least one row."""
    if not path.exists():
        raise InputError(f"there is no file {path}")
    if not path.is_file():
        raise InputError(f"{path} is not a file: give the path of a table ({', '.join(READERS)})")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(
            f"{path} ends in {path.suffix!r}: a table is CSV (.csv, .tsv), JSON lines (.jsonl) or Parquet (.parquet); "
            "unpack or convert it first"
        )
    first = 0
    try:
        for columns in reader(path, rows):
            if not first:
                _check_names(list(columns), path)
            yield Table(columns, first)
            first += len(next(iter(columns.values())))
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


def _csv(path: Path, rows: int) -> Iterator[Cells]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        head = file.readline(LONGEST_LINE)
        file.seek(0)
        separator = max(SEPARATORS, key=lambda s: len(next(csv.reader([head], delimiter=s), [])))
        reader = csv.reader(_lines(file, path), delimiter=separator, strict=True)
        try:
            names = [name.strip() for name in next(reader, [])]
            if not any(names):
                raise InputError(f"{path} begins with an empty line: its first line must name the columns")
            if all(_is_number(name) for name in names):
                raise InputError(
                    f"the first line of {path} is {separator.join(names)!r}, numbers only: put a line with the names "
                    "of the columns above it"
                )
            block: list[list[str]] = []
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise InputError(
                        f"line {reader.line_num} of {path} has {len(cells)} cells, its header has {len(names)}: mend "
                        f"that line; a cell that contains {separator!r} must stand in double quotes"
                    )
                block.append(cells)
                if len(block) == rows:
                    yield _columns(names, block, path)
                    block = []
            if block:
                yield _columns(names, block, path)
        except csv.Error as error:
            raise InputError(f"line {reader.line_num} of {path} is not CSV: {error}") from error


def _columns(names: list[str], block: Sequence[Sequence[Any]], path: Path) -> Cells:
    _check_names(names, path)  # a dict would drop a name that comes twice
    return {name: np.array(cells, dtype=object) for name, cells in zip(names, zip(*block, strict=True), strict=True)}


def _json_lines(path: Path, rows: int) -> Iterator[Cells]:
    names: list[str] = []
    block: list[list[Any]] = []
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
                    '{"flow": 1.5, "fluid": "water"}, one a line'
                )
            names = names or list(row)
            if strange := [name for name in row if name not in names]:
                raise InputError(f"line {number} of {path} has the name {strange[0]!r}, which the first line has not")
            block.append([_plain(row.get(name), name, number, path) for name in names])
            if len(block) == rows:
                yield _columns(names, block, path)
                block = []
    if block:
        yield _columns(names, block, path)


def _plain(value: Any, name: str, number: int, path: Path) -> Any:
    if isinstance(value, bool):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise InputError(
        f"{name!r} in line {number} of {path} is a {type(value).__name__}: a cell is a number, a text or null; "
        "spread it over columns of its own"
    )


def _parquet(path: Path, rows: int) -> Iterator[Cells]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(
            f"{path} is Parquet, which needs pyarrow: pip install pyarrow, or convert the table to CSV"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            _check_names(list(file.schema_arrow.names), path)
            for batch in file.iter_batches(rows):
                if len(batch):
                    yield {name: _arrow(batch.column(name), name, path) for name in batch.schema.names}
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, PermissionError):
            raise
        raise InputError(f"{path} is not a whole Parquet file: {error}") from error


def _arrow(column: Any, name: str, path: Path) -> ndarray:
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        numbers: ndarray = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        return numbers
    known = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string, pa.types.is_boolean)
    if pa.types.is_temporal(kind):
        column = column.cast(pa.string())
    elif pa.types.is_boolean(kind):
        return np.array([None if cell is None else str(cell) for cell in column.to_pylist()], dtype=object)
    elif not (pa.types.is_null(kind) or any(is_kind(kind) for is_kind in known)):
        raise InputError(f"column {name!r} of {path} is of type {kind}: a column holds numbers or texts")
    return np.array(column.to_pylist(), dtype=object)


READERS: dict[str, Callable[[Path, int], Iterator[Cells]]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_lines,
    ".parquet": _parquet,
}


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    """Lines, but no line that fills the memory."""
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise InputError(f"{path} has a line of more than {LONGEST_LINE:,} characters: that is not a table")
        yield line


def _check_names(names: list[str], path: Path) -> None:
    for i, name in enumerate(names, 1):
        if not name.strip():
            raise InputError(
                f"column {i} of {path} has no name: give it one or take the column out "
                "(pandas writes such a column unless to_csv has index=False)"
            )
        if not name.isprintable():
            raise InputError(f"column {i} of {path} is called {name!r}: give it a name without control characters")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{path} has two columns called {twice!r}: give each its own name")


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False
