"""Rows that are held out together: duplicates, which become one row of larger weight, near copies, and given groups."""

from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int, Int64
from numpy import ndarray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import KDTree
from scipy.spatial.distance import pdist

from lastlayer.settings.types import Given

NEAR, NEAR_TARGET = 0.1, 1e-3
"""Distances relative to the typical distance between neighbours and to the standard deviation of a target: rows closer
in both may be copies, through which training rows would leak into held-out rows."""
SEARCHED_ROWS = 5_000
"""In larger tables only rows with equal inputs are grouped."""
SAMPLE = 500
ODD, MIX, SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(31)
SHARE = 0.5
"""Fraction of rows with copies above which rows are grouped: if copies are exceptions, a new row may be one as well."""


def distinct(given: Given) -> Given:
    """Merge rows that are equal in all but their weights, in an order that does not depend on the given one.

    Rows of weight zero vanish, and missing targets are equal. Fewer than two rows that differ are left as they are.
    """
    m, X = len(given.X), given.X
    if not given.is_table:
        key = fingerprints(X.reshape(m, -1))
        X = np.stack([key >> 32, key & 0xFFFFFFFF], 1)  # exact as floats
    rest = [x.reshape(m, -1) for x in (given.noise_std, given.groups) if x is not None]
    weight = np.ones(m) if given.weight is None else given.weight
    used, table = np.flatnonzero(weight > 0), np.concatenate([X, given.y, *rest], 1)
    order = used[np.lexsort(table[used].T[::-1])]
    here, before = table[order[1:]], table[order[:-1]]
    first = np.ones(len(order), dtype=bool)  # whether a row differs from the one before
    first[1:] = ((here != before) & ~(np.isnan(here) & np.isnan(before))).any(1)
    place, kept, number = np.full(m, -1), order[first], np.cumsum(first) - 1
    place[order] = number
    total = np.bincount(number, weight[order])
    if len(kept) < 2:
        return given
    return replace(
        given,
        X=given.X[kept],
        y=given.y[kept],
        weight=None if (total == 1).all() else total,
        groups=None if given.groups is None else given.groups[kept],
        noise_std=None if given.noise_std is None else given.noise_std[kept],
        place=place,
    )


def fingerprints(columns: ndarray) -> Int64[ndarray, " m"]:
    """64-bit hash of each row of numbers: two different rows collide once in 10^19."""
    exact = columns if columns.dtype.kind == "i" else columns.astype(float, copy=False) + 0.0  # -0.0 becomes 0.0
    bits = np.ascontiguousarray(exact).view(np.uint64)
    key = np.zeros(len(bits), dtype=np.uint64)
    for column in bits.T:
        key = (key ^ column) * ODD
        key = (key ^ (key >> SHIFT)) * MIX
        key ^= key >> SHIFT
    return key.view(np.int64)


def near_groups(Z: Float[ndarray, "m d"], T: Float[ndarray, "m q"]) -> Int[ndarray, " m"]:
    """Group index of each standardised row: rows with equal inputs, or with nearly equal inputs and targets."""
    m, group = len(Z), np.full(len(Z), -1)
    if m > SEARCHED_ROWS:
        group = np.unique(Z, axis=0, return_inverse=True)[1].reshape(m)
    else:
        distances = pdist(Z[np.random.default_rng(0).permutation(m)[:SAMPLE]])
        apart = float(np.median(distances[distances > 0])) if (distances > 0).any() else 0.0
        varying = max(1, int((Z.std(0) > 0).sum()))
        near = KDTree(Z).query_ball_point(Z, NEAR * apart * m ** (-1.0 / varying))
        for row in range(m):
            if group[row] < 0:
                members = np.array(near[row])
                alike = (np.abs(T[members] - T[row]) <= NEAR_TARGET).all(1) | (Z[members] == Z[row]).all(1)
                group[members[alike & (group[members] < 0)]] = row
        group = np.unique(group, return_inverse=True)[1].reshape(m)
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
