"""`Counts` and `Ordinal`: targets that take separate values, each a cell of a continuous variable."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from lastlayer._internal.arrays import rows_with
from lastlayer._internal.density import log_interval_mass
from lastlayer._internal.numbers import LOG_2PI
from lastlayer.bayes.statistics import Readings
from lastlayer.errors import InputError
from lastlayer.formula.ops import NumPyOps
from lastlayer.likelihoods.base import NO_TAILS, HeldOutReadings, Likelihood, Marginal, Predicted, Slopes
from lastlayer.predictions.discrete import LINKS, Cells, DiscretePrediction, Levels, Whole, by_output
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.settings.types import Given

MOST_LEVELS, OFTEN, SHARE = 50, 5, 0.95
"""Levels: at most so many, and that share of the targets at values that occur so often."""
NEAR = 10
"""Counts of which one in twenty is below it may come close to 0, where Gaussian noise would be negative."""


class Discrete(Likelihood):
    """Targets whose value says in which cell the function plus Gaussian noise lies."""

    linear, discrete = False, True
    wanted: ClassVar[str]
    """What targets must be, in words."""

    @abstractmethod
    def cells(self, n_outputs: int) -> tuple[Cells, ...]:
        """The values of each output."""

    @abstractmethod
    def working(self, y: Float[ndarray, "m q"]) -> Float[ndarray, "m q"]:
        """Targets as values of the working variable; NaN where they are none."""

    def read(self, given: Given) -> Readings:
        """Working targets in their cells."""
        t, each = self.working(given.y), self.cells(given.y.shape[1])
        bad = np.isnan(t) & ~np.isnan(given.y)
        rows = rows_with(bad, given.place)
        if len(rows):
            raise InputError(
                f'likelihood="{self.name}" needs {self.wanted}, and y has other values in {len(rows)} rows (first: '
                f"{given.y[bad][0]:g} in row {rows[0]})"
            )
        index = by_output(each, lambda cells, y: cells.below(y), given.y)
        edges = [by_output(each, lambda cells, i: cells.upper(i), at) for at in (index - 1, index)]
        lower, upper = (torch.from_numpy(np.where(np.isnan(t), 0.0, edge)) for edge in edges)
        return replace(super().read(replace(given, y=t)), lower=lower, upper=upper)

    def check_options(self, noise: Any, calibration: Any, bias_prior: str) -> None:
        if isinstance(noise, str) and noise == "full":
            raise InputError(f'likelihood="{self.name}" needs outputs with independent noise: leave noise at "auto"')

    def log_marginal(self, r: HeldOutReadings, p: Predicted, tails: tuple[float, float] = NO_TAILS) -> Marginal:
        """Log masses of cells, and their slopes."""
        assert r.correlation is None
        assert r.log_known is None
        ops, (share, wider) = NumPyOps, tails
        log_narrow, *narrow = _mass(r, p, 0.0)
        log_wide, *wide = _mass(r, p, wider)
        odds = share + log_wide - log_narrow
        either = ops.logaddexp(0.0, odds)
        log_density = p.log_weight + log_narrow + either - np.logaddexp(0.0, share)

        def slopes(rho: Float[ndarray, "c n"]) -> Slopes:
            in_tails = rho * np.exp(odds - either)
            parts = [
                (rho - in_tails)[..., None] * a + in_tails[..., None] * b for a, b in zip(narrow, wide, strict=True)
            ]
            of_share = in_tails.sum() - ops.sigmoid(share) * rho.sum()
            of_factor = (in_tails[..., None] * wide[1]).sum()
            return Slopes(parts[0], parts[1], 0.0, 0.0, (of_share, of_factor))

        return Marginal(log_density, slopes)

    def predict(self, working: MixturePrediction) -> DiscretePrediction:
        return DiscretePrediction(working, self.cells(working.n_outputs))

    def draw(
        self, function: Float[ndarray, "n m q"], noise_cov: Float[ndarray, "m q q"] | None, rng: np.random.RandomState
    ) -> Float[ndarray, "n m q"]:
        """Draw the working variable, and take the values of its cells."""
        z = super().draw(function, noise_cov, rng)
        return by_output(self.cells(function.shape[-1]), lambda cells, z: cells.value(cells.index(z)), z)


@dataclass(frozen=True)
class Counts(Discrete):
    """Counts: the function plus Gaussian noise is rounded on the scale of a link."""

    name = "counts"
    modelled = "the square root or logarithm of the counts"
    described = "the targets are counts: intervals are whole numbers from 0 on"
    wanted = "whole numbers from 0 on"
    link: Literal["sqrt", "log"] = "sqrt"
    """Scale on which the function plus noise is modelled."""

    @classmethod
    def suits(cls, y: Float[ndarray, "m q"]) -> bool:
        """Whether all targets are whole numbers from 0 on, of which some are close to 0."""
        seen = y[~np.isnan(y)]
        whole = bool((seen == np.round(seen)).all() and (seen >= 0).all())
        return whole and bool((np.nanquantile(y, 0.05, axis=0) < NEAR).all() and (np.nanmax(y, axis=0) > 1).all())

    @classmethod
    def candidates(cls, y: Float[ndarray, "m q"]) -> list[Likelihood]:
        return [cls("sqrt"), cls("log")]

    def cells(self, n_outputs: int) -> tuple[Cells, ...]:
        return (Whole(self.link),) * n_outputs

    def working(self, y: Float[ndarray, "m q"]) -> Float[ndarray, "m q"]:
        return np.asarray(LINKS[self.link][0](np.where((y >= 0) & (y == np.round(y)), y, np.nan)))


@dataclass(frozen=True)
class Ordinal(Discrete):
    """Levels: the function plus Gaussian noise is rounded to the nearest."""

    name = "levels"
    described = "the targets take few values: each of them gets a probability"
    wanted = "the levels that y had in fit"
    values: tuple[tuple[float, ...], ...] = ()
    """The levels of each output."""

    @classmethod
    def suits(cls, y: Float[ndarray, "m q"]) -> bool:
        """Whether nearly all targets take one of few values, each of them often."""
        return all(_few(column[~np.isnan(column)]) for column in y.T)

    @classmethod
    def candidates(cls, y: Float[ndarray, "m q"]) -> list[Likelihood]:
        values = [np.unique(column[~np.isnan(column)]) for column in y.T]
        most = max(map(len, values))
        if most > MOST_LEVELS:
            raise InputError(
                f'likelihood="levels" needs at most {MOST_LEVELS} levels, and y has {most} different values: choose '
                'likelihood="gaussian" or "counts"'
            )
        return [cls(tuple(tuple(column.tolist()) for column in values))]

    def cells(self, n_outputs: int) -> tuple[Cells, ...]:
        return tuple(Levels(np.array(own)) for own in self.values)

    def working(self, y: Float[ndarray, "m q"]) -> Float[ndarray, "m q"]:
        fine = np.stack([np.isin(column, own) for column, own in zip(y.T, self.values, strict=True)], -1)
        return np.where(fine, y, np.nan)


def _few(y: Float[ndarray, " m"]) -> bool:
    values, counts = np.unique(y, return_counts=True)
    return 2 < len(values) <= MOST_LEVELS and bool(counts[counts >= OFTEN].sum() >= SHARE * len(y))


def _mass(r: HeldOutReadings, p: Predicted, log_factor: float) -> tuple[ndarray, ndarray, ndarray]:
    """Log mass of the cells, joint over the outputs, and its slopes in each mean and log variance."""
    assert r.lower is not None
    assert r.upper is not None
    log_var = p.log_var + log_factor
    std = np.exp(0.5 * log_var)
    low, high = (r.lower - p.mean) / std, (r.upper - p.mean) / std
    mass = log_interval_mass(low, high)
    read = 1.0 if r.read is None else r.read
    of_low, of_high = (np.exp(-0.5 * (np.square(x) + LOG_2PI) - mass) for x in (low, high))
    finite = lambda x: np.where(np.isfinite(x), x, 0.0)
    by_mean = read * (of_low - of_high) / std
    by_var = 0.5 * read * (finite(low) * of_low - finite(high) * of_high)
    return (read * mass).sum(-1), by_mean, by_var
