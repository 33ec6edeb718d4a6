"""The last layer of mini-batch training: statistics as a running average, everything else from them in closed form."""

import math
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lastlayer.distributed import ONE, ProcessGroup
from lastlayer.posterior import Posterior
from lastlayer.statistics import Statistics
from lastlayer.training.bound import BoundTerms, FrozenLayer
from lastlayer.training.objectives import INITIAL_LOG_ALPHA
from lastlayer.types import BiasPrior, NoiseStructure

MOST_SHARE = 0.7
"""Of a new batch in the running average."""
REFRESH_ROUNDS = 10
"""Of MacKay's fixed point for alpha, once the statistics of all rows are there."""

Kept = TypeVar("Kept", FrozenLayer, Statistics)


@dataclass(frozen=True)
class UpdateSchedule:
    """What a step spends on the last layer. Features move fast: a short memory beats a long one."""

    rows: int = 16
    """Rows per feature whose products are taken in a step: k^2 numbers per row are what statistics cost."""
    at_least: int = 1_024
    """Rows that are always taken if the batch has them."""
    memory: int = 15
    """Rows per feature that the running average reaches back to, or the weights would follow single batches."""
    logdet_share: int = 16
    """One row in so many bears the term of the log-determinant, but not fewer than there are features."""
    every: int = 8
    """Steps from one Lambda_0 and alpha to the next; W and noise are new in each."""
    settle: int = 16
    """First steps, in which all is new every time."""


@dataclass(frozen=True)
class Snapshot:
    """The last layer after some step."""

    statistics: Statistics
    """Running average, with the total weight of all rows."""
    frozen: FrozenLayer
    log_alpha: Float[Tensor, "*b"]
    effective_rows: float
    """Rows that the running average is worth: one over the sum of squares of their shares."""

    def tensors(self) -> dict[str, Tensor]:
        """All that a file needs of it."""
        tensors = {f"statistics.{name}": v for name, v in tensors_of(self.statistics).items()}
        tensors |= {f"frozen.{name}": v for name, v in tensors_of(self.frozen).items()}
        effective_rows = torch.tensor(self.effective_rows, dtype=torch.float64)
        return tensors | {"log_alpha": self.log_alpha, "effective_rows": effective_rows}

    @classmethod
    def of(cls, tensors: dict[str, Tensor], bias_prior: BiasPrior) -> "Snapshot":
        """Back from a file; other entries are left alone."""

        def under(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}

        frozen = FrozenLayer(**under("frozen."), bias_prior=bias_prior)
        statistics = Statistics(**under("statistics."), n_outputs=frozen.weights.shape[-1])
        return cls(statistics, frozen, tensors["log_alpha"], float(tensors["effective_rows"]))


