"""`Prediction`: what is known of the targets at each point, as a Gaussian or a mixture of Gaussians behind one face."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Real
from numpy import ndarray
from scipy.special import logsumexp, ndtr, ndtri

from lastlayer.errors import InputError, check_choice
from lastlayer.formula import mixture_quantile, output_cov
from lastlayer.ops import NumPyOps
from lastlayer.shapes import align, frame, like_targets

LOG_2PI = float(np.log(2 * np.pi))


def gaussian_log_prob(
    residual: Float[ndarray, "*#b r q"],
    var: Float[ndarray, "*b r q"],
    correlation: Float[ndarray, "*#c q q"] | None = None,
) -> Float[ndarray, "*b r"]:
    """Log density of N(0, D C D) with D^2 = var, joint over the outputs.

    C is the correlation, one for each point or one for all (then with a single axis less); the identity if not given.
    """
    scaled = residual / np.sqrt(var)
    log_det = np.log(var).sum(-1)
    if correlation is not None:
        L = np.linalg.cholesky(correlation)
        if L.ndim <= var.ndim:  # one for all points
            L = L[..., None, :, :]
        scaled = np.linalg.solve(L, np.broadcast_to(scaled, var.shape)[..., None])[..., 0]
        log_det = log_det + 2 * np.log(np.diagonal(L, axis1=-2, axis2=-1)).sum(-1)
    density: ndarray = -0.5 * (np.square(scaled).sum(-1) + log_det + LOG_2PI * residual.shape[-1])
    return density


@dataclass(frozen=True, eq=False)
class Prediction:
    """The predictive distribution of m points and q outputs; c Gaussian components, one for a single model.

    Everything is of the targets, noise included, unless the noise variance is zero: then it is of the function.
    Results have the shape of the targets: (m,) if the model was fitted to 1-D targets, (m, q) if they were 2-D. The
    components and `cov()` always have an axis for the outputs; `with_output_axis()` gives it to everything.
    """

    component_mean: Float[ndarray, "c m q"]
    component_epistemic_var: Float[ndarray, "c m q"]
    component_noise_var: Float[ndarray, "c m q"]
    affine_cost: Float[ndarray, " m"]
    """Degree of extrapolation, before any calibration (Theorem 2)."""
    weights: Float[ndarray, "c m"]
    """Weights of the components at each point; they add up to one."""
    correlation: Float[ndarray, "c q q"] | None = None
    """Correlation between the outputs of a point, of the function and of the noise alike; None: independent."""
    function_correlation: Float[ndarray, "c m q q"] | None = None
    """That of the function, where it differs from that of the noise: outputs observed at different rows."""
    conformal_scores: Float[ndarray, "n q"] | None = None
    """Absolute errors over standard deviations of fresh rows, for conformal intervals."""
    beyond_reach: Bool[ndarray, " m"] | None = None
    """Which points lie farther out than every held-out point that the variance was calibrated on: there it is
    extrapolated too. None: there was no calibration."""
    y_ndim: int = 2
    """Dimensions of the targets: 1, and results have no axis for the one output; or 2."""

    def __post_init__(self) -> None:
        if self.y_ndim not in (1, 2) or (self.y_ndim == 1 and self.component_mean.shape[-1] != 1):
            raise InputError(
                f"y_ndim={self.y_ndim} with {self.component_mean.shape[-1]} outputs: it must be 1, for a single "
                "output, or 2"
            )

    @classmethod
    def gaussian(
        cls,
        mean: Float[ndarray, "m *q"],
        *,
        epistemic_var: Float[ndarray, "m *q"],
        noise_var: Float[ndarray, "*n"],
        affine_cost: Float[ndarray, " m"],
        correlation: Float[ndarray, "q q"] | None = None,
    ) -> "Prediction":
        """One Gaussian per point; results are shaped like `mean`, (m,) or (m, q)."""
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
        cls, members: "list[Prediction]", weights: Float[ndarray, " c"] | Float[ndarray, "c m"] | None = None
    ) -> "Prediction":
        """The mixture of several predictions of the same points; equal weights unless given, also for each point."""
        if not members:
            raise InputError("a mixture needs at least one member")
        n, m = len(members), len(members[0].affine_cost)
        share = np.full(n, 1 / n) if weights is None else np.asarray(weights, float)
        if share.shape not in ((n,), (n, m)) or (share < 0).any() or not np.allclose(share.sum(0), 1):
            raise InputError(f"weights={share} must be {n} non-negative numbers (at each point) that add up to one")
        share = np.broadcast_to((share / share.sum(0)).reshape(n, -1), (n, m))
        shapes = [p.shape for p in members]
        if len(set(shapes)) > 1:
            raise InputError(f"members are of different points or outputs: {shapes}")
        q = members[0].component_mean.shape[-1]
        correlations = [
            np.broadcast_to(np.eye(q) if p.correlation is None else p.correlation, (len(p.weights), q, q))
            for p in members
        ]
        return cls(
            component_mean=np.concatenate([p.component_mean for p in members]),
            component_epistemic_var=np.concatenate([p.component_epistemic_var for p in members]),
            component_noise_var=np.concatenate([p.component_noise_var for p in members]),
            affine_cost=(share * np.stack([p.affine_cost for p in members])).sum(0),
            weights=np.concatenate([s * p.weights for s, p in zip(share, members, strict=True)]),
            correlation=None if all(p.correlation is None for p in members) else np.concatenate(correlations),
            y_ndim=members[0].y_ndim,
        )

    @property
    def n_outputs(self) -> int:
        return int(self.component_mean.shape[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the targets, and so of `mean`: (m,) or (m, q)."""
        return tuple(self.component_mean.shape[1 : 1 + self.y_ndim])

    def with_output_axis(self) -> "Prediction":
        """The same distribution as one of 2-D targets: results are (m, q), also of a single output."""
        return self if self.y_ndim == 2 else replace(self, y_ndim=2)

    @cached_property
    def mean(self) -> Float[ndarray, "m *q"]:
        return self._like_targets(self._mean)

    @cached_property
    def epistemic_var(self) -> Float[ndarray, "m *q"]:
        """Variance of the function: within the components and between them."""
        spread = self.component_mean - self._mean
        return self._like_targets(self._average(self.component_epistemic_var + np.square(spread)))

    @cached_property
    def noise_var(self) -> Float[ndarray, "m *q"]:
        return self._like_targets(self._average(self.component_noise_var))

    @cached_property
    def var(self) -> Float[ndarray, "m *q"]:
        return self.epistemic_var + self.noise_var

    @cached_property
    def std(self) -> Float[ndarray, "m *q"]:
        return np.sqrt(self.var)

    @property
    def component_var(self) -> Float[ndarray, "c m q"]:
        return self.component_epistemic_var + self.component_noise_var

    def component_cov(self) -> Float[ndarray, "c m q q"]:
        """Covariance between the outputs at each point by each component."""
        C = np.eye(self.component_mean.shape[-1]) if self.correlation is None else self.correlation[:, None]
        epistemic, noise = self.component_epistemic_var, self.component_noise_var
        if self.function_correlation is None:
            cov: ndarray = output_cov(NumPyOps, C, epistemic, noise)
        else:
            cov = output_cov(NumPyOps, self.function_correlation, epistemic, 0 * noise)
            cov = cov + output_cov(NumPyOps, C, 0 * epistemic, noise)
        return cov

    def cov(self) -> Float[ndarray, "m q q"]:
        """Covariance between the outputs at each point; (m, 1, 1) for a single output, 1-D targets or not."""
        within = self.component_cov()
        spread = self.component_mean - self._mean
        return self._average(within + spread[..., :, None] * spread[..., None, :])

    def log_prob(
        self, y: Real[ndarray, "m q"] | Real[ndarray, " m"], *, per_output: bool = False
    ) -> Float[ndarray, "m *q"]:
        """Log density of targets at each point: joint over the outputs (m,), or of each alone, shaped like the targets.

        A single output's targets may be (m,) or (m, 1), here and wherever targets are given.
        """
        residual = self.targets(y) - self.component_mean
        if per_output:
            each = gaussian_log_prob(residual[..., None], self.component_var[..., None])
        else:
            each = gaussian_log_prob(residual, self.component_var, self._point_correlation())
        share = self.weights.reshape(*self.weights.shape, *[1] * (each.ndim - 2))
        density: ndarray = each[0] if len(share) == 1 else logsumexp(each, axis=0, b=share)
        return self._like_targets(density) if per_output else density

    def standardized_residual(self, y: Real[ndarray, "m q"] | Real[ndarray, " m"]) -> Float[ndarray, "m *q"]:
        """(y - mean) / std."""
        residual: ndarray = (self._like_targets(self.targets(y)) - self.mean) / self.std
        return residual

    def cdf(self, y: Real[ndarray, "m q"] | Real[ndarray, " m"]) -> Float[ndarray, "m *q"]:
        """Probability that each output lies below y."""
        below = ndtr((self.targets(y) - self.component_mean) / np.sqrt(self.component_var))
        return self._like_targets(self._average(below))

    def quantile(self, level: float | Sequence[float] | ndarray) -> Float[ndarray, "*s"]:
        """The value that each output stays below with probability `level`.

        Parameters
        ----------
        level : float or sequence of float
            One level, or several.

        Returns
        -------
        ndarray
            Shaped like the targets; several levels have a leading axis.

        Examples
        --------
        >>> lower, upper = model.predictive(X).quantile([0.1, 0.9])  # doctest: +SKIP
        """
        levels = np.asarray(level, dtype=float)
        if levels.ndim > 1 or not levels.size or not ((levels > 0) & (levels < 1)).all():
            raise InputError(f"level={level} must lie strictly between 0 and 1, or be a list of such numbers")
        std, weights = np.sqrt(self.component_var), self.weights[..., None]
        values = [mixture_quantile(np, ndtr, ndtri, p, self.component_mean, std, weights) for p in levels.ravel()]
        return self._like_targets(np.stack(values) if levels.ndim else values[0])

    def interval(
        self, level: float = 0.95, *, method: str = "quantile"
    ) -> tuple[Float[ndarray, "m *q"], Float[ndarray, "m *q"]]:
        """Lower and upper bound of each output, `level` of the probability between them.

        "quantile": the central interval of the distribution. "conformal": mean +- a number of standard deviations that
        holds for new rows like those given to `conformalize` with at least that probability, whatever the model got
        wrong (split-conformal); infinite if they were too few for the level.
        """
        if not 0 < level < 1:
            raise InputError(f"level={level} must lie strictly between 0 and 1, such as 0.95")
        if check_choice("method", method, ("quantile", "conformal")) == "conformal":
            reach = like_targets(self._conformal_reach(level), self.y_ndim) * self.std
            return self.mean - reach, self.mean + reach
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def sample(self, n: int, *, random_state: int | np.random.Generator | None = None) -> Float[ndarray, "n m *q"]:
        """Draws of the targets: joint over the outputs of a point, independent between points."""
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

    def to_frame(self, index: Any = None, *, level: float = 0.95, outputs: Sequence[str] | None = None) -> Any:
        """The prediction as a pandas DataFrame with one row per point.

        Parameters
        ----------
        index : array-like, default None
            Index of the frame, such as `X.index`; None: the numbers of the points.
        level : float, default 0.95
            Probability of the central interval between `lower` and `upper`.
        outputs : sequence of str, default None
            Names of the outputs, put in front of the columns: `NAME_mean`. None: no name for a single output, "y0",
            "y1" and so on for several.

        Returns
        -------
        pandas.DataFrame
            mean, std, epistemic_std, noise_std, lower and upper of each output, then affine_cost and, of a calibrated
            model, beyond_reach.

        Raises
        ------
        MissingPackageError
            If pandas is not installed.

        Examples
        --------
        >>> model.predictive(X).to_frame(index=X.index, outputs=["power"])  # doctest: +SKIP
        """
        p = self.with_output_axis()
        lower, upper = p.interval(level)
        parts = {"mean": p.mean, "std": p.std, "epistemic_std": np.sqrt(p.epistemic_var)}
        parts |= {"noise_std": np.sqrt(p.noise_var), "lower": lower, "upper": upper}
        points = {"affine_cost": self.affine_cost}
        points |= {} if self.beyond_reach is None else {"beyond_reach": self.beyond_reach}
        return frame(parts, points, outputs=outputs, index=index)

    def _point_correlation(self) -> Float[ndarray, "c m q q"] | None:
        """Of the targets, at each point: the function and the noise may mix differently in each output."""
        if self.correlation is None:
            return None
        std = np.sqrt(self.component_var)
        return self.component_cov() / std[..., :, None] / std[..., None, :]

    def _conformal_reach(self, level: float) -> Float[ndarray, " q"]:
        """The ceil((n + 1) level)-th smallest of n scores."""
        if self.conformal_scores is None:
            raise InputError(
                'method="conformal" needs rows that nothing was fitted to: call model.conformalize(X, y) with some '
                "before predictive(X)"
            )
        n = len(self.conformal_scores)
        rank = math.ceil(round((n + 1) * level, 9))
        reach: ndarray = (
            np.sort(self.conformal_scores, axis=0)[rank - 1] if rank <= n else np.full(self.n_outputs, np.inf)
        )
        return reach

    def _average(self, x: Float[ndarray, "c *s"]) -> Float[ndarray, "*s"]:
        share = self.weights.reshape(*self.weights.shape, *[1] * (x.ndim - 2))
        mean: ndarray = x[0] if len(share) == 1 else (share * x).sum(0)
        return mean

    @cached_property
    def _mean(self) -> Float[ndarray, "m q"]:
        return self._average(self.component_mean)

    def _like_targets(self, values: Float[ndarray, "*s q"]) -> Float[ndarray, "*t"]:
        return like_targets(values, self.y_ndim)

    def targets(self, y: Any) -> Float[ndarray, "m q"]:
        """Targets of these points, with an axis for the outputs; (m,) and (m, 1) are the same of a single one."""
        return align(y, self.component_mean.shape[1:])


