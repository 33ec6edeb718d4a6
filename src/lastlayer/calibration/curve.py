"""From affine cost to variance: one monotone curve, calibrated on points that the features never saw.

    var = sigma^2 (a + b v^gamma),        v = phi' Lambda_bar^-1 phi (Theorem 2)

v orders points by how far they extrapolate; what the evidence gets wrong is the scale. a = b = gamma = 1 is the
Bayesian last layer as it stands, and Algorithm 1, which moves alpha alone, moves v in it. Networks of another strength
of the prior extrapolate in another way, so each strength has a curve of its own; all are fitted together, as the
mixture in which they will speak. In a mixture a member's mean is one more observation of a target that was known to be
about the mean of all targets, and returns to it where the variance is large (`Anchor`).
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.optimize import minimize
from torch import Tensor

from lastlayer.calibration.noise_head import NoiseHead
from lastlayer.calibration.points import HeldOutPoints
from lastlayer.linalg import TINY
from lastlayer.training import threads_for

LOG_2PI = float(np.log(2 * np.pi))
LIMITS = {
    "noise": (-7.0, 7.0),
    "slope": (-20.0, 20.0),
    "power": (-2.0, 1.5),
    "share": (-5.0, 0.0),
    "factor": (0.0, 4.0),
    "anchor": (-12.0, 2.0),
}
"""Bounds of log a, log b, log gamma, logit of the tails' share, log of their factor, log precision of the anchor."""
BELIEF = {
    "noise": (0.0, 3.0),
    "slope": (0.0, 5.0),
    "power": (0.0, 1.0),
    "share": (-2.0, 2.0),
    "factor": (2.0, 2.0),
    "anchor": (0.0, 2.0),
}
"""Mean and standard deviation of the same before any held-out point was seen: with few of them the curve stays near."""
OF_MIXTURES = ("share", "factor", "anchor")
STARTS = ((0.0, 0.0, 0.0), (-1.0, 1.0, -0.5), (0.0, 3.0, 0.0))
SHARPNESS = 2.0
"""Members speak with the weight of this power of their precision."""


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

    @classmethod
    def identity(cls, n_outputs: int) -> "Curve":
        """The posterior as it stands: var = sigma^2 (1 + v)."""
        return cls(np.ones(n_outputs), np.ones(n_outputs))

    def shape(self, ratio: Float[ndarray, "*s"]) -> Float[ndarray, "*s"]:
        """v^gamma, and beyond the reach its value there times v over the reach."""
        known = np.minimum(ratio, self.reach)
        value: ndarray = np.power(known, self.power) * (ratio / np.maximum(known, TINY))
        return value

    def epistemic(self, ratio: Float[ndarray, "*s"]) -> Float[ndarray, "*s q"]:
        """b v^gamma."""
        return self.shape(ratio)[..., None] * self.slope

    def factor(self, ratio: Float[ndarray, "*s"]) -> Float[ndarray, "*s q"]:
        """a + b v^gamma: the variance over that of the noise."""
        return self.noise + self.epistemic(ratio)

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
        """What they make of the variance."""
        return 1 + self.share * (self.factor - 1)

    def __str__(self) -> str:
        return f", {self.share:.0%} of it {self.factor:.1f} times as wide" if self.share else ""


@dataclass(frozen=True)
class Anchor:
    """The mean of the targets, to which a member's mean returns where the member knows little: see `anchored`."""

    precision: float = 0.0
    """With which targets were known beforehand, in units of standardised ones; 0: means stay where they are."""

    def __str__(self) -> str:
        return f", means return from {self.precision**-0.5:.1f} standard deviations on" if self.precision else ""


@dataclass(frozen=True)
class CalibrationPoints:
    """The held-out points, as a picture shows them: by the first network of the best strength."""

    ratio: Float[ndarray, " n"]
    squared_error: Float[ndarray, "n q"]
    """Of the mean where it came to lie, over the noise variance."""
    kind: ndarray


@dataclass(frozen=True)
class Calibration:
    """A curve for each strength of the prior, what they were fitted to, and the LPD they promise."""

    curves: dict[float, Curve]
    """By strength; the first is the one whose networks alone do best."""
    points: CalibrationPoints
    lpd: float
    """Mean log predictive density of the held-out points, standardised units, joint over the outputs."""
    lpd_before: float
    """The same without calibration."""
    tails: Tails = Tails()
    anchor: Anchor = Anchor()
    head: NoiseHead | None = None
    """What multiplies the noise at each input, if it depends on it."""
    alone: dict[float, float] = field(default_factory=dict)
    """LPD of the same points by the networks of each strength alone, with a curve but neither tails nor anchor."""

    @property
    def curve(self) -> Curve:
        """Of the best strength."""
        return next(iter(self.curves.values()))

    def __str__(self) -> str:
        n, others = len(self.points.ratio), len(self.curves) - 1
        more = f", and {others} more curves" if others else ""
        seen = f"LPD of {n} held-out points {self.lpd_before:.3f} -> {self.lpd:.3f}"
        return f"{self.curve}{self.tails}{self.anchor}{more}; {seen}"


