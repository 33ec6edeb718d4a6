"""A fitted model with the columns of its table: raw rows in, predictions out, one file."""

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from sklearn.model_selection import GroupKFold

from lastlayer._internal import checked, files
from lastlayer._internal.arrays import check_finite
from lastlayer._internal.files import ModelFileError
from lastlayer.errors import InputError
from lastlayer.estimators.regressor import BLLRegressor, load
from lastlayer.predictions.prediction import Prediction
from lastlayer.tables.cells import as_texts
from lastlayer.tables.files import Cells, Table
from lastlayer.tables.schema import Encoded, Reading, Schema

GROUP_FOLDS = 5
CARD: dict[str, Any] = dict.fromkeys(("data", "fitted", "version"), str)
CARD |= {"rows": int, "seed": int, "interrupted": bool, "notes": list[str]}
"""Types of the entries of a card."""


@dataclass(frozen=True)
class Forecast:
    """Predictions for some rows, with warnings about them."""

    cells: Cells
    """Columns to add to the rows."""
    outside: Counter[str]
    """Number of rows outside the training range of each input column."""
    beyond: int
    """Number of rows farther out than every training row."""
    beyond_reach: int
    """Number of rows farther out than every held-out row that the intervals were calibrated on."""
    unknown: Counter[str]
    """Number of rows with a text that no training row had, by column=text."""


