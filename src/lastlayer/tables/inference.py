"""Inference of column types from a training table: numbers and their format, dates, texts, or row labels."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy import ndarray

from lastlayer.errors import InputError
from lastlayer.tables.cells import (
    MISSING,
    TIME_ALONE,
    YEAR_FIRST,
    YEAR_LAST,
    DateFormat,
    NumberFormat,
    as_texts,
    is_missing,
    looks_like_date,
)
from lastlayer.tables.columns import shortened
from lastlayer.tables.files import Table

UNITS = re.compile(
    r"[%‰$€£¥]|EUR|USD|GBP|CHF|[kmµ]?g|t|lbs?|oz|[kcmµn]?m|in|ft|yd|mi|m?s|min|h|d|[mcd]?[lL]|gal|°?[CF]|K|[kM]?W|"
    r"[mk]?V|m?A|[hkM]?Pa|m?bar|psi|[kMG]?Hz|k?N|[kM]?J|[kM]Wh|m/s|km/h|mph"
)
"""Units that cannot be categories: a column with two of them is rejected."""
LABEL = re.compile(r"(.*[\W_])?(id|idx|index|key|nr|no|row|rownum|rownumber|unnamed)(\W*\d*)", re.I)
CAMEL_LABEL = re.compile(r".*[a-z](ID|Id|Index|Key|Nr|No)")
FEWEST_LABELS = 10
"""With fewer rows, texts that all differ may still be categories."""


def number_formats(table: Table, names: Iterable[str], *, decimal: str = "auto") -> dict[str, NumberFormat]:
    if decimal != "auto":
        one = {name: _format(table.columns[name], decimal) for name in names}
        return {name: found for name, found in one.items() if found is not None}
    both = {name: (_format(table.columns[name], "."), _format(table.columns[name], ",")) for name in names}
    semicolons = table.separator == ";"
    by_comma = any(comma and (point is None or (semicolons and point.thousands)) for point, comma in both.values())
    by_point = any(comma is None and point is not None for point, comma in both.values())
    first = 1 if by_comma and not by_point else 0
    chosen = {name: pair[first] or pair[1 - first] for name, pair in both.items()}
    return {name: found for name, found in chosen.items() if found is not None}


def _format(cells: ndarray, decimal: str) -> NumberFormat | None:
    """Format of the cells with this decimal sign; None if they are not numbers."""
    if cells.dtype.kind in "fiu":
        return NumberFormat()
    if cells.dtype.kind in "Mb":
        return None
    if decimal == "." and not NumberFormat().numbers(cells)[1].any():
        return NumberFormat() if any(not is_missing(cell) for cell in cells) else None
    split, units, grouped, found = NumberFormat(decimal, thousands=True), set[str](), False, False
    for cell in cells:
        if is_missing(cell):
            continue
        found = True
        try:
            unit = unit_of(cell, split)
        except (TypeError, ValueError, OverflowError):
            return None
        units.add(unit)
        grouped |= isinstance(cell, str) and split.other in cell.removesuffix(unit)
        if len(units - {""}) > 1:
            return None
    return NumberFormat(decimal, grouped, max(units)) if found else None


def unit_of(cell: Any, format: NumberFormat) -> str:
    """Unit of a number; raise ValueError, TypeError or OverflowError if the cell is not a number."""
    if isinstance(cell, str):
        return format.split(cell)[1]
    float(cell)
    return ""


def date_format(name: str, cells: ndarray, *, order: str = "auto") -> DateFormat | None:
    """Format of the dates of a column; None if it does not contain dates."""
    if cells.dtype.kind == "M":
        return DateFormat()
    texts = [text for text in as_texts(cells) if text.lower() not in MISSING]
    if not texts:
        return None
    if all(TIME_ALONE.fullmatch(text) for text in texts):
        found = DateFormat("time")
    elif all(YEAR_FIRST.fullmatch(text) for text in texts):
        found = DateFormat("ymd")
    elif all(YEAR_LAST.fullmatch(text) or YEAR_FIRST.fullmatch(text) for text in texts):
        days = [match.groups()[:2] for text in texts if (match := YEAR_LAST.fullmatch(text))]
        day_first, month_first = (any(int(pair[i]) > 12 for pair in days) for i in (0, 1))
        if order == "auto" and not day_first and not month_first and "." not in texts[0]:
            raise InputError(
                f"column {name!r} has dates such as {texts[0]!r}, and none of them shows whether day or month comes "
                "first: use --date-order dmy or mdy, or write them as 2024-12-31"
            )
        found = DateFormat(("mdy" if month_first else "dmy") if order == "auto" else order)
    else:
        return None
    wrong = found.dates(cells)[1]
    if wrong.any():
        i = int(wrong.argmax())
        raise InputError(
            f"column {name!r} contains dates, but {wrong.sum()} of {len(cells)} cells are not valid dates, such as "
            f"{shortened(cells[i])}: fix these cells, or exclude the column with --drop {quoted(name)}"
        )
    return found


def refuse_mixed(name: str, table: Table) -> None:
    """Reject, with advice, a column that mixes numbers with other cells or has several units."""
    cells = table.columns[name]
    texts = [text for text in as_texts(cells) if text]
    if not texts:
        raise InputError(f"column {name!r} is empty: exclude it with --drop {quoted(name)}")
    units, wrong = min((_units(cells, decimal) for decimal in ".,"), key=lambda found: sum(found[1]))
    if len(units) > 1 and not any(wrong) and all(not unit or UNITS.fullmatch(unit) for unit in units):
        counted = ", ".join(f"{unit or 'no unit'} in {n} rows" for unit, n in units.most_common())
        raise InputError(f"column {name!r} has numbers in several units ({counted}): convert them to one")
    if any(wrong) and len(units) <= 2 and sum(units.values()) > 0.5 * len(cells):
        i = wrong.index(True)
        raise InputError(
            f"column {name!r} contains numbers except in {sum(wrong)} of {len(cells)} cells (first: row "
            f"{table.row(i)}, {shortened(cells[i])}): fix these cells, or use "
            f"--text {quoted(name)} if the numbers are codes"
        )


def _units(cells: ndarray, decimal: str) -> tuple[Counter[str], list[bool]]:
    """Count the units of the numbers, and mark the cells that are not numbers."""
    units, wrong, format = Counter[str](), [], NumberFormat(decimal, thousands=True)
    for cell in cells:
        try:
            if not is_missing(cell):
                units[unit_of(cell, format)] += 1
            wrong.append(False)
        except (TypeError, ValueError, OverflowError):
            wrong.append(True)
    return units, wrong


def row_labels(table: Table, names: Iterable[str], formats: Mapping[str, NumberFormat]) -> dict[str, str]:
    """Columns that only number or name the rows, each with the reason."""
    found = {}
    for name in names:
        if name in formats:
            values = formats[name].numbers(table.columns[name])[0]
            named = LABEL.fullmatch(name) or CAMEL_LABEL.fullmatch(name)
            whole = np.isfinite(values).all() and (values == np.round(values)).all()
            if named and whole and len(values) > 1 and (np.diff(np.sort(values)) == 1).all():
                found[name] = "it counts the rows"
        elif table.columns[name].dtype.kind == "O":
            texts = as_texts(table.columns[name]).tolist()
            differ = len(texts) >= FEWEST_LABELS and all(texts) and len(set(texts)) == len(texts)
            if differ and not all(map(looks_like_date, texts)):
                found[name] = "every row has a different text"
    return found


def quoted(name: str) -> str:
    """A column name as an argument of a command, quoted if needed."""
    return name if re.fullmatch(r"[\w.-]+", name) else f"'{name}'"
