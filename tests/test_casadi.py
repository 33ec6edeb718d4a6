"""`to_casadi` says what `predictive` says: values, Jacobians, and the C code made from it."""

import copy
import ctypes
import itertools
import shutil
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from helpers import refused
from models import FAST, data, far, fitted
from torch import nn

from lastlayer import BLLRegressor
from lastlayer.data.observe import Derivative, Gradient, Value
from lastlayer.errors import MissingPackageError
from lastlayer.formula.ops import CasADiOps
from lastlayer.integrations import export_c, functional_to_casadi, to_casadi
from lastlayer.integrations.c_code import PRODUCT
from lastlayer.integrations.casadi_network import to_expression

pytestmark = pytest.mark.usefixtures("as_a_user")

casadi = pytest.importorskip("casadi")

TOLERANCE = 1e-9


def agrees(function, model, X, noise=True):
    p = model.predictive(X, noise=noise)
    for x, *wanted in zip(X, p.mean[..., None], p.cov(), p.affine_cost[:, None, None], strict=True):
        for a, b in zip(map(np.array, function(x)), wanted, strict=True):
            assert np.abs(a - b).max() <= TOLERANCE * np.abs(b).max()


def test_a_fitted_value_serves_as_well_and_later_updates_do_not_reach_it():
    (X, y), model = data(), copy.deepcopy(fitted("mixture"))
    value, before = model.fitted_, model.predictive(X[:5])
    model.update(X + 1, y)
    found = np.array([to_casadi(value)(x)[0] for x in X[:5]])[..., 0]
    np.testing.assert_allclose(found, before.mean, rtol=TOLERANCE)
    assert np.abs(model.predictive(X[:5]).mean - before.mean).max() > 1e-3


needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed: no C code can be compiled")


def shared_library(source, *flags):
    library = source.with_suffix(".so")
    subprocess.run(["gcc", "-O1", "-fPIC", "-shared", *flags, str(source), "-o", str(library), "-lm"], check=True)
    return library


@needs_gcc
@pytest.mark.parametrize("name", ["single", "mixture, full noise, alpha tuned", "mixture, noise by input"])
def test_exported_c_code_says_what_the_module_says(name, tmp_path):
    """Numbers and Jacobians to 1e-12 of the largest; those of torch, since CasADi wrote the code."""
    (X, _), model = data(), fitted(name)
    library = shared_library(export_c(model, tmp_path / "pump.c"), "-std=c99", "-Wall", "-Werror")
    function = casadi.external("pump", str(library))
    module, names = model.module(), function.name_out()
    assert names == ["mean", "epistemic_var", "noise_var", "affine_cost"]
    points = far(X, 6)
    values = {key: value.detach().numpy() for key, value in module(torch.tensor(points)).items()}
    slopes = [
        torch.autograd.functional.jacobian(lambda z: tuple(module(z[None])[n][0] for n in names), torch.tensor(x))
        for x in points
    ]
    for i, key in enumerate(names):
        exact, found = values[key], np.stack([np.array(function(x)[i])[:, 0] for x in points])
        assert np.abs(found - exact.reshape(found.shape)).max() <= 1e-12 * np.abs(exact).max(), key
        by_torch = np.stack([np.atleast_2d(each[i].numpy()) for each in slopes])
        by_c = np.stack([np.array(function.jacobian()(x, *function(x))[i]) for x in points])
        assert np.all(np.abs(by_c - by_torch) <= 1e-12 * np.abs(by_torch).max((0, 1))), key


@needs_gcc
def test_the_product_in_exported_code_is_a_matrix_product(tmp_path):
    """Whichever factors are transposed; the functions themselves may use some of the cases only."""
    source = tmp_path / "product.c"
    source.write_text(PRODUCT.replace("NAME", "own"))
    product = ctypes.CDLL(str(shared_library(source, "-std=c99"))).own_dgemm
    rng, (m, n, k) = np.random.default_rng(0), (3, 4, 7)
    whole, one = lambda i: ctypes.byref(ctypes.c_int(i)), ctypes.byref(ctypes.c_double(1.0))
    at = lambda M: M.ctypes.data_as(ctypes.POINTER(ctypes.c_double))
    for turned in itertools.product("NT", "NT"):
        A, B, C = (np.asfortranarray(rng.standard_normal(shape)) for shape in ((m, k), (k, n), (m, n)))
        wanted = C + A @ B
        first, second = (np.asfortranarray(M.T) if t == "T" else M for M, t in zip((A, B), turned, strict=True))
        factors = at(first), whole(len(first)), at(second), whole(len(second))
        words = (ctypes.c_char_p(t.encode()) for t in turned)
        product(*words, whole(m), whole(n), whole(k), one, *factors, one, at(C), whole(m))
        np.testing.assert_allclose(C, wanted, rtol=1e-14, atol=1e-14)


def test_a_file_name_that_is_no_c_name_is_refused(tmp_path):
    refused(r"my-model.*name=", export_c, fitted("single"), tmp_path / "my-model.c")
    assert "int own_name(" in export_c(fitted("single"), tmp_path / "my-model.c", name="own_name").read_text()


@pytest.mark.parametrize("blas", ["classic", "blasfeo"])
def test_other_products_say_the_same(blas):
    if not casadi.has_blas(blas):
        pytest.skip(f"this build of CasADi comes without {blas}")
    X, _ = data()
    agrees(to_casadi(fitted("mixture of families"), blas=blas), fitted("mixture of families"), far(X, 5))
    refused("did you mean 'blasfeo'", to_casadi, fitted("single"), blas="blasfe")


