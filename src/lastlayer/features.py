"""Linear and affine features, and the networks that make them."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.errors import InputError, choose

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
}


def affine_features(phi_tilde: Float[Tensor, "*b m k"]) -> Float[Tensor, "*b m p"]:
    """phi = [phi_tilde, 1]: linear features with the bias as their last column. eq:Features_vs_augmented_Features"""
    return torch.cat([phi_tilde, phi_tilde.new_ones(*phi_tilde.shape[:-1], 1)], dim=-1)


def linear_features(Phi: Float[Tensor, "*b m p"]) -> Float[Tensor, "*b m k"]:
    """The linear features of affine ones: all but the last column, which must be ones."""
    bias = Phi[..., -1] if Phi.shape[-1] else Phi.new_zeros(1)
    if Phi.device.type != "cpu":
        torch._assert_async((bias == 1).all())
    elif not bool((bias == 1).all()):
        raise InputError(
            f"the last column of the affine features, of shape {tuple(Phi.shape)}, is not all ones: "
            "make them with lastlayer.features.affine_features(phi_tilde)"
        )
    return Phi[..., :-1]


class MLP(nn.Sequential):
    """Fully connected linear features a_L: every layer, the last one too, ends in the activation. eq:NN_formulation

    Weights start uniform in +-sqrt(6 / (fan_in + fan_out)) times the activation's gain, biases at zero.
    """

    def __init__(
        self,
        n_inputs: int,
        hidden: Sequence[int],
        *,
        activation: str = "tanh",
        dtype: torch.dtype = torch.float64,
        generator: torch.Generator | None = None,
    ) -> None:
        if n_inputs < 1 or any(int(width) < 1 for width in hidden):
            raise InputError(f"layer widths must be positive: n_inputs={n_inputs}, hidden={tuple(hidden)}")
        make = ACTIVATIONS[choose("activation", activation, ACTIVATIONS)]
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip([n_inputs, *hidden], hidden, strict=False):
            linear = nn.utils.skip_init(nn.Linear, int(fan_in), int(fan_out), dtype=dtype)
            nn.init.xavier_uniform_(linear.weight, gain=_gain(activation), generator=generator)
            nn.init.zeros_(linear.bias)
            layers += [linear, make()]
        super().__init__(*layers)
        self.n_features = int(hidden[-1]) if hidden else n_inputs


class StackedMLP(nn.Module):
    """Several MLPs of one shape as one module: every parameter has a leading dimension, one entry a member.

    Member i starts exactly as `MLP(..., generator=generators[i])` does.
    """

    def __init__(
        self, n_inputs: int, hidden: Sequence[int], *, generators: Sequence[torch.Generator], activation: str = "tanh"
    ) -> None:
        super().__init__()
        members = [MLP(n_inputs, hidden, activation=activation, generator=g) for g in generators]
        linears = [[layer for layer in member if isinstance(layer, nn.Linear)] for member in members]
        self.weights = nn.ParameterList(
            torch.stack([layer.weight.detach().mT for layer in layers]) for layers in zip(*linears, strict=True)
        )
        self.biases = nn.ParameterList(
            torch.stack([layer.bias.detach()[None] for layer in layers]) for layers in zip(*linears, strict=True)
        )
        self.activation = ACTIVATIONS[activation]()
        self.n_features = members[0].n_features
        self._shape = n_inputs, tuple(hidden), activation

    @classmethod
    def of(cls, members: Sequence[MLP]) -> "StackedMLP":
        """Networks that are there already, side by side; all of one shape, with at least one layer."""
        first = members[0]
        linears = [layer for layer in first if isinstance(layer, nn.Linear)]
        activation = next(name for name, make in ACTIVATIONS.items() if make is type(first[1]))
        widths = [layer.out_features for layer in linears]
        generators = [torch.Generator()] * len(members)
        stack = cls(linears[0].in_features, widths, generators=generators, activation=activation)
        stack = stack.to(linears[0].weight)
        with torch.no_grad():
            for j, (W, b) in enumerate(zip(stack.weights, stack.biases, strict=True)):
                W.copy_(torch.stack([member.get_parameter(f"{2 * j}.weight").mT for member in members]))
                b.copy_(torch.stack([member.get_parameter(f"{2 * j}.bias")[None] for member in members]))
        return stack

    def member(self, i: int) -> MLP:
        """A network of its own with the weights that member i has now."""
        n_inputs, hidden, activation = self._shape
        network = MLP(n_inputs, hidden, activation=activation).to(self.weights[0])
        linears = [layer for layer in network if isinstance(layer, nn.Linear)]
        with torch.no_grad():
            for layer, W, b in zip(linears, self.weights, self.biases, strict=True):
                layer.weight.copy_(W[i].mT)
                layer.bias.copy_(b[i, 0])
        return network

    def forward(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "s m k"]:
        """Features of the same inputs by every member."""
        a = x.expand(len(self.weights[0]), *x.shape)
        for W, b in zip(self.weights, self.biases, strict=True):
            a = self.activation(torch.baddbmm(b, a, W))
        return a


class WithInputs(nn.Module):
    """Linear features [network(x), x]: the inputs are passed on to the last layer.

    More features only add constraints to the affine-cost programme, so the variance ratio is never below that of
    Bayesian linear regression on the inputs alone, and far away it grows with the square of the distance.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "*s m k"]:
        phi = self.network(x)
        return torch.cat([phi, x.expand(*phi.shape[:-1], x.shape[-1])], dim=-1)


def weight_energy(network: nn.Module) -> Float[Tensor, "*s"]:
    """-log density of hidden weights under N(0, 1 / fan_in), biases under N(0, 1), up to a constant.

    One number, or one a member of a `StackedMLP`.
    """
    stacks = [module for module in network.modules() if isinstance(module, StackedMLP)]
    if stacks:
        parts = [W.shape[-2] * W.square().sum((-2, -1)) for W in stacks[0].weights]
        parts += [b.square().sum((-2, -1)) for b in stacks[0].biases]
    else:
        parts = [(p[0].numel() if p.dim() > 1 else 1) * p.square().sum() for p in network.parameters()]
    parts = parts or [torch.zeros(())]  # no hidden layer at all
    return 0.5 * torch.stack(parts).sum(0).double()


def _gain(activation: str) -> float:
    """Glorot's own scale for activations that saturate, He's for those that cut off half of their input."""
    return 1.0 if activation in ("tanh", "sigmoid") else math.sqrt(2.0)
