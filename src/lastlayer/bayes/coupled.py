"""Correlated noise with partly missing targets: statistics by pattern of missing targets, and the resulting
regression.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lastlayer._internal.numbers import EPS, TINY
from lastlayer.bayes.linalg import Cholesky
from lastlayer.bayes.precision import ROUNDING
from lastlayer.bayes.statistics import MOMENTS, Statistics
from lastlayer.errors import InputError
from lastlayer.settings.types import BiasPrior


@dataclass(frozen=True)
class PatternStatistics(Statistics):
    """Statistics of the rows of each pattern; the last axis of a batch indexes the patterns."""

    patterns: Bool[Tensor, "g q"] = field(default_factory=lambda: torch.ones(1, 1, dtype=torch.bool))
    """Which outputs are observed in each pattern."""

    @classmethod
    def from_rows(
        cls,
        Phi: Float[Tensor, "*b m p"],
        T: Float[Tensor, "*#b m q"],
        present: Float[Tensor, "*#b m q"],
        *,
        sample_weight: Float[Tensor, "*#b m"] | None = None,
    ) -> "PatternStatistics":
        """Compute the statistics of rows; `present` is 1 where a target is known, 0 where it is missing."""
        known = present > 0
        patterns = known.flatten(0, -2).unique(dim=0)
        weight = torch.ones_like(known[..., 0], dtype=torch.float64) if sample_weight is None else sample_weight
        parts = []
        for pattern in patterns:
            own = weight * (known == pattern).all(-1)
            parts.append(Statistics.from_features(Phi, (T * pattern).expand(*Phi.shape[:-1], -1), sample_weight=own))
        return cls.of_patterns(patterns, parts)

    @classmethod
    def of_patterns(cls, patterns: Bool[Tensor, "g q"], parts: Sequence[Statistics]) -> "PatternStatistics":
        """Combine the statistics of each pattern."""
        return cls(**vars(Statistics.stacked(parts, parts[0].count.dim())), patterns=patterns)

    @classmethod
    def complete(cls, statistics: Statistics) -> "PatternStatistics":
        """Convert the statistics of rows without missing targets."""
        every = torch.ones(1, statistics.n_outputs, dtype=torch.bool, device=statistics.mean.device)
        return cls.of_patterns(every, [statistics])

    def parts(self) -> dict[tuple[bool, ...], Statistics]:
        """Statistics of each pattern, by pattern."""
        axis = self.count.dim() - 1
        of_each = [dict(zip(MOMENTS, part, strict=True)) for part in zip(*self._unbound(axis), strict=True)]
        parts = [Statistics(**moments, n_outputs=self.n_outputs) for moments in of_each]
        return dict(zip(map(tuple, self.patterns.tolist()), parts, strict=True))

    def __add__(self, other: Statistics) -> "PatternStatistics":
        self._check_same_columns(other)
        assert isinstance(other, PatternStatistics)
        parts = self.parts()
        for pattern, more in other.parts().items():
            parts[pattern] = parts[pattern] + more if pattern in parts else more
        return self._of(parts)

    def __sub__(self, other: Statistics) -> "PatternStatistics":
        self._check_same_columns(other)
        assert isinstance(other, PatternStatistics)
        parts = self.parts()
        for pattern, gone in other.parts().items():
            if pattern not in parts:
                raise InputError(
                    f"the rows to remove were not all added before: none of those added has targets for the same "
                    f"{sum(pattern)} of {len(pattern)} outputs; remove only rows that were added"
                )
            if bool((parts[pattern].count - gone.count <= EPS * gone.count).all()) and len(parts) > 1:
                del parts[pattern]
            else:
                parts[pattern] = parts[pattern] - gone
        return self._of(parts)

    @property
    def n_by_output(self) -> Float[Tensor, "*b q"]:
        """Number of targets of each output."""
        return self.count @ self.patterns.to(self.count)

    def _unbound(self, axis: int) -> list[tuple[Tensor, ...]]:
        return [getattr(self, name).unbind(axis) for name in MOMENTS]

    def _of(self, parts: dict[tuple[bool, ...], Statistics]) -> "PatternStatistics":
        return self.of_patterns(torch.tensor(list(parts), device=self.mean.device), list(parts.values()))


@dataclass(frozen=True)
class CoupledEquations:
    """Moments of [phi_tilde - centre, 1, t - centre] in each pattern; not centred under the shared prior."""

    gram: Float[Tensor, "*b g p p"]
    cross: Float[Tensor, "*b g p q"]
    targets: Float[Tensor, "*b g q q"]
    patterns: Bool[Tensor, "g q"]
    count: Float[Tensor, "*b g"]
    feature_mean: Float[Tensor, "*b k"]
    target_mean: Float[Tensor, "*b q"]
    energy: Float[Tensor, "*b p"]
    bias_prior: BiasPrior

    @classmethod
    def of(cls, statistics: PatternStatistics, bias_prior: BiasPrior = "flat") -> "CoupledEquations":
        """Compute the moments from statistics by pattern."""
        k, count, mean = statistics.n_linear, statistics.count, statistics.mean
        shown = torch.cat([torch.ones_like(mean[..., :k]), statistics.patterns.to(mean).expand_as(mean[..., k:])], -1)
        if bias_prior == "flat":
            weight = count[..., None] * shown
            centre = (weight * mean).sum(-2) / weight.sum(-2).clamp_min(TINY)
        else:
            centre = torch.zeros_like(mean[..., 0, :])
        eye = torch.eye(mean.shape[-1] + 1, dtype=mean.dtype, device=mean.device)
        one, rest = eye[k], torch.cat([eye[:k], eye[k + 1 :]])
        row = (shown * (mean - centre[..., None, :])) @ rest + one
        moments = rest.mT @ statistics.scatter @ rest + count[..., None, None] * row[..., :, None] * row[..., None, :]
        energy = statistics.energy @ rest + count[..., None] * row.detach().square()
        p = k + 1
        return cls(
            gram=moments[..., :p, :p],
            cross=moments[..., :p, p:],
            targets=moments[..., p:, p:],
            patterns=statistics.patterns,
            count=count,
            feature_mean=centre[..., :k],
            target_mean=centre[..., k:],
            energy=energy.sum(-2)[..., :p],
            bias_prior=bias_prior,
        )

    @property
    def resolution(self) -> Float[Tensor, "*b"]:
        """Smallest eigenvalue, alpha^-1 included, that is meaningful given the rounding errors of the moments."""
        return (ROUNDING * self.energy.sum(-1)).clamp_min(TINY)

    @property
    def n_penalised(self) -> int:
        """k: number of weights per output that the prior shrinks towards zero."""
        return self.gram.shape[-1] - (self.bias_prior == "flat")

    def rows(self, Phi: Float[Tensor, "... r p"]) -> Float[Tensor, "... r p"]:
        """[phi_tilde - centre, 1] of affine features."""
        centre = torch.cat([self.feature_mean, torch.zeros_like(self.feature_mean[..., :1])], -1)
        return Phi.to(centre) - centre[..., None, :]

    def at(self, log_alpha: float | Float[Tensor, "*b"], noise_root: Float[Tensor, "*b q q"]) -> "CoupledPrecision":
        """Factor Lambda at one alpha and noise; `noise_root` is L."""
        alpha_inverse = (-torch.as_tensor(log_alpha, dtype=self.gram.dtype, device=self.gram.device)).exp()
        ridge = torch.maximum(alpha_inverse, self.resolution)
        p, q = self.cross.shape[-2:]
        eye = torch.eye(q, dtype=self.gram.dtype, device=self.gram.device)
        shown = self.patterns.to(eye)
        Sigma = (noise_root @ noise_root.mT)[..., None, :, :]
        seen = Cholesky.of(shown[:, :, None] * Sigma * shown[:, None, :] + torch.diag_embed(1 - shown))
        B = shown[:, :, None] * seen.inverse() * shown[:, None, :]
        L = noise_root[..., None, :, :]
        data = torch.einsum("...gjl,...gab->...jalb", L.mT @ B @ L, self.gram).flatten(-2).flatten(-3, -2)
        prior = torch.ones(p, dtype=eye.dtype, device=eye.device)
        prior[self.n_penalised :] = 0.0
        factor = Cholesky.of(data + torch.diag_embed(ridge[..., None] * prior.repeat(q)))
        return CoupledPrecision(
            self,
            ridge,
            noise_root,
            factor,
            rhs=(self.cross @ B @ L).sum(-3).mT.flatten(-2),
            weighted_targets=(B * self.targets).sum((-3, -2, -1)),
            noise_logdets=seen.logdet(),
        )


@dataclass(frozen=True)
class CoupledPrecision:
    """Lambda at one alpha and noise, factored; V is flattened output by output."""

    equations: CoupledEquations
    ridge: Float[Tensor, "*b"]
    noise_root: Float[Tensor, "*b q q"]
    factor: Cholesky
    rhs: Float[Tensor, "*b pq"]
    weighted_targets: Float[Tensor, "*b"]
    """Sum of t' Sigma_E[o, o]^-1 t."""
    noise_logdets: Float[Tensor, "*b g"]
    """log det Sigma_E[o, o]."""

    @cached_property
    def weights(self) -> Float[Tensor, "*b p q"]:
        """W for centred features and targets."""
        q = self.noise_root.shape[-1]
        V = self.factor.solve(self.rhs[..., None])[..., 0].unflatten(-1, (q, -1))
        return V.mT @ self.noise_root.mT

    @cached_property
    def roots(self) -> Float[Tensor, "q p pq"]:
        """R such that the function of output j is mean + z R[j] e, with e standard normal and common to all outputs."""
        q = self.noise_root.shape[-1]
        eye = torch.eye(self.rhs.shape[-1], dtype=self.rhs.dtype, device=self.rhs.device)
        return torch.einsum("jl,lar->jar", self.noise_root, self.factor.whiten(eye).unflatten(0, (q, -1)))

    def nlml(self) -> Float[Tensor, "*b"]:
        """Negative log marginal likelihood, per target of the output with most targets."""
        eq, q = self.equations, self.noise_root.shape[-1]
        shown = eq.patterns.to(eq.count)
        log_2pi = torch.tensor(2 * torch.pi, dtype=eq.count.dtype, device=eq.count.device).log()
        noise = (eq.count * (shown.sum(-1) * log_2pi + self.noise_logdets)).sum(-1)
        half = torch.linalg.solve_triangular(self.factor.L, self.rhs[..., None], upper=False)
        total = noise - eq.n_penalised * q * self.ridge.log() + self.factor.logdet()
        total = total + self.weighted_targets - half.square().sum((-2, -1))
        if eq.bias_prior == "flat":
            total = total - q * log_2pi - Cholesky(self.noise_root).logdet()
        return total / (2 * (eq.count @ shown).amax(-1))
