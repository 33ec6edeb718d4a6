"""`Member`: a network of a mixture, the posterior of its last layer, and the training rows that it has not seen."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy import ndarray
from torch import Tensor, nn

from lastlayer._internal.work import row_chunks
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Posterior, leave_one_out_cost
from lastlayer.data.copies import fingerprints
from lastlayer.data.rows import Points
from lastlayer.networks.mlp import finite_features
from lastlayer.settings.types import NETWORK, Family

KEPT_COSTS, MOST_ROWS = 1001, 4_096
"""Number of quantiles of the training rows' affine costs that a model keeps; rows that they are estimated from."""


@dataclass(frozen=True, eq=False)
class Unseen:
    """Training rows held out from a member, which must not be removed from its last layer: fingerprints, weights."""

    keys: Int64[ndarray, " r"]
    """Fingerprints in ascending order."""
    weight: Float[ndarray, " r"]
    """The current weight of each."""

    @classmethod
    def of(cls, data: Points) -> "Unseen":
        """Collect standardised rows; equal ones are counted together."""
        keys, place = np.unique(keys_of(data), return_inverse=True)
        weight = None if data.weight is None else data.weight.cpu().double().numpy()
        return cls(keys, np.bincount(place, weight, len(keys)).astype(float))

    def has(self, data: Points) -> Bool[ndarray, " m"]:
        """Mask of the rows that are among these."""
        return np.isin(keys_of(data), self.keys) if len(self.keys) else np.zeros(len(data.X), dtype=bool)

    def scaled(self, factor: float) -> "Unseen":
        """Down-weight these rows as the seen ones are."""
        return Unseen(self.keys, factor * self.weight)

    def without(self, data: Points) -> 'tuple[Unseen, Float[ndarray, " m"]]':
        """Remove rows; return the rest, and the weight of each row that is still to be removed from the seen ones."""
        rest, own = self.weight.copy(), keys_of(data)
        weight = np.ones(len(data.X)) if data.weight is None else data.weight.cpu().numpy().astype(float)
        for row in np.flatnonzero(np.isin(own, self.keys)):
            place = np.searchsorted(self.keys, own[row])
            taken = min(rest[place], weight[row])
            rest[place] -= taken
            weight[row] -= taken
        left = rest > 0
        return Unseen(self.keys[left], rest[left]), weight


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


def keys_of(data: Points) -> Int64[ndarray, " m"]:
    """Fingerprints of rows, inputs and targets."""
    columns = [x.detach().cpu().double().flatten(1).numpy() for x in (data.X, data.readings.values)]
    return fingerprints(np.concatenate(columns, 1))


@torch.no_grad()
def training_costs(members: Sequence[Member], data: Points) -> Float[Tensor, " n"]:
    """Quantiles of the affine costs at alpha* that the training points would have if they were new."""
    costs = []
    data = data.take(slice(None, None, -(-len(data.X) // MOST_ROWS)))
    for rows in row_chunks(len(data.X)):
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
