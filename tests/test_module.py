"""`model.module()` says what `predictive` says, differentiably; so do the torch.export program and the ONNX graph."""

import copy
import importlib.util
import json
import sys
from functools import cache

import numpy as np
import pytest
import torch
from helpers import refused
from models import FAST, data, far, fitted
from torch import nn

from lastlayer import BLLRegressor, __version__
from lastlayer.errors import MissingPackageError
from lastlayer.integrations import onnx
from lastlayer.integrations.onnx import OnnxModule, onnx_program, to_onnx
from lastlayer.predictor.module import OUTPUTS

pytestmark = pytest.mark.usefixtures("as_a_user")

ROWS = torch.export.Dim("rows")
needs_onnx = pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="onnxscript is not installed")


def agrees(values, prediction, rtol):
    """Relative to the largest entry of a column."""
    assert tuple(values) == OUTPUTS
    for name, value in values.items():
        exact = getattr(prediction.with_output_axis(), name)
        error = np.abs(np.asarray(value) - exact).max(0) / np.abs(exact).max(0)
        assert np.all(error <= rtol), (name, error)


@cache
def of_images():
    rng = np.random.default_rng(0)
    images, y = rng.normal(size=(40, 1, 6, 6)), rng.normal(size=(40, 2))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))
    return images, BLLRegressor(backbone=network, dtype="float32", **FAST | {"max_epochs": 2}).fit(images, y)


@pytest.mark.parametrize("name", ["alpha tuned", "mixture, noise by input"])
def test_its_gradients_in_the_inputs_are_right(name):
    module = fitted(name).module()
    x = torch.tensor(far(data()[0], 4))
    sizes = [float(value.abs().max()) for value in module(x).values()]
    f = lambda z: tuple(v / size for v, size in zip(module(z * module.input_scale).values(), sizes, strict=True))
    assert torch.autograd.gradcheck(f, (x / module.input_scale).requires_grad_(), rtol=1e-4, atol=1e-7)
    assert not any(p.requires_grad for p in module.parameters())


def test_it_moves_between_types_and_holds_all_its_numbers_as_state():
    model, X = fitted("mixture, noise by input"), far(data()[0])
    module = model.module()
    agrees(copy.deepcopy(module).float()(torch.tensor(X).float()), model.predictive(X), 1e-3)  # float32 throughout
    numbers = {t.dtype for t in module.float().state_dict().values()}
    assert numbers == {torch.float32}
    meta = model.module().to("meta")
    assert all(value.device.type == "meta" for value in meta(torch.empty(2, 3, device="meta")).values())


