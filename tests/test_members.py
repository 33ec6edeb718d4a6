"""Many networks trained as one batch: each ends where it would end alone, and none touches another."""

import copy
import math
from functools import partial
from threading import Event

import pytest
import torch
from helpers import Losses, close
from torch import nn

from lastlayer.bayes.statistics import Readings
from lastlayer.data.rows import Points, Rows
from lastlayer.networks.mlp import MLP, InputSkip, StackedMLP, neg_log_hidden_prior
from lastlayer.training import FullBatch, Optimizer, Profiled, TrainingHistory, Validation, train

SEEDS = (3, 1, 4)
HIDDEN = (5, 4)


@pytest.fixture
def data(generator) -> Points:
    X = torch.rand(30, 2, generator=generator, dtype=torch.float64) * 6 - 3
    clean = torch.stack([torch.sin(X[:, 0]), X[:, 0] * X[:, 1] / 3, X[:, 1].cos()], 1)
    return Points(X, Readings(clean + 0.1 * torch.randn(30, 3, generator=generator, dtype=torch.float64)))


def stacked(seeds=SEEDS, *, activation: str = "tanh") -> StackedMLP:
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return StackedMLP(2, HIDDEN, generators=generators, activation=activation)


def fit(
    network: nn.Module,
    data: Points,
    *,
    alone=False,
    weight=None,
    prior_precision=0.3,
    epochs=20,
    rate=2e-2,
    noise="diagonal",
    bias_prior="flat",
    **options,
) -> TrainingHistory:
    """A stack, or one network alone."""
    shape = () if alone else (len(next(iter(network.parameters()))),)
    weight = torch.ones(*shape, len(data.X), dtype=torch.float64) if weight is None else weight
    problem = FullBatch(
        network,
        Profiled(noise=noise, bias_prior=bias_prior, shape=shape),
        Rows(Points(data.X, Readings(data.T), weight)),
        prior_precision=torch.as_tensor(prior_precision, dtype=torch.float64).expand(shape),
    )
    return train(problem, Optimizer(learning_rate=rate, max_epochs=epochs), **options)


fit_alone = partial(fit, alone=True)


def mlp(i: int, **options) -> MLP:
    """What member i starts as."""
    return MLP(2, HIDDEN, generator=torch.Generator().manual_seed(SEEDS[i]), **options)


def near(network: nn.Module, other: nn.Module, tolerance: float = 1e-8) -> None:
    torch.testing.assert_close(network.state_dict(), other.state_dict(), rtol=tolerance, atol=tolerance)


def same_member(stack: StackedMLP, i: int, alone: nn.Module, tolerance: float = 1e-8) -> None:
    near(stack.member(i), alone, tolerance)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_a_member_is_the_network_of_its_generator(activation):
    stack = stacked(activation=activation)
    X = torch.randn(7, 2, dtype=torch.float64)
    for i, seed in enumerate(SEEDS):
        alone = MLP(2, HIDDEN, activation=activation, generator=torch.Generator().manual_seed(seed))
        same_member(stack, i, alone, tolerance=0.0)
        close(stack(X)[i], alone(X))
        close(InputSkip(stack)(X)[i], InputSkip(alone)(X))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_member_is_a_copy_of_the_type_of_its_stack(dtype):
    stack = stacked().to(dtype)
    member = stack.member(0)
    before = copy.deepcopy(member)
    assert {p.dtype for p in member.parameters()} == {dtype}
    nn.init.zeros_(stack.weights[0])
    near(member, before, tolerance=0.0)


def test_the_hidden_prior_is_the_normal_density_by_hand():
    """-log N(0, 1 / fan_in) of weights and -log N(0, 1) of biases, up to the constant of the normal density."""
    stack = stacked()
    with torch.no_grad():
        for p in stack.parameters():
            p += torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = neg_log_hidden_prior(stack.requires_grad_(False))
    assert together.shape == (3,)
    for i in range(3):
        layers = [layer for layer in stack.member(i) if isinstance(layer, nn.Linear)]
        by_hand = 0.0
        for layer in layers:
            for values, std in ((layer.weight, layer.in_features**-0.5), (layer.bias, 1.0)):
                zero = torch.zeros((), dtype=torch.float64)
                normal = torch.distributions.Normal(zero, zero + std)
                by_hand += float((normal.log_prob(zero) - normal.log_prob(values.detach())).sum())
        assert float(together[i]) == pytest.approx(by_hand, rel=1e-12)
        close(neg_log_hidden_prior(stack.member(i)), together[i])
        close(neg_log_hidden_prior(InputSkip(stack.member(i))), together[i])
    close(neg_log_hidden_prior(InputSkip(stack)), together)


