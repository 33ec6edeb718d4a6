"""Linear functionals of a function: what can be observed of it, and asked of a model, beside its values.

    L f = sum_s c_s f(x_s) + g_s . grad f(x_s)

A derivative, a difference, a sum or an integral over points is linear in the function, and so in the weights of the
last layer: its row of features is L applied to the features, and the posterior stays exact. `Derivative(0).at(X)` are
functionals at points, `.observed(y, noise_std=...)` are measurements of them; `BLLRegressor.fit`, `update_observations`
and `predictive_of` take them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer.errors import InputError
from lastlayer.inputs import as_array, check_finite
from lastlayer.scaling import Standardizer


@dataclass(frozen=True)
class Functionals:
    """n functionals of one output, in original units, each of at most s points."""

    points: Float[ndarray, "n s d"]
    weights: Float[ndarray, "n s"]
    """c: of the values."""
    directions: Float[ndarray, "n s d"] | None = None
    """g: of the gradients; None: there are none."""
    output: int = 0

    def __len__(self) -> int:
        return len(self.points)

    def observed(self, y: Any, noise_std: Any = None) -> "Observations":
        """Measurements of them, of any shape with n numbers; `noise_std`: known, one number or one for each.

        None: as noisy as a value of the function is, which is learned.
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

    def standardized(self, inputs: Standardizer) -> "StandardFunctionals":
        """The same of standardised inputs."""
        d = self.points.shape[-1]
        if d != len(inputs.mean):
            raise InputError(f"the points have {d} inputs, but the model takes {len(inputs.mean)}")
        directions = None if self.directions is None else _tensor(self.directions) / inputs.scale
        points = (_tensor(self.points) - inputs.mean) / inputs.scale
        return StandardFunctionals(points, _tensor(self.weights), directions, self.output)


@dataclass(frozen=True)
class Observations:
    """Functionals and what was measured of them."""

    functionals: Functionals
    y: Float[ndarray, " n"]
    noise_std: Float[ndarray, " n"] | None

    def standardized(self, inputs: Standardizer, targets: Standardizer) -> "StandardObservations":
        """As the last layer takes them: L t = (L y - mean L 1) / scale."""
        j, q = self.functionals.output, len(targets.mean)
        if not 0 <= j < q:
            raise InputError(f"output={j} is not one of the {q} outputs: they are counted from 0")
        rows, (mean, scale) = self.functionals.standardized(inputs), (targets.mean[j], targets.scale[j])
        t = (_tensor(self.y) - mean * rows.weights.sum(1)) / scale
        noise_var = None if self.noise_std is None else (_tensor(self.noise_std) / scale).square()
        return StandardObservations(rows, t, noise_var)


@dataclass(frozen=True)
class StandardFunctionals:
    """Functionals as tensors, of standardised inputs."""

    points: Float[Tensor, "n s d"]
    weights: Float[Tensor, "n s"]
    directions: Float[Tensor, "n s d"] | None
    output: int

    def apply(self, function: Callable[[Tensor], Tensor], like: Tensor | None = None) -> Float[Tensor, "*b n c"]:
        """L of a function that maps points (r, d) to (*b, r, c), in the type and on the device of `like`."""
        like = self.points if like is None else like
        n, s, d = self.points.shape
        x = self.points.reshape(n * s, d).to(like)
        if self.directions is None:
            values, slopes = function(x), None
        else:
            values, slopes = torch.func.jvp(function, (x,), (self.directions.reshape(n * s, d).to(like),))[:2]
        whole = self.weights.to(values).reshape(n * s, 1) * values
        whole = whole if slopes is None else whole + slopes
        return whole.unflatten(-2, (n, s)).sum(-2)

    def features(self, linear: Callable[[Tensor], Tensor], like: Tensor | None = None) -> Float[Tensor, "*b n p"]:
        """Rows [L phi_tilde, L 1]."""
        rows = self.apply(linear, like)
        one = self.weights.sum(1).to(rows).expand(rows.shape[:-1])
        return torch.cat([rows, one[..., None]], -1)


@dataclass(frozen=True)
class StandardObservations:
    """Observations as tensors, standardised."""

    functionals: StandardFunctionals
    t: Float[Tensor, " n"]
    noise_var: Float[Tensor, " n"] | None
    """Known; None: that of the values, which is learned."""

    def variances(self, learned: Float[Tensor, "*b"]) -> Float[Tensor, "*b n"]:
        """Of each target's noise, given that of a value."""
        if self.noise_var is None:
            return learned[..., None].expand(*learned.shape, len(self.t))
        return self.noise_var.to(learned).expand(*learned.shape, -1)


