"""Stacks with the passes written out: the gradients of autograd, and the last layers of slow forms."""

import math

import numpy as np
import pytest
import torch
from helpers import close

from lastlayer.bayes.evidence import by_evidence
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Readings, Statistics
from lastlayer.data.rows import Points, Rows
from lastlayer.networks.mlp import ACTIVATIONS, InputSkip, PiecewiseEncoding, StackedMLP, bins_of, encoded
from lastlayer.training import (
    FullBatch,
    KnownNoise,
    Optimizer,
    Plateau,
    Profiled,
    RunningPosterior,
    StackedNetworks,
    train,
)
from lastlayer.training import stack as stack_module

S, M, D = 3, 40, 2
PRECISIONS = torch.tensor([0.0, 0.3, 30.0], dtype=torch.float64)
PARTS = [np.arange(30), np.arange(7, M), np.arange(0, M, 2)]


def network(activation="tanh", hidden=(6, 5), dtype=torch.float64, skip=True, encodings=()):
    generators = [torch.Generator().manual_seed(seed) for seed in range(S)]
    n_inputs = len(encodings[0].column) if encodings else D
    stack = StackedMLP(n_inputs, hidden, generators=generators, activation=activation).to(dtype)
    if encodings:
        return encoded(PiecewiseEncoding.stacked(encodings), stack, D).to(dtype)
    return InputSkip(stack) if skip else stack


def table(generator, q: int = 1, kind: str = "complete", weighted: bool = False) -> Points:
    X = torch.randn(M, D, generator=generator, dtype=torch.float64)
    T = torch.cat([torch.sin(2 * X[:, :1]), X[:, :1] * X[:, 1:]], 1)[:, :q]
    T = T + 0.1 * torch.randn(M, q, generator=generator, dtype=torch.float64)
    known = None
    if kind in ("missing", "both"):
        T[torch.rand(M, q, generator=generator) < 0.3] = torch.nan
    if kind in ("known", "both"):
        known = 0.2 * torch.rand(M, q, generator=generator, dtype=torch.float64)
    weight = torch.rand(M, generator=generator, dtype=torch.float64) + 0.2 if weighted else None
    return Points.of(X, T, weight, known)


def by_weights(data: Points) -> Rows:
    """All rows for each network, with weights of zero where it does not have them."""
    weight = torch.zeros(S, M, dtype=torch.float64)
    for own, part in zip(weight, PARTS, strict=True):
        own[torch.from_numpy(part)] = 1.0 if data.weight is None else data.weight[torch.from_numpy(part)]
    return Rows(Points(data.X, data.readings, weight))


def precisions(data: Points) -> torch.Tensor:
    return PRECISIONS if data.readings.complete else torch.zeros_like(PRECISIONS)


def stacked(net, data: Points, **options) -> StackedNetworks:
    return StackedNetworks(net, data, PARTS, prior_precision=precisions(data), **options)


def slow_form(net, data: Points, **options) -> FullBatch:
    q = data.T.shape[1]
    known = data.readings.known is not None
    objective = (
        KnownNoise(q, bias_prior="flat", shape=(S,))
        if known
        else Profiled(**{"bias_prior": "flat", "shape": (S,)} | options)
    )
    return FullBatch(net, objective, by_weights(data), prior_precision=precisions(data))


def compare(fast: StackedNetworks, slow: FullBatch) -> None:
    rows = slow.rows.main
    read = torch.ones_like(rows.T) if rows.readings.read is None else rows.readings.read
    # the slow form is per target of the output with most, the fast one per row
    factor = ((rows.weight[..., None] * read).sum(1).amax(-1) / rows.weight.sum(1))[:, None, None]
    for _ in range(3):  # later with another alpha and features that are centred
        with torch.no_grad():
            slow.objective.log_alpha.copy_(fast.log_alpha)
            if isinstance(slow.objective, KnownNoise):
                slow.objective.log_sigma_e.copy_(fast.noise_var.log() / 2)
        expected, got = slow.gradient(None, 1.0), fast.gradient(None, 1.0)
        if fast.readings is None:
            close(got, expected)
        for p, like in zip(fast.parameters, slow.network.parameters(), strict=True):
            close(p.grad, factor * like.grad)
            like.grad = None


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("skip", [False, True])
def test_value_and_gradient_are_those_of_autograd(generator, activation, skip):
    data = table(generator)
    compare(stacked(network(activation, skip=skip), data), slow_form(network(activation, skip=skip), data))


