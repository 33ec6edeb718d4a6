"""Construction of a model's network: the built-in one of its settings and family, or the user's."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from lastlayer._internal.process_state import seeded
from lastlayer.errors import InputError
from lastlayer.networks.encoding import Encoded, PiecewiseEncoding
from lastlayer.networks.fourier import fourier_network
from lastlayer.networks.mlp import MLP, InputSkip
from lastlayer.settings.resolve import Settings
from lastlayer.settings.types import NETWORK, Family

Backbone = nn.Module | Callable[[], nn.Module]
ENCODED_SKIP = 0.3
"""Scale of inputs passed on next to encoded ones: enough for a variance that grows outside the data, too small for the
mean to extrapolate with them."""


def encoded(encoding: PiecewiseEncoding, network: nn.Module, n_inputs: int) -> InputSkip:
    """Wrap a network with an input encoding; the inputs themselves, scaled down, are passed on to the last layer."""
    return InputSkip(Encoded(encoding, network), torch.full((n_inputs,), ENCODED_SKIP).to(encoding.slope))


@dataclass(frozen=True)
class Architecture:
    """The built-in network that the settings describe, or the user's."""

    settings: Settings
    backbone: Backbone | None = None

    def seeded(self) -> AbstractContextManager[None]:
        """Context in which to build and train networks: users' networks draw from torch's global generators."""
        s = self.settings
        return nullcontext() if self.backbone is None else seeded(s.seed, s.torch_device)

    def build(
        self,
        n_inputs: int,
        generator: torch.Generator,
        family: Family = NETWORK,
        encoding: PiecewiseEncoding | None = None,
    ) -> nn.Module:
        """Build one untrained network of a family, within `seeded`, since callables draw from global generators."""
        if encoding is not None:
            plain = replace(family, encoding="raw")
            inner = Architecture(replace(self.settings, input_skip=False)).build(len(encoding.column), generator, plain)
            return encoded(encoding, inner, n_inputs)
        if family.kind == "linear":
            return nn.Identity()
        if family.kind == "fourier":
            lengths = torch.zeros(n_inputs + 1, dtype=torch.float64)
            return fourier_network(lengths[1:], lengths[0], generator=generator)
        s = self.settings
        if self.backbone is None:
            network: nn.Module = MLP(
                n_inputs, s.hidden, activation=family.activation or s.activation, generator=generator
            )
        elif isinstance(self.backbone, nn.Module):
            network = copy.deepcopy(self.backbone)
        else:
            network = self.backbone()
            if not isinstance(network, nn.Module):
                raise InputError(f"backbone() returned a {type(network).__name__}, not a torch.nn.Module")
        return InputSkip(network) if s.input_skip else network
