"""Stacks with the passes written out: the same numbers as autograd has, on all rows and on mini-batches."""

import math

import pytest
import torch
from helpers import close

from lastlayer.bayes.readings import Readings
from lastlayer.bayes.statistics import Statistics
from lastlayer.data.rows import Points, Rows
from lastlayer.networks.mlp import ACTIVATIONS, InputSkip, StackedMLP
from lastlayer.training import (
    FrozenLayer,
    FullBatch,
    MiniBatches,
    Optimizer,
    Profiled,
    RunningPosterior,
    StackedBatches,
    StackedNetworks,
    UpdateSchedule,
    train,
)
from lastlayer.training.stack import StackPass

S, M, D = 3, 40, 2
PRECISIONS = torch.tensor([0.0, 0.3, 30.0], dtype=torch.float64)


def network(activation: str = "tanh", hidden=(6, 5), dtype=torch.float64, skip: bool = True):
    generators = [torch.Generator().manual_seed(seed) for seed in range(S)]
    stack = StackedMLP(D, hidden, generators=generators, activation=activation).to(dtype)
    return InputSkip(stack) if skip else stack


def table(generator, q: int = 1) -> Points:
    X = torch.randn(M, D, generator=generator, dtype=torch.float64)
    T = torch.cat([torch.sin(2 * X[:, :1]), X[:, :1] * X[:, 1:]], 1)[:, :q]
    return Points(X, Readings(T + 0.1 * torch.randn(M, q, generator=generator, dtype=torch.float64)))


def folds(data: Points) -> tuple[Points, Points]:
    """The same rows of each network twice: all rows with weights of zero, and its own rows filled up to one length."""
    weight = torch.ones(S, M, dtype=torch.float64)
    weight[0, 30:], weight[1, :7] = 0, 0
    weight[2] = torch.arange(M) % 3 / 2  # fractions and zeros too
    longest = int((weight > 0).sum(-1).max())
    order = (weight > 0).double().argsort(dim=-1, descending=True, stable=True)[:, :longest]
    return Points(data.X, Readings(data.T), weight), Points(
        data.X[order], Readings(data.T[order]), weight.gather(1, order)
    )


def alone(net, data: Points, **options) -> FullBatch:
    return FullBatch(net, Profiled(bias_prior="flat", shape=(S,), **options), Rows(data), prior_precision=PRECISIONS)


