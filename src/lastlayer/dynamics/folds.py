"""Splits by episode: rows of one episode share measurements, so they leave together."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer.errors import InputError
from lastlayer.extrapolation import blocked_folds


class EpisodeFolds:
    """A splitter for `BLLRegressor(calibration=...)`: whole episodes are held out, `groups` are their numbers.

    Each episode is held out once by chance together with others, which speaks for interpolation. Then those at either
    end of the direction in which means and spreads of episodes differ most are held out together, which speaks for
    extrapolation: episodes of the largest amplitude are predicted by networks that never saw such.
    """

    def __init__(self, n_folds: int = 5, *, random_state: int = 0) -> None:
        self.n_folds, self.random_state = n_folds, random_state

    def __repr__(self) -> str:
        return f"EpisodeFolds(n_folds={self.n_folds})"

    def split(self, X: ndarray, y: Any = None, groups: Any = None) -> Iterator[tuple[ndarray, ndarray]]:
        """Rows to train on, rows held out."""
        if groups is None:
            raise InputError("splits by episode need groups=..., the number of the episode of every row")
        episodes, number = np.unique(np.asarray(groups), return_inverse=True)
        if len(episodes) < 2:
            raise InputError("one episode cannot be held out from itself: give more, or episode.cut(10)")
        k = min(self.n_folds, len(episodes))
        order = np.random.default_rng(self.random_state).permutation(len(episodes))
        ends = blocked_folds(_place(np.asarray(X, float), number), k)
        for held in [*np.array_split(order, k), ends[0], ends[-1]]:
            out = np.isin(number, held)
            yield np.flatnonzero(~out), np.flatnonzero(out)


def _place(X: Float[ndarray, "m d"], number: Int[ndarray, " m"]) -> Float[ndarray, "e 1"]:
    """Where each episode lies along the direction in which their means and spreads differ most."""
    scale = X.std(0)
    Z = (X - X.mean(0)) / np.where(scale > 0, scale, 1.0)
    parts = [Z[number == i] for i in range(number.max() + 1)]
    looks = np.stack([np.concatenate([part.mean(0), part.std(0)]) for part in parts])
    centred = looks - looks.mean(0)
    place: ndarray = centred @ np.linalg.svd(centred, full_matrices=False)[2][:1].T
    return place
