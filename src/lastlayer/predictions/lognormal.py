"""`LogPrediction`: predictions of positive targets by a model of their logarithm."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from jaxtyping import Float, Real
from numpy import ndarray

from lastlayer.errors import InputError
from lastlayer.predictions.prediction import Prediction

LARGEST_LOG = 300.0
"""Largest logarithm of a moment; moments above are set to it, so that their squares do not overflow."""


@dataclass(frozen=True, eq=False)
class LogPrediction(Prediction):
    """The predictive distribution of y = exp(z), given that of z: a mixture of log-normals.

    Densities, probabilities, quantiles, intervals and samples are exact. Mean and variances are those of the
    log-normals, in the units of y. With z = f + e of epistemic variance v and noise variance n, and m = E[y], the
    variance m^2 (exp(v + n) - 1) of a component is the sum of

    - `epistemic_var`, the variance of E[y | f], which more data would reduce: m^2 (exp(v) - 1);
    - `noise_var`, the mean of Var(y | f): m^2 exp(v) (exp(n) - 1).

    Without noise (`predictive(X, noise=False)`) the prediction is that of exp(f), the median of the targets.
    `standardized_residual` and conformal intervals refer to log y, where the components are symmetric. Moments
    beyond exp(300) are reported as exp(300).
    """

    log: Prediction = field(kw_only=True)
    """The prediction of log y."""

    @classmethod
    def of(cls, log: Prediction) -> "LogPrediction":
        """Create the prediction of exp(z) from that of z.

        Parameters
        ----------
        log : Prediction
            The prediction of z.
        """
        v, n = log.component_epistemic_var, log.component_noise_var
        mean = log.component_mean + (v + n) / 2
        kept = {each.name: getattr(log, each.name) for each in fields(Prediction)}
        moments = {
            "component_mean": _exp(mean),
            "component_epistemic_var": _exp(2 * mean + _log_expm1(v), 2 * LARGEST_LOG),
            "component_noise_var": _exp(2 * mean + v + _log_expm1(n), 2 * LARGEST_LOG),
        }
        return cls(**kept | moments, log=log)

    @classmethod
    def mixture(cls, members: Sequence[Prediction], weights: Any = None) -> "LogPrediction":
        """Mix several predictions of the same points, all of them of log targets.

        Parameters
        ----------
        members : sequence of LogPrediction
            The predictions.
        weights : ndarray of shape (c,) or (c, m), default None
            Weight of each of them, at each point or for all points; None: equal weights.
        """
        logs = [member.log for member in members if isinstance(member, LogPrediction)]
        if len(logs) < len(members):
            raise InputError("some members predict log y and others y: fit all members to log y, or none")
        return cls.of(Prediction.mixture(logs, weights))

    def with_output_axis(self) -> "LogPrediction":
        """Return the same distribution with results of shape (m, q), also for a single output."""
        return self if self.y_ndim == 2 else LogPrediction.of(self.log.with_output_axis())

    def merged(self, fraction: Float[ndarray, " m"]) -> "LogPrediction":
        """Count disagreement between the components of log y as variance of each of them."""
        return LogPrediction.of(self.log.merged(fraction))

    def component_cov(self) -> Float[ndarray, "c m q q"]:
        """Compute the covariance between the outputs at each point under each component: m_i m_j (exp(S_ij) - 1)."""
        S, mean = self.log.component_cov(), np.log(self.component_mean)
        size = mean[..., :, None] + mean[..., None, :] + np.maximum(S, 0) + _log_expm1(np.abs(S)) - np.abs(S)
        cov: ndarray = np.sign(S) * _exp(size, 2 * LARGEST_LOG)
        return cov

    def log_prob(
        self, y: Real[ndarray, "m q"] | Real[ndarray, " m"], *, per_output: bool = False
    ) -> Float[ndarray, "m *q"]:
        """Compute the log density of y, including the Jacobian of the logarithm.

        Parameters
        ----------
        y : ndarray of shape (m,) or (m, q)
            Targets.
        per_output : bool, default False
            Whether to return the density of each output alone instead of the joint density.
        """
        y = np.asarray(y, float)
        log_y = np.log(np.where(y > 0, y, 1.0))
        density = self.log.log_prob(log_y, per_output=per_output)
        jacobian = np.where(y > 0, log_y, np.inf)
        jacobian = jacobian if per_output else jacobian.reshape(len(y), -1).sum(1)
        return np.asarray(density - jacobian.reshape(density.shape))

    def standardized_residual(self, y: Real[ndarray, "m q"] | Real[ndarray, " m"]) -> Float[ndarray, "m *q"]:
        """Compute (log y - mean of log y) / std of log y.

        Parameters
        ----------
        y : ndarray of shape (m,) or (m, q)
            Targets.
        """
        return self.log.standardized_residual(_log(y))

    def cdf(self, y: Real[ndarray, "m q"] | Real[ndarray, " m"]) -> Float[ndarray, "m *q"]:
        """Compute the probability that each output lies below y.

        Parameters
        ----------
        y : ndarray of shape (m,) or (m, q)
            Targets.
        """
        return self.log.cdf(_log(y))

    def quantile(self, level: float | Sequence[float] | ndarray) -> Float[ndarray, "*s"]:
        """Compute the value that each output lies below with probability `level`.

        Parameters
        ----------
        level : float or sequence of float
            One level, or several.
        """
        return _exp(self.log.quantile(level))

    def interval(
        self, level: float = 0.95, *, method: str = "quantile"
    ) -> tuple[Float[ndarray, "m *q"], Float[ndarray, "m *q"]]:
        """Compute an interval that contains each output with probability `level`.

        Its bounds are those of the interval of log y, exponentiated.

        Parameters
        ----------
        level : float, default 0.95
            The probability.
        method : "quantile" or "conformal", default "quantile"
            See `Prediction.interval`.

        Returns
        -------
        lower : ndarray of shape (m,) or (m, q)
            Lower bounds.
        upper : ndarray of shape (m,) or (m, q)
            Upper bounds.
        """
        lower, upper = self.log.interval(level, method=method)
        with np.errstate(over="ignore"):  # a conformal interval may be infinite
            return np.exp(lower), np.exp(upper)

    def sample(self, n: int, *, random_state: int | np.random.Generator | None = None) -> Float[ndarray, "n m *q"]:
        """Draw targets, jointly over the outputs at a point and independently between points.

        Parameters
        ----------
        n : int
            Number of draws.
        random_state : int, Generator or None, default None
            Seed of the draws.
        """
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
