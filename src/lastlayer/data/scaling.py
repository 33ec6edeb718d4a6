"""Standardisation of inputs and targets."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer._internal.arrays import rows_with
from lastlayer._internal.numbers import EPS
from lastlayer.bayes.statistics import Readings
from lastlayer.errors import InputError
from lastlayer.settings.types import Given

LARGEST_TARGET = 1e100
"""Magnitude up to which variances of targets do not overflow in float64."""
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
        return (X.double() - self.mean) / self.scale

    def check_reach(
        self, values: ndarray, name: str, farthest: float = FARTHEST["float64"], *, place: ndarray | None = None
    ) -> None:
        """Raise an error for rows so far out that predictions would not be finite, named by `place` in them."""
        with np.errstate(over="ignore"):
            far = np.abs(values - self.mean.numpy(force=True)) / self.scale.numpy(force=True) > farthest
        if far.any():
            rows = rows_with(far, place)
            raise InputError(
                f"{name} has values farther than {farthest:g} standard deviations from the mean of the rows of fit, in "
                f"{len(rows)} rows (first: row {rows[0]}); drop or fix them"
            )


@dataclass(frozen=True)
class Scales:
    """Standardisation of inputs and targets."""

    inputs: Standardizer | None
    """Scaler of the inputs; None for ids and inputs of more than two dimensions, which are not scaled."""
    targets: Standardizer

    @classmethod
    def of(cls, given: Given, working: Readings) -> "Scales":
        """Fit the scalers to rows, and check that float64 can represent what comes of them."""
        weight = None if given.weight is None else torch.tensor(given.weight)
        inputs = Standardizer.fit(torch.tensor(given.X), sample_weight=weight) if given.is_table else None
        targets = Standardizer.fit(working.values, sample_weight=weight)
        if inputs is not None:
            inputs.check_reach(given.X, "X", place=given.place)
        targets.check_reach(working.values.numpy(), "y", place=given.place)
        if bool((targets.scale < 1 / LARGEST_TARGET).any()):
            raise InputError(
                f"the targets differ by about {float(targets.scale.min()):g}, less than {1 / LARGEST_TARGET:g}: give y "
                "in another unit"
            )
        return cls(inputs, targets)

    def read(self, working: Readings) -> Readings:
        mean, scale = self.targets.mean, self.targets.scale
        t = (working.t - mean) / scale
        t = t if working.read is None else torch.where(working.read > 0, t, 0.0)
        lower, upper = (None if x is None else (x - mean) / scale for x in (working.lower, working.upper))
        known = None if working.known is None else working.known / scale.square()
        return replace(working, t=t, known=known, lower=lower, upper=upper)
