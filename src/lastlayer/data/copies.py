"""Rows that are held out together: duplicates, which become one row of larger weight, near copies, and given groups."""

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import KDTree
from scipy.spatial.distance import pdist

NEAR, NEAR_TARGET = 0.1, 1e-3
"""Distances relative to the typical distance between neighbours and to the standard deviation of a target: rows closer
in both may be copies, through which training rows would leak into held-out rows."""
SEARCHED_ROWS = 5_000
"""In larger tables only rows with equal inputs are grouped."""
SAMPLE = 500
SHARE = 0.5
"""Fraction of rows with copies above which rows are grouped: if copies are exceptions, a new row may be one as well."""


def distinct(
    X: Float[ndarray, "m d"], y: Float[ndarray, "m q"], weight: Float[ndarray, " m"] | None
) -> tuple[Int[ndarray, " k"], Int[ndarray, " m"], Float[ndarray, " k"] | None]:
    """Merge duplicate rows, in an order that does not depend on the given one."""
    count = np.ones(len(X)) if weight is None else weight
    rows = np.flatnonzero(count > 0)
    columns = np.concatenate([X, y], 1)
    order = rows[np.lexsort(columns[rows].T[::-1])]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (columns[order[1:]] != columns[order[:-1]]).any(1)
    place = np.full(len(X), -1)
    place[order] = np.cumsum(first) - 1
    total = np.bincount(place[order], count[order])
    return order[first], place, None if (total == 1).all() else total


def near_groups(Z: Float[ndarray, "m d"], T: Float[ndarray, "m q"]) -> Int[ndarray, " m"]:
    """Group index of each standardised row: rows with equal inputs, or with nearly equal inputs and targets."""
    m, group = len(Z), _near(Z, T)
    return group if (np.bincount(group)[group] > 1).mean() > SHARE else np.arange(m)


def joined(copies: Int[ndarray, " m"], groups: Int[ndarray, " m"]) -> Int[ndarray, " m"]:
    """Group index of each row after merging groups that share rows."""
    n, m = int(copies.max()) + 1, len(copies)
    size = n + int(groups.max()) + 1
    links = coo_array((np.ones(m), (copies, n + groups)), shape=(size, size))
    numbers: ndarray = connected_components(links, directed=False)[1][copies]
    return np.unique(numbers, return_inverse=True)[1].reshape(m)


def whole_groups(groups: Int[ndarray, " m"], n: int, order: Int[ndarray, " g"]) -> Int[ndarray, " r"]:
    """Rows of whole groups, taken in this order until there are n; at least one group remains."""
    rows = np.bincount(groups, minlength=len(order))[order].cumsum()
    taken = order[: min(int(np.searchsorted(rows, n)) + 1, len(order) - 1)]
    return np.flatnonzero(np.isin(groups, taken))


def _near(Z: Float[ndarray, "m d"], T: Float[ndarray, "m q"]) -> Int[ndarray, " m"]:
    m = len(Z)
    if m > SEARCHED_ROWS:
        return np.unique(Z, axis=0, return_inverse=True)[1].reshape(m)
    some = Z[np.random.default_rng(0).permutation(m)[:SAMPLE]]
    distances = pdist(some)
    apart = float(np.median(distances[distances > 0])) if (distances > 0).any() else 0.0
    varying = max(1, int((Z.std(0) > 0).sum()))
    tree, group = KDTree(Z), np.full(m, -1)
    near = tree.query_ball_point(Z, NEAR * apart * m ** (-1.0 / varying))
    for row in range(m):
        if group[row] < 0:
            members = np.array(near[row])
            alike = (np.abs(T[members] - T[row]) <= NEAR_TARGET).all(1) | (Z[members] == Z[row]).all(1)
            group[members[alike & (group[members] < 0)]] = row
    return np.unique(group, return_inverse=True)[1].reshape(m)
