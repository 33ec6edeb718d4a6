"""Splits into training rows and held-out rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer.data.rows import Rows
from lastlayer.ensemble.folds import blocked_folds, outer_folds
from lastlayer.errors import InputError
from lastlayer.settings.resolve import N_FOLDS, Settings

SHELLS = (0.4, 0.6, 0.8)


@dataclass(frozen=True)
class Split:
    """Training rows, held-out rows, and the kind of the split."""

    train: Int[ndarray, " r"]
    held: Int[ndarray, " h"]
    kind: str
    n_groups: int
    """Number of groups of training rows; near copies form one group."""

    @classmethod
    def everything(cls, m: int) -> "Split":
        """Train on all m rows, with none held out."""
        return cls(np.arange(m), np.empty(0, dtype=int), "all", m)


def random_splits(groups: Int[ndarray, " m"], k: int, rng: np.random.Generator) -> list[Split]:
    """Hold out each group of rows once, together with others picked at random."""
    return _leave_out(groups, np.array_split(rng.permutation(groups.max() + 1), k), "random")


def blocked_splits(X: Float[ndarray, "m d"], groups: Int[ndarray, " m"], k: int) -> list[Split]:
    """Hold out each group of rows once, together with its neighbours."""
    return _leave_out(groups, blocked_folds(_centres(X, groups), k), "blocked")


def shell_splits(X: Float[ndarray, "m d"], groups: Int[ndarray, " m"], inner: Sequence[float] = SHELLS) -> list[Split]:
    """Hold out the rows farthest from the centre, in standardised inputs; `inner` are the fractions that remain."""
    return _leave_out(groups, outer_folds(_centres(X, groups), inner), "shell")


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


def _centres(X: Float[ndarray, "m d"], groups: Int[ndarray, " m"]) -> Float[ndarray, "g d"]:
    """Mean of each group's rows."""
    count = np.bincount(groups)
    total = np.zeros((len(count), X.shape[1]))
    np.add.at(total, groups, X)
    centres: ndarray = total / count[:, None]
    return centres


def _leave_out(groups: Int[ndarray, " m"], folds: list[ndarray], kind: str) -> list[Split]:
    held, m = [(fold, np.isin(groups, fold)) for fold in folds], int(groups.max()) + 1
    return [Split(np.flatnonzero(~rows), np.flatnonzero(rows), kind, m - len(fold)) for fold, rows in held]


@dataclass(frozen=True)
class Folds:
    """Splits of the networks of an ensemble."""

    partitions: list[list[Split]]
    """Splits held out by networks of the ensemble, one list per partition."""
    trials: list[Split]
    """Splits on which the prior precision is selected."""


def folds_for(settings: Settings, rows: Rows, *, splitter: Any = None, groups: Any = None) -> Folds:
    """Splits that the settings prescribe."""
    rng, calibration = np.random.default_rng(settings.seed), settings.calibration
    X, y = rows.main.X.numpy(force=True), rows.main.T.numpy(force=True)
    X = X[..., None] if settings.ids else X  # ids are not points of a space that could be split into blocks
    together = np.arange(len(X)) if rows.together is None else rows.together
    m = int(together.max()) + 1
    n_partitions = 1 if settings.ensemble == "mixture" else -(-settings.n_members // min(N_FOLDS, m))
    if calibration == "given folds":
        given = given_splits(splitter, X, y, groups)
        return Folds([given] * n_partitions, given)
    by_folds = calibration in ("random and blocked folds", "alpha on blocked folds")
    if calibration != "holdout" and not by_folds and len(settings.families) == 1:
        return Folds([], [])
    if m < 2:
        raise InputError(
            f"all {len(X)} rows are of one group, or copies of each other: none can be held out. Give two groups or "
            "more, or omit groups"
        )
    if calibration == "holdout":
        n_held = min(m - 1, max(min(2, m // 2), round(settings.validation_fraction * m)))
        split = _leave_out(together, [rng.permutation(m)[:n_held]], "random")
        return Folds([split], split)
    k = settings.n_members if settings.ensemble == "mixture" and by_folds else N_FOLDS
    random = [random_splits(together, min(k, m), rng) for _ in range(n_partitions)]
    n_blocks, blocked = min(settings.n_blocks, m // 2), list[Split]()
    if by_folds and X.ndim == 2 and n_blocks > 1:
        blocked = blocked_splits(X.astype(float), together, n_blocks)
    if calibration == "alpha on blocked folds":
        return Folds([blocked or random[0]], random[0])
    shells = SHELLS[: max(1, settings.n_blocks - 2)]
    regions = blocked + (shell_splits(X.astype(float), together, shells) if blocked else [])
    return Folds([splits + regions for splits in random] if by_folds else [], random[0])
