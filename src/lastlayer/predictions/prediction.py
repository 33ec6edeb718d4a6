"""`Prediction`: the predictive distribution of the targets at each point."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Real
from numpy import ndarray

from lastlayer.errors import InputError, need

Targets: TypeAlias = Real[ndarray, "m q"] | Real[ndarray, " m"]
Bounds: TypeAlias = tuple[Float[ndarray, "m *q"], Float[ndarray, "m *q"]]


class Prediction(ABC):
    """The predictive distribution at m points of q outputs.

    That of Gaussian targets is a `MixturePrediction`, that of log-normal ones a `LogPrediction`. The distribution is
    that of the targets, noise included; where the noise variance is zero, it is that of the function. Results have the
    shape of the targets, (m,) or (m, q); `cov()` always has axes for the outputs, as all have after
    `with_output_axis()`.
    """

    point_name: ClassVar[str] = "mean"
    """What `point` is: "mean" or "median"."""
    discrete: ClassVar[bool] = False
    """Whether targets take separate values: `log_prob` is then the log of a probability, not of a density."""
    affine_cost: Float[ndarray, " m"]
    """Degree of extrapolation, before any calibration (Theorem 2)."""
    beyond_reach: Bool[ndarray, " m"] | None
    """Whether a point lies farther out than every held-out point of the calibration; None: no calibration."""
    y_ndim: int
    """Dimensions of the targets: 1 (results have no axis for the single output) or 2."""

    @property
    @abstractmethod
    def n_outputs(self) -> int:
        """Number of outputs q."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the targets, and therefore of `mean`: (m,) or (m, q)."""
        return (len(self.affine_cost), self.n_outputs)[: self.y_ndim]

    @abstractmethod
    def with_output_axis(self) -> "Prediction":
        """Return the same distribution with results of shape (m, q), also for a single output."""

    @property
    @abstractmethod
    def mean(self) -> Float[ndarray, "m *q"]:
        """Mean of the targets."""

    @property
    @abstractmethod
    def epistemic_var(self) -> Float[ndarray, "m *q"]:
        """Variance that more data would reduce: that of the function, within the components and between them."""

    @property
    @abstractmethod
    def noise_var(self) -> Float[ndarray, "m *q"]:
        """Variance of the noise."""

    @property
    def point(self) -> Float[ndarray, "m *q"]:
        """The one number for each target that `predict` returns: the mean, or the median of skewed targets."""
        return self.mean

    @cached_property
    def var(self) -> Float[ndarray, "m *q"]:
        """Variance of the targets: epistemic variance plus noise variance."""
        return self.epistemic_var + self.noise_var

    @cached_property
    def std(self) -> Float[ndarray, "m *q"]:
        """Standard deviation of the targets."""
        return np.sqrt(self.var)

    @abstractmethod
    def cov(self) -> Float[ndarray, "m q q"]:
        """Compute the covariance between the outputs at each point."""

    @abstractmethod
    def log_prob(self, y: Targets, *, per_output: bool = False) -> Float[ndarray, "m *q"]:
        """Compute the log density of targets at each point.

        Parameters
        ----------
        y : ndarray of shape (m,) or (m, q)
            Targets, (m,) or (m, 1) if there is one output; the joint density is that of those not missing (NaN).
        per_output : bool, default False
            Whether to return the density of each output alone instead of the joint density.
        """

    @abstractmethod
    def standardized_residual(self, y: Targets) -> Float[ndarray, "m *q"]:
        """Compute (y - mean) / std, on the scale where the distribution is symmetric.

        Parameters
        ----------
        y : ndarray of shape (m,) or (m, q)
            Targets.
        """

    @abstractmethod
    def cdf(self, y: Targets) -> Float[ndarray, "m *q"]:
        """Compute the probability that each output lies below y.

        Parameters
        ----------
        y : ndarray of shape (m,) or (m, q)
            Targets.
        """

    @abstractmethod
    def crps(self, y: Targets) -> Float[ndarray, "m *q"]:
        """Compute the continuous ranked probability score of each target.

        Parameters
        ----------
        y : ndarray of shape (m,) or (m, q)
            Targets.
        """

    @abstractmethod
    def quantile(self, level: float | Sequence[float] | ndarray) -> Float[ndarray, "*s"]:
        """Compute the value that each output lies below with probability `level`.

        Parameters
        ----------
        level : float or sequence of float
            One level, or several.
        """

    @abstractmethod
    def interval(self, level: float = 0.95, *, method: str = "quantile") -> Bounds:
        """Compute the lower and upper bounds between which each output lies with probability `level`.

        Parameters
        ----------
        level : float, default 0.95
            The probability.
        method : "quantile" or "conformal", default "quantile"
            "quantile": the central interval of the distribution. "conformal": mean +- a multiple of the standard
            deviation that covers new rows exchangeable with those given to `conformalize` with at least that
            probability, even if the model is wrong; infinite if there were too few rows for the level.
        """

    @abstractmethod
    def sample(self, n: int, *, random_state: int | np.random.Generator | None = None) -> Float[ndarray, "n m *q"]:
        """Draw targets, jointly over the outputs at a point and independently between points.

        Parameters
        ----------
        n : int
            Number of draws.
        random_state : int, Generator or None, default None
            Seed of the draws.
        """

    def to_frame(self, index: Any = None, *, level: float = 0.95, outputs: Sequence[str] | None = None) -> Any:
        """Convert the prediction to a pandas DataFrame with one row per point.

        Parameters
        ----------
        index : array-like, default None
            Index of the frame, such as `X.index`; None: the numbers of the points.
        level : float, default 0.95
            Probability of the central interval between `lower` and `upper`.
        outputs : sequence of str, default None
            Names of the outputs, which prefix the columns: `NAME_mean`. None: no prefix for one output, else "y0", ...
        """
        q = self.n_outputs
        names = ["" if q == 1 else f"y{i}_" for i in range(q)] if outputs is None else [f"{name}_" for name in outputs]
        if isinstance(outputs, str) or len(names) != q:
            raise InputError(f"outputs={outputs!r} must be a list of {q} names, one for each output")
        p = self.with_output_axis()
        lower, upper = p.interval(level)
        parts = {p.point_name: p.point, "std": p.std, "epistemic_std": np.sqrt(p.epistemic_var)}
        parts |= {"noise_std": np.sqrt(p.noise_var), "lower": lower, "upper": upper}
        columns = {f"{name}{word}": values[:, i] for i, name in enumerate(names) for word, values in parts.items()}
        columns |= {"affine_cost": self.affine_cost}
        columns |= {} if self.beyond_reach is None else {"beyond_reach": self.beyond_reach}
        return need("pandas", extra="pandas").DataFrame(columns, index=index)

    def targets(self, y: Any) -> Float[ndarray, "m q"]:
        """Targets of these points as an array with an axis for the outputs."""
        return align(y, (len(self.affine_cost), self.n_outputs))

    def _like_targets(self, values: Float[ndarray, "*s q"]) -> Float[ndarray, "*t"]:
        return like_targets(values, self.y_ndim)


def like_targets(values: Float[ndarray, "*s q"], y_ndim: int) -> Float[ndarray, "*t"]:
    """Values of each output in the shape of the targets: 1-D targets have no axis for their single output."""
    return values[..., 0] if y_ndim == 1 else values


def align(y: Any, shape: tuple[int, ...]) -> Float[ndarray, "m q"]:
    """Targets of m points and q outputs as (m, q); an error for any other shape, as nothing is broadcast."""
    given, (m, q) = np.asarray(y, dtype=float), shape
    if given.shape != (m, q) and not (q == 1 and given.shape == (m,)):
        raise InputError(
            f"targets have shape {given.shape}, but the prediction is of {m} points and {q} outputs: give "
            f"targets of shape ({m}, {q}){f' or ({m},)' if q == 1 else ''}"
        )
    return given.reshape(m, q)
