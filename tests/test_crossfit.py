"""Networks that leave rows out: they never see them, what they say of them is aligned, and members stay as they were
judged unless rows are many; the process is one member, of all rows."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import blocked_splits, close, held_from, random_splits, shell_splits
from sklearn.model_selection import KFold
from torch import nn

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.bayes.evidence import by_evidence
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Readings, Statistics
from lastlayer.calibration.points import HeldOutPoints
from lastlayer.data.rows import Points, Rows
from lastlayer.ensemble import crossfit, train
from lastlayer.ensemble.crossfit import CrossFit, cross_fit
from lastlayer.ensemble.run import Run
from lastlayer.ensemble.splits import Split, folds_for
from lastlayer.ensemble.train import Task, Trainer
from lastlayer.networks.architecture import Architecture
from lastlayer.networks.mlp import MLP, parts_of
from lastlayer.predictor.member import Member
from lastlayer.settings.resolve import PRIOR_PRECISIONS, resolve
from lastlayer.settings.types import (
    ADDITIVE,
    FOURIER,
    LINEAR,
    NO_NOISE_PRIOR,
    WEAK_NOISE_PRIOR,
    EnsembleSettings,
    Family,
    Network,
    Settings,
    Shape,
)
from lastlayer.training import stack

pytestmark = pytest.mark.usefixtures("small_process")

M = 40
MANY = 200
"""Rows enough for the few features of these networks: members learn the rows that they were judged on."""
NETWORKS = tuple(Network(precision) for precision in PRIOR_PRECISIONS)
ENCODED = tuple(replace(family, encoding="piecewise") for family in NETWORKS)
EVERY = (*NETWORKS, *ENCODED, LINEAR, ADDITIVE, FOURIER)


def table(m: int = M) -> Points:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(m, 1, generator=generator, dtype=torch.float64) * 4 - 2
    T = torch.cat([torch.sin(2 * X), X**2], 1) + 0.2 * torch.randn(m, 2, generator=generator, dtype=torch.float64)
    return Points(X, Readings(T), torch.rand(m, generator=generator, dtype=torch.float64) + 0.5)


@pytest.fixture
def data() -> Points:
    return table()


def features(network: nn.Module, X: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return affine_features(network(X)).double()


def settings(
    *families: Family | float, n_members: int = 4, epochs: int = 15, noise: str = "auto", batch_size=None, early=False
) -> Settings:
    """Numbers are prior precisions of networks."""
    training = TrainingOptions(early_stopping=early, patience=100)
    model = BLLRegressor(hidden=(4,), max_epochs=epochs, noise=noise, batch_size=batch_size, training=training)
    made = resolve(model.get_params(deep=False), Shape((M, 1)), seed=7)
    own = tuple(f if isinstance(f, Family) else Network(f) for f in families or (0.3,))
    return replace(made, ensemble=EnsembleSettings(own, n_members, 5))


def fitted(data: Points, splits: Sequence[Split], *families: Family | float, **options) -> CrossFit:
    return cross_fit(Rows(data), splits, Architecture(settings(*families, **options)), Run())


def networks(data: Points, tasks: Sequence[Task], **options) -> list[nn.Module]:
    return Trainer(Architecture(settings(**options)), Rows(data), Run()).networks(tasks)


def random(k: int = 4, m: int = M) -> list[Split]:
    return random_splits(np.arange(m), k, np.random.default_rng(0))


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


def equal(a: nn.Module, b: nn.Module) -> bool:
    """In everything that they consist of: the bins of encoded inputs and the scale of those passed on too."""
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def near(a: nn.Module, b: nn.Module, tolerance: float) -> None:
    torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("m", [M, MANY])
@pytest.mark.parametrize("options", [{}, {"batch_size": 16, "epochs": 5}, {"early": True}], ids=str)
def test_a_network_never_sees_the_rows_it_leaves_out(options, m, monkeypatch):
    """Poison in the held-out rows reaches every network but the one that left them out: networks that are trained
    together, on mini-batches too, and one after the other, each on some of its rows. What a stack has in common are the
    number of its steps, which is given here, and the type of its moments."""
    monkeypatch.setattr(stack, "LEAST_NOISE", 0.0)
    monkeypatch.setattr(stack, "LEAST_RIDGE", 0.0)
    data = table(m)
    plain, poisoned, a, b = poisoned_fold(data, random(4, m), **options)
    ours, theirs = plain.members()[1], poisoned.members()[1]
    assert equal(ours.network, theirs.network)
    assert a.member.posterior.log_alpha == b.member.posterior.log_alpha
    assert torch.equal(a.member.posterior.Sigma_E, b.member.posterior.Sigma_E)
    # the member's last layer knows those rows only where they are many
    Phi = features(ours.network, data.X)
    a, b = (member.posterior.mean(Phi) for member in (ours, theirs))
    learned = not len(ours.unseen.keys)
    assert torch.equal(a, b) if not learned else not torch.allclose(a, b)
    assert learned or m == M


def poisoned_fold(data: Points, splits: Sequence[Split], *families: Family, **options) -> tuple:
    """Fits without and with poison in the rows that the second fold leaves out, and this fold of each."""
    held = torch.from_numpy(splits[1].held)
    X, T = data.X.clone(), data.T.clone()
    T[held] += 100.0
    X[held] = -X[held]
    poison = Points(X, Readings(T), data.weight)
    plain, poisoned = (fitted(each, splits, *families, **options) for each in (data, poison))
    for i, (a, b) in enumerate(zip(plain.folds, poisoned.folds, strict=True)):
        assert equal(a.member.network, b.member.network) == (i == 1)
    return plain, poisoned, plain.folds[1], poisoned.folds[1]


@pytest.mark.parametrize("family", [FOURIER, ADDITIVE, ENCODED[1]], ids=str)
def test_lengths_and_bins_never_see_the_rows_left_out(data, family):
    _, _, a, b = poisoned_fold(data, random(), family)
    Phi = features(a.member.network, data.X)
    assert torch.equal(a.member.posterior.mean(Phi), b.member.posterior.mean(Phi))
    assert torch.equal(a.member.posterior.variance_ratio(Phi), b.member.posterior.variance_ratio(Phi))


def test_the_process_is_one_member_of_every_row(data):
    """Its networks that leave rows out are for calibration alone."""
    fits = fitted(data, random(), FOURIER, LINEAR)
    assert [member.family for member in fits.members()] == [LINEAR] * 4 + [FOURIER]
    assert [fit.task.family for fit in fits.folds] == [FOURIER] * 4 + [LINEAR] * 4
    process = fits.members()[-1]
    assert not any(equal(process.network, fit.member.network) for fit in fits.folds[:4])
    assert not held_from(process, data).any()
    by_hand = by_evidence([moments(process.network, data, np.arange(M))], noise_prior=WEAK_NOISE_PRIOR)
    same_layer(process, by_hand[0], data)


def test_of_many_rows_the_process_learns_some_and_knows_which(data, monkeypatch):
    monkeypatch.setattr(crossfit, "LARGE_TABLE", 20)
    monkeypatch.setattr(crossfit, "PROCESS_ROWS", 12)
    fits = fitted(data, random(), FOURIER, LINEAR)
    process, seen = fits.members()[-1], crossfit.learned_by(fits.whole[-1].task)
    assert len(seen) == 12
    np.testing.assert_array_equal(held_from(process, data), ~np.isin(np.arange(M), seen))
    by_hand = by_evidence([moments(process.network, data, seen)], noise_prior=WEAK_NOISE_PRIOR)
    same_layer(process, by_hand[0], data)
    for fit in fits.folds[:4]:
        learned = crossfit.learned_by(fit.task)
        assert len(learned) == 12
        assert not np.isin(learned, fit.task.split.held).any()


def test_as_one_batch_or_one_by_one_the_networks_are_the_same(data):
    folds = fitted(data, [*random(), *blocks(data, 3)]).folds
    for fit in folds:
        _, alone = networks(data, [folds[0].task, fit.task])  # two are a stack as well
        near(fit.member.network, alone, 2e-2)  # in float32, whose rounding grows over the steps


@pytest.mark.parametrize("family", [NETWORKS[1], ENCODED[1], FOURIER], ids=str)
def test_on_several_cores_the_networks_are_the_same(data, monkeypatch, family):
    monkeypatch.setattr(train, "ROWS_PER_CORE", 1)
    one = fitted(data, random(8), family)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        three = fitted(data, random(8), family)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert len(one.folds) == 8
    for a, b in zip(one.folds, three.folds, strict=True):
        near(a.member.network, b.member.network, 1e-4)  # in other stacks, in float32


@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_held_out_points_meet_row_by_row(data, noise):
    """Two families, held out at random and in blocks: each point of each kind once."""
    families = (NETWORKS[1], LINEAR)
    fits = fitted(data, [*random(3), *blocks(data, 2)], *families, noise=noise)
    points = fits.held_out()
    assert points.mean.shape == (2, 2 * M, 2)
    assert points.kind.tolist() == ["random"] * M + ["blocked"] * M
    for offset in (0, M):
        assert torch.equal(points.readings.values[offset : offset + M], data.T)
        assert torch.equal(points.inputs[offset : offset + M], data.X)
        counts = 0.1 if offset else 1.0  # points of a block err together
        assert torch.equal(points.weight[offset : offset + M], counts * data.weight)
    seen = np.zeros((2, 2 * M), dtype=int)
    for fit in fits.folds:
        held = torch.from_numpy(fit.task.split.held)
        rows = moments(fit.member.network, data, fit.task.split.train)
        (posterior,) = by_evidence([rows], noise=noise, noise_prior=WEAK_NOISE_PRIOR)
        by_hand = posterior.predict(features(fit.member.network, data.X[held]))
        at = families.index(fit.task.family), held + (M if fit.task.split.kind == "blocked" else 0)
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
    fits = fitted(data, [*random(), *shells])
    points = fits.held_out()
    by_row = [(row, fit) for row in range(M) for fit in fits.folds[4:] if row in fit.task.split.held]
    assert len(by_row) == sum(len(split.held) for split in shells) > M
    assert points.kind.tolist() == ["random"] * M + ["shell"] * len(by_row)
    assert points.single.tolist() == [True] * M + [False] * len(by_row)
    rows = torch.tensor([row for row, _ in by_row])
    assert torch.equal(points.readings.values[M:], data.T[rows])
    assert torch.equal(points.weight[M:], 0.1 * data.weight[rows])  # points of a shell err together
    each = [fit.member.posterior.predict(features(fit.member.network, data.X[row : row + 1])) for row, fit in by_row]
    close(points.mean[0, M:], torch.cat([one.mean for one in each]))
    close(points.cost[0, M:], torch.cat([one.variance_ratio for one in each]))


@pytest.mark.parametrize("crossed", [True, False])
def test_points_know_how_far_outside_the_data_the_process_sees_them(data, crossed):
    """Beyond its largest cost at points held out alone, where there are such."""
    splits = [*(random() if crossed else []), *blocks(data, 3), *shell_splits(data.X.numpy(), np.arange(M))]
    points = fitted(data, splits, LINEAR, FOURIER, ADDITIVE).held_out()
    cost, noise = points.cost[1].numpy(), points.noise_var[1].numpy()
    if crossed:
        single = points.kind == "random"
        assert points.inside == {FOURIER: cost[single].max(), ADDITIVE: points.cost[2].numpy()[single].max()}
    inside = points.inside[FOURIER]
    far = [math.sqrt(math.prod(own)) * max(0.0, v - inside) for own, v in zip(noise, cost, strict=True)]
    # where it sees none, the logarithm of zero is that of a tiny number
    torch.testing.assert_close(points.log_far.exp(), torch.tensor(far, dtype=torch.float64), rtol=1e-9, atol=1e-100)
    assert any(far)
    points = fitted(data, splits, LINEAR, ADDITIVE).held_out()
    assert points.log_far is None
    assert set(points.inside) == {ADDITIVE}


def test_of_splits_that_were_given_those_rows_lie_outside_that_cost_more_than_any_left_out_alone(data):
    """The process that saw most rows says so: its last layer without each of them in turn, alpha as it was found.

    What lies outside counts as a region, whoever held it out: the future of a series errs together."""
    order = np.argsort(data.X[:, 0].numpy())
    splits = [Split(order[:n], order[n : n + 10], "given", n) for n in (15, 25, 30)]
    fits = fitted(data, splits, LINEAR, FOURIER, ADDITIVE)
    points = fits.held_out()
    rows, largest = data.take(torch.from_numpy(order[:30])), {}
    for family in (FOURIER, ADDITIVE):
        found = next(f.member for f in fits.folds if f.task.family == family and len(f.task.split.train) == 30)
        costs, posterior = [], found.posterior
        for i in range(30):
            rest = [j for j in range(30) if j != i]
            left = moments(found.network, rows, np.array(rest))
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


@pytest.mark.parametrize("noise", ["diagonal", "full"])
@pytest.mark.parametrize("m", [M, MANY])
def test_a_members_last_layer_is_the_one_that_was_judged_or_of_many_rows_knows_all(noise, m):
    """At the alpha and noise of its fold; the first networks are members, as many as wanted."""
    data = table(m)
    fits = fitted(data, random(4, m), noise=noise, n_members=3)
    assert (len(fits.members()), len(fits.folds)) == (3, 4)
    for member, fit in zip(fits.members(), fits.folds, strict=False):
        assert member.network is fit.member.network
        judged, held = fit.member.posterior, np.isin(np.arange(m), fit.task.split.held)
        assert member.posterior.log_alpha == judged.log_alpha
        assert torch.equal(member.posterior.Sigma_E, judged.Sigma_E)
        few = 10 * judged.determined > fit.task.split.n_groups
        assert few or m == MANY or noise == "full"
        np.testing.assert_array_equal(held_from(member, data), held & few)
        if few:
            assert member.posterior is judged
            assert member.unseen.weight.sum() == pytest.approx(float(data.weight[torch.from_numpy(held)].sum()))
        rows = fit.task.split.train if few else np.arange(m)
        own = moments(fit.member.network, data, rows)
        same_layer(member, Posterior(own, judged.log_alpha, judged.Sigma_E, noise, checked=False), data)


def test_members_learn_the_rows_they_were_judged_on_from_ten_groups_of_rows_for_each_determined_feature():
    data, (first, second) = table(MANY), random(2, MANY)
    network = fitted(data, [first, second]).folds[0].member.network
    (posterior,) = by_evidence([moments(network, data, first.train)], noise_prior=WEAK_NOISE_PRIOR)
    Phi, w = features(network, data.X[first.train])[:, :-1], data.weight[first.train]
    centred = w.sqrt()[:, None] * (Phi - (w @ Phi) / w.sum())
    values = torch.linalg.eigvalsh(centred.mT @ centred)
    enough = math.ceil(10 * float((values / (values + math.exp(-posterior.log_alpha))).sum()))
    assert 10 < enough < len(first.train)
    for n_groups in (enough, enough - 1):
        member = fitted(data, [replace(first, n_groups=n_groups), second]).members()[0]
        assert equal(member.network, network)
        assert held_from(member, data).any() == (n_groups < enough)
        seen = data.weight if n_groups == enough else w
        assert float(member.posterior.statistics.count) == pytest.approx(float(seen.sum()))


def test_without_random_splits_members_are_trained_on_every_row(data):
    fits = fitted(data, blocks(data, 3), n_members=2)
    members = fits.members()
    assert len(members) == 2
    assert [fit.task.split.kind for fit in fits.folds] == ["blocked"] * 3
    for i, member in enumerate(members):
        assert not held_from(member, data).any()
        (expected,) = by_evidence([moments(member.network, data, np.arange(M))], noise_prior=WEAK_NOISE_PRIOR)
        assert member.posterior.log_alpha == pytest.approx(expected.log_alpha)
        close(member.posterior.weights, expected.weights)
        task = Task(Split(np.arange(M), np.empty(0, int), "all", M), NETWORKS[1], 7 + 1000 * i)
        again, _ = networks(data, [task, task])
        near(member.network, again, 2e-3)  # in a stack, in float32
    assert not equal(members[0].network, members[1].network)


def test_networks_of_every_family_start_alike_and_no_two_of_a_family(data):
    tasks = [fit.task for fit in fitted(data, random(), 0.03, 3.0, epochs=0).folds]
    made = networks(data, tasks, epochs=0)
    for i in range(4):
        assert equal(made[i], made[4 + i])
        start = MLP(1, (4,), generator=torch.Generator().manual_seed(7 + i)).float()  # the type they are trained in
        assert equal(parts_of(made[i])[0], start)
        assert not equal(made[i], made[(i + 1) % 4])


@pytest.mark.parametrize("crossed", [True, False])
def test_a_mixture_has_members_of_every_family_and_its_networks_are_trained_as_one_batch(data, crossed):
    families = [Network(0.3), Network(30.0), ENCODED[1], FOURIER, LINEAR, ADDITIVE]
    splits = [*(random(3) if crossed else []), *blocks(data, 2)]
    fits = fitted(data, splits, *families, n_members=2)
    of = lambda fits, family: [member for member in fits.members() if member.family == family]
    assert Counter(member.family for member in fits.members()) == {s: 1 if s == FOURIER else 2 for s in families}
    for family in families:
        alone = fitted(data, splits, family, n_members=2)
        for a, b in zip(of(alone, family), of(fits, family), strict=True):
            near(a.network, b.network, 2e-3)  # in float32
    # one family is a linear regression on the inputs, by all rows: they are many for one feature
    last = of(fits, LINEAR)[-1]
    Phi = torch.cat([data.X, torch.ones(M, 1, dtype=torch.float64)], 1)
    close(features(last.network, data.X), Phi)
    ridge = torch.diag(torch.tensor([math.exp(-last.posterior.log_alpha), 0.0], dtype=torch.float64))
    wPhi = data.weight[:, None] * Phi
    close(last.posterior.weights, torch.linalg.solve(Phi.mT @ wPhi + ridge, wPhi.mT @ data.T), loose=100)
    # at every point the networks of all families that left it out
    points = fits.held_out()
    assert points.families == tuple(families)
    assert points.mean.shape == (6, (2 if crossed else 1) * M, 2)
    for i, family in enumerate(families):
        own = replace(fits, folds=[fit for fit in fits.folds if fit.task.family == family]).held_out()
        assert torch.equal(points.mean[i], own.mean[0])
        assert torch.equal(points.of(family).cost, own.cost)


@pytest.mark.parametrize("prior", [WEAK_NOISE_PRIOR, NO_NOISE_PRIOR])
def test_the_prior_on_the_noise_is_that_of_the_settings(data, prior):
    made = settings()
    made = replace(made, layer=replace(made.layer, noise_prior=prior))
    other = NO_NOISE_PRIOR if prior is WEAK_NOISE_PRIOR else WEAK_NOISE_PRIOR
    for fit in cross_fit(Rows(data), random(), Architecture(made), Run()).folds:
        statistics, found = [moments(fit.member.network, data, fit.task.split.train)], fit.member.posterior
        close(found.Sigma_E, by_evidence(statistics, noise_prior=prior)[0].Sigma_E)
        wrong = by_evidence(statistics, noise_prior=other)[0].Sigma_E
        assert not torch.allclose(found.Sigma_E, wrong, rtol=1e-3)


def test_folds_keep_copies_together_unless_a_splitter_is_given(data):
    copies = np.arange(M) // 2
    rows = replace(Rows(data), copies=copies)
    for options in ({}, {"n_members": 10}, {"calibration": "alpha"}, {"backbone": nn.Linear(1, 3)}):
        parameters = BLLRegressor(**options).get_params(deep=False)
        splits = folds_for(resolve(parameters, Shape((M, 1), n_groups=M // 2), seed=0), rows)
        assert splits
        for split in splits:
            assert not set(copies[split.train]) & set(copies[split.held])
    given = resolve(BLLRegressor(calibration=KFold(M)).get_params(deep=False), Shape((M, 1)), seed=0)
    splits = folds_for(given, rows, splitter=KFold(M))
    assert [split.held.tolist() for split in splits] == [[i] for i in range(M)]
    assert {split.n_groups for split in splits} == {M - 1}
