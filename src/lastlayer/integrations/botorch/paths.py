"""Draws of the posterior as BoTorch's sample paths, for `draw_matheron_paths`, `get_optimal_samples` and others."""

from typing import Any

import torch
from botorch.models.model import Model
from botorch.sampling.pathwise.paths import SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from jaxtyping import Float
from torch import Tensor

from lastlayer.integrations.botorch.model import BLLMixture, BLLModel


class FunctionPaths(SamplePath):  # type: ignore[misc]  # mypy skips BoTorch
    """Functions of a model's posterior in BoTorch's layout."""

    def __init__(self, model: BLLModel, sample_shape: torch.Size) -> None:
        super().__init__()
        self.members = torch.nn.ModuleList(
            [member.draw(tuple(sample_shape)) for member in (model.members() if is_mixture(model) else [model])]
        )
        self.of_mixture, self.members_have_points = is_mixture(model), False

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        """Choose whether each member is evaluated at its own points, X (*b, members, n, d)."""
        self.members_have_points = ensemble_as_batch

    def forward(self, x: Float[Tensor, "*b n d"], **_: Any) -> Tensor:
        """Evaluate the paths."""
        if not self.of_mixture:
            return self._values(self.members[0], x)
        own = self.members_have_points and x.dim() > 2
        each = [self._values(member, x.select(-3, i) if own else x) for i, member in enumerate(self.members)]
        return torch.stack(each, -2)

    @staticmethod
    def _values(member: Any, x: Tensor) -> Tensor:
        if member.num_outputs == 1:
            return member.posterior(x).mean[..., 0]
        alone = x.squeeze(-3) if x.dim() > 2 and x.shape[-3] == 1 else x
        return member.posterior(alone).mean.mT


def is_mixture(model: Model) -> bool:
    """Tell whether a model keeps its members in a batch dimension."""
    return isinstance(model, BLLMixture)


@DrawMatheronPaths.register(BLLModel)  # type: ignore[untyped-decorator]
def _draw_paths(model: BLLModel, *, sample_shape: torch.Size, **_: Any) -> FunctionPaths:
    """Draw functions from the posterior directly; no prior paths are updated."""
    return FunctionPaths(model, sample_shape)
