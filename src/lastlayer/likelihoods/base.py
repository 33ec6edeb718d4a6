"""`Likelihood`: how targets are read as Gaussian readings of the function, and predicted."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer._internal.numbers import LOG_2PI
from lastlayer.bayes.statistics import Readings
from lastlayer.errors import InputError
from lastlayer.formula.ops import NumPyOps
from lastlayer.formula.predictive import output_cov
from lastlayer.predictions.joint import add_noise
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.predictions.prediction import Prediction
from lastlayer.settings.types import Given

NO_TAILS = (-math.inf, 0.0)
"""Tails of share zero."""


@dataclass(frozen=True, eq=False)
class HeldOutReadings:
    """Readings of n held-out points as arrays, and the correlation of the noise in them."""

    t: Float[ndarray, "n q"]
    """Working targets; 0 where a target is not read."""
    read: Float[ndarray, "n q"] | None
    """1 where a target is read, 0 elsewhere; None: all are."""
    n_read: ndarray
    """Number of targets read at each point."""
    log_known: Float[ndarray, "n q"] | None
    """Log of the known noise variance; None: there is none."""
    correlation: Float[ndarray, "c n q q"] | None
    """Correlation between the outputs, of each network; None: independent."""
    lower: Float[ndarray, "n q"] | None = None
    """Lower bound of a target of which only a range is known; None: all are known."""
    upper: Float[ndarray, "n q"] | None = None
    """Upper bound of the range."""

    @classmethod
    def of(cls, readings: Readings, correlation: ndarray | None = None) -> "HeldOutReadings":
        """Convert readings, each output to one piece of memory: sums over outputs are then sums of whole arrays."""
        read = None if readings.read is None else readings.read.numpy().astype(float)
        n_read = np.full(len(readings.t), readings.t.shape[1]) if read is None else read.sum(-1)
        log_known = None if readings.known is None else readings.known.log().numpy()
        lower, upper = (None if x is None else by_output(x.numpy()) for x in (readings.lower, readings.upper))
        return cls(by_output(readings.t.numpy()), read, n_read, log_known, correlation, lower, upper)


@dataclass(frozen=True, eq=False)
class Predicted:
    """What c networks predict of the working targets of held-out points."""

    mean: Float[ndarray, "c n q"]
    log_var: Float[ndarray, "c n q"]
    """Log of the sum of the two variances that follow."""
    log_epistemic: Float[ndarray, "c n q"]
    log_noise: Float[ndarray, "c n q"]
    log_weight: Float[ndarray, "c n"]
    """Log of the weight of each network at each point, which densities include."""


@dataclass(frozen=True, eq=False)
class Slopes:
    """Slopes of the weighted sum of log densities."""

    mean: Float[ndarray, "c n q"]
    log_var: Float[ndarray, "c n q"] | float
    """With respect to the log of the whole variance, at a fixed share of the noise in it."""
    log_epistemic: Float[ndarray, "c n q"] | float
    """What is left with respect to the log of the epistemic variance alone."""
    log_noise: Float[ndarray, "c n q"] | float
    """What is left with respect to the log of the noise variance alone."""
    tails: tuple[float, float]
    """With respect to the logit of the tails' share, and to the log of their factor."""


@dataclass(frozen=True, eq=False)
class Marginal:
    """Log density of each point under each network, and its slopes given weights of points and networks."""

    log_density: Float[ndarray, "c n"]
    slopes: Callable[[Float[ndarray, "c n"]], Slopes]


