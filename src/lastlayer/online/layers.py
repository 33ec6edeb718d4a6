"""Last layers of equal width that follow a stream: occasional factorisations, and a recursion in between."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer._internal.codec import Limits, Reader
from lastlayer._internal.numbers import TINY
from lastlayer.bayes.recursion import Recursion, Whitened
from lastlayer.bayes.statistics import MOMENTS, Statistics, check_scatter
from lastlayer.predictor.member import Member
from lastlayer.settings.types import BiasPrior

SMALLEST_PIVOT = 1e-4
"""Smallest pivot of a row that is dropped; below it too many digits are lost, and the layers are factorised again."""
LARGEST_PIVOT = 1e8
"""Largest pivot of a row that is added: the root of the covariance shrinks by its root, and loses as many digits."""
LARGEST_DROP, LEAST_WEIGHT = 1e4, 1e-6
"""Largest factor by which weights may fall since the factorisation, and the size below which they count as zero.

Dropping rows with huge targets loses as many digits as the weights fall by. Weights are those of standardised targets.
"""


@dataclass(frozen=True)
class FeatureRows:
    """Rows as features of c networks."""

    phi: Float[ndarray, "c n k"]
    T: Float[ndarray, "n q"]
    weight: Float[ndarray, " n"]

    @classmethod
    def joined(cls, parts: "Sequence[FeatureRows]") -> "FeatureRows":
        if len(parts) == 1:
            return parts[0]
        phi, T, weight = zip(*((part.phi, part.T, part.weight) for part in parts), strict=True)
        return cls(np.concatenate(phi, axis=1), np.concatenate(T), np.concatenate(weight))

    def at(self, rows: slice) -> "FeatureRows":
        return FeatureRows(self.phi[:, rows], self.T[rows], self.weight[rows])

    def statistics(self) -> Statistics:
        phi, T = torch.from_numpy(self.phi), torch.from_numpy(self.T)
        weight = None if (self.weight == 1).all() else torch.from_numpy(self.weight).expand(len(phi), -1)
        return Statistics.from_linear_features(phi, T.expand(len(phi), -1, -1), sample_weight=weight)


@dataclass
class LayerStack:
    """c last layers after a factorisation, and the rows added since."""

    log_alphas: tuple[Float[Tensor, " c"], ...]
    """Log of alpha*, and of the alpha of the variance if that differs."""
    bias_prior: BiasPrior
    statistics: Statistics
    """Statistics at the last factorisation."""
    recursions: tuple[Recursion, ...] = ()
    """Current state of the recursion, at every alpha."""
    since: list[FeatureRows] = field(default_factory=list)
    """Rows added after the last factorisation."""
    peak: Float[ndarray, "a c q"] | None = None
    """Largest weights of each output, at every alpha, while rows were dropped; None: none was."""

    @classmethod
    def of(cls, members: Sequence[Member], *, tuned: bool) -> "LayerStack":
        """Build a stack of the last layers of members; tuned: whether the variance of some has another alpha."""
        statistics = Statistics.stacked([member.posterior.statistics for member in members]).to("cpu")
        each = [[member.log_alpha_star for member in members], [member.log_alpha for member in members]]
        alphas = tuple(statistics.count.new_tensor(values) for values in (each if tuned else each[:1]))
        return cls(alphas, members[0].posterior.bias_prior, statistics).factored(statistics)

    def factored(self, statistics: Statistics) -> "LayerStack":
        """Return a stack factorised from these statistics, without rows since."""
        recursions = tuple(Recursion.of(statistics, log_alpha, self.bias_prior) for log_alpha in self.log_alphas)
        return LayerStack(self.log_alphas, self.bias_prior, statistics, recursions)

    def saved(self) -> "SavedStack":
        """What a model file holds of the stack beside the posteriors."""
        moments = {name: getattr(self.statistics, name) for name in MOMENTS}
        since = (FeatureRows.joined(self.since),) if self.since else ()
        return SavedStack(**moments, recursions=self.recursions, since=since, peak=self.peak)

    def restored(self, content: Any, name: str, tensors: dict[str, Tensor]) -> "LayerStack":
        """This stack as it was when `saved`; raises ValueError if the parts are inconsistent."""
        saved: SavedStack = self.reader(tensors).unpack(SavedStack, content, name)
        check_scatter(saved.scatter)
        if not (saved.count > 0).all() or len(saved.recursions) != len(self.log_alphas):
            raise ValueError(f"{name} has no rows, or {len(saved.recursions)} recursions")
        moments = {key: getattr(saved, key) for key in MOMENTS}
        statistics = replace(self.statistics, **moments)
        return LayerStack(self.log_alphas, self.bias_prior, statistics, saved.recursions, list(saved.since), saved.peak)

    def reader(self, tensors: dict[str, Tensor]) -> Reader:
        """What restores packed parts of this stack, of its numbers of layers, features and outputs."""
        c, k, q = len(self.statistics.count), self.statistics.n_linear, self.statistics.n_outputs
        sizes = {"a": len(self.log_alphas), "c": c, "k": k, "p": k + 1, "q": q, "s": k + q}
        return Reader(tensors, sizes, LIMITS)

    def total(self, kept: float = 1.0) -> Statistics:
        """Statistics of all rows so far, which keep a fraction `kept` of their weight."""
        total = self.statistics + FeatureRows.joined(self.since).statistics() if self.since else self.statistics
        return total if kept == 1.0 else total.scaled(kept)

    def error(self, factored: "LayerStack") -> float:
        """Largest difference of the weights from those of another factorisation, relative to the largest weight."""
        k = self.statistics.n_linear  # biases belong to different centres
        pairs = [(a.W[:, :k], b.W[:, :k]) for a, b in zip(self.recursions, factored.recursions, strict=True)]
        return max(float(np.abs(a - b).max() / max(np.abs(b).max(), TINY)) for a, b in pairs)

    def add(self, rows: FeatureRows, seen: list[Whitened]) -> bool:
        """Add rows by the recursion, given as features and whitened at every alpha; False if that would lose digits."""
        for recursion, whitened in zip(self.recursions, seen, strict=True):
            for i in range(len(rows.T)):
                row = whitened if len(rows.T) == 1 else recursion.whitened(rows.phi[:, i : i + 1])
                weight = rows.weight.item(i)
                if weight * row.variance_ratio.max() > LARGEST_PIVOT:
                    return False
                recursion.move(row, rows.T[i], weight=weight)
        return True

    def drop(self, row: FeatureRows) -> bool:
        """Drop one row that was added before, by the recursion; False where that would lose digits."""
        options, before = {"weight": row.weight.item(0), "smallest_pivot": SMALLEST_PIVOT}, self._largest_weights()
        gone = all(r.move(r.whitened(row.phi), row.T[0], sign=-1.0, **options) for r in self.recursions)
        self.peak = before if self.peak is None else np.maximum(self.peak, before)
        return gone and bool((self.peak <= LARGEST_DROP * np.maximum(self._largest_weights(), LEAST_WEIGHT)).all())

    def _largest_weights(self) -> Float[ndarray, "a c q"]:
        return np.stack([np.abs(recursion.W).max(1) for recursion in self.recursions])

    def predicted(self, seen: list[Whitened]) -> list[ndarray]:
        """Mean (c, n, q), cost (c, n, 1) at the alpha of the variance, and at alpha* if that differs."""
        mean, costs = self.recursions[0].mean(seen[0]), [rows.variance_ratio[..., None] for rows in seen]
        return [mean, *reversed(costs)]


@dataclass(frozen=True)
class SavedStack:
    """What a model file holds of a `LayerStack` beside the posteriors."""

    count: Float[Tensor, " c"]
    mean: Float[Tensor, "c s"]
    scatter: Float[Tensor, "c s s"]
    energy: Float[Tensor, "c s"]
    recursions: tuple[Recursion, ...]
    since: tuple[FeatureRows, ...]
    """All rows together, if any."""
    peak: Float[ndarray, "a c q"] | None


LIMITS = {FeatureRows: {"weight": Limits(0.0)}, SavedStack: {"count": Limits(0.0), "energy": Limits(0.0)}}
