"""Which rows a network is trained on and which it never sees."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer.errors import InputError
from lastlayer.extrapolation import blocked_folds


@dataclass(frozen=True)
class Split:
    """Rows to train on, rows held out, and what the latter speak for: "random" rows for interpolation, "blocked" ones
    for extrapolation, "given" ones for whatever the user's splitter has in mind."""

    train: Int[ndarray, " r"]
    held: Int[ndarray, " h"]
    kind: str

    @classmethod
    def everything(cls, m: int) -> "Split":
        return cls(np.arange(m), np.empty(0, dtype=int), "all")


def random_splits(m: int, k: int, rng: np.random.Generator) -> list[Split]:
    """Each row is held out once, by chance together with others."""
    return _leave_out(m, np.array_split(rng.permutation(m), k), "random")


def blocked_splits(X: Float[ndarray, "m d"], k: int) -> list[Split]:
    """Each row is held out once, together with its neighbours."""
    return _leave_out(len(X), blocked_folds(X, k), "blocked")


def given_splits(splitter: Any, X: ndarray, y: ndarray, groups: Any = None) -> list[Split]:
    """The splits of a scikit-learn splitter, such as GroupKFold or TimeSeriesSplit."""
    if not hasattr(splitter, "split"):
        raise InputError(
            f"calibration={splitter!r} is no splitter: give an object with split(X, y, groups), such as "
            "sklearn.model_selection.GroupKFold(5), or one of 'auto', 'alpha', None"
        )
    try:
        splits = [Split(np.asarray(train), np.asarray(held), "given") for train, held in splitter.split(X, y, groups)]
    except (TypeError, ValueError) as error:
        raise InputError(f"calibration={splitter!r} could not split {len(X)} rows: {error}") from error
    if not splits or any(len(split.train) < 2 or not len(split.held) for split in splits):
        raise InputError(f"calibration={splitter!r} gave a split with fewer than 2 training rows or none held out")
    for split in splits:
        rows = np.concatenate([split.train, split.held])
        if rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= len(X):
            raise InputError(f"calibration={splitter!r} gave rows that are no numbers from 0 to {len(X) - 1}")
        if np.isin(split.held, split.train).any():
            raise InputError(f"calibration={splitter!r} holds rows out that it also trains on: nothing can be learned")
    return splits


def _leave_out(m: int, folds: list[ndarray], kind: str) -> list[Split]:
    every = np.arange(m)
    return [Split(np.setdiff1d(every, fold), np.sort(fold), kind) for fold in folds]