@dataclass
class RunningPosterior:
    """The last layer while networks train; leading dimensions are networks of a stack.

    Nothing here waits for the device: numbers are looked at by whoever asks for them.
    """

    count: Float[Tensor, "*b"]
    """Total weight of all rows, of each network."""
    n_rows: int
    """Rows in a pass, on all processes."""
    noise: NoiseStructure = "diagonal"
    bias_prior: BiasPrior = "flat"
    schedule: UpdateSchedule = UpdateSchedule()
    process_group: ProcessGroup = ONE
    steps: int = 0
    snapshot: Snapshot | None = None
    """None before the first step."""

    @property
    def now(self) -> Snapshot:
        assert self.snapshot is not None, "asked before the first step"
        return self.snapshot

    def step(
        self,
        phi_tilde: Float[Tensor, "*b r k"],
        T: Float[Tensor, "*#b r q"],
        weight: Float[Tensor, "*#b r"] | None = None,
        *,
        total: int | None = None,
        drift: float = 1.0,
    ) -> BoundTerms:
        """Take in a batch, and return its loss and gradient in the features.

        `total`: its rows on all processes. `drift`: how fast features move, over their speed at first; the slower, the
        longer the memory (the weights lag by drift / share and jitter by share: the best share goes with the root).
        """
        r, k = phi_tilde.shape[-2:]
        total = r if total is None else total
        used = min(total, max(self.schedule.rows * k, self.schedule.at_least))
        own = self.process_group.local_count(used)
        part = Statistics.from_linear_features(
            phi_tilde[..., :own, :],
            T[..., :own, :],
            sample_weight=None if weight is None else weight[..., :own],
            dtype=torch.float64 if phi_tilde.dtype == torch.float64 else torch.float32,
        )
        frozen = self.absorb(self.process_group.reduce(part), used, drift=drift)
        logdet_rows = min(total, max(total // self.schedule.logdet_share, k))
        return frozen.rows(
            phi_tilde,
            T,
            weight,
            scale=self.n_rows / total,
            logdet_rows=self.process_group.local_count(logdet_rows),
            logdet_scale=total / logdet_rows,
        )

    def absorb(self, part: Statistics, used: int, *, drift: float = 1.0) -> FrozenLayer:
        """Take in the statistics of `used` rows of a batch, and return the layer that follows."""
        share = min(2 / (1 + self.schedule.memory * part.n_linear / used), MOST_SHARE) * drift**0.5
        if self.snapshot is not None:  # a row of the batch counts no less than an old one
            share = max(share, used / (used + self.snapshot.effective_rows))
        self.snapshot = self._after(part.weighing(self.count), share, used)
        self.steps += 1
        return self.snapshot.frozen

    def refresh(self, statistics: Statistics) -> None:
        """Begin anew from the statistics of all rows at the present features: there the bound touches the evidence."""
        old = self.snapshot
        log_alpha = torch.full_like(self.count, INITIAL_LOG_ALPHA) if old is None else old.log_alpha
        frozen = self._frozen(statistics, log_alpha, None, float(self.n_rows))
        for _ in range(REFRESH_ROUNDS):
            log_alpha = _moved(log_alpha, frozen)
            frozen = self._frozen(statistics, log_alpha, None, float(self.n_rows))
        if old is not None:
            fine = _sound(frozen)
            frozen, statistics = _where(fine, frozen, old.frozen), _where(fine, statistics, old.statistics)
            log_alpha = torch.where(fine, log_alpha, old.log_alpha)
        self.snapshot = Snapshot(statistics, frozen, log_alpha, float(self.n_rows))

    def posterior(self) -> Posterior:
        """What the running average says of the weights, of a single network."""
        now = self.now
        return Posterior(
            now.statistics, float(now.log_alpha), noise=self.noise, bias_prior=self.bias_prior, rtol=math.inf
        )

    def gap(self, statistics: Statistics) -> Float[Tensor, "*b"]:
        """How far the present bound lies above the evidence of these statistics, per sample, at the same alpha."""
        exact = self._frozen(statistics, self.now.log_alpha, None, float(self.n_rows))
        return self.now.frozen.bound(statistics) - exact.bound(statistics)

    def _after(self, part: Statistics, share: float, used: int) -> Snapshot:
        """The layer once the statistics of a batch have come in with that share of the whole."""
        if self.snapshot is None:
            log_alpha = torch.full_like(self.count, INITIAL_LOG_ALPHA)
            return Snapshot(part, self._frozen(part, log_alpha, None, float(used)), log_alpha, float(used))
        old, log_alpha = self.snapshot.frozen, self.snapshot.log_alpha
        both = self.snapshot.statistics.weighing((1 - share) * self.count) + part.weighing(share * self.count)
        effective_rows = 1 / ((1 - share) ** 2 / self.snapshot.effective_rows + share**2 / used)
        # a network that failed and went back to an older state starts with this batch alone
        statistics = _where(_finite(both.scatter), both, part)
        due = self.steps < self.schedule.settle or self.steps % self.schedule.every == 0
        new = self._frozen(statistics, log_alpha, None if due else old, effective_rows)
        # a factorisation that failed leaves the old layer in place
        frozen = _where(_sound(new), new, old)
        if due:
            log_alpha = _moved(log_alpha, frozen)
        return Snapshot(statistics, frozen, log_alpha, effective_rows)

    def _frozen(
        self, statistics: Statistics, log_alpha: Tensor, logdet_from: FrozenLayer | None, effective_rows: float
    ) -> FrozenLayer:
        return FrozenLayer.of(
            statistics,
            log_alpha,
            noise=self.noise,
            bias_prior=self.bias_prior,
            logdet_from=logdet_from,
            seen=min(effective_rows / self.n_rows, 1.0),
        )


def tensors_of(value: FrozenLayer | Statistics) -> dict[str, Tensor]:
    """The fields that are tensors."""
    return {f.name: v for f in fields(value) if isinstance(v := getattr(value, f.name), Tensor)}


def _moved(log_alpha: Float[Tensor, "*b"], frozen: FrozenLayer) -> Float[Tensor, "*b"]:
    """Towards the fixed point, one unit at most."""
    change = (frozen.fixed_point - log_alpha).clamp(-1.0, 1.0)
    return log_alpha + torch.where(torch.isfinite(change), change, 0.0)


def _sound(frozen: FrozenLayer) -> Bool[Tensor, "*b"]:
    """Which networks have a layer that can be used."""
    return _finite(frozen.weights) & _finite(frozen.noise_precision)


def _finite(matrix: Float[Tensor, "*b c d"]) -> Bool[Tensor, "*b"]:
    """Which networks have a finite one."""
    return torch.isfinite(matrix.sum((-2, -1)))


def _where(fine: Bool[Tensor, "*b"], new: Kept, old: Kept) -> Kept:
    """Network by network the new or the old one."""
    was, chosen = tensors_of(old), tensors_of(new)
    for name, v in chosen.items():
        at = fine.reshape(*fine.shape, *[1] * (v.dim() - fine.dim())) if v.dim() else fine
        chosen[name] = v if v is was[name] else torch.where(at, v, was[name])
    return replace(new, **chosen)  # type: ignore[arg-type]
