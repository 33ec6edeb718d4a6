"""A fitted model as a CasADi function: mean, covariance and affine cost, with CasADi's own derivatives."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lastlayer import formula
from lastlayer.errors import InputError, need
from lastlayer.integrations.onnx import first_line, onnx_program
from lastlayer.networks.mlp import MLP, InputSkip, encoding_of, inner_network
from lastlayer.observe import Pointwise
from lastlayer.ops import CasADiOps, Each
from lastlayer.predictor.fitted import Fitted, as_fitted

if TYPE_CHECKING:
    import casadi

CLOSE = 1e-5
"""ONNX keeps some constants of float64 graphs in float32: an expression off by more than this is another one."""


def to_casadi(model: Any, noise: bool = True, *, name: str = "predictive") -> "casadi.Function":
    """x (d) -> mean (q), cov (q, q), affine_cost (1): what `model.predictive` says of one point, in original units.

    With `noise=False` the covariance is that of the function. The built-in network becomes an MX expression, any other
    backbone goes through ONNX (see docs/control.md for what CasADi can read). Everything is float64: a network of
    float32 agrees to its own precision.
    """
    ca = need("casadi", extra="control")
    fitted, ops = as_fitted(model).uncoupled("the covariance in CasADi"), CasADiOps(ca)
    if fitted.inputs is None:
        raise InputError("the model takes inputs of more than two dimensions: only a model of tables can be written so")
    x = ca.MX.sym("x", len(fitted.inputs.mean))
    parts = formula.predict(ops, expressions(ca, fitted), x.T)
    mean = ops.total(parts.weights * parts.mean)
    own_noise = parts.noise * float(noise)
    if fitted.correlation is None:
        within = (parts.epistemic + own_noise).map(lambda var: ca.diag(var))
    else:
        correlation = Each([ca.DM(C) for C in fitted.correlation])
        within = formula.output_cov(ops, correlation, parts.epistemic, own_noise)
    cov = fitted.tails.widening * ops.total(parts.weights * within)
    if len(fitted.members) > 1:
        between = parts.mean - mean
        cov = cov + ops.total(parts.weights * ops.outer(between, between))
    cost = ops.row_mean(ops.average(parts.cost))
    return ca.Function(name, [x], [mean.T, ca.densify(cov), cost], ["x"], ["mean", "cov", "affine_cost"])


def functional_to_casadi(model: Any, functional: Pointwise, *, name: str = "functional") -> "casadi.Function":
    """x (d) -> mean (n), cov (n, n): what `model.predictive_of` says of a functional at one point, without noise.

    `Derivative(0)` has n = 1, `Gradient()` one for each input.
    """
    ca = need("casadi", extra="control")
    fitted = as_fitted(model)
    if fitted.inputs is None:
        raise InputError("the model takes inputs of more than two dimensions: only a model of tables can be written so")
    d = len(fitted.inputs.mean)
    x = ca.MX.sym("x", d)
    at, said = functional.at(np.zeros((1, d))), _linear_map(ca, fitted, x, functional.output)
    whole = ca.mtimes(ca.DM(at.weights), said)
    if at.directions is not None:
        whole = whole + ca.mtimes(ca.DM(at.directions[:, 0]), ca.jacobian(said, x).T)
    rows = whole[:, 1:]
    return ca.Function(name, [x], [whole[:, 0], ca.mtimes(rows, rows.T)], ["x"], ["mean", "cov"])


def _linear_map(ca: Any, fitted: Fitted, x: Any, output: int) -> Any:
    """[mean, G] of one output at a point, as `Predictor.linear_map` has it: (1, r)."""
    ops, model = CasADiOps(ca), expressions(ca, fitted)
    z = formula.standardized(model, x.T)
    phi = [layer.features(ops, z) for layer in model.layers]
    layers = list(zip(model.layers, phi, strict=True))
    said = formula.joined(ops, model, [formula.last_layer(ops, layer, features) for layer, features in layers])
    parts = formula.components(ops, model, said, z)
    stretch = formula.stretch(ops, model.curve, parts.cost, formula.far_of(ops, model, parts.cost_star))
    mean = ops.total(parts.weights * parts.mean)[0, output]
    std = np.sqrt(fitted.tails.widening * _array(fitted.predictor.function_cov)[:, output, output])
    columns = [mean]
    for i, (layer, features) in enumerate(layers):
        block = ca.horzsplit(formula.rows(ops, layer, features), layer.root.shape[1] // layer.n_costs)
        own = output if layer.n_costs > 1 else 0
        columns.append(ca.sqrt(parts.weights.parts[i]) * std[i] * stretch.parts[i][0, own] * block[own])
    if len(layers) > 1:
        apart = (parts.mean.map(lambda row: row[0, output]) - mean) * ops.sqrt(parts.weights)
        columns += apart.parts
    return ca.horzcat(*columns)


def expressions(ca: Any, fitted: Fitted) -> SimpleNamespace:
    """The model as the predictive formula takes it: constants in rows, one per member."""
    p = fitted.predictor
    row = lambda values: ca.DM(np.atleast_2d(_array(values)))
    each = lambda values: Each([row(value) for value in values])
    layers: dict[int, SimpleNamespace] = {}
    for layer in p.groups():
        for i, place in enumerate(layer.group.places):
            numbers = {key: None if v is None else row(v[i]) for key, v in layer.named_buffers(recurse=False)}
            numbers |= {key: None for key in ("root_star", "shift_star") if key not in numbers}
            layers[place] = SimpleNamespace(**numbers, n_costs=layer.n_costs)
            layers[place].features = _features(ca, fitted.members[place].network, numbers["centre"])
    c = len(fitted.members)
    return SimpleNamespace(
        input_mean=row(p.input_mean),
        input_scale=row(p.input_scale),
        layers=[layers[i] for i in range(c)],
        order=None,
        curve=SimpleNamespace(**{key: each(v) for key, v in p.curve.named_buffers()}),
        head=None if p.head is None else SimpleNamespace(**{key: row(v) for key, v in p.head.named_buffers()}),
        outside=None if p.outside is None else SimpleNamespace(**_scalars(p.outside), place=p.outside.place),
        log_noise_var=each(p.log_noise_var),
        centre=Each([row(p.centre)] * c),
        log_precision=None if p.log_precision is None else Each([row(p.log_precision)] * c),
        sharpness=float(p.sharpness),
    )


def _scalars(numbers: nn.Module) -> dict[str, float]:
    return {key: float(value) for key, value in numbers.named_buffers()}


def _features(ca: Any, network: nn.Module, centre: Any) -> Any:
    """(ops, z) -> centred features of one network."""
    inner, passes, scale = inner_network(network), isinstance(network, InputSkip), 1.0
    if isinstance(network, InputSkip) and network.scale is not None:
        scale = ca.DM(_array(network.scale)[None])
    own, encoding, columns = encoding_of(network), None, []
    if own is not None:
        columns = own.column.tolist()
        encoding = SimpleNamespace(slope=ca.DM(_array(own.slope)[None]), shift=ca.DM(_array(own.shift)[None]))

    def features(ops: Any, z: Any) -> Any:
        inputs = z if encoding is None else formula.encoded(ops, encoding, z[:, columns])
        if isinstance(inner, nn.Identity):
            phi = inputs
        elif isinstance(inner, MLP):
            linears = [layer for layer in inner if isinstance(layer, nn.Linear)]
            weights = [ca.DM(_array(layer.weight).T) for layer in linears]
            biases = [ca.DM(_array(layer.bias)[None]) for layer in linears]
            phi = formula.mlp(ops, inner.activation, weights, biases, inputs)
        else:
            phi = _through_onnx(ca, inner, z.shape[1])(z)
        return (ca.horzcat(phi, z * scale) if passes else phi) - centre

    return features


def _through_onnx(ca: Any, network: nn.Module, n_inputs: int) -> "casadi.Function":
    """(1, d) -> (1, k): the network as an MX function, compared with the network itself at a few points."""
    need("onnxscript", extra="control")
    dtype = next((p.dtype for p in network.parameters()), torch.float64)
    Z = torch.randn(5, n_inputs, dtype=dtype, generator=torch.Generator().manual_seed(0))
    kind = type(network).__name__
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "backbone.onnx")
        try:
            onnx_program(network, Z[:1]).save(path)
            function = ca.GraphBuilder(path).create("backbone", {"symbolic": True})
            found = np.vstack([np.array(function(row[None])) for row in Z.double().numpy()])
        except Exception as error:  # torch and CasADi raise of many kinds: all mean that this network does not pass
            raise InputError(
                f"the backbone ({kind}) could not be read by CasADi through ONNX: {first_line(error)}. Known to work: "
                "linear layers, elementwise functions and batch normalisation; known to fail: convolutions, layer "
                "normalisation and recurrent cells. Take such layers, or hidden=... for the built-in network"
            ) from error
    with torch.no_grad():
        wanted = network.eval()(Z).double().numpy()
    if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=CLOSE, atol=CLOSE * np.abs(wanted).max()):
        raise InputError(f"CasADi read the backbone ({kind}) from ONNX as another function; give hidden=... instead")
    return function


def _array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().double().numpy()
