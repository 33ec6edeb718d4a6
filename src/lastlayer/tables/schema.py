"""From the columns of a table to the inputs of a model, the same way in fit and ever after. It is plain data: JSON."""

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from lastlayer.errors import InputError, check_choice
from lastlayer.tables.files import Table
from lastlayer.tables.numbers import plain

MOST_CATEGORIES = 50
IMPUTE = ("median",)
UNKNOWN = ("error", "warn")
MISSING = frozenset(["", "na", "n/a", "#n/a", "nan", "null", "none"])
"""In a column of numbers, in capitals or not; in one of texts only an empty cell is missing: "NA" may be a country."""
DAY = r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
TIME = r"\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?"
DATE = re.compile(rf"({DAY})([T ]+{TIME}.*)?|{TIME}")
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
LARGEST = 1e150
"""The square of a larger number overflows."""
ADVICE = "fix or leave out these rows, or fit with --impute median to fill them"


def as_numbers(cells: ndarray) -> tuple[Float[ndarray, " m"], Bool[ndarray, " m"]]:
    """The cells as numbers, NaN where one is missing, and which of them are neither."""
    values, wrong = np.full(len(cells), math.nan), np.zeros(len(cells), dtype=bool)
    try:
        if cells.dtype.kind == "f" or "_" not in "".join(cells.tolist()):  # Python reads 1_0 as ten
            return cells.astype(float), wrong
    except (TypeError, ValueError):
        pass  # cells of several kinds, missing or wrong ones: one by one
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


