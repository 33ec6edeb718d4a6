"""Held-out points, with the predictions of networks that never saw them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Num
from numpy import ndarray
from torch import Tensor

from lastlayer._internal.numbers import TINY
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Readings
from lastlayer.data.rows import Points
from lastlayer.formula.ops import TorchOps
from lastlayer.formula.predictive import State, log_far
from lastlayer.settings.types import ADDITIVE, FOURIER, Family

REGIONS = ("blocked", "shell", "outside")
"""Kinds of points that were held out together with all their neighbours."""
REGION_WEIGHT = 0.1
"""Weight of such a point in calibration, relative to one held out at random: errors within a region are correlated."""
BY_NETWORK, BY_POINT = ("mean", "cost", "noise_var", "correlation"), ("inputs", "weight", "log_far")


@dataclass(frozen=True)
class HeldOutPoints:
    """Predictions of c networks for points that they did not see, in standardised units."""

    mean: Float[Tensor, "c n q"]
    cost: Float[Tensor, "c n *q"]
    """The affine cost v; one per output, where outputs were observed at different rows."""
    noise_var: Float[Tensor, "c n q"]
    correlation: Float[Tensor, "c n q q"] | None
    """Noise correlation between the outputs; None: independent."""
    inputs: Num[Tensor, "n ..."]
    readings: Readings
    """Working targets with their noise."""
    weight: Float[Tensor, " n"]
    kind: ndarray
    """(n,) strings: how the point was held out, such as "random" or "blocked"."""
    families: tuple[Family, ...]
    """Family of each network."""
    log_far: Float[Tensor, " n"] | None = None
    """`lastlayer.formula.log_far`; None: no network is a Gaussian process."""
    inside: dict[Family, float] = field(default_factory=dict)
    """Affine cost up to which a point counts as inside the data, for the process and the additive model."""

    @classmethod
    def by(
        cls, posterior: Posterior, Phi: Float[Tensor, "n p"], data: Points, kind: str, family: Family
    ) -> "HeldOutPoints":
        """Predict unseen points by one posterior, given their affine features."""
        with torch.no_grad():
            mean, cost, noise_cov = posterior.mean(Phi), posterior.variance_ratio(Phi), posterior.Sigma_E
        var = noise_cov.diagonal()
        correlation = None
        if posterior.noise == "full" and len(var) > 1:
            std = var.sqrt()
            correlation = (noise_cov / std / std[:, None]).expand(1, len(mean), -1, -1)
        weight = torch.ones_like(mean[:, 0]) if data.weight is None else data.weight
        return cls(
            mean=mean[None],
            cost=cost[None],
            noise_var=var.expand(mean.shape)[None],
            correlation=correlation,
            inputs=data.X,
            readings=data.readings.map(lambda x: x.to(mean)),
            weight=weight * (REGION_WEIGHT if kind in REGIONS else 1.0),
            kind=np.full(len(mean), kind),
            families=(family,),
        )

    @classmethod
    def joined(cls, parts: "list[HeldOutPoints]") -> "HeldOutPoints":
        """Concatenate the points of several sets with equally many networks."""
        kind = np.concatenate([part.kind for part in parts])
        return cls._each(parts, lambda xs: torch.cat(xs, 1), torch.cat, kind=kind)

    @classmethod
    def stacked(cls, parts: "list[HeldOutPoints]") -> "HeldOutPoints":
        """Combine the networks of several sets of the same points."""
        families = tuple(family for part in parts for family in part.families)
        return cls._each(parts, torch.cat, lambda xs: xs[0], families=families)

    @staticmethod
    def _each(
        parts: "list[HeldOutPoints]",
        by_network: Callable[[list[Any]], Any],
        by_point: Callable[[list[Any]], Any],
        **other: Any,
    ) -> "HeldOutPoints":
        """Combine the tensors of several sets, field by field."""
        tensors: dict[str, Any] = {}
        for combine, names in ((by_network, BY_NETWORK), (by_point, BY_POINT)):
            values = {name: [getattr(part, name) for part in parts] for name in names}
            tensors |= {name: None if xs[0] is None else combine(xs) for name, xs in values.items()}
        readings = Readings.joined([part.readings for part in parts], by_point)
        return replace(parts[0], **tensors, readings=readings, **other)

    def __getitem__(self, points: ndarray) -> "HeldOutPoints":
        """Select points by their indices."""
        at = torch.from_numpy(points).to(self.mean.device)
        return self._each([self], lambda xs: xs[0][:, at], lambda xs: xs[0][at], kind=self.kind[points])

    def of(self, family: Family) -> "HeldOutPoints":
        """Select the networks of one family."""
        same = [i for i, own in enumerate(self.families) if own == family]
        return self._each([self], lambda xs: xs[0][same], lambda xs: xs[0], families=(family,) * len(same))

    @property
    def single(self) -> Bool[ndarray, " n"]:
        """Mask of points that were held out without their neighbours."""
        return ~np.isin(self.kind, REGIONS)

    def beside_references(self, inside: dict[Family, float] | None = None) -> "HeldOutPoints":
        """Add what the Gaussian process and the additive model say of which points lie outside the data."""
        references = [family for family in (FOURIER, ADDITIVE) if family in self.families]
        if not references or not len(self.weight):
            return self
        costs = {family: self.of(family).cost.mean(0).reshape(len(self.weight), -1).mean(-1) for family in references}
        edge = {family: self._edge(cost) for family, cost in costs.items()} if inside is None else inside
        if FOURIER not in costs:
            return replace(self, inside=edge)
        cost, weight, kind = costs[FOURIER], self.weight, self.kind
        if inside is not None:
            beyond = (cost > edge[FOURIER]).cpu().numpy() & self.single
            kind = np.where(beyond, "outside", kind)
            weight = torch.where(torch.from_numpy(beyond).to(cost.device), REGION_WEIGHT * weight, weight)
        log_noise = self.of(FOURIER).noise_var.log().mean((0, -1))
        far = log_far(TorchOps, State(log_noise=log_noise, inside=edge[FOURIER]), cost)
        return replace(self, log_far=far, inside=edge, weight=weight, kind=kind)

    def _edge(self, cost: Float[Tensor, " n"]) -> float:
        """Largest finite cost of points held out without their neighbours; of all points if there are no such."""
        finite = torch.isfinite(cost)
        single = finite & torch.from_numpy(self.single).to(cost.device)
        return float(cost[single if single.any() else finite].max()) if finite.any() else math.inf

    def some(self, most: int) -> "HeldOutPoints":
        """Select at most `most` points of each kind at random, with a fixed seed; each kind keeps its total weight."""
        rng, weight, picked = np.random.default_rng(0), self.weight.clone(), []
        for rows in (np.flatnonzero(self.kind == kind) for kind in dict.fromkeys(self.kind.tolist())):
            part = np.sort(rng.permutation(rows)[:most]) if len(rows) > most else rows
            weight[part] *= weight[rows].sum() / weight[part].sum()
            picked.append(part)
        return replace(self, weight=weight)[np.sort(np.concatenate(picked))]

    def usable(self) -> "HeldOutPoints":
        """Drop points at which a network failed, and move the others to the CPU, where small problems are fast."""
        t = self.readings.values
        error = torch.where(t.isnan(), 0.0, (t - self.mean).square() / self.noise_var)
        cost = self.cost if self.cost.dim() > 2 else self.cost[..., None]
        fine = torch.isfinite(error + self.noise_var + cost).all(0).all(-1) & ~t.isnan().all(-1)
        kept = self[np.flatnonzero((fine & (self.weight > 0)).cpu().numpy())]
        here = self._each([kept], lambda xs: xs[0].cpu(), lambda xs: xs[0].cpu())
        return replace(here, cost=here.cost.clamp_min(TINY))
