"""Networks that each leave rows out: the rows calibrate them, the networks are the members of the mixture.

Network i does not see fold i of a random partition; its last layer is then fitted to every row. So nothing is trained
for calibration alone, except the networks that leave a whole block out: they tell how errors grow with distance.

`mix` has members of every strength of the prior, each strength with a curve of its own, so that at every point those
speak that know it best: weak priors inside the data, strong ones outside. `run` chooses one strength for all.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.calibration.curve import fit_curves
from lastlayer.calibration.points import HeldOutPoints
from lastlayer.calibration.splits import Split
from lastlayer.statistics import Statistics
from lastlayer.training import Data, LastLayer, last_layer
from lastlayer.types import BiasPrior, NoiseStructure

Features = Callable[[nn.Module, Tensor], Float[Tensor, "m p"]]

BLOCKED_WEIGHT = 0.3
"""What a point of a block counts in calibration, beside one held out at random: the points of a block err together."""


@dataclass(frozen=True)
class Job:
    """One network to be trained."""

    split: Split
    partition: int
    number: int
    """Within its partition."""
    strength: float = 0.0
    """Of the prior on its hidden weights; infinite: nothing but the inputs is left."""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.split.kind, self.partition, self.number

    def seed(self, base: int) -> int:
        """Of the initialisation: the same for every strength, another for every network of a mixture."""
        return base + 1000 * self.partition + self.number


@runtime_checkable
class Trainer(Protocol):
    """Trains networks, one a job."""

    def __call__(self, jobs: Sequence[Job], label: str) -> list[nn.Module]: ...


@dataclass(frozen=True)
class Trained:
    """A network with the last layer of the rows it was trained on."""

    job: Job
    network: nn.Module
    layer: LastLayer


@dataclass(frozen=True)
class Member:
    """One network of the mixture, and its last layer."""

    network: nn.Module
    layer: LastLayer
    strength: float = 0.0


@dataclass(frozen=True)
class Ensemble:
    """Members, and the networks whose held-out rows tell how far to believe them."""

    members: list[Member]
    folds: list[Trained]
    scores: dict[float, float]
    """Held-out LPD of each strength that was tried, if one was chosen."""


@dataclass(frozen=True)
class CrossFit:
    """How to get from a plan of splits to an ensemble."""

    data: Data
    train: Trainer
    features: Features
    noise: NoiseStructure
    bias_prior: BiasPrior

    def mix(self, splits: Sequence[Split], strengths: Sequence[float], *, n_each: int) -> Ensemble:
        """Networks of every strength as one batch, each of them leaving out one split.

        Members are those of random splits, or where there are none, `n_each` of every strength trained on every row.
        """
        jobs = [Job(split, 0, i, s) for s in strengths for i, split in enumerate(splits)]
        jobs += [Job(split, i, 0, s) for s in strengths for i, split in enumerate(self._every(splits, n_each))]
        to_train = sum(job.strength < math.inf for job in jobs)
        return self._ensemble(self._fit(jobs, f"{to_train} networks"), None, {})

    def run(
        self,
        partitions: Sequence[Sequence[Split]],
        *,
        n_members: int,
        strengths: Sequence[float],
        trials: Sequence[Split] = (),
    ) -> Ensemble:
        """Choose the strength on `trials`, train the rest, and put the members together.

        Members are the networks of random splits, or where there are none, networks trained on every row.
        """
        wanted = [Job(split, r, i) for r, splits in enumerate(partitions) for i, split in enumerate(splits)]
        every = self._every([split for splits in partitions for split in splits], n_members)
        wanted += [Job(split, i, 0) for i, split in enumerate(every)]
        strength = strengths[0]
        scores: dict[float, float] = {}
        chosen: dict[tuple[str, int, int], Trained] = {}
        if len(strengths) > 1:
            strength, scores, chosen = self._choose([Job(split, 0, i) for i, split in enumerate(trials)], strengths)
        rest = [replace(job, strength=strength) for job in wanted if job.key not in chosen]
        trained = chosen | {t.job.key: t for t in self._fit(rest, f"{len(rest)} networks")}
        return self._ensemble([trained[job.key] for job in wanted], n_members, scores)

    def _every(self, splits: Sequence[Split], n: int) -> list[Split]:
        """n times every row, unless networks of random splits can be members."""
        crossed = any(split.kind == "random" for split in splits)
        return [] if crossed else [Split.everything(len(self.data.X))] * n

    def _ensemble(self, trained: Sequence[Trained], n_members: int | None, scores: dict[float, float]) -> Ensemble:
        kinds = {t.job.split.kind for t in trained}
        members = [t for t in trained if t.job.split.kind == ("random" if "random" in kinds else "all")]
        held = [t for t in trained if len(t.job.split.held)]
        return Ensemble([self._member(t) for t in members[:n_members]], held, scores)

    def held_out(self, trained: Sequence[Trained]) -> HeldOutPoints:
        """What each network says of the rows it left out; networks of several partitions meet at the same rows."""
        groups: dict[str, dict[tuple[float, int], list[Trained]]] = {}
        for t in trained:
            groups.setdefault(t.job.split.kind, {}).setdefault((t.job.strength, t.job.partition), []).append(t)
        return HeldOutPoints.joined([_stack([self._points(p) for p in kind.values()]) for kind in groups.values()])

    def _choose(
        self, trial: Sequence[Job], strengths: Sequence[float]
    ) -> tuple[float, dict[float, float], dict[tuple[str, int, int], Trained]]:
        """The strength of largest held-out LPD, each with a curve of its own, and its networks."""
        jobs = [replace(job, strength=s) for s in strengths for job in trial]
        trained = self._fit(jobs, f"{len(jobs)} networks, prior")
        groups = {s: [t for t in trained if t.job.strength == s] for s in strengths}
        scores = {s: fit_curves(self.held_out(group), mixture=False).lpd for s, group in groups.items()}
        best = max(scores, key=lambda s: -math.inf if math.isnan(scores[s]) else scores[s])
        return best, scores, {t.job.key: t for t in groups[best]}

    def _fit(self, jobs: Sequence[Job], label: str) -> list[Trained]:
        networks = self.train(jobs, label) if jobs else []
        return [
            Trained(job, network, self._layer(network, job.split.train))
            for job, network in zip(jobs, networks, strict=True)
        ]

    def _layer(self, network: nn.Module, rows: np.ndarray) -> LastLayer:
        return last_layer(self._statistics(network, rows), noise=self.noise, bias_prior=self.bias_prior)

    def _statistics(self, network: nn.Module, rows: np.ndarray) -> Statistics:
        data = self.data.rows(torch.from_numpy(rows).to(self.data.X.device))
        return Statistics.from_batches(
            (self.features(network, part.X), part.T, *([] if part.weight is None else [part.weight]))
            for part in data.chunks()
        )

    def _member(self, t: Trained) -> Member:
        """Every row in the last layer; alpha and noise as they were found, since the curve was calibrated on them."""
        if not len(t.job.split.held):
            return Member(t.network, t.layer, t.job.strength)
        more = t.layer.posterior.update(self._statistics(t.network, t.job.split.held))
        return Member(t.network, replace(t.layer, posterior=more), t.job.strength)

    def _points(self, partition: Sequence[Trained]) -> tuple[np.ndarray, HeldOutPoints]:
        """The held-out points of one partition, in the order of their rows."""
        parts, rows = [], []
        for t in partition:
            held = self.data.rows(torch.from_numpy(t.job.split.held).to(self.data.X.device))
            Phi = self.features(t.network, held.X)
            parts.append(predict_held_out(t.layer, Phi, held, t.job.split.kind, t.job.strength))
            rows.append(t.job.split.held)
        joined, row = HeldOutPoints.joined(parts), np.concatenate(rows)
        order = np.argsort(row, kind="stable")
        return row[order], joined[order]


def predict_held_out(
    layer: LastLayer, Phi: Float[Tensor, "n p"], data: Data, kind: str, strength: float
) -> HeldOutPoints:
    """What one network says of points it has not seen."""
    with torch.no_grad():
        marginals = layer.posterior.predict(Phi)
    mean = marginals.mean
    noise = marginals.noise_cov.diagonal().expand(mean.shape)
    weight = torch.ones_like(mean[:, 0]) if data.weight is None else data.weight
    weight = weight * (BLOCKED_WEIGHT if kind == "blocked" else 1.0)
    return HeldOutPoints(
        mean=mean[None],
        ratio=marginals.variance_ratio[None],
        noise_var=noise[None],
        inputs=data.X,
        targets=data.T.to(mean),
        weight=weight,
        kind=np.full(len(mean), kind),
        strength=np.array([strength]),
    )


def _stack(partitions: "list[tuple[np.ndarray, HeldOutPoints]]") -> HeldOutPoints:
    """The same points by the networks of every partition."""
    assert all(np.array_equal(partitions[0][0], rows) for rows, _ in partitions)
    return HeldOutPoints.stacked([points for _, points in partitions])
