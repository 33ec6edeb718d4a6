"""Rows in pieces: bounds that touch the evidence, gradients of chunks, batches, processes, and starts after a stop."""

import math
import os
import runpy
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from helpers import close, problem, refused, sine
from hypothesis import given
from hypothesis import strategies as st

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.bayes.evidence import profiled_nlml
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Readings, Statistics
from lastlayer.data.distributed import ProcessGroup
from lastlayer.data.rows import Points, Rows
from lastlayer.networks.mlp import MLP, StackedMLP
from lastlayer.training import (
    Augmented,
    FrozenLayer,
    FullBatch,
    MiniBatches,
    Optimizer,
    Profiled,
    RunningPosterior,
    TrainingHistory,
    UpdateSchedule,
    chunked_nlml,
    train,
)

PRIORS, NOISES = ("flat", "shared"), ("diagonal", "full")
cases = pytest.mark.parametrize(
    ("bias_prior", "noise", "weighted"), [(p, n, w) for p in PRIORS for n in NOISES for w in (False, True)]
)


def rows(m: int = 50, *, weighted: bool, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    P, T = problem(m=m, k=5, q=3, seed=seed)
    g = torch.Generator().manual_seed(seed + 1)
    return P, T, torch.rand(m, generator=g, dtype=torch.float64) + 0.2 if weighted else None


def in_batches(network, source, running: RunningPosterior, optimizer: Optimizer, **options) -> TrainingHistory:
    return train(MiniBatches(network, source, running, **options), optimizer)


@cases
def test_fresh_statistics_give_value_and_gradient_of_the_profiled_evidence(bias_prior, noise, weighted):
    P, T, w = rows(weighted=weighted)
    log_alpha = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    features = P.clone().requires_grad_()
    J = profiled_nlml(affine_features(features), T, log_alpha, noise=noise, bias_prior=bias_prior, sample_weight=w)
    J.backward()
    statistics = Statistics.from_linear_features(P, T, sample_weight=w)
    frozen = FrozenLayer.of(statistics, log_alpha.detach(), noise=noise, bias_prior=bias_prior)
    part = frozen.rows(P, T, w)
    close(frozen.offset + part.loss, J)
    close(frozen.bound(statistics), J)
    close(part.gradient, features.grad)
    close(frozen.log_alpha_slope, log_alpha.grad)


@given(
    bias_prior=st.sampled_from(PRIORS),
    noise=st.sampled_from(NOISES),
    weighted=st.booleans(),
    log_alpha=st.floats(-4, 8),
    other_alpha=st.floats(-4, 8),
    move=st.floats(0, 2),
    seed=st.integers(0, 100),
)
def test_the_bound_is_never_below_the_evidence(bias_prior, noise, weighted, log_alpha, other_alpha, move, seed):
    """Whatever the features have become, and whatever alpha Lambda_0 was made for, as long as W and noise are given."""
    P, T, w = rows(weighted=weighted, seed=seed)
    words = {"noise": noise, "bias_prior": bias_prior}
    old = Statistics.from_linear_features(P, T, sample_weight=w)
    moved = P + move * torch.randn(P.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    new = Statistics.from_linear_features(moved, T, sample_weight=w)
    other = FrozenLayer.of(old, other_alpha, **words)
    for changes in ({}, {"logdet_from": other}, {"seen": 0.1}):
        frozen = FrozenLayer.of(old, log_alpha, **words, **changes)
        alpha = torch.tensor(log_alpha, dtype=torch.float64)
        J = profiled_nlml(affine_features(moved), T, alpha, sample_weight=w, **words)
        assert float(frozen.bound(new)) >= float(J) - 1e-9 * abs(float(J))
        close(frozen.offset + frozen.rows(moved, T, w).loss, frozen.bound(new))


def test_the_log_determinant_on_some_rows_is_unbiased():
    """As are batches that stand for all rows."""
    P, T, w = rows(m=48, weighted=True)
    frozen = FrozenLayer.of(Statistics.from_linear_features(P, T, sample_weight=w), 1.0)
    whole = frozen.rows(P, T, w)
    turns = []
    for shift in range(0, 48, 6):
        order = torch.roll(torch.arange(48), -shift)
        part = frozen.rows(P[order], T[order], w[order], logdet_rows=6, logdet_scale=8.0)
        turns.append((part.loss, part.gradient[torch.argsort(order)]))
    close(torch.stack([loss for loss, _ in turns]).mean(0), whole.loss)
    close(torch.stack([gradient for _, gradient in turns]).mean(0), whole.gradient)
    batches = [frozen.rows(P[i : i + 12], T[i : i + 12], w[i : i + 12], scale=4.0).loss for i in range(0, 48, 12)]
    close(torch.stack(batches).mean(0), whole.loss)


def test_products_in_float32_leave_sums_in_float64_and_say_how_coarse_they_are():
    P, T, w = rows(m=200, weighted=True)
    fine = Statistics.from_linear_features(P, T, sample_weight=w)
    coarse = Statistics.from_linear_features(P.float(), T.float(), sample_weight=w, dtype=torch.float32)
    close(coarse.scatter, fine.scatter, loose=1e4)  # float32 products
    assert coarse.scatter.dtype == torch.float64
    assert bool((coarse.energy[:5] > 1e6 * fine.energy[:5]).all())


@cases
def test_chunks_give_the_gradient_of_all_rows(bias_prior, noise, weighted):
    X, T, w = rows(weighted=weighted)
    grads = []
    for size in (None, 7):
        network = MLP(5, (6, 4), generator=torch.Generator().manual_seed(3))
        objective = Profiled(bias_prior=bias_prior, noise=noise)
        data = Points(X, Readings(T), w)
        if size is None:
            J = objective(network(X), T, w)
            J.backward()
        else:
            J = chunked_nlml(network, objective, data, size)
        grads.append([J.detach(), objective.log_alpha.grad, *[p.grad for p in network.parameters()]])
    for whole, chunked in zip(*grads, strict=True):
        close(chunked, whole)


def test_training_in_chunks_takes_the_steps_of_training_on_all_rows():
    X, T, _ = rows(weighted=False)
    ends = []
    for size in (None, 16):
        network = MLP(5, (4,), generator=torch.Generator().manual_seed(3))
        objective = Profiled(bias_prior="flat", noise="diagonal")
        problem = FullBatch(network, objective, Rows(Points(X, Readings(T))), chunk_size=size, prior_precision=0.1)
        record = train(problem, Optimizer(max_epochs=6))
        ends.append((torch.tensor(record.nlml), network[0].weight))
    for whole, chunked in zip(*ends, strict=True):
        close(chunked, whole, loose=1e3)  # rounding grows from step to step
    augmented = Augmented(4, 3, bias_prior="flat")
    refused('objective="profiled"', chunked_nlml, MLP(5, (4,)), augmented, Points(X, Readings(T)), 10)


def test_one_batch_of_all_rows_is_the_exact_step():
    """With every row in the statistics, the first step of a running layer is the evidence itself."""
    P, T, w = rows(weighted=True)
    layer = RunningPosterior(w.sum(), 50, schedule=UpdateSchedule(logdet_share=1))
    part = layer.step(P, T, w)
    J = profiled_nlml(affine_features(P), T, layer.now.log_alpha, sample_weight=w)
    close(layer.now.frozen.offset + part.loss, J)
    assert abs(float(layer.gap(Statistics.from_linear_features(P, T, sample_weight=w)))) < 1e-12


def test_weights_are_those_of_the_rows_that_were_seen():
    """A batch stands for all rows, but its posterior mean is that of a batch: the prior is not outweighed by rows that
    nobody has looked at."""
    P, T = problem(m=40, k=5, q=1)
    layer = RunningPosterior(torch.tensor(4_000.0, dtype=torch.float64), 4_000)
    layer.step(P, T)
    batch = Statistics.from_linear_features(P, T)
    close(layer.now.frozen.weights, Posterior(batch, float(layer.now.log_alpha)).weights)
    assert layer.now.effective_rows == 40
    for _ in range(3):
        layer.step(P, T, drift=0.0)  # features that stand still: all batches are averaged
    close(torch.tensor(layer.now.effective_rows), torch.tensor(160.0))
    alpha = float(layer.now.log_alpha)
    layer.schedule = UpdateSchedule(settle=0, every=1_000)  # alpha stays
    layer.step(P, T, drift=0.0)
    seen = Statistics.from_linear_features(P.repeat(5, 1), T.repeat(5, 1))
    close(layer.now.frozen.weights, Posterior(seen, alpha).weights)


@pytest.mark.parametrize("drift", [1.0, 0.49, 0.16])
def test_the_share_of_a_batch_goes_with_the_root_of_the_drift(drift):
    """The running average written down row by row: what the second batch has of it, the first one loses."""
    P, T = problem(m=440, k=5, q=2)
    layer = RunningPosterior(torch.tensor(1_000.0, dtype=torch.float64), 1_000, schedule=UpdateSchedule(memory=40))
    layer.step(P[:400], T[:400])
    layer.step(P[400:], T[400:], drift=drift)
    share = 2 / (1 + 40 * 5 / 40) * math.sqrt(drift)  # memory is in rows a feature, the batch has 40 rows
    weight = torch.tensor([(1 - share) / 400] * 400 + [share / 40] * 40, dtype=torch.float64)
    rows = torch.cat([P, T], 1)
    mean = weight @ rows
    close(layer.now.statistics.mean, mean)
    close(layer.now.statistics.scatter, 1_000 * (rows - mean).T @ (weight[:, None] * (rows - mean)))


def test_networks_of_a_stack_train_as_if_alone():
    g = torch.Generator().manual_seed(0)
    X = torch.randn(60, 2, generator=g, dtype=torch.float64)
    T = torch.sin(X[:, :1]) + 0.1 * torch.randn(60, 1, generator=g, dtype=torch.float64)
    weight = torch.ones(3, 60, dtype=torch.float64)
    for i, fold in enumerate(weight):
        fold[i::3] = 0  # each leaves a third out
    optimizer = Optimizer(learning_rate=1e-2, max_epochs=3)
    precision = torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)
    seeds = lambda: [torch.Generator().manual_seed(i) for i in range(3)]
    stack = StackedMLP(2, (5,), generators=seeds())
    layer = RunningPosterior(weight.sum(-1), 60)
    words = {"batch_size": 20}
    in_batches(stack, Points(X, Readings(T), weight), layer, optimizer, prior_precision=precision, **words)
    for i, generator in enumerate(seeds()):
        alone = MLP(2, (5,), generator=generator)
        own = RunningPosterior(weight[i].sum(), 60)
        in_batches(alone, Points(X, Readings(T), weight[i]), own, optimizer, prior_precision=precision[i], **words)
        close(stack.member(i)[0].weight, alone[0].weight, loose=10)
        close(layer.now.log_alpha[i], own.now.log_alpha, loose=10)


def test_a_network_that_failed_goes_back_and_the_others_go_on():
    g = torch.Generator().manual_seed(0)
    X = torch.randn(40, 2, generator=g)
    T = X[:, :1] + 0.1 * torch.randn(40, 1, generator=g)
    stack = StackedMLP(2, (4,), generators=[torch.Generator().manual_seed(i) for i in range(2)]).float()
    layer = RunningPosterior(torch.full((2,), 40.0, dtype=torch.float64), 40)

    class Failing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = stack, 0

        def forward(self, x):
            self.calls += 1
            phi = self.inner(x)
            return phi * torch.tensor([torch.nan, 1.0])[:, None, None] if self.calls == 5 else phi

    optimizer = Optimizer(max_epochs=6, learning_rate=1e-3)
    record = in_batches(Failing(), Points(X, Readings(T)), layer, optimizer, batch_size=20)
    assert record.setbacks == 1
    assert all(bool(torch.isfinite(p).all()) for p in stack.parameters())
    assert bool(torch.isfinite(layer.now.frozen.weights).all())


def test_mini_batches_end_near_the_evidence_they_bound(as_a_user):
    X, y = sine(m=2000, d=2)
    words = {"preset": "evidence", "training": TrainingOptions(early_stopping=False), "random_state": 0}
    model = BLLRegressor((16, 16), batch_size=250, max_epochs=30, **words).fit(X, y)
    assert 0 <= model.history_["gap"] < 0.05
    assert model.noise_std_[0] == pytest.approx(0.15 * 1.5, rel=0.1)
    assert model.history_["nlml"][-1] == pytest.approx(model.nlml_, abs=0.05)


def test_the_calibrated_default_works_with_mini_batches(as_a_user):
    X, y = sine(m=400, d=2)
    words = {"n_members": 2, "batch_size": 100, "max_epochs": 10, "random_state": 0}
    model, again = (BLLRegressor((8,), **words).fit(X, y) for _ in range(2))
    assert len(model.members_) == 2 * 6 + 1  # of each family, and the process
    assert model.calibration_ is not None
    assert np.array_equal(model.predict(X), again.predict(X))
    assert np.sqrt(np.mean((model.predict(X) - y) ** 2)) < 0.5


@given(world=st.integers(1, 7), n=st.integers(0, 50))
def test_shares_of_processes_make_up_the_whole(world, n):
    shares = [ProcessGroup(rank, world).local_count(n) for rank in range(world)]
    assert sum(shares) == n
    assert shares == [len(range(rank, n, world)) for rank in range(world)]


# stops and starts ---------------------------------------------------------------------------------------------------

FIT_SCRIPT = """
    import os, signal, sys, time
    from pathlib import Path
    import numpy as np, torch
    from lastlayer import BLLRegressor, TrainingOptions
    from lastlayer._internal import files
    from lastlayer.training import checkpoint

    folder, result = Path(sys.argv[1]), sys.argv[2]
    resumed = folder.name == "states"
    torch.set_num_threads(1)

    def fit():
        rng = np.random.default_rng(0)
        X = rng.normal(size=(300, 2))
        y = np.sin(X[:, 0]) + 0.1 * rng.normal(size=300)
        options = TrainingOptions(checkpoint=folder if resumed else None)
        words = dict(hidden=(8,), n_members=2, batch_size=50, max_epochs=20, hidden_prior=0.3, random_state=0)
        return BLLRegressor(**words, training=options).fit(X, y)

    def killed():
        "A process that fits and is killed on the way."
        process = os.fork()
        if not process:
            fit()
            os._exit(0)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and epoch() < 5:
            assert os.waitpid(process, os.WNOHANG) == (0, 0), "it ended before it could be killed"
            time.sleep(0.01)
        os.kill(process, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
        assert list(folder.glob("training*.safetensors"))

    def epoch():
        return max((files.read(path)[1]["epoch"] for path in folder.glob("training*.safetensors")), default=0)

    if resumed:
        checkpoint.EVERY_SECONDS = 0.0  # after every step
        killed()
    parameters = [p for member in fit().members_ for p in member.network.parameters()]
    np.save(result, np.concatenate([p.detach().numpy().ravel() for p in parameters]))
"""


def test_a_killed_fit_goes_on_and_ends_in_the_same_place(tmp_path, as_a_user, monkeypatch):
    script, folder = tmp_path / "fit.py", tmp_path / "states"
    script.write_text(textwrap.dedent(FIT_SCRIPT))
    command = [sys.executable, str(script), str(folder), str(tmp_path / "resumed.npy")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert subprocess.run(command, env=environment, check=False, timeout=180).returncode == 0
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "none"), str(tmp_path / "plain.npy")])
    runpy.run_path(str(script))
    assert np.array_equal(np.load(tmp_path / "plain.npy"), np.load(tmp_path / "resumed.npy"))
    assert not list(folder.glob("training*.safetensors"))  # a fit that ends leaves nothing behind


def test_a_longer_memory_brings_the_running_layer_closer_to_the_exact_one():
    P, T = problem(m=600, k=5, q=1)
    exact = Statistics.from_linear_features(P, T)
    gaps = []
    for memory in (4, 40):
        layer = RunningPosterior(torch.tensor(600.0, dtype=torch.float64), 600, schedule=UpdateSchedule(memory=memory))
        for i in range(60):
            order = torch.randperm(600, generator=torch.Generator().manual_seed(i))[:20]
            layer.step(P[order], T[order])
        gaps.append(float(layer.gap(exact)))
    assert 0 <= gaps[1] < gaps[0]
