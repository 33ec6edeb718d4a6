"""Held-out points, with the predictions of networks that never saw them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Num
from numpy import ndarray
from torch import Tensor

from lastlayer._internal.numbers import TINY
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.readings import Readings
from lastlayer.data.rows import Points
from lastlayer.formula.ops import TorchOps
from lastlayer.formula.predictive import log_far
from lastlayer.settings.types import ADDITIVE, FOURIER, Family

REGIONS = ("blocked", "shell", "outside")
"""Kinds of points that were held out together with all their neighbours."""
REGION_WEIGHT = 0.1
"""Weight of such a point in calibration, relative to one held out at random: errors within a region are correlated."""
BY_NETWORK = ("mean", "cost", "noise_var", "correlation")


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
            marginals = posterior.predict(Phi)
        mean, var = marginals.mean, marginals.noise_cov.diagonal()
        correlation = None
        if posterior.noise == "full" and len(var) > 1:
            std = var.sqrt()
            correlation = (marginals.noise_cov / std / std[:, None]).expand(1, len(mean), -1, -1)
        weight = torch.ones_like(mean[:, 0]) if data.weight is None else data.weight
        return cls(
            mean=mean[None],
            cost=marginals.variance_ratio[None],
            noise_var=var.expand(mean.shape)[None],
            correlation=correlation,
            inputs=data.X,
            readings=data.readings.map(lambda x: x.to(mean)),
            weight=weight * (REGION_WEIGHT if kind in REGIONS else 1.0),
            kind=np.full(len(mean), kind),
            families=(family,),
        )

    @property
    def targets(self) -> Float[Tensor, "n q"]:
        """Working targets, NaN where they are missing."""
        return self.readings.values

    @classmethod
    def joined(cls, parts: "list[HeldOutPoints]") -> "HeldOutPoints":
        """Concatenate the points of several sets with equally many networks."""
        every = cls._each(parts, lambda xs: torch.cat(xs, 1), torch.cat)
        kind = np.concatenate([part.kind for part in parts])
        return cls(**every, kind=kind, families=parts[0].families)

    @classmethod
    def stacked(cls, parts: "list[HeldOutPoints]") -> "HeldOutPoints":
        """Combine the networks of several sets of the same points."""
        every = cls._each(parts, torch.cat, lambda xs: xs[0])
        families = tuple(family for part in parts for family in part.families)
        return cls(**every, kind=parts[0].kind, families=families)

    @classmethod
    def _each(
        cls, parts: "list[HeldOutPoints]", by_network: Callable[[list[Any]], Any], by_point: Callable[[list[Any]], Any]
    ) -> dict[str, Any]:
        """Combine the tensors of several sets, field by field."""
        names = [f.name for f in fields(cls) if f.name not in ("readings", "kind", "families", "inside")]
        values = {name: [getattr(part, name) for part in parts] for name in names}
        tensors = {
            name: None if xs[0] is None else (by_network if name in BY_NETWORK else by_point)(xs)
            for name, xs in values.items()
        }
        return tensors | {"readings": Readings.joined([part.readings for part in parts], by_point)}

    def __getitem__(self, points: ndarray) -> "HeldOutPoints":
        """Select points by their indices."""
        at = torch.from_numpy(points).to(self.mean.device)
        every = self._each([self], lambda xs: xs[0][:, at], lambda xs: xs[0][at])
        return replace(self, **every, kind=self.kind[points])

    def of(self, family: Family) -> "HeldOutPoints":
        """Select the networks of one family."""
        same = [i for i, own in enumerate(self.families) if own == family]
        at = torch.tensor(same, device=self.mean.device)
        every = self._each([self], lambda xs: xs[0][at], lambda xs: xs[0])
        return replace(self, **every, families=(family,) * len(same))

    @property
    def single(self) -> Bool[ndarray, " n"]:
        """Mask of points that were held out without their neighbours."""
        return ~np.isin(self.kind, REGIONS)

    def beside_references(self, inside: dict[Family, float] | None = None) -> "HeldOutPoints":
        """Add what the Gaussian process and the additive model say of which points lie outside the data."""
        costs = {family: self._cost_of(family) for family in (FOURIER, ADDITIVE) if family in self.families}
        if not costs or not len(self.weight):
            return self
        edge = {family: self._largest_single(cost) for family, cost in costs.items()} if inside is None else inside
        if FOURIER not in costs:
            return replace(self, inside=edge)
        cost, weight, kind = costs[FOURIER], self.weight, self.kind
        if inside is not None:
            beyond = (cost > edge[FOURIER]).cpu().numpy() & self.single
            kind = np.where(beyond, "outside", kind)
            weight = torch.where(torch.from_numpy(beyond).to(cost.device), REGION_WEIGHT * weight, weight)
        log_noise = self.of(FOURIER).noise_var.log().mean((0, -1))
        far = log_far(TorchOps, SimpleNamespace(log_noise=log_noise, inside=edge[FOURIER]), cost)
        return replace(self, log_far=far, inside=edge, weight=weight, kind=kind)

    def _cost_of(self, family: Family) -> Float[Tensor, " n"]:
        """Mean affine cost over the networks of a family and over the outputs."""
        cost = self.of(family).cost.mean(0)
        return cost if cost.dim() == 1 else cost.mean(-1)

    def _largest_single(self, cost: Float[Tensor, " n"]) -> float:
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
        t, read = self.readings.t, self.readings.read
        read = torch.ones_like(t) if read is None else read
        error = torch.where(read > 0, (t - self.mean).square() / self.noise_var, 0.0)
        cost = self.cost if self.cost.dim() > 2 else self.cost[..., None]
        fine = torch.isfinite(error + self.noise_var + cost).all(0).all(-1) & (read > 0).any(-1)
        kept = self[np.flatnonzero((fine & (self.weight > 0)).cpu().numpy())]
        here = replace(kept, **self._each([kept], lambda xs: xs[0].cpu(), lambda xs: xs[0].cpu()))
        return replace(here, cost=here.cost.clamp_min(TINY))
