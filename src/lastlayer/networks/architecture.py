"""Construction of a model's network: the built-in one of its settings and family, or the user's."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from lastlayer._internal.process_state import seeded
from lastlayer.errors import InputError
from lastlayer.networks.fourier import fourier_network
from lastlayer.networks.mlp import MLP, InputSkip, PiecewiseEncoding, encoded
from lastlayer.settings.types import NETWORK, Family, Fourier, Linear, Settings

Backbone = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Architecture:
    """The built-in network that the settings describe, or the user's."""

    settings: Settings
    backbone: Backbone | None = None

    def seeded(self) -> AbstractContextManager[None]:
        """Context in which to build and train networks: users' networks draw from torch's global generators."""
        s = self.settings
        return nullcontext() if self.backbone is None else seeded(s.seed, torch.device(s.place.device))

    def build(
        self,
        n_inputs: int,
        generator: torch.Generator,
        family: Family = NETWORK,
        encoding: PiecewiseEncoding | None = None,
    ) -> nn.Module:
        """Build one untrained network of a family, within `seeded`, since callables draw from global generators."""
        if encoding is not None:
            return encoded(encoding, self._features(len(encoding.column), generator, family), n_inputs)
        network = self._features(n_inputs, generator, family)
        return InputSkip(network) if family.trained and self.settings.network.input_skip else network

    def _features(self, n_inputs: int, generator: torch.Generator, family: Family) -> nn.Module:
        if isinstance(family, Linear):
            return nn.Identity()
        if isinstance(family, Fourier):
            lengths = torch.zeros(n_inputs + 1, dtype=torch.float64)
            return fourier_network(lengths[1:], lengths[0], self.settings.network.n_frequencies, generator=generator)
        s = self.settings.network
        if self.backbone is None:
            return MLP(n_inputs, s.hidden, activation=family.activation or s.activation, generator=generator)
        if isinstance(self.backbone, nn.Module):
            return copy.deepcopy(self.backbone)
        network = self.backbone()
        if not isinstance(network, nn.Module):
            raise InputError(f"backbone() returned a {type(network).__name__}, not a torch.nn.Module")
        return network
