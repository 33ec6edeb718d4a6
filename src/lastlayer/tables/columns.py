"""Columns of a table as inputs of a model: numbers, texts and dates. What is learned of one is plain data."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from lastlayer import checked
from lastlayer.errors import InputError, check_choice
from lastlayer.inputs import LARGEST_TARGET
from lastlayer.tables.cells import PERIODS, DateFormat, NumberFormat, as_texts, calendar, days
from lastlayer.tables.files import Table
from lastlayer.tables.numbers import plain

MOST_CATEGORIES = 50
LARGEST = LARGEST_TARGET
"""What a table may hold, inputs and targets alike."""
PERIODS_SEEN = 2
"""A calendar part is an input if the training rows cover so many of its periods."""
PLAIN = NumberFormat()
SECOND = 1 / 86_400
"""In days: ranges of dates are kept to the second."""
ADVICE = 'fix or leave out these rows, or fit with --impute median (in Python: impute="median") to fill them'


@dataclass
class Problems:
    """What is wrong with a table, all of it in one error."""

    found: list[str] = field(default_factory=list)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep an error for later."""
        try:
            yield
        except InputError as error:
            self.found.append(str(error))

    def check(self) -> None:
        """Raise the error, if there is one."""
        if len(self.found) > 1:
            raise InputError("\n  - ".join([f"the table has {len(self.found)} problems:", *self.found]))
        if self.found:
            raise InputError(self.found[0])


def finite_numbers(
    name: str,
    table: Table,
    *,
    format: NumberFormat | None = None,
    fill: float | None = None,
    what: str = "the model needs",
    advice: str = ADVICE,
) -> Float[ndarray, " m"]:
    """A column of finite numbers; missing ones are filled, or refused with advice if there is nothing to fill in."""
    format, cells = format or PLAIN, table.cells(name, what)
    format = format if table.decimal == "auto" else replace(format, decimal=table.decimal)
    values, wrong = format.numbers(cells)
    if wrong.any():
        i = int(wrong.argmax())
        reason = "lastlayer does regression, its targets are numbers" if what == "target" else "fix it"
        others = f", {int(wrong.sum()) - 1} more rows as well" if wrong.sum() > 1 else ""
        raise InputError(
            f"column {name!r} must be a number, and row {table.row(i)} has {shortened(cells[i])}{others}: "
            f"{_misfit(cells[i], format) or reason}"
        )
    if fill is None:
        _refuse_missing(name, table, np.isnan(values), advice)
    else:
        values = np.where(np.isnan(values), fill, values)
    if (large := np.abs(values) > LARGEST).any():
        raise InputError(
            f"column {name!r} is infinite, or beyond {LARGEST:g}, in {large.sum()} rows "
            f"(first: row {table.row(large.argmax())}): fix them, or give the column in another unit"
        )
    return values


def _misfit(cell: Any, learned: NumberFormat) -> str:
    """Why a cell that is a number to a person is none in this column; "" if it is none at all."""
    if not isinstance(cell, str):
        return ""
    try:
        unit = learned.split(cell)[1]
        if unit and learned.unit:
            return f"the model knows this column in {learned.unit}, not in {unit}; convert the cell"
        if learned.unit:
            return f"every number of this column had the sign {learned.unit}, write it here too"
        return (
            f"no number of this column had a unit when the model was fitted; take {unit!r} away if it is the same one"
        )
    except ValueError:
        pass
    for decimal in ".,":
        try:
            replace(learned, decimal=decimal, thousands=True).split(cell)
        except ValueError:
            continue
        sign = "comma" if learned.decimal == "," else "point"
        return (
            f"the model knows this column with a decimal {sign}{'' if learned.thousands else ', no thousands signs'}; "
            "write it so, or say how this file writes numbers, such as --decimal ','"
        )
    return ""


def whole_texts(name: str, table: Table, *, fill: str | None) -> ndarray:
    """A column of texts; missing ones are filled, or refused if there is nothing to fill in."""
    texts = as_texts(table.cells(name, "the model needs"))
    if fill is None:
        _refuse_missing(name, table, texts == "", ADVICE)
    return np.where(texts == "", fill or "", texts)


def whole_dates(name: str, table: Table, format: DateFormat, *, fill: str | None) -> Float[ndarray, " m"]:
    """A column of dates as days since 1970; missing ones are filled, or refused if there is nothing to fill in."""
    cells = table.cells(name, "the model needs")
    dates, wrong = format.dates(cells)
    if wrong.any():
        i = int(wrong.argmax())
        raise InputError(
            f"column {name!r} must be a date or time, and row {table.row(i)} has {shortened(cells[i])}: write it as in "
            "the training table, or as 2024-12-31 or 2024-12-31 23:59"
        )
    if fill is None:
        _refuse_missing(name, table, np.isnat(dates), ADVICE)
    else:
        dates = np.where(np.isnat(dates), np.datetime64(fill, "us"), dates)
    return days(dates)