def stacked(net, data: Points, **options) -> StackedNetworks:
    return StackedNetworks(net, Profiled(bias_prior="flat", shape=(S,), **options), data, prior_precision=PRECISIONS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("skip", [False, True])
def test_value_and_gradient_are_those_of_autograd(generator, activation, skip):
    every, own = folds(table(generator))
    slow, fast = alone(network(activation, skip=skip), every), stacked(network(activation, skip=skip), own)
    for _ in range(2):  # the second time with features that were centred
        close(fast.gradient(None, 1.0), slow.gradient(None, 1.0))
        for p, expected in zip(fast.parameters, slow.parameters, strict=True):
            close(p.grad, expected.grad)
            expected.grad = None
    close(fast.evaluate(), slow.evaluate())
    close(fast.penalty(), slow.penalty())


@pytest.mark.parametrize("hidden", [(4,), (6, 5), (5, 4, 3)], ids=str)
@pytest.mark.parametrize("noise", ["diagonal", "full"])
@pytest.mark.parametrize("bias_prior", ["flat", "shared"])
def test_training_ends_where_autograd_ends(generator, hidden, noise, bias_prior):
    every, own = folds(table(generator, q=2))
    ends = []
    for make, data in ((FullBatch, Rows(every)), (StackedNetworks, own)):
        net = network(hidden=hidden)
        objective = Profiled(noise=noise, bias_prior=bias_prior, shape=(S,))
        record = train(make(net, objective, data, prior_precision=PRECISIONS), Optimizer(2e-2, 60))
        ends.append((torch.cat([p.detach().flatten() for p in net.parameters()]), record.nlml, objective.log_alpha))
    (slow, slow_nlml, slow_alpha), (fast, fast_nlml, fast_alpha) = ends
    torch.testing.assert_close(fast, slow, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(fast_alpha.detach(), slow_alpha.detach(), rtol=1e-8, atol=1e-8)
    assert fast_nlml == pytest.approx(slow_nlml, rel=1e-9)


def test_float32_networks_have_float64_moments(generator):
    """Columns that are collinear but for 1e-6: products in float32 could not tell them from singular ones."""
    data = table(generator)
    X = torch.cat([data.X[:, :1], data.X[:, :1] + 1e-6 * data.X[:, 1:]], 1)
    net = network(dtype=torch.float32)
    passes = StackPass(net, M, 1)
    with torch.no_grad():
        passes.load(X, data.T, None)
        got = passes.statistics()
        exact = Statistics.from_linear_features(net(X.float()).double(), data.T.expand(S, M, 1))
        inputs = Statistics.from_linear_features(X, data.T)
    k = got.n_linear
    torch.testing.assert_close(got.scatter[:, :-3, :-3], exact.scatter[:, :-3, :-3], rtol=1e-5, atol=1e-5)
    close(got.scatter[0, k - D :, k - D :], inputs.scatter)
    assert float(torch.linalg.eigvalsh(got.scatter[0, k - D : k, k - D : k])[0]) > 1e-12


@pytest.mark.parametrize("bias_prior", ["flat", "shared"])
@pytest.mark.parametrize("q", [1, 2])
def test_the_gradient_of_rows_is_one_product(generator, bias_prior, q):
    phi, T = torch.randn(S, 30, 4, generator=generator).double(), torch.randn(S, 30, q, generator=generator).double()
    statistics = Statistics.from_linear_features(phi, T)
    frozen = FrozenLayer.of(statistics, torch.full((S,), 2.0).double(), noise="full", bias_prior=bias_prior)
    centre = torch.randn(S, 4 + q, generator=generator).double()
    other = torch.randn(S, 9, 4, generator=generator).double()
    T = torch.randn(S, 9, q, generator=generator).double()
    rows = torch.cat([torch.cat([other, T], -1) - centre[:, None], torch.ones(S, 9, 1).double()], -1)
    expected = frozen.rows(other, T).gradient
    close(rows @ frozen.gradient_map(centre, 4), expected)
    close(rows @ frozen.gradient_map(centre, 3, 2.5), 2.5 * expected[..., :3])
    close(frozen.nlml, frozen.bound(statistics))


@pytest.mark.parametrize("sizes", [M, 16])
def test_batches_are_those_of_autograd(generator, sizes):
    """One step of one running posterior, with every row in the term of the log-determinant."""
    data, _ = folds(table(generator))
    ends = []
    for make in (MiniBatches, StackedBatches):
        net = network()
        running = RunningPosterior(data.weight.sum(-1), M, schedule=UpdateSchedule(logdet_share=1))
        source = Points(data.X, Readings(data.T), data.weight)
        problem = make(net, source, running, batch_size=sizes, prior_precision=PRECISIONS)
        batch = next(iter(problem.steps(0, 0)))
        loss = problem.gradient(batch, 1.0)
        ends.append((loss, [p.grad.clone() for p in problem.parameters]))
    (slow, slow_gradient), (fast, fast_gradient) = ends
    if sizes == M:  # otherwise both are estimates, one by the weight of the batch, one by its number of rows
        close(fast, slow)
    for got, expected in zip(fast_gradient, slow_gradient, strict=True):
        close(got, expected)


def test_a_network_that_is_lost_leaves_the_others_alone(generator):
    _, own = folds(table(generator))
    lost, whole = network(), network()
    with torch.no_grad():
        lost.network.weights[0][1] = math.nan
    record = train(stacked(lost, own), Optimizer(2e-2, 30))
    train(stacked(whole, own), Optimizer(2e-2, 30))
    for a, b in zip(lost.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])
    assert record.setbacks == 2  # at every look: after 25 and 30 steps
