"""A model that knows the columns of its table: raw rows in, predictions out, one file."""

import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray
from sklearn.model_selection import GroupKFold

from lastlayer import files
from lastlayer.errors import InputError
from lastlayer.files import ModelFileError
from lastlayer.prediction import Prediction
from lastlayer.regressor import BLLRegressor, load
from lastlayer.tables.columns import as_texts
from lastlayer.tables.reading import Cells, Table
from lastlayer.tables.schema import Encoded, Schema, check_column

GROUP_FOLDS = 5


@dataclass(frozen=True)
class Forecast:
    """What is said of some rows."""

    cells: Cells
    """The columns that are added to the rows."""
    outside: Int[ndarray, " c"]
    """How many rows leave the training range of each input column."""
    beyond: int
    """How many rows cost more than every training row."""
    unknown: dict[str, Counter[str]]


@dataclass(frozen=True)
class TableModel:
    """A fitted regressor and the columns it was fitted to."""

    schema: Schema
    model: BLLRegressor
    card: dict[str, Any] = field(default_factory=dict)
    """What is worth knowing of its making; plain JSON."""

    @classmethod
    def fit(
        cls,
        table: Table,
        targets: Sequence[str],
        *,
        drop: Collection[str] = (),
        text: Collection[str] = (),
        impute: bool = False,
        groups: str | None = None,
        **words: Any,
    ) -> "TableModel":
        """Columns by `Schema.infer`, then `BLLRegressor(**words)`; rows of one group (a column) stay together."""
        if groups is not None:
            check_column(groups, table, "--groups ")
            drop = {*drop, groups}
        schema = Schema.infer(table, targets, drop=drop, text=text, impute=impute)
        return cls.of(schema, table, groups=groups, **words)

    @classmethod
    def of(cls, schema: Schema, table: Table, *, groups: str | None = None, **words: Any) -> "TableModel":
        """Fit to the columns of a schema."""
        labels = None
        if groups is not None:
            check_column(groups, table, "--groups ")
            labels = as_texts(table.columns[groups])
            if (n := len(set(labels))) < 2:
                raise InputError(f"--groups {groups}: all rows are of one group, and two or more are needed")
            words |= {"calibration": GroupKFold(min(GROUP_FOLDS, n))}
        X, y = schema.encode(table).X, schema.targets_of(table)
        y = y[:, 0] if y.shape[1] == 1 else y
        return cls(schema, BLLRegressor(**words).fit(X, y, groups=labels), {"rows": len(X)})

    # files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """One model file that also holds the columns; `lastlayer.load` reads the regressor in it."""
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / "model"
            self.model.save(plain)
            tensors, header = files.read(plain)
        files.write(path, tensors, header | {"table": self.schema.as_json(), "card": self.card})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TableModel":
        model, header = load(path), files.read(path)[1]
        if "table" not in header:
            raise ModelFileError(
                f"{path} was saved without the columns of its table: use it in Python with lastlayer.load, "
                "or make a model with `lastlayer fit`"
            )
        try:
            schema = Schema.from_json(header["table"])
            card = dict(header.get("card", {}))
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFileError(f"{path} does not fit this version of lastlayer: {error!r} in its columns") from error
        fitted = cls(schema, model, card)
        try:
            fitted._probe()
        except Exception as error:  # a file may be whole and still hold anything
            raise ModelFileError(f"{path} is damaged or no model of a table: it cannot predict ({error!r})") from error
        return fitted

    def _probe(self) -> None:
        """Predict one row, so that a model that cannot is refused when it is loaded."""
        row = Table({column.name: np.array([column.fill], dtype=object) for column in self.schema.columns})
        numbers = {name: cells.item() for name, cells in self.forecast(row).cells.items() if cells.dtype.kind == "f"}
        if not np.isfinite(list(numbers.values())).all():
            raise ValueError("its predictions are not finite")

    # questions --------------------------------------------------------------------------------------------------

    def predictive(self, table: Table, *, unknown: str = "error") -> tuple[Encoded, Prediction]:
        """Inputs and predictive distribution of raw rows."""
        encoded = self.schema.encode(table, unknown=unknown)
        return encoded, self.model.predictive(encoded.X)

    def forecast(self, table: Table, *, level: float = 0.95, unknown: str = "error") -> Forecast:
        """Mean, standard deviation and interval of every target, and how far each row extrapolates."""
        encoded, p = self.predictive(table, unknown=unknown)
        lower, upper = p.interval(level)
        where = self.model.extrapolation(encoded.X)
        cells: Cells = {}
        for i, name in enumerate(self.schema.targets):
            parts = {"mean": p.mean, "std": p.std, "lower": lower, "upper": upper}
            cells |= {f"{name}_{word}": values[:, i] for word, values in parts.items()}
        names = np.array([column.name for column in self.schema.columns], dtype=object)
        cells["affine_cost"], cells["extrapolation"] = where.affine_cost, where.quantile
        cells["outside_range"] = np.array(["; ".join(names[row]) for row in encoded.outside], dtype=object)
        return Forecast(cells, encoded.outside.sum(0), int((where.quantile == 1).sum()), encoded.unknown)

    def stream(
        self, tables: Iterator[Table], *, level: float = 0.95, unknown: str = "error"
    ) -> Iterator[tuple[Table, Forecast]]:
        """Forecasts piece by piece; memory is that of one piece."""
        for table in tables:
            forecast = self.forecast(table, level=level, unknown=unknown)
            if clash := sorted(table.columns.keys() & forecast.cells.keys()):
                raise InputError(
                    f"the table already has a column {clash[0]!r}: rename it, predict adds one of that name"
                )
            yield table, forecast

    def update(self, table: Table, *, targets: Sequence[str] | None = None, forgetting: float = 1.0) -> "TableModel":
        """The model after more rows; the regressor is changed in place."""
        X, y = self.schema.encode(table).X, self.schema.targets_of(table, targets)
        self.model.update(X, y[:, 0] if y.shape[1] == 1 else y, forgetting=forgetting)
        rows = int(self.card.get("rows", 0)) + len(X)
        return replace(self, schema=self.schema.widened(table), card=self.card | {"rows": rows})