def _refuse_missing(name: str, table: Table, missing: Bool[ndarray, " m"], advice: str) -> None:
    if missing.any():
        row = table.row(missing.argmax())
        raise InputError(f"column {name!r} has {missing.sum()} missing values (first: row {row}): {advice}")


def shortened(cell: Any) -> str:
    """A cell as it may stand in a message: quoted, no control characters, not too long."""
    return repr(cell) if len(repr(cell)) <= 40 else repr(cell)[:40] + "..."


@dataclass(frozen=True)
class NumberColumn:
    """An input that is a number."""

    kind: ClassVar[str] = "number"
    name: str
    low: float
    high: float
    fill: float
    """The median of the training rows."""
    format: NumberFormat = PLAIN

    @classmethod
    def learn(cls, name: str, table: Table, impute: bool, format: NumberFormat | None = None) -> "NumberColumn":
        format = format or PLAIN
        finite_numbers(name, table, format=format, fill=0.0 if impute else None)
        values = format.numbers(table.columns[name])[0]
        low, high, fill = (float(of(values)) for of in (np.nanmin, np.nanmax, np.nanmedian))
        return cls(name, low, high, fill, format)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "NumberColumn":
        low, high, fill = (checked.typed(word, saved[word], float) for word in ("low", "high", "fill"))
        column = cls(checked.typed("name", saved["name"], str), low, high, fill, format_from_json(saved["format"]))
        if not low <= high:
            raise ValueError(f"the range of column {column.name!r} is from {low} to {high}")
        return column

    @property
    def features(self) -> list[str]:
        return [self.name]

    @property
    def note(self) -> str:
        """What was done to its cells, in words; "" if they are plain numbers."""
        return f"column {self.name!r} is read as numbers {self.format}" if str(self.format) else ""

    def typical(self) -> ndarray:
        """A cell."""
        return np.array([self.fill])

    def read(self, table: Table, impute: bool) -> ndarray:
        return finite_numbers(self.name, table, format=self.format, fill=self.fill if impute else None)

    def of_rows(self, values: ndarray) -> "NumberColumn":
        """With the range of some rows."""
        return replace(self, low=float(values.min()), high=float(values.max()))

    def outside(self, values: ndarray) -> Bool[ndarray, " m"]:
        return (values < self.low) | (values > self.high)

    def encode(self, values: ndarray) -> Float[ndarray, "m k"]:
        return values[:, None]

    def widened(self, values: ndarray) -> "NumberColumn":
        new = self.of_rows(values)
        return replace(self, low=min(self.low, new.low), high=max(self.high, new.high))

    def __str__(self) -> str:
        return f"{plain(self.low)} to {plain(self.high)}{f' {self.format.unit}' if self.format.unit else ''}"


