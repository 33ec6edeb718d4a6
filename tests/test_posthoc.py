"""`attach` puts the exact last layer on networks trained elsewhere; `BLLLoss` trains them by the evidence."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import close, exact_layer, problem, refused
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lastlayer import BLLLoss, BLLRegressor, attach
from lastlayer.bayes.evidence import optimal_alpha, profiled_nlml
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.statistics import Statistics
from lastlayer.data.scaling import Standardizer
from lastlayer.data.sources import ArraySource
from lastlayer.networks.feature_extractor import FeatureExtractor
from lastlayer.training.objectives import INITIAL_LOG_ALPHA

EXAMPLES = Path(__file__).parents[1] / "examples"


class Net(nn.Module):
    """As users write them: dropout and batch statistics inside, output in other units, an unused layer."""

    def __init__(self, q: int = 2) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.unused, self.out = nn.Linear(8, 1), nn.Linear(8, q)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 100 + 5 * self.out(self.body(x)).squeeze(-1)


def rows(m: int = 90, q: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(m, 3, generator=g)
    y = 100 + 5 * torch.sin(X[:, :q]) + 0.3 * torch.randn(m, q, generator=g)
    return X, y[:, 0] if q == 1 else y


def net(q: int = 2) -> Net:
    torch.manual_seed(1)
    network = Net(q)
    network(rows()[0])  # statistics of the batch
    return network


def batches(*tensors: torch.Tensor, size: int = 32) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), batch_size=size)


@pytest.mark.parametrize("bias_prior", ["flat", "shared"])
@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_it_is_the_posterior_of_the_features_written_down_by_hand(bias_prior, noise):
    (X, y), network = rows(), net()
    w = torch.rand(len(X), generator=torch.Generator().manual_seed(2)) + 0.5
    model = attach(network, batches(X, y, w), noise=noise, bias_prior=bias_prior)
    with torch.no_grad():
        Phi = affine_features(network.eval().body(X).double())
    p, exact = model.predictive(X), exact_layer(Phi, y, Phi, w, noise=noise, bias_prior=bias_prior)
    # float32 features of batches of other sizes differ in their last digit
    for found, expected, loose in zip((p.mean, p.cov(), p.affine_cost), exact, (1e4, 1e5, 1e5), strict=True):
        close(torch.tensor(found), expected, loose=loose)


def test_one_pass_is_enough_and_the_network_stays_as_it_was():
    (X, y), network = rows(), net()
    before, passes = copy.deepcopy(network.state_dict()), []

    class Counted:
        def __iter__(self):
            passes.append(1)
            return iter(batches(X, y))

    model = attach(network, Counted())
    assert len(passes) == 1
    assert network.training
    assert all(p.requires_grad for p in network.parameters())
    assert not any(module._forward_pre_hooks for module in network.modules())
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert model.backbone.layer == "out"
    assert model.extrapolation(100 * X).quantile.mean() > 0.9 > model.extrapolation(X).quantile.mean()
    assert isinstance(BLLRegressor().set_params(**model.get_params()), BLLRegressor)
    assert not model.members_[0].network.training


def test_whatever_rows_come_in_the_model_is_the_same():
    (X, y), network = rows(), net()
    models = [attach(network, batches(X, y, size=size)) for size in (7, 90)]
    models.append(attach(network, ArraySource(X.numpy(), y.numpy())))
    for other in models[1:]:
        np.testing.assert_allclose(other.predictive(X).std, models[0].predictive(X).std, rtol=1e-5)  # float32 network


def test_its_module_goes_through_torch_export(as_a_user):
    (X, y), network = rows(), net()
    model = attach(network, batches(X, y))
    program = torch.export.export(model.module(), (X[:3],), dynamic_shapes=({0: torch.export.Dim("rows")},))
    np.testing.assert_allclose(program.module()(X)["var"], model.predictive(X).var, rtol=1e-6)


def test_a_feature_extractor_serves_several_threads_at_once():
    trunk, X = FeatureExtractor(net(), "out"), [rows(seed=i)[0] for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda x: [trunk(x) for _ in range(20)], X))
    for x, answers in zip(X, results, strict=True):
        assert all(torch.equal(answer, trunk(x)) for answer in answers)


@pytest.mark.parametrize(
    ("given", "words", "told"),
    [
        (net, {"layer": "uot"}, "did you mean 'out'"),
        (net, {"layer": "unused"}, "uses its layer 'unused' 0 times"),
        (net, {"noise": "input"}, "choose one of 'diagonal', 'full'"),
        (lambda: net(q=3), {}, "gives 3 numbers, and the targets have 2"),
        (lambda: nn.Sequential(nn.Conv1d(1, 1, 3)), {}, "layer=None"),
        (lambda: net().bfloat16(), {}, "convert it, network.float"),
    ],
)
def test_what_cannot_be_attached_is_said(given, words, told, as_a_user):
    refused(told, attach, given(), batches(*rows()), **words)


def test_strange_loaders_and_networks_are_refused(as_a_user):
    (X, y), layer = rows(), nn.Linear(3, 3)
    refused("no batch", attach, net(), [])
    refused("NaN", attach, net(), [(X, y), (X.where(X < 1, torch.nan), y)])
    refused("used 2 times", attach, nn.Sequential(layer, nn.Tanh(), layer), [(X, X)])


@given(scale=st.floats(1e-3, 1e3), shift=st.floats(-1e3, 1e3), seed=st.integers(0, 20))
def test_statistics_of_scaled_targets_follow_from_those_of_raw_ones(scale, shift, seed):
    P, T = problem(seed=seed)
    scaler = Standardizer(torch.tensor([shift, 1.0]).double(), torch.tensor([scale, 2.0]).double())
    after = Statistics.from_linear_features(P, T).with_targets(scaler.mean, scaler.scale)
    before = Statistics.from_linear_features(P, scaler.forward(T))
    for name in ("mean", "scatter", "energy"):
        close(getattr(after, name), getattr(before, name))


@pytest.mark.parametrize("bias_prior", ["flat", "shared"])
@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_the_first_batch_of_all_rows_gives_the_evidence_and_its_gradient(bias_prior, noise):
    P, T = problem(m=6, k=6, q=2)  # as many features as rows: the log-determinant is taken on all of them
    features, other = P.clone().requires_grad_(), P.clone().requires_grad_()
    loss = BLLLoss(6, noise=noise, bias_prior=bias_prior)(features, T)
    log_alpha = torch.tensor(INITIAL_LOG_ALPHA, dtype=torch.float64)
    exact = profiled_nlml(affine_features(other), T, log_alpha, noise=noise, bias_prior=bias_prior)
    (3 * loss).backward()
    (3 * exact).backward()
    close(loss, exact, loose=1e3)  # moments of a fit without error
    close(features.grad, other.grad, loose=1e3)


def test_in_evaluation_it_takes_nothing_in_and_bounds_the_evidence():
    P, T = problem(m=200)
    loss = BLLLoss(200)
    for part in torch.arange(200).split(50):
        loss(P[part], T[part])
    before = loss.running.snapshot
    value = loss.eval()(P, T)
    assert loss.running.snapshot is before
    statistics = Statistics.from_linear_features(P, T)
    close(value, before.frozen.bound(statistics))
    assert float(value) >= optimal_alpha(statistics).nlml
    close(loss.posterior().mean(affine_features(P)), T, loose=1e10)  # to the noise


def test_a_loop_of_ones_own_trains_by_it_and_goes_on_from_a_saved_state(tmp_path):
    P, T = problem(m=100)
    first, again = BLLLoss(100), BLLLoss(100)
    first(P[:50], T[:50])
    torch.save(first.state_dict(), tmp_path / "loss.pt")
    again.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    assert torch.equal(first(P[50:], T[50:]), again(P[50:], T[50:]))
    X, y = rows(m=200, q=1)
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(3, 10), nn.Tanh())
    loader = DataLoader(TensorDataset(X, y), batch_size=50, shuffle=True)
    nlmls = [attach(trunk, loader, layer=None).nlml_]
    loss, optimiser = BLLLoss(200), torch.optim.Adam(trunk.parameters(), lr=2e-2)
    for _ in range(30):
        for x, t in loader:
            optimiser.zero_grad()
            loss(trunk(x), t).backward()
            optimiser.step()
    nlmls.append(attach(trunk, loader, layer=None).nlml_)
    assert nlmls[1] < nlmls[0] - 0.3


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (lambda: BLLLoss(1), "2 or more"),
        (lambda: BLLLoss(10, noise="ful"), "did you mean 'full'"),
        (lambda: BLLLoss(10).eval()(torch.ones(3, 2), torch.ones(3)), "no batch yet"),
        (lambda: BLLLoss(10)(torch.ones(3, 2), torch.ones(4)), r"\(3, 2\) and targets of shape \(4,\)"),
    ],
)
def test_misuse_of_the_loss_is_said(use, told, as_a_user):
    refused(told, use)


def test_the_example_knows_pictures_unlike_those_of_training(as_a_user, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    import attach_resnet

    std = attach_resnet.main(["--pictures", "150", "--epochs", "4"])
    like = std.pop("new discs")
    assert all(other > 2 * like for other in std.values()), (like, std)
    assert "larger discs" in capsys.readouterr().out