def finite_numbers(
    name: str, table: Table, *, fill: float | None = None, what: str = "the model needs", advice: str = ADVICE
) -> Float[ndarray, " m"]:
    """A column of finite numbers; missing ones are filled, or refused with advice if there is nothing to fill in."""
    cells = table.cells(name, what)
    values, wrong = as_numbers(cells)
    if wrong.any():
        i = wrong.argmax()
        reason = "lastlayer does regression, its targets are numbers" if what == "target" else "fix it"
        raise InputError(
            f"column {name!r} must be a number, and row {table.row(i)} has {shortened(cells[i])}: {reason}"
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


def whole_texts(name: str, table: Table, *, fill: str | None) -> ndarray:
    """A column of texts; missing ones are filled, or refused if there is nothing to fill in."""
    texts = as_texts(table.cells(name, "the model needs"))
    if fill is None:
        _refuse_missing(name, table, texts == "", ADVICE)
    return np.where(texts == "", fill or "", texts)


def _refuse_missing(name: str, table: Table, missing: Bool[ndarray, " m"], advice: str) -> None:
    if missing.any():
        row = table.row(missing.argmax())
        raise InputError(f"column {name!r} has {missing.sum()} missing values (first: row {row}): {advice}")


def holds_numbers(name: str, table: Table) -> bool:
    """Whether a column holds numbers; dates, and numbers mixed with texts, are refused with advice."""
    cells = table.columns[name]
    values, wrong = as_numbers(cells)
    present = int(np.isfinite(values).sum())
    if not wrong.any() and (present or np.isinf(values).any()):
        return True
    quoted = name if re.fullmatch(r"[\w.-]+", name) else f"'{name}'"
    texts = [text for text in as_texts(cells) if text]
    if not texts:
        raise InputError(f"column {name!r} is empty: leave it out with --drop {quoted}")
    if all(DATE.fullmatch(text) for text in texts):
        raise InputError(
            f"column {name!r} holds dates or times (such as {texts[0]!r}): a network cannot use them as they stand. "
            "Turn them into numbers that matter, such as hours since the start, the hour of the day or the month, or "
            f"leave the column out with --drop {quoted}"
        )
    commas = {text for text in texts if DECIMAL_COMMA.fullmatch(text)}
    others = np.array([text for text in texts if text not in commas], dtype=object)
    if commas and not as_numbers(others)[1].any():
        raise InputError(
            f"column {name!r} has numbers with a decimal comma (such as {min(commas)!r}): write them with a point"
        )
    if present > 0.5 * len(cells):
        i = wrong.argmax()
        raise InputError(
            f"column {name!r} holds numbers but for {wrong.sum()} of {len(cells)} cells (first: row {table.row(i)}, "
            f"{shortened(cells[i])}): fix these cells, or if the numbers are codes, say so with --text {quoted}"
        )
    return False


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

    @classmethod
    def learn(cls, name: str, table: Table, impute: bool) -> "NumberColumn":
        finite_numbers(name, table, fill=0.0 if impute else None)
        values = as_numbers(table.columns[name])[0]
        return cls(name, *(float(of(values)) for of in (np.nanmin, np.nanmax, np.nanmedian)))

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "NumberColumn":
        return cls(str(saved["name"]), *(float(saved[word]) for word in ("low", "high", "fill")))

    @property
    def features(self) -> list[str]:
        return [self.name]

    def read(self, table: Table, impute: bool) -> ndarray:
        return finite_numbers(self.name, table, fill=self.fill if impute else None)

    def outside(self, values: ndarray) -> Bool[ndarray, " m"]:
        return (values < self.low) | (values > self.high)

    def encode(self, values: ndarray) -> Float[ndarray, "m k"]:
        return values[:, None]

    def widened(self, values: ndarray) -> "NumberColumn":
        return replace(self, low=min(self.low, float(values.min())), high=max(self.high, float(values.max())))

    def __str__(self) -> str:
        return f"{plain(self.low)} to {plain(self.high)}"


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
        return cls(str(saved["name"]), tuple(map(str, saved["categories"])), str(saved["fill"]))

    @property
    def features(self) -> list[str]:
        return [f"{self.name}={category}" for category in self.categories]

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


Column: TypeAlias = NumberColumn | TextColumn
KINDS: dict[str, type[Column]] = {kind.kind: kind for kind in (NumberColumn, TextColumn)}


@dataclass(frozen=True)
class Encoded:
    """Rows as a model wants them, and what was strange about them."""

    X: Float[ndarray, "m d"]
    outside: Bool[ndarray, "m c"]
    """For every column: whether the row leaves the range of the training rows, or has a text that they did not."""
    unknown: dict[str, Counter[str]]
    """Texts that no training row had, and how often."""


@dataclass(frozen=True)
class Schema:
    """The inputs and targets of a model, by the names of their columns."""

    columns: tuple[Column, ...]
    targets: tuple[str, ...]
    impute: bool
    """Whether missing cells are filled."""

    @classmethod
    def infer(
        cls,
        table: Table,
        targets: Sequence[str],
        *,
        drop: Collection[str] = (),
        text: Collection[str] = (),
        impute: bool = False,
    ) -> "Schema":
        """Look at the training table; what cannot be used is refused with advice."""
        for word, asked in (("--target", targets), ("--drop", drop), ("--text", text)):
            for name in asked:
                table.cells(name, word)
        if len(set(targets)) < len(targets) or not targets:
            raise InputError(f"--target {','.join(targets)!r} must name one or more different columns")
        for name in targets:
            if name in drop or name in text:
                raise InputError(f"column {name!r} is a target: it can be neither dropped nor text")
        names = [name for name in table.columns if name not in {*targets, *drop}]
        if not names:
            raise InputError(f"no column is left to predict {', '.join(targets)} from: the table has {table}")
        kinds = {name: TextColumn if name in text or not holds_numbers(name, table) else NumberColumn for name in names}
        columns = tuple(kind.learn(name, table, impute) for name, kind in kinds.items())
        schema = cls(columns, tuple(targets), impute)
        for name, column in zip(targets, schema.targets_of(table, partly=True).T, strict=True):
            values = column[~np.isnan(column)]
            if not len(values):
                raise InputError(f"target {name!r} is missing in every row: there is nothing to learn")
            if (values == values[0]).all():
                raise InputError(f"target {name!r} is {values[0]:g} in every row: there is nothing to learn")
            if np.ptp(values) < 1 / LARGEST:
                raise InputError(f"target {name!r} differs by less than {1 / LARGEST:g}: give it in another unit")
        return schema

    @property
    def features(self) -> list[str]:
        """Names of the model's inputs."""
        return [feature for column in self.columns for feature in column.features]

    def encode(self, table: Table, *, unknown: str = "error") -> Encoded:
        """Rows of a table as inputs. A text that no training row had is an error, or with "warn" none of the known."""
        check_choice("unknown", unknown, UNKNOWN)
        parts, outside, strange = [], [], {}
        for column in self.columns:
            values = column.read(table, self.impute)
            out = column.outside(values)
            parts.append(column.encode(values))
            outside.append(out)
            if isinstance(column, TextColumn) and out.any():
                strange[column.name] = Counter(values[out].tolist())
                if unknown == "error":
                    raise InputError(
                        f"column {column.name!r} has the text {shortened(values[out.argmax()])} in row "
                        f"{table.row(out.argmax())}, which no training row had ({column}): fix it, fit again with "
                        "such rows, or take --unknown warn to predict without knowing it"
                    )
        return Encoded(np.hstack(parts), np.stack(outside, 1), strange)

    def targets_of(
        self, table: Table, names: Sequence[str] | None = None, *, partly: bool = False
    ) -> Float[ndarray, "m q"]:
        """The targets of a table, all there and finite; `names` if they are called otherwise in it.

        `partly`: of several targets some may be missing (NaN), but not all of a row.
        """
        names = self.targets if names is None else names
        if len(names) != len(self.targets):
            raise InputError(f"the model has {len(self.targets)} targets, {', '.join(self.targets)}: name as many")
        advice = "leave these rows out: a target cannot be imputed"
        fill = math.nan if partly and len(names) > 1 else None
        y = np.stack([finite_numbers(name, table, fill=fill, what="target", advice=advice) for name in names], 1)
        empty = np.isnan(y).all(1)
        if empty.any():
            raise InputError(
                f"all targets are missing in {empty.sum()} rows (first: row {table.row(empty.argmax())}): leave these "
                "rows out"
            )
        return y

    def widened(self, table: Table) -> "Schema":
        """After more rows: their ranges belong to the training range."""
        return replace(self, columns=tuple(column.widened(column.read(table, self.impute)) for column in self.columns))

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"columns": [{"kind": column.kind, **asdict(column)} for column in self.columns]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Schema":
        """Raises KeyError, TypeError or ValueError if it is not the JSON of a schema."""
        columns = tuple(KINDS[saved["kind"]].from_json(saved) for saved in content["columns"])
        return cls(columns, tuple(map(str, content["targets"])), bool(content["impute"]))
