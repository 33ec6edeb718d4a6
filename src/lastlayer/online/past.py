"""What becomes of old rows: all are kept, they fade, or only the last ones count."""

import math
from dataclasses import dataclass
from typing import TypeAlias

from lastlayer.errors import InputError

STEP = 0.02
"""Share of their weight that fading rows lose at a time."""


@dataclass(frozen=True)
class Everything:
    """Every row counts for ever: what the function is does not change."""

    def interval(self, p: int) -> int:
        """Rows between two factorisations: after p rows one costs no more than the recursion did, O(p^2) a row."""
        return p

    def kept(self, n: int) -> float:
        """Weight that the rows of before keep when n more have come."""
        return 1.0


@dataclass(frozen=True)
class Fading:
    """A row that `memory` rows came after has 1/e of its weight; the prior does not fade.

    Weights fall in steps of about 2%, each with a factorisation: O(p^2) a row if the memory is several times p.
    """

    memory: float | int

    def __post_init__(self) -> None:
        if not 1 <= self.memory < math.inf:
            raise InputError(f"memory={self.memory} must be a number of rows, 1 or more, such as Fading(memory=1000)")

    def interval(self, p: int) -> int:
        return max(1, min(p, round(STEP * self.memory)))

    def kept(self, n: int) -> float:
        return math.exp(-n / self.memory)


@dataclass(frozen=True)
class Window:
    """The last `rows` rows count, those before not at all."""

    rows: int

    def __post_init__(self) -> None:
        if not self.rows >= 2:
            raise InputError(f"rows={self.rows}: a window needs at least 2 rows, such as Window(500)")

    def interval(self, p: int) -> int:
        """A factorisation goes through the whole window, so it is as rare as that costs O(p^2) a row."""
        return max(p, self.rows)


Past: TypeAlias = Everything | Fading | Window
