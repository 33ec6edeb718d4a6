"""The training loop alone: schedules, stopping, ways back, and the scaling around it."""

import copy
import math

import pytest
import torch
from helpers import close, refused
from torch import nn

from lastlayer.bayes.statistics import Readings
from lastlayer.data.rows import Points, Rows
from lastlayer.data.scaling import Standardizer
from lastlayer.networks.mlp import MLP
from lastlayer.training import Augmented, FullBatch, Optimizer, Profiled, TrainingHistory, Validation, train


@pytest.fixture
def data(generator) -> Points:
    X = torch.rand(40, 1, generator=generator, dtype=torch.float64) * 6 - 3
    T = torch.sin(X) + 0.1 * torch.randn(40, 1, generator=generator, dtype=torch.float64)
    return Points(X, Readings(T))


def network(seed: int = 0) -> MLP:
    return MLP(1, (6,), generator=torch.Generator().manual_seed(seed))


def fit(data: Points, net: nn.Module | None = None, *, epochs: int = 30, **options) -> TrainingHistory:
    optimizer = Optimizer(max_epochs=epochs)
    objective = Profiled(bias_prior="flat", noise="diagonal")
    return train(FullBatch(net or network(), objective, Rows(data)), optimizer, **options)


class Script:
    """Scores read from a list, with the state of the network at every question."""

    def __init__(self, net: nn.Module, scores: list[float]):
        self.net, self.scores, self.states = net, scores, []

    def __call__(self) -> torch.Tensor:
        assert not self.net.training
        assert not torch.is_grad_enabled()
        self.states.append(copy.deepcopy(self.net.state_dict()))
        return torch.tensor(self.scores[min(len(self.states), len(self.scores)) - 1])

    def is_at(self, question: int) -> bool:
        return all(torch.equal(v, self.states[question][k]) for k, v in self.net.state_dict().items())


def test_the_cosine_goes_from_the_learning_rate_to_a_hundredth_of_it():
    rate = Optimizer(learning_rate=0.5, max_epochs=100).rate
    assert rate(0) == pytest.approx(0.5)
    assert rate(50) == pytest.approx(0.5 * 0.505)
    assert rate(100) == pytest.approx(0.005)
    assert all(rate(i) > rate(i + 1) for i in range(100))
    constant = Optimizer(0.5, cosine=False)
    assert constant.rate(0) == constant.rate(700) == 0.5
    assert Optimizer(max_epochs=0).rate(0) == Optimizer().learning_rate


@pytest.mark.parametrize("kind", [Profiled, Augmented])
def test_every_objective_goes_down(data, kind, generator):
    made = kind(6, 1, bias_prior="flat", generator=generator) if kind is Augmented else kind(bias_prior="flat")
    before = [p.detach().clone() for p in made.parameters()]
    record = train(FullBatch(network(), made, Rows(data)), Optimizer(max_epochs=30))
    assert record.nlml[-1] < record.nlml[0] - 1e-3
    assert all((p != old).any() for p, old in zip(made.parameters(), before, strict=True))


def test_nothing_to_train_is_no_error(data):
    record = fit(data, epochs=0)
    assert (record.nlml, record.stopped, record.best_epoch) == ([], "max_epochs", 0)


def test_frozen_layers_stay_frozen(data):
    net = MLP(1, (6, 6), generator=torch.Generator().manual_seed(0))
    net[0].requires_grad_(False)
    before = copy.deepcopy(net.state_dict())
    fit(data, net, epochs=5)
    assert torch.equal(net[0].weight, before["0.weight"])
    assert not torch.equal(net[2].weight, before["2.weight"])


