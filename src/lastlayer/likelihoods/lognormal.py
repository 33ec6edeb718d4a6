"""`LogNormal`: positive targets, whose logarithm is modelled."""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer._internal.arrays import rows_with
from lastlayer._internal.numbers import TINY
from lastlayer.bayes.statistics import Readings
from lastlayer.errors import InputError
from lastlayer.likelihoods.base import Likelihood
from lastlayer.predictions.lognormal import LogPrediction
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.settings.types import Given

SKEWED = 1.0
"""Skewness above which a positive target is modelled by its logarithm, if that of the logarithm is less than half."""

MOST_VARIANCE = 16.0
"""Largest variance of a component, over that of all on average."""


@dataclass(frozen=True)
class LogNormal(Likelihood):
    """Log-normal targets: their logarithm is the function plus Gaussian noise."""

    name = "lognormal"
    modelled = "the logarithm of the targets"
    described = "the targets are positive and skewed: their logarithm is modelled"
    point_name = LogPrediction.point_name
    linear = False

    @classmethod
    def suits(cls, y: Float[ndarray, "m q"]) -> bool:
        """Whether all targets are positive and skewed, and their logarithms much less so."""
        columns = [column[~np.isnan(column)] for column in y.T]
        return not (y <= 0).any() and all(map(_rather_log, columns))

    def read(self, given: Given) -> Readings:
        """Take the logarithm of positive targets."""
        rows = rows_with(given.y <= 0, given.place)
        if len(rows):
            raise InputError(
                f'likelihood="lognormal" needs positive targets, and y is zero or negative in {len(rows)} rows (first: '
                f'row {rows[0]}): choose likelihood="gaussian", or fit to y plus a constant'
            )
        return super().read(replace(given, y=np.log(given.y)))

    def predict(self, working: MixturePrediction) -> LogPrediction:
        """Exponentiate; components far wider than all others are narrowed, as their moments would govern the whole."""
        var, weights = working.component_var, working.weights[..., None]
        factor = np.minimum(1.0, MOST_VARIANCE * (weights * var).sum(0) / np.maximum(var, TINY))
        if (factor < 1).any():
            words = {"component_epistemic_var": factor * working.component_epistemic_var}
            working = replace(working, component_noise_var=factor * working.component_noise_var, **words)
        return LogPrediction(working)

    def draw(
        self, function: Float[ndarray, "n m q"], noise_cov: Float[ndarray, "m q q"] | None, rng: np.random.RandomState
    ) -> Float[ndarray, "n m q"]:
        """Draw logarithms, and exponentiate them."""
        return np.exp(super().draw(function, noise_cov, rng))


def _rather_log(y: Float[ndarray, " m"]) -> bool:
    """Whether y is skewed, and its logarithm much less so."""
    if len(y) < 3 or (y == y[0]).all():
        return False
    of_y, of_log = _skewness(y), _skewness(np.log(y))
    return of_y > SKEWED and abs(of_log) < of_y / 2


def _skewness(x: Float[ndarray, " m"]) -> float:
    z = (x - x.mean()) / x.std()
    return float((z**3).mean())
