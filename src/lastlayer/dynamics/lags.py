"""From episodes to the rows of a regression, and back to a state that can be stepped.

NARX: y_{k+1} = f(y_k, ..., y_{k-l+1}, u_k, ..., u_{k-n+1}). With one lag of each, and outputs that are the whole state,
it is a state-space model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer.dynamics.episodes import Episode, check_episodes
from lastlayer.errors import InputError


@dataclass(frozen=True, eq=False)
class Table:
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

    def table(self, episodes: Sequence[Episode] | Episode) -> Table:
        """Every step of every episode that has enough past within its own episode."""
        listed = check_episodes(episodes)
        parts = [self._rows(e) for e in listed]
        lengths = [len(rows) for rows in parts]
        if not sum(lengths):
            raise InputError(f"no episode is longer than its lags: {max(map(len, listed))} steps at most, {self}")
        X = np.concatenate(parts)
        after = np.concatenate([e.outputs[self.first + 1 :] for e in listed])
        now = np.concatenate([e.outputs[self.first : -1] for e in listed])
        return Table(X, after, after - now if self.increments else after, np.repeat(np.arange(len(listed)), lengths))

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

    def _rows(self, e: Episode) -> Float[ndarray, "r d"]:
        steps = range(self.first, len(e))
        q, d = e.outputs.shape[1], e.inputs.shape[1]
        width = self.outputs * q + self.inputs * d
        rows = [self.join(self.state(e, k), e.inputs[k], q) for k in steps]
        return np.stack(rows) if rows else np.empty((0, width))
