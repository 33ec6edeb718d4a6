"""Partial dependence: predictions as one input varies, averaged over rows, with bands."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import ndtri

from lastlayer.explain.inputs import Input, inputs_of, predictor_of, table_of

BACKGROUND = 100


@dataclass(frozen=True)
class Dependence:
    """The prediction as one input varies, averaged over rows whose other inputs keep their values.

    Parameters
    ----------
    name : str
        Name of the input.
    x : array of shape (n,)
        Values of the input; 0, 1, 2, ... if they have labels.
    labels : tuple of str or None
        Labels of the values, such as categories; None for numbers.
    mean : array of shape (n, q)
        Average of the predictions, in the units of the targets.
    epistemic_std, std : array of shape (n, q)
        Uncertainty about the function at a single row, and about a single measurement, from averages of the variances.
    """

    name: str
    x: Float[ndarray, " n"]
    labels: tuple[str, ...] | None
    mean: Float[ndarray, "n q"]
    epistemic_std: Float[ndarray, "n q"]
    std: Float[ndarray, "n q"]

    def band(self, level: float = 0.9, *, noise: bool = True) -> tuple[Float[ndarray, "n q"], Float[ndarray, "n q"]]:
        """Return a central Gaussian band around the mean.

        The band is that of a single row; the band of the average would be narrower.

        Parameters
        ----------
        level : float, default 0.9
            Probability of the band.
        noise : bool, default True
            Whether the band is that of measurements (True) or of the function (False).

        Returns
        -------
        lower, upper : array of shape (n, q)
            Ends of the band.
        """
        half = ndtri((1 + level) / 2) * (self.std if noise else self.epistemic_std)
        return self.mean - half, self.mean + half


def partial_dependence(
    model: Any, X: Any, *, inputs: Sequence[Input] | None = None, n: int = 25, max_rows: int = BACKGROUND
) -> list[Dependence]:
    """Compute average predictions as one input varies and the others keep their values in the rows of X.

    If inputs are correlated, some of the rows made in this way are combinations that never occur; the epistemic band is
    wide there.

    Parameters
    ----------
    model : fitted regressor
        Anything with a method `predictive`.
    X : array of shape (m, d)
        Rows to average over; a single row gives the curve of that row.
    inputs : sequence of Input, optional
        Which columns of X belong together, and the values to evaluate; by default, each column is an input.
    n : int, default 25
        Number of values of an input without a grid.
    max_rows : int, default 100
        If X has more rows, a random subset of this size is used, the same in every call.
    """
    table, predictive = table_of(X), predictor_of(model)
    m, found = len(table), []
    rows = table if m <= max_rows else table[np.sort(np.random.default_rng(0).choice(m, max_rows, replace=False))]
    for one in inputs_of(model, X, inputs):
        values = one.values(table, n)
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
