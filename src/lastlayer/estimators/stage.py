"""A frozen network before a fitted model of its features: batches of any structure in, one row per position out."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor, nn

from lastlayer.bayes.statistics import Readings
from lastlayer.data.rows import Points
from lastlayer.data.sources import Samples
from lastlayer.errors import InputError
from lastlayer.networks.feature_extractor import FeatureExtractor
from lastlayer.networks.structured import Inputs, as_inputs, call, moved, output_tensor
from lastlayer.predictor.module import Predictor

IGNORED = -100
"""Integer target of a position without a target, as in `torch.nn.functional.cross_entropy`."""
MASK = "attention_mask"
"""Name of the input that is 0 at padded positions."""


@dataclass(frozen=True)
class FeatureStage:
    """A frozen network; each position that the last layer is applied to, such as a token or a pixel, is a row."""

    network: nn.Module

    @property
    def outputs_axis(self) -> int:
        """The axis of the targets that indexes the outputs."""
        return 1 if isinstance(self.network, FeatureExtractor) and self.network.channels_first else -1

    @property
    def place(self) -> Tensor:
        return next(self.network.parameters(), torch.zeros(()))

    def features(self, inputs: Inputs) -> Float[Tensor, "*s k"]:
        with torch.no_grad():
            phi_tilde = output_tensor(call(self.network, moved(inputs, self.place)))
        if phi_tilde.dim() < 2:
            raise InputError(
                f"the network gave features of shape {tuple(phi_tilde.shape)}: give one row of them per sample, or per "
                "position, (samples, features) or (samples, positions, features)"
            )
        return phi_tilde

    def rows(self, X: Any) -> tuple[Float[ndarray, "n k"], tuple[int, ...]]:
        """Return one row of features per position, and the shape of the positions."""
        phi_tilde = self.features(as_inputs(X))
        return _flat(phi_tilde), phi_tilde.shape[:-1]

    def checked_rows(
        self, X: Any, y: Any, sample_weight: Any = None
    ) -> tuple[Float[ndarray, "n k"], Float[ndarray, "n q"], Float[ndarray, " n"] | None]:
        """Return features, targets and weights of the positions that have a target."""
        weight = None if sample_weight is None else torch.as_tensor(sample_weight)
        rows = self.labelled(Samples(as_inputs(X), torch.as_tensor(y), weight))
        return _flat(rows.X), _flat(rows.T), None if rows.weight is None else rows.weight.double().numpy(force=True)

    def labelled(self, samples: Samples) -> Points:
        """Collect one row per position that has a target."""
        phi_tilde, T, weight = self.features(samples.inputs), samples.y, samples.weight
        where, device = phi_tilde.shape[:-1], phi_tilde.device
        T = T.movedim(self.outputs_axis, -1) if T.dim() > len(where) else T
        T = T[..., None] if T.dim() == len(where) else T
        if T.shape[:-1] != where:
            raise InputError(
                f"the features have shape {tuple(phi_tilde.shape)} and the targets {tuple(samples.y.shape)}: the layer "
                f"is evaluated at {math.prod(where)} positions, and each needs its targets. If the network pools the "
                "outputs of the layer, let it pool the features instead"
            )
        if weight is not None:
            weight = weight.reshape(*weight.shape, *[1] * (len(where) - weight.dim())).expand(where).to(device)
        if len(where) == 1:
            return Points(phi_tilde, Readings(T.to(device).double()), weight)
        missing = T.isnan() if T.is_floating_point() else T == IGNORED
        kept = ~missing.all(-1)
        mask = samples.inputs.get(MASK) if isinstance(samples.inputs, dict) else None
        if mask is not None and mask.shape == where:
            kept &= mask.to(kept.device) != 0
        if bool(missing[kept].any()):
            raise InputError(
                "some positions have only a part of their targets (the others are NaN): set all targets of such "
                "positions to NaN, or attach one model per output"
            )
        kept = kept.to(device)
        return Points(phi_tilde[kept], Readings(T.to(device)[kept].double()), None if weight is None else weight[kept])

    def shaped(self, values: Float[ndarray, "n q"], where: tuple[int, ...], y_ndim: int) -> ndarray:
        if y_ndim == 1:
            return values.reshape(where)
        return np.moveaxis(values.reshape(*where, -1), -1, self.outputs_axis)


class StagedPredictor(nn.Module):
    """A frozen network and the predictive formula of its last layer, called as the network is."""

    def __init__(self, network: nn.Module, predictor: Predictor) -> None:
        super().__init__()
        self.network, self.predictor = network, predictor

    def train(self, mode: bool = True) -> "StagedPredictor":
        return super().train(False)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
        phi_tilde = output_tensor(self.network(*args, **kwargs))
        moments = self.predictor(phi_tilde.flatten(0, -2))
        return {name: values.unflatten(0, phi_tilde.shape[:-1]) for name, values in moments.items()}


def _flat(values: Float[Tensor, "*s c"]) -> Float[ndarray, "n c"]:
    array: ndarray = values.flatten(0, -2).double().numpy(force=True)
    return array
