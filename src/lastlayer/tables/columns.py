"""Cells as numbers or texts, and what kind of column they make."""

import math
import re
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from lastlayer.errors import InputError
from lastlayer.tables.reading import Table

MISSING = frozenset(["", "na", "n/a", "#n/a", "nan", "null", "none"])
"""In a column of numbers, in capitals or not; in one of texts only an empty cell is missing: "NA" may be a country."""
DAY = r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
TIME = r"\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?"
DATE = re.compile(rf"({DAY})([T ]+{TIME}.*)?|{TIME}")
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")


def as_numbers(cells: ndarray) -> tuple[Float[ndarray, " m"], Bool[ndarray, " m"]]:
    """The cells as numbers, NaN where one is missing, and which of them are neither."""
    if cells.dtype.kind == "f":
        return cells.astype(float), np.zeros(len(cells), dtype=bool)
    try:
        if "_" not in "".join(cells.tolist()):  # Python reads 1_0 as ten
            return cells.astype(float), np.zeros(len(cells), dtype=bool)
    except (TypeError, ValueError):
        pass  # cells of several kinds, missing or wrong ones: one by one
    values, wrong = np.full(len(cells), math.nan), np.zeros(len(cells), dtype=bool)
    for i, cell in enumerate(cells):
        if cell is None or (isinstance(cell, str) and cell.strip().lower() in MISSING):
            continue
        try:
            values[i] = float(cell)
            wrong[i] = isinstance(cell, str) and "_" in cell
        except (ValueError, OverflowError):
            wrong[i] = True
    return values, wrong


def as_texts(cells: ndarray) -> ndarray:
    """The cells as texts without blanks around them, "" where one is missing."""
    return np.array([_text(cell) for cell in cells], dtype=object)


def _text(cell: Any) -> str:
    if isinstance(cell, str):
        return cell.strip()
    if cell is None or cell != cell:
        return ""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def holds_numbers(name: str, table: Table) -> bool:
    """Whether a column is one of numbers; dates and columns that are neither fish nor fowl are refused with advice."""
    cells = table.columns[name]
    values, wrong = as_numbers(cells)
    present = int(np.isfinite(values).sum())
    if not wrong.any() and (present or np.isinf(values).any()):
        return True
    texts = [text for text in as_texts(cells) if text]
    if not texts:
        raise InputError(f"column {name!r} is empty: leave it out with --drop {_quoted(name)}")
    if all(DATE.fullmatch(text) for text in texts):
        raise InputError(
            f"column {name!r} holds dates or times (such as {texts[0]!r}): a network cannot use them as they stand. "
            "Turn them into numbers that matter, such as hours since the start, the hour of the day or the month, or "
            f"leave the column out with --drop {_quoted(name)}"
        )
    commas = {text for text in texts if DECIMAL_COMMA.fullmatch(text)}
    if commas and all(text in commas or _plain_number(text) for text in texts):
        raise InputError(
            f"column {name!r} has numbers with a decimal comma (such as {min(commas)!r}): write them with a point"
        )
    if present > 0.5 * len(cells):
        i = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"column {name!r} holds numbers but for {wrong.sum()} of {len(cells)} cells (first: row {table.row(i)}, "
            f"{shortened(cells[i])}): mend these cells, or if the numbers are codes, say so with --text {_quoted(name)}"
        )
    return False


def shortened(cell: Any) -> str:
    """A cell as it may stand in a message: quoted, no control characters, not too long."""
    return repr(cell) if len(repr(cell)) <= 40 else repr(cell)[:40] + "..."


def _plain_number(text: str) -> bool:
    return not as_numbers(np.array([text], dtype=object))[1][0]


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[\w.-]+", name) else f"'{name}'"
