"""Calibration curves from affine cost to variance, fitted to held-out points."""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer._internal.codec import Limits
from lastlayer.calibration.shape import ShapeHead
from lastlayer.formula.ops import NumPyOps
from lastlayer.formula.predictive import TINY, log_shape
from lastlayer.settings.types import ADDITIVE, FOURIER, Family

HEAD_UNITS = 10
BELIEVED_ROWS, SURE = 50.0, 3.0
"""Rows that a curve is worth beside those learned later; standard errors by which these must exceed it to widen it."""
LOG_FRACTION = {FOURIER: -1.5}
"""Log of the fraction of `Outside.factor` for the process itself, whose own curve covers most of it; 0 for others."""


class Parameter(NamedTuple):
    """A number that calibration fits, as a logarithm or a logit: with few held-out points it stays near its prior."""

    name: str
    starts: tuple[float, float, float]
    """Starting points of the search."""
    bounds: tuple[float, float]
    prior: tuple[float, float]
    """Mean and standard deviation of the Gaussian prior."""
    by_output: bool = False
    """Whether there is one for each output."""


OF_MIXTURE = (
    Parameter("share", (-2.0,) * 3, (-5.0, 0.0), (-2.0, 2.0)),
    Parameter("factor", (2.0,) * 3, (0.0, 4.0), (2.0, 2.0)),
    Parameter("shrinkage", (0.0,) * 3, (-12.0, 2.0), (0.0, 2.0)),
    Parameter("outside", (3.0,) * 3, (-10.0, 8.0), (3.0, 1.0)),
)
"""Logit of the tails' share, log of their factor, log precision of the shrinkage, log factor of the process outside the
data: the numbers that all curves of a mixture share."""


@dataclass(frozen=True)
class Curve:
    """Calibrated variance var = sigma^2 (a + b v^gamma), per output."""

    noise: Float[ndarray, " q"]
    """Coefficient a."""
    slope: Float[ndarray, " q"]
    """Coefficient b."""
    power: float = 1.0
    """Exponent gamma."""
    reach: float = math.inf
    """Largest v in the calibration; beyond it the variance grows in proportion to v, as that of the posterior does."""
    trust: float = 1.0
    """Weight of this family's members in a mixture, relative to others of the same variance."""
    seen: float = 0.0
    """Number of rows learned after calibration."""
    squares: float = 0.0
    """Sum of their squared residuals before they were learned, relative to the variance the curve predicted."""
    PARAMETERS: ClassVar[tuple[Parameter, ...]] = (
        Parameter("noise", (0.0, -1.0, 0.0), (-7.0, 7.0), (0.0, 3.0), by_output=True),
        Parameter("slope", (0.0, 1.0, 3.0), (-20.0, 20.0), (0.0, 5.0), by_output=True),
        Parameter("power", (0.0, -0.5, 0.0), (-2.0, 1.5), (0.0, 1.0)),
        Parameter("trust", (0.0, 0.0, 0.0), (-10.0, 10.0), (0.0, 1.0)),
    )
    """What is fitted, as logarithms in this order."""

    @property
    def widening(self) -> float:
        """Factor on the variance due to unexpectedly large residuals of rows learned since; 1: as calibrated."""
        if self.squares <= self.seen + SURE * math.sqrt(2 * self.seen):
            return 1.0
        return (BELIEVED_ROWS + self.squares) / (BELIEVED_ROWS + self.seen)

    @classmethod
    def identity(cls, n_outputs: int) -> "Curve":
        """Curve of the uncalibrated posterior, var = sigma^2 (1 + v)."""
        return cls(np.ones(n_outputs), np.ones(n_outputs))

    @property
    def log_reach(self) -> float:
        """Logarithm of `reach`."""
        return math.log(self.reach) if self.reach > 0 else -math.inf

    def epistemic(self, cost: Float[ndarray, "*s"]) -> Float[ndarray, "*s q"]:
        """Evaluate b v^gamma, the epistemic variance over that of the noise, inside the data.

        Parameters
        ----------
        cost : ndarray of any shape
            Affine cost v.
        """
        shape = np.exp(log_shape(NumPyOps, self, np.log(np.maximum(cost, TINY)), None))
        return np.asarray(shape)[..., None] * self.widening * self.slope

    def factor(self, cost: Float[ndarray, "*s"]) -> Float[ndarray, "*s q"]:
        """Evaluate a + b v^gamma, the variance over that of the noise.

        Parameters
        ----------
        cost : ndarray of any shape
            Affine cost v.
        """
        return self.widening * self.noise + self.epistemic(cost)

    def __str__(self) -> str:
        a, b = (np.array2string(x, precision=3) for x in (self.noise, self.slope))
        return f"var = noise * (a + b v^{self.power:.2f}), a = {a}, b = {b}"


