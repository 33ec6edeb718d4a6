"""Measured episodes, the rows of a regression that they become, and how such rows are split.

NARX: y_{k+1} = f(y_k, ..., y_{k-l+1}, u_k, ..., u_{k-n+1}). With one lag of each, and outputs that are the whole state,
it is a state-space model. Rows of one episode share measurements, so they leave together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from sklearn.preprocessing import StandardScaler

from lastlayer.errors import InputError
from lastlayer.extrapolation import blocked_folds
from lastlayer.inputs import as_array, check_finite


@dataclass(frozen=True, eq=False)
class Episode:
    """One uninterrupted experiment: outputs y_0 ... y_T, and inputs u_0 ... u_{T-1} that led from one to the next."""

    outputs: Float[ndarray, "t1 q"]
    inputs: Float[ndarray, "t d"]

    @classmethod
    def of(cls, outputs: Any, inputs: Any) -> "Episode":
        """From arrays with one row (or number) per step; an input of the last step leads nowhere and is left out."""
        y, u = _table(outputs, "outputs"), _table(inputs, "inputs")
        if len(y) < 2 or len(u) not in (len(y), len(y) - 1):
            raise InputError(
                f"an episode of {len(y)} outputs and {len(u)} inputs: give at least 2 outputs, and as many inputs or "
                "one fewer, since input k acts from output k to output k + 1"
            )
        return cls(y, u[: len(y) - 1])

    def __len__(self) -> int:
        """Steps."""
        return len(self.inputs)

    def cut(self, n: int) -> "list[Episode]":
        """n episodes of about the same length, none of which shares a measurement with another."""
        if not 1 <= n <= len(self.outputs) // 2:
            raise InputError(f"an episode of {len(self.outputs)} outputs cannot be cut into {n}: each needs 2 of them")
        ends = np.linspace(0, len(self.outputs), n + 1).round().astype(int)
        return [Episode(self.outputs[a:b], self.inputs[a : b - 1]) for a, b in pairwise(ends)]


def check_episodes(episodes: Any) -> list[Episode]:
    """A list of episodes with the same columns."""
    listed = [episodes] if isinstance(episodes, Episode) else list(episodes)
    wrong = [type(e).__name__ for e in listed if not isinstance(e, Episode)]
    if wrong or not listed:
        given = f"a {wrong[0]}" if wrong else "nothing"
        raise InputError(f"episodes must be a list of Episode, and {given} was given: Episode.of(outputs, inputs)")
    shapes = {(e.outputs.shape[1], e.inputs.shape[1]) for e in listed}
    if len(shapes) > 1:
        raise InputError(f"episodes have different numbers of outputs and inputs: {sorted(shapes)}")
    return listed


def _table(values: Any, name: str) -> Float[ndarray, "t n"]:
    array = np.asarray(as_array(values), dtype=float)
    if array.ndim not in (1, 2):
        raise InputError(f"{name} have shape {array.shape}: give a table, one row a step")
    check_finite(array, name)
    return array[:, None] if array.ndim == 1 else array


@dataclass(frozen=True, eq=False)
class LagTable:
    """Rows of a one-step regression; no row reaches across the border of its episode."""

    X: Float[ndarray, "m d"]
    next_outputs: Float[ndarray, "m q"]
    targets: Float[ndarray, "m q"]
    """What the regression is of: the next outputs, or what is added to the present ones."""
    episode: Int[ndarray, " m"]
    """The number of the episode a row is from: the groups of splits by episode."""


@dataclass(frozen=True, eq=False)
class Windows:
    """Stretches of episodes to be predicted many steps ahead."""

    starts: Float[ndarray, "b n"]
    """States."""
    inputs: Float[ndarray, "b h d"]
    outputs: Float[ndarray, "b h q"]
    """What was measured after each input."""


@dataclass(frozen=True)
class Lags:
    """How many past outputs and inputs, the present ones included, a step depends on."""

    outputs: int = 1
    inputs: int = 1
    increments: bool = False
    """Whether y_{k+1} - y_k is learned in place of y_{k+1}: better where a step changes little."""

    def __post_init__(self) -> None:
        if self.outputs < 1 or self.inputs < 1:
            raise InputError(f"outputs={self.outputs}, inputs={self.inputs}: a step depends on at least one of each")

    @property
    def first(self) -> int:
        """The first step of an episode with enough past."""
        return max(self.outputs, self.inputs) - 1

    def table(self, episodes: Sequence[Episode] | Episode) -> LagTable:
        """Every step of every episode that has enough past within its own episode."""
        listed = check_episodes(episodes)
        steps = [(i, e, k) for i, e in enumerate(listed) for k in range(self.first, len(e))]
        if not steps:
            raise InputError(f"no episode is longer than its lags: {max(map(len, listed))} steps at most, {self}")
        q = listed[0].outputs.shape[1]
        X = np.stack([self.join(self.state(e, k), e.inputs[k], q) for _, e, k in steps])
        after = np.stack([e.outputs[k + 1] for _, e, k in steps])
        return LagTable(X, after, after - X[:, :q] if self.increments else after, np.array([i for i, _, _ in steps]))

    def windows(self, episodes: Sequence[Episode] | Episode, horizon: int, *, stride: int | None = None) -> Windows:
        """All stretches of `horizon` steps that start every `stride` steps, one after the other unless given."""
        listed, stride = check_episodes(episodes), horizon if stride is None else stride
        found = [(e, k) for e in listed for k in range(self.first, len(e) - horizon + 1, stride)]
        if not found:
            raise InputError(
                f"no episode holds {horizon} steps after {self.first} steps of past: the longest has "
                f"{max(map(len, listed))}"
            )
        return Windows(
            np.stack([self.state(e, k) for e, k in found]),
            np.stack([e.inputs[k : k + horizon] for e, k in found]),
            np.stack([e.outputs[k + 1 : k + 1 + horizon] for e, k in found]),
        )

    def state(self, episode: Episode, step: int | None = None) -> Float[ndarray, " n"]:
        """[y_k, ..., y_{k-l+1}, u_{k-1}, ..., u_{k-n+1}] at a step, the last one unless given."""
        k = len(episode) if step is None else step
        if not self.first <= k <= len(episode):
            raise InputError(f"step {k} of an episode of {len(episode)} steps: its lags need a past of {self.first}")
        past = [episode.outputs[k - i] for i in range(self.outputs)]
        return np.concatenate(past + [episode.inputs[k - i] for i in range(1, self.inputs)])

    def n_state(self, n_outputs: int, n_inputs: int) -> int:
        return self.outputs * n_outputs + (self.inputs - 1) * n_inputs

    def join(self, state: Float[ndarray, "*b n"], u: Float[ndarray, "*b d"], n_outputs: int) -> Float[ndarray, "*b x"]:
        """The regression's row: [outputs, u_k, past inputs]."""
        k = self.outputs * n_outputs
        return np.concatenate([state[..., :k], u, state[..., k:]], axis=-1)

    def shift(self, n_outputs: int, n_inputs: int) -> tuple[Float[ndarray, "n n"], Float[ndarray, "n d"]]:
        """Matrices F, G of what a step does to the state apart from the new output: s+ = [y+, 0] + F s + G u."""
        n, k = self.n_state(n_outputs, n_inputs), self.outputs * n_outputs
        F, G = np.zeros((n, n)), np.zeros((n, n_inputs))
        F[n_outputs:k, : k - n_outputs] = np.eye(k - n_outputs)
        if self.inputs > 1:
            F[k + n_inputs :, k : n - n_inputs] = np.eye(n - k - n_inputs)
            G[k : k + n_inputs] = np.eye(n_inputs)
        return F, G


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
    Z = StandardScaler().fit_transform(X)
    parts = [Z[number == i] for i in range(number.max() + 1)]
    looks = np.stack([np.concatenate([part.mean(0), part.std(0)]) for part in parts])
    centred = looks - looks.mean(0)
    return centred @ np.linalg.svd(centred, full_matrices=False)[2][:1].T