@pytest.mark.parametrize("kind", ["complete", "missing", "known", "both"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bins", [False, True])
def test_of_every_kind_of_rows(generator, kind, weighted, bins):
    data = table(generator, 2, kind, weighted)
    encodings = (
        [PiecewiseEncoding.of(data.X[torch.from_numpy(part)], bins_of(data.X)) for part in PARTS] if bins else ()
    )
    compare(stacked(network(encodings=encodings), data), slow_form(network(encodings=encodings), data))


@pytest.mark.parametrize("noise", ["diagonal", "full"])
@pytest.mark.parametrize("bias_prior", ["flat", "shared"])
def test_of_every_noise_and_prior(generator, noise, bias_prior):
    data, options = table(generator, 2), {"noise": noise, "bias_prior": bias_prior}
    compare(stacked(network(hidden=(5, 4, 3)), data, **options), slow_form(network(hidden=(5, 4, 3)), data, **options))


@pytest.mark.parametrize("kind", ["complete", "missing", "known", "both"])
def test_last_layers_of_features_that_stay_reach_the_maximum_of_the_evidence(generator, kind):
    data, net = table(generator, 2, kind), network(hidden=(2,))
    fast = stacked(net, data)
    for _ in range(400):
        fast.gradient(None, 1.0)
    for i, part in enumerate(PARTS):
        rows, member = Rows(data.take(torch.from_numpy(part))), InputSkip(net.network.member(i))
        of = rows.main.statistics if rows.learned else rows.by_noise
        (found,) = by_evidence([of(member)])
        assert float(fast.log_alpha[i]) == pytest.approx(float(found.log_alpha), abs=2e-3)
        cov = fast.frozen.noise_cov[i]
        noise = cov.diagonal() if kind == "complete" else cov[:, 0, 0]
        torch.testing.assert_close(noise, found.Sigma_E.diagonal(), rtol=2e-3, atol=1e-6)


def test_batches_have_the_last_layers_of_a_running_posterior(generator):
    """Of the same batches, in a slow form of the statistics."""
    data, net = table(generator, 2), network()
    parts = [np.arange(M)] * S
    fast = StackedNetworks(net, data, parts, prior_precision=PRECISIONS, batch_size=13, seed=3)
    running = RunningPosterior(torch.full((S,), float(M), dtype=torch.float64), M)
    for step in range(40):
        fast.gradient(None, 0.5)
        at = min(step % 4 * 10, M - 10)
        batch = fast.order[:, at : at + 10]  # ten rows of thirty: no network would have more than thirteen
        phi = net(data.X[batch])
        part = Statistics.from_linear_features(phi.detach(), data.T[batch])
        expected = running.absorb(part, 10, drift=0.5)
        close(fast.frozen.weights, expected.weights, loose=100)
        close(fast.frozen.inverse, expected.inverse, loose=100)
        close(fast.log_alpha, running.now.log_alpha)
        seen = set(batch[0].tolist()) if step % 4 == 0 else seen | set(batch[0].tolist())
        assert step % 4 != 3 or len(seen) == M


@pytest.mark.parametrize("other", ["LEAST_RIDGE", "LEAST_NOISE"])
def test_float32_is_left_where_it_does_not_resolve_noise_or_alpha(other, generator, monkeypatch):
    """Each limit alone is enough where the fit is exact, and neither acts on noisy rows."""
    monkeypatch.setattr(stack_module, other, 0.0)
    data = table(generator)
    exact = Points(data.X, Readings(data.X[:, :1] + data.X[:, 1:]))  # linear in inputs that are passed on
    coarse, fine = (stacked(network(dtype=torch.float32), x) for x in (data, exact))
    for problem in [coarse, fine] * 30:
        problem.gradient(None, 1.0)
    assert not coarse.exact
    assert fine.exact
    fine.gradient(None, 1.0)
    assert float(fine.frozen.noise_cov.max()) < 1e-9


@pytest.mark.parametrize("kind", ["complete", "missing"])
def test_float32_trains_to_the_evidence_of_float64(generator, kind):
    data = table(generator, 2, kind)
    ends = [
        train(stacked(network(dtype=dtype), data), Optimizer(2e-2, 60)).nlml[-1]
        for dtype in (torch.float32, torch.float64)
    ]
    assert ends[0] == pytest.approx(ends[1], abs=2e-4)


def test_a_network_that_is_lost_leaves_the_others_alone(generator):
    data = table(generator)
    lost, whole = network(), network()
    with torch.no_grad():
        lost.network.weights[0][1] = math.nan
    record = train(stacked(lost, data), Optimizer(2e-2, 30))
    train(stacked(whole, data), Optimizer(2e-2, 30))
    for a, b in zip(lost.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])
    assert record.setbacks == 2  # at every look: after 25 and 30 steps


@pytest.mark.parametrize("kind", ["complete", "missing"])
def test_watched_errors_are_those_of_the_present_networks(generator, kind):
    data, net = table(generator, 2, kind), network()
    held = [np.setdiff1d(np.arange(M), part)[:7] for part in PARTS]
    problem = stacked(net, data, watched=held)
    problem.gradient(None, 1.0)
    expected = []
    for i, (part, rows) in enumerate(zip(PARTS, held, strict=True)):
        member = InputSkip(net.network.member(i))
        seen, others = (data.take(torch.from_numpy(r)) for r in (part, rows))
        layer = Posterior(seen.statistics(member), 4.0)  # the first log alpha
        errors = others.readings.values - layer.mean(affine_features(member(others.X)).detach())
        expected.append(errors.square().nanmean().log())
    assert problem.watch() == pytest.approx(float(torch.stack(expected).mean()), rel=1e-6)
    with torch.no_grad():
        net.network.weights[0][1] = math.nan
    assert problem.watch() == pytest.approx(float(expected[0] + expected[2]) / 2, rel=1e-6)  # without what is lost


def test_rows_that_watch_are_taken_from_all_over_the_table(generator, monkeypatch):
    """Rows are sorted by their inputs: the first ones would all be of one end."""
    monkeypatch.setattr(stack_module, "MOST_WATCHED", 5)
    problem = stacked(network(), table(generator), watched=[np.arange(20)] * S)
    assert [rows.tolist() for rows in problem.watched] == [[0, 4, 8, 12, 16]] * S


def test_the_rate_stays_until_the_score_does_and_then_falls(generator):
    scores = iter([1.0, 0.5, 0.2, *[0.1] * 100])
    plateau = Plateau(lambda: next(scores), least=30, patience=30)
    history = train(stacked(network(), table(generator)), Optimizer(2e-2, 300), plateau=plateau)
    rates = np.array(history.learning_rate)
    assert history.best_epoch < 300
    rates = rates[: history.best_epoch]
    assert rates[0] == pytest.approx(2e-3)
    top = np.flatnonzero(rates == 2e-2)
    assert top[0] == 9
    assert (np.diff(rates[top[-1] :]) < 0).all()
    assert len(rates) - top[-1] == pytest.approx(plateau.share * len(rates), abs=2)