@dataclass(frozen=True)
class Tails:
    """Heavy tails: a fraction of the probability has a larger variance."""

    share: float = 0.0
    """Fraction of the probability with the larger variance."""
    factor: float = 1.0
    """Its variance relative to the rest."""

    @property
    def widening(self) -> float:
        """Variance of the whole relative to that of the rest."""
        return 1 + self.share * (self.factor - 1)

    def __str__(self) -> str:
        return f", {self.share:.0%} of it {self.factor:.1f} times as wide" if self.share else ""


@dataclass(frozen=True)
class Shrinkage:
    """Members' means are shrunk towards the target mean where their variance is large."""

    precision: float = 0.0
    """Prior precision of a standardised target around the mean of all targets; 0: no shrinkage."""

    def __str__(self) -> str:
        scale = self.precision**-0.5 if self.precision else math.inf
        return f", means shrunk from {scale:.1f} standard deviations on" if self.precision else ""


@dataclass(frozen=True)
class Outside:
    """Outside the data, every member is at least as uncertain as a Gaussian process."""

    factor: float
    """Factor on the variance of the process."""
    inside: float
    """Affine cost of the process up to which a point counts as inside the data."""

    def __str__(self) -> str:
        return f", {self.factor:.1f} times the variance of the process outside the data"


@dataclass(frozen=True)
class NoiseHead:
    """Log of the noise variance relative to its typical value: V' tanh(U'x + u), with x clipped to the data range."""

    low: Float[Tensor, " d"]
    high: Float[Tensor, " d"]
    U: Float[Tensor, "d h"]
    u: Float[Tensor, " h"]
    V: Float[Tensor, "h q"]

    @classmethod
    def initial(cls, Z: Float[Tensor, "n d"], n_outputs: int, seed: int = 0, *, units: int = HEAD_UNITS) -> "NoiseHead":
        """Initialise a head with random hidden units and zero output."""
        Z, d = Z.double(), Z.shape[1]
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return cls(Z.amin(0), Z.amax(0), normal(d, units) / d**0.5, normal(units), Z.new_zeros(units, n_outputs))

    def numbers(self) -> Float[Tensor, " n"]:
        """Flatten the trainable parameters."""
        return torch.cat([self.U.flatten(), self.u, self.V.flatten()])

    def with_numbers(self, numbers: Float[Tensor, " n"]) -> "NoiseHead":
        """Return a head with other trainable parameters."""
        U, u, V = numbers.split([self.U.numel(), self.u.numel(), self.V.numel()])
        return NoiseHead(self.low, self.high, U.reshape(self.U.shape), u, V.reshape(self.V.shape))

    def neg_log_prior(self) -> Float[Tensor, ""]:
        """Compute -log density under N(0, 1 / fan_in) of the weights and N(0, 1) of the biases, up to a constant."""
        d, h = self.U.shape
        return 0.5 * (d * self.U.square().sum() + self.u.square().sum() + h * self.V.square().sum())


