"""A fitted model as a CasADi function: mean, covariance and affine cost, differentiated by CasADi."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from torch import Tensor, nn

from lastlayer import formula
from lastlayer.data.observe import Pointwise
from lastlayer.errors import InputError, check_choice, need
from lastlayer.formula.ops import CasADiOps, Columns
from lastlayer.integrations.casadi_network import to_expression
from lastlayer.networks.mlp import MLP, InputSkip, encoding_of, inner_network
from lastlayer.predictor.fitted import Fitted, as_fitted
from lastlayer.predictor.module import OUTPUTS

if TYPE_CHECKING:
    import casadi

Blas = Literal["reference", "classic", "blasfeo"]


def to_casadi(
    model: Any, noise: bool = True, *, name: str = "predictive", blas: Blas = "reference"
) -> "casadi.Function":
    """Build the CasADi function x (d) -> mean (q), cov (q, q), affine_cost (1) of one point, in original units.

    It computes what `model.predictive` does, and takes numbers, MX and SX expressions. All arithmetic is float64; it
    agrees with a float32 network to float32 precision.

    Parameters
    ----------
    model : BLLRegressor or Fitted
        A fitted regressor, or its `fitted_`. A user's backbone is read from its `torch.export` graph; docs/control.md
        lists the supported layers.
    noise : bool, default True
        Whether the covariance includes the noise. With False, it is that of the function.
    name : str, default "predictive"
        Name of the function.
    blas : {"reference", "classic", "blasfeo"}, default "reference"
        Matrix products that CasADi uses. "reference" is CasADi's own loop, whose C code has no dependencies; the others
        are faster, and C code generated from them must be linked to a library.

    Examples
    --------
    ::

        predictive = to_casadi(model)
        mean, cov, affine_cost = predictive([0.5, 1.0])
    """
    ca = need("casadi", extra="control")
    fitted, ops = (as_fitted(model), CasADiOps(ca, check_choice("blas", blas, get_args(Blas))))
    x = _point(ca, fitted)
    parts = formula.predict(ops, expressions(ops, fitted), ops.array(x))
    mean, q = ops.total(parts.weights * parts.mean), fitted.n_outputs
    own_noise = parts.noise * float(noise)
    if fitted.correlation is None:
        within = ca.diag(ops.total(parts.weights * (parts.epistemic + own_noise)).value)
    else:
        correlation = ops.array(ca.DM(fitted.correlation.reshape(-1, q * q).T))
        each = formula.output_cov(ops, correlation, parts.epistemic, own_noise)
        within = ca.reshape(ops.total(parts.weights * each).value, q, q)
    cov = fitted.tails.widening * within
    if len(fitted.members) > 1:
        apart = parts.mean - mean
        cov = cov + ca.reshape(ops.total(parts.weights * ops.outer(apart, apart)).value, q, q)
    cost = ops.row_mean(ops.average(parts.cost))
    return ca.Function(name, [x], [mean.value, ca.densify(cov), cost.value], ["x"], ["mean", "cov", "affine_cost"])


def variances_to_casadi(model: Any, *, name: str = "variances", blas: Blas = "reference") -> "casadi.Function":
    """Build the CasADi function x (d) -> mean, epistemic_var, noise_var (q), affine_cost (1) of one point.

    It computes what `model.predictive` does, in original units, without covariances between outputs.

    Parameters
    ----------
    model : BLLRegressor or Fitted
        A fitted regressor, or its `fitted_`.
    name : str, default "variances"
        Name of the function.
    blas : {"reference", "classic", "blasfeo"}, default "reference"
        Matrix products that CasADi uses, as in `to_casadi`.
    """
    ca = need("casadi", extra="control")
    fitted, ops = as_fitted(model), CasADiOps(ca, check_choice("blas", blas, get_args(Blas)))
    x, constants = _point(ca, fitted), expressions(ops, fitted)
    parts = formula.moments(ops, constants, formula.predict(ops, constants, ops.array(x)))
    outputs = [name for name in OUTPUTS if name != "var"]
    return ca.Function(name, [x], [part.value for part in parts], ["x"], outputs)


def _point(ca: Any, fitted: Fitted) -> Any:
    if fitted.inputs is None:
        raise InputError("the model takes inputs of more than two dimensions: only models of tables have an expression")
    return ca.MX.sym("x", len(fitted.inputs.mean))


def functional_to_casadi(model: Any, functional: Pointwise, *, name: str = "functional") -> "casadi.Function":
    """Build the CasADi function x (d) -> mean (n), cov (n, n) of a functional at one point, without noise.

    It computes what `model.predictive_of` does.

    Parameters
    ----------
    model : BLLRegressor or Fitted
        A fitted regressor, or its `fitted_`.
    functional : Pointwise
        The functional: `Derivative(0)` has n = 1 values, `Gradient()` one per input.
    name : str, default "functional"
        Name of the function.
    """
    ca = need("casadi", extra="control")
    fitted = as_fitted(model)
    x = _point(ca, fitted)
    ops = CasADiOps(ca)
    constants = expressions(ops, fitted)
    function = formula.functions(ops, constants, formula.standardized(constants, ops.array(x)))
    at, said = functional.at(np.zeros((1, x.shape[0]))), function.output(functional.output).linear(0).value.T
    whole = ca.mtimes(ca.DM(at.weights), said)
    if at.directions is not None:
        whole = whole + ca.mtimes(ca.DM(at.directions[:, 0]), ca.jacobian(said, x).T)
    rows = whole[:, 1:]
    return ca.Function(name, [x], [whole[:, 0], ca.mtimes(rows, rows.T)], ["x"], ["mean", "cov"])


def expressions(ops: CasADiOps, fitted: Fitted) -> SimpleNamespace:
    """Convert a model into the constants of the predictive formula, with one column per member."""
    p, c, DM = fitted.predictor, len(fitted.members), ops.casadi.DM
    columns = lambda values: ops.array(DM(_array(values).reshape(-1, values.shape[-1]).T))
    shared = lambda values: None if values is None else ops.array(DM(np.tile(_array(values)[:, None], c)))
    layers: dict[int, SimpleNamespace] = {}
    for layer in p.groups():
        for i, place in enumerate(layer.group.places):
            numbers: dict[str, Any] = {
                key: None if v is None else columns(v[i]) for key, v in layer.named_buffers(recurse=False)
            }
            numbers |= {key: None for key in ("root_star", "shift_star") if key not in numbers}
            layers[place] = SimpleNamespace(**numbers, n_costs=layer.n_costs, places=[place])
            layers[place].features = _features(ops, fitted.members[place].network, numbers["centre"])
    return SimpleNamespace(
        input_mean=columns(p.input_mean),
        input_scale=columns(p.input_scale),
        layers=[layers[i] for i in range(c)],
        order=None,
        curve=SimpleNamespace(**{key: columns(v) for key, v in p.curve.named_buffers()}),
        head=None if p.head is None else SimpleNamespace(**{key: columns(v) for key, v in p.head.named_buffers()}),
        outside=None if p.outside is None else SimpleNamespace(**_scalars(p.outside), place=p.outside.place),
        log_noise_var=columns(p.log_noise_var),
        centre=shared(p.centre),
        log_precision=shared(p.log_precision),
        sharpness=float(p.sharpness),
        roots=_array(p.roots),
        widening=float(p.widening),
    )


def _scalars(numbers: nn.Module) -> dict[str, float]:
    return {key: float(value) for key, value in numbers.named_buffers()}


def _features(ops: CasADiOps, network: nn.Module, centre: Columns) -> Any:
    """Function (ops, z) -> centred features of one network."""
    ca, inner, encoding = ops.casadi, inner_network(network), encoding_of(network)
    column = lambda values: ops.array(ca.DM(_array(values)))

    def features(_: CasADiOps, z: Columns) -> Columns:
        inputs = z
        if encoding is not None:
            bins = SimpleNamespace(slope=column(encoding.slope), shift=column(encoding.shift))
            inputs = formula.encoded(ops, bins, ops.array(z.value[encoding.column.tolist()]))
        if isinstance(inner, nn.Identity):
            phi = inputs
        elif isinstance(inner, MLP):
            linears = [layer for layer in inner if isinstance(layer, nn.Linear)]
            weights, biases = ([column(getattr(layer, name)) for layer in linears] for name in ("weight", "bias"))
            phi = formula.mlp(ops, inner.activation, weights, biases, inputs)
        else:
            phi = ops.array(to_expression(ops, inner, z.value))
        if isinstance(network, InputSkip):
            passed = z if network.scale is None else z * column(network.scale)
            phi = ops.array(ca.vertcat(phi.value, passed.value))
        return phi - centre

    return features


def _array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().double().numpy()
