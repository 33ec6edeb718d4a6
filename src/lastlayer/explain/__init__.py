"""Explanations of a fitted model: how much each input matters, and how predictions depend on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.special import ndtri
from torch import Tensor

from lastlayer._internal.arrays import as_array, check_finite
from lastlayer.errors import InputError
from lastlayer.formula import State, centred
from lastlayer.formula.ops import TorchOps
from lastlayer.predictions.prediction import Prediction
from lastlayer.predictor.fitted import Fitted, as_fitted
from lastlayer.settings.types import ADDITIVE

BACKGROUND = 100


@dataclass(frozen=True)
class Input:
    """One input of the user, such as a category that is encoded in several 0/1 columns of X."""

    name: str
    """Name in tables and plots."""
    columns: tuple[int, ...]
    """Its columns in X; they are shuffled and varied together."""
    grid: ndarray | None = None
    """Values (n, len(columns)) for partial dependence; None: a single column varies evenly over its range in X."""
    labels: tuple[str, ...] | None = None
    """Labels of these values if they are not numbers."""


@dataclass(frozen=True)
class Importance:
    """Loss of accuracy for each target without one input."""

    name: str
    """Name of the input."""
    rmse: Float[ndarray, " q"]
    """RMSE after shuffling minus RMSE before, in the units of the target: mean over shuffles."""
    rmse_std: Float[ndarray, " q"]
    """Its standard deviation over shuffles."""
    lpd: Float[ndarray, " q"]
    """Mean log predictive density before shuffling minus after, in nats; it judges mean and uncertainty together."""


def permutation_importance(
    model: Any, X: Any, y: Any, *, inputs: Sequence[Input] | None = None, n_repeats: int = 5, random_state: int = 0
) -> list[Importance]:
    """Measure how much worse predictions become when the values of one input are shuffled among the rows.

    Use rows that the model has not seen, or the held-out rows of its fit: pass `model.held_out_` as the model and the
    rows `model.held_out_.rows` of the training table. Correlated inputs share their importance: each of them may look
    unimportant, since the others carry the same information.

    Parameters
    ----------
    model : fitted regressor, or its `held_out_`
        Anything with a method `predictive`.
    X, y : array of shape (m, d), array of shape (m,) or (m, q)
        Inputs, in the format of the training inputs, and true values; NaN where a value is missing.
    inputs : sequence of Input, optional
        Which columns of X belong together; by default, each column is an input.
    n_repeats, random_state : int, default 5, int, default 0
        Number of shuffles of each input, whose results are averaged, and their seed.
    """
    table, targets = _table_of(X), np.asarray(as_array(y), dtype=float)
    if len(targets) != len(table) or len(table) < 2 or n_repeats < 1:
        raise InputError(
            f"X has {len(table)} rows, y has {len(targets)}, and n_repeats={n_repeats}: importance needs the true "
            "value of every row, at least two rows, and at least one repeat"
        )
    targets = targets.reshape(len(targets), -1)
    predictive, rng = getattr(model, "fitted_", model).predictive, np.random.default_rng(random_state)
    rmse, lpd = _scores(predictive(table), targets)
    found = []
    for one in _inputs_of(model, X, inputs):
        worse = []
        for _ in range(n_repeats):
            shuffled = table.copy()
            shuffled[:, one.columns] = table[rng.permutation(len(table))][:, one.columns]
            worse.append(_scores(predictive(shuffled), targets))
        rmses, lpds = (np.stack(each) for each in zip(*worse, strict=True))
        found.append(Importance(one.name, rmses.mean(0) - rmse, rmses.std(0), lpd - lpds.mean(0)))
    return found


@dataclass(frozen=True)
class Dependence:
    """The prediction as one input varies, averaged over rows whose other inputs keep their values."""

    name: str
    """Name of the input."""
    x: Float[ndarray, " n"]
    """Values of the input; 0, 1, 2, ... if they have labels."""
    labels: tuple[str, ...] | None
    """Labels of the values, such as categories; None for numbers."""
    mean: Float[ndarray, "n q"]
    """Average of the predictions, in the units of the targets."""
    epistemic_std: Float[ndarray, "n q"]
    """Uncertainty about the function at a single row, from the average of the variances."""
    std: Float[ndarray, "n q"]
    """The same about a single measurement."""

    def band(self, level: float = 0.9, *, noise: bool = True) -> tuple[Float[ndarray, "n q"], Float[ndarray, "n q"]]:
        """Return lower and upper end of a central Gaussian band for a single row; that of the average is narrower.

        Parameters
        ----------
        level, noise : float, default 0.9, bool, default True
            Probability of the band, and whether it is that of measurements (True) or of the function (False).
        """
        half = ndtri((1 + level) / 2) * (self.std if noise else self.epistemic_std)
        return self.mean - half, self.mean + half


def partial_dependence(
    model: Any, X: Any, *, inputs: Sequence[Input] | None = None, n: int = 25, max_rows: int = BACKGROUND
) -> list[Dependence]:
    """Compute average predictions as one input varies and the others keep their values in the rows of X.

    If inputs are correlated, some of these rows are combinations that never occur; the epistemic band is wide there.

    Parameters
    ----------
    model : fitted regressor
        Anything with a method `predictive`.
    X : array of shape (m, d)
        Rows to average over; a single row gives the curve of that row.
    inputs : sequence of Input, optional
        Which columns of X belong together, and the values to evaluate; by default, each column is an input.
    n, max_rows : int, default 25, int, default 100
        Number of values of an input without a grid, and of rows: of more, a random subset is used, always the same.
    """
    table, predictive = _table_of(X), getattr(model, "fitted_", model).predictive
    m, found = len(table), []
    rows = table if m <= max_rows else table[np.sort(np.random.default_rng(0).choice(m, max_rows, replace=False))]
    for one in _inputs_of(model, X, inputs):
        values = _values(one, table, n)
        changed = np.repeat(rows[None], len(values), 0)
        changed[:, :, one.columns] = values[:, None]
        p = predictive(changed.reshape(-1, rows.shape[1]))
        parts = (each.reshape(len(values), len(rows), -1).mean(1) for each in (p.point, p.epistemic_var, p.noise_var))
        point, epistemic, noise = parts
        named = one.labels is not None or values.shape[1] > 1
        x = np.arange(len(values), dtype=float) if named else values[:, 0]
        std = np.sqrt(epistemic + noise)
        found.append(Dependence(one.name, x, one.labels, point, np.sqrt(epistemic), std))
    return found


def _scores(p: Prediction, y: Float[ndarray, "m q"]) -> tuple[Float[ndarray, " q"], Float[ndarray, " q"]]:
    """RMSE and LPD of each target, over the rows where it is known."""
    point = p.point.reshape(y.shape)
    density = p.log_prob(np.where(np.isnan(y), point, y), per_output=True).reshape(y.shape)
    return np.sqrt(np.nanmean(np.square(y - point), 0)), np.nanmean(np.where(np.isnan(y), np.nan, density), 0)


def _values(one: Input, X: Float[ndarray, "m d"], n: int) -> Float[ndarray, "n k"]:
    """Values of an input for partial dependence: its grid, or at most n values from its range in X."""
    if one.grid is not None:
        return np.asarray(one.grid, dtype=float)
    if len(one.columns) > 1:
        raise InputError(f"input {one.name!r} has {len(one.columns)} columns: give it a grid of values")
    there = np.unique(X[:, one.columns[0]])
    return (there if len(there) <= n else np.linspace(there[0], there[-1], n))[:, None]


def _table_of(X: Any) -> Float[ndarray, "m d"]:
    """Convert arrays, data frames and tensors to a table of finite numbers."""
    table = np.asarray(as_array(X), dtype=float)
    if table.ndim != 2 or not len(table):
        raise InputError(f"X has shape {table.shape}: importance and dependence need a table with at least one row")
    check_finite(table, "X")
    return table


def _inputs_of(model: Any, X: Any, inputs: Sequence[Input] | None) -> list[Input]:
    d = np.shape(as_array(X))[1]
    if inputs is None:
        fitted = model if isinstance(model, Fitted) else getattr(model, "fitted_", None)
        asked = getattr(X, "columns", None), getattr(fitted, "feature_names", None)
        names = next((each for each in asked if each is not None), [f"input {j + 1}" for j in range(d)])
        return [Input(str(name), (j,)) for j, name in enumerate(names)]
    for one in inputs:
        if not one.columns or min(one.columns) < 0 or max(one.columns) >= d:
            raise InputError(f"input {one.name!r} has columns {one.columns}, counted from 0, but X has {d} columns")
    return list(inputs)


@dataclass(frozen=True)
class Effect:
    """Contribution of one input to the targets, in their units; its mean over the training rows is zero."""

    name: str
    """Name of the input."""
    x: Float[ndarray, " n"]
    """Values of the input."""
    mean: Float[ndarray, "n q"]
    """Contribution to each target, averaged over the additive members."""
    std: Float[ndarray, "n q"]
    """Its epistemic standard deviation."""


def additive_effects(model: Any, *, names: Sequence[str] | None = None, n: int = 101) -> list[Effect]:
    """Compute the effect of each input over its range in the training rows, by the additive members.

    Parameters
    ----------
    model : fitted regressor
        A model whose mixture has additive members, as the default mixture does.
    names, n : sequence of str, optional, int, default 101
        Names of the inputs, by default those of the training table, and number of values of each.
    """
    fitted = as_fitted(model, "an additive part")
    groups = [layer for layer in fitted.state.layers if fitted.members[layer.places[0]].family == ADDITIVE]
    if not groups:
        raise InputError(
            "this model has no additive members: the default mixture has them if there are at least 20 rows "
            '(encoding="auto" or "piecewise"; with "auto", at most 100 columns)'
        )
    (layer,), d = groups, fitted.n_features_in
    names = names or fitted.feature_names or [f"input {j + 1}" for j in range(d)]
    return [_effect(fitted, layer, j, str(names[j]), n) for j in range(d)]


@torch.no_grad()
def _effect(fitted: Fitted, layer: State, j: int, name: str, n: int) -> Effect:
    encoding, inputs, d = layer.network.bins, fitted.inputs, fitted.n_features_in
    assert inputs is not None
    slope, shift = (x[..., encoding.column == j].double() for x in (encoding.slope, encoding.shift))
    live = slope > 0
    low, high = _least(-shift / slope, live), -_least((shift - 1) / slope, live)
    points = torch.zeros(n, d, dtype=torch.float64, device=slope.device)
    points[:, j] = torch.linspace(low, high, n, dtype=torch.float64)
    grid = (points[:, j].cpu() * inputs.scale[j] + inputs.mean[j]).numpy()
    own = torch.cat([encoding.column == j, torch.arange(d, device=slope.device) == j])
    phi = centred(TorchOps, layer, points.to(layer.centre)) * own
    mean: ndarray = (phi @ layer.weights).cpu().numpy()
    cost: ndarray = TorchOps.block_sum((phi @ layer.root).square(), layer.n_costs).cpu().numpy()
    places = layer.places
    factor = np.stack([fitted.curve(i).widening * fitted.curve(i).slope for i in places])[:, None]
    within = cost * factor * np.square(fitted.noise_std[places])[:, None]
    return Effect(name, grid, mean.mean(0), np.sqrt(within.mean(0) + mean.var(0)))


def _least(knots: Tensor, live: Tensor) -> float:
    """Smallest knot of the bins with positive width; 0 for a constant input."""
    return float(knots[live].min()) if bool(live.any()) else 0.0
