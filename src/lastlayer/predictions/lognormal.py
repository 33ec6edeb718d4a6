"""`LogPrediction`: predictions of positive targets by a model of their logarithm."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import log_ndtr

from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.predictions.prediction import Bounds, Prediction, Targets

LARGEST_LOG = 300.0
"""Largest logarithm of a moment; moments above are set to it, so that their squares do not overflow."""


@dataclass(frozen=True, eq=False)
class LogPrediction(Prediction):
    """The predictive distribution of y = exp(z), given that of z: a mixture of log-normals.

    `predict` returns the median: far outside the data, the mean is governed by a tail of enormous values. With
    z = f + e of epistemic variance v and noise variance n, and m = E[y], the variance m^2 (exp(v + n) - 1) of a
    component is `epistemic_var`, the variance m^2 (exp(v) - 1) of E[y | f], plus `noise_var`, the mean
    m^2 exp(v) (exp(n) - 1) of Var(y | f). Without noise the prediction is that of exp(f), the median of the targets.
    `standardized_residual` and conformal intervals refer to log y. Moments beyond exp(300) are reported as exp(300).
    """

    point_name = "median"
    log: MixturePrediction
    """The prediction of log y."""

    def __post_init__(self) -> None:
        for name in ("affine_cost", "beyond_reach", "y_ndim"):
            object.__setattr__(self, name, getattr(self.log, name))

    def with_output_axis(self) -> "LogPrediction":
        return self if self.y_ndim == 2 else LogPrediction(self.log.with_output_axis())

    n_outputs = property(lambda self: self.log.n_outputs)

    @cached_property
    def _moments(self) -> MixturePrediction:
        """Mean and variances of the log-normals as those of a mixture."""
        v, n = self.log.component_epistemic_var, self.log.component_noise_var
        mean = self.log.component_mean + (v + n) / 2
        return replace(
            self.log,
            component_mean=_exp(mean),
            component_epistemic_var=_exp(2 * mean + _log_expm1(v), 2 * LARGEST_LOG),
            component_noise_var=_exp(2 * mean + v + _log_expm1(n), 2 * LARGEST_LOG),
        )

    mean = property(lambda self: self._moments.mean)
    epistemic_var = property(lambda self: self._moments.epistemic_var)
    noise_var = property(lambda self: self._moments.noise_var)

    @cached_property
    def point(self) -> Float[ndarray, "m *q"]:
        """Median of the targets."""
        return self.quantile(0.5)

    def cov(self) -> Float[ndarray, "m q q"]:
        """Compute the covariance between the outputs at each point; that of a component is m_i m_j (exp(S_ij) - 1)."""
        S, mean = self.log.component_cov(), np.log(self._moments.component_mean)
        size = mean[..., :, None] + mean[..., None, :] + np.maximum(S, 0) + _log_expm1(np.abs(S)) - np.abs(S)
        return self._moments.cov_with(np.sign(S) * _exp(size, 2 * LARGEST_LOG))

    def log_prob(self, y: Targets, *, per_output: bool = False) -> Float[ndarray, "m *q"]:
        y = np.asarray(y, float)
        log_y = np.log(np.where(y <= 0, 1.0, y))
        density = self.log.log_prob(log_y, per_output=per_output)
        jacobian = np.where(y > 0, log_y, np.where(np.isnan(y), 0.0, np.inf))
        jacobian = jacobian if per_output else jacobian.reshape(len(y), -1).sum(1)
        return np.asarray(density - jacobian.reshape(density.shape))

    def standardized_residual(self, y: Targets) -> Float[ndarray, "m *q"]:
        return self.log.standardized_residual(_log(y))

    def cdf(self, y: Targets) -> Float[ndarray, "m *q"]:
        return self.log.cdf(_log(y))

    def crps(self, y: Targets) -> Float[ndarray, "m *q"]:
        """CRPS without the means, which may be astronomical, since abs(a - b) = a + b - 2 min(a, b).

        It is y - 2 sum_i w_i E min(y, X_i) + sum_ij w_i w_j E min(X_i, X_j), with X_i of component i.
        """
        y, w = self.targets(y), self.log.weights[..., None]
        mu, var = self.log.component_mean, self.log.component_var
        positive = np.where(y > 0, y, 1.0)
        score = y - 2 * np.where(y > 0, (w * _smaller(np.log(positive), 0.0, mu, var)).sum(0), y)
        for i in range(len(w)):  # one row of pairs at a time, to keep memory at c m q
            score = score + w[i] * (w * _smaller(mu[i], var[i], mu, var)).sum(0)
        return self._like_targets(score)

    def quantile(self, level: float | Sequence[float] | ndarray) -> Float[ndarray, "*s"]:
        return _exp(self.log.quantile(level))

    def interval(self, level: float = 0.95, *, method: str = "quantile") -> Bounds:
        lower, upper = self.log.interval(level, method=method)
        if method == "quantile":
            return _exp(lower), _exp(upper)
        with np.errstate(over="ignore"):  # a conformal interval may be infinite
            return np.exp(lower), np.exp(upper)

    def sample(self, n: int, *, random_state: int | np.random.Generator | None = None) -> Float[ndarray, "n m *q"]:
        return _exp(self.log.sample(n, random_state=random_state))


def _log(y: ndarray) -> ndarray:
    """log y; -inf where y is not positive."""
    y = np.asarray(y, float)
    return np.where(y > 0, np.log(np.where(y > 0, y, 1.0)), -np.inf)


def _exp(x: ndarray, largest: float = LARGEST_LOG) -> ndarray:
    return np.asarray(np.exp(np.minimum(x, largest)))


def _log_expm1(x: ndarray) -> ndarray:
    """log(exp(x) - 1), also where exp(x) overflows; -inf at 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(-np.expm1(-x)) + x)


def _smaller(mu1: Any, v1: Any, mu2: Any, v2: Any) -> ndarray:
    """E min(X, Y) of independent log-normals; X may be a number, with v1 = 0 and mu1 its logarithm."""
    s = np.sqrt(v1 + v2)
    of_X = mu1 + v1 / 2 + log_ndtr((mu2 - mu1 - v1) / s)
    of_Y = mu2 + v2 / 2 + log_ndtr((mu1 - mu2 - v2) / s)
    smaller: ndarray = np.exp(np.minimum(of_X, LARGEST_LOG)) + np.exp(np.minimum(of_Y, LARGEST_LOG))
    return smaller