@dataclass(frozen=True)
class TextColumn:
    """An input that is one of several texts; each becomes a 0/1 input of its own."""

    kind: ClassVar[str] = "text"
    name: str
    categories: tuple[str, ...]
    fill: str
    """The most frequent of the training rows."""

    @classmethod
    def learn(cls, name: str, table: Table, impute: bool) -> "TextColumn":
        texts = whole_texts(name, table, fill="" if impute else None)
        counts = Counter(texts[texts != ""].tolist())
        if not counts:
            raise InputError(f"column {name!r} is empty: leave it out with --drop")
        if len(counts) > min(MOST_CATEGORIES, max(2, len(texts) // 2)):
            raise InputError(
                f"column {name!r} has {len(counts)} different texts in {len(texts)} rows (such as "
                f"{shortened(texts[0])}): too many to learn from. Leave it out with --drop, or group them; at most "
                f"{MOST_CATEGORIES}, and half as many as rows"
            )
        return cls(name, tuple(sorted(counts)), counts.most_common(1)[0][0])

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "TextColumn":
        column = checked.instance(cls, {name: value for name, value in saved.items() if name != "kind"})
        if len(set(column.categories)) < len(column.categories) or column.fill not in column.categories:
            raise ValueError(
                f"the texts of column {column.name!r} are {column}, and {column.fill!r} where one is missing"
            )
        return column

    @property
    def features(self) -> list[str]:
        return [f"{self.name}={category}" for category in self.categories]

    @property
    def note(self) -> str:
        return ""

    def typical(self) -> ndarray:
        return np.array([self.fill], dtype=object)

    def read(self, table: Table, impute: bool) -> ndarray:
        return whole_texts(self.name, table, fill=self.fill if impute else None)

    def outside(self, values: ndarray) -> Bool[ndarray, " m"]:
        return ~np.isin(values.astype(str), self.categories)

    def encode(self, values: ndarray) -> Float[ndarray, "m k"]:
        return (values[:, None] == np.array(self.categories, dtype=object)).astype(float)

    def widened(self, values: ndarray) -> "TextColumn":
        return self

    def __str__(self) -> str:
        shown = ", ".join(self.categories[:6])
        return f"{shown}, ... ({len(self.categories)})" if len(self.categories) > 6 else shown


@dataclass(frozen=True)
class DateColumn:
    """An input that is a date or a time: days since 1970 and calendar parts, each as sine and cosine.

    A part is an input if the training rows cover two of its periods, and differ in it. Of times alone: the hour.
    """

    kind: ClassVar[str] = "date"
    name: str
    order: str
    """How dates are written, see `DateFormat`."""
    parts: tuple[str, ...]
    low: str
    high: str
    fill: str
    """The median of the training rows; all three as in ISO 8601."""

    @classmethod
    def learn(cls, name: str, table: Table, impute: bool, format: DateFormat) -> "DateColumn":
        whole_dates(name, table, format, fill="1970-01-01" if impute else None)
        dates = format.dates(table.columns[name])[0]
        known = np.sort(dates[~np.isnat(dates)])
        since = days(known)
        parts = ["hour"] if format.order == "time" else ["days"]
        if format.order != "time":
            varies = {part: np.ptp(calendar(since, [part]), axis=0).max() > 1e-9 for part in PERIODS}
            covered = since[-1] - since[0] + (since % 1 == 0).all()  # the last day counts as a whole
            parts += [part for part, days in PERIODS.items() if varies[part] and covered >= PERIODS_SEEN * days]
        ends = (str(known[i].astype("datetime64[s]")) for i in (0, -1, len(known) // 2))
        return cls(name, format.order, tuple(parts), *ends)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "DateColumn":
        parts = tuple(check_choice("part", part, ("days", *PERIODS)) for part in saved["parts"])
        ends = (str(np.datetime64(saved[word], "s")) for word in ("low", "high", "fill"))
        order = check_choice("order", saved["order"], ("ymd", "dmy", "mdy", "time"))
        return cls(checked.typed("name", saved["name"], str), order, parts, *ends)

    @property
    def features(self) -> list[str]:
        words: Callable[[str], list[str]] = lambda part: (
            [f"{self.name} (days)"] if part == "days" else [f"{self.name} ({part}, {of})" for of in ("sine", "cosine")]
        )
        return [feature for part in self.parts for feature in words(part)]

    @property
    def note(self) -> str:
        said = {"days": "days", "hour": "time of the day", "weekday": "day of the week", "season": "day of the year"}
        written = {"dmy": ", day before month", "mdy": ", month before day"}.get(self.order, "")
        what = "times" if self.order == "time" else "dates"
        return (
            f"column {self.name!r} is read as {what}{written}; inputs: {', '.join(said[part] for part in self.parts)}"
        )

    def typical(self) -> ndarray:
        return np.array([self.fill], dtype="datetime64[us]")

    def read(self, table: Table, impute: bool) -> ndarray:
        return whole_dates(self.name, table, DateFormat(self.order), fill=self.fill if impute else None)

    def of_rows(self, values: ndarray) -> "DateColumn":
        """With the range of some rows, to the second."""
        seconds = np.floor(np.array([values.min(), values.max()]) * 86_400 + 1e-3).astype("datetime64[s]")
        return replace(self, low=str(seconds[0]), high=str(seconds[1]))

    def outside(self, values: ndarray) -> Bool[ndarray, " m"]:
        low, high = days(np.array([self.low, self.high], dtype="datetime64[us]"))
        return (values < low - SECOND) | (values > high + SECOND)

    def encode(self, values: ndarray) -> Float[ndarray, "m k"]:
        return calendar(values, self.parts)

    def widened(self, values: ndarray) -> "DateColumn":
        new = self.of_rows(values)
        return replace(self, low=min(self.low, new.low), high=max(self.high, new.high))

    def __str__(self) -> str:
        if self.order == "time":
            return f"{self.low[11:16]} to {self.high[11:16]}"
        short = lambda text: text.removesuffix("T00:00:00").replace("T", " ")
        return f"{short(self.low)} to {short(self.high)}"


Column: TypeAlias = NumberColumn | TextColumn | DateColumn
KINDS: dict[str, type[Column]] = {kind.kind: kind for kind in (NumberColumn, TextColumn, DateColumn)}


def format_from_json(saved: dict[str, Any]) -> NumberFormat:
    """Raises KeyError, TypeError or ValueError if it is not the JSON of a format."""
    decimal = check_choice("decimal", saved["decimal"], (".", ","))
    thousands, unit = checked.typed("thousands", saved["thousands"], bool), checked.typed("unit", saved["unit"], str)
    return NumberFormat(decimal, thousands, unit)
