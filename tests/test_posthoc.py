"""`attach` puts the exact last layer on networks trained elsewhere; `BLLLoss` trains them by the evidence."""

import copy
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import alone_and_by_two, close, exact_layer, problem
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lastlayer
from lastlayer import BLLLoss, attach
from lastlayer.bayes.evidence import optimal_alpha, profiled_nlml
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.statistics import Statistics
from lastlayer.data.scaling import Standardizer
from lastlayer.data.sources import ArraySource
from lastlayer.errors import InputError
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


# attach -------------------------------------------------------------------------------------------------------------


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
    assert not model.network_.training


def test_whatever_rows_come_in_the_model_is_the_same():
    (X, y), network = rows(), net()
    models = [attach(network, batches(X, y, size=size)) for size in (7, 90)]
    models.append(attach(network, ArraySource(X.numpy(), y.numpy())))
    for other in models[1:]:
        np.testing.assert_allclose(other.predictive(X).std, models[0].predictive(X).std, rtol=1e-5)  # float32 network


def test_it_does_everything_a_fitted_model_does(tmp_path):
    (X, y), network = rows(q=1), net(q=1)
    more, more_y = rows(q=1, seed=5)
    model = attach(network, batches(X, y))
    assert model.predict(X).shape == (90,)
    assert model.extrapolation(100 * X).quantile.mean() > 0.9 > model.extrapolation(X).quantile.mean()
    model.save(tmp_path / "m.lastlayer")
    again = lastlayer.load(tmp_path / "m.lastlayer", backbone=FeatureExtractor(Net(1), "out"))
    np.testing.assert_array_equal(again.predictive(X).std, model.predictive(X).std)
    before = model.predictive(X).epistemic_var
    assert (model.update(more, more_y).predictive(X).epistemic_var < before).all()
    assert model.tune_alpha(more, more_y).alpha_curve_.lpd >= model.alpha_curve_.lpd_before
    assert isinstance(lastlayer.BLLRegressor().set_params(**model.get_params()), lastlayer.BLLRegressor)


def test_calibration_by_batches_is_calibration():
    (X, y), network = rows(), net()
    held, held_y = rows(seed=3)
    streamed = attach(network, batches(X, y), calibration=batches(held, held_y, size=13))
    at_once = attach(network, batches(X, y)).calibrate(held, held_y)
    np.testing.assert_allclose(streamed.predictive(3 * X).std, at_once.predictive(3 * X).std, rtol=1e-3)
    assert streamed.calibration_.lpd > streamed.calibration_.lpd_before


def test_images_go_through():
    g = torch.Generator().manual_seed(0)
    images, y = torch.randn(60, 1, 5, 5, generator=g), torch.randn(60, generator=g)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 6), nn.Tanh(), nn.Linear(6, 1))
    model = attach(network, batches(images, y))
    p = model.predictive(images)
    assert p.std.shape == (60,)
    module = model.module()
    np.testing.assert_allclose(module(images)["var"], p.with_output_axis().var, rtol=1e-12)


def test_its_module_goes_through_torch_export(as_a_user):
    (X, y), network = rows(), net()
    model = attach(network, batches(X, y))
    program = torch.export.export(model.module(), (X[:3],), dynamic_shapes=({0: torch.export.Dim("rows")},))
    np.testing.assert_allclose(program.module()(X)["var"], model.predictive(X).var, rtol=1e-6)


def test_a_feature_extractor_serves_several_threads_at_once():
    trunk, results = FeatureExtractor(net(), "out"), {}
    X = {i: rows(seed=i)[0] for i in range(8)}
    ask = lambda i: results.update({i: [trunk(X[i]) for _ in range(20)]})
    threads = [threading.Thread(target=ask, args=(i,)) for i in X]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, answers in results.items():
        assert all(torch.equal(answer, trunk(X[i])) for answer in answers)


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
    with pytest.raises(InputError, match=told):
        attach(given(), batches(*rows()), **words)


