"""Predictions for a table beside its true values: what a report shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer.model import Extrapolation
from lastlayer.plots import binomial_band
from lastlayer.prediction import Prediction
from lastlayer.tables import Encoded, NumberColumn, Scores, Table, TableModel, score
from lastlayer.tables.columns import as_numbers


@dataclass(frozen=True)
class Judged:
    """A model, rows, what it says of them, and what is true."""

    fitted: TableModel
    table: Table
    encoded: Encoded
    p: Prediction
    y: Float[ndarray, "m q"]
    where: Extrapolation
    scores: Scores

    @classmethod
    def of(
        cls, fitted: TableModel, table: Table, *, targets: Sequence[str] | None = None, unknown: str = "error"
    ) -> "Judged":
        y = fitted.schema.targets_of(table, targets)
        encoded, p = fitted.predictive(table, unknown=unknown)
        scores = score(p, y, fitted.schema.targets)
        return cls(fitted, table, encoded, p, y, fitted.model.extrapolation(encoded.X), scores)

    @property
    def names(self) -> tuple[str, ...]:
        return self.fitted.schema.targets

    @cached_property
    def interval(self) -> tuple[Float[ndarray, "m q"], Float[ndarray, "m q"]]:
        return self.p.interval(0.95)

    @cached_property
    def error(self) -> Float[ndarray, "m q"]:
        """In predicted standard deviations."""
        error: ndarray = (self.y - self.p.mean) / self.p.std
        return error

    def wrong(self) -> Int[ndarray, " m"]:
        """Rows, the most wrong first."""
        return np.argsort(-np.abs(self.error).max(1), kind="stable")

    def uncertain(self) -> Int[ndarray, " m"]:
        """Rows, the most uncertain first."""
        return np.argsort(-(self.p.std / self.fitted.model.noise_std_).max(1), kind="stable")

    def outside_names(self, i: int) -> str:
        columns = self.fitted.schema.columns
        return ", ".join(column.name for column, out in zip(columns, self.encoded.outside[i], strict=True) if out)

    def range_of(self, column: NumberColumn) -> tuple[float, float]:
        values = as_numbers(self.table.columns[column.name])[0]
        return float(np.nanmin(values)), float(np.nanmax(values))

    def inside_by_chance(self, level: float) -> tuple[float, float]:
        """Shares inside intervals of that level that a perfect model shows in 95% of samples of this size."""
        low, high = binomial_band(len(self.y), np.array([level]))
        return float(low[0]), float(high[0])

    def some(self, n: int) -> Int[ndarray, " s"]:
        """At most n rows, always the same."""
        m = len(self.y)
        return np.arange(m) if m <= n else np.sort(np.random.default_rng(0).choice(m, n, replace=False))
