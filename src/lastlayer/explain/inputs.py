"""Inputs as a user knows them: one column of X, or several columns that belong together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer._internal.arrays import as_array, check_finite
from lastlayer.errors import InputError
from lastlayer.predictions.prediction import Prediction
from lastlayer.predictor.fitted import Fitted


@dataclass(frozen=True)
class Input:
    """One input of the user, such as a category that is encoded in several 0/1 columns of X.

    Parameters
    ----------
    name : str
        Name in tables and plots.
    columns : tuple of int
        Its columns in X; they are shuffled and varied together.
    grid : array of shape (n, len(columns)), optional
        Values for partial dependence. Without a grid, a single column varies evenly over its range in X.
    labels : tuple of str, optional
        Labels of these values if they are not numbers.
    """

    name: str
    columns: tuple[int, ...]
    grid: ndarray | None = None
    labels: tuple[str, ...] | None = None

    def values(self, X: ndarray, n: int) -> Float[ndarray, "n k"]:
        """Return the values for partial dependence, in the units of X.

        Parameters
        ----------
        X, n : array of shape (m, d), int
            Table whose column gives the range, and the number of values.
        """
        if self.grid is not None:
            return np.asarray(self.grid, dtype=float)
        if len(self.columns) > 1:
            raise InputError(f"input {self.name!r} has {len(self.columns)} columns: give it a grid of values")
        there = np.unique(X[:, self.columns[0]])
        return (there if len(there) <= n else np.linspace(there[0], there[-1], n))[:, None]


def table_of(X: Any) -> Float[ndarray, "m d"]:
    """Convert arrays, data frames and tensors to a table of finite numbers."""
    table = np.asarray(as_array(X), dtype=float)
    if table.ndim != 2 or not len(table):
        raise InputError(f"X has shape {table.shape}: importance and dependence need a table with at least one row")
    check_finite(table, "X")
    return table


def inputs_of(model: Any, X: Any, inputs: Sequence[Input] | None) -> list[Input]:
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


def predictor_of(model: Any) -> Callable[[ndarray], Prediction]:
    predictive: Callable[[ndarray], Prediction] = getattr(model, "fitted_", model).predictive
    return predictive
