"""Networks whose outputs are the linear features of a last layer: single MLPs, stacks, and groups of any kind."""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from lastlayer import formula
from lastlayer.errors import InputError, unknown_choice
from lastlayer.formula import State
from lastlayer.formula.ops import TorchOps
from lastlayer.networks.structured import call

LARGEST_FEATURE = 1e100
"""Largest feature whose square is finite even when summed over weighted rows."""
NO_WIDTH = 1e-5
"""Minimum width of a bin, for standardised inputs: less cannot be told from rounding in float32."""
MOST_ROWS = 2**24
"""Maximum number of rows for torch's quantiles."""
MOST_BINS, MOST_IN_ALL, ROWS_PER_BIN = 8, 400, 10
"""Maximum number of bins per input and of all inputs together; rows of the table per bin of an input."""
ENCODED_SKIP = 0.3
"""Scale of inputs passed on next to encoded ones: the variance grows outside the data, the mean hardly follows them."""


class Sin(nn.Module):
    """Sine activation, for Fourier features."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "sin": Sin,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
}


class MLP(nn.Sequential):
    """Fully connected linear features a_L: every layer, the last one too, ends in the activation (eq:NN_formulation).

    Weights start uniform in +-sqrt(6 / (fan_in + fan_out)) times the activation's gain, biases at zero.

    Parameters
    ----------
    n_inputs, hidden : int, sequence of int
        Number of inputs, and widths of the layers.
    activation : str, default "tanh"
        One of `ACTIVATIONS`.
    dtype, generator : torch.dtype, torch.Generator
        Type of the weights, and the source of their initial values.
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
        # Glorot's scale for activations that saturate, He's for those that zero half of their input
        gain = 1.0 if activation in ("tanh", "sigmoid", "sin") else math.sqrt(2.0)
        if activation not in ACTIVATIONS:
            raise unknown_choice("activation", activation, ACTIVATIONS)
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip([n_inputs, *hidden], hidden, strict=False):
            # without torch's own initial values, which would draw from its global generator
            linear = nn.utils.skip_init(nn.Linear, int(fan_in), int(fan_out), dtype=dtype)
            nn.init.xavier_uniform_(linear.weight, gain=gain, generator=generator)
            nn.init.zeros_(linear.bias)
            layers += [linear, ACTIVATIONS[activation]()]
        super().__init__(*layers)
        self.n_features = int(hidden[-1]) if hidden else n_inputs
        self.activation = activation


class StackedMLP(nn.Module):
    """Several MLPs of one shape as one module: every parameter has a leading dimension, one entry per member."""

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
        self.activation_name = activation
        self._shape = n_inputs, tuple(hidden)

    def member(self, i: int) -> MLP:
        """Copy member i, with its present weights, into a separate network."""
        network = MLP(*self._shape, activation=self.activation_name, generator=torch.Generator()).to(self.weights[0])
        linears = [layer for layer in network if isinstance(layer, nn.Linear)]
        with torch.no_grad():
            for layer, W, b in zip(linears, self.weights, self.biases, strict=True):
                layer.weight.copy_(W[i].mT)
                layer.bias.copy_(b[i, 0])
        return network

    def forward(self, x: Float[Tensor, "*s m d"]) -> Float[Tensor, "s m k"]:
        a = x.expand(len(self.weights[0]), *x.shape[-2:])
        for W, b in zip(self.weights, self.biases, strict=True):
            a = self.activation(torch.baddbmm(b, a, W))
        return a


class InputSkip(nn.Module):
    """Linear features [network(x), x]: inputs are passed on to the last layer, times a `scale` if there is one.

    Additional features only add constraints to the affine-cost programme, so the variance ratio is never below that of
    Bayesian linear regression on the inputs alone, and far away it grows with the square of the distance.

    Parameters
    ----------
    network : Module
        Features that the inputs are added to.
    scale : Tensor of shape (d,), optional
        Factors of the inputs.
    """

    scale: Tensor | None

    def __init__(self, network: nn.Module, scale: Float[Tensor, "*s d"] | None = None) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("scale", scale)

    def forward(self, x: Float[Tensor, "*b m d"]) -> Float[Tensor, "*s m k"]:
        x = x if self.scale is None else x.to(self.scale.dtype)
        phi = self.network(x)
        passed = x if self.scale is None else x * self.scale
        return torch.cat([phi, passed.expand(*phi.shape[:-1], x.shape[-1])], dim=-1)


