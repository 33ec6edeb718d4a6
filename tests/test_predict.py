"""`predict` asks for less than `predictive` does and says the same, for any number of rows."""

from functools import cache

import numpy as np
import pytest
import torch
from models import MODELS, SMALL, data, far, fitted

from lastlayer import BLLRegressor

pytestmark = pytest.mark.usefixtures("as_a_user")

RTOL = 1e-12
ONES = ("single", "shared prior, full noise", "alpha tuned", "no hidden layer", "single, calibrated by groups")
WITHOUT_COSTS = (*ONES, "mixture, uncalibrated")
"""Members that the costs neither weigh nor shrink."""


@cache
def of_float32() -> BLLRegressor:
    return BLLRegressor(**SMALL, n_members=3, dtype="float32").fit(*data())


@cache
def of_one_output() -> BLLRegressor:
    X, y = data()
    return BLLRegressor(**SMALL, n_members=3).fit(X, y[:, 0])


EVERY = {name: lambda name=name: fitted(name) for name in MODELS} | {"float32": of_float32, "1-D": of_one_output}


def same(found, expected):
    """Relative to the largest entry of a column."""
    assert found.shape == expected.shape
    assert np.all(np.abs(found - expected) <= RTOL * np.abs(expected).max(0))


@pytest.mark.parametrize("name", EVERY)
def test_it_is_the_mean_and_the_deviation_of_predictive(name):
    model, X = EVERY[name](), far(data()[0])
    p = model.predictive(X)
    same(model.predict(X), p.mean)
    mean, std = model.predict(X, return_std=True)
    same(mean, p.mean)
    np.testing.assert_allclose(std, p.std, rtol=RTOL)


@pytest.mark.parametrize("name", ONES)
def test_of_one_member_it_is_the_same_to_the_last_bit(name):
    model, X = fitted(name), far(data()[0], 3000)
    np.testing.assert_array_equal(model.predict(X), model.predictive(X).mean)


@pytest.mark.parametrize("name", WITHOUT_COSTS)
def test_the_mean_needs_no_costs_where_they_change_nothing(name):
    model, x = fitted(name), torch.tensor(far(data()[0]))
    module = model.module()
    for layer in module.layers:
        layer.root.fill_(torch.nan)
    same(module.mean(x).numpy(), model.predict(x.numpy()))
    assert module(x)["var"].isnan().all()


@pytest.mark.parametrize("name", ["mixture", "mixture, noise by input"])
def test_a_member_alone_is_shrunk_as_among_the_others(name):
    value, X = fitted(name).fitted_, far(data()[0])
    each = value.predictive(X).component_mean
    for i in range(len(value.members)):
        same(value.alone(i).point(X), each[i])


@pytest.mark.parametrize("name", ["single", "mixture of families", "mixture, noise by input", "float32"])
def test_many_rows_are_predicted_as_each_of_them_alone(name):
    """More rows than go through networks, or through the formula, at a time."""
    model, X = EVERY[name](), far(data()[0], 20_000)
    some = np.append(np.arange(0, len(X), 1777), len(X) - 1)
    p, mean, cost = model.predictive(X), model.predict(X), model.extrapolation(X).affine_cost
    _, std = model.predict(X, return_std=True)
    rtol = 1e-4 if name == "float32" else 1e-9
    for i in some:
        alone = model.predictive(X[[i]])
        for found in (mean[i], p.mean[i]):
            np.testing.assert_allclose(found, alone.mean[0], rtol=rtol, atol=rtol * np.abs(mean).max())
        for found in (std[i], p.std[i]):
            np.testing.assert_allclose(found, alone.std[0], rtol=rtol)
        np.testing.assert_allclose(p.weights[:, i], alone.weights[:, 0], rtol=rtol)
        np.testing.assert_allclose(p.affine_cost[i], alone.affine_cost[0], rtol=rtol)
        np.testing.assert_allclose(cost[i], model.extrapolation(X[[i]]).affine_cost[0], rtol=rtol)


@pytest.mark.parametrize("name", ["single", "mixture, noise by input"])
def test_the_gradient_of_the_mean_alone_is_that_of_the_module(name):
    module, X = fitted(name).module(), far(data()[0])
    x = torch.tensor(X, requires_grad=True)
    (found,) = torch.autograd.grad(module.mean(x).sum(), x)
    (expected,) = torch.autograd.grad(module(x)["mean"].sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))