class Residual(nn.Module):
    """Not a chain of layers."""

    def __init__(self, d=3, k=6):
        super().__init__()
        self.first, self.second = (nn.Linear(n, k, dtype=torch.float64) for n in (d, k))

    def forward(self, x):
        a = torch.tanh(self.first(x))
        return a + torch.sin(self.second(a))


def double(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers).double()


class Attention(nn.Module):
    """Every input is a token: self-attention over them, with and without its weights, and a layer of a transformer."""

    def __init__(self, d=3, width=4):
        super().__init__()
        self.embed, self.place = nn.Linear(1, width), nn.Parameter(torch.randn(d, width))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(width, 2, 6, activation="gelu", batch_first=True)

    def forward(self, x):
        tokens = self.embed(x[..., None]) + self.place
        tokens = tokens + self.attention(tokens, tokens, tokens)[0]
        return self.layer(tokens).flatten(1)


class RadialBasis(nn.Module):
    def __init__(self, d=3, k=6, distance=False):
        super().__init__()
        self.centres, self.log_width = nn.Parameter(torch.randn(k, d)), nn.Parameter(torch.zeros(k))
        self.distance = distance

    def forward(self, x):
        if self.distance:
            return torch.exp(-torch.cdist(x, self.centres) / self.log_width.exp())
        return torch.exp(-(x[:, None] - self.centres).square().sum(-1) * self.log_width.exp())


class Pooled(nn.Module):
    """Moves, reductions and arithmetic of every kind."""

    def forward(self, x):
        a, b = torch.stack([x, 2 - x], 1), x.flip(1)
        best = torch.maximum(x, b).clamp(-1.5, 0.7)
        mixed = torch.softmax(a, 1) @ (x[:, :, None] * b[:, None] + 1)
        parts = torch.cat([x.amax(1, keepdim=True), best, mixed.mean(-1), (x**2 + 1).rsqrt(), 1 - x.abs()], 1)
        first, rest = parts.split([2, parts.shape[1] - 2], 1)
        return torch.cat([first.sum(1, keepdim=True), -rest.reciprocal().tanh()], 1)


BACKBONES = {
    "residual": lambda: Residual(),
    "layer normalisation": lambda: double(nn.Linear(3, 6), nn.LayerNorm(6), nn.SiLU()),
    "batch normalisation": lambda: double(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5)),
    "attention": lambda: double(Attention()),
    "radial basis": lambda: double(RadialBasis()),
    "radial basis of distances": lambda: double(RadialBasis(distance=True)),
    "moves": lambda: double(nn.Linear(3, 5), Pooled()),
    "moves, softplus": lambda: double(nn.Linear(3, 6), nn.Softplus(), nn.Unflatten(1, (2, 3)), nn.Flatten()),
}


@cache
def with_backbone(kind):
    X, y = data()
    return BLLRegressor(backbone=BACKBONES[kind](), **FAST | {"max_epochs": 3}).fit(X, y)


@pytest.mark.parametrize("kind", BACKBONES)
def test_backbones_and_their_derivatives_are_those_of_torch(kind):
    """To 1e-12 of the largest feature or slope, on MX, SX and numbers."""
    torch.manual_seed(1)
    network = with_backbone(kind).fitted_.members[0].network
    z = torch.randn(3, dtype=torch.float64)
    wanted = network(z[None])[0].detach().numpy()
    slopes = torch.autograd.functional.jacobian(lambda a: network(a[None])[0], z).numpy()
    ops, x = CasADiOps(casadi), casadi.MX.sym("x", 3)
    function = casadi.Function("f", [x], [to_expression(ops, network, x)])
    for same in (function, function.expand()):
        assert np.abs(np.array(same(z.numpy()))[:, 0] - wanted).max() <= 1e-12 * np.abs(wanted).max()
        found = np.array(same.jacobian()(z.numpy(), same(z.numpy())))
        assert np.abs(found - slopes).max() <= 1e-12 * np.abs(slopes).max()


@pytest.mark.parametrize("kind", ["residual", "layer normalisation", "attention", "radial basis"])
def test_a_model_with_a_backbone_says_what_predictive_says(kind):
    X, _ = data()
    agrees(to_casadi(with_backbone(kind)), with_backbone(kind), far(X, 10))


class Odd(nn.Module):
    """Whose expression would be that of another function."""

    def forward(self, x):
        return nn.functional.leaky_relu(x, 0.3)


def test_backbones_without_an_expression_are_refused_with_advice():
    convolution = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 3), nn.Flatten())
    for network, message in (
        (convolution, r"conv1d.*no CasADi expression.*hidden="),
        (Odd(), "other values"),
        (nn.BatchNorm1d(3, track_running_stats=False), "more than 1 value"),
    ):
        refused(message, to_expression, CasADiOps(casadi), network, casadi.MX.sym("x", 3))


def test_without_casadi_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "casadi", None)
    refused(r"pip install 'lastlayer\[control\]'", to_casadi, fitted("single"), error=MissingPackageError)


def test_inputs_that_are_no_table_are_refused():
    X = np.random.default_rng(0).standard_normal((30, 2, 3))
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 4, dtype=torch.float64))
    model = BLLRegressor(backbone=network, **FAST).fit(X, X[:, 0, 0])
    refused("more than two dimensions", to_casadi, model, error=ValueError)


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
