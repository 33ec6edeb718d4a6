"""A fitted model as a CasADi function: mean, covariance and affine cost, differentiated by CasADi."""

from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from torch import Tensor

from lastlayer import formula
from lastlayer.data.observe import Pointwise
from lastlayer.errors import check_choice, need
from lastlayer.formula.ops import CasADiOps
from lastlayer.integrations.casadi_network import to_expression
from lastlayer.predictor.fitted import Fitted, as_array, as_fitted
from lastlayer.predictor.module import OUTPUTS

if TYPE_CHECKING:
    import casadi

Blas = Literal["reference", "classic", "blasfeo"]


def to_casadi(
    model: Any, noise: bool = True, *, name: str = "predictive", blas: Blas = "reference"
) -> "casadi.Function":
    """Build the CasADi function x (d) -> mean (q), cov (q, q), affine_cost (1) of one point, in original units.

    It computes what `model.predictive` does, in float64, and takes numbers, MX and SX expressions.

    Parameters
    ----------
    model : BLLRegressor or Fitted
        A fitted regressor, or its `fitted_`; docs/control.md lists the layers that a backbone may have.
    noise : bool, default True
        Whether the covariance includes the noise. With False, it is that of the function.
    name, blas : str, {"reference", "classic", "blasfeo"}
        Name of the function, and its matrix products: a loop, or a faster library that C code must be linked to.
    """
    fitted, ops, constants, x = _started(model, blas)
    ca = ops.casadi
    parts = formula.predict(ops, constants, ops.array(x))
    if parts.shape is not None:
        average, epistemic, learned, cost = formula.moments(ops, constants, parts)
        var = epistemic + learned * float(noise)
        return ca.Function(name, [x], [average.value, var.value, cost.value], ["x"], ["mean", "cov", "affine_cost"])
    mean, q = ops.total(parts.weights * parts.mean), fitted.n_outputs
    correlation = np.eye(q) if fitted.correlation is None else fitted.correlation
    columns = ops.array(ca.DM(correlation.reshape(-1, q * q).T))
    within = formula.output_cov(ops, columns, parts.epistemic, parts.noise * float(noise))
    apart = parts.mean - mean
    each = fitted.tails.widening * within + ops.outer(apart, apart)
    cov = ca.reshape(ops.total(parts.weights * each).value, q, q)
    cost = ops.row_mean(ops.average(parts.cost))
    return ca.Function(name, [x], [mean.value, cov, cost.value], ["x"], ["mean", "cov", "affine_cost"])


def variances_to_casadi(model: Any, *, name: str = "variances", blas: Blas = "reference") -> "casadi.Function":
    """Build the CasADi function x (d) -> mean, epistemic_var, noise_var (q), affine_cost (1) of one point.

    Parameters
    ----------
    model, name, blas : object
        As in `to_casadi`.
    """
    _, ops, constants, x = _started(model, blas)
    parts = formula.moments(ops, constants, formula.predict(ops, constants, ops.array(x)))
    outputs = [name for name in OUTPUTS if name != "var"]
    return ops.casadi.Function(name, [x], [part.value for part in parts], ["x"], outputs)


def functional_to_casadi(model: Any, functional: Pointwise, *, name: str = "functional") -> "casadi.Function":
    """Build the CasADi function x (d) -> mean (n), cov (n, n) of a functional at one point, without noise.

    Parameters
    ----------
    model : BLLRegressor or Fitted
        A fitted regressor, or its `fitted_`.
    functional : Pointwise
        The functional: `Derivative(0)` has n = 1 values, `Gradient()` one per input.
    name : str, default "functional"
        Name of the function.
    """
    fitted, ops, constants, x = _started(model)
    fitted.needs("a functional in CasADi", bell=True)
    ca = ops.casadi
    function = formula.functions(ops, constants, formula.standardized(constants, ops.array(x)))
    at, affine = functional.at(np.zeros((1, x.shape[0]))), function.output(functional.output).linear(0).value.T
    whole = ca.mtimes(ca.DM(at.weights), affine)
    if at.directions is not None:
        whole = whole + ca.mtimes(ca.DM(at.directions[:, 0]), ca.jacobian(affine, x).T)
    rows = whole[:, 1:]
    return ca.Function(name, [x], [whole[:, 0], ca.mtimes(rows, rows.T)], ["x"], ["mean", "cov"])


def _started(model: Any, blas: Blas = "reference") -> tuple[Fitted, CasADiOps, formula.State, Any]:
    """The model, CasADi's operations, the constants of the formula, and the symbol of a point."""
    ops = CasADiOps(need("casadi", extra="control"), check_choice("blas", blas, get_args(Blas)))
    fitted = as_fitted(model, "CasADi", table=True)
    return fitted, ops, expressions(ops, fitted), ops.casadi.MX.sym("x", fitted.n_features_in)


def expressions(ops: CasADiOps, fitted: Fitted) -> formula.State:
    """Convert a model into the constants of the predictive formula, with one layer and one column per member."""

    def alone(layer: formula.State, i: int) -> formula.State:
        own = layer.map(lambda value: value[i] if value.dim() > 1 else value)
        return formula.State(**vars(own) | {"places": [layer.places[i]]})

    def constant(value: Tensor) -> Any:
        """A matrix with one column per member, the number of a scalar, or the places of columns."""
        array = as_array(value)
        if not array.ndim or array.dtype.kind != "f":
            return array if array.ndim else float(array)
        return ops.array(ops.casadi.DM(array.reshape(-1, array.shape[-1]).T))

    state = fitted.state
    layers = [alone(layer, i) for layer in state.layers for i in range(len(layer.places))]
    parts: dict[str, Any] = {"layers": sorted(layers, key=lambda layer: layer.places), "order": None}
    model: formula.State = formula.State(**vars(state) | parts).map(constant)
    for layer in [*model.layers, *([model.outside.process] if model.outside and model.outside.process else [])]:
        if (network := layer.network.own) is not None:
            layer.network.own = lambda z, network=network: ops.array(to_expression(ops, network, z.value))
    return formula.State(**vars(model) | {"roots": as_array(state.roots)})
