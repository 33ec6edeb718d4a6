"""Every way to compute a fitted model's predictions says what `predictive` says: values and derivatives."""

from functools import cache

import numpy as np
import pytest
import torch
from models import FAST, MODELS, REVISED, SMALL, data, far
from models import fitted as plain

from lastlayer import BLLRegressor
from lastlayer.integrations import to_casadi, variances_to_casadi
from lastlayer.integrations.export import to_arrays
from lastlayer.integrations.export.bundle import Bundle
from lastlayer.networks.mlp import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("small_process")
pytest.importorskip("casadi")

MORE = {
    "one network, encoded": FAST | {"hidden": (6,), "encoding": "piecewise"},
    "no inputs passed on": FAST | {"hidden": (6,), "input_skip": False},
    "alpha on folds": SMALL | {"n_members": 3, "calibration": "alpha"},
} | {name: FAST | {"hidden": (5, 4), "max_epochs": 3, "activation": name} for name in ACTIVATIONS}
KINDS = [*MODELS, *MORE, *REVISED]


@cache
def fitted(kind):
    return BLLRegressor(**MORE[kind]).fit(*data()) if kind in MORE else plain(kind)


def by_module(model, X, path):
    return {name: value.numpy() for name, value in model.module()(torch.tensor(X)).items()}


def by_bundle(model, X, path):
    np.savez(path, **to_arrays(model))
    p = Bundle(path).predict(X)
    found = {name: getattr(p, name) for name in ("mean", "std", "affine_cost", "component_mean", "component_var")}
    found |= {"weights": p.weights[..., 0], "extrapolation": p.extrapolation}
    return found | {f"interval {level}": np.stack(p.interval(level)) for level in (0.5, 0.95, 0.999)}


def by_casadi(model, X, path):
    found = {}
    for function in (to_casadi(model), variances_to_casadi(model)):
        found |= of_points(function, X)
    return found


def of_points(function, X):
    each = zip(*[[np.array(part) for part in function(x)] for x in X], strict=True)
    return dict(zip(function.name_out(), map(np.stack, each), strict=True))


BACKENDS = {
    "module": (by_module, True, 1e-12),
    "bundle": (by_bundle, True, 1e-9),
    "casadi": (by_casadi, True, 1e-9),
    "casadi without noise": (lambda model, X, path: of_points(to_casadi(model, noise=False), X), False, 1e-9),
}


def exact(model, name, X, noise):
    p = model.predictive(X, noise=noise)
    if name == "extrapolation":
        return model.extrapolation(X).quantile
    if name.startswith("interval"):
        return np.stack(p.interval(float(name.split()[1])))
    return p.cov() if name == "cov" else getattr(p, name)


def assert_same(found, wanted, rtol, name):
    """Variances and costs to a share of their own, the rest relative to the largest entry of a column or matrix."""
    scale = np.abs(wanted)
    if name in ("mean", "component_mean", "cov") or name.startswith("interval"):
        scale = scale.max((1, 2) if name == "cov" else -2, keepdims=True)
    assert np.all(np.abs(found.reshape(wanted.shape) - wanted) <= rtol * scale), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_predictive_says(kind, backend, tmp_path):
    """Inside and far outside the data, on both sides of the reach of the curve."""
    model, X = fitted(kind), far(data()[0])
    cost, reach = model.predictive(X).affine_cost, model.fitted_.curve(0).reach
    assert not np.isfinite(reach) or ((cost > reach).any() and (cost < reach).any())
    compute, noise, rtol = BACKENDS[backend]
    found = compute(model, X, tmp_path / "m.npz")
    assert {"mean", "affine_cost"} <= found.keys()
    for name, values in found.items():
        assert_same(values, exact(model, name, X, noise), rtol, name)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_the_mean_are_the_same_in_casadi_and_torch(kind):
    model, X = fitted(kind), far(data()[0], 6)
    function = to_casadi(model)
    jacobian = function.jacobian()
    x = torch.tensor(X, requires_grad=True)
    mean = model.module()(x)["mean"]
    slopes = torch.stack([torch.autograd.grad(each.sum(), x, retain_graph=True)[0] for each in mean.T], 1).numpy()
    for point, slope in zip(X, slopes, strict=True):
        found = np.array(jacobian(point, *function(point))[0])
        assert np.all(np.abs(found - slope) <= 1e-9 * np.abs(slopes).max((0, 1)))
