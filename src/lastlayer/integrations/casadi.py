"""A fitted model as a CasADi function: mean, covariance and affine cost, with CasADi's own derivatives."""

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from torch import nn

from lastlayer.calibration import Curve, anchored
from lastlayer.description import Dense, Description, MemberDescription, Spread, describe
from lastlayer.estimator import as_covariance_parts
from lastlayer.integrations.extras import need
from lastlayer.linalg import TINY
from lastlayer.model import LastLayerModel

if TYPE_CHECKING:
    import casadi

MX = Any
"""casadi.MX"""


def to_casadi(
    model: LastLayerModel | Description, noise: bool = True, *, name: str = "predictive"
) -> "casadi.Function":
    """x (d) -> mean (q), cov (q, q), affine_cost (1): what `model.predictive` says of one point, in original units.

    With `noise=False` the covariance is that of the function. The built-in network becomes an MX expression, any other
    backbone goes through ONNX (see docs/control.md for what CasADi can read). Everything is float64: a network of
    float32 agrees to its own precision.
    """
    ca = need("casadi", extra="control")
    described = model if isinstance(model, Description) else describe(model)
    x = ca.MX.sym("x", described.n_inputs)
    z = (x - described.input_mean) / described.input_scale
    mean, cov, cost = _Formula(ca, described, bool(noise)).of(z)
    return ca.Function(name, [x], [mean, cov, cost], ["x"], ["mean", "cov", "affine_cost"])


class _Formula:
    """The formula of the `description` room in MX; all vectors are columns."""

    def __init__(self, ca: Any, described: Description, noise: bool) -> None:
        self.ca, self.described, self.noise = ca, described, noise

    def of(self, z: MX) -> tuple[MX, MX, MX]:
        ca, members = self.ca, self.described.members
        factor, widening = self._noise_factor(z), self.described.tails.widening
        noises = [ca.DM(member.curve.noise) * factor for member in members]
        means, stars, ratios = [], [], []
        for member in members:
            phi = self._features(member, z) - member.centre
            means.append(self._times(member.weights, phi) + member.offset)
            ratios.append(self._cost(member.spread, phi))
            tuned = member.spread_at_star is not member.spread
            stars.append(self._cost(member.spread_at_star, phi) if tuned else ratios[-1])
        targets = [
            np.diagonal(member.noise_cov) * (noise + self._epistemic(member.curve, cost))
            for member, noise, cost in zip(members, noises, stars, strict=True)
        ]
        weights = self._weights(targets)
        if self.described.anchored:
            known = self.described.anchor, self.described.anchor_precision
            means = [anchored(own, var, *known) for own, var in zip(means, targets, strict=True)]
        mean = sum(w * m for w, m in zip(weights, means, strict=True))
        cov: MX = 0
        for member, weight, own, ratio, noise in zip(members, weights, means, ratios, noises, strict=True):
            var, correlation = as_covariance_parts(member.noise_cov)
            std = ca.sqrt(var * (self._epistemic(member.curve, ratio) + noise * float(self.noise)))
            between = own - mean
            # a product of columns with the correlation between them, not with two diagonal matrices
            within = ca.diag(std**2) if (correlation == np.eye(len(var))).all() else correlation * (std @ std.T)
            cov = cov + weight * (widening * within + (between @ between.T if len(members) > 1 else 0))
        return mean, ca.densify(cov), sum(ratios) / len(ratios)

    def _weights(self, variances: list[MX]) -> list[MX]:
        """The softmax of minus the mean log variance times the sharpness, around its largest entry; or all alike."""
        ca, c, q = self.ca, len(variances), self.described.n_outputs
        if not self.described.sharpness:
            return [1 / c] * c
        logs = [-self.described.sharpness * ca.sum1(ca.log(var)) / q for var in variances]
        joined = ca.vertcat(*logs)
        share = ca.exp(joined - ca.mmax(joined))
        return ca.vertsplit(share / ca.sum1(share))

    def _epistemic(self, curve: Curve, ratio: MX) -> MX:
        """b v^gamma, and beyond the reach of the calibration straight on."""
        ca = self.ca
        known = ca.fmin(ratio, curve.reach) if np.isfinite(curve.reach) else ratio
        power = known if curve.power == 1 else known**curve.power
        beyond = ratio / ca.fmax(known, TINY) if np.isfinite(curve.reach) else 1
        return ca.DM(curve.slope) * (power * beyond)

    def _noise_factor(self, z: MX) -> MX:
        ca, head = self.ca, self.described.noise_head
        if head is None:
            return 1
        inside = ca.fmin(ca.fmax(z, head.low.numpy()), head.high.numpy())
        hidden = ca.tanh(self._times(head.U.numpy(), inside) + head.u.numpy())
        return ca.exp(self._times(head.V.numpy(), hidden))

    def _cost(self, spread: Spread, phi: MX) -> MX:
        return self.ca.sumsqr(self._times(spread.root, phi) + spread.shift)

    def _features(self, member: MemberDescription, z: MX) -> MX:
        layers = member.layers
        phi = self._by_onnx(member.inner, z) if layers is None else self._dense(layers, z)
        return self.ca.vertcat(phi, z) if member.passes_inputs else phi

    def _dense(self, layers: tuple[Dense, ...], a: MX) -> MX:
        for layer in layers:
            a = self._activation(layer.activation, self._times(layer.weight, a) + layer.bias)
        return a

    def _times(self, matrix: Float[ndarray, "k r"], column: MX) -> MX:
        """x' A as a column."""
        return self.ca.mtimes(self.ca.DM(matrix.T), column)

    def _activation(self, kind: type[nn.Module], a: MX) -> MX:
        """As torch has it, also in its constants."""
        ca = self.ca
        # exp only where it is used: the branch not taken must not overflow
        below = lambda x: ca.exp(ca.fmin(x, 0)) - 1
        sigmoid = lambda x: 0.5 * (1 + ca.tanh(0.5 * x))
        formulas = {
            nn.Tanh: ca.tanh,
            nn.ReLU: lambda x: ca.fmax(x, 0),
            nn.LeakyReLU: lambda x: ca.fmax(x, 0) + 0.01 * ca.fmin(x, 0),
            nn.Sigmoid: sigmoid,
            nn.SiLU: lambda x: x * sigmoid(x),
            nn.Softplus: lambda x: ca.fmax(x, 0) + ca.log1p(ca.exp(-ca.fabs(x))),
            nn.ELU: lambda x: ca.fmax(x, 0) + below(x),
            nn.SELU: lambda x: 1.0507009873554805 * (ca.fmax(x, 0) + 1.6732632423543772 * below(x)),
            nn.GELU: lambda x: 0.5 * x * (1 + ca.erf(x / np.sqrt(2))),
        }
        return formulas[kind](a)

    def _by_onnx(self, network: nn.Module, z: MX) -> MX:
        from lastlayer.integrations.backbones import casadi_function

        return casadi_function(self.ca, network, self.described.n_inputs)(z.T).T
