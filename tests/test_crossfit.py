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

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.calibration import HeldOutPoints, fit_curves
from lastlayer.ensemble.crossfit import CrossFit
from lastlayer.ensemble.splits import Folds, Split, blocked_splits, folds_for, random_splits
from lastlayer.ensemble.trainer import FitTask, Trainer
from lastlayer.features import MLP, affine_features
from lastlayer.networks.mlp import Architecture
from lastlayer.posterior import Posterior
from lastlayer.settings import PRIOR_PRECISIONS, DataShape, Settings, resolve
from lastlayer.statistics import Statistics
from lastlayer.training import Data, last_layer

M = 40


@pytest.fixture
def data(generator) -> Data:
    X = torch.rand(M, 1, generator=generator, dtype=torch.float64) * 4 - 2
    T = torch.cat([torch.sin(2 * X), X**2], 1) + 0.2 * torch.randn(M, 2, generator=generator, dtype=torch.float64)
    return Data(X, T, torch.rand(M, generator=generator, dtype=torch.float64) + 0.5)


def features(network: nn.Module, X: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return affine_features(network(X)).double()


class Recorded(Trainer):
    """A trainer that remembers what it was asked for."""

    def __init__(self, architecture: Architecture, data: Data):
        super().__init__(architecture, data)
        self.tasks: list[list[FitTask]] = []

    def networks(self, tasks: Sequence[FitTask], label: str) -> list[nn.Module]:
        self.tasks.append(list(tasks))
        return super().networks(tasks, label)


def settings(*precisions: float, n_members: int = 4, epochs: int = 15, seed: int = 7, **options) -> Settings:
    model = BLLRegressor(hidden=(4,), max_epochs=epochs)
    training = TrainingOptions(early_stopping=False, patience=100)
    made = resolve(model.get_params() | {"training": training}, DataShape((M, 1)), seed=seed)
    return replace(made, prior_precisions=precisions or (0.3,), n_members=n_members, **options)


def crossfit(data: Data, *precisions: float, trainer: type[Recorded] = Recorded, **options) -> CrossFit:
    return CrossFit(trainer(Architecture(settings(*precisions, **options)), data))


def one_network(data: Data, task: FitTask) -> nn.Module:
    (network,) = crossfit(data).trainer.networks([task], "one")
    return network


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
    options = {} if together else {"early_stopping": True}  # one after the other, each on some of its rows
    plain, poisoned = (
        crossfit(d, **options).selected_prior(Folds(splits, [])) for d in (data, Data(X, T, data.weight))
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
    batch = crossfit(data).selected_prior(Folds([splits], []))
    alone = [one_network(data, t.task) for t in batch.folds]
    for t, network in zip(batch.folds, alone, strict=True):
        for a, b in zip(weights(t.network), weights(network), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)  # in a stack, in float32


def test_on_several_cores_the_networks_are_the_same(data, monkeypatch):
    splits = partitions(4, 2)
    monkeypatch.setattr("lastlayer.ensemble.trainer.ROWS_PER_CORE", 1)
    one = crossfit(data, n_members=8).selected_prior(Folds(splits, []))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        three = crossfit(data, n_members=8).selected_prior(Folds(splits, []))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    for a, b in zip(one.members, three.members, strict=True):
        for x, y in zip(weights(a.network), weights(b.network), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)  # in other stacks, in float32


# held-out points ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_held_out_points_of_several_partitions_meet_row_by_row(data, noise):
    blocked = blocked_splits(data.X.numpy(), 2)
    plan = [[*splits, *blocked] for splits in partitions(3, 2)]
    fit = crossfit(data, noise=noise, n_members=6)
    ensemble = fit.selected_prior(Folds(plan, []))
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
        train, held = torch.from_numpy(t.task.split.train), torch.from_numpy(t.task.split.held)
        moments = Statistics.from_features(
            features(t.network, data.X[train]), data.T[train], sample_weight=data.weight[train]
        )
        by_hand = last_layer(moments, noise=noise).posterior.predict(features(t.network, data.X[held]))
        at = t.task.partition, held + (M if t.task.split.kind == "blocked" else 0)
        close(points.mean[at], by_hand.mean)
        close(points.cost[at], by_hand.variance_ratio)
        close(points.noise_var[at], by_hand.noise_cov.diagonal().expand(len(held), 2))
        if noise == "full":
            cov, std = by_hand.noise_cov, by_hand.noise_cov.diagonal().sqrt()
            close(points.correlation[at], (cov / torch.outer(std, std)).expand(len(held), 2, 2))
        seen[at] += 1
    assert (seen == 1).all()
    assert (points.correlation is None) == (noise == "diagonal")


def test_rows_that_a_splitter_never_holds_out_are_no_points(data):
    """As with TimeSeriesSplit: the first rows are always in the past."""
    splits = [Split(np.arange(10), np.arange(10, 20), "given"), Split(np.arange(20), np.arange(20, 40), "given")]
    fit = crossfit(data, n_members=3)
    ensemble = fit.selected_prior(Folds([splits, splits], []))
    points = fit.held_out(ensemble.folds)
    assert torch.equal(points.targets, data.T[10:])
    assert points.mean.shape == (2, 30, 2)
    assert not torch.equal(points.mean[0], points.mean[1])  # two partitions, two initialisations


def test_what_a_network_says_of_new_points_is_its_posterior(data):
    network = MLP(1, (4,), generator=torch.Generator().manual_seed(0))
    layer = last_layer(Statistics.from_features(features(network, data.X), data.T))
    new = Data(torch.randn(5, 1, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64))
    points = HeldOutPoints.by(layer, features(network, new.X), new, "validation", 0.3)
    expected = layer.posterior.predict(features(network, new.X))
    close(points.mean[0], expected.mean)
    close(points.cost[0], expected.variance_ratio)
    close(points.noise_var[0], expected.noise_cov.diagonal().expand(5, 2))
    assert bool((points.weight == 1).all())
    assert set(points.kind) == {"validation"}
    assert points.prior_precision.tolist() == [0.3]


# members ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_a_members_last_layer_knows_every_row_at_the_alpha_and_noise_of_its_fold(data, noise):
    ensemble = crossfit(data, noise=noise, n_members=6).selected_prior(Folds(partitions(4, 2), []))
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
    ensemble = crossfit(data, n_members=2).selected_prior(Folds([blocked], []))
    assert len(ensemble.members) == 2
    assert [t.task.split.kind for t in ensemble.folds] == ["blocked"] * 3
    for i, member in enumerate(ensemble.members):
        Phi = features(member.network, data.X)
        expected = last_layer(Statistics.from_features(Phi, data.T, sample_weight=data.weight))
        assert member.layer.posterior.log_alpha == pytest.approx(expected.posterior.log_alpha)
        close(member.layer.posterior.weights, expected.posterior.weights)
        again = one_network(data, FitTask(Split.everything(M), i, 0, 0.3))
        for a, b in zip(weights(member.network), weights(again), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)  # in a stack, in float32
    assert not equal(ensemble.members[0].network, ensemble.members[1].network)


# the precision of the hidden prior ----------------------------------------------------------------------------------


def test_every_prior_precision_starts_from_the_same_networks(data):
    fit = crossfit(data, 0.03, 3.0, epochs=0)
    trials = partitions(4, 1)[0]
    fit.selected_prior(Folds([trials], trials))
    (asked,) = fit.trainer.tasks
    assert [task.prior_precision for task in asked] == [0.03] * 4 + [3.0] * 4
    networks = fit.trainer.networks(asked, "again")
    for i in range(4):
        assert equal(networks[i], networks[4 + i])
        start = MLP(1, (4,), generator=asked[i].generator(7)).float()  # the type that networks are trained in
        assert equal(networks[i], start)
        assert not equal(networks[i], networks[(i + 1) % 4])


def test_the_prior_precision_of_the_largest_held_out_lpd_is_chosen_and_its_networks_are_kept(data):
    precisions, (trials, more) = [0.03, 300.0], partitions(3, 2)
    fit = crossfit(data, *precisions, n_members=6, epochs=40)
    ensemble = fit.selected_prior(Folds([trials, more], trials))
    chosen = ensemble.members[0].prior_precision
    assert list(ensemble.scores) == precisions
    for precision in precisions:
        alone = crossfit(data, precision, n_members=3, epochs=40)
        folds = alone.selected_prior(Folds([trials], [])).folds
        lpd = fit_curves(alone.held_out(folds), mixture=False).lpd
        assert ensemble.scores[precision] == pytest.approx(lpd, abs=1e-3)
        if precision == chosen:
            for a, b in zip(folds, ensemble.folds, strict=False):
                for x, y in zip(weights(a.network), weights(b.network), strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)  # in other stacks, in float32
    assert chosen == max(precisions, key=lambda s: ensemble.scores[s])
    assert [len(tasks) for tasks in fit.trainer.tasks] == [6, 3]  # those of the choice are not trained again
    assert {task.prior_precision for task in fit.trainer.tasks[1]} == {chosen}


def test_a_prior_precision_whose_networks_fail_is_not_chosen(data):
    class Fails(nn.Module):
        """Breaks down at rows that it was not trained on."""

        def __init__(self, network, rows):
            super().__init__()
            self.network, self.known = network, data.X[rows]

        def forward(self, x):
            return torch.where(torch.isin(x, self.known), self.network(x), torch.nan)

    class Trains(Recorded):
        def networks(self, tasks, label):
            networks = super().networks(tasks, label)
            return [
                Fails(network, task.split.train) if task.prior_precision == 3.0 else network
                for task, network in zip(tasks, networks, strict=True)
            ]

    trials = partitions(4, 1)[0]
    ensemble = crossfit(data, 3.0, 0.3, trainer=Trains).selected_prior(Folds([trials], trials))
    assert ensemble.members[0].prior_precision == 0.3
    assert math.isnan(ensemble.scores[3.0])
    assert math.isfinite(ensemble.scores[0.3])


@pytest.mark.parametrize("crossed", [True, False])
def test_a_mixture_has_members_under_every_prior_precision_trained_as_one_batch(data, crossed):
    precisions, random = [0.3, 30.0, math.inf], partitions(3, 1)[0] if crossed else []
    splits = [*random, *blocked_splits(data.X.numpy(), 2)]
    fit = crossfit(data, *precisions, n_members=2, ensemble="prior mixture")
    ensemble = fit.run(Folds([splits], splits))
    each = 3 if crossed else 2
    assert [member.prior_precision for member in ensemble.members] == [s for s in precisions for _ in range(each)]
    assert len(fit.trainer.tasks) == 1
    for i, precision in enumerate(precisions[:2]):
        alone = crossfit(data, precision, n_members=each).run(Folds([splits], []))
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
    # at every point the networks of all precisions that left it out
    points = fit.held_out(ensemble.folds)
    assert points.prior_precision.tolist() == precisions
    assert points.mean.shape == (3, (2 if crossed else 1) * M, 2)
    for i, precision in enumerate(precisions):
        own = fit.held_out([t for t in ensemble.folds if t.task.prior_precision == precision])
        assert torch.equal(points.mean[i], own.mean[0])
        assert torch.equal(points.of(precision).cost, own.cost)


def test_one_prior_precision_needs_no_choice(data):
    fit = crossfit(data, 0.5)
    ensemble = fit.selected_prior(Folds(partitions(4, 1), partitions(4, 1)[0]))
    assert (ensemble.members[0].prior_precision, ensemble.scores) == (0.5, {})
    assert [len(tasks) for tasks in fit.trainer.tasks] == [4]


def test_no_two_members_of_a_mixture_start_alike():
    tasks = [FitTask(split, r, i) for r, splits in enumerate(partitions(5, 4)) for i, split in enumerate(splits)]
    seed = lambda task: task.generator(11).initial_seed()
    assert len({seed(task) for task in tasks}) == len(tasks)
    assert len({task.key for task in tasks}) == len(tasks)
    assert seed(tasks[0]) == seed(replace(tasks[0], prior_precision=3.0))


# what "auto" means --------------------------------------------------------------------------------------------------


def plan(m: int, *more: int, **options) -> tuple[Settings, Folds]:
    """Settings of m rows, and the rows that networks leave out."""
    shape = (m, *(more or (2,)))
    found = resolve(BLLRegressor(**options).get_params(deep=False), DataShape(shape), seed=0)
    X = np.random.default_rng(0).normal(size=shape)
    return found, folds_for(found, X, np.zeros((m, 1)), splitter=options.get("calibration"))


def kinds(splits: list[Split]) -> str:
    return "".join(split.kind[0] for split in splits)


def test_what_auto_means():
    mixed, folds = plan(40)
    assert (mixed.ensemble, mixed.n_members, mixed.calibration) == ("prior mixture", 5, "random and blocked folds")
    assert mixed.prior_precisions == (*PRIOR_PRECISIONS, math.inf)
    assert [kinds(p) for p in folds.partitions] == ["rrrrrbbbbb"]
    assert plan(40, input_skip=False)[0].prior_precisions == PRIOR_PRECISIONS
    given, folds = plan(40, calibration=KFold(3))
    assert (given.ensemble, given.calibration, kinds(folds.partitions[0])) == ("prior mixture", "given folds", "ggg")
    ten, folds = plan(40, n_members=10)
    assert (ten.ensemble, ten.n_members, ten.prior_precisions) == ("selected prior", 10, PRIOR_PRECISIONS)
    assert kinds(folds.trials) == "rrrrr"
    assert [kinds(p) for p in folds.partitions] == ["rrrrrbbbbb"] * 2
    assert (plan(40, hidden_prior=1.0)[0].n_members, plan(5001, hidden_prior=1.0)[0].n_members) == (10, 5)
    assert [kinds(p) for p in plan(5001, hidden_prior=1.0)[1].partitions] == ["rrrrrbbbbb"]
    few, folds = plan(19)
    assert (few.n_members, few.prior_precisions, few.calibration, folds.partitions) == (10, (0.0,), None, [])
    fast, folds = plan(40, preset="fast")
    assert (fast.n_members, fast.prior_precisions, fast.calibration, folds.partitions) == (1, (0.0,), None, [])
    own, folds = plan(40, backbone=nn.Linear(2, 3))
    assert (own.n_members, own.prior_precisions, own.calibration) == (1, (0.0,), "holdout")
    assert [kinds(p) for p in folds.partitions] == ["r"]
    assert len(folds.partitions[0][0].held) == 6
    _, folds = plan(40, calibration="alpha", n_members=3)
    assert [kinds(p) for p in folds.partitions] == ["bbbbb"]
    nothing, folds = plan(40, calibration=None)
    assert (folds.partitions, len(nothing.prior_precisions), kinds(folds.trials)) == ([], 4, "rrrrr")
    one, folds = plan(40, calibration=None, hidden_prior=2.0)
    assert (folds.partitions, one.prior_precisions, folds.trials) == ([], (2.0,), [])
    assert [kinds(p) for p in plan(40, n_members=6)[1].partitions] == ["rrrrrbbbbb"] * 2
    images = plan(40, 1, 4, 4, backbone=lambda: nn.Flatten(), n_members=2)[1]
    assert [kinds(p) for p in images.partitions] == ["rrrrr"]


def test_auto_is_the_same_at_every_size_but_for_the_thresholds_it_names():
    """Rows of a mini-batch, epochs, learning rate and early stopping follow from the size of the table."""
    small, large = plan(5000)[0], plan(5001)[0]
    assert (small.batch_size, small.max_epochs, small.learning_rate) == (None, 250, 0.04)
    assert (large.batch_size, large.max_epochs, large.learning_rate) == (1024, 82, 0.04)  # 400 steps
    assert plan(100_000)[0].max_epochs == 10
    assert [plan(m, preset="fast")[0].early_stopping for m in (99, 100)] == [False, True]
    assert not plan(100)[0].early_stopping
    source = resolve(BLLRegressor().get_params(deep=False), DataShape(None, validation=True), seed=0)
    assert (source.n_members, source.prior_precisions, source.batch_size) == (1, (0.0,), 4096)
    assert (source.calibration, source.early_stopping) == ("curve on validation data", False)
