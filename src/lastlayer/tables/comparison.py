"""Scores of a fit on rows that it was not fitted to, next to those of linear regression and the mean."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.special import ndtri
from sklearn.linear_model import LinearRegression

from lastlayer.errors import InputError
from lastlayer.predictions.prediction import Prediction
from lastlayer.tables.cells import as_texts
from lastlayer.tables.files import Table
from lastlayer.tables.numbers import percent, written
from lastlayer.tables.regressor import TableRegressor

LEVEL = 0.9
OURS, LINEAR, MEAN = "lastlayer", "linear regression", "mean"


@dataclass(frozen=True)
class MethodScores:
    """Scores of one method for one target on held-out rows, in the units of the target."""

    target: str
    method: str
    r2: float
    """Share of the variance of the target that the predictions explain; 0 for the mean of these rows."""
    rmse: float
    coverage_90: float
    """Share of true values inside their 90% intervals."""
    width_90: float
    """Mean width of these intervals."""
    lpd: float | None = None
    """Mean log predictive density; larger is better. Only for lastlayer."""


@dataclass(frozen=True)
class Comparison:
    """Scores of a model, of linear regression and of the mean on the same held-out rows."""

    rows: int
    kept_back: bool
    """Whether the rows were kept out of the whole fit; otherwise they are the held-out rows of its folds."""
    methods: tuple[MethodScores, ...]

    @property
    def caption(self) -> str:
        """Which rows were scored, as part of a sentence."""
        if self.kept_back:
            return f"on {self.rows:,} rows that were kept out of the fit"
        return f"on {self.rows:,} rows, each predicted by networks that were not trained on it"

    def table(self) -> list[list[str]]:
        """A header and one line per target and method; the target is named in the first of its lines."""
        head = ["target", "method", "R2", "RMSE", "in 90% intervals", "their width"]
        lines, last = [], ""
        for s in self.methods:
            numbers = [f"{s.r2:.3f}", written(s.rmse, 3), percent(s.coverage_90), written(s.width_90, 3)]
            lines.append(["" if s.target == last else s.target, s.method, *numbers])
            last = s.target
        return [head, *lines]


@dataclass(frozen=True)
class _Said:
    """Predictions of one method, with intervals."""

    mean: Float[ndarray, "m q"]
    lower: Float[ndarray, "m q"]
    upper: Float[ndarray, "m q"]


def compare(fitted: TableRegressor, table: Table, kept: Table | None = None) -> Comparison | None:
    """Compare the model with linear regression and the mean on held-out rows."""
    X, y = fitted.schema_.arrays(table)
    y = y.reshape(len(y), -1)
    if kept is not None:
        new = fitted.schema_.encode(kept, unknown="warn").X
        truth = fitted.schema_.targets_of(kept, partly=True)
        p = fitted.predictive(new)
        return _compared(fitted.schema_.targets, truth, p, dict(_baselines(X, y, new)), kept_back=True)
    held_out = fitted.held_out_
    if held_out is None:
        return None
    rows = held_out.rows
    said = {name: _Said(*(np.empty((len(rows), y.shape[1])) for _ in range(3))) for name in (LINEAR, MEAN)}
    for k in np.unique(held_out.fold):
        at: Int[ndarray, " h"] = np.flatnonzero(held_out.fold == k)
        train = held_out.folds[k].train
        for name, part in _baselines(X[train], y[train], X[rows[at]]):
            for whole, values in zip(vars(said[name]).values(), vars(part).values(), strict=True):
                whole[at] = values
    return _compared(fitted.schema_.targets, y[rows], held_out.predictive(X[rows]), said, kept_back=False)


def _compared(
    targets: tuple[str, ...], y: Float[ndarray, "m q"], p: Prediction, others: dict[str, _Said], *, kept_back: bool
) -> Comparison:
    lower, upper = p.interval(LEVEL)
    known = ~np.isnan(y)
    density = p.log_prob(np.where(known, y, 0.0), per_output=True).reshape(y.shape)
    ours = _Said(*(values.reshape(y.shape) for values in (p.point, lower, upper)))
    methods = []
    for j, target in enumerate(targets):
        at = known[:, j]
        for name, said in {OURS: ours, **others}.items():
            truth, mean, low, high = (values[at, j] for values in (y, said.mean, said.lower, said.upper))
            rmse, spread = np.sqrt(np.square(truth - mean).mean()), truth.var()
            methods.append(
                MethodScores(
                    target,
                    name,
                    r2=float(1 - rmse**2 / spread) if spread > 0 else float("nan"),
                    rmse=float(rmse),
                    coverage_90=float(((low <= truth) & (truth <= high)).mean()),
                    width_90=float((high - low).mean()),
                    lpd=float(density[at, j].mean()) if name == OURS else None,
                )
            )
    return Comparison(len(y), kept_back, tuple(methods))


def _baselines(
    X: Float[ndarray, "m d"], y: Float[ndarray, "m q"], new: Float[ndarray, "n d"]
) -> Iterator[tuple[str, _Said]]:
    """Predict by linear regression and by the mean, with Gaussian intervals from their training residuals."""
    reach = float(ndtri((1 + LEVEL) / 2))
    linear, constant = np.empty((2, len(new), y.shape[1])), np.empty((2, len(new), y.shape[1]))
    for j in range(y.shape[1]):
        known = ~np.isnan(y[:, j])
        inputs, truth = X[known], y[known, j]
        least = LinearRegression().fit(inputs, truth)
        free = max(1, len(truth) - 1 - int(least.rank_))
        residual = np.sqrt(np.square(truth - least.predict(inputs)).sum() / free)
        linear[:, :, j] = least.predict(new), np.full(len(new), residual)
        constant[:, :, j] = np.full(len(new), truth.mean()), np.full(len(new), truth.std(ddof=min(1, len(truth) - 1)))
    for name, (mean, std) in ((LINEAR, linear), (MEAN, constant)):
        yield name, _Said(mean, mean - reach * std, mean + reach * std)


def keep_back(table: Table, share: float, *, groups: str | None = None, seed: int = 0) -> tuple[Table, Table]:
    """Split a table at random into rows to fit and rows to keep out of the fit."""
    labels = np.arange(len(table)) if groups is None else as_texts(table.cells(groups, "--groups")).astype(str)
    every = np.unique(labels)
    n = round(share * len(every)) if 0 < share < 1 else 0
    picked = np.isin(labels, np.random.default_rng(seed).permutation(every)[:n])
    if not 2 <= picked.sum() <= len(table) - 2:
        raise InputError(
            f"--holdout {share} would keep {picked.sum()} of {len(table)} rows out of the fit: give a share between 0 "
            "and 1, such as 0.2, with at least two rows on both sides"
        )
    part = lambda rows: Table({name: cells[rows] for name, cells in table.columns.items()})
    return part(~picked), part(picked)