def anchored(mean: Any, var: Any, centre: Any, precision: Any) -> Any:
    """Where the mean of a member that errs by `var` comes to lie, if targets are known as N(centre, 1 / precision).

    The variance stays what it was: it must not shrink where data end. Arrays, tensors, or symbols of an optimiser.
    """
    return centre + (mean - centre) / (1 + precision * var)


def precision_weights(log_var: Float[Tensor, "c n q"]) -> Float[Tensor, "c n"]:
    """Members speak with the weight of their squared precision at the point, its geometric mean over the outputs."""
    return torch.softmax(-SHARPNESS * log_var.mean(-1), dim=0)


def fit_curves(points: HeldOutPoints, *, mixture: bool, input_noise: bool = False) -> Calibration:
    """The curves of largest held-out LPD, held near the posterior as it stands by a weak prior.

    A smooth problem of 2 q + 1 numbers a strength (in a `mixture` three more, of tails and anchor): each strength alone
    from several starts, then all together; no grid, so no edge of one. With `input_noise` a network for the noise at
    each input joins in.
    """
    points = points.usable()
    n, q = points.targets.shape
    strengths = points.strengths
    if not n:
        empty = CalibrationPoints(np.empty(0), np.empty((0, q)), points.kind)
        nothing = float("nan")
        return Calibration(dict.fromkeys(strengths, Curve.identity(q)), empty, nothing, nothing)
    with threads_for(20 * points.mean.numel()):
        singles = {s: _Problem(points.of(s), [s], mixture=False) for s in strengths}
        numbers = {s: single.best([single.start(*start) for start in STARTS]) for s, single in singles.items()}
        alone = {s: single.lpd(numbers[s]) for s, single in singles.items()}
        strengths.sort(key=lambda s: -alone[s])
        problem = _Problem(points, strengths, mixture)
        x = problem.best([problem.join([numbers[s] for s in strengths]), problem.start()])
        if input_noise:
            problem = _Problem(points, strengths, mixture, NoiseHead.initial(points.inputs, q))
            x = problem.best([np.concatenate([x, problem.head_start()])])
    first = points.strength.tolist().index(strengths[0])
    mean = problem.members(torch.from_numpy(x))[0][first]
    squared = (points.targets - mean).square() / points.noise_var[first]
    shown = CalibrationPoints(points.ratio[first].numpy(), squared.numpy(), points.kind)
    before = _Problem(points, strengths, mixture=False)
    return Calibration(
        problem.curves(x),
        shown,
        problem.lpd(x),
        before.lpd(before.start()),
        problem.tails(x),
        problem.anchor(x),
        problem.head(torch.from_numpy(x)),
        alone,
    )


