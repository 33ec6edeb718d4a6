"""What happens to old rows: all are kept, they lose weight, or only the last ones count."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from lastlayer import checked
from lastlayer.errors import InputError

FEWEST_ROWS = 200
"""Between two factorisations, unless rows lose weight; the recursion loses no digits over so many."""
FADING = 0.05
"""Share of their weight that old rows lose at a time."""


class Memory:
    """What happens to old rows."""

    def interval(self, p: int) -> int:
        """Rows between two factorisations: after p rows one costs no more than the recursion did, O(p^2) a row.

        Of narrow layers, one costs what many rows do, whatever p is.
        """
        return max(p, FEWEST_ROWS)

    def kept(self, n: int) -> float:
        """Weight that the rows of before keep when n more have come."""
        return 1.0

    def remembered(self, n: int) -> float:
        """Weight that their residuals keep."""
        return self.kept(n)


@dataclass(frozen=True)
class KeepAll(Memory):
    """Every row counts for ever: what the function is does not change."""


@dataclass(frozen=True)
class ExponentialForgetting(Memory):
    """A row that `memory` rows came after has 1/e of its weight; the prior does not fade.

    Weights fall in steps of about 5%, each with a factorisation: O(p^2) a row if the memory is several times p.
    """

    memory: float | int

    def __post_init__(self) -> None:
        if not 1 <= self.memory < math.inf:
            raise InputError(
                f"memory={self.memory} must be a number of rows, 1 or more, such as ExponentialForgetting(memory=1000)"
            )

    def interval(self, p: int) -> int:
        return max(1, min(super().interval(p), round(FADING * self.memory)))

    def kept(self, n: int) -> float:
        return math.exp(-n / self.memory)


@dataclass(frozen=True)
class SlidingWindow(Memory):
    """The last `rows` rows count, those before not at all."""

    rows: int

    def __post_init__(self) -> None:
        if not self.rows >= 2:
            raise InputError(f"rows={self.rows}: a window needs at least 2 rows, such as SlidingWindow(500)")

    def interval(self, p: int) -> int:
        """A factorisation goes through the whole window, so it is as rare as that costs O(p^2) a row."""
        return max(p, self.rows)

    def remembered(self, n: int) -> float:
        return max(0.0, 1 - n / self.rows)


MEMORIES: dict[str, type[Memory]] = {kind.__name__: kind for kind in (KeepAll, ExponentialForgetting, SlidingWindow)}


def pack_memory(memory: Memory) -> dict[str, Any]:
    """For the header of a model file."""
    if type(memory) not in MEMORIES.values():
        raise InputError(
            f"a {type(memory).__name__} cannot be saved: take one of {', '.join(MEMORIES)}, or save online.model()"
        )
    return {"kind": type(memory).__name__, **asdict(memory)}  # type: ignore[call-overload]


def unpack_memory(saved: dict[str, Any]) -> Memory:
    """What was packed; KeyError, TypeError or ValueError if it is something else."""
    return checked.instance(MEMORIES[saved["kind"]], {name: value for name, value in saved.items() if name != "kind"})
