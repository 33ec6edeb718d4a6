"""Standardisation of inputs and targets."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer._internal.numbers import EPS
from lastlayer.errors import InputError

FARTHEST = {"float64": 1e50, "float32": 1e30}
"""Standardised values up to which networks of that type and the squares of their features stay finite."""


@dataclass(frozen=True)
class Standardizer:
    """x -> (x - mean) / scale, column by column; the scale of a constant column is 1."""

    mean: Float[Tensor, " d"]
    scale: Float[Tensor, " d"]

    @classmethod
    def fit(cls, X: Float[Tensor, "m d"], *, sample_weight: Float[Tensor, " m"] | None = None) -> "Standardizer":
        """Use the weighted mean and standard deviation of each column; missing values (NaN) are ignored."""
        X, known = X.double().nan_to_num(0.0, torch.inf, -torch.inf), ~X.isnan()
        w = known.double() if sample_weight is None else known * sample_weight.double()[:, None]
        share = w / w.sum(0)
        # columns are first scaled to size one: squares of 1e200 would overflow
        size = X.abs().amax(0)
        unit = torch.where(size > 0, size, torch.ones_like(size))
        mean = (share * (X / unit)).sum(0)
        std = (share * (X / unit - mean).square()).sum(0).sqrt()
        constant = std <= 10 * EPS * len(X) ** 0.5
        return cls(mean * unit, torch.where(constant, torch.ones_like(std), std * unit))

    @classmethod
    def of_moments(cls, mean: Float[Tensor, " d"], var: Float[Tensor, " d"], n_rows: int) -> "Standardizer":
        """Use moments that were accumulated batch by batch."""
        std = var.clamp_min(0).sqrt()
        constant = (std <= 10 * EPS * n_rows**0.5 * mean.abs()) | (std == 0)
        return cls(mean, torch.where(constant, torch.ones_like(std), std))

    def forward(self, X: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
        """Standardise rows."""
        return (X.double() - self.mean) / self.scale

    def check_reach(self, values: ndarray, name: str, farthest: float = FARTHEST["float64"]) -> None:
        """Raise an error for rows so far out that predictions would not be finite."""
        with np.errstate(over="ignore"):
            far = np.abs(values - self.mean.numpy(force=True)) / self.scale.numpy(force=True) > farthest
        if far.any():
            rows = np.flatnonzero(far.reshape(len(far), -1).any(1))
            raise InputError(
                f"{name} has values farther than {farthest:g} standard deviations from the mean of the rows of fit, in "
                f"{len(rows)} rows (first: row {rows[0]}); drop or fix them"
            )

    def to(self, device: torch.device | str) -> "Standardizer":
        """Move to another device."""
        return Standardizer(self.mean.to(device), self.scale.to(device))