@dataclass(frozen=True)
class JointPrediction:
    """The Gaussian distribution of m points and q outputs together: of a mixture, the one with the same moments.

    Its covariance is a sum of parts, each a covariance between points times one between outputs, plus how far the
    members' means lie apart.
    """

    mean_by_output: Float[ndarray, "m q"]
    """The mean, with an axis for the outputs also of 1-D targets."""
    point_cov: Float[ndarray, "t m m"]
    """Covariances between the points."""
    output_cov: Float[ndarray, "t q q"]
    """Covariances between the outputs that go with them."""
    spread: Float[ndarray, "c m q"]
    """Deviations of the members from the mean, times the root of their weight; empty for a single model."""
    noise_cov: Float[ndarray, "m q q"]
    """Covariance of the noise at each point; it is independent between points."""
    y_ndim: int = 2
    """Dimensions of the targets, as `Prediction.y_ndim`."""

    @property
    def mean(self) -> Float[ndarray, "m *q"]:
        """Shaped like the targets."""
        return like_targets(self.mean_by_output, self.y_ndim)

    def cov(self) -> Float[ndarray, "mq mq"]:
        """Covariance of all numbers, output by output: the first m rows are the first output at every point."""
        between = self.spread.swapaxes(1, 2).reshape(len(self.spread), self.mean_by_output.size)
        parts = zip(self.output_cov, self.point_cov, strict=True)
        cov: ndarray = sum(np.kron(output, point) for output, point in parts) + between.T @ between
        m, q = self.mean_by_output.shape
        cov.reshape(q, m, q, m)[:, np.arange(m), :, np.arange(m)] += self.noise_cov
        return cov

    def cov_of_outputs(self) -> Float[ndarray, "m m *q"]:
        """Covariance between the points for each output alone: (m, m, q), or (m, m) for 1-D targets."""
        own = np.diagonal(self.output_cov, axis1=1, axis2=2)
        cov: ndarray = np.einsum("tij,tq->ijq", self.point_cov, own) + np.einsum(
            "ciq,cjq->ijq", self.spread, self.spread
        )
        every = np.arange(len(cov))
        cov[every, every] += np.diagonal(self.noise_cov, axis1=1, axis2=2)
        return like_targets(cov, self.y_ndim)

    def sample(self, n: int, *, random_state: int | np.random.Generator | None = None) -> Float[ndarray, "n m *q"]:
        """Joint draws over points and outputs."""
        rng = np.random.default_rng(random_state)
        draws = self.mean_by_output + np.tensordot(rng.standard_normal((n, len(self.spread))), self.spread, 1)
        for point, output in zip(self.point_cov, self.output_cov, strict=True):
            draws = draws + _root(point) @ rng.standard_normal((n, *self.mean_by_output.shape)) @ _root(output).T
        return like_targets(draws + add_noise(self.noise_cov, rng.standard_normal(draws.shape)), self.y_ndim)


