"""Writing of tables in chunks. A file is complete or not there at all, and is safe to open in a spreadsheet."""

import csv
import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from numpy import ndarray

from lastlayer._internal.files import replacing
from lastlayer.errors import InputError, check_writable
from lastlayer.tables.files import NUMBER, Cells, arrow_modules

FORMULA = tuple("=+-@\t\r\n＝＋－＠")
"""Characters that a spreadsheet may take for the beginning of a formula."""
Write: TypeAlias = Callable[[Cells], None]


@dataclass(frozen=True)
class Dialect:
    """Format of a CSV file; numbers that are already texts are not changed."""

    separator: str = ","
    decimal: str = "."


@contextmanager
def writing(path: Path, dialect: Dialect | None = None) -> Iterator[Write]:
    """Yield a function that writes rows; `path` is replaced once all rows are written, and not before."""
    dialect = dialect or Dialect()
    dialect = replace(dialect, separator="\t") if path.suffix.lower() == ".tsv" else dialect
    check_writable(path)
    if path.suffix.lower() not in WRITERS:
        raise InputError(f"{path} ends in {path.suffix!r}: rows can be written as {', '.join(WRITERS)}")
    with replacing(path) as file, WRITERS[path.suffix.lower()](file, dialect) as write:
        yield write


def guarded(cell: str) -> str:
    """Prefix a text that a spreadsheet would run as a formula with an apostrophe; numbers are not changed."""
    if "\r" in cell:  # csv.writer would not quote it, and readers would start a new row there
        cell = cell.replace("\r\n", "\n").replace("\r", "\n")
    number = NUMBER.fullmatch(cell.replace(",", ".", 1))  # with a decimal point or comma
    return f"'{cell}" if cell.startswith(FORMULA) and not number else cell


@contextmanager
def _to_csv(file: BinaryIO, dialect: Dialect) -> Iterator[Write]:
    text = io.TextIOWrapper(file, "utf-8", newline="")
    rows, named = csv.writer(text, lineterminator="\n", delimiter=dialect.separator), False

    def write(cells: Cells) -> None:
        nonlocal named
        if not named:
            rows.writerow(map(guarded, cells))
            named = True
        columns = (_written(column, dialect) for column in cells.values())
        rows.writerows(zip(*columns, strict=True))

    yield write
    text.detach()  # flush, and leave the file open for the caller


def _written(column: ndarray, dialect: Dialect) -> list[Any]:
    cells = column.tolist()
    if column.dtype.kind == "f":
        return cells if dialect.decimal == "." else [repr(cell).replace(".", dialect.decimal) for cell in cells]
    return [guarded(cell) if isinstance(cell, str) else cell for cell in cells]


@contextmanager
def _to_json_lines(file: BinaryIO, _: Dialect) -> Iterator[Write]:
    def write(cells: Cells) -> None:
        for row in zip(*(column.tolist() for column in cells.values()), strict=True):
            plain = [None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row]
            line = json.dumps(dict(zip(cells, plain, strict=True)), ensure_ascii=False, default=str)  # dates
            file.write(line.encode() + b"\n")

    yield write


@contextmanager
def _to_parquet(file: BinaryIO, _: Dialect) -> Iterator[Write]:
    pa, parquet = arrow_modules()
    writer: Any = None

    def array(column: ndarray) -> Any:
        cells = column.tolist()
        return pa.array([str(cell) for cell in cells] if len({type(c) for c in cells if c is not None}) > 1 else cells)

    def write(cells: Cells) -> None:
        nonlocal writer
        try:
            batch = pa.table({name: array(column) for name, column in cells.items()})
            writer = parquet.ParquetWriter(file, batch.schema) if writer is None else writer
            writer.write_table(batch.cast(writer.schema))
        except pa.ArrowException as error:
            raise InputError(f"these rows do not fit into one Parquet table ({error}): write CSV instead") from error

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


WRITERS = {
    ".csv": _to_csv,
    ".tsv": _to_csv,
    ".jsonl": _to_json_lines,
    ".ndjson": _to_json_lines,
    ".parquet": _to_parquet,
}
