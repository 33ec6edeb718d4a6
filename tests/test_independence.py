"""What is made of a fitted model is its own: neither reaches the other."""

import copy
import math
from functools import cache

import numpy as np
import pytest
import torch
from models import data, far, fitted
from torch import nn

from lastlayer import BLLRegressor
from lastlayer.dynamics import DynamicsModel, Episode, Lags, Linearized, SampledWeights, Unscented
from lastlayer.integrations import to_casadi
from lastlayer.integrations.botorch import BLLModel
from lastlayer.online import OnlineModel

NAMES = ["single", "mixture", "mixture, noise by input", "mixture, full noise, alpha tuned"]
KEPT = ("component_mean", "component_epistemic_var", "component_noise_var", "weights", "affine_cost")


def backbone() -> nn.Module:
    """One that says something else in training mode, and changes when it is asked there."""
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5)).double()


@cache
def of_backbones():
    return BLLRegressor(backbone=backbone, n_members=2, max_epochs=5, random_state=0).fit(*data())


def made(name):
    """Online models follow finite alphas alone, and some of the models were tuned to an infinite one."""
    model = of_backbones() if name == "backbones" else fitted(name)
    return model if np.isfinite(model.alpha_) else model.at_alpha(math.log(model.alpha_star_) + 1)


def answers(model):
    """To the last bit."""
    p = model.predictive(far(data()[0], 12))
    return {name: getattr(p, name) for name in KEPT}


def equal(a, b):
    return all(np.array_equal(a[name], b[name]) for name in KEPT)


def spoil(module: nn.Module) -> None:
    """All that can be done to a module."""
    nn.Sequential(module).train()(torch.randn(16, 3, dtype=torch.float64))
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.fill_(7.0)
    module.float().requires_grad_(True)


def told_of(model):
    """Models, modules and functions that hold the model, and what each says of some points."""
    X = far(data()[0], 12)
    online, module, botorch, function = OnlineModel(model), model.module(), BLLModel(model), to_casadi(model)
    value, view = model.fitted_, model.at_alpha(2.0)
    return {
        "online": lambda: online.predictive(X).component_mean,
        "module": lambda: module(torch.tensor(X))["var"].numpy(),
        "botorch": lambda: botorch.posterior(torch.tensor(X), observation_noise=True).variance.numpy(),
        "casadi": lambda: np.stack([np.array(function(x)[1]) for x in X]),
        "value": lambda: value.predictive(X).component_var,
        "view": lambda: view.predictive(X).component_var,
    }


@pytest.mark.parametrize("name", NAMES)
def test_updates_of_the_regressor_reach_nothing_made_of_it(name):
    (X, y), model = data(), copy.deepcopy(made(name))
    before = answers(model)
    asked = told_of(model)
    said = {kind: ask().copy() for kind, ask in asked.items()}
    model.update(X + 1, y + 50).reestimate()
    assert not equal(answers(model), before)
    for kind, ask in asked.items():
        np.testing.assert_array_equal(ask(), said[kind], err_msg=kind)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_an_online_model_do_not_reach_the_regressor(name):
    (X, y), model = data(), made(name)
    before = answers(model)
    online = OnlineModel(model)
    online.update(X[:1], y[:1] + 50).update(X, y + 50).remove(X[:1], y[:1] + 50).reestimate()
    later = online.model()
    assert equal(answers(model), before)
    assert not equal(answers(later), before)
    now = online.predictive(X).component_mean
    later.update(X, y - 50)
    np.testing.assert_array_equal(online.predictive(X).component_mean, now)


@pytest.mark.parametrize("name", [*NAMES, "mixture, uncalibrated", "backbones"])
def test_nothing_done_to_modules_reaches_the_regressor(name):
    model = made(name)
    before = answers(model)
    joint = model.joint(data()[0][:4]).cov()
    spoil(model.module())
    if name != "backbones":
        botorch, X = BLLModel(model), torch.tensor(data()[0][:4])
        botorch.condition_on_observations(X, torch.tensor(data()[1][:4]) + 50)
        spoil(botorch.draw(seed=0))
        spoil(botorch)
    assert equal(answers(model), before)
    np.testing.assert_array_equal(model.joint(data()[0][:4]).cov(), joint)
    assert not equal(answers(copy.deepcopy(model).update(*data())), before)


def test_a_conditioned_botorch_model_leaves_the_one_it_came_from():
    X, y = (torch.tensor(part[:5]) for part in data())
    model = BLLModel(fitted("mixture"))
    before = model.posterior(X)
    later = model.condition_on_observations(X, y + 50)
    assert torch.equal(model.posterior(X).mean, before.mean)
    assert torch.equal(model.posterior(X).variance, before.variance)
    assert not torch.allclose(later.posterior(X).mean, before.mean)


@cache
def dynamics():
    rng = np.random.default_rng(0)
    episodes = [Episode.of(rng.standard_normal((12, 2)).cumsum(0), rng.standard_normal((11, 1))) for _ in range(4)]
    words = {"hidden": (4,), "n_members": 2, "hidden_prior": 0.3, "max_epochs": 10, "random_state": 0}
    return DynamicsModel(Lags(1, 1), BLLRegressor(**words)).fit(episodes), episodes


@pytest.mark.parametrize("by", [SampledWeights(20), SampledWeights(20, calibrated=False), Linearized(), Unscented()])
def test_a_rollout_does_not_change_the_regressor_nor_its_arguments(by):
    model, _ = dynamics()
    start, inputs = np.array([[0.1, 0.2]]), np.ones((1, 6, 1))
    points = np.random.default_rng(1).standard_normal((5, 3))
    before = model.regressor_.predictive(points)
    rollout = model.rollout(start, inputs, by=by, noise="measurement")
    kept = rollout.mean.copy()
    after = model.regressor_.predictive(points)
    for name in KEPT:
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    np.testing.assert_array_equal(start, [[0.1, 0.2]])
    np.testing.assert_array_equal(inputs, 1)
    other = copy.deepcopy(model)
    other.regressor_.update(points, points[:, :2] + 30)
    np.testing.assert_array_equal(rollout.mean, kept)
    again = model.rollout(start, inputs, by=by, noise="measurement")
    np.testing.assert_array_equal(again.mean, kept)
    assert not np.array_equal(other.rollout(start, inputs, by=by, noise="measurement").mean, kept)


def test_networks_and_rows_that_were_handed_over_are_copied():
    """A module, and what a factory made."""
    torch.manual_seed(0)
    made, (X, y) = [backbone()], data()
    factory = lambda: made.append(backbone()) or made[-1]
    words = {"max_epochs": 3, "random_state": 0}
    models = [
        BLLRegressor(backbone=made[0], preset="evidence", **words),
        BLLRegressor(backbone=factory, n_members=2, **words),
    ]
    before = [answers(model.fit(X, y)) for model in models]
    for network in made:
        spoil(network)
    X += 100
    for model, old in zip(models, before, strict=True):
        assert equal(answers(model), old)
        for member in model.members_:
            assert not member.network.training
            assert not any(p.requires_grad for p in member.network.parameters())
