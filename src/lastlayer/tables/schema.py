"""From the columns of a table to the inputs of a model, the same way in fit and ever after. It is plain data: JSON."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray
from sklearn.preprocessing import OneHotEncoder

from lastlayer.errors import InputError, choose
from lastlayer.tables.columns import as_numbers, as_texts, holds_numbers, shortened
from lastlayer.tables.reading import Table

MOST_CATEGORIES = 50
LARGEST = 1e150
"""Beyond it a square is no number any more."""
IMPUTE = ("median",)
UNKNOWN = ("error", "warn")


@dataclass(frozen=True)
class NumberColumn:
    """An input that is a number."""

    name: str
    low: float
    high: float
    fill: float
    """The median of the training rows."""

    @property
    def features(self) -> list[str]:
        return [self.name]

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class TextColumn:
    """An input that is one of several texts; each becomes a 0/1 input of its own."""

    name: str
    categories: tuple[str, ...]
    fill: str
    """The most frequent of the training rows."""

    @property
    def features(self) -> list[str]:
        return [f"{self.name}={category}" for category in self.categories]

    @cached_property
    def encoder(self) -> OneHotEncoder:
        categories = np.array(self.categories, dtype=object)
        encoder = OneHotEncoder(categories=[categories], handle_unknown="ignore", sparse_output=False)
        return encoder.fit(categories[:1, None])

    def __str__(self) -> str:
        shown = ", ".join(self.categories[:6])
        return f"{shown}, ... ({len(self.categories)})" if len(self.categories) > 6 else shown


Column: TypeAlias = NumberColumn | TextColumn


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
        for word, asked in (("target", targets), ("drop", drop), ("text", text)):
            for name in asked:
                check_column(name, table, f"--{word} ")
        if len(set(targets)) < len(targets) or not targets:
            raise InputError(f"--target {','.join(targets)!r} must name one or more different columns")
        for name in targets:
            if name in drop or name in text:
                raise InputError(f"column {name!r} is a target: it can be neither dropped nor text")
        names = [name for name in table.names if name not in {*targets, *drop}]
        if not names:
            raise InputError(f"no column is left to predict {', '.join(targets)} from: the table has {_list(table)}")
        columns = tuple(_column(name, table, name in text, impute) for name in names)
        schema = cls(columns, tuple(targets), impute)
        y = schema.targets_of(table)
        for name, values in zip(targets, y.T, strict=True):
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
        choose("unknown", unknown, UNKNOWN)
        parts, outside, strange = [], [], {}
        for column in self.columns:
            check_column(column.name, table, "the model needs ")
            if isinstance(column, NumberColumn):
                values = self._filled(column, table)
                parts.append(values[:, None])
                outside.append((values < column.low) | (values > column.high))
            else:
                texts = self._texts(column, table)
                new = ~np.isin(texts.astype(str), column.categories)
                if new.any():
                    strange[column.name] = Counter(texts[new].tolist())
                    if unknown == "error":
                        raise InputError(_unknown(column, table, texts, new))
                parts.append(column.encoder.transform(texts[:, None]))
                outside.append(new)
        return Encoded(np.hstack(parts), np.stack(outside, 1), strange)

    def targets_of(self, table: Table, names: Sequence[str] | None = None) -> Float[ndarray, "m q"]:
        """The targets of a table, all there and finite; `names` if they are called otherwise in it."""
        names = self.targets if names is None else names
        if len(names) != len(self.targets):
            raise InputError(f"the model has {len(self.targets)} targets, {', '.join(self.targets)}: name as many")
        parts = []
        for name in names:
            check_column(name, table, "target ")
            values, wrong = as_numbers(table.columns[name])
            if wrong.any():
                i = int(np.flatnonzero(wrong)[0])
                raise InputError(
                    f"target {name!r} is not a number in row {table.row(i)}: {shortened(table.columns[name][i])}; "
                    "lastlayer does regression, its targets are numbers"
                )
            _check_finite(name, values, table, "leave these rows out: a target cannot be imputed")
            parts.append(values)
        return np.stack(parts, 1)

    def widened(self, table: Table) -> "Schema":
        """After more rows: their ranges belong to the training range."""

        def column(old: Column) -> Column:
            if isinstance(old, TextColumn):
                return old
            values = self._filled(old, table)
            return replace(old, low=min(old.low, float(values.min())), high=max(old.high, float(values.max())))

        return replace(self, columns=tuple(column(old) for old in self.columns))

    def as_json(self) -> dict[str, Any]:
        return {
            "columns": [{"kind": KINDS[type(column)], **asdict(column)} for column in self.columns],
            "targets": list(self.targets),
            "impute": self.impute,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Schema":
        """Raises KeyError, TypeError or ValueError if it is not the JSON of a schema."""
        columns: list[Column] = []
        for saved in content["columns"]:
            name = str(saved["name"])
            if saved["kind"] == "number":
                columns.append(NumberColumn(name, *(float(saved[word]) for word in ("low", "high", "fill"))))
            elif saved["kind"] == "text":
                columns.append(TextColumn(name, tuple(str(c) for c in saved["categories"]), str(saved["fill"])))
            else:
                raise ValueError(f"column {name!r} is of kind {saved['kind']!r}")
        return cls(tuple(columns), tuple(str(name) for name in content["targets"]), bool(content["impute"]))

    def _filled(self, column: NumberColumn, table: Table) -> Float[ndarray, " m"]:
        values, wrong = as_numbers(table.columns[column.name])
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            cell = shortened(table.columns[column.name][i])
            raise InputError(f"column {column.name!r} must be a number, and row {table.row(i)} has {cell}: mend it")
        if self.impute:
            values = np.where(np.isnan(values), column.fill, values)
        _check_finite(column.name, values, table, ADVICE)
        return values

    def _texts(self, column: TextColumn, table: Table) -> ndarray:
        texts = as_texts(table.columns[column.name])
        empty = texts == ""
        if empty.any() and not self.impute:
            raise InputError(_missing(column.name, np.flatnonzero(empty), table, ADVICE))
        return np.where(empty, column.fill, texts)


KINDS = {NumberColumn: "number", TextColumn: "text"}
ADVICE = "mend or leave out these rows, or fit with --impute median to fill them"


def _column(name: str, table: Table, is_text: bool, impute: bool) -> Column:
    if not is_text and holds_numbers(name, table):
        values = as_numbers(table.columns[name])[0]
        if not impute:
            _check_finite(name, values, table, ADVICE)
        present = values[~np.isnan(values)]
        _check_finite(name, present, table, "mend or leave out these rows")
        return NumberColumn(name, float(present.min()), float(present.max()), float(np.median(present)))
    texts = as_texts(table.columns[name])
    empty = np.flatnonzero(texts == "")
    if len(empty) and not impute:
        raise InputError(_missing(name, empty, table, ADVICE))
    counts = Counter(texts[texts != ""].tolist())
    if not counts:
        raise InputError(f"column {name!r} is empty: leave it out with --drop")
    if len(counts) > min(MOST_CATEGORIES, max(2, len(texts) // 2)):
        raise InputError(
            f"column {name!r} has {len(counts)} different texts in {len(texts)} rows (such as "
            f"{shortened(texts[0])}): too many to learn from. Leave it out with --drop, or group them; at most "
            f"{MOST_CATEGORIES}, and half as many as rows"
        )
    return TextColumn(name, tuple(sorted(counts)), counts.most_common(1)[0][0])


def check_column(name: str, table: Table, what: str) -> None:
    if name not in table.columns:
        choose_from = {known.lower(): known for known in table.names}
        near = choose_from.get(name.strip().lower())
        hint = f"; did you mean {near!r}?" if near else ""
        raise InputError(f"{what}column {name!r} is not in the table: it has {_list(table)}{hint}")


def _list(table: Table) -> str:
    names = [repr(name) for name in table.names]
    return ", ".join(names[:20]) + (f", ... ({len(names)} columns)" if len(names) > 20 else "")


def _check_finite(name: str, values: ndarray, table: Table, advice: str) -> None:
    if len(nan := np.flatnonzero(np.isnan(values))):
        raise InputError(_missing(name, nan, table, advice))
    if len(large := np.flatnonzero(np.abs(values) > LARGEST)):
        raise InputError(
            f"column {name!r} is infinite, or beyond {LARGEST:g}, in {len(large)} rows "
            f"(first: row {table.row(large[0])}): mend them, or give the column in another unit"
        )


def _missing(name: str, rows: ndarray, table: Table, advice: str) -> str:
    return f"column {name!r} has {len(rows)} missing values (first: row {table.row(rows[0])}): {advice}"


def _unknown(column: TextColumn, table: Table, texts: ndarray, new: ndarray) -> str:
    i = int(np.flatnonzero(new)[0])
    return (
        f"column {column.name!r} has the text {shortened(texts[i])} in row {table.row(i)}, which no training row had "
        f"({column}): mend it, fit again with such rows, or take --unknown warn to predict without knowing it"
    )
