"""Rows as training takes them: targets may be missing, their noise may be known, and functionals may be observed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lastlayer._internal.chunks import CHUNK_ROWS, row_chunks
from lastlayer.bayes.coupled import PatternStatistics
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.statistics import OutputStatistics, Statistics
from lastlayer.data.observe import StandardObservations
from lastlayer.networks.structured import converted
from lastlayer.settings.types import NoiseStructure


@dataclass(frozen=True)
class Data:
    """Inputs, standardised targets and sample weights; weights are (m,), or (s, m) for a stack of networks."""

    X: Tensor
    T: Tensor
    weight: Tensor | None = None
    present: Tensor | None = None
    """In the shape of T: 1 where a target is known, 0 where it is missing. None: all are known."""
    noise_var: Tensor | None = None
    """In the shape of T: known noise variances, in addition to the learned noise. None: there are none."""
    observations: tuple[StandardObservations, ...] = ()
    """Observed functionals of the same function."""

    @classmethod
    def partly(
        cls, X: Tensor, T: Tensor, weight: Tensor | None = None, noise_var: Tensor | None = None, **more: Any
    ) -> "Data":
        """Build data from targets of which some may be missing (NaN)."""
        missing = T.isnan()
        present = (~missing).to(T) if bool(missing.any()) else None
        return cls(X, T.nan_to_num(0.0), weight, present, noise_var, **more)

    @property
    def alike(self) -> bool:
        """Whether all targets are known and have the same noise, and no functionals are observed."""
        return self.present is None and self.noise_var is None and not self.observations

    @property
    def learned_noise(self) -> bool:
        """Whether all noise is learned."""
        return self.noise_var is None and not self.observations

    def rows(self, rows: Tensor | slice) -> "Data":
        """Select rows."""
        rows = rows.to(self.X.device) if isinstance(rows, Tensor) else rows
        names = ("X", "T", "weight", "present", "noise_var")
        return replace(self, **{n: getattr(self, n)[rows] for n in names if getattr(self, n) is not None})

    def float(self) -> "Data":
        """Inputs, targets and weights in float32; ids stay integers."""
        weight = None if self.weight is None else self.weight.float()
        return replace(self, X=converted(self.X, torch.float32), T=self.T.float(), weight=weight)

    def sampled(self, at: Int[Tensor, " n"]) -> "Data":
        """Select rows, each weighted for all rows that it stands for; for a stack, the same rows of every network."""
        m = self.X.shape[-2]
        weight = torch.ones(m, dtype=torch.float64, device=self.X.device) if self.weight is None else self.weight
        rows = {
            n: getattr(self, n)[..., at, :] for n in ("X", "T", "present", "noise_var") if getattr(self, n) is not None
        }
        return replace(self, **rows, weight=weight[..., at] * (m / len(at)))

    @property
    def varied(self) -> bool:
        """Whether every target takes at least two values."""
        return all(bool(len(t[~t.isnan()].unique()) > 1) for t in self.known.T)

    @property
    def known(self) -> Tensor:
        """Targets, NaN where they are missing."""
        return self.T if self.present is None else torch.where(self.present > 0, self.T, torch.nan)

    def statistics(
        self, linear: Callable[[Tensor], Tensor], learned: Tensor | None = None, *, noise: NoiseStructure = "diagonal"
    ) -> Statistics:
        """Statistics of linear features, computed chunk by chunk."""
        total: Statistics | None = None
        for part in self.chunks():
            Phi = affine_features(linear(part.X)).double()
            more: Statistics
            if self.alike:
                more = Statistics.from_features(Phi, part.T, sample_weight=part.weight)
            elif noise == "full":
                assert part.present is not None
                more = PatternStatistics.from_rows(Phi, part.T, part.present, sample_weight=part.weight)
            else:
                more = OutputStatistics.from_rows(Phi, part.T, part.precision(learned), sample_weight=part.weight)
            total = more if total is None else total + more
        assert total is not None
        if not self.observations:
            return total
        assert learned is not None
        return total + self.of_observations(linear, learned)

    def precision(self, learned: Float[Tensor, "*b q"] | None) -> Float[Tensor, "*b m q"]:
        """Relative precision of each target: learned over total noise variance; 0 where it is missing."""
        whole = torch.ones_like(self.T)
        if self.noise_var is not None:
            assert learned is not None
            whole = 1 / (1 + self.noise_var / learned[..., None, :])
        return whole if self.present is None else whole * self.present

    def log_variances(self, learned: Float[Tensor, "*b q"]) -> Float[Tensor, "*b q"]:
        """Sums of the log noise variances over the targets of each output."""
        v = learned[..., None, :].expand(*learned.shape[:-1], *self.T.shape[-2:])
        v = (v if self.noise_var is None else v + self.noise_var).log()
        v = v if self.present is None else v * self.present
        total = (v if self.weight is None else v * self.weight[..., None]).sum(-2)
        for seen in self.observations:
            j = seen.functionals.output
            more = seen.variances(learned[..., j]).log().sum(-1)
            total = total + more[..., None] * torch.eye(learned.shape[-1]).to(learned)[j]
        return total

    def of_observations(self, linear: Callable[[Tensor], Tensor], learned: Float[Tensor, "*b q"]) -> OutputStatistics:
        """Statistics of the observed functionals."""
        parts: dict[int, Statistics] = {}
        for seen in self.observations:
            j = seen.functionals.output
            Psi = seen.functionals.features(linear, self.X).double()
            precision = learned[..., j, None] / seen.variances(learned[..., j])
            more = Statistics.from_functionals(Psi, seen.t.to(Psi)[:, None], precision)
            parts[j] = parts[j] + more if j in parts else more
        nothing = next(iter(parts.values())).nothing()
        return OutputStatistics.of_outputs([parts.get(j, nothing) for j in range(learned.shape[-1])])

    def chunks(self, size: int = CHUNK_ROWS) -> "Iterator[Data]":
        """Split the rows into chunks that fit into memory with their features."""
        return (self.rows(rows) for rows in row_chunks(len(self.X), size))
