"""Parts of a member's function at some points, which make up its covariance and can be drawn from."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray


@dataclass(frozen=True)
class FunctionBlock:
    """A part of a member's function at some points: its mean plus rows E root', E standard normal."""

    member: int
    rows: Float[ndarray, "m r"]
    root: Float[ndarray, "q q"]
    last: bool = True
    """Whether this is the last block of its member."""

    @property
    def cov(self) -> Float[ndarray, "q q"]:
        """Covariance between the outputs."""
        return self.root @ self.root.T

    def draw(self, n: int, rng: np.random.RandomState) -> Float[ndarray, "n m q"]:
        """Draw from this part."""
        return self.rows @ (rng.standard_normal((n, self.rows.shape[1], len(self.root))) @ self.root.T)

    def at(self, E: Float[ndarray, "m r q"]) -> Float[ndarray, "m q"]:
        """Evaluate each point with separate standard normal numbers, as if each had its own draw of the function."""
        return np.einsum("mr,mrq->mq", self.rows, E) @ self.root.T


@dataclass(frozen=True)
class CoupledBlock:
    """A part whose outputs share their random numbers: mean plus rows e, e standard normal."""

    member: int
    rows: Float[ndarray, "m q r"]
    last: bool = True

    def draw(self, n: int, rng: np.random.RandomState) -> Float[ndarray, "n m q"]:
        """Draw from this part."""
        return np.moveaxis(self.rows @ rng.standard_normal((self.rows.shape[-1], n)), -1, 0)

    def at(self, E: Float[ndarray, "m r q"]) -> Float[ndarray, "m q"]:
        """Evaluate each point with separate standard normal numbers, as if each had its own draw of the function."""
        return np.einsum("mqr,mr->mq", self.rows, E[..., 0])
