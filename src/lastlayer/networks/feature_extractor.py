"""The features of any trained network: what feeds its last linear layer."""

import copy
from contextvars import ContextVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.errors import InputError, check_choice


class FeatureExtractor(nn.Module):
    """x -> the inputs of one linear layer of a network, whatever the network does with its outputs.

    The network is copied, with the layer and its weights taken out, and stands still: evaluation mode, no gradients.
    """

    def __init__(self, network: nn.Module, layer: str) -> None:
        super().__init__()
        layers = _linear_layers(network)
        taken = layers[check_choice("layer", layer, layers)]
        self.network = copy.deepcopy(network)
        self.layer = layer
        where, _, name = layer.rpartition(".")
        setattr(self.network.get_submodule(where), name, _InputRecorder(taken.out_features))
        self.eval().requires_grad_(False)

    def forward(self, x: Float[Tensor, "m *d"]) -> Float[Tensor, "m k"]:
        seen: list[Tensor] = []
        token = _SEEN.set(seen)
        try:
            self.network(x)
        finally:
            _SEEN.reset(token)
        if len(seen) != 1:
            raise InputError(f"the network uses its layer {self.layer!r} {len(seen)} times in a pass: name another one")
        return seen[0]


class _InputRecorder(nn.Module):
    """In the place of a layer: hands its inputs to the feature extractor, and nothing on."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features

    def forward(self, features: Tensor) -> Tensor:
        _SEEN.get().append(features)
        return features.new_zeros(*features.shape[:-1], self.out_features)


_SEEN: ContextVar[list[Tensor]] = ContextVar("seen")
"""What the recorders of the present call have seen, per thread."""


def last_linear(network: nn.Module, x: Float[Tensor, "m *d"], n_outputs: int) -> str:
    """The name of the linear layer evaluated last, seen in a trial on a batch; it must give `n_outputs` numbers."""
    layers = _linear_layers(network)
    if not layers:
        raise InputError(
            f"the network ({type(network).__name__}) has no torch.nn.Linear layer: give layer=None if what it returns "
            "are the features"
        )
    order: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, __, name=name: order.append(name)) for name, module in layers.items()
    ]
    try:
        with torch.no_grad():
            network(x)
    finally:
        for hook in hooks:
            hook.remove()
    if not order:
        raise InputError(f"the network uses none of its linear layers ({', '.join(layers)}): give layer=None")
    last = order[-1]
    told = f"the linear layer evaluated last, {last!r},"
    if order.count(last) > 1:
        raise InputError(f"{told} is used {order.count(last)} times in a pass: name another one, layer=...")
    if layers[last].out_features != n_outputs:
        raise InputError(
            f"{told} gives {layers[last].out_features} numbers, and the targets have {n_outputs}: name the output "
            "layer, layer=..., or give layer=None if what the network returns are the features"
        )
    return last


def _linear_layers(network: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear) and name}
