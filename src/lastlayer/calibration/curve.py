"""From affine cost to variance: one monotone curve, calibrated on points that the features never saw.

    var = sigma^2 (a + b v^gamma),        v = phi' Lambda_bar^-1 phi (Theorem 2)

v orders points by how far they extrapolate; what the evidence gets wrong is the scale. a = b = gamma = 1 is the
Bayesian last layer as it stands, and Algorithm 1, which moves alpha alone, moves v in it. Each family of members
extrapolates differently, so each has its own curve. In a mixture, means are shrunk towards the
mean of the targets where the variance is large (`Shrinkage`). How curves enter a prediction: `lastlayer.formula`.
"""

import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer import checked
from lastlayer.formula import TINY, log_shape
from lastlayer.ops import NumPyOps
from lastlayer.types import FOURIER, Family

HEAD_UNITS = 10
CURVE_NUMBERS = ("power", "reach", "trust", "seen", "squares")
BELIEVED_ROWS, SURE = 50.0, 3.0
"""Rows that a curve is worth beside those learned later; standard errors by which these must miss it to widen it."""
OWN_OUTSIDE = -1.5
"""Log of what the process counts for in its own variance, beside that of others: its curve has most of it."""


@dataclass(frozen=True)
class Curve:
    """var = sigma^2 (a + b v^gamma) for each output."""

    noise: Float[ndarray, " q"]
    """a"""
    slope: Float[ndarray, " q"]
    """b"""
    power: float = 1.0
    """gamma"""
    reach: float = math.inf
    """The largest v that was calibrated. Beyond it the variance grows as the posterior's own, proportional to v."""
    trust: float = 1.0
    """What members of this family count for in a mixture beside others of the same variance."""
    seen: float = 0.0
    """Rows that were learned after calibration."""
    squares: float = 0.0
    """Sum of their squared residuals before they were learned, over the variance that the curve gave them."""

    @property
    def widening(self) -> float:
        """What the variance is multiplied by since rows were learned that it had not expected; 1: as calibrated."""
        if self.squares <= self.seen + SURE * math.sqrt(2 * self.seen):
            return 1.0
        return (BELIEVED_ROWS + self.squares) / (BELIEVED_ROWS + self.seen)

    @classmethod
    def identity(cls, n_outputs: int) -> "Curve":
        """The posterior as it stands: var = sigma^2 (1 + v)."""
        return cls(np.ones(n_outputs), np.ones(n_outputs))

    @property
    def log_reach(self) -> float:
        return math.log(self.reach) if self.reach > 0 else -math.inf

    def epistemic(self, cost: Float[ndarray, "*s"]) -> Float[ndarray, "*s q"]:
        """b v^gamma: inside the data."""
        shape = np.exp(log_shape(NumPyOps, self, np.log(np.maximum(cost, TINY)), None))
        return np.asarray(shape)[..., None] * self.widening * self.slope

    def factor(self, cost: Float[ndarray, "*s"]) -> Float[ndarray, "*s q"]:
        """a + b v^gamma: the variance over that of the noise."""
        return self.widening * self.noise + self.epistemic(cost)

    def __str__(self) -> str:
        a, b = (np.array2string(x, precision=3) for x in (self.noise, self.slope))
        return f"var = noise * (a + b v^{self.power:.2f}), a = {a}, b = {b}"


@dataclass(frozen=True)
class Tails:
    """A share of the probability has a larger variance."""

    share: float = 0.0
    factor: float = 1.0
    """Its variance over that of the rest."""

    @property
    def widening(self) -> float:
        """The variance of the whole over that of the rest."""
        return 1 + self.share * (self.factor - 1)

    def __str__(self) -> str:
        return f", {self.share:.0%} of it {self.factor:.1f} times as wide" if self.share else ""


@dataclass(frozen=True)
class Shrinkage:
    """Members' means are shrunk towards the mean of the targets where their variance is large."""

    precision: float = 0.0
    """Prior precision of a standardised target around the mean of all targets; 0: no shrinkage."""

    def __str__(self) -> str:
        scale = self.precision**-0.5 if self.precision else math.inf
        return f", means shrunk from {scale:.1f} standard deviations on" if self.precision else ""


def log_fraction(family: Family) -> float:
    """Log of the fraction of that factor which counts for a family: less for the process itself."""
    return OWN_OUTSIDE if family == FOURIER else 0.0


