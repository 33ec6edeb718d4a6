"""Networks of a mixture as the numbers of `formula.features`: those of one shape side by side, without copies."""

from collections.abc import Sequence

import torch
from torch import nn

from lastlayer.formula import State
from lastlayer.networks.mlp import MLP, InputSkip, encoding_of, inner_network


def grouped(networks: Sequence[nn.Module]) -> list[list[int]]:
    """Places of the networks of each shape: MLPs, and networks without weights; any other network is on its own."""
    groups: dict[object, list[int]] = {}
    for place, network in enumerate(networks):
        inner, encoding = inner_network(network), encoding_of(network)
        scaled = isinstance(network, InputSkip) and network.scale is not None
        outer = type(network) is InputSkip, scaled, None if encoding is None else len(encoding.column)
        kind: tuple[object, ...] = (place,)
        if type(inner) is MLP:
            kind = (inner.activation, *[(p.shape, p.dtype) for p in inner.parameters()])
        elif isinstance(inner, nn.Identity):
            kind = ()
        groups.setdefault((outer, kind), []).append(place)
    return list(groups.values())


def numbers_of(networks: Sequence[nn.Module]) -> State:
    """The numbers of networks of one shape; `own` is the user's network, and `one` has the type of the weights."""
    first, inner = networks[0], inner_network(networks[0])
    encodings = [encoding for encoding in map(encoding_of, networks) if encoding is not None]
    scales = [network.scale for network in networks if isinstance(network, InputSkip) and network.scale is not None]
    mlps = [own for own in map(inner_network, networks) if type(own) is MLP]
    layers = list(zip(*[[layer for layer in own if isinstance(layer, nn.Linear)] for own in mlps], strict=True))
    typed = [*first.parameters(), *scales, *(encoding.slope for encoding in encodings)]
    return State(
        activation=mlps[0].activation if mlps else None,
        weights=[torch.stack([linear.weight.detach().mT for linear in each]) for each in layers],
        biases=[torch.stack([linear.bias.detach()[None] for linear in each]) for each in layers],
        bins=None
        if not encodings
        else State(
            column=encodings[0].column,
            slope=torch.stack([encoding.slope for encoding in encodings])[:, None],
            shift=torch.stack([encoding.shift for encoding in encodings])[:, None],
        ),
        passed=torch.stack(scales)[:, None] if scales else 1.0 if isinstance(first, InputSkip) else None,
        own=None if mlps or isinstance(inner, nn.Identity) else inner,
        one=None if not typed else torch.ones((), dtype=typed[0].dtype, device=typed[0].device),
    )
