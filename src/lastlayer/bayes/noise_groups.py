"""Statistics of targets whose noise is partly known, as a function of the learned noise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.bayes.statistics import Statistics, log_scales

MOST_LEVELS = 8
"""Number of noise levels up to which the moments of each are computed once."""


@dataclass(frozen=True)
class Targets:
    """Targets of one output, values or functionals, with known and, if `learned`, additional learned noise."""

    output: int
    Psi: Float[Tensor, "n p"]
    """Features of the targets, [L phi_tilde, L 1]."""
    t: Float[Tensor, " n"]
    weight: Float[Tensor, " n"]
    known: Float[Tensor, "*n"]
    """Known variance of each target, or one for all of them."""
    learned: bool

    def share(self, learned: Float[Tensor, " q"]) -> Float[Tensor, "*n"]:
        """Weight of a target relative to one that has only learned noise."""
        own = learned[self.output]
        return own / (self.known + own if self.learned else self.known)

    def moments(self, share: Float[Tensor, " n"] | None = None) -> Statistics:
        """Statistics of the targets, each weighted by `share`."""
        precision = self.weight if share is None else self.weight * share
        log_scale = precision.new_zeros(()) if share is None else log_scales(share, self.weight)
        moments = Statistics.from_functionals(self.Psi, self.t[:, None], precision)
        return replace(moments, observations=self.weight.sum(), log_scale=log_scale)

    def by_level(self) -> "list[Targets]":
        """Split into targets of equal noise, if there are few noise levels."""
        levels = self.known.unique()
        if not 0 < len(levels) <= MOST_LEVELS or self.known.dim() == 0:  # a fold may know no target of an output
            return [self]
        at = lambda own, level: replace(self, Psi=self.Psi[own], t=self.t[own], weight=self.weight[own], known=level)
        return [at(self.known == level, level) for level in levels]


class StatisticsByNoise:
    """Statistics of each output, given the learned noise variances, (q,)."""

    def __init__(self, targets: Sequence[Targets]) -> None:
        self.targets = [part for each in targets for part in each.by_level()]
        self.n_outputs = 1 + max(part.output for part in self.targets)
        self.moments = [part.moments() if part.known.dim() == 0 else None for part in self.targets]

    @torch.no_grad()
    def reduced(self) -> "StatisticsByNoise":
        """The same with at most as many features as there are targets."""
        rows = torch.cat([part.Psi[:, :-1] for part in self.targets])
        if len(rows) >= rows.shape[1]:
            return self
        Q = torch.linalg.qr(rows.mT).Q
        turned = lambda Psi: torch.cat([Psi[:, :-1] @ Q, Psi[:, -1:]], 1)
        return StatisticsByNoise([replace(part, Psi=turned(part.Psi)) for part in self.targets])

    def __call__(self, learned: Float[Tensor, " q"]) -> Statistics:
        parts: dict[int, Statistics] = {}
        for targets, moments in zip(self.targets, self.moments, strict=True):
            share, j = targets.share(learned), targets.output
            more = targets.moments(share) if moments is None else moments.weighted(share)
            parts[j] = parts[j] + more if j in parts else more
        return Statistics.of_outputs([parts[j] for j in range(self.n_outputs)])
