"""Inference of column types from a training table: numbers and their format, dates, texts, or row labels."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from shlex import quote

import numpy as np
from numpy import ndarray

from lastlayer.errors import InputError
from lastlayer.tables.cells import MISSING, TIME_ALONE, YEAR_FIRST, YEAR_LAST, NumberFormat, as_texts, dates, is_missing
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
    """Formats of the columns of numbers; where point and comma are both possible, the other columns decide."""
    signs = ".," if decimal == "auto" else (decimal, decimal)
    both = {name: [_format(table.columns[name], sign) for sign in signs] for name in names}
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
    split, units, grouped = NumberFormat(decimal, thousands=True), set[str](), False
    for i, unit in _units(cells, split):
        if unit is None or len(units | {unit, ""}) > 2:
            return None
        units.add(unit)
        grouped |= isinstance(cells[i], str) and split.other in cells[i].removesuffix(unit)
    return NumberFormat(decimal, grouped, max(units)) if units else None


def _units(cells: ndarray, format: NumberFormat) -> Iterator[tuple[int, str | None]]:
    """The unit of each number, None where a cell is not one; cells that are missing are left out."""
    for i, cell in enumerate(cells):
        if not is_missing(cell):
            try:
                yield i, format.split(cell)[1]
            except (TypeError, ValueError, OverflowError):
                yield i, None


def order_of_dates(name: str, cells: ndarray, *, order: str = "auto") -> str | None:
    """Order of the dates of a column; None if it does not contain dates."""
    if cells.dtype.kind == "M":
        return "ymd"
    texts = [text for text in as_texts(cells) if text.lower() not in MISSING]
    if not texts:
        return None
    if all(TIME_ALONE.fullmatch(text) for text in texts):
        found = "time"
    elif all(YEAR_FIRST.fullmatch(text) for text in texts):
        found = "ymd"
    elif all(YEAR_LAST.fullmatch(text) or YEAR_FIRST.fullmatch(text) for text in texts):
        days = [match.groups()[:2] for text in texts if (match := YEAR_LAST.fullmatch(text))]
        day_first, month_first = (any(int(pair[i]) > 12 for pair in days) for i in (0, 1))
        if order == "auto" and not day_first and not month_first and "." not in texts[0]:
            raise InputError(
                f"column {name!r} has dates such as {texts[0]!r}, and none of them shows whether day or month comes "
                "first: use --date-order dmy or mdy, or write them as 2024-12-31"
            )
        found = ("mdy" if month_first else "dmy") if order == "auto" else order
    else:
        return None
    wrong = dates(cells, found)[1]
    if wrong.any():
        i = int(wrong.argmax())
        raise InputError(
            f"column {name!r} contains dates, but {wrong.sum()} of {len(cells)} cells are not valid dates, such as "
            f"{shortened(cells[i])}: fix these cells, or exclude the column with --drop {quote(name)}"
        )
    return found


def refuse_mixed(name: str, table: Table) -> None:
    """Reject, with advice, a column that mixes numbers with other cells or has several units."""
    cells = table.columns[name]
    if not any(as_texts(cells)):
        raise InputError(f"column {name!r} is empty: exclude it with --drop {quote(name)}")
    read = [list(_units(cells, NumberFormat(decimal, thousands=True))) for decimal in ".,"]
    found = min(read, key=lambda each: sum(unit is None for _, unit in each))
    units = Counter(unit for _, unit in found if unit is not None)
    wrong = [i for i, unit in found if unit is None]
    if len(units) > 1 and not wrong and all(not unit or UNITS.fullmatch(unit) for unit in units):
        counted = ", ".join(f"{unit or 'no unit'} in {n} rows" for unit, n in units.most_common())
        raise InputError(f"column {name!r} has numbers in several units ({counted}): convert them to one")
    if wrong and len(units) <= 2 and units.total() > 0.5 * len(cells):
        raise InputError(
            f"column {name!r} contains numbers except in {len(wrong)} of {len(cells)} cells (first: row "
            f"{table.row(wrong[0])}, {shortened(cells[wrong[0]])}): fix these cells, or use "
            f"--text {quote(name)} if the numbers are codes"
        )


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
            kinds = (YEAR_FIRST, YEAR_LAST, TIME_ALONE)
            if differ and not all(any(kind.fullmatch(text) for kind in kinds) for text in texts):
                found[name] = "every row has a different text"
    return found
