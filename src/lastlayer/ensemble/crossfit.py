"""Cross-fitting: networks are calibrated on the rows they did not see, and become the members of the mixture."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Int, Int64
from numpy import ndarray

from lastlayer.bayes.evidence import by_evidence
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.held_out import HeldOut
from lastlayer.bayes.noise_groups import StatisticsByNoise
from lastlayer.bayes.posterior import leave_one_out_cost
from lastlayer.bayes.statistics import Statistics
from lastlayer.calibration.points import REGIONS, HeldOutPoints
from lastlayer.data.observe import FeatureMap
from lastlayer.data.rows import Rows
from lastlayer.ensemble.run import Run
from lastlayer.ensemble.splits import Split
from lastlayer.ensemble.train import Task, Trainer
from lastlayer.networks.architecture import Architecture
from lastlayer.networks.mlp import copied, features_of, finite_features
from lastlayer.predictor.member import Member, Unseen
from lastlayer.settings.resolve import LARGE_TABLE
from lastlayer.settings.types import STRUCTURES, BiasPrior, Family
from lastlayer.training.objectives import INITIAL_LOG_ALPHA
from lastlayer.training.sites import sites_at, stand_in

ROWS_PER_FEATURE = 10
"""With this many rows per feature that the data determine, a last layer may learn the rows it was evaluated on."""
PROCESS_ROWS = 2_000
"""Rows that the last layer of a process is fitted to in a large table: it is there for what lies outside them."""
WORK_PER_ROW = 4_000
"""Approximate number of multiplications for the statistics of one row of one network: features squared."""


@dataclass(frozen=True)
class Fit:
    """A network with the last layer fitted to its training rows."""

    task: Task
    member: Member


@dataclass(frozen=True)
class CrossFit:
    """Networks with their last layers, each fitted to all rows but those of its split."""

    rows: Rows
    n_members: int
    """Largest number of members of a family."""
    folds: list[Fit]
    """The networks that held out rows, which calibrate the model."""
    whole: list[Fit]
    """The networks of all rows."""

    def members(self) -> list[Member]:
        """Networks of random splits, or those fitted to all rows, as far as wanted of each family."""
        crossed = [fit for fit in self.folds if fit.task.split.kind == "random" and not fit.task.family.once]
        partly = any(len(learned_by(fit.task)) < len(fit.task.split.train) for fit in self.whole)
        keys = self.rows.main.keys() if crossed or partly else None
        members, made = list[Member](), Counter[Family]()
        for fit in crossed + self.whole:
            made[fit.task.family] += 1
            if made[fit.task.family] <= self.n_members:
                members.append(self._member(fit, keys))
        return members

    def held_out(self) -> HeldOutPoints:
        """Predictions of each network for its held-out rows; those of one kind of split share the rows."""
        kinds: dict[str, dict[Family, list[Fit]]] = {}
        for fit in self.folds:
            kinds.setdefault(fit.task.split.kind, {}).setdefault(fit.task.family, []).append(fit)
        points = [HeldOutPoints.stacked([self._points(fits) for fits in kind.values()]) for kind in kinds.values()]
        return HeldOutPoints.joined(points).beside_references(None if "random" in kinds else self._inside())

    def alpha_folds(self) -> list[HeldOut]:
        """The held-out rows, for Algorithm 1."""
        held = [self.rows.main.take(fit.task.split.held) for fit in self.folds]
        return [
            HeldOut(fit.member.posterior, fit.member.features(rows.X), rows.readings.values)
            for fit, rows in zip(self.folds, held, strict=True)
        ]

    def _points(self, fits: Sequence[Fit]) -> HeldOutPoints:
        """The held-out points of one family, in the order of their rows."""
        parts = []
        for fit in fits:
            split, rows = fit.task.split, self.rows.main.take(fit.task.split.held)
            with torch.no_grad():  # not checked: networks that fail at held-out rows show it in their scores
                Phi = affine_features(features_of(fit.member.network, rows.X)).double()
            parts.append(HeldOutPoints.by(fit.member.posterior, Phi, rows, split.kind, fit.task.family))
        order = np.argsort(np.concatenate([fit.task.split.held for fit in fits]), kind="stable")
        return HeldOutPoints.joined(parts)[order]

    def _inside(self) -> dict[Family, float]:
        """Largest leave-one-out costs of training rows, by the process and the additive model with most rows."""
        most, inside = dict[Family, Fit](), dict[Family, float]()
        for fit in self.folds:
            family, n = fit.task.family, len(fit.task.split.train)
            if family.measures and (family not in most or n > len(most[family].task.split.train)):
                most[family] = fit
        for family, fit in most.items():
            rows = self.rows.main.take(learned_by(fit.task))
            weight = torch.ones_like(rows.readings.t[:, 0]) if rows.weight is None else rows.weight
            cost = fit.member.posterior.variance_ratio(fit.member.features(rows.X))
            cost = cost if cost.dim() == 1 else cost.mean(-1)
            inside[family] = float((leave_one_out_cost(weight * cost) / weight).max())
        return inside

    def _member(self, fit: Fit, keys: Int64[ndarray, " m"] | None) -> Member:
        """The member of a fit, which learns its held-out rows only if they change it little."""
        split, posterior, main, unseen = fit.task.split, fit.member.posterior, self.rows.main, fit.task.split.held
        sampled = len(learned := learned_by(fit.task)) < len(split.train)
        if sampled:
            unseen = np.setdiff1d(np.arange(len(main.X)), learned)
        if keys is None or not len(unseen):
            return fit.member
        if sampled or ROWS_PER_FEATURE * posterior.determined > split.n_groups:
            weight = np.ones(len(keys)) if main.weight is None else main.weight.numpy(force=True)
            return replace(fit.member, unseen=Unseen(keys[unseen], weight[unseen]))
        noise_var, held, likelihood = posterior.Sigma_E.diagonal(), main.take(split.held), self.rows.likelihood
        held = sites_at(likelihood, held, posterior, fit.member.features(held.X)) if likelihood.iterated else held
        more = held.statistics(partial(finite_features, fit.member.network), noise_var)
        return replace(fit.member, posterior=posterior.update(more))


def learned_by(task: Task) -> Int[ndarray, " r"]:
    """Training rows that the last layer of a task is fitted to."""
    train = task.split.train
    if not task.family.once or len(train) <= LARGE_TABLE:
        return train
    return np.sort(np.random.default_rng(task.seed).permutation(train)[:PROCESS_ROWS])


def cross_fit(rows: Rows, splits: Sequence[Split], architecture: Architecture, run: Run) -> CrossFit:
    """Fit networks of every family, each with one split held out, and those that train on all rows."""
    settings, m = architecture.settings, len(rows.main.X)
    families, n_members, seed = settings.ensemble.families, settings.ensemble.n_members, settings.seed
    strongest = {f.encoding: f for f in sorted(families, key=lambda f: f.prior_precision) if f.trained}
    stands_in = lambda split, family: strongest[family.encoding] if split.kind in REGIONS and family.trained else family
    wanted = [Task(split, family, seed + i) for family in families for i, split in enumerate(splits)]
    tasks = [task for task in wanted if stands_in(task.split, task.family) == task.family]
    # networks of random splits are members themselves
    n = 0 if any(split.kind == "random" for split in splits) else n_members
    for family in sorted(families, key=lambda family: family.once):
        again = [1000 * i for i in range(n)] if not family.once else [0]
        tasks += [Task(Split(np.arange(m), np.empty(0, int), "all", m), family, seed + more) for more in again]
    with architecture.seeded():
        networks = [copied(network) for network in Trainer(architecture, rows, run).networks(tasks)]
    with run.stage("last layers", WORK_PER_ROW * m):
        of = [partial(finite_features, network) for network in networks]
        parts = ((rows.main.take(learned_by(task)), linear) for task, linear in zip(tasks, of, strict=True))
        by_noise = lambda at, linear: Rows(at, rows.beside).by_noise(linear)
        sums: Iterable[Statistics | StatisticsByNoise]
        sums = (at.statistics(linear) if rows.learned else by_noise(at, linear) for at, linear in parts)
        layer = settings.layer
        if rows.likelihood.iterated:
            sums = _settled(rows, tasks, of, layer.bias_prior)
        posteriors = by_evidence(
            sums, noise=STRUCTURES[layer.noise], bias_prior=layer.bias_prior, noise_prior=layer.noise_prior
        )
    made = zip(tasks, networks, posteriors, strict=True)
    found = {(id(task.split), task.family, task.seed): (network, posterior) for task, network, posterior in made}
    order = wanted + [task for task in tasks if task.split.kind == "all"]
    own = [found[id(t.split), stands_in(t.split, t.family), t.seed] for t in order]
    fits = [Fit(task, Member(*parts, task.family)) for task, parts in zip(order, own, strict=True)]
    return CrossFit(rows, n_members, fits[: len(wanted)], fits[len(wanted) :])


def _settled(
    rows: Rows, tasks: Sequence[Task], of: Sequence[FeatureMap], bias_prior: BiasPrior
) -> Iterator[Statistics]:
    """Statistics of each task with the sites of its own last layer, found from those of the task before."""
    main = replace(rows.main, readings=rows.main.readings.map(torch.clone))
    scale = main.readings.scale
    assert scale is not None
    for task, linear in zip(tasks, of, strict=True):
        learned = torch.from_numpy(learned_by(task)).to(scale.device)
        at = main.take(learned)
        with torch.no_grad():
            phi = linear(at.X).double()
        at = stand_in(rows.likelihood, at, phi, INITIAL_LOG_ALPHA, bias_prior=bias_prior)
        assert at.readings.scale is not None
        scale[learned] = at.readings.scale
        yield Statistics.of(phi, at.readings, weight=at.weight)