class PiecewiseEncoding(nn.Module):
    """Encode inputs by the bins of every input side by side; a leading dimension of the buffers indexes networks."""

    column: Tensor
    slope: Tensor
    shift: Tensor

    def __init__(self, column: Int[Tensor, " k"], slope: Float[Tensor, "*s k"], shift: Float[Tensor, "*s k"]) -> None:
        super().__init__()
        for name, value in (("column", column), ("slope", slope), ("shift", shift)):
            self.register_buffer(name, value)

    @classmethod
    def of(cls, Z: Float[Tensor, "m d"], n_bins: Int[Tensor, " d"]) -> "PiecewiseEncoding":
        """Bins between quantiles of the rows; bins of no width, where values repeat, are zero everywhere."""
        slopes, shifts = [], []
        for z, n in zip(Z.double().mT, n_bins.tolist(), strict=True):
            knots = z[:MOST_ROWS].quantile(torch.linspace(0, 1, n + 1, dtype=z.dtype, device=z.device))
            width = knots.diff()
            slope = torch.where(width > NO_WIDTH, 1 / width.clamp_min(NO_WIDTH), 0.0)
            slopes.append(slope)
            shifts.append(-knots[:-1] * slope)
        column = torch.arange(len(n_bins), device=Z.device).repeat_interleave(n_bins.to(Z.device))
        return cls(column, torch.cat(slopes), torch.cat(shifts))

    @classmethod
    def stacked(cls, encodings: "Sequence[PiecewiseEncoding]") -> "PiecewiseEncoding":
        """Stack the encodings of several networks, each with its own bins of the same inputs."""
        each = lambda name: torch.stack([getattr(encoding, name) for encoding in encodings])[:, None]
        return cls(encodings[0].column, each("slope"), each("shift"))

    def forward(self, x: Float[Tensor, "*s m d"]) -> Float[Tensor, "*t m k"]:
        bins: Tensor = formula.encoded(TorchOps, self, x.index_select(-1, self.column))
        return bins


class Encoded(nn.Sequential):
    """An `encoding`, and a `network` of what it returns."""

    encoding: PiecewiseEncoding
    network: nn.Module


