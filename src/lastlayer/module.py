"""A fitted model as one `torch.nn.Module`: the formula of the `description` room in tensors, differentiable in inputs.

Everything that a prediction needs is a parameter or a buffer, so that `.to(...)` moves it, and factors are inverted
beforehand, so that nothing but products is left for `torch.export` and ONNX to write down.
"""

import copy

import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor, nn

from lastlayer.calibration import Curve, NoiseHead, anchored
from lastlayer.description import Description, MemberDescription, Spread

OUTPUTS = ("mean", "var", "epistemic_var", "noise_var", "affine_cost")
"""What a prediction holds, by the names that `Prediction` has for it."""


class PredictiveModule(nn.Module):
    """x -> {mean, var, epistemic_var, noise_var: (m, q), affine_cost: (m,)}, original units in and out.

    What `predictive` says of the targets, members and calibration included. Gradients reach the inputs; the numbers of
    the model are frozen. It is a copy: later updates of the model do not reach it.
    """

    input_mean: Tensor
    input_scale: Tensor
    sharpness: Tensor
    widening: Tensor
    anchor: Tensor
    anchor_precision: Tensor

    def __init__(self, described: Description) -> None:
        super().__init__()
        keep_numbers(self, input_mean=described.input_mean, input_scale=described.input_scale)
        self.members = nn.ModuleList(MemberModule(member) for member in described.members)
        self.head = None if described.noise_head is None else HeadModule(described.noise_head)
        keep_numbers(self, sharpness=described.sharpness, widening=described.tails.widening)
        keep_numbers(self, anchor=described.anchor, anchor_precision=described.anchor_precision)
        self.anchored = described.anchored
        self.eval().requires_grad_(False)

    def forward(self, x: Float[Tensor, "m *d"]) -> dict[str, Tensor]:
        z = (x.to(self.input_mean.dtype) - self.input_mean) / self.input_scale
        factor = z.new_ones(()) if self.head is None else self.head(z)
        parts = [member(z, factor) for member in self.members]
        mean, var, epistemic, noise, cost = (torch.stack(part) for part in zip(*parts, strict=True))
        if self.anchored:
            mean = anchored(mean, var, self.anchor, self.anchor_precision)
        # members count alike, or by a power of their precision at alpha*, its geometric mean over the outputs
        weight = torch.softmax(-self.sharpness * var.log().mean(-1), dim=0)[..., None]
        average = (weight * mean).sum(0)
        between = (weight * (mean - average).square()).sum(0)
        epistemic_var = self.widening * (weight * epistemic).sum(0) + between
        noise_var = self.widening * (weight * noise).sum(0)
        values = average, epistemic_var + noise_var, epistemic_var, noise_var, cost.mean(0)
        return dict(zip(OUTPUTS, values, strict=True))


class MemberModule(nn.Module):
    """One network and its last layer."""

    centre: Tensor
    weights: Tensor
    offset: Tensor
    noise_var: Tensor
    """Before calibration."""

    def __init__(self, member: MemberDescription) -> None:
        super().__init__()
        self.network = copy.deepcopy(member.network)
        keep_numbers(self, centre=member.centre, weights=member.weights, offset=member.offset)
        keep_numbers(self, noise_var=member.noise_cov.diagonal())
        self.curve = CurveModule(member.curve)
        self.spread = SpreadModule(member.spread)
        self.at_star = None if member.spread_at_star is member.spread else SpreadModule(member.spread_at_star)

    def forward(self, z: Float[Tensor, "m *d"], factor: Float[Tensor, "*f"]) -> tuple[Tensor, ...]:
        """Mean; variance at alpha*, which decides what the member counts; both variances; affine cost."""
        dtype = next((p.dtype for p in self.network.parameters()), z.dtype)
        phi = self.network(z.to(dtype)).to(self.centre.dtype) - self.centre
        mean, cost = phi @ self.weights + self.offset, self.spread(phi)
        noise = (self.noise_var * self.curve.noise * factor).expand(mean.shape)
        epistemic = self.noise_var * self.curve(cost)
        at_star = epistemic if self.at_star is None else self.noise_var * self.curve(self.at_star(phi))
        return mean, noise + at_star, epistemic, noise, cost


class SpreadModule(nn.Module):
    """phi_tilde - centre -> v = h h', h = (phi_tilde - centre) root + shift."""

    root: Tensor
    shift: Tensor

    def __init__(self, spread: Spread) -> None:
        super().__init__()
        keep_numbers(self, root=spread.root, shift=spread.shift)

    def forward(self, phi: Float[Tensor, "*s k"]) -> Float[Tensor, "*s"]:
        return self.rows(phi).square().sum(-1)

    def rows(self, phi: Float[Tensor, "*s k"]) -> Float[Tensor, "*s r"]:
        """h"""
        return phi @ self.root + self.shift


class CurveModule(nn.Module):
    """v -> b v^gamma, beyond the reach of the calibration straight on. `Curve` says why."""

    noise: Tensor
    slope: Tensor
    power: Tensor
    reach: Tensor

    def __init__(self, curve: Curve) -> None:
        super().__init__()
        keep_numbers(self, noise=curve.noise, slope=curve.slope, power=curve.power, reach=curve.reach)
        self.straight = curve.power == 1

    def forward(self, ratio: Float[Tensor, "*s"]) -> Float[Tensor, "*s q"]:
        return self.shape(ratio)[..., None] * self.slope

    def shape(self, ratio: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        """v^gamma, as `Curve.shape`."""
        if self.straight:
            return ratio
        known = torch.minimum(ratio, self.reach).clamp_min(torch.finfo(ratio.dtype).tiny)
        return known.pow(self.power) * (ratio / known)


class HeadModule(nn.Module):
    """What multiplies the noise at each standardised input. `NoiseHead` has the formula."""

    low: Tensor
    high: Tensor
    U: Tensor
    u: Tensor
    V: Tensor

    def __init__(self, head: NoiseHead) -> None:
        super().__init__()
        for name in ("low", "high", "U", "u", "V"):
            self.register_buffer(name, getattr(head, name).detach().clone())

    def forward(self, z: Float[Tensor, "m d"]) -> Float[Tensor, "m q"]:
        return NoiseHead(self.low, self.high, self.U, self.u, self.V).log_factor(z).exp()


def keep_numbers(module: nn.Module, **numbers: ndarray | float) -> None:
    """As buffers, single numbers too: ONNX would keep those of Python in float32."""
    for name, number in numbers.items():
        module.register_buffer(name, torch.tensor(number, dtype=torch.float64))
