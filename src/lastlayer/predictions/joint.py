"""Predictions that are Gaussian over several values at once: all points and outputs, or functionals of the function."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import ndtri

from lastlayer.errors import InputError
from lastlayer.formula.joint import Functions
from lastlayer.predictions.prediction import like_targets


@dataclass(frozen=True)
class JointPrediction:
    """The joint Gaussian distribution of m points and q outputs; a mixture is approximated by matching its moments."""

    functions: Functions
    """The function at the points, linear in standard normal numbers."""
    noise_cov: Float[ndarray, "m q q"]
    """Covariance of the noise at each point; noise is independent between points."""
    y_ndim: int = 2
    """Dimensions of the targets, as in `Prediction.y_ndim`."""

    @property
    def mean(self) -> Float[ndarray, "m *q"]:
        """The mean, shaped like the targets."""
        return like_targets(self.functions.mean, self.y_ndim)

    def cov(self) -> Float[ndarray, "mq mq"]:
        """Compute the covariance of all points and outputs, ordered by output."""
        cov: ndarray = self.functions.cov()
        m, q = self.functions.mean.shape
        cov.reshape(q, m, q, m)[:, np.arange(m), :, np.arange(m)] += self.noise_cov
        return cov

    def cov_of_outputs(self) -> Float[ndarray, "m m *q"]:
        """Compute the covariance between the points for each output."""
        cov = np.stack(self.functions.cov_of_outputs(), -1)
        every = np.arange(len(cov))
        cov[every, every] += np.diagonal(self.noise_cov, axis1=1, axis2=2)
        return like_targets(cov, self.y_ndim)

    def sample(self, n: int, *, random_state: int | np.random.Generator | None = None) -> Float[ndarray, "n m *q"]:
        """Draw jointly over points and outputs; a draw takes O(p) per point.

        Parameters
        ----------
        n : int
            Number of draws.
        random_state : int, Generator or None, default None
            Seed of the draws.
        """
        normal = np.random.default_rng(random_state).standard_normal
        draws = self.functions.sample(n, normal)
        return like_targets(draws + add_noise(self.noise_cov, normal(draws.shape)), self.y_ndim)


@dataclass(frozen=True)
class FunctionalPrediction:
    """The joint Gaussian distribution of n functionals of the function, without noise."""

    mean: Float[ndarray, " n"]
    """Mean of each functional."""
    rows: Float[ndarray, "n r"]
    """Root of the covariance, which is rows rows'."""

    @property
    def var(self) -> Float[ndarray, " n"]:
        """Variance of each functional."""
        return np.square(self.rows).sum(1)

    @property
    def std(self) -> Float[ndarray, " n"]:
        """Standard deviation of each functional."""
        return np.sqrt(self.var)

    def cov(self) -> Float[ndarray, "n n"]:
        """Compute the covariance between the functionals."""
        return self.rows @ self.rows.T

    def interval(self, level: float = 0.95) -> tuple[Float[ndarray, " n"], Float[ndarray, " n"]]:
        """Compute the lower and upper bounds of the central interval of each functional.

        Parameters
        ----------
        level : float, default 0.95
            Probability of the interval.
        """
        if not 0 < level < 1:
            raise InputError(f"level={level} must lie between 0 and 1")
        half = ndtri((1 + level) / 2) * self.std
        return self.mean - half, self.mean + half

    def log_prob(self, y: ndarray, noise_std: float | ndarray = 0.0) -> Float[ndarray, " n"]:
        """Compute the log density of a measurement of each functional.

        Parameters
        ----------
        y, noise_std : ndarray with n numbers, float or ndarray with n numbers
            The measurements, and the known standard deviation of their noise, which is 0 by default.
        """
        values = np.ravel(y)
        if values.shape != self.mean.shape or np.size(noise_std) not in (1, len(values)):
            raise InputError(
                f"y has {values.size} numbers and noise_std {np.size(noise_std)}, but the prediction is of "
                f"{len(self.mean)} functionals"
            )
        var = self.var + np.square(np.ravel(noise_std))
        density: ndarray = -0.5 * (np.square(values - self.mean) / var + np.log(2 * np.pi * var))
        return density


def add_noise(noise_cov: Float[ndarray, "m q q"], standard: Float[ndarray, "n m q"]) -> Float[ndarray, "n m q"]:
    """Turn standard normal draws into noise with a given covariance of any rank at each point."""
    values, vectors = np.linalg.eigh(noise_cov)
    root = vectors * np.sqrt(values.clip(min=0))[:, None]
    draws: ndarray = np.einsum("mqr,nmr->nmq", root, standard)
    return draws
