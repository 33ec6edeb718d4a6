"""Encoding of table columns as inputs of a model: numbers, texts and dates. A learned column is plain data."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from lastlayer._internal import checked
from lastlayer.data.scaling import LARGEST_TARGET
from lastlayer.errors import InputError, check_choice
from lastlayer.tables.cells import PERIODS, NumberFormat, as_texts, calendar, dates, days
from lastlayer.tables.files import Table
from lastlayer.tables.numbers import plain

MOST_CATEGORIES = 50
PERIODS_SEEN = 2
"""A calendar part becomes an input if the training rows cover at least this many of its periods."""
PLAIN = NumberFormat()
SECOND = 1 / 86_400
"""One second in days: ranges of dates are stored to the second."""
ADVICE = 'fix or remove these rows, or fit with --impute median (in Python: impute="median") to fill them'


@dataclass
class Problems:
    """Collects all problems of a table, to report them in one error."""

    found: list[str] = field(default_factory=list)

    @contextmanager
    def collected(self) -> Iterator[None]:
        try:
            yield
        except InputError as error:
            self.found.append(str(error))

    def check(self) -> None:
        if len(self.found) > 1:
            raise InputError("\n  - ".join([f"the table has {len(self.found)} problems:", *self.found]))
        if self.found:
            raise InputError(self.found[0])


def finite_numbers(
    name: str,
    table: Table,
    *,
    format: NumberFormat = PLAIN,
    fill: float | None = None,
    what: str = "the model needs",
    advice: str = ADVICE,
) -> Float[ndarray, " m"]:
    """Read a column of finite numbers; missing values are replaced by `fill`, or rejected with advice if it is None."""
    cells = table.cells(name, what)
    format = format if table.decimal == "auto" else replace(format, decimal=table.decimal)
    values, wrong = format.numbers(cells)
    if wrong.any():
        i = int(wrong.argmax())
        reason = "lastlayer does regression: its targets are numbers" if what == "target" else "fix it"
        others = f" ({int(wrong.sum()) - 1} more rows are affected)" if wrong.sum() > 1 else ""
        raise InputError(
            f"column {name!r} must be a number, but row {table.row(i)} has {shortened(cells[i])}{others}: "
            f"{_misfit(cells[i], format) or reason}"
        )
    values = _complete(name, table, values, np.isnan(values), fill, advice)
    if (large := np.abs(values) > LARGEST_TARGET).any():
        raise InputError(
            f"column {name!r} is infinite, or larger than {LARGEST_TARGET:g}, in {large.sum()} rows "
            f"(first: row {table.row(large.argmax())}): fix them, or use another unit for the column"
        )
    return values


def _misfit(cell: Any, learned: NumberFormat) -> str:
    """Explain why a cell that looks like a number is not valid in this column; "" if it is not a number at all."""
    if not isinstance(cell, str):
        return ""
    try:
        unit = learned.split(cell)[1]
        if unit and learned.unit:
            return f"the model was fitted with this column in {learned.unit}, not in {unit}; convert the cell"
        if learned.unit:
            return f"every number of this column had the unit {learned.unit} in training; add it here"
        return f"the numbers of this column had no unit in training; remove {unit!r} if it is the same unit"
    except ValueError:
        pass
    for decimal in ".,":
        try:
            replace(learned, decimal=decimal, thousands=True).split(cell)
        except ValueError:
            continue
        sign = "comma" if learned.decimal == "," else "point"
        return (
            f"in training this column had a decimal {sign}{'' if learned.thousands else ', no thousands separators'}; "
            "write it that way, or give the decimal sign of this file, such as --decimal ','"
        )
    return ""


def whole_texts(name: str, table: Table, *, fill: str | None) -> ndarray:
    """Read a column of texts; missing values are replaced by `fill`, or rejected if it is None."""
    texts = as_texts(table.cells(name, "the model needs"))
    return _complete(name, table, texts, texts == "", fill)


def whole_dates(name: str, table: Table, order: str, *, fill: str | None) -> Float[ndarray, " m"]:
    """Read a column of dates as days since 1970; missing values are replaced by `fill`, or rejected if it is None."""
    cells = table.cells(name, "the model needs")
    times, wrong = dates(cells, order)
    if wrong.any():
        i = int(wrong.argmax())
        raise InputError(
            f"column {name!r} must be a date or time, but row {table.row(i)} has {shortened(cells[i])}: write it as in "
            "the training table, or as 2024-12-31 or 2024-12-31 23:59"
        )
    return days(_complete(name, table, times, np.isnat(times), None if fill is None else np.datetime64(fill, "us")))


def _complete(
    name: str, table: Table, values: ndarray, missing: Bool[ndarray, " m"], fill: Any, advice: str = ADVICE
) -> ndarray:
    """The values with missing ones replaced by `fill`, or rejected with advice if it is None."""
    if fill is None and missing.any():
        row = table.row(missing.argmax())
        raise InputError(f"column {name!r} has {missing.sum()} missing values (first: row {row}): {advice}")
    return values if fill is None else np.where(missing, fill, values)


def shortened(cell: Any) -> str:
    """A cell for use in a message: quoted, without control characters, at most 40 characters long."""
    return repr(cell) if len(repr(cell)) <= 40 else repr(cell)[:40] + "..."


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers: one input. Columns of other kinds have the same methods."""

    kind: ClassVar[str] = "number"
    name: str
    low: float
    high: float
    fill: float
    """Median of the training rows; of texts, the most frequent one."""
    format: NumberFormat = PLAIN

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"the range of column {self.name!r} is from {self.low} to {self.high}")

    @classmethod
    def learn(cls, name: str, table: Table, impute: bool, format: NumberFormat = PLAIN) -> "NumberColumn":
        values = finite_numbers(name, table, format=format, fill=math.nan if impute else None)
        low, high, fill = (float(of(values)) for of in (np.nanmin, np.nanmax, np.nanmedian))
        return cls(name, low, high, fill, format)

    @property
    def features(self) -> list[str]:
        return [self.name]

    @property
    def note(self) -> str:
        """How the cells are read, as a sentence for the user; "" if that needs no explanation."""
        return f"column {self.name!r} is read as numbers {self.format}" if str(self.format) else ""

    def read(self, table: Table, impute: bool) -> ndarray:
        return finite_numbers(self.name, table, format=self.format, fill=self.fill if impute else None)

    def of_rows(self, values: ndarray) -> "NumberColumn":
        return replace(self, low=float(values.min()), high=float(values.max()))

    def outside(self, values: ndarray) -> Bool[ndarray, " m"]:
        """Mask of values outside the training range, or of texts that no training row had."""
        return (values < self.low) | (values > self.high)

    def encode(self, values: ndarray) -> Float[ndarray, "m k"]:
        return values[:, None]

    def __str__(self) -> str:
        return f"{plain(self.low)} to {plain(self.high)}{f' {self.format.unit}' if self.format.unit else ''}"


