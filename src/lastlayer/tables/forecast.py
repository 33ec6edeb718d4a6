"""Predictions for the rows of a table as columns to add to it, in chunks of bounded memory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lastlayer.errors import InputError
from lastlayer.predictions.prediction import Prediction
from lastlayer.tables.files import Cells, Table
from lastlayer.tables.regressor import TableRegressor


@dataclass(frozen=True)
class Forecast:
    """Predictions for some rows, with warnings about them."""

    cells: Cells
    counts: Counter[str]
    """Number of rows; of those "beyond", farther out than every training row; and of those "beyond_reach", farther out
    than every held-out row that the intervals were calibrated on."""
    outside: Counter[str]
    """Number of rows outside the training range of each input column."""
    unknown: Counter[str]
    """Number of rows with a text that no training row had, by column=text."""


def forecast(model: TableRegressor, table: Table, *, level: float = 0.95) -> Forecast:
    """Predict mean, standard deviation and interval of each target, and how far each row extrapolates."""
    schema = model.schema_
    encoded = schema.encode(table, unknown=model.unknown)
    p, where = model.predictive(encoded.X), model.extrapolation(encoded.X)
    cells = prediction_cells(p, schema.targets, level)
    names = np.array([column.name for column in schema.columns], dtype=object)
    cells["affine_cost"], cells["extrapolation"] = where.affine_cost, where.quantile
    cells["outside_range"] = np.array(["; ".join(names[row]) for row in encoded.outside], dtype=object)
    outside = Counter(dict(zip(names, encoded.outside.sum(0).tolist(), strict=True)))
    texts = ((f"{name}={text}", n) for name, found in encoded.unknown.items() for text, n in found.items())
    if clash := sorted(table.columns.keys() & cells.keys()):
        raise InputError(
            f"the table already has a column {clash[0]!r}: rename it, since predict adds a column of this name"
        )
    far = 0 if p.beyond_reach is None else int(p.beyond_reach.sum())
    counts = Counter(rows=len(table), beyond=int((where.quantile == 1).sum()), beyond_reach=far)
    return Forecast(cells, counts, outside, Counter(dict(texts)))


def prediction_cells(p: Prediction, targets: Sequence[str], level: float) -> Cells:
    """Columns NAME_mean or NAME_median, NAME_std, NAME_lower and NAME_upper of each target."""
    p = p.with_output_axis()
    lower, upper = p.interval(level)
    parts = {p.point_name: p.point, "std": p.std, "lower": lower, "upper": upper}
    return {f"{name}_{word}": values[:, i] for i, name in enumerate(targets) for word, values in parts.items()}
