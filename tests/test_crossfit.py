"""Networks that leave rows out: they never see them, what they say of them is aligned, and members know every row."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import close
from sklearn.model_selection import KFold
from torch import nn

from lastlayer.calibration import CrossFit, Job, Split, blocked_splits, fit_curves, predict_held_out, random_splits
from lastlayer.features import MLP, affine_features
from lastlayer.fitting import Architecture, Trainer
from lastlayer.plans import STRENGTHS, Mixed, make_plan
from lastlayer.posterior import Posterior
from lastlayer.statistics import Statistics
from lastlayer.training import Data, Optimiser, last_layer

M = 40


@pytest.fixture
def data(generator) -> Data:
    X = torch.rand(M, 1, generator=generator, dtype=torch.float64) * 4 - 2
    T = torch.cat([torch.sin(2 * X), X**2], 1) + 0.2 * torch.randn(M, 2, generator=generator, dtype=torch.float64)
    return Data(X, T, torch.rand(M, generator=generator, dtype=torch.float64) + 0.5)


def features(network: nn.Module, X: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return affine_features(network(X)).double()


class Recorded:
    """A trainer that remembers what it was asked for."""

    def __init__(self, data: Data, *, epochs: int = 15, noise: str = "diagonal", seed: int = 7, **options):
        self.jobs: list[list[Job]] = []
        self.labels: list[str] = []
        self.trainer = Trainer(
            Architecture((4,), "tanh", "auto", None),
            data,
            **{
                "objective": "profiled",
                "noise": noise,
                "bias_prior": "flat",
                "optimiser": Optimiser("adam", learning_rate=2e-2, max_epochs=epochs),
                "stop_early": False,
                "validation_fraction": 0.15,
                "patience": 100,
                "dtype": torch.float64,
                "seed": seed,
                "progress": False,
            }
            | options,
        )

    def __call__(self, jobs: Sequence[Job], label: str) -> list[nn.Module]:
        self.jobs.append(list(jobs))
        self.labels.append(label)
        return self.trainer(jobs, label)


def crossfit(data: Data, **options) -> CrossFit:
    noise = options.get("noise", "diagonal")
    return CrossFit(data, Recorded(data, **options), features, noise, "flat")


def partitions(k: int = 4, n: int = 2) -> list[list[Split]]:
    rng = np.random.default_rng(0)
    return [random_splits(M, k, rng) for _ in range(n)]


def weights(network: nn.Module) -> list[torch.Tensor]:
    return [p.detach() for p in network.parameters()]


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


# what a network sees ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False])
def test_a_network_never_sees_the_rows_it_leaves_out(data, together):
    """Poison in the held-out rows reaches every network but the one that left them out."""
    splits = partitions(4, 1)
    held = torch.from_numpy(splits[0][1].held)
    X, T = data.X.clone(), data.T.clone()
    T[held] += 100.0
    X[held] = -X[held]
    options = {} if together else {"stop_early": True}  # the general loop, early stopping on rows of its own
    plain, poisoned = (
        crossfit(d, **options).run(splits, n_members=4, strengths=[0.3]) for d in (data, Data(X, T, data.weight))
    )
    for i, (a, b) in enumerate(zip(plain.folds, poisoned.folds, strict=True)):
        assert equal(a.network, b.network) == (i == 1)
    assert equal(plain.members[1].network, poisoned.members[1].network)
    a, b = plain.folds[1].layer, poisoned.folds[1].layer
    assert a.posterior.log_alpha == b.posterior.log_alpha
    assert torch.equal(a.posterior.Sigma_E, b.posterior.Sigma_E)
    # the member's last layer does know those rows
    Phi = features(plain.members[1].network, data.X)
    assert not torch.allclose(plain.members[1].layer.posterior.mean(Phi), poisoned.members[1].layer.posterior.mean(Phi))


def test_as_one_batch_or_one_by_one_the_networks_are_the_same(data):
    splits = [*partitions(4, 1)[0], *blocked_splits(data.X.numpy(), 3)]
    batch = crossfit(data).run([splits], n_members=4, strengths=[0.3])
    alone = [crossfit(data).train([replace(t.job)], "one")[0] for t in batch.folds]
    for t, network in zip(batch.folds, alone, strict=True):
        for a, b in zip(weights(t.network), weights(network), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_on_several_cores_the_networks_are_the_same(data, monkeypatch):
    splits = partitions(4, 2)
    monkeypatch.setattr("lastlayer.fitting.ROWS_PER_CORE", 1)
    one = crossfit(data).run(splits, n_members=8, strengths=[0.3])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        three = crossfit(data).run(splits, n_members=8, strengths=[0.3])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    for a, b in zip(one.members, three.members, strict=True):
        for x, y in zip(weights(a.network), weights(b.network), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


# held-out points ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_held_out_points_of_several_partitions_meet_row_by_row(data, noise):
    blocked = blocked_splits(data.X.numpy(), 2)
    plan = [[*splits, *blocked] for splits in partitions(3, 2)]
    fit = crossfit(data, noise=noise)
    ensemble = fit.run(plan, n_members=6, strengths=[0.3])
    points = fit.held_out(ensemble.folds)
    assert points.mean.shape == (2, 2 * M, 2)
    assert points.kind.tolist() == ["random"] * M + ["blocked"] * M
    for offset in (0, M):
        assert torch.equal(points.targets[offset : offset + M], data.T)
        assert torch.equal(points.inputs[offset : offset + M], data.X)
        counts = 0.3 if offset else 1.0  # points of a block err together
        assert torch.equal(points.weight[offset : offset + M], counts * data.weight)
    seen = np.zeros((2, 2 * M), dtype=int)
    for t in ensemble.folds:
        train, held = torch.from_numpy(t.job.split.train), torch.from_numpy(t.job.split.held)
        moments = Statistics.from_features(
            features(t.network, data.X[train]), data.T[train], sample_weight=data.weight[train]
        )
        by_hand = last_layer(moments, noise=noise).posterior.predict(features(t.network, data.X[held]))
        at = t.job.partition, held + (M if t.job.split.kind == "blocked" else 0)
        close(points.mean[at], by_hand.mean)
        close(points.ratio[at], by_hand.variance_ratio)
        close(points.noise_var[at], by_hand.noise_cov.diagonal().expand(len(held), 2))
        seen[at] += 1
    assert (seen == 1).all()


def test_rows_that_a_splitter_never_holds_out_are_no_points(data):
    """As with TimeSeriesSplit: the first rows are always in the past."""
    splits = [Split(np.arange(10), np.arange(10, 20), "given"), Split(np.arange(20), np.arange(20, 40), "given")]
    fit = crossfit(data)
    ensemble = fit.run([splits, splits], n_members=3, strengths=[0.3])
    points = fit.held_out(ensemble.folds)
    assert torch.equal(points.targets, data.T[10:])
    assert points.mean.shape == (2, 30, 2)
    assert not torch.equal(points.mean[0], points.mean[1])  # two partitions, two initialisations


def test_what_a_network_says_of_new_points_is_its_posterior(data):
    network = MLP(1, (4,), generator=torch.Generator().manual_seed(0))
    layer = last_layer(Statistics.from_features(features(network, data.X), data.T))
    new = Data(torch.randn(5, 1, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64))
    points = predict_held_out(layer, features(network, new.X), new, "validation", 0.3)
    expected = layer.posterior.predict(features(network, new.X))
    close(points.mean[0], expected.mean)
    close(points.ratio[0], expected.variance_ratio)
    close(points.noise_var[0], expected.noise_cov.diagonal().expand(5, 2))
    assert bool((points.weight == 1).all())
    assert set(points.kind) == {"validation"}
    assert points.strength.tolist() == [0.3]


# members ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_a_members_last_layer_knows_every_row_at_the_alpha_and_noise_of_its_fold(data, noise):
    fit = crossfit(data, noise=noise)
    ensemble = fit.run(partitions(4, 2), n_members=6, strengths=[0.3])
    assert len(ensemble.members) == 6
    assert len(ensemble.folds) == 8
    for member, t in zip(ensemble.members, ensemble.folds, strict=False):
        assert member.network is t.network
        Phi = features(t.network, data.X)
        every = Statistics.from_features(Phi, data.T, sample_weight=data.weight)
        by_hand = Posterior(every, t.layer.posterior.log_alpha, t.layer.posterior.Sigma_E, noise, rtol=math.inf)
        posterior = member.layer.posterior
        assert posterior.log_alpha == t.layer.posterior.log_alpha
        assert torch.equal(posterior.Sigma_E, t.layer.posterior.Sigma_E)
        close(posterior.weights, by_hand.weights, loose=100)  # sums of moments in another order
        close(posterior.variance_ratio(Phi), by_hand.variance_ratio(Phi), loose=100)


def test_without_random_splits_members_are_trained_on_every_row(data):
    blocked = blocked_splits(data.X.numpy(), 3)
    ensemble = crossfit(data).run([blocked], n_members=2, strengths=[0.3])
    assert len(ensemble.members) == 2
    assert [t.job.split.kind for t in ensemble.folds] == ["blocked"] * 3
    for i, member in enumerate(ensemble.members):
        Phi = features(member.network, data.X)
        expected = last_layer(Statistics.from_features(Phi, data.T, sample_weight=data.weight))
        assert member.layer.posterior.log_alpha == pytest.approx(expected.posterior.log_alpha)
        close(member.layer.posterior.weights, expected.posterior.weights)
        (again,) = crossfit(data).train([Job(Split.everything(M), i, 0, 0.3)], "one")
        for a, b in zip(weights(member.network), weights(again), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert not equal(ensemble.members[0].network, ensemble.members[1].network)


# the strength of the hidden prior -----------------------------------------------------------------------------------


def test_every_strength_starts_from_the_same_networks(data):
    fit = crossfit(data, epochs=0)
    trials = partitions(4, 1)[0]
    fit.run([trials], n_members=4, strengths=[0.03, 3.0], trials=trials)
    (asked,) = fit.train.jobs
    assert [job.strength for job in asked] == [0.03] * 4 + [3.0] * 4
    networks = fit.train.trainer(asked, "again")
    for i in range(4):
        assert equal(networks[i], networks[4 + i])
        start = MLP(1, (4,), generator=torch.Generator().manual_seed(asked[i].seed(7)))
        assert equal(networks[i], start)
        assert not equal(networks[i], networks[(i + 1) % 4])


def test_the_strength_of_the_largest_held_out_lpd_is_chosen_and_its_networks_are_kept(data):
    strengths, (trials, more) = [0.03, 300.0], partitions(3, 2)
    fit = crossfit(data, epochs=40)
    ensemble = fit.run([trials, more], n_members=6, strengths=strengths, trials=trials)
    assert list(ensemble.scores) == strengths
    for strength in strengths:
        alone = crossfit(data, epochs=40)
        folds = alone.run([trials], n_members=3, strengths=[strength]).folds
        lpd = fit_curves(alone.held_out(folds), mixture=False).lpd
        assert ensemble.scores[strength] == pytest.approx(lpd, abs=1e-6)
        if strength == ensemble.members[0].strength:
            for a, b in zip(folds, ensemble.folds, strict=False):
                for x, y in zip(weights(a.network), weights(b.network), strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    assert ensemble.members[0].strength == max(strengths, key=lambda s: ensemble.scores[s])
    assert [len(jobs) for jobs in fit.train.jobs] == [6, 3]  # those of the choice are not trained again
    assert {job.strength for job in fit.train.jobs[1]} == {ensemble.members[0].strength}


def test_a_strength_whose_networks_fail_is_not_chosen(data):
    class Fails(nn.Module):
        """Breaks down at rows that it was not trained on."""

        def __init__(self, network, rows):
            super().__init__()
            self.network, self.known = network, data.X[rows]

        def forward(self, x):
            return torch.where(torch.isin(x, self.known), self.network(x), torch.nan)

    class Trains(Recorded):
        def __call__(self, jobs, label):
            networks = super().__call__(jobs, label)
            return [
                Fails(network, job.split.train) if job.strength == 3.0 else network
                for job, network in zip(jobs, networks, strict=True)
            ]

    trials = partitions(4, 1)[0]
    fit = CrossFit(data, Trains(data), features, "diagonal", "flat")
    ensemble = fit.run([trials], n_members=4, strengths=[3.0, 0.3], trials=trials)
    assert ensemble.members[0].strength == 0.3
    assert math.isnan(ensemble.scores[3.0])
    assert math.isfinite(ensemble.scores[0.3])


@pytest.mark.parametrize("crossed", [True, False])
def test_a_mixture_has_members_of_every_strength_trained_as_one_batch(data, crossed):
    strengths, random = [0.3, 30.0, math.inf], partitions(3, 1)[0] if crossed else []
    splits = [*random, *blocked_splits(data.X.numpy(), 2)]
    fit = crossfit(data)
    ensemble = fit.mix(splits, strengths, n_each=2)
    each = 3 if crossed else 2
    assert [member.strength for member in ensemble.members] == [s for s in strengths for _ in range(each)]
    assert len(fit.train.jobs) == 1
    for i, strength in enumerate(strengths[:2]):
        alone = crossfit(data).run([splits], n_members=each, strengths=[strength])
        for a, b in zip(alone.members, ensemble.members[i * each :], strict=False):
            for x, y in zip(weights(a.network), weights(b.network), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)
    # an infinite prior leaves a linear regression on the inputs
    last = ensemble.members[-1]
    Phi = torch.cat([data.X, torch.ones(M, 1, dtype=torch.float64)], 1)
    close(features(last.network, data.X), Phi)
    ridge = torch.diag(torch.tensor([math.exp(-last.layer.posterior.log_alpha), 0.0], dtype=torch.float64))
    wPhi = data.weight[:, None] * Phi
    close(last.layer.posterior.weights, torch.linalg.solve(Phi.mT @ wPhi + ridge, wPhi.mT @ data.T), loose=100)
    # at every point the networks of all strengths that left it out
    points = fit.held_out(ensemble.folds)
    assert points.strength.tolist() == strengths
    assert points.mean.shape == (3, (2 if crossed else 1) * M, 2)
    for i, strength in enumerate(strengths):
        own = fit.held_out([t for t in ensemble.folds if t.job.strength == strength])
        assert torch.equal(points.mean[i], own.mean[0])
        assert torch.equal(points.of(strength).ratio, own.ratio)


def test_one_strength_needs_no_choice(data):
    fit = crossfit(data)
    ensemble = fit.run(partitions(4, 1), n_members=4, strengths=[0.5], trials=partitions(4, 1)[0])
    assert (ensemble.members[0].strength, ensemble.scores) == (0.5, {})
    assert [len(jobs) for jobs in fit.train.jobs] == [4]


def test_no_two_members_of_a_mixture_start_alike():
    jobs = [Job(split, r, i) for r, splits in enumerate(partitions(5, 4)) for i, split in enumerate(splits)]
    assert len({job.seed(11) for job in jobs}) == len(jobs)
    assert len({job.key for job in jobs}) == len(jobs)
    assert jobs[0].seed(11) == replace(jobs[0], strength=3.0).seed(11)


# plans --------------------------------------------------------------------------------------------------------------


def plan(data: Data, **options):
    return make_plan(
        data,
        **{
            "calibration": "auto",
            "n_members": "auto",
            "hidden_prior": "auto",
            "fast": False,
            "own_network": False,
            "skips": True,
            "validation_fraction": 0.15,
            "groups": None,
            "seed": 0,
        }
        | options,
    )


def kinds(splits: list[Split]) -> str:
    return "".join(split.kind[0] for split in splits)


def test_what_auto_means():
    table = lambda m: Data(torch.randn(m, 2), torch.randn(m, 1))
    small, middle, large = table(19), table(40), table(5001)
    honest = plan(middle)
    assert isinstance(honest, Mixed)
    assert (honest.strengths, honest.calibration) == ((*STRENGTHS, math.inf), "auto")
    assert kinds(honest.splits) == "rrrrrbbbbb"
    assert plan(middle, skips=False).strengths == STRENGTHS
    assert kinds(plan(middle, calibration=KFold(3)).splits) == "ggg"
    ten = plan(middle, n_members=10)
    assert (ten.n_members, ten.strengths, kinds(ten.trials)) == (10, STRENGTHS, "rrrrr")
    assert [kinds(p) for p in ten.partitions] == ["rrrrrbbbbb"] * 2
    assert (plan(middle, hidden_prior=1.0).n_members, plan(large, hidden_prior=1.0).n_members) == (10, 5)
    assert [kinds(p) for p in plan(large, hidden_prior=1.0).partitions] == ["rrrrrbbbbb"]
    few = plan(small)
    assert (few.n_members, few.strengths, few.calibration, few.partitions) == (10, (0.0,), None, [])
    fast = plan(middle, fast=True)
    assert (fast.n_members, fast.strengths, fast.calibration, fast.partitions) == (1, (0.0,), None, [])
    mine = plan(middle, own_network=True)
    assert (mine.n_members, mine.strengths) == (1, (0.0,))
    assert [kinds(p) for p in mine.partitions] == ["r"]
    assert len(mine.partitions[0][0].held) == 6
    alpha = plan(middle, calibration="alpha", n_members=3)
    assert [kinds(p) for p in alpha.partitions] == ["bbbbb"]
    nothing = plan(middle, calibration=None)
    assert (nothing.partitions, len(nothing.strengths), kinds(nothing.trials)) == ([], 4, "rrrrr")
    one = plan(middle, calibration=None, hidden_prior=2.0)
    assert (one.partitions, one.strengths, one.trials) == ([], (2.0,), [])
    assert [kinds(p) for p in plan(middle, n_members=6).partitions] == ["rrrrrbbbbb"] * 2
    images = Data(torch.randn(40, 1, 4, 4), torch.randn(40, 1))
    assert [kinds(p) for p in plan(images, own_network=True, n_members=2).partitions] == ["rrrrr"]
