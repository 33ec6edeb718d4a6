"""Parsing of table cells as numbers, texts and dates. NumPy only: exported models contain a copy of this file."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy import ndarray

MISSING = frozenset(["", "na", "n/a", "#n/a", "nan", "null", "none", "-", "?"])
"""Missing values of a column of numbers or dates, in any case. In a column of texts only an empty cell is missing: "NA"
may be a country."""
PERCENT = "%"
SPACES = "\u00a0\u202f\u2009"
"""Spaces that spreadsheets use as thousands separators."""
CURRENCY = "$€£¥"
UNIT = rf"[^\W\d_]\S*(?: [^\W\d_]\S*)?|[°µ‰{PERCENT}{CURRENCY}]\S*"
TIME = r"(\d{1,2}):(\d{2})(?::(\d{2})(?:[.,](\d{1,6})\d*)?)?\s*([AaPp]\.?[Mm]\.?)?"
ZONE = r"\s*(?:Z|UTC|[+-]\d{2}:?\d{2})?"
YEAR_FIRST = re.compile(rf"(\d{{4}})[-/.](\d{{1,2}})[-/.](\d{{1,2}})(?:[T ]+{TIME}{ZONE})?")
YEAR_LAST = re.compile(rf"(\d{{1,2}})[-/.](\d{{1,2}})[-/.](\d{{4}}|\d{{2}})(?:[T ]+{TIME}{ZONE})?")
TIME_ALONE = re.compile(TIME)
DAY = np.timedelta64(1, "D")
FIRST_DAY = np.datetime64("1970-01-01", "us")
PERIODS = {"hour": 1.0, "weekday": 7.0, "season": 365.2425}
"""Calendar parts and their periods in days: time of day, day of the week, day of the year."""


def is_missing(cell: Any) -> bool:
    """Whether a cell of a column of numbers or dates is missing."""
    return cell is None or cell != cell or (isinstance(cell, str) and cell.strip().lower() in MISSING)


def as_text(cell: Any) -> str:
    if isinstance(cell, str):
        return cell.strip()
    if cell is None or cell != cell:
        return ""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def as_texts(cells: ndarray) -> ndarray:
    """The cells as texts without surrounding spaces; "" where a cell is missing."""
    return np.array([as_text(cell) for cell in cells], dtype=object)


@dataclass(frozen=True)
class NumberFormat:
    """The format of the numbers of a column."""

    decimal: str = "."
    thousands: bool = False
    """Whether the other one of point and comma separates thousands; spaces and apostrophes are always allowed."""
    unit: str = ""
    """Unit after each number, or currency sign before it."""

    def __post_init__(self) -> None:
        if self.decimal not in (".", ","):
            raise ValueError(f"decimal={self.decimal!r} is neither a point nor a comma")

    @property
    def other(self) -> str:
        return "," if self.decimal == "." else "."

    def numbers(self, cells: ndarray) -> tuple[ndarray, ndarray]:
        """Return the cells as numbers (NaN if missing), and a mask of cells that are neither numbers nor missing."""
        if cells.dtype.kind in "fiub":
            return cells.astype(float), np.zeros(len(cells), dtype=bool)
        if self == NumberFormat():
            try:
                if "_" not in "".join(cells.tolist()):  # Python reads 1_0 as ten
                    return cells.astype(float), np.zeros(len(cells), dtype=bool)
            except (TypeError, ValueError):
                pass  # mixed types, missing or invalid cells: parse one by one
        return _parsed(cells, self._number, np.full(len(cells), math.nan))

    def _number(self, cell: Any) -> float:
        number, unit = self.split(cell)
        if isinstance(cell, str) and unit != self.unit and (unit or self.unit == PERCENT):
            raise ValueError(cell)
        return number

    def split(self, cell: Any) -> tuple[float, str]:
        """Return the number of a cell and its unit; raise an error if the cell does not begin with a number."""
        if not isinstance(cell, str):
            return float(cell), ""
        text = cell.strip()
        try:
            if self.decimal == "." and "_" not in text:
                return float(text), ""
        except ValueError:
            pass
        found = self._pattern.fullmatch(text.replace("\u2212", "-"))
        if not found or (found["before"] and found["after"]):
            raise ValueError(cell)
        digits = re.sub(rf"[ '’{SPACES}{re.escape(self.other)}]", "", found["digits"])
        unit = found["before"] or found["after"] or ""
        return float(found["sign"] + digits + found["rest"].replace(self.decimal, ".")), unit

    @cached_property
    def _pattern(self) -> "re.Pattern[str]":
        between, point = self.other if self.thousands else "", re.escape(self.decimal)
        groups = "|".join(rf"[1-9]\d{{0,2}}(?:[{sign}]\d{{3}})+" for sign in (f" {SPACES}", "'’", between) if sign)
        number = rf"(?={point}?\d)(?P<digits>{groups}|\d*)(?P<rest>(?:{point}\d*)?(?:[eE][+-]?\d+)?)"
        return re.compile(rf"(?P<sign>[+-]?)\s*(?P<before>[{CURRENCY}])?\s*{number}\s*(?P<after>{UNIT})?")

    def __str__(self) -> str:
        words = [f"in {self.unit}"] if self.unit else []
        signs = "points" if self.other == "." else "commas"
        words += [f"with {signs} between thousands (1{self.other}234 is 1234)"] if self.thousands else []
        return " ".join(words)


def dates(cells: ndarray, order: str) -> tuple[ndarray, ndarray]:
    """Return the cells as dates (NaT if missing), and a mask of cells that are neither dates nor missing.

    Orders are "ymd", "dmy", "mdy", and "time" for times of day without a date.
    """
    if cells.dtype.kind == "M":
        return cells.astype("datetime64[us]"), np.zeros(len(cells), dtype=bool)
    date = lambda cell: np.datetime64(_iso(cell, order) if isinstance(cell, str) else cell, "us")
    return _parsed(cells, date, np.full(len(cells), "NaT", dtype="datetime64[us]"))


def _iso(cell: str, order: str) -> str:
    """Convert a cell to ISO 8601 without a time zone; raise ValueError if it is not a date."""
    text = cell.strip()
    if order == "time" and (found := TIME_ALONE.fullmatch(text)):
        return f"1970-01-01{_clock(*found.groups())}"
    if found := YEAR_FIRST.fullmatch(text):
        year, month, day, *time = found.groups()
    elif order in ("dmy", "mdy") and (found := YEAR_LAST.fullmatch(text)):
        day, month, year, *time = found.groups()
        day, month = (day, month) if order == "dmy" else (month, day)
        year = year if len(year) == 4 else f"{'20' if int(year) < 69 else '19'}{year}"
    else:
        raise ValueError(cell)
    return f"{year}-{int(month):02}-{int(day):02}{_clock(*time)}"


def _parsed(cells: ndarray, parse: Callable[[Any], Any], values: ndarray) -> tuple[ndarray, ndarray]:
    """Parse the cells that are not missing into `values`; return also a mask of those that cannot be parsed."""
    wrong = np.zeros(len(cells), dtype=bool)
    for i, cell in enumerate(cells):
        try:
            if not is_missing(cell):
                values[i] = parse(cell)
        except (TypeError, ValueError, OverflowError):
            wrong[i] = True
    return values, wrong


def _clock(hour: str | None, minute: str | None, second: str | None, part: str | None, half: str | None) -> str:
    if hour is None:
        return ""
    h = int(hour) if half is None else int(hour) % 12 + (12 if half[0] in "pP" else 0)
    return f"T{h:02}:{minute}:{second or '00'}.{part or '0'}"


def days(times: ndarray) -> ndarray:
    """Days since 1970-01-01, including the fraction of the day."""
    return np.asarray((times - FIRST_DAY) / DAY, dtype=float)


def place_in_period(since: ndarray, part: str) -> ndarray:
    """Position in a period, from 0 to 1: time of the day, day of the week, or time of the year."""
    if part == "season":
        times = FIRST_DAY + (since * 86_400e6).astype("timedelta64[us]")
        start = times.astype("datetime64[Y]")
        length = (start + 1).astype("datetime64[D]") - start.astype("datetime64[D]")
        return np.asarray((times - start.astype("datetime64[us]")) / length, dtype=float)
    return since % 1 if part == "hour" else np.floor(since) % 7 / 7


def calendar(since: ndarray, parts: Sequence[str]) -> ndarray:
    """Encode dates: "days" as a number, every other part as the sine and cosine of its position in the period."""
    columns = []
    for part in parts:
        angle = 2 * np.pi * place_in_period(since, part) if part in PERIODS else None
        columns += [since] if angle is None else [np.sin(angle), np.cos(angle)]
    return np.stack(columns, 1)
