"""Partial dependence: what predictions do on average as one input varies, with bands."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import ndtri

from lastlayer.explain.inputs import Input, inputs_of, predictor_of, table_of

BACKGROUND = 100


@dataclass(frozen=True)
class Dependence:
    """The prediction as one input varies, averaged over rows that keep all their other inputs."""

    name: str
    x: Float[ndarray, " n"]
    """Values of the input; where these have names, 0, 1, 2, ..."""
    labels: tuple[str, ...] | None
    mean: Float[ndarray, "n q"]
    """Average of the predictions, in the units of the targets."""
    epistemic_std: Float[ndarray, "n q"]
    """Root of the average epistemic variance: how unsure the model is of its function at a single row."""
    std: Float[ndarray, "n q"]
    """The same with noise: how far a single measurement may lie from its prediction."""

    def band(self, level: float = 0.9, *, noise: bool = True) -> tuple[Float[ndarray, "n q"], Float[ndarray, "n q"]]:
        """Mean less and plus as many standard deviations as hold `level` of a Gaussian; of a single row, not of the
        average, which would be narrower."""
        half = ndtri((1 + level) / 2) * (self.std if noise else self.epistemic_std)
        return self.mean - half, self.mean + half


def partial_dependence(
    model: Any, X: Any, *, inputs: Sequence[Input] | None = None, n: int = 25, max_rows: int = BACKGROUND
) -> list[Dependence]:
    """What predictions do on average when one input varies and the others stay as they are in rows of X.

    Where inputs vary together, some of these rows are combinations that never occur: the epistemic band is wide there.

    Parameters
    ----------
    model : fitted regressor
        Anything with a method `predictive`.
    X : array of shape (m, d)
        Rows to average over; a single typical row gives its own curve.
    inputs : sequence of Input, optional
        Which columns of X belong together, and the values to go through.
    n : int, default 25
        Values of an input that has no grid of its own.
    max_rows : int, default 100
        Of more rows, so many are picked at random, always the same.

    Returns
    -------
    list of Dependence
        In the order of the inputs.

    Raises
    ------
    InputError
        If X is no table of finite numbers, or an input of several columns has no grid.

    Examples
    --------
    >>> import numpy as np
    >>> from lastlayer import BLLRegressor
    >>> X = np.random.default_rng(0).uniform(-1, 1, (80, 2))
    >>> model = BLLRegressor(preset="fast", max_epochs=20, random_state=0).fit(X, 3 * X[:, 0])
    >>> first, second = partial_dependence(model, X, n=5)
    >>> bool(np.ptp(first.mean) > 10 * np.ptp(second.mean))
    True
    """
    table, say = table_of(X), predictor_of(model)
    if len(table) > max_rows:
        rows = table[np.sort(np.random.default_rng(0).choice(len(table), max_rows, replace=False))]
    else:
        rows = table
    found = []
    for one in inputs_of(model, X, inputs):
        values = one.values(table, n)
        changed = np.repeat(rows[None], len(values), 0)
        changed[:, :, one.columns] = values[:, None]
        p = say(changed.reshape(-1, rows.shape[1]))
        average = partial(_average, n=len(values))
        epistemic, noise = average(p.epistemic_var), average(p.noise_var)
        named = one.labels is not None or values.shape[1] > 1
        x = np.arange(len(values), dtype=float) if named else values[:, 0]
        std = np.sqrt(epistemic + noise)
        found.append(Dependence(one.name, x, one.labels, average(p.mean), np.sqrt(epistemic), std))
    return found


def _average(each: ndarray, n: int) -> Float[ndarray, "n q"]:
    """Over the rows of each of n values."""
    return each.reshape(n, -1, each.shape[1] if each.ndim > 1 else 1).mean(1)