@dataclass(frozen=True)
class FunctionalPrediction:
    """The Gaussian distribution of n functionals of the function together, without noise."""

    mean: Float[ndarray, " n"]
    rows: Float[ndarray, "n r"]
    """The covariance is rows rows'."""

    @property
    def var(self) -> Float[ndarray, " n"]:
        return np.square(self.rows).sum(1)

    @property
    def std(self) -> Float[ndarray, " n"]:
        return np.sqrt(self.var)

    def cov(self) -> Float[ndarray, "n n"]:
        return self.rows @ self.rows.T

    def interval(self, level: float = 0.95) -> tuple[Float[ndarray, " n"], Float[ndarray, " n"]]:
        """Central interval of each."""
        if not 0 < level < 1:
            raise InputError(f"level={level} must lie between 0 and 1")
        half = ndtri((1 + level) / 2) * self.std
        return self.mean - half, self.mean + half

    def log_prob(self, y: ndarray, noise_std: float | ndarray = 0.0) -> Float[ndarray, " n"]:
        """Log density of each functional's measurement, with noise of a known standard deviation."""
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
    """Standard normal draws turned into noise of that covariance at each point, of any rank."""
    values, vectors = np.linalg.eigh(noise_cov)
    root = vectors * np.sqrt(values.clip(min=0))[:, None]
    draws: ndarray = np.einsum("mqr,nmr->nmq", root, standard)
    return draws


def _root(A: Float[ndarray, "n n"]) -> Float[ndarray, "n n"]:
    """A matrix R with R R' = A, for positive semidefinite A of any rank."""
    values, vectors = np.linalg.eigh(A)
    root: ndarray = vectors * np.sqrt(values.clip(min=0))
    return root
