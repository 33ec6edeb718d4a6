"""`MixturePrediction`: the predictive distribution at each point is a Gaussian or a mixture of Gaussians."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray
from scipy.special import logsumexp, ndtr, ndtri

from lastlayer._internal.density import gaussian_log_prob
from lastlayer.errors import InputError, check_choice
from lastlayer.formula.ops import NumPyOps
from lastlayer.formula.predictive import TINY, merged, mixture_quantile, output_cov
from lastlayer.predictions.prediction import Bounds, Prediction, Targets, like_targets


@dataclass(frozen=True, eq=False)
class MixturePrediction(Prediction):
    """A mixture of c Gaussian components at each point; a single model has one component.

    Examples
    --------
    >>> one = np.ones(2)
    >>> MixturePrediction.gaussian(0 * one, epistemic_var=3 * one, noise_var=one, affine_cost=one).std
    array([2., 2.])
    """

    component_mean: Float[ndarray, "c m q"]
    """Mean of each component."""
    component_epistemic_var: Float[ndarray, "c m q"]
    """Epistemic variance of each component."""
    component_noise_var: Float[ndarray, "c m q"]
    """Noise variance of each component."""
    affine_cost: Float[ndarray, " m"]
    """Degree of extrapolation, before any calibration."""
    weights: Float[ndarray, "c m"]
    """Weights of the components at each point; they sum to one."""
    correlation: Float[ndarray, "c q q"] | None = None
    """Correlation between the outputs at a point, the same for the function and for the noise; None: independent."""
    function_correlation: Float[ndarray, "c m q q"] | None = None
    """Correlation of the function, where it differs from that of the noise: outputs observed at different rows."""
    conformal_scores: Float[ndarray, "n q"] | None = None
    """Absolute errors divided by standard deviations of new rows, for conformal intervals."""
    beyond_reach: Bool[ndarray, " m"] | None = None
    """Whether a point lies farther out than every held-out point of the calibration; None: no calibration."""
    function_var: Float[ndarray, "m q"] | None = None
    """Epistemic variance, where components differ by the shape of the noise; None: that of the components and of the
    spread of their means."""
    y_ndim: int = 2
    """Dimensions of the targets."""

    def __post_init__(self) -> None:
        if self.y_ndim not in (1, 2) or (self.y_ndim == 1 and self.component_mean.shape[-1] != 1):
            raise InputError(f"y_ndim={self.y_ndim} with {self.n_outputs} outputs: it must be 1, for one output, or 2")

    @classmethod
    def gaussian(
        cls,
        mean: Float[ndarray, "m *q"],
        *,
        epistemic_var: Float[ndarray, "m *q"],
        noise_var: Float[ndarray, "*n"],
        affine_cost: Float[ndarray, " m"],
        correlation: Float[ndarray, "q q"] | None = None,
    ) -> "MixturePrediction":
        """Create a prediction with one Gaussian per point.

        Parameters
        ----------
        mean : ndarray of shape (m,) or (m, q)
            Means; results are shaped like them.
        epistemic_var, noise_var : ndarray
            Variances of the function and of the noise, broadcast to the shape of `mean`.
        affine_cost : ndarray of shape (m,)
            Degree of extrapolation.
        correlation : ndarray of shape (q, q), default None
            Correlation between the outputs; None: independent.
        """
        shape = (1, *mean.shape, *[1] * (2 - mean.ndim))
        by_output = lambda values: np.broadcast_to(values, mean.shape).reshape(shape).copy()
        return cls(
            component_mean=by_output(mean),
            component_epistemic_var=by_output(epistemic_var),
            component_noise_var=by_output(noise_var),
            affine_cost=affine_cost,
            weights=np.ones((1, len(mean))),
            correlation=None if correlation is None else correlation[None],
            y_ndim=mean.ndim,
        )

    @classmethod
    def mixture(
        cls, members: "Sequence[MixturePrediction]", weights: Float[ndarray, " c"] | Float[ndarray, "c m"] | None = None
    ) -> "MixturePrediction":
        """Mix several predictions of the same points.

        Parameters
        ----------
        members, weights : sequence of MixturePrediction, ndarray of shape (c,) or (c, m)
            The predictions, and the weight of each, at each point or for all; by default equal weights.
        """
        if not members:
            raise InputError("a mixture needs at least one member")
        n, m = len(members), len(members[0].affine_cost)
        share = np.full(n, 1 / n) if weights is None else np.asarray(weights, float)
        if share.shape not in ((n,), (n, m)) or (share < 0).any() or not np.allclose(share.sum(0), 1):
            raise InputError(f"weights={share} must be {n} non-negative numbers (at each point) that add up to one")
        share = np.broadcast_to((share / share.sum(0)).reshape(n, -1), (n, m))
        shapes = [p.shape for p in members]
        if len(set(shapes)) > 1:
            raise InputError(f"members differ in points or outputs: their shapes are {shapes}")
        q = members[0].component_mean.shape[-1]
        together = lambda of: np.concatenate([of(p) for p in members])
        alike = lambda p: np.broadcast_to(np.eye(q) if p.correlation is None else p.correlation, (len(p.weights), q, q))
        functions = any(p.function_correlation is not None for p in members)
        return cls(
            component_mean=together(lambda p: p.component_mean),
            component_epistemic_var=together(lambda p: p.component_epistemic_var),
            component_noise_var=together(lambda p: p.component_noise_var),
            affine_cost=(share * np.stack([p.affine_cost for p in members])).sum(0),
            weights=np.concatenate([s * p.weights for s, p in zip(share, members, strict=True)]),
            correlation=None if all(p.correlation is None for p in members) else together(alike),
            function_correlation=together(MixturePrediction.correlation_of_function) if functions else None,
            function_var=_function_var(members, share),
            y_ndim=members[0].y_ndim,
        )

    @property
    def n_outputs(self) -> int:
        return int(self.component_mean.shape[-1])

    def with_output_axis(self) -> "MixturePrediction":
        return self if self.y_ndim == 2 else replace(self, y_ndim=2)

    @cached_property
    def mean(self) -> Float[ndarray, "m *q"]:
        return self._like_targets(self._mean)

    @cached_property
    def epistemic_var(self) -> Float[ndarray, "m *q"]:
        if self.function_var is not None:
            return self._like_targets(self.function_var)
        spread = self.component_mean - self._mean
        return self._like_targets(self._average(self.component_epistemic_var + np.square(spread)))

    @cached_property
    def noise_var(self) -> Float[ndarray, "m *q"]:
        if self.function_var is not None:
            spread = self._average(self.component_var + np.square(self.component_mean - self._mean))
            return self._like_targets(spread - self.function_var)
        return self._like_targets(self._average(self.component_noise_var))

    @property
    def component_var(self) -> Float[ndarray, "c m q"]:
        """Variance of the targets under each component."""
        return self.component_epistemic_var + self.component_noise_var

    def component_cov(self) -> Float[ndarray, "c m q q"]:
        """Compute the covariance between the outputs at each point under each component."""
        C = np.eye(self.component_mean.shape[-1]) if self.correlation is None else self.correlation[:, None]
        epistemic, noise = self.component_epistemic_var, self.component_noise_var
        if self.function_correlation is None:
            cov: ndarray = output_cov(NumPyOps, C, epistemic, noise)
        else:
            cov = output_cov(NumPyOps, self.function_correlation, epistemic, 0 * noise)
            cov = cov + output_cov(NumPyOps, C, 0 * epistemic, noise)
        return cov

    def correlation_of_function(self) -> Float[ndarray, "c m q q"]:
        """Return the correlation between the outputs of the function, under each component and at each point."""
        if self.function_correlation is not None:
            return self.function_correlation
        shape = (*self.component_mean.shape, self.n_outputs)
        return np.broadcast_to(np.eye(self.n_outputs) if self.correlation is None else self.correlation[:, None], shape)

    def cov(self) -> Float[ndarray, "m q q"]:
        return self.cov_with(self.component_cov())

    def cov_with(self, within: Float[ndarray, "c m q q"]) -> Float[ndarray, "m q q"]:
        """Covariance between the outputs at each point, given that under each component."""
        spread = self.component_mean - self._mean
        return self._average(within + spread[..., :, None] * spread[..., None, :])

    def merged(self, fraction: Float[ndarray, " m"]) -> "MixturePrediction":
        """Count disagreement between the components as variance of each of them.

        Their means are drawn together, and what this takes from the variance is added to each: `mean`, `var` and
        `cov()` do not change. Outside the data, a few components that contradict the others so widen the intervals.

        Parameters
        ----------
        fraction : ndarray of shape (m,)
            Fraction merged at each point: 0 changes nothing, 1 gives all components the same mean.
        """
        if fraction.shape != self.affine_cost.shape or not ((fraction >= 0) & (fraction <= 1)).all():
            raise InputError(f"fraction must hold a number from 0 to 1 for each of {len(self.affine_cost)} points")
        if len(self.weights) == 1 or not fraction.any():
            return self
        weights, share = self.weights[..., None], fraction[:, None]
        mean, between = merged(np, self.component_mean, weights, share)
        epistemic, functions = self.component_epistemic_var + between, self.function_correlation
        if self.n_outputs > 1:
            apart = np.sqrt(weights) * (self.component_mean - self._mean)
            std = np.sqrt(self.component_epistemic_var)
            cov = self.correlation_of_function() * NumPyOps.outer(std, std)
            cov = cov + share[..., None] * np.einsum("cmi,cmj->mij", apart, apart)
            std = np.sqrt(np.maximum(epistemic, TINY))
            functions = cov / NumPyOps.outer(std, std)
        return replace(self, component_mean=mean, component_epistemic_var=epistemic, function_correlation=functions)

    def split(
        self, shares: Sequence[float] | ndarray, epistemic: Sequence[float] | ndarray, noise: Sequence[float] | ndarray
    ) -> "MixturePrediction":
        """Replace every component by several, each with a share of its weight and factors on its variances."""
        each = lambda factors, x: np.multiply.outer(factors, x).reshape(-1, *x.shape[1:])
        alike = lambda x: None if x is None else np.concatenate([x] * len(shares))
        return replace(
            self,
            component_mean=each(np.ones(len(shares)), self.component_mean),
            component_epistemic_var=each(epistemic, self.component_epistemic_var),
            component_noise_var=each(noise, self.component_noise_var),
            weights=each(shares, self.weights),
            correlation=alike(self.correlation),
            function_correlation=alike(self.function_correlation),
        )

    def shaped(
        self,
        weights: Float[ndarray, "g m 1"],
        mean: Float[ndarray, "g m 1"],
        var: Float[ndarray, "g m 1"],
        *,
        noise: bool,
    ) -> "MixturePrediction":
        """Mix the prediction of one output, as the first of g components, with Gaussians that give the noise its shape.

        The epistemic variance stays; without noise, the mean moves to that of the whole.
        """
        mean = np.concatenate([self._mean[None], mean[1:]])
        whole = (weights * mean).sum(0)
        if not noise:
            return replace(self, component_mean=self.component_mean + (whole - self._mean))
        own = self.with_output_axis()
        var = np.concatenate([own.var[None], var[1:]])
        known = np.minimum(own.epistemic_var, var)
        total = (weights * (var + np.square(mean - whole))).sum(0)
        return replace(
            self,
            component_mean=np.concatenate([self.component_mean, mean[1:]]),
            component_epistemic_var=np.concatenate([self.component_epistemic_var, known[1:]]),
            component_noise_var=np.concatenate([self.component_noise_var, (var - known)[1:]]),
            weights=np.concatenate([weights[0, :, 0] * self.weights, weights[1:, :, 0]]),
            correlation=None,
            function_correlation=None,
            function_var=np.minimum(own.epistemic_var, total),
        )

    def log_prob(self, y: Targets, *, per_output: bool = False) -> Float[ndarray, "m *q"]:
        targets = self.targets(y)
        residual, missing = targets - self.component_mean, np.isnan(targets)
        if per_output:
            each = gaussian_log_prob(residual[..., None], self.component_var[..., None])
        else:
            each = gaussian_log_prob(residual, self.component_var, self._point_correlation(), missing=missing)
        share = self.weights.reshape(*self.weights.shape, *[1] * (each.ndim - 2))
        density: ndarray = each[0] if len(share) == 1 else logsumexp(each, axis=0, b=share)
        return self._like_targets(density) if per_output else density

    def standardized_residual(self, y: Targets) -> Float[ndarray, "m *q"]:
        residual: ndarray = (self._like_targets(self.targets(y)) - self.mean) / self.std
        return residual

    def cdf(self, y: Targets) -> Float[ndarray, "m *q"]:
        below = ndtr((self.targets(y) - self.component_mean) / np.sqrt(self.component_var))
        return self._like_targets(self._average(below))

    def crps(self, y: Targets) -> Float[ndarray, "m *q"]:
        """CRPS: sum_i w_i E|y - X_i| - 1/2 sum_ij w_i w_j E|X_i - X_j|, with X_i of component i."""
        mean, var, w = self.component_mean, self.component_var, self.weights[..., None]
        score = (w * _mean_distance(self.targets(y) - mean, np.sqrt(var))).sum(0)
        for i in range(len(w)):  # one row of pairs at a time, to keep memory at c m q
            score = score - 0.5 * w[i] * (w * _mean_distance(mean[i] - mean, np.sqrt(var[i] + var))).sum(0)
        return self._like_targets(score)

    def quantile(self, level: float | Sequence[float] | ndarray) -> Float[ndarray, "*s"]:
        levels = np.asarray(level, dtype=float)
        if levels.ndim > 1 or not levels.size or not ((levels > 0) & (levels < 1)).all():
            raise InputError(f"level={level} must lie strictly between 0 and 1, or be a list of such numbers")
        std, weights = np.sqrt(self.component_var), self.weights[..., None]
        values = [mixture_quantile(np, ndtr, ndtri, p, self.component_mean, std, weights) for p in levels.ravel()]
        return self._like_targets(np.stack(values) if levels.ndim else values[0])

    def interval(self, level: float = 0.95, *, method: str = "quantile") -> Bounds:
        if not 0 < level < 1:
            raise InputError(f"level={level} must lie strictly between 0 and 1, such as 0.95")
        if check_choice("method", method, ("quantile", "conformal")) == "conformal":
            reach = like_targets(self._conformal_reach(level), self.y_ndim) * self.std
            return self.mean - reach, self.mean + reach
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def sample(self, n: int, *, random_state: int | np.random.Generator | None = None) -> Float[ndarray, "n m *q"]:
        rng = np.random.default_rng(random_state)
        _, m, q = self.component_mean.shape
        pick = (rng.random((n, 1, m)) > self.weights.cumsum(0)[:-1]).sum(1)
        noise = rng.standard_normal((n, m, q))
        point = np.arange(m)
        correlation = self._point_correlation()
        if correlation is not None:
            L = np.linalg.cholesky(correlation)
            noise = (L[pick, point] @ noise[..., None])[..., 0]
        draws: ndarray = self.component_mean[pick, point] + np.sqrt(self.component_var)[pick, point] * noise
        return self._like_targets(draws)

    def _point_correlation(self) -> Float[ndarray, "c m q q"] | None:
        """Correlation of the targets at each point, where function and noise are mixed in different proportions."""
        if self.correlation is None and self.function_correlation is None:
            return None
        std = np.sqrt(self.component_var)
        return self.component_cov() / std[..., :, None] / std[..., None, :]

    def _conformal_reach(self, level: float) -> Float[ndarray, " q"]:
        """Return the ceil((n + 1) level)-th smallest of n scores."""
        if self.conformal_scores is None:
            raise InputError(
                'method="conformal" needs rows that were not used for fitting: call model.conformalize(X, y) with '
                "such rows before predictive(X)"
            )
        n = len(self.conformal_scores)
        rank = math.ceil(round((n + 1) * level, 9))
        scores: ndarray = np.sort(self.conformal_scores, axis=0)
        return scores[rank - 1] if rank <= n else np.full(self.n_outputs, np.inf)

    def _average(self, x: Float[ndarray, "c *s"]) -> Float[ndarray, "*s"]:
        share = self.weights.reshape(*self.weights.shape, *[1] * (x.ndim - 2))
        mean: ndarray = x[0] if len(share) == 1 else (share * x).sum(0)
        return mean

    @cached_property
    def _mean(self) -> Float[ndarray, "m q"]:
        return self._average(self.component_mean)


def _function_var(members: Sequence[MixturePrediction], share: Float[ndarray, "c m"]) -> Float[ndarray, "m q"] | None:
    """Epistemic variance of a mixture of predictions of which one has a shape of its noise."""
    if all(p.function_var is None for p in members):
        return None
    whole = [p.with_output_axis() for p in members]
    weights, means = share[..., None], np.stack([p.mean for p in whole])
    apart = np.square(means - (weights * means).sum(0))
    found: ndarray = (weights * (np.stack([p.epistemic_var for p in whole]) + apart)).sum(0)
    return found


def _mean_distance(d: ndarray, s: ndarray) -> ndarray:
    """E|d + s N(0, 1)|."""
    r = d / s
    return d * (2 * ndtr(r) - 1) + 2 * s * np.exp(-0.5 * np.square(r)) / np.sqrt(2 * np.pi)
