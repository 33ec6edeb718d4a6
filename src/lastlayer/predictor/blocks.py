"""Parts of a member's function at some points: what its covariance is made of, and draws of it."""

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
    """Of its member."""

    @property
    def cov(self) -> Float[ndarray, "q q"]:
        """Between the outputs."""
        return self.root @ self.root.T

    def draw(self, n: int, rng: np.random.RandomState) -> Float[ndarray, "n m q"]:
        """Of this part alone."""
        return self.rows @ (rng.standard_normal((n, self.rows.shape[1], len(self.root))) @ self.root.T)

    def at(self, E: Float[ndarray, "m r q"]) -> Float[ndarray, "m q"]:
        """Each point in a function of its own, given standard normal numbers."""
        return np.einsum("mr,mrq->mq", self.rows, E) @ self.root.T


@dataclass(frozen=True)
class CoupledBlock:
    """The same where the outputs share what is unknown: mean plus rows e, e standard normal."""

    member: int
    rows: Float[ndarray, "m q r"]
    last: bool = True

    def draw(self, n: int, rng: np.random.RandomState) -> Float[ndarray, "n m q"]:
        return np.moveaxis(self.rows @ rng.standard_normal((self.rows.shape[-1], n)), -1, 0)

    def at(self, E: Float[ndarray, "m r q"]) -> Float[ndarray, "m q"]:
        return np.einsum("mqr,mr->mq", self.rows, E[..., 0])
