"""A fitted model as one `torch.nn.Module`, with everything that the predictive formula needs as buffers."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from lastlayer import formula
from lastlayer._internal.arrays import converted
from lastlayer.formula.ops import TorchOps

OUTPUTS = ("mean", "var", "epistemic_var", "noise_var", "affine_cost")
"""Entries of a prediction, under the names of `Prediction`."""


class Numbers(nn.Module):
    """A `formula.State` whose tensors are buffers, and whose networks are submodules."""

    def __init__(self, state: formula.State) -> None:
        super().__init__()
        for name, value in vars(state).items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value.detach().clone(memory_format=torch.contiguous_format))
            elif isinstance(value, formula.State):
                setattr(self, name, Numbers(value))
            elif isinstance(value, list) and value and isinstance(value[0], formula.State):
                setattr(self, name, nn.ModuleList(map(Numbers, value)))
            elif isinstance(value, list) and value and isinstance(value[0], Tensor):
                setattr(self, name, Sequence(formula.State(**{str(i): own for i, own in enumerate(value)})))
            else:
                setattr(self, name, copy.deepcopy(value))


class Sequence(Numbers):
    def __iter__(self) -> Iterator[Tensor]:
        return self.buffers(recurse=False)


class Predictor(Numbers):
    """Maps x to {mean, var, epistemic_var, noise_var: (m, q), affine_cost: (m,)}, in original units.

    The moments are those of `predictive`, members and calibration included. Gradients flow to the inputs; the model's
    parameters are frozen. The module is a copy and always in evaluation mode: changing it does not change the model.

    Parameters
    ----------
    state : State
        The numbers of the model.
    """

    centre: Tensor
    layers: Any
    curve: Any
    head: Any
    widening: Tensor
    noise_cov: Tensor

    def __init__(self, state: formula.State) -> None:
        super().__init__(state)
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "Predictor":
        return super().train(False)

    def converted(self, x: Num[Tensor, "m *d"]) -> Num[Tensor, "m *d"]:
        """Convert inputs to the model's device, and floating-point ones to its dtype."""
        return converted(x, self.centre.dtype, self.centre.device)

    def components(self, x: Num[Tensor, "m *d"]) -> formula.Components:
        parts: formula.Components = formula.predict(TorchOps, self, self.converted(x))
        return parts

    def mean(self, x: Num[Tensor, "m *d"]) -> Float[Tensor, "m q"]:
        """Mean of the mixture; costs are not computed where they affect neither weights nor shrinkage."""
        mean: Tensor = formula.predict_mean(TorchOps, self, self.converted(x))
        return mean

    def functions(self, x: Num[Tensor, "m *d"]) -> formula.Functions:
        found: formula.Functions = formula.functions(TorchOps, self, formula.standardized(self, self.converted(x)))
        return found

    def forward(self, x: Num[Tensor, "m *d"]) -> dict[str, Tensor]:
        mean, epistemic, noise, cost = formula.moments(TorchOps, self, self.components(x))
        return dict(zip(OUTPUTS, (mean, epistemic + noise, epistemic, noise, cost[..., 0]), strict=True))
