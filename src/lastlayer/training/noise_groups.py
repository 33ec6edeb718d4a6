"""Statistics of targets whose noise is partly known, as a function of the learned noise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.bayes.statistics import OutputStatistics, Statistics
from lastlayer.data.rows import FeatureMap, Rows

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
        return replace(
            Statistics.from_functionals(self.Psi, self.t[:, None], precision), observations=self.weight.sum()
        )

    def by_level(self) -> "list[Targets]":
        """Split into targets of equal noise, if there are few noise levels."""
        levels = self.known.unique()
        if not 0 < len(levels) <= MOST_LEVELS or self.known.dim() == 0:  # a fold may know no target of an output
            return [self]
        parts = [self.known == level for level in levels]
        return [
            replace(self, Psi=self.Psi[own], t=self.t[own], weight=self.weight[own], known=level)
            for own, level in zip(parts, levels, strict=True)
        ]


class StatisticsByNoise:
    """Statistics of each output, given the learned noise variances, (q,)."""

    def __init__(self, targets: Sequence[Targets]) -> None:
        self.targets = [part for each in targets for part in each.by_level()]
        self.n_outputs = 1 + max(part.output for part in self.targets)
        self.moments = [part.moments() if part.known.dim() == 0 else None for part in self.targets]

    @classmethod
    @torch.no_grad()
    def of(cls, rows: Rows, linear: FeatureMap) -> "StatisticsByNoise":
        """Build from rows and a function that computes linear features."""
        return cls(_targets(rows, linear))

    @torch.no_grad()
    def reduced(self) -> "StatisticsByNoise":
        """The same with at most as many features as there are targets."""
        rows = torch.cat([part.Psi[:, :-1] for part in self.targets])
        if len(rows) >= rows.shape[1]:
            return self
        Q = torch.linalg.qr(rows.mT).Q
        turned = lambda Psi: torch.cat([Psi[:, :-1] @ Q, Psi[:, -1:]], 1)
        return StatisticsByNoise([replace(part, Psi=turned(part.Psi)) for part in self.targets])

    def __call__(self, learned: Float[Tensor, " q"]) -> OutputStatistics:
        parts: dict[int, Statistics] = {}
        for targets, moments in zip(self.targets, self.moments, strict=True):
            share, j = targets.share(learned), targets.output
            more = targets.moments(share) if moments is None else moments.weighted(share)
            parts[j] = parts[j] + more if j in parts else more
        return OutputStatistics.of_outputs([parts[j] for j in range(self.n_outputs)])


def _targets(rows: Rows, linear: FeatureMap) -> list[Targets]:
    main, readings = rows.main, rows.main.readings
    Phi = main.features(linear)
    weight = torch.ones_like(Phi[:, 0]) if main.weight is None else main.weight.to(Phi)
    noise_var = torch.zeros_like(main.T) if readings.known is None else readings.known
    read = torch.ones_like(main.T) if readings.read is None else readings.read
    found = []
    for j, (t, known, shown) in enumerate(zip(main.T.T, noise_var.T, read.T > 0, strict=True)):
        found.append(Targets(j, Phi[shown], t.to(Phi)[shown], weight[shown], known.to(Phi)[shown], True))
    for seen in rows.beside:
        Psi, t, variance = seen.functionals.features(linear, main.X).double(), seen.readings.t, seen.readings.known
        t, known = t[:, 0].to(Phi), torch.zeros_like(t) if variance is None else variance
        found.append(Targets(seen.functionals.output, Psi, t, torch.ones_like(t), known[:, 0].to(t), variance is None))
    return found