def test_training_stops_after_the_patience_and_returns_to_the_best(data):
    net = network()
    script = Script(net, [3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    record = fit(data, net, epochs=100, validation=Validation(script, every=5, patience=15))
    assert record.stopped == "early_stopping"
    assert record.validation_epoch == [0, 5, 10, 15, 20]
    assert record.validation_score == [3.0, 1.0, 2.0, 2.0, 2.0]
    assert record.best_epoch == 5
    assert len(record.nlml) == 20
    assert script.is_at(1)
    assert not script.is_at(2)


def test_an_improvement_below_min_delta_is_none(data):
    net = network()
    script = Script(net, [1.0 - 1e-3 * i for i in range(20)])
    validation = Validation(script, every=1, patience=3, min_delta=0.5)
    assert fit(data, net, epochs=19, validation=validation).stopped == "early_stopping"


def test_epochs_before_the_first_do_not_count(data):
    net = network()
    script = Script(net, [5.0, 6.0, 7.0])
    record = fit(data, net, epochs=30, validation=Validation(script, first=12, every=5, patience=100))
    assert record.validation_epoch[:3] == [12, 17, 22]
    assert record.best_epoch == 12
    assert script.is_at(0)


def test_a_last_state_that_is_best_is_kept_and_named(data):
    net = network()
    script = Script(net, [5.0, 4.0, 3.0, 2.0, 1.0])
    record = fit(data, net, epochs=20, validation=Validation(script, every=5))
    assert script.is_at(-1)
    assert record.best_epoch == 20
    assert min(record.validation_score) == record.validation_score[-1] == 1.0
    assert record.validation_epoch[-1] == 20


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_scores_that_are_not_finite_never_win(data, score):
    net = network()
    script = Script(net, [2.0, score, score, score])
    fit(data, net, epochs=15, validation=Validation(script, every=5))
    assert script.is_at(0)


class Watched(nn.Module):
    """Remembers in which mode it was asked."""

    def __init__(self):
        super().__init__()
        self.net, self.modes = network(), []

    def forward(self, x):
        self.modes.append(self.training)
        return self.net(x)


@pytest.mark.parametrize("validated", [False, True])
def test_training_is_done_in_train_mode_and_ends_in_eval_mode(data, validated):
    net = Watched()
    net.eval()  # as a network is that was fitted before
    validation = Validation(lambda: torch.tensor(1.0), first=4, every=2) if validated else None
    fit(data, net, epochs=10, validation=validation)
    assert not net.training
    assert not net.net.training
    assert sum(net.modes) >= 10  # one pass per epoch
    assert all(net.modes[:10])


class Explodes(nn.Module):
    """The pass of that number does something else."""

    def __init__(self, instead, at: int):
        super().__init__()
        self.net, self.instead, self.at, self.passes = network(), instead, at, 0

    def forward(self, x):
        self.passes += 1
        return self.instead() if self.passes == self.at else self.net(x)


def test_an_interrupt_keeps_what_was_reached(data):
    def interrupt():
        raise KeyboardInterrupt

    net = Explodes(interrupt, at=8)
    with pytest.warns(UserWarning, match="interrupted after 7 epochs"):
        record = fit(data, net)
    assert (record.stopped, len(record.nlml)) == ("interrupted", 7)
    reference = network()
    fit_epochs = fit(data, reference, validation=Validation(lambda: torch.tensor(1.0), every=7, patience=7))
    assert len(fit_epochs.nlml) == 7
    assert record.nlml == pytest.approx(fit_epochs.nlml)
    assert not net.training


def test_after_a_setback_training_goes_on_in_smaller_steps(data):
    net = Explodes(lambda: torch.full((40, 6), math.nan, dtype=torch.float64), at=14)
    with pytest.warns(UserWarning, match="not finite 1 times"):
        record = fit(data, net)
    assert record.setbacks == 1
    assert len(record.nlml) == 29
    assert record.learning_rate[-1] == pytest.approx(0.3 * Optimizer(max_epochs=30).rate(29))
    assert record.nlml[-1] < record.nlml[0]
    assert all(math.isfinite(v) for v in record.nlml)


def test_errors_of_the_network_reach_the_caller(data):
    def fail():
        raise RuntimeError("mine")

    refused("mine", fit, data, Explodes(fail, at=3), error=RuntimeError)


def test_progress_is_shown_on_request_and_on_stderr_alone(data, at_terminal, capsys):
    fit(data, epochs=3)
    assert capsys.readouterr() == ("", "")
    fit(data, epochs=3, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "fit" in err
    assert "3/3" in err


@pytest.mark.parametrize("size", [1.0, 1e200, 1e-200])
def test_standardised_columns_have_mean_zero_and_variance_one(size, generator):
    X = size * (torch.randn(50, 3, generator=generator, dtype=torch.float64) + 5)
    scaler = Standardizer.fit(X)
    Z = scaler.forward(X)
    close(Z.mean(0) + 1, torch.ones(3, dtype=torch.float64))
    close(Z.var(0, correction=0), torch.ones(3, dtype=torch.float64))
    close(Z * scaler.scale + scaler.mean, X)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.0, 1e200, 1e-200])
def test_a_constant_column_keeps_its_unit(value):
    X = torch.full((37, 1), value, dtype=torch.float64)
    scaler = Standardizer.fit(X)
    assert scaler.scale == 1
    assert abs(scaler.forward(X)).max() <= 1e-14 * abs(value)
    close(scaler.forward(X + 3), torch.full((37, 1), 3.0, dtype=torch.float64), loose=1 + abs(value))


def test_weights_count_copies(generator):
    X = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    weight = torch.randint(0, 4, (20,), generator=generator)
    weighted = Standardizer.fit(X, sample_weight=weight.double())
    repeated = Standardizer.fit(X.repeat_interleave(weight, 0))
    close(weighted.mean, repeated.mean)
    close(weighted.scale, repeated.scale)


def test_a_small_spread_far_from_zero_is_no_constant(generator):
    X = 1e6 + 1e-4 * torch.randn(30, 1, generator=generator, dtype=torch.float64)
    close(Standardizer.fit(X).forward(X).std(correction=0), torch.ones((), dtype=torch.float64), loose=1e5)


def test_small_steps_run_on_one_thread_and_the_number_is_put_back(data):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen = []

    class Spy(Profiled):
        def forward(self, phi_tilde, T, sample_weight):
            seen.append(torch.get_num_threads())
            return super().forward(phi_tilde, T, sample_weight)

    train(FullBatch(network(), Spy(bias_prior="flat"), Rows(data)), Optimizer(max_epochs=2))
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert set(seen) == {1}
    assert after == 2
