"""`to_casadi` says what `predictive` says: values, Jacobians, and the C code made from it."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from models import FAST, MODELS, data, far, fitted
from torch import nn

from lastlayer import BLLRegressor
from lastlayer.errors import MissingPackageError
from lastlayer.features import ACTIVATIONS
from lastlayer.integrations import functional_to_casadi, to_casadi
from lastlayer.observe import Derivative, Gradient, Value

pytestmark = pytest.mark.usefixtures("as_a_user")

casadi = pytest.importorskip("casadi")

TOLERANCE = 1e-9


def agrees(function, model, X, noise=True):
    p = model.predictive(X, noise=noise)
    cov = p.cov()
    for x, mean, C, cost in zip(X, p.mean, cov, p.affine_cost, strict=True):
        found = [np.array(part) for part in function(x)]
        for a, b in zip(found, (mean[:, None], C, [[cost]]), strict=True):
            scale = np.abs(b).max()
            assert np.abs(a - b).max() <= TOLERANCE * scale, np.abs(a - b).max() / scale


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("noise", [True, False])
def test_it_says_what_predictive_says(name, noise):
    (X, _), model = data(), fitted(name)
    points = far(X)
    reach = model.curve_.reach
    if np.isfinite(reach):  # both branches of the curve are tried
        cost = model.predictive(points).affine_cost
        assert (cost > reach).any()
        assert (cost < reach).any()
    agrees(to_casadi(model, noise=noise), model, points, noise)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_activation(activation):
    X, y = data(q=1, d=2)
    model = BLLRegressor((5, 4), activation=activation, **FAST).fit(X, y)
    agrees(to_casadi(model), model, far(X))


@pytest.mark.parametrize("name", ["single", "mixture", "mixture, noise by input"])
def test_its_jacobians_are_differences_of_predictive(name):
    (X, _), model = data(), fitted(name)
    function = to_casadi(model)
    jacobian = function.jacobian()
    for x in far(X, 5):
        outputs = function(x)
        exact = [np.array(J) for J in jacobian(x, *outputs)]
        step = 1e-5 * X.std(0)
        up, down = (model.predictive(x + sign * np.diag(step)) for sign in (1, -1))
        parts = [
            (p.mean, p.cov().transpose(0, 2, 1).reshape(len(step), -1), p.affine_cost[:, None]) for p in (up, down)
        ]
        for J, a, b in zip(exact, *parts, strict=True):
            slope = ((a - b) / (2 * step[:, None])).T
            # differences of this step are right to about 1e-9 / 1e-5 of the values' change
            np.testing.assert_allclose(J * step, slope * step, rtol=1e-5, atol=1e-9 * np.abs(a).max())


def test_a_fitted_value_serves_as_well_and_later_updates_do_not_reach_it():
    (X, y), model = data(), copy.deepcopy(fitted("mixture"))
    value, before = model.fitted_, model.predictive(X[:5])
    model.update(X + 1, y)
    found = np.array([to_casadi(value)(x)[0] for x in X[:5]])[..., 0]
    np.testing.assert_allclose(found, before.mean, rtol=TOLERANCE)
    assert np.abs(model.predictive(X[:5]).mean - before.mean).max() > 1e-3


def test_generated_c_code_computes_the_same(tmp_path):
    (X, _), model = data(), fitted("mixture")
    function = to_casadi(model, name="predictive")
    generator = casadi.CodeGenerator("predictive.c")
    generator.add(function)
    generator.add(function.jacobian())
    generator.generate(f"{tmp_path}/")
    library = tmp_path / "predictive.so"
    subprocess.run(
        ["gcc", "-O1", "-fPIC", "-shared", str(tmp_path / "predictive.c"), "-o", str(library), "-lm"], check=True
    )
    compiled = casadi.external("predictive", str(library))
    agrees(compiled, model, far(X))
    slopes = casadi.external(function.jacobian().name(), str(library))
    for x in far(X, 3):
        for a, b in zip(slopes(x, *function(x)), function.jacobian()(x, *function(x)), strict=True):
            np.testing.assert_allclose(np.array(a), np.array(b), rtol=TOLERANCE, atol=1e-12)


class Residual(nn.Module):
    """Not a chain of layers."""

    def __init__(self, d=3, k=6):
        super().__init__()
        self.first, self.second = (nn.Linear(n, k, dtype=torch.float64) for n in (d, k))

    def forward(self, x):
        a = torch.tanh(self.first(x))
        return a + torch.sin(self.second(a))


def test_a_backbone_goes_through_onnx():
    X, y = data()
    model = BLLRegressor(backbone=Residual(), **FAST).fit(X, y)
    agrees(to_casadi(model), model, far(X))


def test_a_backbone_that_casadi_cannot_read_is_refused_with_advice():
    X, y = data()
    network = nn.Sequential(nn.Linear(3, 6, dtype=torch.float64), nn.LayerNorm(6, dtype=torch.float64), nn.Tanh())
    model = BLLRegressor(backbone=network, **FAST).fit(X, y)
    with pytest.raises(ValueError, match=r"Sequential.*LayerNormalization.*hidden="):
        to_casadi(model)


def test_without_casadi_it_says_what_to_install(monkeypatch):
    X, y = data(q=0, d=1)
    model = BLLRegressor((), **FAST).fit(X, y)
    monkeypatch.setitem(sys.modules, "casadi", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'lastlayer\[control\]'"):
        to_casadi(model)


def test_inputs_that_are_no_table_are_refused():
    X = np.random.default_rng(0).standard_normal((30, 2, 3))
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 4, dtype=torch.float64))
    model = BLLRegressor(backbone=network, **FAST).fit(X, X[:, 0, 0])
    with pytest.raises(ValueError, match="more than two dimensions"):
        to_casadi(model)


@pytest.mark.parametrize("name", ["single", "mixture of families", "partly missing targets"])
@pytest.mark.parametrize("functional", [Value(1), Derivative(2, output=1), Gradient()])
def test_a_functional_is_what_predictive_of_says(name, functional):
    (X, _), model = data(), fitted(name)
    function = functional_to_casadi(model, functional)
    for x in far(X, 4):
        mean, cov = (np.array(part) for part in function(x))
        said = model.predictive_of(functional, x[None])
        np.testing.assert_allclose(mean[:, 0], said.mean, rtol=1e-8, atol=1e-9 * np.abs(said.mean).max())
        np.testing.assert_allclose(cov, said.cov(), rtol=1e-7, atol=1e-9 * said.cov().max())
