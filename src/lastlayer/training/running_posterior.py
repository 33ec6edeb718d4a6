"""The last layer of mini-batch training: running averages of the statistics, and everything else in closed form."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Statistics
from lastlayer.data.distributed import ONE, ProcessGroup
from lastlayer.settings.types import BiasPrior, NoiseStructure
from lastlayer.training.bound import BoundTerms, FrozenLayer
from lastlayer.training.objectives import INITIAL_LOG_ALPHA

MOST_SHARE = 0.7
"""Largest weight of a new batch in the running average."""

Kept = TypeVar("Kept", FrozenLayer, Statistics)


@dataclass(frozen=True)
class UpdateSchedule:
    """Cost of the last layer per step, and its memory, which is short because features change fast."""

    rows: int = 16
    """Rows per feature that enter the statistics in a step: their cost is k^2 per row."""
    at_least: int = 1_024
    """Minimum number of rows to use, if the batch has them."""
    memory: int = 15
    """Rows per feature that the running average covers; with fewer, the weights would follow single batches."""
    logdet_share: int = 16
    """One row in this many enters the log-determinant term, but at least as many rows as there are features."""
    every: int = 8
    """Steps between updates of Lambda_0 and alpha; W and noise are updated in every step."""
    settle: int = 16
    """Number of initial steps in which everything is updated."""


SCHEDULE = UpdateSchedule()


def share_of(
    used: int, n_features: int, effective_rows: float, drift: float, schedule: UpdateSchedule = SCHEDULE
) -> float:
    """Share of a batch of `used` rows in a running average, in which it counts no less than rows before it."""
    share = min(2 / (1 + schedule.memory * n_features / used), MOST_SHARE) * drift**0.5
    return max(share, used / (used + effective_rows))


def effective_after(effective_rows: float, share: float, used: int) -> float:
    """Effective number of rows of a running average after a batch with the given share."""
    return 1 / ((1 - share) ** 2 / effective_rows + share**2 / used)


@dataclass(frozen=True)
class Snapshot:
    """The last layer after a step."""

    statistics: Statistics
    """Running average, with the total weight of all rows."""
    frozen: FrozenLayer
    log_alpha: Float[Tensor, "*b"]
    effective_rows: float
    """Effective number of rows of the running average: one over the sum of their squared shares."""

    def tensors(self) -> dict[str, Tensor]:
        """Tensors to save."""
        tensors = {f"statistics.{name}": v for name, v in tensors_of(self.statistics).items()}
        tensors |= {f"frozen.{name}": v for name, v in tensors_of(self.frozen).items()}
        effective_rows = torch.tensor(self.effective_rows, dtype=torch.float64)
        return tensors | {"log_alpha": self.log_alpha, "effective_rows": effective_rows}

    @classmethod
    def of(cls, tensors: dict[str, Tensor], bias_prior: BiasPrior) -> "Snapshot":
        """Restore from saved tensors; other entries are ignored."""

        def under(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}

        frozen = FrozenLayer(**under("frozen."), bias_prior=bias_prior)
        moments: dict[str, Any] = under("statistics.")
        statistics = Statistics(**moments, n_outputs=frozen.weights.shape[-1])
        return cls(statistics, frozen, tensors["log_alpha"], float(tensors["effective_rows"]))


@dataclass
class RunningPosterior:
    """The last layer while networks are trained; leading dimensions index networks of a stack.

    Nothing here waits for the device.
    """

    count: Float[Tensor, "*b"]
    """Total weight of all rows, per network."""
    n_rows: int
    """Rows per pass, on all processes."""
    noise: NoiseStructure = "diagonal"
    """Structure of the noise."""
    bias_prior: BiasPrior = "flat"
    """Prior of the bias."""
    schedule: UpdateSchedule = SCHEDULE
    """How often the last layer is computed, and from how many rows."""
    process_group: ProcessGroup = ONE
    """The processes that share the rows."""
    steps: int = 0
    """Steps so far."""
    snapshot: Snapshot | None = None
    """None before the first step."""

    @property
    def now(self) -> Snapshot:
        """Present state; only after the first step."""
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
        """Add a batch to the statistics, and return its loss and gradient in the features.

        Parameters
        ----------
        phi_tilde, T, weight : Tensor of shape (r, k), (r, q), (r,)
            Linear features, targets and weights of the batch.
        total : int, optional
            Rows of the batch on all processes.
        drift : float, default 1
            Speed at which features change, relative to the beginning. The slower, the longer the memory: weights lag by
            drift / share and fluctuate by share, so the best share is proportional to the root of the drift.
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
        """Add the statistics of `used` rows of a batch, and return the resulting layer.

        Parameters
        ----------
        part, used : Statistics, int
            Statistics of the rows, and their number.
        drift : float, default 1
            As in `step`.
        """
        before = math.inf if self.snapshot is None else self.snapshot.effective_rows
        share = share_of(used, part.n_linear, before, drift, self.schedule)
        self.snapshot = self._after(part.weighing(self.count), share, used)
        self.steps += 1
        return self.snapshot.frozen

    def posterior(self) -> Posterior:
        """Posterior of the weights given the running average, for a single network."""
        now = self.now
        return Posterior(
            now.statistics, float(now.log_alpha), noise=self.noise, bias_prior=self.bias_prior, checked=False
        )

    def gap(self, statistics: Statistics) -> Float[Tensor, "*b"]:
        """Difference per sample between the present bound and the evidence of these statistics, at the same alpha.

        Parameters
        ----------
        statistics : Statistics
            Those of all rows.
        """
        exact = self._frozen(statistics, self.now.log_alpha, None, float(self.n_rows))
        return self.now.frozen.bound(statistics) - exact.bound(statistics)

    def _after(self, part: Statistics, share: float, used: int) -> Snapshot:
        """The last layer after adding the statistics of a batch with the given share."""
        if self.snapshot is None:
            log_alpha = torch.full_like(self.count, INITIAL_LOG_ALPHA)
            return Snapshot(part, self._frozen(part, log_alpha, None, float(used)), log_alpha, float(used))
        old, log_alpha = self.snapshot.frozen, self.snapshot.log_alpha
        both = self.snapshot.statistics.weighing((1 - share) * self.count) + part.weighing(share * self.count)
        effective_rows = effective_after(self.snapshot.effective_rows, share, used)
        # a network that failed and returned to an older state restarts with this batch alone
        statistics = _where(_finite(both.scatter), both, part)
        due = self.steps < self.schedule.settle or self.steps % self.schedule.every == 0
        new = self._frozen(statistics, log_alpha, None if due else old, effective_rows)
        # a factorisation that failed leaves the old layer in place
        frozen = _where(_sound(new), new, old)
        if due:
            log_alpha = frozen.next_log_alpha(log_alpha)
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
    """Fields that are tensors, by name."""
    return {f.name: v for f in fields(value) if isinstance(v := getattr(value, f.name), Tensor)}


def _sound(frozen: FrozenLayer) -> Bool[Tensor, "*b"]:
    """Mask of networks with a usable layer."""
    return _finite(frozen.weights) & _finite(frozen.noise_precision)


def _finite(matrix: Float[Tensor, "*b c d"]) -> Bool[Tensor, "*b"]:
    """Mask of networks with a finite matrix."""
    return torch.isfinite(matrix.sum((-2, -1)))


def _where(fine: Bool[Tensor, "*b"], new: Kept, old: Kept) -> Kept:
    """Network by network, the new value where `fine`, otherwise the old one."""
    was, chosen = tensors_of(old), tensors_of(new)
    for name, v in chosen.items():
        at = fine.reshape(*fine.shape, *[1] * (v.dim() - fine.dim())) if v.dim() else fine
        chosen[name] = v if v is was[name] else torch.where(at, v, was[name])
    return replace(new, **chosen)  # type: ignore[arg-type]
