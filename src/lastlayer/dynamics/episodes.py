"""Measured trajectories."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer.errors import InputError
from lastlayer.inputs import as_array, check_finite


@dataclass(frozen=True, eq=False)
class Episode:
    """One uninterrupted experiment: outputs y_0 ... y_T, and inputs u_0 ... u_{T-1} that led from one to the next."""

    outputs: Float[ndarray, "t1 q"]
    inputs: Float[ndarray, "t d"]

    @classmethod
    def of(cls, outputs: Any, inputs: Any) -> "Episode":
        """From arrays of a row (or a number) a step; an input of the last step, which leads nowhere, is left out."""
        y, u = (_table(values, name) for values, name in ((outputs, "outputs"), (inputs, "inputs")))
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


def total_steps(episodes: Sequence[Episode]) -> int:
    return sum(map(len, episodes))


def _table(values: Any, name: str) -> Float[ndarray, "t n"]:
    array = np.asarray(as_array(values), dtype=float)
    if array.ndim not in (1, 2):
        raise InputError(f"{name} have shape {array.shape}: give a table, one row a step")
    check_finite(array, name)
    return array[:, None] if array.ndim == 1 else array