def test_the_hidden_prior_of_other_networks_counts_what_reaches_a_unit():
    conv = nn.Conv2d(3, 4, 2)
    expected = 0.5 * (3 * 2 * 2 * conv.weight.square().sum() + conv.bias.square().sum())
    close(neg_log_hidden_prior(conv).float(), expected)
    assert float(neg_log_hidden_prior(MLP(3, ()))) == 0.0


@pytest.mark.parametrize("options", [{}, {"noise": "full"}, {"bias_prior": "shared"}, {"skip": True}], ids=str)
def test_every_network_ends_where_it_ends_alone(data, options):
    """By itself, without a stack: the same start, rates, rows and priors."""
    options = dict(options)
    skips = options.pop("skip", False)
    precisions = (0.0, 0.3, 30.0)
    stack = stacked()
    record = fit(InputSkip(stack) if skips else stack, data, prior_precision=precisions, **options)
    for i, precision in enumerate(precisions):
        alone = mlp(i)
        fit_alone(InputSkip(alone) if skips else alone, data, prior_precision=precision, **options)
        same_member(stack, i, alone)
    assert len(record.nlml) == 20
    assert record.nlml[-1] < record.nlml[0]
    rate = Optimizer(learning_rate=2e-2, max_epochs=20).rate
    assert record.learning_rate == [rate(epoch) for epoch in range(20)]
    assert (record.stopped, record.setbacks) == ("max_epochs", 0)


def test_rows_of_weight_zero_are_not_there(data, generator):
    stack, weight = stacked(), torch.ones(3, 30, dtype=torch.float64)
    cuts = [slice(0, 8), slice(20, 30), slice(0, 0)]
    for row, cut in zip(weight, cuts, strict=True):
        row[cut] = 0
    fit(stack, data, weight=weight)
    for i in range(3):
        alone = mlp(i)
        fit_alone(alone, data.take(weight[i] > 0))
        same_member(stack, i, alone)
    poisoned = stacked()
    T = data.T.clone()
    T[:8] = 1e3
    fit(poisoned, Points(data.X, Readings(T)), weight=weight)
    same_member(poisoned, 0, stack.member(0), tolerance=0.0)
    assert not torch.equal(poisoned.weights[0][1], stack.weights[0][1])


def test_weights_count_copies(data):
    copies = torch.arange(30) % 3
    weighted, repeated = stacked(), stacked()
    fit(weighted, data, weight=copies.double().expand(3, 30))
    rows = torch.repeat_interleave(torch.arange(30), copies)
    fit(repeated, data.take(rows))
    near(weighted, repeated)


def test_a_stronger_prior_leaves_smaller_weights(data):
    stack = stacked((0, 0, 0, 0))
    fit(stack, data, prior_precision=(0.0, 1.0, 30.0, 1000.0), epochs=100)
    size = neg_log_hidden_prior(stack).tolist()
    assert size == sorted(size, reverse=True)
    assert size[-1] < 0.1 * size[0]


@pytest.mark.parametrize("epochs", [1, 10, 26])
@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_a_last_step_too_far_is_taken_back(data, epochs, noise):
    """The loss belongs to the state before the step: 1e200 is a finite weight, but two layers of it are not."""
    stack = stacked(activation="relu")
    record = fit(stack, data, epochs=epochs, rate=1e200, noise=noise)
    assert record.setbacks >= 3
    with torch.no_grad():
        for i in range(3):
            loss = Profiled(bias_prior="flat", noise=noise)(stack.member(i)(data.X), data.T, None)
            assert math.isfinite(float(loss))


@pytest.mark.parametrize("noise", ["diagonal", "full"])
@pytest.mark.parametrize("poison", [math.nan, 1e200])
def test_a_network_that_is_beyond_help_does_not_touch_the_others(data, poison, noise):
    lost, whole = stacked(activation="relu"), stacked(activation="relu")
    with torch.no_grad():
        for W in lost.weights:
            W[1] = poison
    record = fit(lost, data, epochs=60, noise=noise)
    fit(whole, data, epochs=60, noise=noise)
    for i in (0, 2):
        same_member(lost, i, whole.member(i), tolerance=0.0)
    assert record.setbacks == 3  # at every look: after 25, 50 and 60 epochs
    assert math.isfinite(record.nlml[-1])


class Trips(nn.Module):
    """The features of one member are wrong in one pass."""

    def __init__(self, stack: StackedMLP, member: int, at: int):
        super().__init__()
        self.stack, self.member, self.at, self.passes = stack, member, at, 0

    def forward(self, x):
        self.passes += 1
        phi = self.stack(x)
        if self.passes != self.at:
            return phi
        wrong = torch.zeros(len(phi), 1, 1, dtype=phi.dtype)
        wrong[self.member] = math.nan
        return phi + wrong


