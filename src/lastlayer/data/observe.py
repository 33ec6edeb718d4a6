"""Linear functionals of the unknown function, which can be observed and predicted like its values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer._internal.arrays import as_array, check_finite
from lastlayer.bayes.noise_groups import Targets
from lastlayer.bayes.statistics import Readings, Statistics
from lastlayer.data.scaling import Standardizer
from lastlayer.errors import InputError

FeatureMap = Callable[[Tensor], Tensor]
"""Maps inputs to linear features."""


@dataclass(frozen=True)
class Functionals:
    """n linear functionals of one output, in original units, each over at most s points.

    Examples
    --------
    >>> from lastlayer.data.observe import Derivative
    >>> slopes = Derivative(0).at([[0.0], [1.0]])
    >>> len(slopes)
    2
    >>> slopes.observed([1.0, 0.5], noise_std=0.1).y
    array([1. , 0.5])
    """

    points: Float[ndarray, "n s d"]
    """The points x_s of each functional."""
    weights: Float[ndarray, "n s"]
    """Coefficients c_s of the function values."""
    directions: Float[ndarray, "n s d"] | None = None
    """Coefficients g_s of the gradients; None if no functional involves a derivative."""
    output: int = 0
    """Index of the output, from 0."""

    def __len__(self) -> int:
        return len(self.points)

    def observed(self, y: Any, noise_std: Any = None) -> "Observations":
        """Attach measurements to the functionals.

        Parameters
        ----------
        y : array-like of any shape with n numbers
            One measured value per functional.
        noise_std : float or array-like, default None
            Known standard deviation of the measurement noise: one number, or one per functional. None: the same noise
            as that of a function value, which is learned.
        """
        values = np.asarray(as_array(y), dtype=float).reshape(-1)
        if len(values) != len(self):
            raise InputError(f"y has {len(values)} numbers, but there are {len(self)} functionals: give one for each")
        check_finite(values, "y")
        if noise_std is None:
            return Observations(self, values, None)
        std = np.asarray(as_array(noise_std), dtype=float)
        try:
            std = std.reshape(-1) if std.size == len(values) else np.broadcast_to(std, np.shape(y)).reshape(-1)
        except ValueError as error:
            raise InputError(
                f"noise_std has shape {std.shape}: give one number, or one for each of y, which has shape {np.shape(y)}"
            ) from error
        if not (np.isfinite(std) & (std > 0)).all():
            raise InputError(f"noise_std must be positive and finite, and the smallest given is {std.min():g}")
        return Observations(self, values, std)


@dataclass(frozen=True)
class Observations:
    """Measurements of linear functionals; made by `Functionals.observed`."""

    functionals: Functionals
    """The functionals that were measured."""
    y: Float[ndarray, " n"]
    """One measured value per functional."""
    noise_std: Float[ndarray, " n"] | None
    """Known standard deviations of the noise; None if the noise is learned."""


@dataclass(frozen=True)
class StandardFunctionals:
    """`Functionals` as tensors, of standardised inputs."""

    points: Float[Tensor, "n s d"]
    weights: Float[Tensor, "n s"]
    directions: Float[Tensor, "n s d"] | None
    output: int

    @classmethod
    def of(cls, given: Functionals, inputs: Standardizer) -> "StandardFunctionals":
        d = given.points.shape[-1]
        if d != len(inputs.mean):
            raise InputError(f"the points have {d} inputs, but the model takes {len(inputs.mean)}")
        directions = None if given.directions is None else _tensor(given.directions) / inputs.scale
        points = (_tensor(given.points) - inputs.mean) / inputs.scale
        return cls(points, _tensor(given.weights), directions, given.output)

    def apply(self, function: Callable[[Tensor], Tensor], like: Tensor | None = None) -> Float[Tensor, "*b n c"]:
        like = self.points if like is None else like
        n, s, d = self.points.shape
        x, slopes = self.points.reshape(n * s, d).to(like), 0.0
        if self.directions is None:
            values = function(x)
        else:
            values, slopes = torch.func.jvp(function, (x,), (self.directions.reshape(n * s, d).to(like),))[:2]
        whole = self.weights.to(values).reshape(n * s, 1) * values + slopes
        return whole.unflatten(-2, (n, s)).sum(-2)

    def features(self, linear: FeatureMap) -> Float[Tensor, "*b n p"]:
        """Build the feature rows [L phi_tilde, L 1] of the functionals."""
        rows = self.apply(linear)
        one = self.weights.sum(1).to(rows).expand(rows.shape[:-1])
        return torch.cat([rows, one[..., None]], -1)


@dataclass(frozen=True)
class Measurements:
    """Readings of linear functionals, in standardised units."""

    functionals: StandardFunctionals
    readings: Readings
    """One reading per functional, (n, 1); with known noise, they have no learned noise."""

    @classmethod
    def of(cls, given: Observations, inputs: Standardizer, targets: Standardizer) -> "Measurements":
        """Standardise measurements: L t = (L y - mean L 1) / scale."""
        j, q = given.functionals.output, len(targets.mean)
        if not 0 <= j < q:
            raise InputError(f"output={j} is not one of the {q} outputs: they are counted from 0")
        rows, (mean, scale) = StandardFunctionals.of(given.functionals, inputs), (targets.mean[j], targets.scale[j])
        t = ((_tensor(given.y) - mean * rows.weights.sum(1)) / scale)[:, None]
        known = None if given.noise_std is None else (_tensor(given.noise_std) / scale).square()[:, None]
        return cls(rows, Readings(t, None if known is None else torch.zeros_like(t), known))

    def moments(self, linear: FeatureMap, noise_var: Tensor | None = None) -> Statistics:
        """Statistics of linear features, by output, with gradients."""
        assert noise_var is not None
        j, Psi = self.functionals.output, self.functionals.features(linear).double()
        precision = self.readings.precision(noise_var[..., j : j + 1])
        own = None if precision is None else precision[..., 0]
        found = Statistics.from_functionals(Psi, self.readings.t.to(Psi), own)
        parts = [found.nothing()] * noise_var.shape[-1]
        parts[j] = found
        return Statistics.of_outputs(parts)

    def targets(self, linear: FeatureMap) -> list[Targets]:
        Psi, known = self.functionals.features(linear).double(), self.readings.known
        t = self.readings.t[:, 0].to(Psi)
        variance = torch.zeros_like(t) if known is None else known[:, 0].to(t)
        return [Targets(self.functionals.output, Psi, t, torch.ones_like(t), variance, known is None)]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Measurements":
        """Move to a device, with points of another type."""
        f = self.functionals
        directions = None if f.directions is None else f.directions.to(device, dtype)
        moved = replace(f, points=f.points.to(device, dtype), directions=directions)
        return Measurements(moved, self.readings.map(lambda x: x.to(device)))

    def take(self, at: Tensor) -> "Measurements":
        f = self.functionals
        directions = None if f.directions is None else f.directions[at]
        part = replace(f, points=f.points[at], weights=f.weights[at], directions=directions)
        return Measurements(part, self.readings.map(lambda x: x[..., at, :]))


def some_of(
    beside: "Sequence[Measurements]", most: int, generator: torch.Generator | None = None
) -> "tuple[Measurements, ...]":
    """Draw a random subset of the measurements, in proportion from each set."""
    sizes = [len(seen.readings.t) for seen in beside]
    if sum(sizes) <= most:
        return tuple(beside)
    kept = [max(1, round(most * size / sum(sizes))) for size in sizes]
    drawn = [torch.randperm(size, generator=generator)[:n] for size, n in zip(sizes, kept, strict=True)]
    return tuple(seen.take(at) for seen, at in zip(beside, drawn, strict=True))


class Pointwise:
    """A functional of one point: `at` evaluates it at the rows of a table."""

    output: int
    """Index of the output, from 0."""

    def at(self, X: Any) -> Functionals:
        """Place the functional at points.

        Parameters
        ----------
        X : array-like of shape (m, d)
            One point per row.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Value(Pointwise):
    """The value f(x)."""

    output: int = 0
    """Index of the output, from 0."""

    def at(self, X: Any) -> Functionals:
        points = _points(X)
        return Functionals(points[:, None], np.ones((len(points), 1)), None, self.output)


