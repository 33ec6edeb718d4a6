"""Draws of the posterior as BoTorch's sample paths: `draw_matheron_paths`, `get_optimal_samples` and all that use them.

A Bayesian last layer needs no update of a prior path: a function of the posterior is a draw of its weights.
"""

from typing import Any

import torch
from botorch.models.model import Model
from botorch.sampling.pathwise.paths import SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from jaxtyping import Float
from torch import Tensor

from lastlayer.integrations.botorch.model import BLLMixture, BLLModel


class FunctionPaths(SamplePath):  # type: ignore[misc]  # BoTorch is not looked into
    """Functions of a model's posterior in BoTorch's layout: (*b, n, d) -> (*s, n), or (*s, o, n) for several outputs.

    The shape of the draws is broadcast with b, as that of BoTorch's own paths is. Those of a mixture have the members
    as a dimension before the points.
    """

    def __init__(self, model: BLLModel, sample_shape: torch.Size) -> None:
        super().__init__()
        self.members = torch.nn.ModuleList(
            [member.draw(tuple(sample_shape)) for member in (model.members() if is_mixture(model) else [model])]
        )
        self.of_mixture, self.members_have_points = is_mixture(model), False

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        """Whether each member is asked at points of its own: X (*b, members, n, d)."""
        self.members_have_points = ensemble_as_batch

    def forward(self, x: Float[Tensor, "*b n d"], **_: Any) -> Tensor:
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
    return isinstance(model, BLLMixture)


@DrawMatheronPaths.register(BLLModel)  # type: ignore[untyped-decorator]
def _draw_paths(model: BLLModel, *, sample_shape: torch.Size, **_: Any) -> FunctionPaths:
    """Prior paths and updates of them are not needed."""
    return FunctionPaths(model, sample_shape)