def test_after_a_setback_a_network_goes_on_alone_in_smaller_steps(data):
    tripped, whole = stacked(), stacked()
    record, undisturbed = fit(Trips(tripped, 1, at=30), data, epochs=100), fit(whole, data, epochs=100)
    assert record.setbacks == 1
    assert undisturbed.setbacks == 0
    for i in (0, 2):
        same_member(tripped, i, whole.member(i), tolerance=1e-9)  # a step is taken back and forth: rounding
    at_25 = stacked()
    fit(at_25, data, epochs=100, stop=_after(25))
    assert all(torch.isfinite(p).all() for p in tripped.parameters())
    with torch.no_grad():
        losses = [Profiled(bias_prior="flat")(net.member(1)(data.X), data.T, None) for net in (at_25, tripped)]
    assert float(losses[1]) < float(losses[0])  # better than where it stepped back to


class _after(Event):
    """Set once it was asked so often."""

    def __init__(self, times: int):
        super().__init__()
        self.left = times

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_stop_leaves_the_networks_as_they_are(data):
    stack, same = stacked(), stacked()
    record = fit(stack, data, epochs=40, stop=_after(7))
    assert (record.stopped, len(record.nlml)) == ("interrupted", 7)
    longer = fit(same, data, epochs=40)
    assert longer.nlml[:7] == record.nlml
    assert all(torch.isfinite(p).all() for p in stack.parameters())


def script(scores: list, patience: int) -> Validation:
    """Scores of every member read from lists, one entry a question, and the last one again and again."""
    columns = iter(torch.tensor(scores, dtype=torch.float64).unbind(-1))
    last = torch.tensor(scores, dtype=torch.float64)[..., -1]
    return Validation(lambda: next(columns, last), every=5, patience=patience)


SCORES = [[3.0, 1.0, 2.0, 2.0, 2.0, 2.0], [5.0, 4.0, 3.0, 2.0, 1.0, 0.5], [1.0, math.nan, 3.0, 4.0, 4.0, 4.0]]


def test_every_network_of_a_stack_ends_in_its_own_best_state(data):
    """What early stopping makes of one network alone, it makes of it in a stack."""
    stack = stacked()
    record = fit(stack, data, epochs=25, validation=script(SCORES, 100))
    assert record.validation_epoch == [0, 5, 10, 15, 20, 25]
    for i, best in enumerate((5, 25, 0)):
        alone = mlp(i)
        own = fit_alone(alone, data, epochs=25, validation=script(SCORES[i], 100))
        assert own.best_epoch == best
        assert own.validation_epoch == record.validation_epoch
        same_member(stack, i, alone)
    assert record.best_epoch == 25


def test_a_stack_stops_once_all_of_its_networks_have(data):
    stack, scores = stacked(), [[3.0, 1.0, 2.0], [4.0, 3.0, 5.0], [1.0, 2.0, 2.0]]
    record = fit(stack, data, epochs=100, validation=script(scores, 10))
    assert (record.stopped, record.validation_epoch) == ("early_stopping", [0, 5, 10, 15])
    assert len(record.nlml) == 15
    for i in range(3):
        alone = mlp(i)
        own = fit_alone(alone, data, epochs=100, validation=script(scores[i], 10))
        assert own.stopped == "early_stopping"
        same_member(stack, i, alone)


def test_a_network_that_has_stopped_does_not_come_back(data):
    """A score that falls after the patience has run out is not looked at, also while others go on."""
    stack = stacked()
    scores = [[1.0, 2.0, 2.0, 0.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0]]
    fit(stack, data, epochs=20, validation=script(scores, 10))
    same_member(stack, 0, mlp(0), tolerance=0.0)


def test_any_loss_of_a_stack_is_minimised_network_by_network():
    """A quadratic in every row; the second one is not finite and stays where it started."""
    goal = torch.tensor([[1.0, -2.0], [math.nan, 0.0], [0.5, 3.0]], dtype=torch.float64)
    x = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    record = train(Losses([x], lambda: (x - goal).square().sum(-1)), Optimizer(learning_rate=0.1, max_epochs=400))
    torch.testing.assert_close(x.detach()[[0, 2]], goal[[0, 2]], atol=1e-3, rtol=0)
    assert x[1].tolist() == [0.0, 0.0]
    assert record.setbacks == 16  # at every look, 25 epochs apart
    assert record.nlml[-1] < 1e-5
