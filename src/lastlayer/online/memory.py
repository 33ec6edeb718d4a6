"""What happens to old rows: keep all of them, down-weight them exponentially, or keep a sliding window."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer._internal.numbers import EPS
from lastlayer.errors import InputError

FEWEST_ROWS = 200
"""Rows between two factorisations, unless rows lose weight earlier; the recursion loses no digits over that many."""
FADING = 0.05
"""Fraction of their weight that old rows lose at a time."""


class Memory:
    """Base class: how the weight of old rows changes as new ones are learned."""

    def interval(self, p: int) -> int:
        """Return the number of rows between two factorisations."""
        return max(p, FEWEST_ROWS)

    def kept(self, n: int) -> float:
        """Return the fraction of their weight that old rows keep."""
        return 1.0

    def weights(self, n: int) -> Float[ndarray, " n"] | float:
        """Return the weights of n rows that are learned together, once the last of them is."""
        return 1.0

    def remembered(self, n: int) -> float:
        """Return the fraction of their weight that the residuals of old rows keep in the calibration."""
        return self.kept(n)


@dataclass(frozen=True)
class KeepAll(Memory):
    """Every row keeps its full weight, for a function that does not change."""


@dataclass(frozen=True)
class ExponentialForgetting(Memory):
    """Old rows lose weight exponentially; the prior does not."""

    memory: float | int
    """Number of rows after which a row has 1/e of its weight; relative to the prior it falls in steps of about 5%."""

    def __post_init__(self) -> None:
        if not 1 <= self.memory < math.inf:
            raise InputError(
                f"memory={self.memory} must be a number of rows, 1 or more, such as ExponentialForgetting(memory=1000)"
            )

    def interval(self, p: int) -> int:
        return max(1, min(super().interval(p), round(FADING * self.memory)))

    def kept(self, n: int) -> float:
        return max(math.exp(-n / self.memory), EPS)

    def weights(self, n: int) -> Float[ndarray, " n"]:
        return np.exp(np.arange(1 - n, 1) / self.memory)


@dataclass(frozen=True)
class SlidingWindow(Memory):
    """Only the last `rows` rows count."""

    rows: int
    """Length of the window, at least 2."""

    def __post_init__(self) -> None:
        if not self.rows >= 2:
            raise InputError(f"rows={self.rows}: a window needs at least 2 rows, such as SlidingWindow(500)")

    def interval(self, p: int) -> int:
        return max(p, self.rows)

    def remembered(self, n: int) -> float:
        return max(0.0, 1 - n / self.rows)