@dataclass(frozen=True)
class Derivative(Pointwise):
    """The partial derivative df/dx_j at x.

    Examples
    --------
    >>> import numpy as np
    >>> from lastlayer import BLLRegressor
    >>> from lastlayer.data.observe import Derivative
    >>> X = np.linspace(-1, 1, 20)[:, None]
    >>> model = BLLRegressor(preset="evidence", hidden=(5,), max_epochs=20, random_state=0).fit(X, X[:, 0] ** 2)
    >>> model.predictive_of(Derivative(0), X).mean.shape
    (20,)
    """

    j: int
    """Index of the input, from 0."""
    output: int = 0
    """Index of the output, from 0."""

    def at(self, X: Any) -> Functionals:
        points = _points(X)
        if not 0 <= self.j < points.shape[1]:
            raise InputError(f"Derivative({self.j}) of points with {points.shape[1]} inputs: they are counted from 0")
        directions = np.zeros_like(points)
        directions[:, self.j] = 1.0
        return Functionals(points[:, None], np.zeros((len(points), 1)), directions[:, None], self.output)


@dataclass(frozen=True)
class Gradient(Pointwise):
    """The gradient at x, as d partial derivatives per point; measurements have shape (m, d)."""

    output: int = 0
    """Index of the output, from 0."""

    def at(self, X: Any) -> Functionals:
        m, d = (points := _points(X)).shape
        directions = np.tile(np.eye(d), (m, 1))[:, None]
        return Functionals(points.repeat(d, 0)[:, None], np.zeros((m * d, 1)), directions, self.output)


