"""Batches from a torch DataLoader, or from any iterable of them."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lastlayer.errors import InputError
from lastlayer.ranks import ONE, Ranks
from lastlayer.sources.batch import Batch


@dataclass(frozen=True)
class LoaderSource:
    """A DataLoader, or anything that can be iterated again and again, of (X, y) or (X, y, weight) batches.

    Batches are taken as they come, whatever size was asked for; the loader decides whether they are shuffled. With
    several processes each of them has a loader of its own rows, such as one with a DistributedSampler.
    """

    loader: Iterable[Any]

    @property
    def n_rows(self) -> int | None:
        return None  # what samplers, workers and dropped batches leave is known after a pass

    def batches(self, size: int, *, seed: int | None = None, first: int = 0, ranks: Ranks = ONE) -> Iterator[Batch]:
        for i, item in enumerate(self._seeded(seed)):
            if i < first:
                continue
            if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
                raise InputError(
                    f"the loader gave a {type(item).__name__} in place of (X, y) or (X, y, weight): wrap the dataset "
                    "so that every item is such a tuple"
                )
            X, y, *weight = (torch.as_tensor(part) for part in item)
            yield Batch(X, y[:, None] if y.dim() == 1 else y, weight[0] if weight else None, len(X) * ranks.world)

    def _seeded(self, seed: int | None) -> Iterator[Any]:
        """The same order for the same seed: samplers draw from the loader's generator, or else from torch's own."""
        if seed is None:
            return iter(self.loader)
        sampler: Any = getattr(self.loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(seed)
        generator = getattr(self.loader, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
            return iter(self.loader)
        before = torch.get_rng_state()
        torch.manual_seed(seed)
        try:
            items = iter(self.loader)
            first = list(itertools.islice(items, 1))  # samplers draw their order with the first batch
        finally:
            torch.set_rng_state(before)
        return itertools.chain(first, items)
