"""Folds in input space: contiguous blocks, and the rows farthest from the centre."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer.errors import InputError


def blocked_folds(X: Float[ndarray, "m d"], k: int) -> list[Int[ndarray, " r"]]:
    """Split the rows of a table into k contiguous blocks of equal size, in standardised inputs.

    The set is cut across its longest principal direction, and each part is cut again. In one dimension the blocks are
    intervals, in more dimensions cells; the outermost ones lie outside the convex hull of the rest.

    Parameters
    ----------
    X : ndarray of shape (m, d)
        The table.
    k : int
        Number of blocks.
    """
    m = len(X)
    if not 2 <= k <= m:
        raise InputError(f"k={k} blocks of {m} rows: k must lie between 2 and the number of rows")
    return _cut(_standardised(X), np.arange(m), k)


def outer_folds(X: Float[ndarray, "m d"], inner: Sequence[float]) -> list[Int[ndarray, " r"]]:
    """Select the rows farthest from the centre of a table, in standardised inputs."""
    order = np.argsort((_standardised(X) ** 2).sum(1), kind="stable")
    return [order[max(2, round(share * len(order))) :] for share in inner]


def _standardised(X: Float[ndarray, "m d"]) -> Float[ndarray, "m d"]:
    scale = X.std(0)
    Z: ndarray = (X - X.mean(0)) / np.where(scale > 0, scale, 1.0)
    return Z


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
