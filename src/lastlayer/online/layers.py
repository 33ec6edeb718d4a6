"""Last layers of the same width side by side, while rows come and go: statistics now and then, a recursion between."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer.linalg import TINY
from lastlayer.posterior import Posterior
from lastlayer.recursion import Recursion, Whitened
from lastlayer.statistics import Statistics
from lastlayer.types import BiasPrior

SMALLEST_PIVOT = 1e-4
"""Of a row that goes: below it, too many digits would go with it, and the layers are factored anew."""


@dataclass(frozen=True)
class FeatureRows:
    """Rows as c networks see them."""

    phi: Float[ndarray, "c n k"]
    T: Float[ndarray, "n q"]
    weight: Float[ndarray, " n"]

    @classmethod
    def joined(cls, parts: "Sequence[FeatureRows]") -> "FeatureRows":
        if len(parts) == 1:
            return parts[0]
        each = ([part.phi for part in parts], [part.T for part in parts], [part.weight for part in parts])
        return cls(np.concatenate(each[0], axis=1), np.concatenate(each[1]), np.concatenate(each[2]))

    def at(self, rows: slice) -> "FeatureRows":
        return FeatureRows(self.phi[:, rows], self.T[rows], self.weight[rows])

    def statistics(self) -> Statistics:
        phi, T = torch.from_numpy(self.phi), torch.from_numpy(self.T)
        weight = None if (self.weight == 1).all() else torch.from_numpy(self.weight).expand(len(phi), -1)
        return Statistics.from_linear_features(phi, T.expand(len(phi), -1, -1), sample_weight=weight)


@dataclass
class LayerStack:
    """c last layers after a factorisation and the rows that came since."""

    log_alphas: tuple[Float[Tensor, " c"], ...]
    """alpha*, and the alpha of the variance if that is another."""
    bias_prior: BiasPrior
    statistics: Statistics
    """At the last factorisation."""
    recursions: tuple[Recursion, ...] = ()
    """Now, at every alpha."""
    since: list[FeatureRows] = field(default_factory=list)
    """Rows that came after the statistics were taken."""

    @classmethod
    def of(cls, posteriors: Sequence[Posterior], log_alphas: Sequence[float] | None = None) -> "LayerStack":
        """`log_alphas` of the variance, where they were tuned."""
        stars = [float(p.log_alpha) for p in posteriors]
        statistics = Statistics.stacked([p.statistics for p in posteriors]).to("cpu")
        each = [stars] if log_alphas is None else [stars, log_alphas]
        alphas = tuple(statistics.count.new_tensor(values) for values in each)
        return cls(alphas, posteriors[0].bias_prior, statistics).factored(statistics)

    def factored(self, statistics: Statistics) -> "LayerStack":
        """With these statistics and nothing since."""
        recursions = tuple(Recursion.of(statistics, log_alpha, self.bias_prior) for log_alpha in self.log_alphas)
        return LayerStack(self.log_alphas, self.bias_prior, statistics, recursions)

    def total(self, kept: float = 1.0) -> Statistics:
        """Statistics of all rows up to now; those of before the last factorisation keep that share of their weight."""
        old = self.statistics if kept == 1.0 else self.statistics.scaled(kept)
        return old + FeatureRows.joined(self.since).statistics() if self.since else old

    def error(self, factored: "LayerStack") -> float:
        """Largest difference of the weights from those of another factorisation, relative to the largest weight."""
        k = self.statistics.n_linear  # biases belong to different centres
        pairs = [(a.W[:, :k], b.W[:, :k]) for a, b in zip(self.recursions, factored.recursions, strict=True)]
        return max(float(np.abs(a - b).max() / max(np.abs(b).max(), TINY)) for a, b in pairs)

    def whitened(self, phi: Float[ndarray, "c n k"]) -> list[Whitened]:
        """Rows at every alpha."""
        return [recursion.whitened(phi) for recursion in self.recursions]

    def add(self, rows: FeatureRows, seen: list[Whitened]) -> None:
        """By the recursion; `seen` are the rows at every alpha, as they are before."""
        for recursion, whitened in zip(self.recursions, seen, strict=True):
            for i in range(len(rows.T)):
                row = whitened if len(rows.T) == 1 else recursion.whitened(rows.phi[:, i : i + 1])
                recursion.move(row, rows.T[i : i + 1], weight=rows.weight.item(i))

    def drop(self, row: FeatureRows) -> bool:
        """One row that is known to be in goes, by the recursion; False where that would lose digits.

        The statistics stay behind: whoever drops rows factors the next time from the rows that are left.
        """
        weight = row.weight.item(0)
        return all(
            recursion.move(recursion.whitened(row.phi), row.T, sign=-1.0, weight=weight, smallest_pivot=SMALLEST_PIVOT)
            for recursion in self.recursions
        )

    def said(self, seen: list[Whitened]) -> list[ndarray]:
        """Mean (c, n, q), cost (c, n, 1) at the alpha of the variance, and at alpha* if that is another."""
        mean, costs = self.recursions[0].mean(seen[0]), [rows.variance_ratio[..., None] for rows in seen]
        return [mean, *reversed(costs)]