@dataclass(frozen=True)
class Outside:
    """Outside the data every member is as unsure as a Gaussian process would be.

    A network that extrapolates well on the few regions left out has been lucky as often as right. So the variance that
    the process has beyond its largest one inside joins that of every member: `factor` times, and a fraction of that
    for the process itself.
    """

    factor: float
    inside: float
    """The affine cost of the process up to which a point counts as inside."""

    def of(self, family: Family) -> float:
        """What the variance of the process is multiplied by, for members of a family."""
        return self.factor * math.exp(log_fraction(family))

    def __str__(self) -> str:
        return f", {self.factor:.1f} times the variance of the process outside the data"


@dataclass(frozen=True)
class NoiseHead:
    """Log of the noise variance over its usual value: V' tanh(U'x + u), x clipped to the range of the data.

    `lastlayer.formula.log_noise_factor` evaluates it. Outside the range, the noise is that of the nearest edge: only
    the epistemic part grows with the distance.
    """

    low: Float[Tensor, " d"]
    high: Float[Tensor, " d"]
    U: Float[Tensor, "d h"]
    u: Float[Tensor, " h"]
    V: Float[Tensor, "h q"]

    @classmethod
    def initial(cls, Z: Float[Tensor, "n d"], n_outputs: int, seed: int = 0, *, units: int = HEAD_UNITS) -> "NoiseHead":
        """Units in all directions, no effect yet."""
        generator = torch.Generator().manual_seed(seed)
        d = Z.shape[1]
        U = torch.randn(d, units, generator=generator, dtype=torch.float64) / d**0.5
        u = torch.randn(units, generator=generator, dtype=torch.float64)
        Z = Z.double()
        return cls(Z.amin(0), Z.amax(0), U, u, torch.zeros(units, n_outputs, dtype=torch.float64))

    def numbers(self) -> Float[Tensor, " n"]:
        """What is learned of it."""
        return torch.cat([self.U.flatten(), self.u, self.V.flatten()])

    def with_numbers(self, numbers: Float[Tensor, " n"]) -> "NoiseHead":
        U, u, V = numbers.split([self.U.numel(), self.u.numel(), self.V.numel()])
        return NoiseHead(self.low, self.high, U.reshape(self.U.shape), u, V.reshape(self.V.shape))

    def neg_log_prior(self) -> Float[Tensor, ""]:
        """-log density under N(0, 1 / fan_in) of the weights and N(0, 1) of the biases, up to a constant."""
        d, h = self.U.shape
        return 0.5 * (d * self.U.square().sum() + self.u.square().sum() + h * self.V.square().sum())


@dataclass(frozen=True)
class CalibrationPoints:
    """The held-out points, as plots show them: by the first network of the best family."""

    cost: Float[ndarray, " n"]
    squared_error: Float[ndarray, "n q"]
    """Of the shrunk mean, over the noise variance."""
    kind: ndarray


