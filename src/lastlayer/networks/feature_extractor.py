"""Features of any trained network: the inputs of its last linear layer."""

import copy
import math
from contextvars import ContextVar
from typing import TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.errors import InputError, check_choice
from lastlayer.networks.structured import Inputs, call

Head = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
"""Layers that are linear in their features at each position, including convolutions with kernels of size 1."""


class FeatureExtractor(nn.Module):
    """Map inputs to the inputs of one linear layer of a network, whatever the network does with the layer's outputs.

    The network is copied, without the layer and its weights, and frozen: evaluation mode, no gradients. It is called
    with the arguments of the extractor. Features are on the last axis, for convolutions too.

    Parameters
    ----------
    network, layer : torch.nn.Module, str
        The network, and its `nn.Linear` or convolution with kernels of size 1, as in `network.named_modules()`.
    """

    def __init__(self, network: nn.Module, layer: str) -> None:
        super().__init__()
        heads = _heads(network)
        taken = heads[check_choice("layer", layer, heads)]
        self.network, self.layer = copy.deepcopy(network), layer
        self.channels_first = not isinstance(taken, nn.Linear)
        """Whether the layer is a convolution, whose outputs are (m, q, *positions)."""
        if isinstance(taken, nn.Linear):
            self.n_outputs, self.axis = taken.out_features, -1
        else:
            self.n_outputs, self.axis = taken.out_channels, -1 - len(taken.kernel_size)
        where, _, name = layer.rpartition(".")
        setattr(self.network.get_submodule(where), name, _InputRecorder(self.n_outputs, self.axis))
        self.eval().requires_grad_(False)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Float[Tensor, "*s k"]:
        seen: list[Tensor] = []
        token = _SEEN.set(seen)
        try:
            self.network(*args, **kwargs)
        finally:
            _SEEN.reset(token)
        if len(seen) != 1:
            raise InputError(f"the network uses its layer {self.layer!r} {len(seen)} times in a pass: name another one")
        phi_tilde = seen[0].movedim(self.axis, -1)
        if self.channels_first and math.prod(phi_tilde.shape[1:-1]) == 1:  # pooled before: one row per sample
            return phi_tilde.flatten(1)
        return phi_tilde


class _InputRecorder(nn.Module):
    """Replacement of a layer that passes its inputs to the feature extractor and returns zeros."""

    def __init__(self, n_outputs: int, axis: int) -> None:
        super().__init__()
        self.n_outputs, self.axis = n_outputs, axis

    def forward(self, features: Tensor) -> Tensor:
        _SEEN.get().append(features)
        shape = list(features.shape)
        shape[self.axis] = self.n_outputs
        return features.new_zeros(shape)


_SEEN: ContextVar[list[Tensor]] = ContextVar("seen")
"""Inputs recorded in the present call, per thread."""


def last_linear(network: nn.Module, inputs: Inputs) -> str:
    """Find the linear layer that is evaluated last, in a trial run on a batch."""
    heads = _heads(network)
    if not heads:
        raise InputError(
            f"the network ({type(network).__name__}) has no torch.nn.Linear layer, nor a convolution with kernels of "
            "size 1: give layer=None if what it returns are the features"
        )
    order: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, __, name=name: order.append(name)) for name, module in heads.items()
    ]
    try:
        with torch.no_grad():
            call(network, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if not order:
        raise InputError(f"the network uses none of its linear layers ({', '.join(heads)}): give layer=None")
    last = order[-1]
    if order.count(last) > 1:
        raise InputError(
            f"the linear layer evaluated last, {last!r}, is used {order.count(last)} times in a pass: name another "
            "one, layer=..."
        )
    return last


def _heads(network: nn.Module) -> dict[str, Head]:
    return {name: module for name, module in network.named_modules() if name and _is_head(module)}


def _is_head(module: nn.Module) -> TypeGuard[Head]:
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        plain = math.prod(module.kernel_size) == math.prod(module.stride) == module.groups == 1
        return plain and (isinstance(module.padding, str) or not any(module.padding))
    return isinstance(module, nn.Linear)
