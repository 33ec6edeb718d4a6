"""The last layer of mini-batch training: statistics as a running average, everything else from them in closed form."""

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.ranks import ONE, Ranks
from lastlayer.statistics import Statistics
from lastlayer.training.frozen import FrozenLayer, Rows
from lastlayer.training.objectives import INITIAL_LOG_ALPHA
from lastlayer.types import BiasPrior, NoiseStructure


@dataclass(frozen=True)
class Pace:
    """What a step spends on the last layer. Features move fast: a short memory on few rows beats a long one on many."""

    rows: int = 8
    """Rows a feature whose products are taken in a step: k^2 numbers a row are what statistics cost."""
    memory: int = 15
    """Rows a feature that the running average reaches back to, or the weights would follow single batches."""
    spread: int = 16
    """One row in so many bears the term of the log-determinant, but not fewer than there are features."""
    every: int = 8
    """Steps from one Lambda_0 and alpha to the next; W and noise are new in each."""
    settle: int = 16
    """First steps, in which all is new every time."""


@dataclass
class RunningLayer:
    """State of the last layer while networks train; leading dimensions are networks of a stack.

    Nothing here waits for the device: numbers are looked at by whoever asks for them.
    """

    count: Float[Tensor, "*b"]
    """Total weight of all rows, of each network."""
    n_rows: int
    """Rows in a pass, on all processes."""
    noise: NoiseStructure = "diagonal"
    bias_prior: BiasPrior = "flat"
    pace: Pace = Pace()
    ranks: Ranks = ONE
    steps: int = 0
    statistics: Statistics | None = None
    frozen: FrozenLayer | None = None
    log_alpha: Float[Tensor, "*b"] | None = None

    def step(
        self,
        phi_tilde: Float[Tensor, "*b r k"],
        T: Float[Tensor, "*#b r q"],
        weight: Float[Tensor, "*#b r"] | None = None,
        *,
        total: int | None = None,
    ) -> Rows:
        """Take in a batch, and return its loss and gradient in the features; `total`: its rows on all processes."""
        r, k = phi_tilde.shape[-2:]
        total = r if total is None else total
        self._observe(phi_tilde, T, weight, min(total, self.pace.rows * k))
        assert self.frozen is not None
        spread = min(total, max(total // self.pace.spread, k))
        self.steps += 1
        return self.frozen.rows(
            phi_tilde,
            T,
            weight,
            scale=self.n_rows / total,
            spread_rows=self.ranks.own_share(spread),
            spread_scale=total / spread,
        )

    def forget(self, networks: Bool[Tensor, "*b"]) -> None:
        """Networks that went back to an older state start with the next batch alone."""
        assert self.statistics is not None and self.frozen is not None and self.log_alpha is not None
        if networks.all():
            self.statistics = self.frozen = None
            self.steps = 0
        # TODO
    def _observe(self, phi_tilde: Tensor, T: Tensor, weight: Tensor | None, used: int) -> None:
        """Statistics of the first `used` rows of the batch, and what follows from them."""
        own, k = self.ranks.own_share(used), phi_tilde.shape[-1]
        part = Statistics.from_linear_features(
            phi_tilde[..., :own, :],
            T[..., :own, :],
            sample_weight=None if weight is None else weight[..., :own],
            dtype=phi_tilde.dtype if phi_tilde.dtype == torch.float64 else torch.float32,
        )
        part = _weighing(self.ranks.reduce(part), self.count)
        share = max(1 / (self.steps + 1), 2 / (1 + max(self.pace.memory * k / used, 1)))
        if self.statistics is None:
            self.statistics = part
            self.log_alpha = torch.full_like(self.count, INITIAL_LOG_ALPHA)
        else:
            self.statistics = _weighing(self.statistics, (1 - share) * self.count) + _weighing(part, share * self.count)
        assert self.log_alpha is not None
        due = self.frozen is None or self.steps < self.pace.settle or self.steps % self.pace.every == 0
        new = FrozenLayer.of(
            self.statistics,
            self.log_alpha,
            noise=self.noise,
            bias_prior=self.bias_prior,
            spread=None if due else self.frozen,
        )
        # a factorisation that failed leaves the old layer in place
        fine = torch.isfinite(new.weights).all(-1).all(-1) & torch.isfinite(new.logdet)
        self.frozen = new if self.frozen is None else _where(fine, new, self.frozen)
        if due:
            change = (self.frozen.fixed_point - self.log_alpha).clamp(-1.0, 1.0)
            self.log_alpha = self.log_alpha + torch.where(torch.isfinite(change), change, 0.0)


def _weighing(statistics: Statistics, count: Float[Tensor, "*b"]) -> Statistics:
    """The same rows with another total weight; networks that saw none of them stay empty."""
    factor = torch.where(statistics.count > 0, count / statistics.count, 0.0)
    return replace(
        statistics,
        count=factor * statistics.count,
        scatter=factor[..., None, None] * statistics.scatter,
        energy=factor[..., None] * statistics.energy,
    )


def _where(fine: Tensor, new: FrozenLayer, old: FrozenLayer) -> FrozenLayer:
    def choose(a: Tensor, b: Tensor) -> Tensor:
        return a if a is b else torch.where(fine.reshape(fine.shape + (1,) * (a.dim() - fine.dim())), a, b)

    tensors = [f.name for f in fields(new) if f.name != "bias_prior"]
    return replace(new, **{name: choose(getattr(new, name), getattr(old, name)) for name in tensors})
