"""The map from the columns of a table to the inputs of a model, the same in training and prediction; plain JSON."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from lastlayer._internal import checked
from lastlayer.data.scaling import LARGEST_TARGET
from lastlayer.errors import InputError, check_choice
from lastlayer.tables.cells import NumberFormat
from lastlayer.tables.columns import (
    PLAIN,
    Column,
    DateColumn,
    NumberColumn,
    Problems,
    TextColumn,
    column_from_json,
    finite_numbers,
    shortened,
)
from lastlayer.tables.files import DECIMALS, Table
from lastlayer.tables.inference import number_formats, order_of_dates, refuse_mixed, row_labels

IMPUTE = ("median",)
UNKNOWN = ("error", "warn")
DATE_ORDERS = ("auto", "dmy", "mdy")


@dataclass(frozen=True)
class Encoded:
    """Encoded rows, and what is unusual about them."""

    X: Float[ndarray, "m d"]
    outside: Bool[ndarray, "m c"]
    """For each column: whether the row is outside the training range, or has a text that no training row had."""
    unknown: dict[str, Counter[str]]
    """Texts that no training row had, with their counts, by column."""


@dataclass(frozen=True)
class Schema:
    """The inputs and targets of a model, by the names of their columns."""

    columns: tuple[Column, ...]
    targets: tuple[str, ...]
    impute: bool
    target_formats: tuple[NumberFormat, ...] = (PLAIN,)
    dropped: dict[str, str] = field(default_factory=dict)
    """Columns that were excluded automatically, and why."""

    @classmethod
    def infer(
        cls,
        table: Table,
        targets: Sequence[str],
        *,
        drop: Collection[str] = (),
        keep: Collection[str] = (),
        text: Collection[str] = (),
        impute: bool = False,
        decimal: str = "auto",
        date_order: str = "auto",
        problems: Problems | None = None,
    ) -> "Schema":
        """Infer the schema from the training table; all problems are reported in one error, with advice."""
        problems = problems or Problems()
        try:
            check_choice("decimal", decimal, DECIMALS)
            check_choice("date_order", date_order, DATE_ORDERS)
            _check_names(table, {"--target": targets, "--drop": drop, "--keep": keep, "--text": text})
        except InputError as error:
            problems.found.append(str(error))
            problems.check()
        asked = [name for name in table.columns if name not in {*targets, *drop}]
        formats = number_formats(table, [name for name in (*targets, *asked) if name not in text], decimal=decimal)
        dropped = row_labels(table, [name for name in asked if name not in {*keep, *text}], formats)
        columns = list[Column]()
        for name in [name for name in asked if name not in dropped]:
            with problems.collected():
                if name in formats:
                    columns.append(NumberColumn.learn(name, table, impute, formats[name]))
                elif name not in text and (order := order_of_dates(name, table.columns[name], order=date_order)):
                    columns.append(DateColumn.learn(name, table, impute, order))
                else:
                    if name not in text:
                        refuse_mixed(name, table)
                    columns.append(TextColumn.learn(name, table, impute))
        if not asked or (not columns and not problems.found):
            left_out = "".join(f"; {name!r} was excluded, since {why}" for name, why in dropped.items())
            problems.found.append(
                f"no column is left to predict {', '.join(targets)} from: the table has {table}{left_out}"
            )
        target_formats = tuple(formats.get(name, PLAIN) for name in targets)
        schema = cls(tuple(columns), tuple(targets), impute, target_formats, dropped)
        with problems.collected():
            _check_targets(schema, schema.targets_of(table, partly=True))
        problems.check()
        return schema

    @property
    def notes(self) -> list[str]:
        """What a user should know about how the columns are read, one line each."""
        lines = [f"column {name!r} is excluded: {why}; use --keep if it matters" for name, why in self.dropped.items()]
        lines += ["numbers have a decimal comma"] if self.decimal == "," else []
        lines += [column.note for column in self.columns if column.note]
        formats = zip(self.targets, self.target_formats, strict=True)
        return lines + [f"target {name!r} is read as numbers {format}" for name, format in formats if str(format)]

    @property
    def decimal(self) -> str:
        formats = [column.format for column in self.columns if isinstance(column, NumberColumn)]
        return "," if "," in {format.decimal for format in (*formats, *self.target_formats)} else "."

    @property
    def features(self) -> list[str]:
        return [feature for column in self.columns for feature in column.features]

    def encode(self, table: Table, *, unknown: str = "error") -> Encoded:
        """Encode rows. A text that no training row had is an error, or with "warn", no known category."""
        check_choice("unknown", unknown, UNKNOWN)
        parts, outside, strange, problems = [], [], dict[str, Counter[str]](), Problems()
        for column in self.columns:
            with problems.collected():
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
                            'such rows, or predict anyway with --unknown warn (in Python: unknown="warn")'
                        )
        problems.check()
        return Encoded(np.hstack(parts), np.stack(outside, 1), strange)

    def targets_of(
        self, table: Table, names: Sequence[str] | None = None, *, partly: bool = False
    ) -> Float[ndarray, "m q"]:
        names = self.targets if names is None else names
        if len(names) != len(self.targets):
            raise InputError(
                f"the model has {len(self.targets)} targets, {', '.join(self.targets)}, but --target gives {len(names)}"
            )
        advice = "remove these rows: a target cannot be imputed"
        fill, problems, read = math.nan if partly and len(names) > 1 else None, Problems(), list[ndarray]()
        for name, format in zip(names, self.target_formats, strict=True):
            with problems.collected():
                values = finite_numbers(name, table, format=format, fill=fill, what="target", advice=advice)
                read.append(values)
        problems.check()
        y = np.stack(read, 1)
        empty = np.isnan(y).all(1)
        if empty.any():
            first = table.row(empty.argmax())
            raise InputError(f"all targets are missing in {empty.sum()} rows (first: row {first}): remove these rows")
        return y

    def arrays(
        self, table: Table, names: Sequence[str] | None = None, *, unknown: str = "error", partly: bool = True
    ) -> tuple[Float[ndarray, "m d"], ndarray]:
        """Encode inputs and targets for a regressor; a single target is one-dimensional."""
        y = self.targets_of(table, names, partly=partly)
        return self.encode(table, unknown=unknown).X, y[:, 0] if y.shape[1] == 1 else y

    def widened(self, table: Table) -> "Schema":
        """The schema whose ranges include these rows; they have no new texts."""

        def wider(column: Column) -> Column:
            if isinstance(column, TextColumn):
                return column
            new = column.of_rows(column.read(table, self.impute))
            ends: dict[str, Any] = {"low": min(column.low, new.low), "high": max(column.high, new.high)}
            return replace(column, **ends)

        return replace(self, columns=tuple(map(wider, self.columns)))

    def typical(self) -> Table:
        """A table of one row: medians of the training rows, or the most frequent texts."""
        return Table({column.name: np.array([column.fill], dtype=object) for column in self.columns})

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"columns": [{"kind": column.kind, **asdict(column)} for column in self.columns]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Schema":
        """Read a schema from JSON; raise KeyError, TypeError or ValueError if it is invalid."""
        columns = tuple(map(column_from_json, content["columns"]))
        formats = checked.typed("target_formats", content["target_formats"], tuple[NumberFormat, ...])
        dropped = {str(name): str(why) for name, why in content["dropped"].items()}
        targets = checked.typed("targets", content["targets"], tuple[str, ...])
        names = [column.name for column in columns] + list(targets)
        if len(set(names)) < len(names) or not columns or not targets or len(formats) != len(targets):
            raise ValueError(f"the names of inputs and targets are {names}, with {len(formats)} formats of targets")
        return cls(columns, targets, checked.typed("impute", content["impute"], bool), formats, dropped)


def _check_names(table: Table, asked: dict[str, Collection[str]]) -> None:
    """Reject names that are not in the table, and contradictory options."""
    for option, names in asked.items():
        for name in names:
            table.cells(name, option)
    targets = asked["--target"]
    if len(set(targets)) < len(targets) or not targets:
        raise InputError(f"--target {','.join(targets)!r} must name one or more different columns")
    for name in targets:
        if name in asked["--drop"] or name in asked["--text"]:
            raise InputError(f"column {name!r} is a target: it can be neither dropped nor text")


def _check_targets(schema: Schema, y: Float[ndarray, "m q"]) -> None:
    for name, column in zip(schema.targets, y.T, strict=True):
        values = column[~np.isnan(column)]
        if not len(values):
            raise InputError(f"target {name!r} is missing in every row: there is nothing to learn")
        if (values == values[0]).all():
            raise InputError(f"target {name!r} is {values[0]:g} in every row: there is nothing to learn")
        if np.ptp(values) < 1 / LARGEST_TARGET:
            raise InputError(f"target {name!r} varies by less than {1 / LARGEST_TARGET:g}: use another unit")
