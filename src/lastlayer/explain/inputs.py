"""Inputs as a user knows them: one or several columns of X that belong together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer.errors import InputError
from lastlayer.inputs import as_array, check_finite
from lastlayer.prediction import Prediction
from lastlayer.predictor.fitted import Fitted


@dataclass(frozen=True)
class Input:
    """One input of a user, such as a category that stands in several 0/1 columns of X.

    Parameters
    ----------
    name : str
        As it is called in tables and pictures.
    columns : tuple of int
        Its columns in X: they are permuted and varied together.
    grid : array of shape (n, len(columns)), optional
        Values for partial dependence. Without them, a single column varies evenly over its range in X.
    labels : tuple of str, optional
        Names of these values, where they are no numbers.

    Examples
    --------
    >>> Input("fluid", (3, 4), grid=np.eye(2), labels=("oil", "water")).name
    'fluid'
    """

    name: str
    columns: tuple[int, ...]
    grid: ndarray | None = None
    labels: tuple[str, ...] | None = None

    def values(self, X: ndarray, n: int) -> Float[ndarray, "n k"]:
        """The values to go through, in X's units: those that are there if they are few, or n evenly spaced ones."""
        if self.grid is not None:
            return np.asarray(self.grid, dtype=float)
        if len(self.columns) > 1:
            raise InputError(f"input {self.name!r} stands in {len(self.columns)} columns: give it a grid of values")
        there = np.unique(X[:, self.columns[0]])
        return (there if len(there) <= n else np.linspace(there[0], there[-1], n))[:, None]


def table_of(X: Any) -> Float[ndarray, "m d"]:
    """A table of finite numbers, from arrays, frames and tensors."""
    table = np.asarray(as_array(X), dtype=float)
    if table.ndim != 2 or not len(table):
        raise InputError(f"X has shape {table.shape}: importance and dependence need a table with at least one row")
    check_finite(table, "X")
    return table


def inputs_of(model: Any, X: Any, inputs: Sequence[Input] | None) -> list[Input]:
    """Those that were given, or every column of X under its name."""
    d = np.shape(as_array(X))[1]
    if inputs is None:
        fitted = model if isinstance(model, Fitted) else getattr(model, "fitted_", None)
        names = getattr(X, "columns", None)
        names = names if names is not None else getattr(fitted, "feature_names", None)
        names = names if names is not None else [f"input {j + 1}" for j in range(d)]
        return [Input(str(name), (j,)) for j, name in enumerate(names)]
    for one in inputs:
        if not one.columns or min(one.columns) < 0 or max(one.columns) >= d:
            raise InputError(f"input {one.name!r} stands in columns {one.columns}, but X has {d}: counted from 0")
    return list(inputs)


def predictor_of(model: Any) -> Callable[[ndarray], Prediction]:
    """The model's `predictive`; a fitted value is asked itself, so that arrays pass where frames were fitted."""
    fitted = getattr(model, "fitted_", model)
    predictive: Callable[[ndarray], Prediction] = fitted.predictive
    return predictive