def Sum(points: Any, weights: Any = None, *, output: int = 0) -> Functionals:
    """Weighted sum over points, sum_s c_s f(x_s).

    Parameters
    ----------
    points : array-like of shape (s, d) or (n, s, d)
        Points of one sum, or of n sums.
    weights : float or array-like of shape (s,) or (n, s), default None
        Coefficients c_s; None: 1.
    output : int, default 0
        Index of the output.

    Examples
    --------
    >>> from lastlayer.data.observe import Sum
    >>> Sum([[0.0], [1.0]], weights=[0.25, 0.75]).weights
    array([[0.25, 0.75]])
    """
    X = np.asarray(as_array(points), dtype=float)
    X = X[None] if X.ndim == 2 else X
    if X.ndim != 3:
        raise InputError(f"points have shape {X.shape}: give (s, d) for one sum, or (n, s, d) for n of them")
    check_finite(X, "points")
    c = np.ones(X.shape[:2]) if weights is None else np.asarray(as_array(weights), dtype=float)
    if c.shape not in ((), X.shape[1:2], X.shape[:2]):
        raise InputError(
            f"weights have shape {c.shape}: give one for each of the {X.shape[1]} points, or {X.shape[:2]}"
        )
    weights = np.broadcast_to(c, X.shape[:2])
    check_finite(weights, "weights")
    return Functionals(X, weights, None, output)


def Difference(x: Any, other: Any, *, output: int = 0) -> Functionals:
    """Difference f(x) - f(x') for each pair of rows of two tables.

    Parameters
    ----------
    x : array-like of shape (m, d)
        First points.
    other : array-like of shape (m, d)
        Second points x'.
    output : int, default 0
        Index of the output.
    """
    X, other = _points(x), _points(other)
    if X.shape != other.shape:
        raise InputError(f"points of shapes {X.shape} and {other.shape}: a difference needs pairs")
    weights = np.broadcast_to([1.0, -1.0], (len(X), 2))
    return Functionals(np.stack([X, other], 1), weights, None, output)


def Integral(points: Any, volume: float = 1.0, *, output: int = 0) -> Functionals:
    """Integral over a region: its volume times the mean over points that fill it evenly.

    Parameters
    ----------
    points : array-like of shape (s, d) or (n, s, d)
        Evenly distributed points of one region, or of n regions.
    volume : float, default 1.0
        Volume of each region.
    output : int, default 0
        Index of the output.
    """
    sums = Sum(points, output=output)
    return replace(sums, weights=sums.weights * (volume / sums.points.shape[1]))


def functionals_at(functional: "Pointwise | Functionals", X: Any = None) -> Functionals:
    if isinstance(functional, Functionals):
        if X is not None:
            raise InputError("these functionals already have points: omit X")
        return functional
    if not isinstance(functional, Pointwise):
        raise InputError(f"{functional!r} is not a functional: give one of lastlayer.observe, such as Derivative(0)")
    if X is None:
        raise InputError(f"{functional!r} needs points: give X, or functional.at(X)")
    return functional.at(X)


def check_observations(observations: Any) -> tuple[Observations, ...]:
    """Check that measurements were made by `Functionals.observed`."""
    if isinstance(observations, Observations | Functionals):
        raise InputError("observations must be a list: wrap a single one in [...]")
    for one in (found := tuple(observations)):
        if not isinstance(one, Observations):
            raise InputError(f"{type(one).__name__} is not a measurement: attach values, functional.observed(y)")
    return found


def _tensor(values: ndarray) -> Tensor:
    """Copy an array, which may be read-only or of any memory layout, into a tensor."""
    return torch.tensor(np.ascontiguousarray(values))


def _points(X: Any) -> Float[ndarray, "m d"]:
    points = np.asarray(as_array(X), dtype=float)
    if points.ndim != 2 or not len(points):
        raise InputError(f"points have shape {points.shape}: give a table with one row per point")
    check_finite(points, "X")
    return points
