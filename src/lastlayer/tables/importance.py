"""Importance of the columns of a table for a model, and partial dependence of its predictions on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from lastlayer._internal.files import ModelFileError
from lastlayer.explain import Dependence, Importance, Input, partial_dependence, permutation_importance
from lastlayer.plots.drawing import some
from lastlayer.tables.cells import as_texts
from lastlayer.tables.columns import NumberColumn, TextColumn
from lastlayer.tables.comparison import Comparison, compare
from lastlayer.tables.files import Table
from lastlayer.tables.numbers import plain, written
from lastlayer.tables.regressor import TableRegressor
from lastlayer.tables.schema import Schema

ROWS, REPEATS, STEPS = 500, 5, 25
LOSSES = ("rmse", "rmse_std", "lpd")


@dataclass(frozen=True)
class Ranking:
    """Importance of each column of a table: the loss of accuracy without it, for each target."""

    targets: tuple[str, ...]
    inputs: tuple[Importance, ...]
    rows: int
    held_out: bool
    """Whether these rows were held out by the fit or kept out of it; otherwise they were given by the user."""

    def ranked(self, j: int) -> list[Importance]:
        return sorted(self.inputs, key=lambda one: -one.rmse[j])

    @property
    def caption(self) -> str:
        return f"{self.rows:,} {'held-out' if self.held_out else 'given'} rows"

    def table(self) -> list[list[str]]:
        """A header and one line per target and column; the target is named in the first of its lines."""
        lines = []
        for j, target in enumerate(self.targets):
            for i, one in enumerate(self.ranked(j)):
                lost = f"{written(one.rmse[j], 3)} ± {written(one.rmse_std[j], 2)}"
                lines.append([target if i == 0 else "", one.name, lost, f"{one.lpd[j]:.2f}"])
        return [["target", "input", "RMSE lost without it", "LPD lost"], *lines]

    def sentences(self, most: int = 4) -> list[str]:
        """One sentence per target with the columns it depends on: those whose loss exceeds two standard deviations."""
        found = []
        for j, target in enumerate(self.targets):
            real = [one.name for one in self.ranked(j) if one.rmse[j] > 2 * one.rmse_std[j]][:most]
            first, rest = (real[0], real[1:]) if real else ("no single input", [])
            found.append(f"{target} depends most on {first}" + (f", then on {', '.join(rest)}" if rest else ""))
        return found

    def as_json(self) -> dict[str, Any]:
        inputs = [{"input": one.name} | {word: getattr(one, word).tolist() for word in LOSSES} for one in self.inputs]
        return {"targets": list(self.targets), "rows": self.rows, "held_out": self.held_out, "inputs": inputs}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Ranking":
        """Read a ranking from JSON; raise KeyError, TypeError or ValueError if it is invalid."""
        inputs = [
            Importance(str(one["input"]), *(np.array(one[word], dtype=float) for word in LOSSES))
            for one in saved["inputs"]
        ]
        return cls(tuple(map(str, saved["targets"])), tuple(inputs), int(saved["rows"]), bool(saved["held_out"]))


def columns_of(schema: Schema, table: Table | None = None) -> list[Input]:
    """The columns of a table as inputs to explain; a category or a date is one input, however it is encoded."""
    found, first = [], 0
    for column in schema.columns:
        places = tuple(range(first, first + len(column.features)))
        first += len(places)
        grid, labels = None, None
        if isinstance(column, NumberColumn):
            grid = np.linspace(column.low, column.high, STEPS)[:, None]
        elif isinstance(column, TextColumn):
            grid, labels = np.eye(len(places)), column.categories
        elif table is not None:  # dates: values of the table, sorted
            texts, rows = np.unique(as_texts(table.columns[column.name]).astype(str), return_index=True)
            kept = np.unique(np.linspace(0, len(texts) - 1, STEPS).round().astype(int))
            grid = schema.encode(table, unknown="warn").X[rows[kept]][:, places]
            labels = tuple(texts[kept].tolist())
        found.append(Input(column.name, places, grid, labels))
    return found


def saved_ranking(fitted: TableRegressor) -> Ranking | None:
    """The ranking that `lastlayer fit` wrote into the model file; None if there is none."""
    saved = fitted.card_.get("importance")
    try:
        return None if saved is None else Ranking.from_json(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFileError(
            f"the importance of inputs in this model file is damaged ({error!r}): fit again"
        ) from error


def importance(
    fitted: TableRegressor, table: Table, *, targets: Sequence[str] | None = None, kept_back: bool = False
) -> Ranking:
    """Measure the permutation importance of each column on given rows, at most 500 of them."""
    X, y = fitted.schema_.arrays(table, targets, unknown="warn")
    return _ranking(fitted.schema_, fitted, X, y, some(len(X), ROWS)[0], held_out=kept_back)


def held_out_importance(fitted: TableRegressor, table: Table) -> Ranking | None:
    """Measure the importance on the training rows, each predicted by networks that were not trained on it."""
    if fitted.held_out_ is None:
        return None
    judge = fitted.held_out_.take(some(len(fitted.held_out_.rows), ROWS)[0])
    return _ranking(fitted.schema_, judge, *fitted.schema_.arrays(table), judge.rows, held_out=True)


def _ranking(
    schema: Schema, judge: Any, X: ndarray, y: ndarray, rows: Int[ndarray, " k"], *, held_out: bool
) -> Ranking:
    found = permutation_importance(judge, X[rows], y[rows], inputs=columns_of(schema), n_repeats=REPEATS)
    return Ranking(schema.targets, tuple(found), len(rows), held_out)


def measured(model: TableRegressor, table: Table, kept: Table | None) -> tuple[Comparison | None, Ranking | None]:
    """Compare a model with simple ones and rank its inputs, on rows kept out of the fit, or on its held-out rows."""
    found = compare(model, table, kept)
    return found, held_out_importance(model, table) if kept is None else importance(model, kept, kept_back=True)


def dependence(fitted: TableRegressor, table: Table | None = None) -> list[Dependence]:
    """Compute the partial dependence on each column over its training range."""
    inputs = [one for one in columns_of(fitted.schema_, table) if one.grid is not None]
    X = fitted.schema_.encode(fitted.schema_.typical() if table is None else table, unknown="warn").X
    return partial_dependence(fitted, X, inputs=inputs)


def extremes_table(found: Sequence[Dependence], targets: Sequence[str]) -> list[list[str]]:
    """Lowest and highest prediction of each target as a column varies, with 90% bands of the function."""
    lines = []
    for j, target in enumerate(targets):
        for i, one in enumerate(found):
            half = one.band(0.9, noise=False)[1] - one.mean
            at = lambda k, one=one: one.labels[k] if one.labels is not None else plain(one.x[k])
            cell = lambda k, one=one, half=half, j=j: f"{written(one.mean[k, j])} ± {written(half[k, j], 2)}"
            low, high = int(one.mean[:, j].argmin()), int(one.mean[:, j].argmax())
            lines.append([target if i == 0 else "", one.name, cell(low), at(low), cell(high), at(high)])
    return [["target", "input", "lowest", "at", "highest", "at"], *lines]
