"""Writing of tables in chunks. A file is complete or not there at all, and is safe to open in a spreadsheet."""

import csv
import io
import json
import math
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from numpy import ndarray

from lastlayer._internal.files import replacing
from lastlayer.errors import InputError, check_writable
from lastlayer.tables.files import CSV, NUMBER, Cells, arrow_modules

FORMULA = tuple("=+-@\t\r\n＝＋－＠")
"""Characters that a spreadsheet may take for the beginning of a formula."""


def write_table(path: Path, parts: Iterable[Cells], *, separator: str = ",", decimal: str = ".") -> None:
    """Write rows part by part; `path` is replaced once all of them are written, and not before.

    The signs are those of a CSV file; numbers that are already texts are not changed.
    """
    check_writable(path)
    suffix = path.suffix.lower()
    if suffix not in (*CSV, *OTHERS):
        raise InputError(f"{path} ends in {path.suffix!r}: rows can be written as {', '.join((*CSV, *OTHERS))}")
    with replacing(path) as file:
        if suffix in CSV:
            _to_csv(file, parts, "\t" if suffix == ".tsv" else separator, decimal)
        else:
            OTHERS[suffix](file, parts)


def guarded(cell: str) -> str:
    """Prefix a text that a spreadsheet would run as a formula with an apostrophe; numbers are not changed."""
    if "\r" in cell:  # csv.writer would not quote it, and readers would start a new row there
        cell = cell.replace("\r\n", "\n").replace("\r", "\n")
    number = NUMBER.fullmatch(cell.replace(",", ".", 1))  # with a decimal point or comma
    return f"'{cell}" if cell.startswith(FORMULA) and not number else cell


def _to_csv(file: BinaryIO, parts: Iterable[Cells], separator: str, decimal: str) -> None:
    text = io.TextIOWrapper(file, "utf-8", newline="")
    rows = csv.writer(text, lineterminator="\n", delimiter=separator)
    for i, cells in enumerate(parts):
        if i == 0:
            rows.writerow(map(guarded, cells))
        rows.writerows(zip(*(_written(column, decimal) for column in cells.values()), strict=True))
    text.detach()  # flush, and leave the file open for the caller


def _written(column: ndarray, decimal: str) -> list[Any]:
    cells = column.tolist()
    if column.dtype.kind == "f":
        return cells if decimal == "." else [repr(cell).replace(".", decimal) for cell in cells]
    return [guarded(cell) if isinstance(cell, str) else cell for cell in cells]


def _to_json_lines(file: BinaryIO, parts: Iterable[Cells]) -> None:
    for cells in parts:
        for row in zip(*(column.tolist() for column in cells.values()), strict=True):
            plain = [None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row]
            line = json.dumps(dict(zip(cells, plain, strict=True)), ensure_ascii=False, default=str)  # dates
            file.write(line.encode() + b"\n")


def _to_parquet(file: BinaryIO, parts: Iterable[Cells]) -> None:
    pa, parquet = arrow_modules()
    writer: Any = None

    def array(column: ndarray) -> Any:
        cells = column.tolist()
        return pa.array([str(cell) for cell in cells] if len({type(c) for c in cells if c is not None}) > 1 else cells)

    with ExitStack() as closed:
        for cells in parts:
            try:
                batch = pa.table({name: array(column) for name, column in cells.items()})
                writer = writer or closed.enter_context(parquet.ParquetWriter(file, batch.schema))
                writer.write_table(batch.cast(writer.schema))
            except pa.ArrowException as error:
                words = f"these rows do not fit into one Parquet table ({error}): write CSV instead"
                raise InputError(words) from error


OTHERS = {".jsonl": _to_json_lines, ".ndjson": _to_json_lines, ".parquet": _to_parquet}
