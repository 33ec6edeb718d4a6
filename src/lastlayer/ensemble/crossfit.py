"""Cross-fitting: networks are calibrated on the rows they did not see, and become the members of the mixture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import nn

from lastlayer.bayes.affine_cost import leave_one_out_cost
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.held_out import HeldOut
from lastlayer.bayes.maximum import by_evidence
from lastlayer.bayes.noise_groups import StatisticsByNoise
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Statistics
from lastlayer.calibration.fit import fit_curves
from lastlayer.calibration.points import HeldOutPoints
from lastlayer.data.rows import Points, Rows
from lastlayer.ensemble.splits import Folds, Split
from lastlayer.ensemble.trainer import FitTask, Trainer
from lastlayer.networks.mlp import features_of, finite_features
from lastlayer.predictor.fitted import member_features
from lastlayer.predictor.state import Member
from lastlayer.predictor.unseen import Unseen
from lastlayer.settings.types import ADDITIVE, FOURIER, Family

ROWS_PER_FEATURE = 10
"""With this many rows per feature that the data determine, a last layer may learn the rows it was evaluated on."""


@dataclass(frozen=True)
class FoldFit:
    """A network with the last layer fitted to its training rows."""

    task: FitTask
    network: nn.Module
    posterior: Posterior

    @property
    def member(self) -> Member:
        """The network and its last layer as a member."""
        return Member(self.network, self.posterior, self.task.family)


@dataclass(frozen=True)
class Ensemble:
    """Members, and the networks whose held-out rows calibrate them."""

    members: list[Member]
    folds: list[FoldFit]
    scores: dict[Family, float] = field(default_factory=dict)
    """Held-out LPD of each family that was tried, if one was selected."""


@dataclass(frozen=True)
class CrossFit:
    """Trains an ensemble on folds."""

    trainer: Trainer

    def run(self, folds: Folds) -> Ensemble:
        """Train members of every family, or of the best one, as the settings prescribe."""
        mixture = self.trainer.settings.ensemble == "mixture"
        return self.mixture(folds.partitions[0]) if mixture else self.selected_prior(folds)

    def mixture(self, splits: Sequence[Split]) -> Ensemble:
        """Train networks of every family as one batch, each of them with one split held out."""
        settings = self.trainer.settings
        every = self._every(splits, settings.n_members)
        tasks = [FitTask(split, 0, i, family) for family in settings.families for i, split in enumerate(splits)]
        others = [family for family in settings.families if family != FOURIER]
        tasks += [FitTask(split, i, 0, family) for family in others for i, split in enumerate(every)]
        if FOURIER in settings.families:
            tasks.append(FitTask(Split.everything(len(self.trainer.rows.main.X)), 0, 0, FOURIER))
        to_train = sum(task.family.kind == "network" for task in tasks)
        return self._ensemble(self._fit(tasks, f"training {to_train} networks"), None, {})

    def selected_prior(self, folds: Folds) -> Ensemble:
        """Select the prior precision on trial splits, train the remaining networks, and assemble the members."""
        settings = self.trainer.settings
        wanted = [FitTask(split, r, i) for r, splits in enumerate(folds.partitions) for i, split in enumerate(splits)]
        every = self._every([split for splits in folds.partitions for split in splits], settings.n_members)
        wanted += [FitTask(split, i, 0) for i, split in enumerate(every)]
        family = settings.families[0]
        scores: dict[Family, float] = {}
        done: dict[tuple[str, int, int], FoldFit] = {}
        if len(settings.families) > 1:
            family, scores, done = self._select([FitTask(split, 0, i) for i, split in enumerate(folds.trials)])
        rest = [replace(task, family=family) for task in wanted if task.key not in done]
        trained = done | {fit.task.key: fit for fit in self._fit(rest, f"training {len(rest)} networks")}
        return self._ensemble([trained[task.key] for task in wanted], settings.n_members, scores)

    def held_out(self, fits: Sequence[FoldFit]) -> HeldOutPoints:
        """Predictions of each network for its held-out rows; networks of several partitions share the same rows."""
        kinds: dict[str, dict[tuple[Family, int], list[FoldFit]]] = {}
        for fit in fits:
            partitions = kinds.setdefault(fit.task.split.kind, {})
            partitions.setdefault((fit.task.family, fit.task.partition), []).append(fit)
        points = [HeldOutPoints.stacked([self._points(fits) for fits in kind.values()]) for kind in kinds.values()]
        return HeldOutPoints.joined(points).beside_references(None if "random" in kinds else self._inside(fits))

    def alpha_folds(self, fits: Sequence[FoldFit]) -> list[HeldOut]:
        """The held-out rows, for Algorithm 1."""
        held = [self._rows(fit.task.split.held) for fit in fits]
        return [
            HeldOut(fit.posterior, member_features(fit.member, rows.X), rows.T)
            for fit, rows in zip(fits, held, strict=True)
        ]

    def _inside(self, fits: Sequence[FoldFit]) -> dict[Family, float]:
        """Largest leave-one-out costs of training rows, by the process and the additive model with most rows."""
        groups = {family: [fit for fit in fits if fit.task.family == family] for family in (FOURIER, ADDITIVE)}
        return {family: self._largest_cost(own) for family, own in groups.items() if own}

    def _largest_cost(self, fits: Sequence[FoldFit]) -> float:
        fit = max(fits, key=lambda fit: len(fit.task.split.train))
        rows = self._rows(fit.task.split.train)
        weight = torch.ones_like(rows.T[:, 0]) if rows.weight is None else rows.weight
        cost = fit.posterior.variance_ratio(member_features(fit.member, rows.X))
        cost = cost if cost.dim() == 1 else cost.mean(-1)
        return float((leave_one_out_cost(weight * cost) / weight).max())

    def _every(self, splits: Sequence[Split], n: int) -> list[Split]:
        """n splits that train on all rows, unless networks of random splits can be members."""
        crossed = any(split.kind == "random" for split in splits)
        return [] if crossed else [Split.everything(len(self.trainer.rows.main.X))] * n

    def _ensemble(self, fits: Sequence[FoldFit], n_members: int | None, scores: dict[Family, float]) -> Ensemble:
        whole = [fit for fit in fits if fit.task.split.kind == "all"]
        # the process fitted to all rows, if there is one, replaces those of random splits
        crossed = [f for f in fits if f.task.split.kind == "random" and not (whole and f.task.family == FOURIER)]
        members = crossed + whole
        held = [fit for fit in fits if len(fit.task.split.held)]
        return Ensemble([self._member(fit) for fit in members[:n_members]], held, scores)

    def _select(
        self, trials: Sequence[FitTask]
    ) -> tuple[Family, dict[Family, float], dict[tuple[str, int, int], FoldFit]]:
        """Prior precision of largest held-out LPD, each with its own curve; all scores; the networks of the best."""
        families = self.trainer.settings.families
        tasks = [replace(task, family=family) for family in families for task in trials]
        fits = self._fit(tasks, f"training {len(tasks)} networks, prior")
        groups = {family: [fit for fit in fits if fit.task.family == family] for family in families}
        scores = {s: fit_curves(self.held_out(group), mixture=False).lpd for s, group in groups.items()}
        best = max(scores, key=lambda s: -math.inf if math.isnan(scores[s]) else scores[s])
        return best, scores, {fit.task.key: fit for fit in groups[best]}

    def _fit(self, tasks: Sequence[FitTask], label: str) -> list[FoldFit]:
        settings = self.trainer.settings
        networks = self.trainer.networks(tasks, label) if tasks else []
        with self.trainer.stage("last layers"):
            sums = (self._sums(network, task.split.train) for task, network in zip(tasks, networks, strict=True))
            posteriors = by_evidence(
                sums, noise=settings.noise_structure, bias_prior=settings.bias_prior, noise_prior=settings.noise_prior
            )
        return [FoldFit(*fit) for fit in zip(tasks, networks, posteriors, strict=True)]

    def _sums(self, network: nn.Module, rows: np.ndarray) -> Statistics | StatisticsByNoise:
        if not self.trainer.rows.learned:
            return self._with_beside(rows).by_noise(partial(finite_features, network))
        return self._statistics(network, rows)

    def _member(self, fit: FoldFit) -> Member:
        """The member of a fit, which learns its held-out rows only if they change it little."""
        held, posterior = fit.task.split.held, fit.posterior
        if not len(held):
            return fit.member
        if ROWS_PER_FEATURE * posterior.determined > fit.task.split.n_groups:
            return replace(fit.member, unseen=Unseen.of(self._rows(held)))
        more = posterior.update(self._statistics(fit.network, held, posterior.Sigma_E.diagonal()))
        return replace(fit.member, posterior=more)

    def _points(self, partition: Sequence[FoldFit]) -> HeldOutPoints:
        """The held-out points of one partition, in the order of their rows."""
        parts = []
        for fit in partition:
            rows, split = self._rows(fit.task.split.held), fit.task.split
            with torch.no_grad():  # not checked: networks that fail at held-out rows show it in their scores
                Phi = affine_features(features_of(fit.network, rows.X)).double()
            parts.append(HeldOutPoints.by(fit.posterior, Phi, rows, split.kind, fit.task.family))
        order = np.argsort(np.concatenate([fit.task.split.held for fit in partition]), kind="stable")
        return HeldOutPoints.joined(parts)[order]

    def _with_beside(self, rows: np.ndarray) -> Rows:
        return self.trainer.rows.take(torch.from_numpy(rows))

    def _rows(self, rows: np.ndarray) -> Points:
        return self._with_beside(rows).main

    @torch.no_grad()
    def _statistics(self, network: nn.Module, rows: np.ndarray, learned: torch.Tensor | None = None) -> Statistics:
        """Statistics of rows, without observed functionals."""
        return self._rows(rows).statistics(partial(finite_features, network), learned)
