"""`DiscretePrediction`: predictions of targets that take separate values, by a model of a continuous variable."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import logsumexp, ndtr

from lastlayer._internal.density import log_interval_mass
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.predictions.prediction import Bounds, Prediction, Targets

NODES = 64
"""Values at which moments sum the distribution of a target; all of them, if there are no more."""
TAIL = 1e-6
"""Probability beyond the first and the last of them."""
FAR = 1e3
"""A mean so many times as large as the median says nothing about a typical target."""
LARGEST = 1e15
"""Largest count: above it, whole numbers are not exact."""


class Cells(ABC):
    """Values of a target in increasing order, each with a cell of the working variable."""

    @abstractmethod
    def index(self, z: ndarray) -> ndarray:
        """Index of the cell that z lies in."""

    @abstractmethod
    def value(self, index: ndarray) -> ndarray:
        """Value of a target by its index."""

    @abstractmethod
    def upper(self, index: ndarray) -> ndarray:
        """Upper edge of a cell; -inf for the index -1."""

    @abstractmethod
    def below(self, y: ndarray) -> ndarray:
        """Index of the largest value up to y; -1: none."""


@dataclass(frozen=True, eq=False)
class Levels(Cells):
    """Finitely many values, with cells that meet halfway between them."""

    values: Float[ndarray, " k"]

    def index(self, z: ndarray) -> ndarray:
        return np.searchsorted((self.values[1:] + self.values[:-1]) / 2, z)

    def value(self, index: ndarray) -> ndarray:
        return self.values[np.clip(index, 0, len(self.values) - 1).astype(int)]

    def upper(self, index: ndarray) -> ndarray:
        edges = np.concatenate([[-np.inf], (self.values[1:] + self.values[:-1]) / 2, [np.inf]])
        return edges[np.clip(index + 1, 0, len(self.values)).astype(int)]

    def below(self, y: ndarray) -> ndarray:
        return np.searchsorted(self.values, y, side="right") - 1


Map: TypeAlias = Callable[[ndarray], ndarray]

LINKS: dict[str, tuple[Map, Map]] = {
    "sqrt": (lambda y: np.sqrt(y + 0.5), lambda z: np.square(np.maximum(z, 0.0)) - 0.5),
    "log": (np.log1p, lambda z: np.expm1(np.minimum(z, 50.0))),
}
"""Working variables of counts, increasing from -1/2 on, and their inverses."""


@dataclass(frozen=True, eq=False)
class Whole(Cells):
    """The whole numbers from 0 on, with cells that meet at link(y + 1/2)."""

    link: str

    def index(self, z: ndarray) -> ndarray:
        return np.clip(np.ceil(LINKS[self.link][1](z) - 0.5), 0.0, LARGEST) + 0.0

    def value(self, index: ndarray) -> ndarray:
        return np.asarray(index, float)

    def upper(self, index: ndarray) -> ndarray:
        return np.where(index < 0, -np.inf, LINKS[self.link][0](np.maximum(index, 0.0) + 0.5))

    def below(self, y: ndarray) -> ndarray:
        return np.clip(np.floor(y), -1.0, LARGEST)


def by_output(cells: Sequence[Cells], of: Callable[[Cells, ndarray], ndarray], x: ndarray) -> ndarray:
    """Apply a function of the cells of each output to its numbers, which are last in x."""
    return np.stack([of(own, x[..., j]) for j, own in enumerate(cells)], -1)


@dataclass(frozen=True, eq=False)
class DiscretePrediction(Prediction):
    """The predictive distribution of targets that take separate values: the mass of a mixture in the cell of each.

    `log_prob` is the log of a probability. An interval has at least its probability: the central one, less the value at
    one end where the rest still has it. `predict` returns the mean, or the median where the mean lies beyond the 90%
    quantile. `epistemic_var` is the share of the variance that the function has in that of the working variable, to
    which `standardized_residual` and conformal intervals refer.
    """

    discrete = True
    working: MixturePrediction
    """The prediction of the working variable."""
    cells: tuple[Cells, ...]
    """The values of each output."""

    def __post_init__(self) -> None:
        for name in ("affine_cost", "beyond_reach", "y_ndim"):
            object.__setattr__(self, name, getattr(self.working, name))

    n_outputs = property(lambda self: self.working.n_outputs)

    def with_output_axis(self) -> "DiscretePrediction":
        return self if self.y_ndim == 2 else replace(self, working=self.working.with_output_axis())

    @cached_property
    def _table(self) -> tuple[ndarray, ndarray, ndarray, ndarray]:
        """Values (n, m, q) at which moments are summed, and for each the gap above it and the probability up to a value
        at its beginning and end."""
        each = self.working.with_output_axis()
        ends = self._by_output(lambda cells, z: cells.index(z), each.quantile([TAIL, 1 - TAIL]))
        steps, n = np.arange(NODES)[:, None, None], ends[1] - ends[0] + 1
        index = np.where(n <= NODES, np.minimum(ends[0] + steps, ends[1]), 0)
        if (n > NODES).any():  # values in equal steps of the working variable
            low, high = self._by_output(lambda cells, i: cells.upper(i), ends)
            low = np.where(np.isfinite(low), low, high)
            spread = self._by_output(lambda cells, z: cells.index(z), low + (high - low) * steps / (NODES - 1))
            index = np.where(n <= NODES, index, np.clip(spread, *ends))
            index[-1] = ends[1]
        values = self._by_output(lambda cells, i: cells.value(i), index)
        below = np.stack([self._up_to(i) for i in index])
        step = np.diff(below, axis=0) / np.maximum(np.diff(index, axis=0), 1)
        return values, np.diff(values, axis=0), below[:-1], below[1:] - step

    def _by_output(self, of: Callable[[Cells, ndarray], ndarray], x: ndarray) -> ndarray:
        return by_output(self.cells, of, x)

    def _up_to(self, index: ndarray) -> Float[ndarray, "m q"]:
        """Probability of the values up to an index."""
        upper = self._by_output(lambda cells, i: cells.upper(i), index)
        below = ndtr((upper - self.working.component_mean) / np.sqrt(self.working.component_var))
        return np.asarray(self.working._average(below))

    @cached_property
    def _mean(self) -> Float[ndarray, "m q"]:
        values, gaps, first, last = self._table
        return np.asarray(values[0] + (gaps * (1 - (first + last) / 2)).sum(0))

    @cached_property
    def _var(self) -> Float[ndarray, "m q"]:
        values, gaps, first, last = self._table
        low, high = values[:-1] - self._mean, values[1:] - self._mean
        return np.maximum(low[0] ** 2 + ((high + low) * gaps * (1 - (first + last) / 2)).sum(0), 0.0)

    @cached_property
    def mean(self) -> Float[ndarray, "m *q"]:
        return self._like_targets(self._mean)

    @cached_property
    def epistemic_var(self) -> Float[ndarray, "m *q"]:
        each = self.working.with_output_axis()
        return self._like_targets(self._var * each.epistemic_var / np.maximum(each.var, np.finfo(float).tiny))

    @cached_property
    def noise_var(self) -> Float[ndarray, "m *q"]:
        return self._like_targets(self._var) - self.epistemic_var

    @cached_property
    def point(self) -> Float[ndarray, "m *q"]:
        """The mean, or the median where a long tail governs the mean."""
        middle, high = self.quantile([0.5, 0.9])
        governed = (self.mean > np.maximum(high, middle + 1)) | (self.mean > FAR * (1 + np.abs(middle)))
        return np.where(governed, middle, self.mean)

    def cov(self) -> Float[ndarray, "m q q"]:
        """Variances on the diagonal: given the component, the outputs are independent."""
        return self._var[..., None] * np.eye(self.n_outputs)

    def log_prob(self, y: Targets, *, per_output: bool = False) -> Float[ndarray, "m *q"]:
        targets, each = self.targets(y), self.working.with_output_axis()
        index = self._by_output(lambda cells, x: cells.below(x), targets)
        taken = self._by_output(lambda cells, i: cells.value(i), np.maximum(index, 0)) == targets
        std = np.sqrt(each.component_var)
        low, high = (self._by_output(lambda cells, i: cells.upper(i), i) for i in (index - 1, index))
        mass = log_interval_mass((low - each.component_mean) / std, (high - each.component_mean) / std)
        mass = np.where(taken, mass, np.where(np.isnan(targets), 0.0, -np.inf))
        if per_output:
            return self._like_targets(np.asarray(logsumexp(mass, axis=0, b=each.weights[..., None])))
        return np.asarray(logsumexp(mass.sum(-1), axis=0, b=each.weights))

    def standardized_residual(self, y: Targets) -> Float[ndarray, "m *q"]:
        index = self._by_output(lambda cells, x: cells.below(x), self.targets(y))
        low, high = (self._by_output(lambda cells, i: cells.upper(i), i) for i in (index - 1, index))
        middle = np.where(np.isinf(low), high, np.where(np.isinf(high), low, (low + high) / 2))
        return self.working.standardized_residual(self._like_targets(middle))

    def cdf(self, y: Targets) -> Float[ndarray, "m *q"]:
        return self._like_targets(self._up_to(self._by_output(lambda cells, x: cells.below(x), self.targets(y))))

    def crps(self, y: Targets) -> Float[ndarray, "m *q"]:
        """CRPS: the integral of the squared difference between the distribution function and that of the target."""
        (values, gaps, first, last), y = self._table, self.targets(y)
        part = np.clip((np.clip(y, values[:-1], values[1:]) - values[:-1]) / np.where(gaps > 0, gaps, 1.0), 0.0, 1.0)
        at = first + part * (last - first)
        square = lambda a, b: (a * a + a * b + b * b) / 3  # mean over a line from a to b
        score = (gaps * (part * square(first, at) + (1 - part) * square(1 - at, 1 - last))).sum(0)
        return self._like_targets(score + np.maximum(values[0] - y, 0.0) + np.maximum(y - values[-1], 0.0))

    def quantile(self, level: float | Sequence[float] | ndarray) -> Float[ndarray, "*s"]:
        return self._of_working(self.working.quantile(level))

    def interval(self, level: float = 0.95, *, method: str = "quantile") -> Bounds:
        ends = self.with_output_axis().working.interval(level, method=method)
        low, high = (self._by_output(lambda cells, z: cells.index(z), end) for end in ends)
        if method == "quantile":
            at_low, at_high = (self._up_to(i) - self._up_to(i - 1) for i in (low, high))
            spare = self._up_to(high) - self._up_to(low - 1) - level
            less_low = (at_low <= np.minimum(at_high, spare)) & (low < high)
            less_high = ~less_low & (at_high <= spare) & (low < high)
            low, high = low + less_low, high - less_high
        lower, upper = (self._by_output(lambda cells, i: cells.value(i), i) for i in (low, high))
        return self._like_targets(lower), self._like_targets(upper)

    def sample(self, n: int, *, random_state: int | np.random.Generator | None = None) -> Float[ndarray, "n m *q"]:
        return self._of_working(self.working.sample(n, random_state=random_state))

    def _of_working(self, z: ndarray) -> ndarray:
        """Values of the working variable as values of the targets."""
        z = z if self.y_ndim == 2 else z[..., None]
        return self._like_targets(self._by_output(lambda cells, x: cells.value(cells.index(x)), z))