def bins_of(Z: Float[Tensor, "m d"]) -> Int[Tensor, " d"]:
    """Number of bins of each input: at most the number of steps between its distinct values."""
    most = max(2, min(MOST_BINS, MOST_IN_ALL // Z.shape[1], len(Z) // ROWS_PER_BIN))
    return torch.tensor([max(1, min(most, len(z.unique()) - 1)) for z in Z.mT])


def encoded(encoding: PiecewiseEncoding, network: nn.Module, n_inputs: int) -> InputSkip:
    """Wrap a network with an input encoding; the inputs themselves, scaled down, are passed on to the last layer."""
    both = Encoded(OrderedDict(encoding=encoding, network=network))
    return InputSkip(both, torch.full((n_inputs,), ENCODED_SKIP).to(encoding.slope))


def copied(network: nn.Module) -> nn.Module:
    """Copy a network in evaluation mode, without gradients; the copy shares nothing with the original."""
    return copy.deepcopy(network).eval().requires_grad_(False)


def neg_log_hidden_prior(network: nn.Module) -> Float[Tensor, "*s"]:
    """-log density of the hidden weights under N(0, 1 / fan_in) and of the biases under N(0, 1), up to a constant."""
    stacks = [module for module in network.modules() if isinstance(module, StackedMLP)]
    if stacks:
        parts = [W.shape[-2] * W.square().sum((-2, -1)) for W in stacks[0].weights]
        parts += [b.square().sum((-2, -1)) for b in stacks[0].biases]
    else:
        parts = [(p[0].numel() if p.dim() > 1 else 1) * p.square().sum() for p in network.parameters()]
    parts = parts or [torch.zeros(())]  # no hidden layer at all
    return 0.5 * torch.stack(parts).sum(0).double()


def parts_of(network: nn.Module) -> tuple[nn.Module, PiecewiseEncoding | None, Tensor | None]:
    """The network without input skip and encoding, the encoding, and the factors of the inputs passed on."""
    within, scale = (network.network, network.scale) if isinstance(network, InputSkip) else (network, None)
    return (within.network, within.encoding, scale) if isinstance(within, Encoded) else (within, None, scale)


def features_of(network: nn.Module, Z: Num[Tensor, "m *d"]) -> Float[Tensor, "m k"]:
    """Linear features of a batch, checked to have one row per sample."""
    phi_tilde = network(Z) if Z.is_floating_point() else call(network, Z)
    if not isinstance(phi_tilde, Tensor) or phi_tilde.dim() != 2 or len(phi_tilde) != len(Z):
        shape = tuple(phi_tilde.shape) if isinstance(phi_tilde, Tensor) else type(phi_tilde).__name__
        raise InputError(
            f"the backbone turned a batch of shape {tuple(Z.shape)} into {shape}: it must return features of shape "
            f"({len(Z)}, k), one row per sample; flatten or pool the other dimensions"
        )
    return phi_tilde


def finite_features(network: nn.Module, Z: Num[Tensor, "m *d"]) -> Float[Tensor, "m k"]:
    """Linear features of a batch, checked to have one row per sample and finite squares."""
    phi_tilde = features_of(network, Z)
    fine = (phi_tilde.detach().double().abs() <= LARGEST_FEATURE).all(1)
    if not bool(fine.all()):
        raise InputError(
            f"the network turned {int((~fine).sum())} of {len(Z)} rows (first: row {int((~fine).nonzero()[0])}) into "
            f"features that are NaN, infinite or beyond {LARGEST_FEATURE:g}: let it return finite numbers, for example "
            "by a normalisation layer"
        )
    return phi_tilde


def grouped(networks: Sequence[nn.Module]) -> list[list[int]]:
    """Places of the networks of each shape: MLPs, and networks without weights; any other network is on its own."""
    groups: dict[object, list[int]] = {}
    for place, network in enumerate(networks):
        inner, encoding, scale = parts_of(network)
        outer = type(network) is InputSkip, scale is not None, None if encoding is None else len(encoding.column)
        kind: tuple[object, ...] = (place,)
        if type(inner) is MLP:
            kind = (inner.activation, *[(p.shape, p.dtype) for p in inner.parameters()])
        elif isinstance(inner, nn.Identity):
            kind = ()
        groups.setdefault((outer, kind), []).append(place)
    return list(groups.values())


def numbers_of(networks: Sequence[nn.Module]) -> State:
    """The numbers of networks of one shape; `own` is the user's network, and `one` has the type of the weights."""
    first, (inners, *others) = networks[0], zip(*map(parts_of, networks), strict=True)
    encodings, scales = ([part for part in parts if part is not None] for parts in others)
    mlps = [inner for inner in inners if type(inner) is MLP]
    layers = list(zip(*[[layer for layer in own if isinstance(layer, nn.Linear)] for own in mlps], strict=True))
    bins = None
    if encodings:
        slope, shift = (torch.stack([getattr(own, name) for own in encodings])[:, None] for name in ("slope", "shift"))
        bins = State(column=encodings[0].column, slope=slope, shift=shift)
    typed = [*first.parameters(), *scales, *(encoding.slope for encoding in encodings)]
    return State(
        activation=mlps[0].activation if mlps else None,
        weights=[torch.stack([linear.weight.detach().mT for linear in each]) for each in layers],
        biases=[torch.stack([linear.bias.detach()[None] for linear in each]) for each in layers],
        bins=bins,
        passed=torch.stack(scales)[:, None] if scales else 1.0 if isinstance(first, InputSkip) else None,
        own=None if mlps or isinstance(inners[0], nn.Identity) else inners[0],
        one=None if not typed else torch.ones((), dtype=typed[0].dtype, device=typed[0].device),
    )
