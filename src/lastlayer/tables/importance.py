"""Importance of the columns of a table for a model, and partial dependence of its predictions on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer._internal.files import ModelFileError
from lastlayer.explain import Dependence, Importance, Input, partial_dependence, permutation_importance
from lastlayer.plots.drawing import some
from lastlayer.tables.cells import as_texts
from lastlayer.tables.columns import NumberColumn, TextColumn
from lastlayer.tables.files import Table
from lastlayer.tables.numbers import plain, written
from lastlayer.tables.regressor import TableRegressor
from lastlayer.tables.schema import Schema

ROWS, REPEATS, STEPS = 500, 5, 25
WORK, FEWEST = 1_000_000, 12
"""Limit for rows times inputs times shuffles, and the number of shuffles that are made in any case."""
SCREENED = 4
"""Rows to choose the inputs of a wide table on."""
LOSSES = ("rmse", "rmse_std", "lpd")


@dataclass(frozen=True)
class Ranking:
    """Importance of each column of a table: the loss of accuracy without it, for each target."""

    targets: tuple[str, ...]
    inputs: tuple[Importance, ...]
    rows: int
    held_out: bool
    """Whether these rows were held out by the fit or kept out of it; otherwise they were given by the user."""
    of: int
    """Number of inputs in all: of a wide table, only those that change the predictions most are measured."""

    def ranked(self, j: int) -> list[Importance]:
        return sorted(self.inputs, key=lambda one: -one.rmse[j])

    @property
    def caption(self) -> str:
        most = (
            "" if len(self.inputs) == self.of else f" (the {len(self.inputs)} inputs with most effect of {self.of:,})"
        )
        return f"{self.rows:,} {'held-out' if self.held_out else 'given'} rows{most}"

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
        about = {"rows": self.rows, "held_out": self.held_out, "of": self.of}
        return {"targets": list(self.targets), "inputs": inputs} | about

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Ranking":
        """Read a ranking from JSON; raise KeyError, TypeError or ValueError if it is invalid."""
        inputs = [
            Importance(str(one["input"]), *(np.array(one[word], dtype=float) for word in LOSSES))
            for one in saved["inputs"]
        ]
        targets, of = tuple(map(str, saved["targets"])), int(saved.get("of", len(inputs)))
        return cls(targets, tuple(inputs), int(saved["rows"]), bool(saved["held_out"]), of)


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
    return _ranking(fitted, fitted, X, y, some(len(X), _most_rows(X))[0], held_out=kept_back)


def held_out_importance(fitted: TableRegressor, table: Table) -> Ranking | None:
    """Measure the importance on the training rows, each predicted by networks that were not trained on it."""
    if fitted.held_out_ is None:
        return None
    X, y = fitted.schema_.arrays(table)
    judge = fitted.held_out_.take(some(len(fitted.held_out_.rows), _most_rows(X))[0])
    return _ranking(fitted, judge, X, y, judge.rows, held_out=True)


def _most_rows(X: Float[ndarray, "m d"]) -> int:
    return int(np.clip(WORK // (FEWEST * X.shape[1]), 100, ROWS))


def _ranking(
    fitted: TableRegressor, judge: Any, X: ndarray, y: ndarray, rows: Int[ndarray, " k"], *, held_out: bool
) -> Ranking:
    inputs = columns_of(fitted.schema_)
    shuffles = max(FEWEST, WORK // X[rows].size)
    repeats = int(np.clip(shuffles // len(inputs), 2, REPEATS))
    kept = _most_effective(fitted, X[rows], inputs, shuffles // repeats)
    found = permutation_importance(judge, X[rows], y[rows], inputs=kept, n_repeats=repeats)
    return Ranking(fitted.schema_.targets, tuple(found), len(rows), held_out, len(inputs))


def _most_effective(fitted: TableRegressor, X: Float[ndarray, "m d"], inputs: list[Input], n: int) -> list[Input]:
    """The n inputs that change the predictions of a few rows most if they take the values of other rows."""
    if len(inputs) <= n:
        return inputs
    here = some(len(X), SCREENED)[0]
    changed = np.repeat(X[None, here], len(inputs) + 1, 0)
    for rows, one in zip(changed, inputs, strict=False):  # the last rows stay as they are
        rows[:, one.columns] = X[(here + len(X) // 2) % len(X)][:, one.columns]
    point = fitted.fitted_.predictive(changed.reshape(-1, X.shape[1])).point.reshape(*changed.shape[:2], -1)
    effect = np.square((point[:-1] - point[-1]) / fitted.noise_std_).mean((1, 2))
    return [inputs[i] for i in np.sort(np.argsort(-effect, kind="stable")[:n])]


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
