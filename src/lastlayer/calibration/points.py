"""Held-out points: what networks that never saw them say of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer.linalg import TINY


@dataclass(frozen=True)
class HeldOutPoints:
    """What c networks that did not see a point say of it, in standardised units."""

    mean: Float[Tensor, "c n q"]
    ratio: Float[Tensor, "c n"]
    """v: the affine cost."""
    noise_var: Float[Tensor, "c n q"]
    inputs: Float[Tensor, "n ..."]
    targets: Float[Tensor, "n q"]
    weight: Float[Tensor, " n"]
    kind: ndarray
    """(n,) words: where the point was held out, such as "random" or "blocked"."""
    strength: Float[ndarray, " c"]
    """Of the prior on the hidden weights of each network: networks of the same strength are alike."""

    @classmethod
    def joined(cls, parts: "list[HeldOutPoints]") -> "HeldOutPoints":
        """All points of several sets, each with as many networks."""
        return cls._of(parts, lambda xs: torch.cat(xs, 1), torch.cat, np.concatenate, lambda xs: xs[0])

    @classmethod
    def stacked(cls, parts: "list[HeldOutPoints]") -> "HeldOutPoints":
        """The same points by all networks of several sets."""
        return cls._of(parts, torch.cat, lambda xs: xs[0], lambda xs: xs[0], np.concatenate)

    def __getitem__(self, points: ndarray) -> "HeldOutPoints":
        """Some of the points, by their numbers."""
        at = torch.from_numpy(points).to(self.mean.device)
        return self._of(
            [self], lambda xs: xs[0][:, at], lambda xs: xs[0][at], lambda xs: xs[0][points], lambda xs: xs[0]
        )

    def of(self, strength: float) -> "HeldOutPoints":
        """What the networks of one strength say."""
        same = self.strength == strength
        at = torch.from_numpy(np.flatnonzero(same)).to(self.mean.device)
        first: Callable[[list[Any]], Any] = lambda xs: xs[0]
        return self._of([self], lambda xs: xs[0][at], first, first, lambda xs: xs[0][same])

    @property
    def strengths(self) -> list[float]:
        """Each of them once."""
        return list(dict.fromkeys(self.strength.tolist()))

    def usable(self) -> "HeldOutPoints":
        """Without points at which a network failed altogether; on the processor, where small problems are quick."""
        error = (self.targets - self.mean).square() / self.noise_var
        fine = torch.isfinite(error + self.noise_var).all(0).all(-1) & torch.isfinite(self.ratio).all(0)
        fine &= self.weight > 0
        kept = self[np.flatnonzero(fine.cpu().numpy())]
        here = self._of([kept], lambda xs: xs[0].cpu(), lambda xs: xs[0].cpu(), lambda xs: xs[0], lambda xs: xs[0])
        return replace(here, ratio=here.ratio.clamp_min(TINY))

    @classmethod
    def _of(
        cls,
        parts: "list[HeldOutPoints]",
        by_network: Callable[[list[Tensor]], Tensor],
        by_point: Callable[[list[Tensor]], Tensor],
        words: Callable[[list[ndarray]], ndarray],
        networks: Callable[[list[ndarray]], ndarray],
    ) -> "HeldOutPoints":
        """One set out of several, field by field."""
        return cls(
            mean=by_network([p.mean for p in parts]),
            ratio=by_network([p.ratio for p in parts]),
            noise_var=by_network([p.noise_var for p in parts]),
            inputs=by_point([p.inputs for p in parts]),
            targets=by_point([p.targets for p in parts]),
            weight=by_point([p.weight for p in parts]),
            kind=words([p.kind for p in parts]),
            strength=networks([p.strength for p in parts]),
        )
