"""What training asks of data: passes over batches, in an order that a seed decides."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lastlayer.ranks import ONE, Ranks


@dataclass(frozen=True)
class Batch:
    """Some rows: inputs, targets (r, q), and weights (r,) or, for a stack of networks, (s, r)."""

    X: Tensor
    T: Tensor
    weight: Tensor | None = None
    total: int = 0
    """Rows of this batch on all processes."""


@runtime_checkable
class Source(Protocol):
    """Rows that can be passed over again and again. The same seed must give the same batches."""

    @property
    def n_rows(self) -> int | None:
        """In a pass, on all processes; None: not known before the first."""
        ...

    def batches(self, size: int, *, seed: int | None = None, first: int = 0, ranks: Ranks = ONE) -> Iterator[Batch]:
        """One pass, in order or shuffled by `seed`, from batch number `first` on; the rows of this process."""
        ...


def cuts(m: int, size: int) -> list[slice]:
    """m rows in batches of nearly the same number, at most `size`: no small rest at the end."""
    n = -(-m // size)
    return [slice(i * m // n, (i + 1) * m // n) for i in range(n)]


@dataclass(frozen=True)
class TensorSource:
    """Rows that lie in memory as they are needed, on the device of the network."""

    X: Tensor
    T: Tensor
    weight: Tensor | None = None
    """(m,), or (s, m) for a stack of networks."""

    @property
    def n_rows(self) -> int:
        return len(self.X)

    def batches(self, size: int, *, seed: int | None = None, first: int = 0, ranks: Ranks = ONE) -> Iterator[Batch]:
        order: Tensor | None = None
        if seed is not None:
            generator = torch.Generator(self.X.device).manual_seed(seed)
            order = torch.randperm(len(self.X), generator=generator, device=self.X.device)
        for cut in cuts(len(self.X), size)[first:]:
            rows = slice(cut.start + ranks.rank, cut.stop, ranks.world)
            at = rows if order is None else order[rows]
            weight = None if self.weight is None else self.weight[..., at]
            yield Batch(self.X[at], self.T[at], weight, cut.stop - cut.start)