@dataclass(frozen=True)
class CalibrationPoints:
    """Held-out points as predicted by the first network of the best family, for plots."""

    cost: Float[ndarray, " n"]
    squared_error: Float[ndarray, "n q"]
    """Squared error of the shrunk mean, relative to the noise variance."""
    kind: ndarray
    """How each point was held out."""


@dataclass(frozen=True)
class Calibration:
    """One curve per family of members, the points they were fitted to, and the LPD of these points."""

    curves: dict[Family, Curve]
    """Curve of each family; the first is that of the family that is best on its own."""
    points: CalibrationPoints
    """Held-out points."""
    lpd: float
    """Mean log predictive density of the held-out points, standardised units, joint over the outputs."""
    lpd_before: float
    """The same for the uncalibrated mixture with equal weights for all families."""
    tails: Tails = Tails()
    """Heavy tails of the mixture."""
    shrinkage: Shrinkage = Shrinkage()
    """Shrinkage of the means towards the target mean."""
    outside: Outside | None = None
    """Variance added outside the data; None: no member is a Gaussian process."""
    additive_inside: float | None = None
    """Affine cost of the additive model up to which a point counts as inside the data; None: there is no such model."""
    head: NoiseHead | None = None
    """Factor on the noise variance at each input; None: the noise does not depend on the input."""
    alone: dict[Family, float] = field(default_factory=dict)
    """LPD of the same points by each family alone, with its curve but without widening, tails and shrinkage."""
    shape: ShapeHead | None = None
    """Gaussians beside the mixture; None: the noise has the shape of the mixture."""

    @property
    def curve(self) -> Curve:
        """Curve of the best family."""
        return next(iter(self.curves.values()))

    @property
    def inside(self) -> dict[Family, float]:
        """Affine cost up to which a point counts as inside the data, for each family that can tell.

        The Gaussian process knows over which distance the function changes; the fixed features of the additive model
        also notice new values of inputs that learned features ignore.
        """
        process = {} if self.outside is None else {FOURIER: self.outside.inside}
        return process if self.additive_inside is None else process | {ADDITIVE: self.additive_inside}

    def __str__(self) -> str:
        n, others = len(self.points.cost), len(self.curves) - 1
        more = f", and {others} more curves" if others else ""
        seen = f"LPD of {n} held-out points {self.lpd_before:.3f} -> {self.lpd:.3f}"
        return f"{self.curve}{self.tails}{self.shrinkage}{self.outside or ''}{self.shape or ''}{more}; {seen}"

    def after(self, squares: dict[Family, float], n: float, kept: float = 1.0) -> "Calibration":
        """Count n learned rows, with the sums of their squared standardised residuals before; earlier ones fade."""
        curves = {
            f: replace(c, seen=kept * c.seen + n, squares=kept * c.squares + c.widening * squares[f])
            for f, c in self.curves.items()
            if f in squares
        }
        return replace(self, curves=self.curves | curves)

    def forgotten(self) -> "Calibration":
        """Reset the curves to their state after calibration."""
        return replace(self, curves={f: replace(c, seen=0.0, squares=0.0) for f, c in self.curves.items()})


LIMITS = {
    Curve: {
        **dict.fromkeys(("noise", "slope", "trust"), Limits(TINY)),
        **dict.fromkeys(("power", "seen", "squares"), Limits(0.0)),
        "reach": Limits(0.0, infinite=True),
    },
    Tails: {"share": Limits(0.0, 1.0), "factor": Limits(TINY)},
    Shrinkage: {"precision": Limits(0.0)},
    Outside: {"factor": Limits(TINY), "inside": Limits(0.0, infinite=True)},
    ShapeHead: {"follows": Limits(0.0), "reach": Limits(0.0, infinite=True)},
    CalibrationPoints: {"cost": Limits(0.0), "squared_error": Limits(0.0, missing=True)},
    Calibration: {
        **dict.fromkeys(("lpd", "lpd_before", "alone"), Limits(infinite=True, missing=True)),
        "additive_inside": Limits(0.0, infinite=True),
    },
}
"""What a model file may hold."""
