"""Training rows held out from a member, which therefore must not be removed from its last layer."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int64
from numpy import ndarray

from lastlayer.data.copies import fingerprints
from lastlayer.data.rows import Points


@dataclass(frozen=True, eq=False)
class Unseen:
    """Fingerprints of rows in ascending order, and the current weight of each."""

    keys: Int64[ndarray, " r"]
    weight: Float[ndarray, " r"]

    @classmethod
    def of(cls, data: Points) -> "Unseen":
        """Collect standardised rows; equal ones are counted together."""
        keys, place = np.unique(keys_of(data), return_inverse=True)
        return cls(keys, np.bincount(place, _weights(data), len(keys)))

    def has(self, data: Points) -> Bool[ndarray, " m"]:
        """Mask of the rows that are among these."""
        return np.isin(keys_of(data), self.keys) if len(self.keys) else np.zeros(len(data.X), dtype=bool)

    def scaled(self, factor: float) -> "Unseen":
        """Down-weight these rows as the seen ones are."""
        return Unseen(self.keys, factor * self.weight)

    def without(self, data: Points) -> 'tuple[Unseen, Float[ndarray, " m"]]':
        """Remove rows; return the rest, and the weight of each row that is still to be removed from the seen ones."""
        rest, weight, own = self.weight.copy(), _weights(data), keys_of(data)
        for row in np.flatnonzero(np.isin(own, self.keys)):
            place = np.searchsorted(self.keys, own[row])
            taken = min(rest[place], weight[row])
            rest[place] -= taken
            weight[row] -= taken
        left = rest > 0
        return Unseen(self.keys[left], rest[left]), weight


NOTHING = Unseen(np.empty(0, dtype=np.int64), np.empty(0))


def keys_of(data: Points) -> Int64[ndarray, " m"]:
    """Fingerprints of rows, inputs and targets."""
    columns = [x.detach().cpu().double().flatten(1).numpy() for x in (data.X, data.readings.values)]
    return fingerprints(np.concatenate(columns, 1))


def _weights(data: Points) -> Float[ndarray, " m"]:
    return np.ones(len(data.X)) if data.weight is None else data.weight.cpu().numpy().astype(float)
