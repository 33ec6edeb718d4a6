"""Splits into training rows and held-out rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer.data.rows import Rows
from lastlayer.errors import InputError
from lastlayer.settings.resolve import N_FOLDS
from lastlayer.settings.types import Settings

SHELLS = (0.4, 0.6, 0.8)


@dataclass(frozen=True)
class Split:
    """Training rows, held-out rows, and the kind of the split."""

    train: Int[ndarray, " r"]
    held: Int[ndarray, " h"]
    kind: str
    n_groups: int
    """Number of groups of training rows; near copies form one group."""


def given_splits(splitter: Any, X: ndarray, y: ndarray, groups: Any = None) -> list[Split]:
    """Splits of a scikit-learn splitter, such as GroupKFold or TimeSeriesSplit."""
    if not hasattr(splitter, "split"):
        raise InputError(
            f"calibration={splitter!r} is not a splitter: give an object with split(X, y, groups), such as "
            "sklearn.model_selection.GroupKFold(5), or one of 'auto', 'alpha', None"
        )
    try:
        splits = [
            Split(np.asarray(train), np.asarray(held), "given", len(train))
            for train, held in splitter.split(X, y, groups)
        ]
    except (TypeError, ValueError) as error:
        raise InputError(f"calibration={splitter!r} could not split {len(X)} rows: {error}") from error
    if not splits or any(len(split.train) < 2 or not len(split.held) for split in splits):
        raise InputError(f"calibration={splitter!r} gave a split with fewer than 2 training rows or no held-out rows")
    for split in splits:
        rows = np.concatenate([split.train, split.held])
        if rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= len(X):
            raise InputError(f"calibration={splitter!r} gave rows that are not indices from 0 to {len(X) - 1}")
        if np.isin(split.held, split.train).any():
            raise InputError(f"calibration={splitter!r} holds rows out that it also trains on: nothing can be learned")
    return splits


def leave_out(groups: Int[ndarray, " m"], folds: Sequence[Int[ndarray, "_"]], kind: str) -> list[Split]:
    """Hold out all rows of some groups, and train on the others."""
    held, m = [(fold, np.isin(groups, fold)) for fold in folds], int(groups.max()) + 1
    return [Split(np.flatnonzero(~rows), np.flatnonzero(rows), kind, m - len(fold)) for fold, rows in held]


def centres(X: Float[ndarray, "m d"], groups: Int[ndarray, " m"]) -> Float[ndarray, "g d"]:
    """Mean of each group's rows."""
    total = np.zeros((int(groups.max()) + 1, X.shape[1]))
    np.add.at(total, groups, X)
    return total / np.bincount(groups)[:, None]


def folds_for(settings: Settings, rows: Rows, *, splitter: Any = None, labels: Any = None) -> list[Split]:
    """Splits that the plan prescribes: none, unless training rows calibrate; `labels`: groups as given."""
    plan, n_blocks, rng = settings.plan, settings.ensemble.n_blocks, np.random.default_rng(settings.seed)
    X, y = rows.main.X.numpy(force=True), rows.main.readings.t.numpy(force=True)
    X = X[..., None] if settings.network.ids else X  # ids are not points of a space that could be split into blocks
    if plan.rows == "given":
        return given_splits(splitter, X, y, labels)
    if plan.rows not in ("folds", "holdout"):
        return []
    groups = rows.copies if rows.groups is None else rows.groups
    groups = np.arange(len(X)) if groups is None else groups
    if (m := int(groups.max()) + 1) < 2:
        raise InputError(
            f"all {len(X)} rows are of one group, or copies of each other: none can be held out. Give two groups or "
            "more, or omit groups"
        )
    if plan.rows == "holdout":
        n_held = min(m - 1, max(min(2, m // 2), round(settings.training.validation_fraction * m)))
        return leave_out(groups, [rng.permutation(m)[:n_held]], "random")
    k = min(max(settings.ensemble.n_members, N_FOLDS), m)
    random = leave_out(groups, np.array_split(rng.permutation(m), k), "random")
    if X.ndim != 2 or min(n_blocks, m // 2) < 2:
        return random
    middle = centres(X.astype(float), groups)
    blocked = leave_out(groups, blocked_folds(middle, min(n_blocks, m // 2)), "blocked")
    if plan.what == "alpha":
        return blocked
    return random + blocked + leave_out(groups, outer_folds(middle, SHELLS[: max(1, n_blocks - 2)]), "shell")


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