def some_of(
    observations: "Sequence[StandardObservations]", most: int, generator: torch.Generator | None = None
) -> "tuple[StandardObservations, ...]":
    """At most so many of them in all, drawn at random from each."""
    n = sum(len(seen.t) for seen in observations)
    if n <= most:
        return tuple(observations)
    found = []
    for seen in observations:
        kept = max(1, round(most * len(seen.t) / n))
        at, f = torch.randperm(len(seen.t), generator=generator)[:kept], seen.functionals
        directions = None if f.directions is None else f.directions[at]
        noise_var = None if seen.noise_var is None else seen.noise_var[at]
        part = StandardFunctionals(f.points[at], f.weights[at], directions, f.output)
        found.append(StandardObservations(part, seen.t[at], noise_var))
    return tuple(found)


class Pointwise:
    """A functional that every point has: `at` points it is asked for, or observed."""

    output: int

    def at(self, X: Any) -> Functionals:
        """One functional for each row of X."""
        raise NotImplementedError


@dataclass(frozen=True)
class Value(Pointwise):
    """f(x)"""

    output: int = 0

    def at(self, X: Any) -> Functionals:
        points = _points(X)
        return Functionals(points[:, None], np.ones((len(points), 1)), None, self.output)


@dataclass(frozen=True)
class Derivative(Pointwise):
    """df/dx_j at x."""

    j: int
    output: int = 0

    def at(self, X: Any) -> Functionals:
        points = _points(X)
        if not 0 <= self.j < points.shape[1]:
            raise InputError(f"Derivative({self.j}) of points with {points.shape[1]} inputs: they are counted from 0")
        directions = np.zeros_like(points)
        directions[:, self.j] = 1.0
        return Functionals(points[:, None], np.zeros((len(points), 1)), directions[:, None], self.output)


@dataclass(frozen=True)
class Gradient(Pointwise):
    """All derivatives at x: point by point, those by every input; y is (m, d)."""

    output: int = 0

    def at(self, X: Any) -> Functionals:
        points = _points(X)
        m, d = points.shape
        directions = np.tile(np.eye(d), (m, 1))[:, None]
        return Functionals(points.repeat(d, 0)[:, None], np.zeros((m * d, 1)), directions, self.output)


def Sum(points: Any, weights: Any = None, *, output: int = 0) -> Functionals:
    """sum_s c_s f(x_s) over points (s, d), or (n, s, d) for n sums; `weights` c, 1 if not given."""
    X = np.asarray(as_array(points), dtype=float)
    X = X[None] if X.ndim == 2 else X
    if X.ndim != 3:
        raise InputError(f"points have shape {X.shape}: give (s, d) for one sum, or (n, s, d) for n of them")
    check_finite(X, "points")
    c = np.ones(X.shape[:2]) if weights is None else np.asarray(as_array(weights), dtype=float)
    check_finite(c, "weights")
    if c.shape not in ((), X.shape[1:2], X.shape[:2]):
        raise InputError(
            f"weights have shape {c.shape}: give one for each of the {X.shape[1]} points, or {X.shape[:2]}"
        )
    return Functionals(X, np.broadcast_to(c, X.shape[:2]), None, output)


def Difference(x: Any, other: Any, *, output: int = 0) -> Functionals:
    """f(x) - f(x') for each pair of rows of two tables of points."""
    X, other = _points(x), _points(other)
    if X.shape != other.shape:
        raise InputError(f"points of shapes {X.shape} and {other.shape}: a difference needs pairs")
    weights = np.broadcast_to([1.0, -1.0], (len(X), 2))
    return Functionals(np.stack([X, other], 1), weights, None, output)


def Integral(points: Any, volume: float = 1.0, *, output: int = 0) -> Functionals:
    """The integral over a region of that volume: the mean over points (s, d) that fill it evenly; or of n regions."""
    sums = Sum(points, output=output)
    return Functionals(sums.points, sums.weights * (volume / sums.points.shape[1]), None, output)


def functionals_at(functional: "Pointwise | Functionals", X: Any = None) -> Functionals:
    """A functional with its points: those of X if it is one that every point has."""
    if isinstance(functional, Functionals):
        if X is not None:
            raise InputError("the functionals have their points already: leave X out")
        return functional
    if not isinstance(functional, Pointwise):
        raise InputError(f"{functional!r} is no functional: give one of lastlayer.observe, such as Derivative(0)")
    if X is None:
        raise InputError(f"{functional!r} needs points: give X, or functional.at(X)")
    return functional.at(X)


def check_observations(observations: Any) -> "list[Observations]":
    """A list of measurements, each of them made by `observed`."""
    if isinstance(observations, Observations | Functionals):
        raise InputError("observations must be a list: put the one that you have into [...]")
    found = list(observations)
    for one in found:
        if not isinstance(one, Observations):
            raise InputError(f"{type(one).__name__} is no measurement: say what was measured, functional.observed(y)")
    return found


def _tensor(values: ndarray) -> Tensor:
    """A copy: arrays may be read-only or of any layout, tensors may not."""
    return torch.tensor(np.ascontiguousarray(values))


def _points(X: Any) -> Float[ndarray, "m d"]:
    points = np.asarray(as_array(X), dtype=float)
    if points.ndim != 2 or not len(points):
        raise InputError(f"points have shape {points.shape}: give a table with a row for each of them")
    check_finite(points, "X")
    return points
