"""Scores of a fit on rows that it was not fitted to, next to those of linear regression and the mean."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
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
    width_90: float
    lpd: float | None = None
    """Only for lastlayer."""


@dataclass(frozen=True)
class Comparison:
    """Scores of a model, of linear regression and of the mean on the same held-out rows."""

    rows: int
    kept_back: bool
    """Whether the rows were kept out of the whole fit; otherwise they are the held-out rows of its folds."""
    methods: tuple[MethodScores, ...]

    @property
    def caption(self) -> str:
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


def compare(fitted: TableRegressor, table: Table, kept: Table | None = None) -> Comparison | None:
    """Compare the model with linear regression and the mean on held-out rows."""
    schema, (X, y) = fitted.schema_, fitted.schema_.arrays(table)
    y = y.reshape(len(y), -1)
    if kept is not None:
        new, truth = schema.encode(kept, unknown="warn").X, schema.targets_of(kept, partly=True)
        p, others = fitted.predictive(new), _baselines(X, y, new)
    elif (held_out := fitted.held_out_) is not None:
        new, truth = X[held_out.rows], y[held_out.rows]
        p, others = held_out.predictive(new), np.empty((2, 3, *truth.shape))
        for k in np.unique(held_out.fold):
            train, here = held_out.folds[k].train, held_out.fold == k
            others[:, :, here] = _baselines(X[train], y[train], new[here])
    else:
        return None
    return Comparison(len(truth), kept is not None, _scored(schema.targets, truth, p, others))


def _scored(
    targets: tuple[str, ...], y: Float[ndarray, "m q"], p: Prediction, others: Float[ndarray, "2 3 m q"]
) -> tuple[MethodScores, ...]:
    known = ~np.isnan(y)
    density = p.log_prob(np.where(known, y, 0.0), per_output=True).reshape(y.shape)
    ours = np.stack([values.reshape(y.shape) for values in (p.point, *p.interval(LEVEL))])
    methods = []
    for j, target in enumerate(targets):
        at = known[:, j]
        truth = y[at, j]
        for name, found in zip((OURS, LINEAR, MEAN), (ours, *others), strict=True):
            mean, low, high = found[:, at, j]
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
    return tuple(methods)


def _baselines(
    X: Float[ndarray, "m d"], y: Float[ndarray, "m q"], new: Float[ndarray, "n d"]
) -> Float[ndarray, "2 3 n q"]:
    """Mean and ends of Gaussian intervals, from training residuals, of linear regression and of the mean."""
    reach = ndtri((1 + LEVEL) / 2) * np.array([0.0, -1.0, 1.0])[:, None]
    found = np.empty((2, 3, len(new), y.shape[1]))
    for j, known in enumerate(~np.isnan(y).T):
        inputs, truth = X[known], y[known, j]
        least = LinearRegression().fit(inputs, truth)
        free = max(1, len(truth) - 1 - int(least.rank_))
        found[0, :, :, j] = least.predict(new) + reach * np.sqrt(np.square(truth - least.predict(inputs)).sum() / free)
        found[1, :, :, j] = truth.mean() + reach * truth.std(ddof=min(1, len(truth) - 1))
    return found


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