@dataclass(frozen=True)
class TextColumn:
    """A column of categories: one 0/1 input per category."""

    kind: ClassVar[str] = "text"
    note: ClassVar[str] = ""
    name: str
    categories: tuple[str, ...]
    fill: str

    def __post_init__(self) -> None:
        if len(set(self.categories)) < len(self.categories) or self.fill not in self.categories:
            raise ValueError(
                f"the texts of column {self.name!r} are {self}, and missing ones are filled with {self.fill!r}"
            )

    @classmethod
    def learn(cls, name: str, table: Table, impute: bool) -> "TextColumn":
        texts = whole_texts(name, table, fill="" if impute else None)
        counts = Counter(texts[texts != ""].tolist())
        if not counts:
            raise InputError(f"column {name!r} is empty: exclude it with --drop")
        if len(counts) > min(MOST_CATEGORIES, max(2, len(texts) // 2)):
            raise InputError(
                f"column {name!r} has {len(counts)} different texts in {len(texts)} rows (such as "
                f"{shortened(texts[0])}): too many to learn from. Exclude it with --drop, or group the texts; the "
                f"limit is {MOST_CATEGORIES}, and half the number of rows"
            )
        return cls(name, tuple(sorted(counts)), counts.most_common(1)[0][0])

    @property
    def features(self) -> list[str]:
        return [f"{self.name}={category}" for category in self.categories]

    def read(self, table: Table, impute: bool) -> ndarray:
        return whole_texts(self.name, table, fill=self.fill if impute else None)

    def outside(self, values: ndarray) -> Bool[ndarray, " m"]:
        return ~np.isin(values.astype(str), self.categories)

    def encode(self, values: ndarray) -> Float[ndarray, "m k"]:
        return (values[:, None] == np.array(self.categories, dtype=object)).astype(float)

    def __str__(self) -> str:
        shown = ", ".join(self.categories[:6])
        return f"{shown}, ... ({len(self.categories)})" if len(self.categories) > 6 else shown


@dataclass(frozen=True)
class DateColumn:
    """A column of dates or times: days since 1970, and calendar parts as sine and cosine."""

    kind: ClassVar[str] = "date"
    name: str
    order: str
    parts: tuple[str, ...]
    low: str
    high: str
    fill: str
    """Median of the training rows; `low`, `high` and `fill` are in ISO 8601, to the second."""

    def __post_init__(self) -> None:
        check_choice("order", self.order, ("ymd", "dmy", "mdy", "time"))
        for part in self.parts:
            check_choice("part", part, ("days", *PERIODS))
        for end in (self.low, self.high, self.fill):
            np.datetime64(end, "s")

    @classmethod
    def learn(cls, name: str, table: Table, impute: bool, order: str) -> "DateColumn":
        since = whole_dates(name, table, order, fill="NaT" if impute else None)
        since = np.sort(since[~np.isnan(since)])
        parts = ["hour"] if order == "time" else ["days"]
        if order != "time":
            varies = {part: np.ptp(calendar(since, [part]), axis=0).max() > 1e-9 for part in PERIODS}
            covered = since[-1] - since[0] + (since % 1 == 0).all()  # the last day counts as a whole
            parts += [part for part, days in PERIODS.items() if varies[part] and covered >= PERIODS_SEEN * days]
        return cls(name, order, tuple(parts), *(_iso(since[i]) for i in (0, -1, len(since) // 2)))

    @property
    def features(self) -> list[str]:
        waves = [f"{self.name} ({part}, {of})" for part in self.parts if part != "days" for of in ("sine", "cosine")]
        return ([f"{self.name} (days)"] if "days" in self.parts else []) + waves

    @property
    def note(self) -> str:
        words = {"days": "days", "hour": "time of the day", "weekday": "day of the week", "season": "day of the year"}
        written = {"dmy": ", day before month", "mdy": ", month before day"}.get(self.order, "")
        what, inputs = "times" if self.order == "time" else "dates", ", ".join(words[part] for part in self.parts)
        return f"column {self.name!r} is read as {what}{written}; inputs: {inputs}"

    def read(self, table: Table, impute: bool) -> ndarray:
        return whole_dates(self.name, table, self.order, fill=self.fill if impute else None)

    def of_rows(self, values: ndarray) -> "DateColumn":
        return replace(self, low=_iso(values.min()), high=_iso(values.max()))

    def outside(self, values: ndarray) -> Bool[ndarray, " m"]:
        low, high = days(np.array([self.low, self.high], dtype="datetime64[us]"))
        return (values < low - SECOND) | (values > high + SECOND)

    def encode(self, values: ndarray) -> Float[ndarray, "m k"]:
        return calendar(values, self.parts)

    def __str__(self) -> str:
        if self.order == "time":
            return f"{self.low[11:16]} to {self.high[11:16]}"
        short = lambda text: text.removesuffix("T00:00:00").replace("T", " ")
        return f"{short(self.low)} to {short(self.high)}"


Column: TypeAlias = NumberColumn | TextColumn | DateColumn
KINDS: dict[str, type[Column]] = {kind.kind: kind for kind in (NumberColumn, TextColumn, DateColumn)}


def column_from_json(saved: dict[str, Any]) -> Column:
    """Read a column from JSON; raise KeyError, TypeError or ValueError if it is invalid."""
    return checked.instance(KINDS[saved["kind"]], {name: value for name, value in saved.items() if name != "kind"})


def _iso(since: float) -> str:
    """A date in ISO 8601, to the second, from days since 1970."""
    return str(np.datetime64(math.floor(since * 86_400 + 1e-3), "s"))
