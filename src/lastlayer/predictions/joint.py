"""Predictions that are Gaussian over several values at once: all points and outputs, or functionals of the function."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import ndtri

from lastlayer.errors import InputError
from lastlayer.predictions.shapes import like_targets


@dataclass(frozen=True)
class JointPrediction:
    """The joint Gaussian distribution of m points and q outputs; a mixture is approximated by matching its moments.

    The covariance is a sum of terms, each a covariance between points times one between outputs, plus the covariance
    of the members' means.
    """

    mean_by_output: Float[ndarray, "m q"]
    """The mean, with an axis for the outputs, also for 1-D targets."""
    point_cov: Float[ndarray, "t m m"]
    """Covariance between the points, for each term."""
    output_cov: Float[ndarray, "t q q"]
    """Covariance between the outputs, for each term."""
    spread: Float[ndarray, "c m q"]
    """Deviations of the members from the mean, times the square root of their weights; empty for a single model."""
    noise_cov: Float[ndarray, "m q q"]
    """Covariance of the noise at each point; noise is independent between points."""
    y_ndim: int = 2
    """Dimensions of the targets, as in `Prediction.y_ndim`."""

    @property
    def mean(self) -> Float[ndarray, "m *q"]:
        """The mean, shaped like the targets."""
        return like_targets(self.mean_by_output, self.y_ndim)

    def cov(self) -> Float[ndarray, "mq mq"]:
        """Compute the covariance of all points and outputs."""
        between = self.spread.swapaxes(1, 2).reshape(len(self.spread), self.mean_by_output.size)
        parts = zip(self.output_cov, self.point_cov, strict=True)
        cov: ndarray = sum(np.kron(output, point) for output, point in parts) + between.T @ between
        m, q = self.mean_by_output.shape
        cov.reshape(q, m, q, m)[:, np.arange(m), :, np.arange(m)] += self.noise_cov
        return cov

    def cov_of_outputs(self) -> Float[ndarray, "m m *q"]:
        """Compute the covariance between the points for each output."""
        own = np.diagonal(self.output_cov, axis1=1, axis2=2)
        cov: ndarray = np.einsum("tij,tq->ijq", self.point_cov, own) + np.einsum(
            "ciq,cjq->ijq", self.spread, self.spread
        )
        every = np.arange(len(cov))
        cov[every, every] += np.diagonal(self.noise_cov, axis1=1, axis2=2)
        return like_targets(cov, self.y_ndim)

    def sample(self, n: int, *, random_state: int | np.random.Generator | None = None) -> Float[ndarray, "n m *q"]:
        """Draw jointly over points and outputs.

        Parameters
        ----------
        n : int
            Number of draws.
        random_state : int, Generator or None, default None
            Seed of the draws.
        """
        rng = np.random.default_rng(random_state)
        draws = self.mean_by_output + np.tensordot(rng.standard_normal((n, len(self.spread))), self.spread, 1)
        for point, output in zip(self.point_cov, self.output_cov, strict=True):
            draws = draws + _root(point) @ rng.standard_normal((n, *self.mean_by_output.shape)) @ _root(output).T
        return like_targets(draws + add_noise(self.noise_cov, rng.standard_normal(draws.shape)), self.y_ndim)


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
        """Compute the central interval of each functional.

        Parameters
        ----------
        level : float, default 0.95
            Probability of the interval.

        Returns
        -------
        lower : ndarray of shape (n,)
            Lower bounds.
        upper : ndarray of shape (n,)
            Upper bounds.
        """
        if not 0 < level < 1:
            raise InputError(f"level={level} must lie between 0 and 1")
        half = ndtri((1 + level) / 2) * self.std
        return self.mean - half, self.mean + half

    def log_prob(self, y: ndarray, noise_std: float | ndarray = 0.0) -> Float[ndarray, " n"]:
        """Compute the log density of a measurement of each functional.

        Parameters
        ----------
        y : ndarray with n numbers
            The measurements.
        noise_std : float or ndarray with n numbers, default 0.0
            Known standard deviation of their noise.
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


def _root(A: Float[ndarray, "n n"]) -> Float[ndarray, "n n"]:
    """Return R with R R' = A, for positive semidefinite A of any rank."""
    values, vectors = np.linalg.eigh(A)
    root: ndarray = vectors * np.sqrt(values.clip(min=0))
    return root
