"""Networks that leave rows out: they never see them, what they say of them is aligned, and members stay as they were
judged unless rows are many; the process is one member, of all rows."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import close
from sklearn.model_selection import KFold
from torch import nn

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.maximum import by_evidence
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.readings import Readings
from lastlayer.bayes.statistics import Statistics
from lastlayer.calibration.fit import fit_curves
from lastlayer.calibration.points import HeldOutPoints
from lastlayer.data.rows import Points, Rows
from lastlayer.ensemble import trainer
from lastlayer.ensemble.crossfit import CrossFit
from lastlayer.ensemble.splits import SHELLS, Folds, Split, blocked_splits, folds_for, random_splits, shell_splits
from lastlayer.ensemble.trainer import FitTask, Trainer
from lastlayer.networks.architecture import Architecture
from lastlayer.networks.mlp import MLP
from lastlayer.predictor.state import Member
from lastlayer.settings.given import Shape
from lastlayer.settings.resolve import FAST_PRECISIONS, PRIOR_PRECISIONS, Settings, resolve
from lastlayer.settings.types import ADDITIVE, FOURIER, LINEAR, NETWORK, NO_NOISE_PRIOR, WEAK_NOISE_PRIOR, Family

pytestmark = pytest.mark.usefixtures("small_process")

M = 40
MANY = 200
"""Rows enough for the few features of these networks: members learn the rows that they were judged on."""
NETWORKS = tuple(Family("network", precision) for precision in PRIOR_PRECISIONS)
ENCODED = tuple(replace(family, encoding="piecewise") for family in NETWORKS)
EVERY = (*NETWORKS, *ENCODED, LINEAR, ADDITIVE, FOURIER)


@pytest.fixture
def data() -> Points:
    return table(M)


def table(m: int) -> Points:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(m, 1, generator=generator, dtype=torch.float64) * 4 - 2
    T = torch.cat([torch.sin(2 * X), X**2], 1) + 0.2 * torch.randn(m, 2, generator=generator, dtype=torch.float64)
    return Points(X, Readings(T), torch.rand(m, generator=generator, dtype=torch.float64) + 0.5)


def features(network: nn.Module, X: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return affine_features(network(X)).double()


class Recorded(Trainer):
    """A trainer that remembers what it was asked for."""

    def __init__(self, architecture: Architecture, data: Points):
        super().__init__(architecture, Rows(data))
        self.tasks: list[list[FitTask]] = []

    def networks(self, tasks: Sequence[FitTask], label: str) -> list[nn.Module]:
        self.tasks.append(list(tasks))
        return super().networks(tasks, label)


def settings(*families: Family | float, n_members: int = 4, epochs: int = 15, seed: int = 7, **options) -> Settings:
    """Numbers are prior precisions of networks."""
    model = BLLRegressor(hidden=(4,), max_epochs=epochs)
    training = TrainingOptions(early_stopping=False, patience=100)
    made = resolve(model.get_params() | {"training": training}, Shape((M, 1)), seed=seed)
    own = tuple(f if isinstance(f, Family) else Family("network", f) for f in families or (0.3,))
    return replace(made, families=own, n_members=n_members, **({"ensemble": "selected prior"} | options))


def crossfit(data: Points, *families: Family | float, trainer: type[Recorded] = Recorded, **options) -> CrossFit:
    return CrossFit(trainer(Architecture(settings(*families, **options)), data))


def one_network(data: Points, task: FitTask) -> nn.Module:
    (network,) = crossfit(data).trainer.networks([task], "one")
    return network


def partitions(k: int = 4, n: int = 2, m: int = M) -> list[list[Split]]:
    rng = np.random.default_rng(0)
    return [random_splits(np.arange(m), k, rng) for _ in range(n)]


def blocks(data: Points, k: int) -> list[Split]:
    return blocked_splits(data.X.numpy(), np.arange(len(data.X)), k)


def moments(network: nn.Module, data: Points, rows: np.ndarray) -> Statistics:
    """What a last layer is fitted to, by hand."""
    at = torch.from_numpy(rows)
    return Statistics.from_features(features(network, data.X[at]), data.T[at], sample_weight=data.weight[at])


def same_layer(member: Member, by_hand: Posterior, data: Points) -> None:
    posterior, Phi = member.posterior, features(member.network, data.X)
    close(posterior.mean(Phi), by_hand.mean(Phi), loose=100)  # sums of moments in another order
    close(posterior.variance_ratio(Phi), by_hand.variance_ratio(Phi), loose=100)


def weights(network: nn.Module) -> list[torch.Tensor]:
    """Everything that a network consists of: the bins of encoded inputs and the scale of those passed on too."""
    return list(network.state_dict().values())


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


# what a network sees ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [M, MANY])
@pytest.mark.parametrize("options", [{}, {"batch_size": 16}, {"early_stopping": True}], ids=str)
def test_a_network_never_sees_the_rows_it_leaves_out(options, m):
    """Poison in the held-out rows reaches every network but the one that left them out: networks that are trained
    together, on mini-batches too, and one after the other, each on some of its rows."""
    data, splits = table(m), partitions(4, 1, m)
    plain, poisoned = (
        crossfit(d, **options).selected_prior(Folds(splits, [])) for d in (data, poison(data, splits[0][1].held))
    )
    for i, (a, b) in enumerate(zip(plain.folds, poisoned.folds, strict=True)):
        assert equal(a.network, b.network) == (i == 1)
    assert equal(plain.members[1].network, poisoned.members[1].network)
    a, b = plain.folds[1].posterior, poisoned.folds[1].posterior
    assert a.log_alpha == b.log_alpha
    assert torch.equal(a.Sigma_E, b.Sigma_E)
    # the member's last layer knows those rows only where they are many
    Phi = features(plain.members[1].network, data.X)
    a, b = (ensemble.members[1].posterior.mean(Phi) for ensemble in (plain, poisoned))
    assert torch.equal(a, b) if m == M else not torch.allclose(a, b)


def poison(data: Points, rows: np.ndarray) -> Points:
    held = torch.from_numpy(rows)
    X, T = data.X.clone(), data.T.clone()
    T[held] += 100.0
    X[held] = -X[held]
    return Points(X, Readings(T), data.weight)


@pytest.mark.parametrize("family", [FOURIER, ADDITIVE, ENCODED[1]], ids=str)
def test_lengths_and_bins_never_see_the_rows_left_out(data, family):
    (splits,) = partitions(4, 1)
    plain, poisoned = (
        crossfit(d, family, ensemble="mixture").mixture(splits) for d in (data, poison(data, splits[1].held))
    )
    for i, (a, b) in enumerate(zip(plain.folds, poisoned.folds, strict=True)):
        assert equal(a.network, b.network) == (i == 1)
    Phi = features(plain.folds[1].network, data.X)
    a, b = (ensemble.folds[1].posterior for ensemble in (plain, poisoned))
    assert torch.equal(a.mean(Phi), b.mean(Phi))
    assert torch.equal(a.variance_ratio(Phi), b.variance_ratio(Phi))


def test_the_process_is_one_member_of_every_row(data):
    """Its networks that leave rows out are for calibration alone."""
    (splits,) = partitions(4, 1)
    ensemble = crossfit(data, FOURIER, LINEAR, ensemble="mixture").mixture(splits)
    assert [member.family for member in ensemble.members] == [LINEAR] * 4 + [FOURIER]
    assert [t.task.family for t in ensemble.folds] == [FOURIER] * 4 + [LINEAR] * 4
    process = ensemble.members[-1]
    assert not any(equal(process.network, t.network) for t in ensemble.folds[:4])
    assert not process.unseen.has(data).any()
    layers = by_evidence([moments(process.network, data, np.arange(M))], noise_prior=WEAK_NOISE_PRIOR)
    same_layer(process, layers[0], data)


def test_as_one_batch_or_one_by_one_the_networks_are_the_same(data):
    splits = [*partitions(4, 1)[0], *blocks(data, 3)]
    batch = crossfit(data).selected_prior(Folds([splits], []))
    alone = [one_network(data, t.task) for t in batch.folds]
    for t, network in zip(batch.folds, alone, strict=True):
        for a, b in zip(weights(t.network), weights(network), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)  # in a stack, in float32


@pytest.mark.parametrize("family", [NETWORKS[1], ENCODED[1], FOURIER], ids=str)
def test_on_several_cores_the_networks_are_the_same(data, monkeypatch, family):
    (splits,) = partitions(8, 1)
    monkeypatch.setattr(trainer, "ROWS_PER_CORE", 1)
    one = crossfit(data, family, ensemble="mixture").mixture(splits)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        three = crossfit(data, family, ensemble="mixture").mixture(splits)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert len(one.folds) == 8
    for a, b in zip(one.folds, three.folds, strict=True):
        for x, y in zip(weights(a.network), weights(b.network), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)  # in other stacks, in float32


# held-out points ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_held_out_points_of_several_partitions_meet_row_by_row(data, noise):
    blocked = blocks(data, 2)
    plan = [[*splits, *blocked] for splits in partitions(3, 2)]
    fit = crossfit(data, noise=noise, n_members=6)
    ensemble = fit.selected_prior(Folds(plan, []))
    points = fit.held_out(ensemble.folds)
    assert points.mean.shape == (2, 2 * M, 2)
    assert points.kind.tolist() == ["random"] * M + ["blocked"] * M
    for offset in (0, M):
        assert torch.equal(points.targets[offset : offset + M], data.T)
        assert torch.equal(points.inputs[offset : offset + M], data.X)
        counts = 0.1 if offset else 1.0  # points of a block err together
        assert torch.equal(points.weight[offset : offset + M], counts * data.weight)
    seen = np.zeros((2, 2 * M), dtype=int)
    for t in ensemble.folds:
        held = torch.from_numpy(t.task.split.held)
        (posterior,) = by_evidence([moments(t.network, data, t.task.split.train)], noise=noise)
        by_hand = posterior.predict(features(t.network, data.X[held]))
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


def test_rows_that_several_shells_hold_out_are_points_of_each(data):
    shells = shell_splits(data.X.numpy(), np.arange(M))
    fit = crossfit(data, n_members=4)
    ensemble = fit.selected_prior(Folds([[*partitions(4, 1)[0], *shells]], []))
    points = fit.held_out(ensemble.folds)
    by_row = [(row, t) for row in range(M) for t in ensemble.folds[4:] if row in t.task.split.held]
    assert len(by_row) == sum(len(split.held) for split in shells) > M
    assert points.kind.tolist() == ["random"] * M + ["shell"] * len(by_row)
    assert points.single.tolist() == [True] * M + [False] * len(by_row)
    rows = torch.tensor([row for row, _ in by_row])
    assert torch.equal(points.targets[M:], data.T[rows])
    assert torch.equal(points.weight[M:], 0.1 * data.weight[rows])  # points of a shell err together
    said = [t.posterior.predict(features(t.network, data.X[row : row + 1])) for row, t in by_row]
    close(points.mean[0, M:], torch.cat([each.mean for each in said]))
    close(points.cost[0, M:], torch.cat([each.variance_ratio for each in said]))


@pytest.mark.parametrize("crossed", [True, False])
def test_points_know_how_far_outside_the_data_the_process_sees_them(data, crossed):
    """Beyond its largest cost at points held out alone, where there are such."""
    splits = [*(partitions(4, 1)[0] if crossed else []), *blocks(data, 3), *shell_splits(data.X.numpy(), np.arange(M))]
    fit = crossfit(data, LINEAR, FOURIER, ADDITIVE, ensemble="mixture")
    points = fit.held_out(fit.mixture(splits).folds)
    cost, noise = points.cost[1].numpy(), points.noise_var[1].numpy()
    if crossed:
        single = points.kind == "random"
        assert points.inside == {FOURIER: cost[single].max(), ADDITIVE: points.cost[2].numpy()[single].max()}
    inside = points.inside[FOURIER]
    far = [math.sqrt(math.prod(own)) * max(0.0, v - inside) for own, v in zip(noise, cost, strict=True)]
    # where it sees none, the logarithm of zero is that of a tiny number
    torch.testing.assert_close(points.log_far.exp(), torch.tensor(far, dtype=torch.float64), rtol=1e-9, atol=1e-100)
    assert any(far)
    without = crossfit(data, LINEAR, ADDITIVE, ensemble="mixture")
    points = without.held_out(without.mixture(splits).folds)
    assert points.log_far is None
    assert set(points.inside) == {ADDITIVE}


def test_of_splits_that_were_given_those_rows_lie_outside_that_cost_more_than_any_left_out_alone(data):
    """The process that saw most rows says so: its last layer without each of them in turn, alpha as it was found.

    What lies outside counts as a region, whoever held it out: the future of a series errs together."""
    order = np.argsort(data.X[:, 0].numpy())
    splits = [Split(order[:n], order[n : n + 10], "given", n) for n in (15, 25, 30)]
    fit = crossfit(data, LINEAR, FOURIER, ADDITIVE, ensemble="mixture")
    folds = fit.mixture(splits).folds
    points = fit.held_out(folds)
    rows, largest = data.take(torch.from_numpy(order[:30])), {}
    for family in (FOURIER, ADDITIVE):
        found = next(f for f in folds if f.task.family == family and len(f.task.split.train) == 30)
        costs, posterior = [], found.posterior
        for i in range(30):
            rest = [j for j in range(30) if j != i]
            left = Statistics.from_features(
                features(found.network, rows.X[rest]), rows.T[rest], sample_weight=rows.weight[rest]
            )
            one = Posterior(left, posterior.log_alpha, noise_cov=posterior.Sigma_E)
            costs.append(float(one.variance_ratio(features(found.network, rows.X[[i]]))))
        largest[family] = max(costs)
    assert points.inside == pytest.approx(largest, rel=1e-8)
    beyond = points.cost[1].numpy() > points.inside[FOURIER]
    assert 0 < beyond.sum() < len(beyond)
    assert points.kind.tolist() == np.where(beyond, "outside", "given").tolist()
    assert not points.single[beyond].any()
    held = np.sort(np.concatenate([split.held for split in splits]))
    np.testing.assert_allclose(points.weight, data.weight[held].numpy() * np.where(beyond, 0.1, 1.0))


def test_rows_that_a_splitter_never_holds_out_are_no_points(data):
    """As with TimeSeriesSplit: the first rows are always in the past."""
    splits = [
        Split(np.arange(10), np.arange(10, 20), "given", 10),
        Split(np.arange(20), np.arange(20, 40), "given", 20),
    ]
    fit = crossfit(data, n_members=3)
    ensemble = fit.selected_prior(Folds([splits, splits], []))
    points = fit.held_out(ensemble.folds)
    assert torch.equal(points.targets, data.T[10:])
    assert points.mean.shape == (2, 30, 2)
    assert not torch.equal(points.mean[0], points.mean[1])  # two partitions, two initialisations


def test_what_a_network_says_of_new_points_is_its_posterior(data):
    network = MLP(1, (4,), generator=torch.Generator().manual_seed(0))
    (posterior,) = by_evidence([Statistics.from_features(features(network, data.X), data.T)])
    new = Points(torch.randn(5, 1, dtype=torch.float64), Readings(torch.randn(5, 2, dtype=torch.float64)))
    points = HeldOutPoints.by(posterior, features(network, new.X), new, "validation", LINEAR)
    expected = posterior.predict(features(network, new.X))
    close(points.mean[0], expected.mean)
    close(points.cost[0], expected.variance_ratio)
    close(points.noise_var[0], expected.noise_cov.diagonal().expand(5, 2))
    assert bool((points.weight == 1).all())
    assert set(points.kind) == {"validation"}
    assert points.families == (LINEAR,)


# members ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_of_many_rows_a_members_last_layer_knows_all_at_the_alpha_and_noise_of_its_fold(noise):
    data = table(MANY)
    ensemble = crossfit(data, noise=noise, n_members=6).selected_prior(Folds(partitions(4, 2, MANY), []))
    assert len(ensemble.members) == 6
    assert len(ensemble.folds) == 8
    for member, t in zip(ensemble.members, ensemble.folds, strict=False):
        assert member.network is t.network
        assert not member.unseen.has(data).any()
        every, judged = moments(t.network, data, np.arange(MANY)), t.posterior
        assert member.posterior.log_alpha == judged.log_alpha
        assert torch.equal(member.posterior.Sigma_E, judged.Sigma_E)
        same_layer(member, Posterior(every, judged.log_alpha, judged.Sigma_E, noise, checked=False), data)


@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_of_few_rows_a_members_last_layer_is_the_one_that_was_judged(data, noise):
    ensemble = crossfit(data, noise=noise, n_members=6).selected_prior(Folds(partitions(4, 2), []))
    assert len(ensemble.members) == 6
    assert len(ensemble.folds) == 8
    for member, t in zip(ensemble.members, ensemble.folds, strict=False):
        assert member.network is t.network
        assert member.posterior is t.posterior
        held = np.isin(np.arange(M), t.task.split.held)
        np.testing.assert_array_equal(member.unseen.has(data), held)
        assert member.unseen.weight.sum() == pytest.approx(float(data.weight[torch.from_numpy(held)].sum()))
        same_layer(member, by_evidence([moments(t.network, data, t.task.split.train)], noise=noise)[0], data)


def test_members_learn_the_rows_they_were_judged_on_from_ten_groups_of_rows_for_each_determined_feature():
    data, (first, second) = table(MANY), partitions(2, 1, MANY)[0]
    (network, _) = crossfit(data).trainer.networks(
        [FitTask(s, 0, i, NETWORKS[1]) for i, s in enumerate((first, second))], ""
    )
    (posterior,) = by_evidence([moments(network, data, first.train)])
    Phi, w = features(network, data.X[first.train])[:, :-1], data.weight[first.train]
    centred = w.sqrt()[:, None] * (Phi - (w @ Phi) / w.sum())
    values = torch.linalg.eigvalsh(centred.mT @ centred)
    enough = math.ceil(10 * float((values / (values + math.exp(-posterior.log_alpha))).sum()))
    assert 10 < enough < len(first.train)
    for n_groups in (enough, enough - 1):
        splits = [replace(first, n_groups=n_groups), second]
        member = crossfit(data).selected_prior(Folds([splits], [])).members[0]
        assert equal(member.network, network)
        assert member.unseen.has(data).any() == (n_groups < enough)
        assert float(member.posterior.statistics.count) == pytest.approx(
            float((data.weight if n_groups == enough else w).sum())
        )


def test_without_random_splits_members_are_trained_on_every_row(data):
    blocked = blocks(data, 3)
    ensemble = crossfit(data, n_members=2).selected_prior(Folds([blocked], []))
    assert len(ensemble.members) == 2
    assert [t.task.split.kind for t in ensemble.folds] == ["blocked"] * 3
    for i, member in enumerate(ensemble.members):
        assert not member.unseen.has(data).any()
        (expected,) = by_evidence([moments(member.network, data, np.arange(M))])
        assert member.posterior.log_alpha == pytest.approx(expected.log_alpha)
        close(member.posterior.weights, expected.weights)
        again = one_network(data, FitTask(Split.everything(M), i, 0, NETWORKS[1]))
        for a, b in zip(weights(member.network), weights(again), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)  # in a stack, in float32
    assert not equal(ensemble.members[0].network, ensemble.members[1].network)


# the precision of the hidden prior ----------------------------------------------------------------------------------


def test_every_prior_precision_starts_from_the_same_networks(data):
    fit = crossfit(data, 0.03, 3.0, epochs=0)
    trials = partitions(4, 1)[0]
    fit.selected_prior(Folds([trials], trials))
    (asked,) = fit.trainer.tasks
    assert [task.family.prior_precision for task in asked] == [0.03] * 4 + [3.0] * 4
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
    chosen = ensemble.members[0].family.prior_precision
    assert list(ensemble.scores) == [Family("network", precision) for precision in precisions]
    scores = {family.prior_precision: lpd for family, lpd in ensemble.scores.items()}
    for precision in precisions:
        alone = crossfit(data, precision, n_members=3, epochs=40)
        folds = alone.selected_prior(Folds([trials], [])).folds
        lpd = fit_curves(alone.held_out(folds), mixture=False).lpd
        assert scores[precision] == pytest.approx(lpd, abs=1e-3)
        if precision == chosen:
            for a, b in zip(folds, ensemble.folds, strict=False):
                for x, y in zip(weights(a.network), weights(b.network), strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)  # in other stacks, in float32
    assert chosen == max(precisions, key=lambda s: scores[s])
    assert [len(tasks) for tasks in fit.trainer.tasks] == [6, 3]  # those of the choice are not trained again
    assert {task.family.prior_precision for task in fit.trainer.tasks[1]} == {chosen}


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
                Fails(network, task.split.train) if task.family.prior_precision == 3.0 else network
                for task, network in zip(tasks, networks, strict=True)
            ]

    trials = partitions(4, 1)[0]
    ensemble = crossfit(data, 3.0, 0.3, trainer=Trains).selected_prior(Folds([trials], trials))
    assert ensemble.members[0].family == Family("network", 0.3)
    assert math.isnan(ensemble.scores[Family("network", 3.0)])
    assert math.isfinite(ensemble.scores[Family("network", 0.3)])


@pytest.mark.parametrize("crossed", [True, False])
def test_a_mixture_has_members_of_every_family_and_its_networks_are_trained_as_one_batch(data, crossed):
    families = [Family("network", 0.3), Family("network", 30.0), ENCODED[1], FOURIER, LINEAR, ADDITIVE]
    random = partitions(3, 1)[0] if crossed else []
    splits = [*random, *blocks(data, 2)]
    fit = crossfit(data, *families, n_members=2, ensemble="mixture")
    ensemble = fit.run(Folds([splits], splits))
    each = 3 if crossed else 2
    of = lambda ensemble, family: [member for member in ensemble.members if member.family == family]
    assert Counter(member.family for member in ensemble.members) == {s: 1 if s == FOURIER else each for s in families}
    assert len(fit.trainer.tasks) == 1
    for family in families:
        alone = crossfit(data, family, n_members=each, ensemble="mixture").run(Folds([splits], []))
        for a, b in zip(of(alone, family), of(ensemble, family), strict=True):
            for x, y in zip(weights(a.network), weights(b.network), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)
    # one family is a linear regression on the inputs, by all rows: they are many for one feature
    last = of(ensemble, LINEAR)[-1]
    Phi = torch.cat([data.X, torch.ones(M, 1, dtype=torch.float64)], 1)
    close(features(last.network, data.X), Phi)
    ridge = torch.diag(torch.tensor([math.exp(-last.posterior.log_alpha), 0.0], dtype=torch.float64))
    wPhi = data.weight[:, None] * Phi
    close(last.posterior.weights, torch.linalg.solve(Phi.mT @ wPhi + ridge, wPhi.mT @ data.T), loose=100)
    # at every point the networks of all families that left it out
    points = fit.held_out(ensemble.folds)
    assert points.families == tuple(families)
    assert points.mean.shape == (6, (2 if crossed else 1) * M, 2)
    for i, family in enumerate(families):
        own = fit.held_out([t for t in ensemble.folds if t.task.family == family])
        assert torch.equal(points.mean[i], own.mean[0])
        assert torch.equal(points.of(family).cost, own.cost)


@pytest.mark.parametrize(
    ("ensemble", "prior", "other"),
    [("mixture", WEAK_NOISE_PRIOR, NO_NOISE_PRIOR), ("selected prior", NO_NOISE_PRIOR, WEAK_NOISE_PRIOR)],
)
def test_last_layers_of_a_mixture_have_a_weak_prior_on_the_noise_and_others_none(data, ensemble, prior, other):
    (splits,) = partitions(4, 1)
    for t in crossfit(data, ensemble=ensemble).run(Folds([splits], [])).folds:
        statistics, found = [moments(t.network, data, t.task.split.train)], t.posterior
        close(found.Sigma_E, by_evidence(statistics, noise_prior=prior)[0].Sigma_E)
        wrong = by_evidence(statistics, noise_prior=other)[0].Sigma_E
        assert not torch.allclose(found.Sigma_E, wrong, rtol=1e-3)


def test_one_prior_precision_needs_no_choice(data):
    fit = crossfit(data, 0.5)
    ensemble = fit.selected_prior(Folds(partitions(4, 1), partitions(4, 1)[0]))
    assert (ensemble.members[0].family, ensemble.scores) == (Family("network", 0.5), {})
    assert [len(tasks) for tasks in fit.trainer.tasks] == [4]


def test_no_two_members_of_a_mixture_start_alike():
    tasks = [FitTask(split, r, i) for r, splits in enumerate(partitions(5, 4)) for i, split in enumerate(splits)]
    seed = lambda task: task.generator(11).initial_seed()
    assert len({seed(task) for task in tasks}) == len(tasks)
    assert len({task.key for task in tasks}) == len(tasks)
    assert seed(tasks[0]) == seed(replace(tasks[0], family=FOURIER))


# groups of rows -----------------------------------------------------------------------------------------------------


def test_rows_of_a_group_are_held_out_together_and_once(data):
    groups = np.random.default_rng(1).permutation(np.arange(M) // 3)  # 13 of three rows, one of a single row
    plans = {
        "random": random_splits(groups, 4, np.random.default_rng(0)),
        "blocked": blocked_splits(data.X.numpy(), groups, 4),
    }
    for kind, splits in plans.items():
        assert [split.kind for split in splits] == [kind] * 4
        assert sorted(np.concatenate([split.held for split in splits])) == list(range(M))
        for split in splits:
            assert sorted([*split.train, *split.held]) == list(range(M))
            assert not set(groups[split.train]) & set(groups[split.held])
            assert split.n_groups == len(set(groups[split.train]))
            assert split.n_groups in (10, 11)  # of 14, three or four are held out


def test_a_block_is_made_of_neighbours_whatever_group_they_are_in():
    groups = np.random.default_rng(0).permutation(np.repeat(np.arange(12), 2))
    X = np.random.default_rng(1).permutation(12.0 * np.arange(12))[groups][:, None]
    splits = blocked_splits(X, groups, 3)
    assert sorted(sorted(X[split.held, 0]) for split in splits) == [
        sorted(12.0 * i for i in range(start, start + 4) for _ in range(2)) for start in (0, 4, 8)
    ]


@pytest.mark.parametrize("share", SHELLS)
def test_a_shell_is_what_lies_farthest_from_the_middle(share):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 3)) * [1.0, 1e3, 1e-3] + [0.0, 1e5, 1.0]
    (split,) = shell_splits(X, np.arange(30), [share])
    distance = [sum(((x - c.mean()) / c.std()) ** 2 for x, c in zip(row, X.T, strict=True)) for row in X]
    nearest = sorted(range(30), key=distance.__getitem__)
    assert split.train.tolist() == sorted(nearest[: round(30 * share)])
    assert split.held.tolist() == sorted(nearest[round(30 * share) :])
    assert (split.kind, split.n_groups) == ("shell", len(split.train))


def test_shells_keep_groups_together_and_leave_two_of_them(data):
    groups = np.random.default_rng(1).permutation(np.arange(M) // 3)
    shells = shell_splits(data.X.numpy(), groups)
    assert len(shells) == 3
    for split, share in zip(shells, SHELLS, strict=True):
        assert sorted([*split.train, *split.held]) == list(range(M))
        assert not set(groups[split.train]) & set(groups[split.held])
        assert split.n_groups == len(set(groups[split.train])) == round(14 * share)
    for outer, inner in zip(shells[1:], shells, strict=False):
        assert set(outer.held) < set(inner.held)
    still = np.stack([np.arange(5.0), np.ones(5)], 1)  # a column that does not move
    assert [split.train.tolist() for split in shell_splits(still, np.arange(5))] == [[1, 2], [1, 2, 3], [0, 1, 2, 3]]


def test_folds_keep_copies_together_unless_a_splitter_is_given(data):
    copies, X = np.arange(M) // 2, data.X.numpy()
    for options in ({}, {"n_members": 10}, {"calibration": "alpha"}, {"backbone": nn.Linear(1, 3)}):
        parameters = BLLRegressor(**options).get_params(deep=False)
        found = resolve(parameters, Shape(X.shape, n_groups=M // 2), seed=0)
        folds = folds_for(found, Rows(Points(data.X, Readings(data.T)), copies=copies))
        splits = [*folds.trials, *(split for partition in folds.partitions for split in partition)]
        assert splits
        for split in splits:
            assert not set(copies[split.train]) & set(copies[split.held])
    given = resolve(BLLRegressor(calibration=KFold(M)).get_params(deep=False), Shape(X.shape), seed=0)
    folds = folds_for(given, Rows(data, copies=copies), splitter=KFold(M))
    assert [split.held.tolist() for split in folds.partitions[0]] == [[i] for i in range(M)]
    assert {split.n_groups for split in folds.partitions[0]} == {M - 1}


# what "auto" means --------------------------------------------------------------------------------------------------


def plan(m: int, *more: int, n_groups: int | None = None, **options) -> tuple[Settings, Folds]:
    """Settings of m rows, and the rows that networks leave out."""
    shape = (m, *(more or (2,)))
    found = resolve(BLLRegressor(**options).get_params(deep=False), Shape(shape, n_groups=n_groups), seed=0)
    X = np.random.default_rng(0).normal(size=shape)
    copies = None if n_groups is None else np.arange(m) % n_groups
    rows = Rows(Points(torch.from_numpy(X), Readings(torch.zeros(m, 1))), copies=copies)
    return found, folds_for(found, rows, splitter=options.get("calibration"))


def kinds(splits: list[Split]) -> str:
    return "".join(split.kind[0] for split in splits)


def test_what_auto_means():
    mixed, folds = plan(250)
    assert (mixed.ensemble, mixed.n_members, mixed.calibration) == ("mixture", 5, "random and blocked folds")
    assert mixed.families == EVERY
    assert [kinds(p) for p in folds.partitions] == ["rrrrrbbbbbsss"]
    assert plan(40, input_skip=False)[0].families == (*NETWORKS, FOURIER)
    given, folds = plan(40, calibration=KFold(3))
    assert (given.ensemble, given.calibration, kinds(folds.partitions[0])) == ("mixture", "given folds", "ggg")
    ten, folds = plan(40, n_members=10)
    assert (ten.ensemble, ten.n_members, ten.families) == ("selected prior", 10, NETWORKS)
    assert kinds(folds.trials) == "rrrrr"
    assert [kinds(p) for p in folds.partitions] == ["rrrrrbbbbbsss"] * 2
    assert (plan(40, hidden_prior=1.0)[0].n_members, plan(5001, hidden_prior=1.0)[0].n_members) == (10, 5)
    assert [kinds(p) for p in plan(5001, hidden_prior=1.0)[1].partitions] == ["rrrrrbbs"]
    bare, folds = plan(40, preset="evidence")
    assert (bare.n_members, bare.families, bare.calibration, folds.partitions) == (1, (NETWORK,), None, [])
    own, folds = plan(40, backbone=nn.Linear(2, 3))
    assert (own.n_members, own.families, own.calibration) == (1, (NETWORK,), "holdout")
    assert [kinds(p) for p in folds.partitions] == ["r"]
    assert len(folds.partitions[0][0].held) == 6
    assert [plan(m, backbone=nn.Linear(2, 3))[0].calibration for m in (19, 20)] == [None, "holdout"]
    _, folds = plan(40, calibration="alpha", n_members=3)
    assert [kinds(p) for p in folds.partitions] == ["bbbbb"]
    nothing, folds = plan(40, calibration=None)
    assert (folds.partitions, nothing.families, kinds(folds.trials)) == ([], NETWORKS, "rrrrr")
    one, folds = plan(40, calibration=None, hidden_prior=2.0)
    assert (folds.partitions, one.families, folds.trials) == ([], (Family("network", 2.0),), [])
    assert [kinds(p) for p in plan(40, n_members=6)[1].partitions] == ["rrrrrbbbbbsss"] * 2
    images = plan(40, 1, 4, 4, backbone=lambda: nn.Flatten(), n_members=2)[1]
    assert [kinds(p) for p in images.partitions] == ["rrrrr"]


def test_which_families_see_encoded_inputs():
    assert plan(40, encoding="raw")[0].families == (*NETWORKS, LINEAR, FOURIER)
    assert plan(40, encoding="piecewise")[0].families == (*ENCODED, ADDITIVE, FOURIER)
    assert [plan(40, d)[0].families for d in (100, 101)] == [EVERY, (*NETWORKS, LINEAR, FOURIER)]
    assert plan(40, 101, encoding="piecewise")[0].families == (*ENCODED, ADDITIVE, FOURIER)
    assert plan(40, n_members=3)[0].families == NETWORKS
    assert plan(40, n_members=3, encoding="piecewise")[0].families == ENCODED
    one = plan(40, hidden_prior=2.0, encoding="piecewise")[0]
    assert one.families == (Family("network", 2.0, "piecewise"),)
    assert plan(40, preset="evidence")[0].families == (NETWORK,)
    assert plan(40, preset="evidence", encoding="piecewise")[0].families == (replace(NETWORK, encoding="piecewise"),)


def test_below_twenty_rows_no_network_is_trained_and_each_row_is_held_out_alone():
    few, folds = plan(19)
    assert (few.ensemble, few.n_members, few.families) == ("mixture", 19, (LINEAR, FOURIER))
    assert [kinds(p) for p in folds.partitions] == ["r" * 19 + "bbbbbsss"]
    assert sorted(split.held.tolist() for split in folds.partitions[0][:19]) == [[i] for i in range(19)]
    assert plan(19, input_skip=False)[0].families == (LINEAR, FOURIER)
    assert plan(19, encoding="piecewise")[0].families == (LINEAR, FOURIER)
    assert plan(20)[0].families == EVERY
    assert [kinds(p) for p in plan(5)[1].partitions] == ["rrrrrbbsss"]  # a block has two rows at least
    none, folds = plan(4)
    assert (none.n_members, none.families, none.calibration, folds.partitions) == (10, (NETWORK,), None, [])


def test_the_fewer_the_rows_the_more_folds_a_mixture_has():
    rows = (20, 99, 100, 249, 250, 10_000)
    assert [plan(m)[0].n_members for m in rows] == [20, 20, 10, 10, 5, 10]
    assert [kinds(plan(m)[1].partitions[0]) for m in (99, 249)] == ["r" * 20 + "bbbbbsss", "r" * 10 + "bbbbbsss"]
    assert [plan(m, preset="fast")[0].n_members for m in (19, *rows)] == [19] + [5] * 6
    # copies count as one, but many of them are as long to train on as other rows
    assert [plan(m, n_groups=99)[0].n_members for m in (249, 250)] == [20, 10]
    assert plan(400, n_groups=12)[0].n_members == 12


def test_processes_are_for_tables_that_are_not_large():
    assert plan(5000)[0].families == EVERY
    assert [family.kind for family in plan(5001)[0].families] == [family.kind for family in EVERY[:-1]]
    assert plan(5001, n_groups=5000)[0].families == EVERY


def test_fast_has_one_prior_precision_and_fewer_steps():
    (precision,) = FAST_PRECISIONS
    fast, full = plan(300, preset="fast")[0], plan(300)[0]
    own = Family("network", precision)
    assert fast.families == (own, replace(own, encoding="piecewise"), LINEAR, ADDITIVE, FOURIER)
    assert fast == replace(full, families=fast.families, max_epochs=75, n_blocks=3)
    assert [plan(m, preset="fast")[0].max_epochs for m in (5001, 1_000_000)] == [25, 3]  # 120 steps, or 3 passes
    assert plan(300, preset="fast", n_members=10)[0].families == NETWORKS  # of which the best is taken


def test_the_more_rows_the_wider_the_hidden_layers():
    widths = {20: 5, 35: 5, 36: 6, 299: 49, 300: 50, 100_000: 50}
    assert {m: plan(m)[0].hidden for m in widths} == {m: (width, width) for m, width in widths.items()}
    assert plan(300, n_groups=60)[0].hidden == (10, 10)
    assert plan(300, hidden=[7])[0].hidden == (7,)


def test_a_source_has_the_widest_hidden_layers():
    """Its rows are not counted in advance, and are taken to be many."""
    assert resolve(BLLRegressor().get_params(deep=False), Shape(None), seed=0).hidden == (50, 50)


def test_noise_may_depend_on_the_input_where_a_curve_is_calibrated_on_a_table():
    assert plan(40)[0].noise == "auto"
    assert plan(40, calibration=KFold(3), n_members=2)[0].noise == "auto"
    for options in ({"preset": "evidence"}, {"calibration": None}, {"calibration": "alpha"}):
        assert plan(40, **options)[0].noise == "diagonal"
    assert plan(40, 1, 4, 4, backbone=lambda: nn.Flatten(), n_members=2)[0].noise == "diagonal"
    assert plan(40, noise="full")[0].noise == "full"
    for noise, structure in (("auto", "diagonal"), ("diagonal", "diagonal"), ("input", "diagonal"), ("full", "full")):
        assert plan(40, noise=noise)[0].noise_structure == structure


def test_auto_is_the_same_at_every_size_but_for_the_thresholds_it_names():
    """Rows of a mini-batch, epochs, learning rate and early stopping follow from the size of the table."""
    small, large = plan(5000)[0], plan(5001)[0]
    assert (small.batch_size, small.max_epochs, small.learning_rate) == (None, 250, 0.04)
    assert (large.batch_size, large.max_epochs, large.learning_rate) == (1024, 82, 0.04)  # 400 steps
    assert plan(100_000)[0].max_epochs == 10
    assert [plan(m, preset="evidence")[0].early_stopping for m in (99, 100)] == [False, True]
    assert not plan(100)[0].early_stopping
    source = resolve(BLLRegressor().get_params(deep=False), Shape(None, validation=True), seed=0)
    assert (source.n_members, source.families, source.batch_size) == (1, (NETWORK,), 4096)
    assert (source.calibration, source.early_stopping) == ("curve on validation data", False)
