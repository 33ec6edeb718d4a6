"""Groups of networks as NumPy arrays, as `formula.features` takes them, without torch."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor, nn

from lastlayer import formula
from lastlayer.formula.ops import NumPyOps
from lastlayer.networks.mlp import MLP, InputSkip, NetworkGroup, StackedMLP, encoding_of, inner_network


@dataclass(frozen=True)
class NetworkArrays:
    """c MLPs of one shape side by side, in float64."""

    n_networks: int
    weights: tuple[Float[ndarray, "c _ _"], ...]
    biases: tuple[Float[ndarray, "c 1 _"], ...]
    activation: str | None
    """Name of the activation; None if there are no layers."""
    bins: SimpleNamespace | None
    """`column`, `slope` and `shift` of a piecewise-linear encoding."""
    passed: ndarray | float | None
    """Factor on the inputs that are passed on to the last layer; None: they are not passed on."""

    @classmethod
    def of(cls, group: NetworkGroup) -> "NetworkArrays | None":
        """Arrays of a group; None if its networks are of another kind."""
        network, inner = group.network, inner_network(group.network)
        stack = inner if isinstance(inner, StackedMLP) else None
        if stack is None and not isinstance(inner, nn.Identity) and not (isinstance(inner, MLP) and len(inner) == 0):
            return None
        bins, passed = encoding_of(network), None
        if isinstance(network, InputSkip):
            passed = 1.0 if network.scale is None else as_array(network.scale)
        return cls(
            len(group.places),
            () if stack is None else tuple(as_array(W) for W in stack.weights),
            () if stack is None else tuple(as_array(b) for b in stack.biases),
            None if stack is None else stack.activation_name,
            None if bins is None else SimpleNamespace(**{name: as_array(v) for name, v in bins.named_buffers()}),
            passed,
        )

    def features(self, z: Float[ndarray, "m d"]) -> Float[ndarray, "c m k"]:
        """Features by every network."""
        phi: ndarray = formula.features(NumPyOps, self, z[None])
        return phi if len(phi) == self.n_networks else np.repeat(phi, self.n_networks, axis=0)


def as_array(values: Tensor) -> ndarray:
    """Convert a tensor to float64, or keep it if it holds integers."""
    array: ndarray = values.detach().cpu().numpy()
    return array.astype(np.float64) if array.dtype.kind == "f" else array