@dataclass(frozen=True)
class Calibration:
    """One curve per family of members, what they were fitted to, and the LPD they promise."""

    curves: dict[Family, Curve]
    """The first is that of the family that does best alone."""
    points: CalibrationPoints
    lpd: float
    """Mean log predictive density of the held-out points, standardised units, joint over the outputs."""
    lpd_before: float
    """The same by the uncalibrated mixture, whose families count equally."""
    tails: Tails = Tails()
    shrinkage: Shrinkage = Shrinkage()
    outside: Outside | None = None
    """None: no member is a process."""
    head: NoiseHead | None = None
    """What multiplies the noise at each input, if it depends on it."""
    alone: dict[Family, float] = field(default_factory=dict)
    """LPD of the same points by each family alone, not widened: a curve, but no tails and no shrinkage."""

    @property
    def curve(self) -> Curve:
        """Of the best family."""
        return next(iter(self.curves.values()))

    def __str__(self) -> str:
        n, others = len(self.points.cost), len(self.curves) - 1
        more = f", and {others} more curves" if others else ""
        seen = f"LPD of {n} held-out points {self.lpd_before:.3f} -> {self.lpd:.3f}"
        return f"{self.curve}{self.tails}{self.shrinkage}{self.outside or ''}{more}; {seen}"

    def after(self, squares: dict[Family, float], n: float, kept: float = 1.0) -> "Calibration":
        """Once n rows were learned, given the sums of their squared standardised residuals under this calibration
        before that; those learned earlier keep so much of their weight."""
        curves = {
            family: replace(c, seen=kept * c.seen + n, squares=kept * c.squares + c.widening * squares[family])
            if family in squares
            else c
            for family, c in self.curves.items()
        }
        return replace(self, curves=curves)

    def forgotten(self) -> "Calibration":
        """As it was calibrated, whatever rows were learned since."""
        return replace(self, curves={f: replace(c, seen=0.0, squares=0.0) for f, c in self.curves.items()})

    def pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON for a model file; numbers that may be infinite or NaN are strings."""
        kinds = sorted(set(self.points.kind.tolist()))
        curves = [
            {"noise": c.noise.tolist(), "slope": c.slope.tolist()}
            | {key: str(getattr(c, key)) for key in CURVE_NUMBERS}
            for c in self.curves.values()
        ]
        header = {
            "families": [str(family) for family in self.curves],
            "curves": curves,
            "tails": asdict(self.tails),
            "shrinkage": asdict(self.shrinkage),
            "outside": None if self.outside is None else asdict(self.outside),
            "alone": [[str(family), str(lpd)] for family, lpd in self.alone.items()],
            "lpd": str(self.lpd),
            "lpd_before": str(self.lpd_before),
            "kinds": kinds,
        }
        tensors = {
            "calibration.cost": torch.from_numpy(self.points.cost),
            "calibration.squared_error": torch.from_numpy(self.points.squared_error),
            "calibration.kind": torch.tensor([kinds.index(kind) for kind in self.points.kind.tolist()]),
        }
        if self.head is not None:
            tensors |= {f"head.{f.name}": getattr(self.head, f.name) for f in fields(self.head)}
        return tensors, header

    @classmethod
    def unpack(cls, tensors: dict[str, Tensor], header: dict[str, Any], n_inputs: int, n_outputs: int) -> "Calibration":
        """What was packed; KeyError, TypeError or ValueError if the parts do not fit."""
        n, q = len(tensors["calibration.cost"]), n_outputs
        kinds = checked.typed("kinds", header["kinds"], tuple[str, ...])
        places = checked.tensor(tensors, "calibration.kind", n, dtype=torch.int64).tolist()
        if any(not 0 <= place < len(kinds) for place in places):
            raise ValueError("calibration.kind has places that are none of the kinds")
        points = CalibrationPoints(
            checked.tensor(tensors, "calibration.cost", n, low=0.0).numpy(),
            checked.tensor(tensors, "calibration.squared_error", n, q, low=0.0, missing=True).numpy(),
            np.array([kinds[place] for place in places], dtype=str),
        )
        tails = checked.instance(Tails, header["tails"])
        checked.number("tails.share", tails.share, low=0.0, high=1.0)
        checked.number("tails.factor", tails.factor, low=TINY)
        shrinkage = checked.instance(Shrinkage, header["shrinkage"])
        checked.number("shrinkage.precision", shrinkage.precision, low=0.0)
        outside = None if header["outside"] is None else _outside(header["outside"])
        families = [Family.parse(text) for text in header["families"]]
        return cls(
            dict(zip(families, [_curve(saved, q) for saved in header["curves"]], strict=True)),
            points,
            lpd=float(header["lpd"]),
            lpd_before=float(header["lpd_before"]),
            tails=tails,
            shrinkage=shrinkage,
            outside=outside,
            head=_head(tensors, n_inputs, q) if any(name.startswith("head.") for name in tensors) else None,
            alone={Family.parse(text): float(lpd) for text, lpd in header["alone"]},
        )


def _curve(saved: dict[str, Any], n_outputs: int) -> Curve:
    """One that was packed."""
    noise, slope = (np.array(checked.typed(name, saved[name], tuple[float, ...])) for name in ("noise", "slope"))
    if any(len(values) != n_outputs or min(values) <= 0 for values in (noise, slope)):
        raise ValueError(f"a curve has noise {noise} and slope {slope}: {n_outputs} positive numbers each are needed")
    low = {"power": 0.0, "reach": 0.0, "trust": TINY, "seen": 0.0, "squares": 0.0}
    numbers = {
        name: checked.number(f"a curve's {name}", saved[name], low=low[name], infinite=name == "reach")
        for name in CURVE_NUMBERS
    }
    return Curve(noise, slope, **numbers)


def _outside(saved: dict[str, Any]) -> Outside:
    """`inside` is infinite where no point was held out alone."""
    inside = checked.number("outside.inside", saved["inside"], low=0.0, infinite=True)
    return Outside(checked.number("outside.factor", saved["factor"], low=TINY), inside)


def _head(tensors: dict[str, Tensor], n_inputs: int, n_outputs: int) -> NoiseHead:
    units = tensors["head.u"].numel()
    shapes: dict[str, tuple[int, ...]] = {"low": (n_inputs,), "high": (n_inputs,), "U": (n_inputs, units)}
    shapes |= {"u": (units,), "V": (units, n_outputs)}
    return NoiseHead(**{name: checked.tensor(tensors, f"head.{name}", *shape) for name, shape in shapes.items()})