def test_inputs_of_more_dimensions_and_networks_of_float32():
    images, model = of_images()
    module = model.module()
    agrees(module(torch.tensor(images)), model.predictive(images), 1e-12)
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_the_exported_program_takes_any_number_of_rows(tmp_path):
    model, X = fitted("mixture, noise by input"), far(data()[0])
    program = torch.export.export(model.module(), (torch.tensor(X[:3]),), dynamic_shapes=({0: ROWS},))
    torch.export.save(program, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2").module()
    for rows in (1, 7, len(X)):
        agrees(again(torch.tensor(X[:rows])), model.predictive(X[:rows]), 1e-12)


def runs(path, X):
    """Outputs by name, from onnxruntime."""
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    assert [put.name for put in session.get_inputs()] == ["x"]
    return dict(zip([put.name for put in session.get_outputs()], session.run(None, {"x": X}), strict=True))


@pytest.fixture
def one_graph(monkeypatch):
    """Of one model, made once: making graphs takes seconds."""
    monkeypatch.setattr(onnx, "onnx_program", lambda *_, **__: the_graph())


@cache
def the_graph():
    X = torch.tensor(far(data()[0], 2))
    return onnx_program(OnnxModule(fitted("alpha tuned"), "float64", "float64"), X)


class Residual(nn.Module):
    """A backbone of the user's, with names of values that the graph's outputs have too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        mean, var = h.mean(1, keepdim=True), h.var(1, keepdim=True)
        return self.norm(h + torch.tanh(self.second(h))) * var + mean


GRAPHS = {
    "alpha tuned": (lambda: fitted("alpha tuned"), "float64", 1e-12),
    "mixture": (lambda: fitted("mixture, noise by input"), "float64", 1e-12),
    "mixture in float32": (lambda: fitted("mixture, noise by input"), "float32", 1e-6),
    "backbone": (lambda: BLLRegressor(backbone=Residual(), **FAST).fit(*data()), "float64", 1e-11),
    # inputs are standardised before they are rounded, and the last layer is not rounded at all; tanh of single
    # precision is not the same everywhere
    "of float32": (lambda: BLLRegressor((5,), dtype="float32", **FAST).fit(*data()), "float64", 3e-6),
    # an operation that onnxruntime has in float32 alone; the rounding of features is times the root of alpha
    "gelu": (lambda: BLLRegressor((5,), activation="gelu", **FAST).fit(*data()), "float32", 1e-5),
}


@needs_onnx
@pytest.mark.parametrize("name", GRAPHS)
def test_onnxruntime_says_what_predictive_says(name, tmp_path, request):
    if name == "alpha tuned":
        request.getfixturevalue("one_graph")
    make, dtype, rtol = GRAPHS[name]
    torch.manual_seed(0)
    model, X = make(), far(data()[0]).astype(dtype)
    path = to_onnx(model, tmp_path / "model.onnx", dtype=dtype)
    assert [value.shape for value in runs(path, X[:0]).values()] == [(0, 2)] * 4 + [(0,)]
    for rows in (1, len(X)):
        values = runs(path, X[:rows])
        assert {value.dtype for value in values.values()} == {np.dtype(dtype)}
        agrees(values, model.predictive(X[:rows]), rtol)


@needs_onnx
def test_images_need_an_example(tmp_path):
    (images, model), path = of_images(), tmp_path / "m.onnx"
    refused("example=X", to_onnx, model, path)
    to_onnx(model, path, example=images)
    agrees(runs(path, images.astype("float32")), model.predictive(images), 1e-6)


def test_the_file_says_what_it_is(tmp_path, one_graph):
    onnx = pytest.importorskip("onnx")
    path = to_onnx(fitted("alpha tuned"), tmp_path / "m.onnx", inputs=["a", "b", "c"], targets=["u", "v"])
    found = onnx.load(path)
    about = json.loads({p.key: p.value for p in found.metadata_props}["lastlayer"])
    assert (found.producer_name, found.producer_version) == ("lastlayer", __version__)
    assert (about["inputs"], about["targets"], about["outputs"]) == (["a", "b", "c"], ["u", "v"], list(OUTPUTS))
    onnx.checker.check_model(found)


@needs_onnx
def test_a_graph_that_says_something_else_is_not_written(tmp_path, one_graph):
    (X, y), path = data(), tmp_path / "m.onnx"
    path.write_text("old")
    other = copy.deepcopy(fitted("alpha tuned")).update(X, y + 1)
    refused("another mean", to_onnx, other, path)
    assert path.read_text() == "old"


@needs_onnx
def test_what_cannot_be_a_graph_is_refused_with_advice(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no such operator\nand a long story")

    monkeypatch.setattr(onnx, "onnx_program", fail)
    refused(r'no such operator\. .*try dtype="float32"', to_onnx, fitted("alpha tuned"), tmp_path / "m.onnx")
    refused(r"not len\(x\)", to_onnx, fitted("alpha tuned"), tmp_path / "m.onnx", dtype="float32")
    refused("did you mean 'float32'", to_onnx, fitted("alpha tuned"), tmp_path / "m.onnx", dtype="float23")


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'lastlayer\[onnx\]'"):
        to_onnx(fitted("alpha tuned"), tmp_path / "m.onnx")
