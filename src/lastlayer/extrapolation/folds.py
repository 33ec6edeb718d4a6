"""Hold-out blocks that speak for extrapolation: points that are neighbours leave together."""

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer.errors import InputError


def blocked_folds(X: Float[ndarray, "m d"], k: int) -> list[Int[ndarray, " r"]]:
    """Split the rows of a table into k contiguous blocks of equal size, in standardised inputs.

    The set is cut across its longest principal direction, then each part again: in one dimension the blocks are
    intervals, in more they are cells, and the outermost ones lie outside the convex hull of the rest.
    """
    m = len(X)
    if not 2 <= k <= m:
        raise InputError(f"k={k} blocks of {m} rows: k must lie between 2 and the number of rows")
    scale = X.std(0)
    Z = (X - X.mean(0)) / np.where(scale > 0, scale, 1.0)
    return _cut(Z, np.arange(m), k)


def _cut(Z: ndarray, rows: ndarray, k: int) -> list[ndarray]:
    if k == 1:
        return [np.sort(rows)]
    part = Z[rows] - Z[rows].mean(0)
    direction = np.linalg.svd(part, full_matrices=False)[2][0]
    order = rows[np.argsort(part @ direction, kind="stable")]
    if direction[np.abs(direction).argmax()] < 0:  # the sign of a singular vector is arbitrary
        order = order[::-1]
    left = k // 2
    cut = round(len(rows) * left / k)
    return _cut(Z, order[:cut], left) + _cut(Z, order[cut:], k - left)