class _Problem:
    """Negative held-out LPD plus prior, of the numbers [log a, log b, log gamma] of each strength, one after the other,
    then (logit share, log factor) of the tails, the log precision of the anchor, and the weights of the head, where
    there are such."""

    def __init__(
        self, points: HeldOutPoints, strengths: list[float], mixture: bool, head: NoiseHead | None = None
    ) -> None:
        self.points, self.strengths, self.initial_head = points, strengths, head
        self.q = points.targets.shape[-1]
        self.each = ["noise"] * self.q + ["slope"] * self.q + ["power"]
        self.of_mixture = list(OF_MIXTURES) if mixture else []
        self.names = self.each * len(strengths) + self.of_mixture
        self.of_network = torch.tensor([strengths.index(s) for s in points.strength.tolist()])
        self.log_ratio = points.ratio.log()[..., None]
        self.log_noise = points.noise_var.log()
        self.centre, self.width = torch.tensor([BELIEF[name] for name in self.names], dtype=torch.float64).unbind(-1)

    def start(self, noise: float = 0.0, slope: float = 0.0, power: float = 0.0) -> ndarray:
        return self.join([np.array([noise] * self.q + [slope] * self.q + [power])] * len(self.strengths))

    def join(self, curves: list[ndarray]) -> ndarray:
        """The numbers of each curve, and those of the mixture as they are believed."""
        return np.concatenate([*curves, [BELIEF[name][0] for name in self.of_mixture]])

    def head_start(self) -> ndarray:
        return self.initial_head.numbers().numpy() if self.initial_head else np.empty(0)

    def head(self, x: Tensor) -> NoiseHead | None:
        return self.initial_head.with_numbers(x[len(self.names) :]) if self.initial_head else None

    def members(self, x: Tensor) -> tuple[Float[Tensor, "c n q"], Float[Tensor, "c n q"]]:
        """What each network says of each point: mean and log variance."""
        log_a, log_b, log_power = self._curves(x).split([self.q, self.q, 1], -1)
        log_a, log_b, log_power = (number[self.of_network][:, None] for number in (log_a, log_b, log_power))
        if (head := self.head(x)) is not None:
            log_a = log_a + head.log_factor(self.points.inputs)
        log_var = self.log_noise + torch.logaddexp(log_a, log_b + log_power.exp() * self.log_ratio)
        if not self.of_mixture:
            return self.points.mean, log_var
        return self.points.mean * torch.sigmoid(-self._mixture(x)[-1] - log_var), log_var  # `anchored`, in logarithms

    def log_density(self, x: Tensor) -> Float[Tensor, " n"]:
        """Of each point under the mixture of its networks."""
        mean, log_var = self.members(x)
        each = self._gaussian(mean, log_var)
        if self.of_mixture:
            share, factor, _ = self._mixture(x)
            log_in, log_out = (torch.nn.functional.logsigmoid(s * share) for s in (-1, 1))
            each = torch.logaddexp(log_in + each, log_out + self._gaussian(mean, log_var + factor))
        return torch.logsumexp(precision_weights(log_var).log() + each, dim=0)

    def _curves(self, x: Tensor) -> Float[Tensor, "s n"]:
        return x[: len(self.strengths) * len(self.each)].reshape(len(self.strengths), len(self.each))

    def _mixture(self, x: Tensor) -> Float[Tensor, " 3"]:
        """The numbers that all members share."""
        return x[len(self.names) - len(self.of_mixture) : len(self.names)]

    def _gaussian(self, mean: Tensor, log_var: Tensor) -> Tensor:
        return -0.5 * ((self.points.targets - mean).square() * (-log_var).exp() + log_var + LOG_2PI).sum(-1)

    def lpd(self, x: ndarray) -> float:
        with torch.no_grad():
            w = self.points.weight
            return float((w * self.log_density(torch.from_numpy(x))).sum() / w.sum())

    def value(self, x: ndarray) -> tuple[float, ndarray]:
        """To be minimised, and its gradient."""
        point = torch.tensor(x, requires_grad=True)
        prior = 0.5 * ((point[: len(self.names)] - self.centre) / self.width).square().sum()
        head = self.head(point)
        if head is not None:
            prior = prior + head.energy()
        loss = prior - (self.points.weight * self.log_density(point)).sum()
        loss.backward()
        assert point.grad is not None
        return float(loss.detach()), point.grad.numpy()

    def best(self, starts: list[ndarray]) -> ndarray:
        """The lowest of the minima that lie below the starts; the first start if none is finite."""
        ends = [self._solve(start) for start in starts]
        found = min((end for end in ends if np.isfinite(end[0])), key=lambda end: end[0], default=(0.0, starts[0]))
        return found[1]

    def _solve(self, start: ndarray) -> tuple[float, ndarray]:
        limits = [LIMITS[name] for name in self.names] + [(-np.inf, np.inf)] * (len(start) - len(self.names))
        end = minimize(self.value, start, jac=True, method="L-BFGS-B", bounds=limits, options={"maxiter": 500})
        return float(end.fun), end.x

    def curves(self, x: ndarray) -> dict[float, Curve]:
        numbers = np.exp(self._curves(torch.from_numpy(x)).numpy())
        return {
            s: Curve(own[: self.q], own[self.q : -1], float(own[-1]), reach=float(self.points.of(s).ratio.max()))
            for s, own in zip(self.strengths, numbers, strict=True)
        }

    def tails(self, x: ndarray) -> Tails:
        if not self.of_mixture:
            return Tails()
        share, factor, _ = self._mixture(torch.from_numpy(x))
        return Tails(float(share.sigmoid()), float(factor.exp()))

    def anchor(self, x: ndarray) -> Anchor:
        return Anchor(float(self._mixture(torch.from_numpy(x))[-1].exp())) if self.of_mixture else Anchor()
