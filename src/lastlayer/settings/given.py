"""`Given`, validated rows of a user, and `Shape`, what the settings depend on of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Num
from numpy import ndarray


@dataclass(frozen=True, eq=False)
class Given:
    """Validated rows, in original units."""

    X: Num[ndarray, "m ..."]
    """Inputs: a table of floats, ids, or arrays of any shape."""
    y: Float[ndarray, "m q"]
    """Targets; NaN: missing."""
    weight: Float[ndarray, " m"] | None = None
    """Sample weights; None: 1."""
    groups: Int[ndarray, " m"] | None = None
    """Index of each row's group, from 0; None: there are no groups."""
    noise_std: Float[ndarray, "m q"] | None = None
    """Known standard deviations of the noise; None: 0."""
    observations: tuple[Any, ...] = ()
    """Measured functionals, `lastlayer.observe.Observations`."""
    y_ndim: int = 2
    """Number of dimensions of the targets as given."""
    place: Int[ndarray, " n"] | None = None
    """Index of every row of the user among these, -1 if it has no weight; None: in the same order."""

    @property
    def is_table(self) -> bool:
        """Whether the inputs are columns of numbers, which can be standardised."""
        return self.X.ndim == 2 and self.X.dtype.kind == "f"

    @property
    def n_used(self) -> int:
        """Number of rows that have a weight."""
        return len(self.X) if self.weight is None else int(np.count_nonzero(self.weight))


@dataclass(frozen=True)
class Shape:
    """What the settings depend on of the rows, in which copies are one row, as a row of a larger weight is."""

    shape: tuple[int, ...] | None
    """Shape of X; None: a source of batches, whose rows are not counted in advance."""
    validation: bool = False
    """Whether validation data were given."""
    n_groups: int | None = None
    """Number of clearly different rows, or of those per output on average; None: all rows differ."""
    n_together: int | None = None
    """Number of groups, given by the user, that are held out together; None: rows are held out individually."""
    complete: bool = True
    """Whether all targets are known and equally noisy, and there are no functionals."""
    learned: bool = True
    """Whether the noise of all targets is learned."""
    n_beside: int = 0
    """Number of functionals observed beside the rows."""
    ids: bool = False
    """Whether the inputs are integers, which are passed to the backbone unchanged."""

    @property
    def is_table(self) -> bool:
        """Whether the inputs are columns of numbers, as far as known."""
        return not self.ids and (self.shape is None or len(self.shape) == 2)
