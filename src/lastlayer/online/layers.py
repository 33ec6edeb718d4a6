"""Last layers of the same width side by side, while rows come and go: statistics now and then, a recursion between."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.linalg import TINY
from lastlayer.posterior import Posterior
from lastlayer.recursion import Recursion
from lastlayer.statistics import Statistics
from lastlayer.types import BiasPrior

SMALLEST_PIVOT = 1e-4
"""Of I - V V' when rows go: below it, too many digits would go with them, and the layers are factored anew."""


@dataclass(frozen=True)
class FeatureRows:
    """Rows as c networks see them."""

    phi: Float[Tensor, "c n k"]
    T: Float[Tensor, "n q"]
    weight: Float[Tensor, " n"] | None

    @classmethod
    def joined(cls, parts: "Sequence[FeatureRows]") -> "FeatureRows":
        weight = None
        if any(p.weight is not None for p in parts):
            weight = torch.cat([p.T.new_ones(len(p.T)) if p.weight is None else p.weight for p in parts])
        return cls(torch.cat([p.phi for p in parts], 1), torch.cat([p.T for p in parts]), weight)

    def at(self, rows: slice) -> "FeatureRows":
        return FeatureRows(self.phi[:, rows], self.T[rows], None if self.weight is None else self.weight[rows])

    def statistics(self) -> Statistics:
        weight = None if self.weight is None else self.weight.expand(len(self.phi), -1)
        return Statistics.from_linear_features(self.phi, self.T.expand(len(self.phi), -1, -1), sample_weight=weight)


@dataclass(frozen=True)
class LayerStack:
    """c last layers after a factorisation and the rows that came since."""

    statistics: Statistics
    """At the last factorisation."""
    recursions: tuple[Recursion, ...]
    """Now: at alpha*, and at the alpha of the variance if that is another."""
    since: tuple[FeatureRows, ...]
    """Rows that came after the statistics were taken."""
    log_alphas: tuple[Float[Tensor, " c"], ...]
    bias_prior: BiasPrior

    @classmethod
    def of(cls, posteriors: Sequence[Posterior], log_alphas: Sequence[float]) -> "LayerStack":
        stars = [float(p.log_alpha) for p in posteriors]
        statistics = Statistics.stacked([p.statistics for p in posteriors])
        each = [stars] if stars == list(log_alphas) else [stars, list(log_alphas)]
        alphas = tuple(statistics.count.new_tensor(values) for values in each)
        return cls(statistics, (), (), alphas, posteriors[0].bias_prior).factored(statistics)

    def factored(self, statistics: Statistics) -> "LayerStack":
        """With these statistics and nothing since."""
        recursions = tuple(Recursion.of(statistics, log_alpha, self.bias_prior) for log_alpha in self.log_alphas)
        return replace(self, statistics=statistics, recursions=recursions, since=())

    def total(self, kept: float = 1.0) -> Statistics:
        """Statistics of all rows up to now; those of before the last factorisation keep that share of their weight."""
        old = self.statistics if kept == 1.0 else self.statistics.scaled(kept)
        return old + FeatureRows.joined(self.since).statistics() if self.since else old

    def noting(self, rows: FeatureRows) -> "LayerStack":
        """The rows kept for the next factorisation, and nothing else done."""
        return replace(self, since=(*self.since, rows))

    def error(self, factored: "LayerStack") -> float:
        """Largest difference of the weights from those of another factorisation, relative to the largest weight."""
        k = self.statistics.n_linear  # biases belong to different centres
        pairs = [(a.W[:, :k], b.W[:, :k]) for a, b in zip(self.recursions, factored.recursions, strict=True)]
        return max(float((a - b).abs().max() / b.abs().max().clamp_min(TINY)) for a, b in pairs)

    def with_rows(self, rows: FeatureRows) -> "LayerStack":
        """By the recursion."""
        moved = tuple(r.added(r.rows(rows.phi), rows.T, rows.weight) for r in self.recursions)
        return replace(self.noting(rows), recursions=moved)

    def without(self, rows: FeatureRows) -> "LayerStack | None":
        """By the recursion, of rows that are known to be in; None where it would lose digits.

        The statistics stay behind: whoever removes rows factors the next time from the rows that are left.
        """
        moved = []
        for r in self.recursions:
            less, pivot = r.removed(r.rows(rows.phi), rows.T, rows.weight)
            if not bool((pivot > SMALLEST_PIVOT).all()):
                return None
            moved.append(less)
        return replace(self, recursions=tuple(moved))

    def predict(
        self, phi: Float[Tensor, "c n k"]
    ) -> tuple[Float[Tensor, "c n q"], Float[Tensor, "c n"], Float[Tensor, "c n"]]:
        """Mean, variance ratio at alpha*, and at the alpha of the variance."""
        star = self.recursions[0]
        Phi = star.rows(phi)
        cost = star.variance_ratio(Phi)
        ratio = cost if len(self.recursions) == 1 else self.recursions[1].variance_ratio(Phi)
        return star.mean(Phi), cost, ratio
