"""A fitted model as one ONNX graph: mean, variances and affine cost, for any runtime that reads ONNX."""

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, nn

from lastlayer import __version__
from lastlayer._internal.arrays import as_array
from lastlayer._internal.files import replacing
from lastlayer.errors import InputError, check_choice, need
from lastlayer.predictor.fitted import Fitted, as_fitted
from lastlayer.predictor.module import OUTPUTS
from lastlayer.settings.types import DTYPES

INPUT = "x"
CLOSE = {"float64": 1e-9, "float32": 1e-4}
"""Largest accepted difference between graph and model, relative to the largest value, by the least precise type
used."""
ADVICE = {
    "float64": 'onnxruntime has many operators, such as convolutions, only in float32: try dtype="float32"',
    "float32": "Use layers that ONNX supports, and no Python number that depends on the rows (x.shape[0], not len(x))",
}


def to_onnx(
    model: Any,
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    example: Any = None,
    inputs: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
) -> Path:
    """Write the graph x (rows, ...) -> mean, var, epistemic_var, noise_var (rows, q), affine_cost (rows,).

    Outputs are in original units; `var` includes the noise. onnxruntime compares the graph with the model first.

    Parameters
    ----------
    model : BLLRegressor or Fitted
        A fitted regressor, or its `fitted_`.
    path : str or path
        The file to write.
    dtype : {"float64", "float32"}, default None
        Type of inputs and outputs. None: that of the model. The last layer is always computed in float64.
    example : array-like, default None
        Two or more inputs, required if they have more than two dimensions; graph and model are compared there.
    inputs, targets : sequence of str, default None
        Names of the columns, for the JSON metadata stored in the file under the key "lastlayer".
    """
    need("onnxscript", extra="onnx")
    runtime = need("onnxruntime", extra="onnx")
    quiet = runtime.SessionOptions()
    quiet.log_severity_level = 3
    fitted = as_fitted(model, "to_onnx")
    own = fitted.settings.place.dtype
    dtype = check_choice("dtype", own if dtype is None else dtype, DTYPES)
    points = _points(fitted, example).astype(dtype)
    inner = dict.fromkeys([own, dtype] if dtype == "float32" else [own])
    failures: list[Exception] = []
    for network in inner:
        try:
            program = onnx_program(OnnxModule(fitted, dtype, network), torch.from_numpy(points[:2]))
            _name(program.model)
            _describe(program.model, fitted, {"dtype": dtype, "network": network}, inputs, targets)
            content = program.model_proto.SerializeToString()
            found = runtime.InferenceSession(content, quiet).run(None, {INPUT: points})
            break
        except Exception as error:  # any kind: torch or onnxruntime does not support this network
            failures.append(error)
    else:
        raise InputError(
            f"the network ({type(fitted.members[0].network).__name__}) could not be written as an ONNX graph that "
            f"onnxruntime runs: {first_line(failures[-1])}. {ADVICE[dtype]}"
        ) from failures[-1]
    exact = fitted.predictive(points).with_output_axis()
    for name, value in zip(OUTPUTS, found, strict=True):
        wanted = getattr(exact, name)
        off = np.abs(value - wanted).max() / np.abs(wanted).max()
        if not off <= CLOSE["float32" if "float32" in (dtype, network) else "float64"]:
            raise InputError(
                f"onnxruntime computes another {name}, off by {off:.0e} of its largest value: nothing was written"
            )
    with replacing(path) as file:
        file.write(content)
    return Path(path)


class OnnxModule(nn.Module):
    """The predictive formula: inputs and outputs of one type, networks of another, the last layer in float64."""

    def __init__(self, fitted: Fitted, dtype: str, network: str) -> None:
        super().__init__()
        self.predictive, self.dtype = fitted.module().cpu(), DTYPES[dtype]
        for layer in self.predictive.layers:
            layer.network.to(DTYPES[network])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = self.predictive(torch.cat([x, x.new_zeros(1, *x.shape[1:])]))
        return tuple(values[name][: x.shape[0]].to(self.dtype) for name in OUTPUTS)


def onnx_program(network: nn.Module, example: Tensor) -> Any:
    """Export a network of any number of rows, without torch's warnings and log messages."""
    shapes = ({0: torch.export.Dim("rows")},)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(network.eval(), (example,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    finally:
        logger.setLevel(level)
    assert program is not None
    return program


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if lines[0].startswith("Error in") else lines[0]


def _points(fitted: Fitted, example: Any) -> ndarray:
    if example is not None:
        points = np.asarray(as_array(example))
        if len(points) < 2:
            raise InputError(f"example has {len(points)} rows: give 2 or more, so that the number of rows stays free")
        return points[:5]
    if fitted.inputs is None:
        raise InputError("the model takes inputs of more than two dimensions: give to_onnx some, such as example=X[:5]")
    normal = np.random.default_rng(0).standard_normal((5, fitted.n_features_in))
    return np.asarray(fitted.inputs.mean.numpy() + fitted.inputs.scale.numpy() * normal)


def _name(graph_model: Any) -> None:
    """Name inputs and outputs; inner values get a prefix, so that no name is used twice."""
    graph = graph_model.graph
    for node in graph:
        for value in node.outputs:
            value.name = f"inner.{value.name}"
    for value, name in zip([*graph.inputs, *graph.outputs], [INPUT, *OUTPUTS], strict=True):
        value.name = name


def _describe(
    graph_model: Any, fitted: Fitted, types: dict[str, str], inputs: Sequence[str] | None, targets: Sequence[str] | None
) -> None:
    names = fitted.feature_names if inputs is None else inputs
    about = {
        "version": __version__,
        **types,
        "inputs": None if names is None else [str(name) for name in names],
        "targets": [f"y{i + 1}" for i in range(fitted.n_outputs)] if targets is None else list(targets),
        "outputs": list(OUTPUTS),
        "members": len(fitted.members),
    }
    graph_model.producer_name, graph_model.producer_version = "lastlayer", __version__
    graph_model.metadata_props["lastlayer"] = json.dumps(about)
