"""The effect of each input, read from the additive members of a mixture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer.errors import InputError
from lastlayer.formula import State, centred
from lastlayer.formula.ops import TorchOps
from lastlayer.predictor.fitted import Fitted, as_fitted
from lastlayer.settings.types import ADDITIVE


@dataclass(frozen=True)
class Effect:
    """Contribution of one input to the targets, in their units; its mean over the training rows is zero."""

    name: str
    """Name of the input."""
    x: Float[ndarray, " n"]
    """Values of the input."""
    mean: Float[ndarray, "n q"]
    """Contribution to each target, averaged over the additive members."""
    std: Float[ndarray, "n q"]
    """Its epistemic standard deviation."""


def additive_effects(model: Any, *, names: Sequence[str] | None = None, n: int = 101) -> list[Effect]:
    """Compute the effect of each input over its range in the training rows, by the additive members.

    Parameters
    ----------
    model : fitted regressor
        A model whose mixture has additive members, as the default mixture does.
    names, n : sequence of str, optional, int, default 101
        Names of the inputs, by default those of the training table, and number of values of each.
    """
    fitted = as_fitted(model, "an additive part")
    groups = [layer for layer in fitted.state.layers if fitted.members[layer.places[0]].family == ADDITIVE]
    if not groups:
        raise InputError(
            "this model has no additive members: the default mixture has them if there are at least 20 rows "
            '(encoding="auto" or "piecewise"; with "auto", at most 100 columns)'
        )
    (layer,), d = groups, fitted.n_features_in
    names = names or fitted.feature_names or [f"input {j + 1}" for j in range(d)]
    return [_effect(fitted, layer, j, str(names[j]), n) for j in range(d)]


@torch.no_grad()
def _effect(fitted: Fitted, layer: State, j: int, name: str, n: int) -> Effect:
    encoding, inputs, d = layer.network.bins, fitted.inputs, fitted.n_features_in
    assert inputs is not None
    slope, shift = (x[..., encoding.column == j].double() for x in (encoding.slope, encoding.shift))
    live = slope > 0
    low, high = _least(-shift / slope, live), -_least((shift - 1) / slope, live)
    points = torch.zeros(n, d, dtype=torch.float64, device=slope.device)
    points[:, j] = torch.linspace(low, high, n, dtype=torch.float64)
    grid = (points[:, j].cpu() * inputs.scale[j] + inputs.mean[j]).numpy()
    own = torch.cat([encoding.column == j, torch.arange(d, device=slope.device) == j])
    phi = centred(TorchOps, layer, points.to(layer.centre)) * own
    mean: ndarray = (phi @ layer.weights).cpu().numpy()
    cost: ndarray = TorchOps.block_sum((phi @ layer.root).square(), layer.n_costs).cpu().numpy()
    places = layer.places
    factor = np.stack([fitted.curve(i).widening * fitted.curve(i).slope for i in places])[:, None]
    within = cost * factor * np.square(fitted.noise_std[places])[:, None]
    return Effect(name, grid, mean.mean(0), np.sqrt(within.mean(0) + mean.var(0)))


def _least(knots: Tensor, live: Tensor) -> float:
    """Smallest knot of the bins with positive width; 0 for a constant input."""
    return float(knots[live].min()) if bool(live.any()) else 0.0
