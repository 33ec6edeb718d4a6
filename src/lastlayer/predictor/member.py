"""`Member`: a network of a mixture and the posterior of its last layer; and the affine costs of training rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lastlayer._internal.chunks import row_chunks
from lastlayer.bayes.affine_cost import leave_one_out_cost
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Posterior
from lastlayer.data.rows import Points
from lastlayer.networks.mlp import finite_features
from lastlayer.predictor.unseen import NOTHING, Unseen
from lastlayer.settings.types import NETWORK, Family

KEPT_COSTS = 1001
"""Number of quantiles of the training rows' affine costs that a model keeps."""


@dataclass(frozen=True)
class Member:
    """One network of the mixture and the posterior of its last layer."""

    network: nn.Module
    posterior: Posterior
    family: Family = NETWORK
    unseen: Unseen = NOTHING
    """Rows of the training table that neither the network nor its last layer was fitted to."""
    tuned: float | None = None
    """Log alpha of the variance; None: that of the posterior, alpha*."""

    @property
    def log_alpha_star(self) -> float:
        """Log alpha at the maximum of the evidence."""
        return float(self.posterior.log_alpha)

    @property
    def log_alpha(self) -> float:
        """Log alpha in use for the variance."""
        return self.log_alpha_star if self.tuned is None else self.tuned

    def linear_features(self, Z: Tensor) -> Float[Tensor, "m k"]:
        """Features of standardised inputs, without the column of ones."""
        with torch.no_grad():
            return finite_features(self.network, Z)

    def features(self, Z: Tensor) -> Float[Tensor, "m p"]:
        """Affine features of standardised inputs in float64."""
        return affine_features(self.linear_features(Z)).double()


def training_costs(members: Sequence[Member], data: Points) -> Float[Tensor, " n"]:
    """Quantiles of the affine costs at alpha* that the training points would have if they were new."""
    costs = []
    for rows in row_chunks(len(data.X)):
        with torch.no_grad():
            each = [member.posterior.variance_ratio(member.features(data.X[rows])) for member in members]
        costs.append(torch.stack([cost if cost.dim() == 1 else cost.mean(-1) for cost in each]).cpu())
    new = torch.stack([torch.from_numpy(member.unseen.has(data)) for member in members])
    return cost_quantiles(torch.cat(costs, 1), new)


def cost_quantiles(cost: Float[Tensor, "c m"], new: Bool[Tensor, "c m"] | None = None) -> Float[Tensor, " n"]:
    """Quantiles of the affine costs of training points, of which some are new to some members."""
    left_out = leave_one_out_cost(cost)
    costs = (left_out if new is None else torch.where(new, cost, left_out)).mean(0)
    levels = torch.linspace(0, 1, min(KEPT_COSTS, len(costs)), dtype=costs.dtype)
    return costs[: 2**24].quantile(levels)