def test_strange_loaders_are_refused(as_a_user):
    X, y = rows()
    with pytest.raises(InputError, match="no batch"):
        attach(net(), [])
    with pytest.raises(InputError, match="NaN"):
        attach(net(), [(X, y), (X.where(X < 1, torch.nan), y)])
    shared = nn.Sequential(layer := nn.Linear(3, 3), nn.Tanh(), layer)
    with pytest.raises(InputError, match="used 2 times"):
        attach(shared, [(X, X)])


@given(scale=st.floats(1e-3, 1e3), shift=st.floats(-1e3, 1e3), seed=st.integers(0, 20))
def test_statistics_of_scaled_targets_follow_from_those_of_raw_ones(scale, shift, seed):
    P, T = problem(seed=seed)
    scaler = Standardizer(torch.tensor([shift, 1.0]).double(), torch.tensor([scale, 2.0]).double())
    after = Statistics.from_linear_features(P, T).with_targets(scaler.mean, scaler.scale)
    before = Statistics.from_linear_features(P, scaler.forward(T))
    for name in ("mean", "scatter", "energy"):
        close(getattr(after, name), getattr(before, name))


# the loss -----------------------------------------------------------------------------------------------------------


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


def test_training_goes_on_from_a_saved_state(tmp_path):
    P, T = problem(m=100)
    first, again = BLLLoss(100), BLLLoss(100)
    first(P[:50], T[:50])
    torch.save(first.state_dict(), tmp_path / "loss.pt")
    again.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    assert torch.equal(first(P[50:], T[50:]), again(P[50:], T[50:]))


def test_a_loop_of_ones_own_trains_by_it():
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
    with pytest.raises(InputError, match=told):
        use()


RANK_SCRIPT = """
    import sys, torch
    from torch import nn
    from torch.utils.data import DataLoader, Subset, TensorDataset
    from lastlayer import BLLLoss, attach
    from lastlayer.data.distributed import join

    torch.set_num_threads(1)
    group = join()
    g = torch.Generator().manual_seed(0)
    X = torch.randn(96, 3, generator=g, dtype=torch.float64)
    y = torch.sin(X[:, :2]) + 0.1 * torch.randn(96, 2, generator=g, dtype=torch.float64)
    own = Subset(TensorDataset(X, y), range(group.rank, 96, group.world_size))
    loader = DataLoader(own, batch_size=24 // group.world_size)

    torch.manual_seed(1)
    trunk = nn.Sequential(nn.Linear(3, 8), nn.Tanh()).double()
    network = trunk if group.world_size == 1 else nn.parallel.DistributedDataParallel(trunk)
    loss, optimiser, values = BLLLoss(96), torch.optim.SGD(network.parameters(), lr=0.3), []
    for _ in range(5):
        for x, t in loader:
            optimiser.zero_grad()
            value = loss(network(x), t)
            value.backward()
            optimiser.step()
            values.append(value.detach())
    held = torch.randn(20, 3, generator=g, dtype=torch.float64)
    held_out = [(held[group.rank :: group.world_size], torch.sin(2 * held[group.rank :: group.world_size, :2]))]
    model = attach(network, loader, layer=None, calibration=held_out)
    p = model.predictive(3 * X)
    out = {
        "loss": group.sum_(torch.stack(values)) / group.world_size,
        "weight": trunk[0].weight.detach(),
        "mean": torch.tensor(p.mean),
        "std": torch.tensor(p.std),
        "cost": model.fitted_.sample_cost,
    }
    torch.save(out, f"{sys.argv[1]}/{group.world_size}-{group.rank}.pt")
    group.shutdown()
"""


def test_two_processes_give_the_answer_of_one(tmp_path, as_a_user):
    one, *two = alone_and_by_two(RANK_SCRIPT, tmp_path)
    for name, value in one.items():
        for other in two:
            close(other[name], value, loose=1e5 if name == "std" else 1e2)  # the curve's optimum has a flat top


# The example ----------------------------------------------------------------------------------------------------------


def test_the_example_knows_pictures_unlike_those_of_training(as_a_user, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    import attach_resnet

    std = attach_resnet.main(["--pictures", "150", "--epochs", "4"])
    like = std.pop("new discs")
    assert all(other > 2 * like for other in std.values()), (like, std)
    assert "larger discs" in capsys.readouterr().out
