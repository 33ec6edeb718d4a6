"""`Member`: a network of a mixture, the posterior of its last layer, and the training rows that it has not seen."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy import ndarray
from torch import Tensor, nn

from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Posterior, leave_one_out_cost
from lastlayer.data.rows import Points
from lastlayer.networks.mlp import finite_features
from lastlayer.settings.types import NETWORK, Family

KEPT_COSTS, MOST_ROWS = 1001, 4_096
"""Number of quantiles of the training rows' affine costs that a model keeps; rows that they are estimated from."""


@dataclass(frozen=True, eq=False)
class Unseen:
    """Training rows held out from a member, which must not be removed from its last layer: fingerprints, weights."""

    keys: Int64[ndarray, " r"]
    weight: Float[ndarray, " r"]
    """The current weight of each."""

    def scaled(self, factor: float) -> "Unseen":
        """Down-weight these rows as the seen ones are."""
        return Unseen(self.keys, factor * self.weight)

    def without(self, keys: Int64[ndarray, " m"], weight: Tensor | None) -> 'tuple[Unseen, Float[ndarray, " m"]]':
        """Remove rows; return the rest, and the weight of each row that is still to be removed from the seen ones."""
        rest = self.weight.copy()
        seen = np.ones(len(keys)) if weight is None else weight.double().numpy(force=True).copy()
        for row in np.flatnonzero(np.isin(keys, self.keys)):
            for place in np.flatnonzero(self.keys == keys[row]):
                taken = min(rest[place], seen[row])
                rest[place] -= taken
                seen[row] -= taken
        left = rest > 0
        return Unseen(self.keys[left], rest[left]), seen


NOTHING = Unseen(np.empty(0, dtype=np.int64), np.empty(0))


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
        return float(self.posterior.log_alpha)

    @property
    def log_alpha(self) -> float:
        return self.log_alpha_star if self.tuned is None else self.tuned

    @torch.no_grad()
    def features(self, Z: Tensor) -> Float[Tensor, "m p"]:
        """Affine features of standardised inputs in float64."""
        return affine_features(finite_features(self.network, Z)).double()


@torch.no_grad()
def training_costs(members: Sequence[Member], data: Points) -> Float[Tensor, " n"]:
    """Quantiles of the affine costs at alpha* that the training points would have if they were new."""
    data = data.take(slice(None, None, -(-len(data.X) // MOST_ROWS)))
    keys = data.keys()
    each = [member.posterior.variance_ratio(member.features(data.X)) for member in members]
    new = torch.from_numpy(np.stack([np.isin(keys, member.unseen.keys) for member in members]))
    return cost_quantiles(torch.stack([cost if cost.dim() == 1 else cost.mean(-1) for cost in each]).cpu(), new)


def cost_quantiles(cost: Float[Tensor, "c m"], new: Bool[Tensor, "c m"] | None = None) -> Float[Tensor, " n"]:
    """Quantiles of the affine costs of training points, of which some are new to some members."""
    left_out = leave_one_out_cost(cost)
    costs = (left_out if new is None else torch.where(new, cost, left_out)).mean(0)
    levels = torch.linspace(0, 1, min(KEPT_COSTS, len(costs)), dtype=costs.dtype)
    return costs[: 2**24].quantile(levels)
