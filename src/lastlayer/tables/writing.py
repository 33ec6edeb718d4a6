"""Tables for users, a piece at a time: whole or not at all, and safe to open in a spreadsheet."""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from lastlayer.errors import InputError
from lastlayer.files import replacing
from lastlayer.tables.reading import Cells

FORMULA = tuple("=+-@\t\r\n＝＋－＠")
"""What a spreadsheet may take for the beginning of a formula."""
RISKY = frozenset(FORMULA)
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
Write: TypeAlias = Callable[[Cells], None]


@contextmanager
def writing(path: Path) -> Iterator[Write]:
    """A function that takes rows; they stand in `path` once all are there, and until then an older file does."""
    check_writable(path)
    if path.suffix.lower() not in WRITERS:
        raise InputError(f"{path} ends in {path.suffix!r}: rows can be written as {', '.join(WRITERS)}")
    with replacing(path) as file, WRITERS[path.suffix.lower()](file) as write:
        yield write


def check_writable(path: Path) -> None:
    """Say before the work, not after it, that a file could not be written there."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: give the name of a file in it")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")


def guarded(cell: str) -> str:
    """A text that a spreadsheet would run as a formula gets an apostrophe in front; numbers stay as they are."""
    if "\r" in cell:  # csv.writer would not quote it, and readers begin a new row there
        cell = cell.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{cell}" if cell.startswith(FORMULA) and not NUMBER.fullmatch(cell) else cell


@contextmanager
def _csv(file: BinaryIO) -> Iterator[Write]:
    text = io.TextIOWrapper(file, "utf-8", newline="")
    rows, named = csv.writer(text, lineterminator="\n"), False

    def write(cells: Cells) -> None:
        nonlocal named
        if not named:
            rows.writerow([guarded(name) for name in cells])
            named = True
        columns = [
            _shown(column.tolist()) if column.dtype.kind == "O" else column.tolist() for column in cells.values()
        ]
        rows.writerows(zip(*columns, strict=True))

    yield write
    text.detach()  # flushes; the file itself is closed by whom it belongs to


def _shown(cells: list[Any]) -> list[Any]:
    return [guarded(cell) if isinstance(cell, str) and (cell[:1] in RISKY or "\r" in cell) else cell for cell in cells]


@contextmanager
def _json_lines(file: BinaryIO) -> Iterator[Write]:
    def write(cells: Cells) -> None:
        names = list(cells)
        for row in zip(*(column.tolist() for column in cells.values()), strict=True):
            plain = [None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row]
            file.write(json.dumps(dict(zip(names, plain, strict=True)), ensure_ascii=False).encode() + b"\n")

    yield write


@contextmanager
def _parquet(file: BinaryIO) -> Iterator[Write]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise InputError("Parquet needs pyarrow: pip install pyarrow, or write CSV") from error
    writer: Any = None

    def write(cells: Cells) -> None:
        nonlocal writer
        try:
            if writer is None:
                batch = pa.table({name: _arrow(column) for name, column in cells.items()})
                writer = parquet.ParquetWriter(file, batch.schema)
            else:
                batch = pa.table({name: _arrow(column) for name, column in cells.items()}).cast(writer.schema)
            writer.write_table(batch)
        except pa.ArrowException as error:
            raise InputError(
                f"these rows do not fit into one Parquet table, write CSV in its place: {error}"
            ) from error

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


def _arrow(column: np.ndarray) -> Any:
    import pyarrow as pa

    cells = column.tolist()
    return pa.array([str(cell) for cell in cells] if len({type(c) for c in cells if c is not None}) > 1 else cells)


WRITERS = {".csv": _csv, ".jsonl": _json_lines, ".ndjson": _json_lines, ".parquet": _parquet}