@dataclass(frozen=True)
class TableModel:
    """A fitted regressor and the columns it was fitted to."""

    schema: Schema
    model: BLLRegressor
    card: dict[str, Any] = field(default_factory=dict)
    """Facts about the fit, as plain JSON."""

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
        **parameters: Any,
    ) -> "TableModel":
        """Infer the columns by `Schema.infer`, then fit `BLLRegressor(**parameters)`; folds do not split groups."""
        drop = drop if groups is None else {*drop, groups}
        schema = Schema.infer(table, targets, Reading(drop=drop, text=text, impute=impute))
        return cls.of(schema, table, groups=groups, **parameters)

    @classmethod
    def of(
        cls,
        schema: Schema,
        table: Table,
        *,
        groups: str | None = None,
        given: Mapping[str, Any] | None = None,
        **parameters: Any,
    ) -> "TableModel":
        """Fit with the columns of a schema; `given` are further arguments of `BLLRegressor.fit`."""
        labels = None if groups is None else as_texts(table.cells(groups, "--groups"))
        if labels is not None:
            if (n := len(set(labels))) < 2:
                raise InputError(f"--groups {groups}: all rows are in one group, but at least two groups are needed")
            parameters |= {"calibration": GroupKFold(min(GROUP_FOLDS, n))}
        X, y = regression(schema, table)
        return cls(
            schema, BLLRegressor(**parameters).fit(X, y, **{"groups": labels, **(given or {})}), {"rows": len(X)}
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one model file with the columns; `lastlayer.load` reads it as a `TableRegressor`."""
        tensors, header = self.model.packed()
        files.write(path, tensors, header | {"table": self.schema.as_json(), "card": self.card})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TableModel":
        """Read a model file with columns; raise ModelFileError if it is invalid or cannot predict."""
        model, header = load(path), files.read(path)[1]
        if "table" not in header:
            raise ModelFileError(
                f"{path} was saved without the columns of its table: use it in Python with lastlayer.load, "
                "or fit a model with `lastlayer fit`"
            )
        try:
            schema = Schema.from_json(header["table"])
            found, wanted = (len(schema.features), len(schema.targets)), (model.n_features_in_, model.fitted_.n_outputs)
            if found != wanted:
                raise ValueError(f"they give {found[0]} inputs and {found[1]} targets, but the model has {wanted}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelFileError(
                f"{path} is not compatible with this version of lastlayer: {error!r} in its columns"
            ) from error
        fitted = cls(schema, model, _card(header.get("card")))
        try:
            row = Table({column.name: column.typical() for column in fitted.schema.columns})
            numbers = [cells.item() for cells in fitted.forecast(row).cells.values() if cells.dtype.kind == "f"]
            check_finite(np.array(numbers), "its prediction")
        except Exception as error:  # a file may be complete and still contain anything
            raise ModelFileError(
                f"{path} is damaged or not a model of a table: it cannot predict ({error!r})"
            ) from error
        return fitted

    def predictive(self, table: Table, *, unknown: str = "error") -> tuple[Encoded, Prediction]:
        """Encode raw rows, and return their predictive distribution."""
        encoded = self.schema.encode(table, unknown=unknown)
        return encoded, self.model.predictive(encoded.X)

    def forecast(self, table: Table, *, level: float = 0.95, unknown: str = "error") -> Forecast:
        """Predict mean, standard deviation and interval of each target, and how far each row extrapolates."""
        encoded, p = self.predictive(table, unknown=unknown)
        where, cells = self.model.extrapolation(encoded.X), prediction_cells(p, self.schema.targets, level)
        names = np.array([column.name for column in self.schema.columns], dtype=object)
        cells["affine_cost"], cells["extrapolation"] = where.affine_cost, where.quantile
        cells["outside_range"] = np.array(["; ".join(names[row]) for row in encoded.outside], dtype=object)
        outside = Counter(dict(zip(names, encoded.outside.sum(0).tolist(), strict=True)))
        texts = ((f"{name}={text}", n) for name, found in encoded.unknown.items() for text, n in found.items())
        far = 0 if p.beyond_reach is None else int(p.beyond_reach.sum())
        return Forecast(cells, outside, int((where.quantile == 1).sum()), far, Counter(dict(texts)))

    def stream(
        self, tables: Iterator[Table], *, level: float = 0.95, unknown: str = "error"
    ) -> Iterator[tuple[Table, Forecast]]:
        """Predict chunk by chunk, in the memory of one chunk."""
        for table in tables:
            forecast = self.forecast(table, level=level, unknown=unknown)
            if clash := sorted(table.columns.keys() & forecast.cells.keys()):
                raise InputError(
                    f"the table already has a column {clash[0]!r}: rename it, since predict adds a column of this name"
                )
            yield table, forecast

    def update(self, table: Table, *, targets: Sequence[str] | None = None, forgetting: float = 1.0) -> "TableModel":
        """Update the model with more rows; the regressor is changed in place."""
        X, y = regression(self.schema, table, targets)
        self.model.update(X, y, forgetting=forgetting)
        return self.grown(table)

    def grown(self, table: Table) -> "TableModel":
        """The same model, with training ranges and number of rows that include more rows."""
        rows = int(self.card.get("rows", 0)) + len(table)
        return replace(self, schema=self.schema.widened(table), card=self.card | {"rows": rows})


def _card(saved: Any) -> dict[str, Any]:
    """Entries of a card that have the types that `lastlayer fit` writes; no prediction depends on them."""
    found = dict(saved) if isinstance(saved, dict) else {}
    for name, kind in CARD.items():
        try:
            found[name] = checked.typed(name, found[name], kind)
        except (KeyError, ValueError):
            found.pop(name, None)
    return found


def prediction_cells(p: Prediction, targets: Sequence[str], level: float) -> Cells:
    """Columns NAME_mean, NAME_std, NAME_lower and NAME_upper of each target."""
    p = p.with_output_axis()
    lower, upper = p.interval(level)
    parts = {"mean": p.mean, "std": p.std, "lower": lower, "upper": upper}
    return {f"{name}_{word}": values[:, i] for i, name in enumerate(targets) for word, values in parts.items()}


def regression(
    schema: Schema, table: Table, targets: Sequence[str] | None = None, *, unknown: str = "error"
) -> tuple[Float[ndarray, "m d"], ndarray]:
    """Inputs and targets of a table as arrays for a regressor; a single target is one-dimensional."""
    y = schema.targets_of(table, targets, partly=True)
    return schema.encode(table, unknown=unknown).X, y[:, 0] if y.shape[1] == 1 else y
