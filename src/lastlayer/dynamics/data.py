"""Measured episodes, the regression rows made from them, and splits of those rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from sklearn.preprocessing import StandardScaler

from lastlayer._internal.arrays import as_array, check_finite
from lastlayer.ensemble.splits import blocked_folds
from lastlayer.errors import InputError


@dataclass(frozen=True, eq=False)
class Episode:
    """One uninterrupted experiment: outputs y_0 ... y_T and the inputs u_0 ... u_{T-1} applied between them."""

    outputs: Float[ndarray, "t1 q"]
    """Measured outputs, one row per step."""
    inputs: Float[ndarray, "t d"]
    """Inputs; row k acts from output k to output k + 1."""

    @classmethod
    def of(cls, outputs: Any, inputs: Any) -> "Episode":
        """Build an episode from arrays with one row, or one number, per step.

        Parameters
        ----------
        outputs, inputs : array-like of shape (t + 1, q), (t, d) or with one dimension
            Measured outputs and inputs; an input given for the last output is dropped.
        """
        y, u = _table(outputs, "outputs"), _table(inputs, "inputs")
        if len(y) < 2 or len(u) not in (len(y), len(y) - 1):
            raise InputError(
                f"an episode of {len(y)} outputs and {len(u)} inputs: give at least 2 outputs, and as many inputs or "
                "one fewer, since input k acts from output k to output k + 1"
            )
        return cls(y, u[: len(y) - 1])

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.inputs)

    def cut(self, n: int) -> "list[Episode]":
        """Cut the episode into n episodes of about the same length that share no measurement.

        Parameters
        ----------
        n : int
            Number of episodes; each needs at least 2 outputs.
        """
        if not 1 <= n <= len(self.outputs) // 2:
            raise InputError(f"an episode of {len(self.outputs)} outputs cannot be cut into {n}: each needs 2 of them")
        ends = np.linspace(0, len(self.outputs), n + 1).round().astype(int)
        return [Episode(self.outputs[a:b], self.inputs[a : b - 1]) for a, b in pairwise(ends)]


def check_episodes(episodes: Any) -> list[Episode]:
    """Check that all episodes have the same numbers of outputs and inputs."""
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
        raise InputError(f"{name} have shape {array.shape}: give a table, one row per step")
    check_finite(array, name)
    return array[:, None] if array.ndim == 1 else array


@dataclass(frozen=True, eq=False)
class LagTable:
    """Rows of a one-step regression; no row reaches across the border of its episode."""

    X: Float[ndarray, "m d"]
    """Lagged outputs and inputs, as `Lags.join` arranges them."""
    next_outputs: Float[ndarray, "m q"]
    """The outputs one step later."""
    targets: Float[ndarray, "m q"]
    """Regression targets: the next outputs, or with `increments` their differences from the present outputs."""
    episode: Int[ndarray, " m"]
    """Index of the episode of each row: the groups for splits by episode."""


@dataclass(frozen=True, eq=False)
class Windows:
    """Segments of episodes to be predicted many steps ahead."""

    starts: Float[ndarray, "b n"]
    """State at the start of each segment, as `Lags.state` returns it."""
    inputs: Float[ndarray, "b h d"]
    """Inputs of each segment."""
    outputs: Float[ndarray, "b h q"]
    """Outputs measured after each input."""


@dataclass(frozen=True)
class Lags:
    """Numbers of outputs and inputs that a step depends on, including the present ones.

    Examples
    --------
    >>> Lags(outputs=2).table(Episode.of(np.arange(4.0), np.zeros(3))).X
    array([[1., 0., 0.],
           [2., 1., 0.]])
    """

    outputs: int = 1
    """Number of outputs: y_k and those before it."""
    inputs: int = 1
    """Number of inputs: u_k and those before it."""
    increments: bool = False
    """Whether to learn y_{k+1} - y_k instead of y_{k+1}; better where a step changes the outputs little."""

    def __post_init__(self) -> None:
        if self.outputs < 1 or self.inputs < 1:
            raise InputError(f"outputs={self.outputs}, inputs={self.inputs}: a step depends on at least one of each")

    @property
    def first(self) -> int:
        """First step of an episode that has enough history."""
        return max(self.outputs, self.inputs) - 1

    def table(self, episodes: Sequence[Episode] | Episode) -> LagTable:
        """Build the regression rows of all steps with enough history in their own episode.

        Parameters
        ----------
        episodes : Episode or sequence of Episode
            Measured episodes.
        """
        listed = check_episodes(episodes)
        number = [i for i, e in enumerate(listed) for _ in range(self.first, len(e))]
        if not number:
            raise InputError(f"no episode is longer than its lags: {max(map(len, listed))} steps at most, {self}")
        steps, q = self.windows(listed, 1), listed[0].outputs.shape[1]
        X, after = self.join(steps.starts, steps.inputs[:, 0], q), steps.outputs[:, 0]
        return LagTable(X, after, after - X[:, :q] if self.increments else after, np.array(number))

    def windows(self, episodes: Sequence[Episode] | Episode, horizon: int, *, stride: int | None = None) -> Windows:
        """Cut episodes into segments of `horizon` steps.

        Parameters
        ----------
        episodes, horizon : Episode or sequence of Episode, int
            Measured episodes, and the number of steps per segment.
        stride : int, default None
            Steps between the starts of two segments. None: `horizon`, so that segments do not overlap.
        """
        listed = check_episodes(episodes)
        found = [(e, k) for e in listed for k in range(self.first, len(e) - horizon + 1, stride or horizon)]
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
        """Return the state [y_k, ..., y_{k-l+1}, u_{k-1}, ..., u_{k-n+1}] of an episode at one step.

        Parameters
        ----------
        episode, step : Episode, int, default None
            The episode and the step k. None: the last one.
        """
        k = len(episode) if step is None else step
        if not self.first <= k <= len(episode):
            raise InputError(f"step {k} of an episode of {len(episode)} steps: its lags need a past of {self.first}")
        past = [episode.outputs[k - i] for i in range(self.outputs)]
        return np.concatenate(past + [episode.inputs[k - i] for i in range(1, self.inputs)])

    def n_state(self, n_outputs: int, n_inputs: int) -> int:
        return self.outputs * n_outputs + (self.inputs - 1) * n_inputs

    def join(self, state: Float[ndarray, "*b n"], u: Float[ndarray, "*b d"], n_outputs: int) -> Float[ndarray, "*b x"]:
        """Arrange states and present inputs u_k as rows of the regression: [outputs, u_k, past inputs]."""
        k = self.outputs * n_outputs
        return np.concatenate([state[..., :k], u, state[..., k:]], axis=-1)

    def shift(self, n_outputs: int, n_inputs: int) -> tuple[Float[ndarray, "n n"], Float[ndarray, "n d"]]:
        """Return the matrices F and G of s+ = [y+, 0] + F s + G u, which shift the state by one step."""
        n, k = self.n_state(n_outputs, n_inputs), self.outputs * n_outputs
        F, G = np.zeros((n, n)), np.zeros((n, n_inputs))
        F[n_outputs:k, : k - n_outputs] = np.eye(k - n_outputs)
        if self.inputs > 1:
            F[k + n_inputs :, k : n - n_inputs] = np.eye(n - k - n_inputs)
            G[k : k + n_inputs] = np.eye(n_inputs)
        return F, G


@dataclass(frozen=True)
class EpisodeFolds:
    """Splitter for `BLLRegressor(calibration=...)` that holds out whole episodes.

    Every episode is held out once, in random folds, to measure interpolation; then those at either end of the
    direction in which means and standard deviations of episodes vary most, together, to measure extrapolation.
    """

    n_folds: int = 5
    """Number of random folds; fewer if there are fewer episodes."""
    random_state: int = field(default=0, kw_only=True, repr=False)
    """Seed of the random folds."""

    def split(self, X: ndarray, y: Any = None, groups: Any = None) -> Iterator[tuple[ndarray, ndarray]]:
        """Yield the indices of the rows to train on and of the held-out rows; `groups` are the episodes of the rows."""
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
    """Coordinate of each episode along the direction in which means and standard deviations of episodes vary most."""
    Z = StandardScaler().fit_transform(X)
    parts = [Z[number == i] for i in range(number.max() + 1)]
    looks = np.stack([np.concatenate([part.mean(0), part.std(0)]) for part in parts])
    centred = looks - looks.mean(0)
    return centred @ np.linalg.svd(centred, full_matrices=False)[2][:1].T