@dataclass(frozen=True)
class Likelihood:
    """Distribution of the targets given the function; what is not overridden is that of Gaussian noise.

    A model is fitted to the working targets that `read` makes; `predict` turns their Gaussian mixture into the
    distribution of the targets. Numbers of its own are fields, which model files keep.
    """

    KINDS: ClassVar[dict[str, type["Likelihood"]]] = {}
    """Values of the parameter `likelihood`; "auto" chooses among those that suit the targets."""
    name: ClassVar[str]
    """The value of the parameter `likelihood`."""
    modelled: ClassVar[str] = ""
    """What the working targets are, in words, if they are not the targets."""
    described: ClassVar[str] = ""
    """A sentence on the targets for whoever did not choose it."""
    point_name: ClassVar[str] = Prediction.point_name
    """What `predict` returns: "mean" or "median"."""
    linear: ClassVar[bool] = True
    """Whether the prediction of working targets is that of the targets: what needs a Gaussian can use it."""
    iterated: ClassVar[bool] = False
    """Whether readings depend on what is predicted: training replaces them by `sites`."""
    discrete: ClassVar[bool] = False
    """Whether targets take separate values."""

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            Likelihood.KINDS[cls.name] = cls

    @classmethod
    def candidates(cls, y: Float[ndarray, "m q"]) -> "list[Likelihood]":
        """Its forms for these targets, of which some may be missing (NaN)."""
        return [cls()]

    @classmethod
    def suits(cls, y: Float[ndarray, "m q"]) -> bool:
        """Whether `likelihood="auto"` considers it for these targets, of which some may be missing (NaN)."""
        return False

    def read(self, given: Given) -> Readings:
        """Check targets, of which some may be missing (NaN), and convert them to working targets."""
        known = None if given.noise_std is None else torch.tensor(given.noise_std, dtype=torch.float64).square()
        return Readings.of(torch.tensor(given.y, dtype=torch.float64), known)

    def sites(
        self,
        r: Readings,
        mean: Float[Tensor, "*b m q"],
        var: Float[Tensor, "*#b #m #q"],
        noise_var: Float[Tensor, "*#b #m #q"],
    ) -> Readings:
        """Gaussian readings that stand in for `r` where the function has this mean and variance."""
        return r

    def refitted(self, r: Readings, mean: Float[Tensor, "c n q"], var: Float[Tensor, "c n q"]) -> "Likelihood":
        """Estimate the likelihood's own numbers from held-out predictions of working targets."""
        return self

    def log_marginal(self, r: HeldOutReadings, p: Predicted, tails: tuple[float, float] = NO_TAILS) -> Marginal:
        """Log densities of held-out working targets with the function integrated out, and their slopes.

        They are joint over the outputs. A share of the probability has a larger variance: `tails` are the logit of that
        share and the log of the factor on the variance.
        """
        ops, C, (share, wider) = NumPyOps, r.correlation, tails
        residual = r.t - p.mean if r.read is None else r.read * (r.t - p.mean)
        of_target, of_model = p.log_var, np.ones(())
        if r.log_known is not None:
            of_target = ops.logaddexp(p.log_var, r.log_known)
            of_model = np.exp(p.log_var - of_target)  # fraction of the target's variance that is not known
        if C is None:
            pull = residual * np.exp(-of_target)
            logdet = (of_target if r.read is None else r.read * of_target).sum(-1)
        else:
            cov = output_cov(ops, C, np.exp(p.log_epistemic), np.exp(p.log_noise))
            inverse, logdet = np.linalg.inv(cov), np.linalg.slogdet(cov)[1]
            pull = (inverse @ residual[..., None])[..., 0]
        distance = (residual * pull).sum(-1)
        less = 1 - math.exp(-wider)  # reduction of the distance in the tails
        odds = share + 0.5 * (less * distance - r.n_read * wider)
        either = ops.logaddexp(0.0, odds)
        log_density = p.log_weight - 0.5 * (distance + logdet + r.n_read * LOG_2PI) + either - ops.logaddexp(0.0, share)

        def slopes(rho: Float[ndarray, "c n"]) -> Slopes:
            tail = np.exp(odds - either)
            R, h = rho[..., None], (1 - less * tail)[..., None]  # h: factor on the distance
            in_tails = rho * tail
            of_share = in_tails.sum() - rho.sum() * ops.sigmoid(share)
            of_factor = 0.5 * (((1 - less) * distance - r.n_read) * in_tails).sum()
            if C is None:
                log_var = R * of_model * (0.5 * (h * residual * pull - (1 if r.read is None else r.read)))
                return Slopes(R * h * pull, log_var, 0.0, 0.0, (of_share, of_factor))
            by_cov = 0.5 * C * (h[..., None] * ops.outer(pull, pull) - inverse)
            roots = np.exp(p.log_epistemic / 2), np.exp(p.log_noise / 2)
            e, n = (root * (by_cov @ root[..., None])[..., 0] for root in roots)
            return Slopes(R * h * pull, 0.0, R * e, R * n, (of_share, of_factor))

        return Marginal(log_density, slopes)

    def predict(self, working: MixturePrediction) -> Prediction:
        """Convert a prediction of the working targets to one of the targets."""
        return working

    def log_density(
        self,
        y: Float[ndarray, "m q"],
        mean: Float[ndarray, "m q"],
        epistemic_var: Float[ndarray, "m q"],
        noise_var: Float[ndarray, "*n"],
    ) -> Float[ndarray, " m"]:
        """Log density of targets, given a Gaussian for each of their working values."""
        words = {"epistemic_var": epistemic_var, "noise_var": noise_var, "affine_cost": np.zeros(len(mean))}
        return self.predict(MixturePrediction.gaussian(mean, **words)).log_prob(y)

    def draw(
        self, function: Float[ndarray, "n m q"], noise_cov: Float[ndarray, "m q q"] | None, rng: np.random.RandomState
    ) -> Float[ndarray, "n m q"]:
        """Draw targets given draws of the function; `noise_cov`: None for targets without noise."""
        return function if noise_cov is None else function + add_noise(noise_cov, rng.standard_normal(function.shape))

    def check_linear(self, use: str) -> None:
        """Raise an error where the working targets are not the targets."""
        if not self.linear:
            instead = f" to {self.modelled}, and transform its predictions" if self.modelled else ""
            raise InputError(
                f'{use} needs Gaussian predictions of the targets, and this model has likelihood="{self.name}": fit '
                f'one with likelihood="gaussian"{instead}'
            )

    def check_options(self, noise: Any, calibration: Any, bias_prior: str) -> None:
        """Raise an error for parameters of a fit that cannot be combined with it."""

    def check_fixed(self, use: str) -> None:
        """Raise an error where rows must keep the weight they were given."""
        if self.iterated:
            raise InputError(
                f'{use} cannot be combined with likelihood="{self.name}", which weighs rows by their residuals: fit '
                'again without it, or use likelihood="gaussian"'
            )


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Gaussian noise."""

    name = "gaussian"


def by_output(x: Float[ndarray, "*s q"]) -> Float[ndarray, "*s q"]:
    """The same numbers, each output in one piece of memory."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, -1, 0)), 0, -1)
