"""Averages over the acquisition functions of the members of a mixture."""

from collections.abc import Callable
from typing import Any

import torch
from botorch.acquisition import AcquisitionFunction
from jaxtyping import Float
from torch import Tensor

from lastlayer.integrations.botorch.model import BLLMixture, BLLModel


class MemberAverage(AcquisitionFunction):  # type: ignore[misc]  # mypy skips BoTorch
    """Mean over members of an acquisition function that does not support mixtures itself."""

    def __init__(self, model: BLLMixture, make: Callable[[BLLModel], AcquisitionFunction]) -> None:
        super().__init__(model)
        self.functions = torch.nn.ModuleList([make(member) for member in model.members()])

    def set_X_pending(self, X_pending: Float[Tensor, "n d"] | None = None) -> None:
        """Set the points that are being evaluated, for each member."""
        for function in self.functions:
            function.set_X_pending(X_pending)  # type: ignore[operator]

    def forward(self, X: Float[Tensor, "*b q d"]) -> Float[Tensor, "*b"]:
        """Compute the mean of the members' acquisition values."""
        values: list[Any] = [function(X) for function in self.functions]
        return torch.stack(values).mean(0)
