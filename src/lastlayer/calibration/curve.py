"""From affine cost to variance: one monotone curve, calibrated on points that the features never saw.

    var = sigma^2 (a + b v^gamma),        v = phi' Lambda_bar^-1 phi (Theorem 2)

v orders points by how far they extrapolate; what the evidence gets wrong is the scale. a = b = gamma = 1 is the
Bayesian last layer as it stands, and Algorithm 1, which moves alpha alone, moves v in it.
"""

import math
from dataclasses import dataclass

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
}
"""Bounds of log a, log b, log gamma, logit of the tails' share, log of their factor."""
BELIEF = {"noise": (0.0, 3.0), "slope": (0.0, 5.0), "power": (0.0, 1.0), "share": (-2.0, 2.0), "factor": (2.0, 2.0)}
"""Mean and standard deviation of the same before any held-out point was seen: with few of them the curve stays near."""
STARTS = ((0.0, 0.0, 0.0), (-1.0, 1.0, -0.5), (0.0, 3.0, 0.0))


@dataclass(frozen=True)
class Curve:
    """var = sigma^2 (a + b v^gamma) for each output; with tails, a share of the probability has a larger variance."""

    noise: Float[ndarray, " q"]
    """a"""
    slope: Float[ndarray, " q"]
    """b"""
    power: float = 1.0
    """gamma"""
    tail_share: float = 0.0
    tail_factor: float = 1.0
    """The variance of the tails over that of the rest."""
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

    @property
    def widening(self) -> float:
        """What the tails make of the variance."""
        return 1 + self.tail_share * (self.tail_factor - 1)

    def __str__(self) -> str:
        a, b = (np.array2string(x, precision=3) for x in (self.noise, self.slope))
        tails = f", {self.tail_share:.0%} of it {self.tail_factor:.1f} times as wide" if self.tail_share else ""
        return f"var = noise * (a + b v^{self.power:.2f}), a = {a}, b = {b}{tails}"


@dataclass(frozen=True)
class CalibrationPoints:
    """The held-out points a curve was fitted to, as a picture shows them: by the first network of each."""

    ratio: Float[ndarray, " n"]
    squared_error: Float[ndarray, "n q"]
    """Over the noise variance."""
    kind: ndarray


@dataclass(frozen=True)
class Calibration:
    """A curve, what it was fitted to, and the LPD it promises."""

    curve: Curve
    points: CalibrationPoints
    lpd: float
    """Mean log predictive density of the held-out points, standardised units, joint over the outputs."""
    lpd_before: float
    """The same without calibration."""
    head: NoiseHead | None = None
    """What multiplies the noise at each input, if it depends on it."""

    def __str__(self) -> str:
        n = len(self.points.ratio)
        return f"{self.curve}; LPD of {n} held-out points {self.lpd_before:.3f} -> {self.lpd:.3f}"


def precision_weights(log_var: Float[Tensor, "c n q"]) -> Float[Tensor, "c n"]:
    """Members speak with the weight of their precision at the point: 1 / var, its geometric mean over the outputs."""
    return torch.softmax(-log_var.mean(-1), dim=0)


def fit_curve(points: HeldOutPoints, *, tails: bool, input_noise: bool = False) -> Calibration:
    """The curve of largest held-out LPD, held near the posterior as it stands by a weak prior.

    A smooth problem of 2 q + 1 numbers (two more with tails), solved from several starts; no grid, so no edge of one.
    With `input_noise` the best of them is then refined together with a network for the noise at each input.
    """
    points = points.usable()
    n, q = points.targets.shape
    if not n:
        empty = CalibrationPoints(np.empty(0), np.empty((0, q)), points.kind)
        return Calibration(Curve.identity(q), empty, float("nan"), float("nan"))
    problem = _Problem(points, tails)
    with threads_for(20 * points.mean.numel()):
        ends = [problem.solve(problem.start(*start)) for start in STARTS]
        x = min((end for end in ends if np.isfinite(end[0])), key=lambda end: end[0], default=(0.0, problem.start()))[1]
        if input_noise:
            problem = _Problem(points, tails, NoiseHead.initial(points.inputs, q))
            x = problem.solve(np.concatenate([x, problem.head_start()]))[1]
    squared = (points.targets - points.mean[0]).square() / points.noise_var[0]
    shown = CalibrationPoints(points.ratio[0].numpy(), squared.numpy(), points.kind)
    before = _Problem(points, tails=False)
    return Calibration(
        problem.curve(x), shown, problem.lpd(x), before.lpd(before.start()), problem.head(torch.from_numpy(x))
    )


class _Problem:
    """Negative held-out LPD plus prior, of the numbers [log a, log b, log gamma, (logit share, log factor), (head)]."""

    def __init__(self, points: HeldOutPoints, tails: bool, head: NoiseHead | None = None) -> None:
        self.points, self.tails, self.q, self.initial_head = points, tails, points.targets.shape[-1], head
        self.names = ["noise"] * self.q + ["slope"] * self.q + ["power"] + (["share", "factor"] if tails else [])
        self.log_ratio = points.ratio.log()[..., None]
        self.log_noise = points.noise_var.log()
        self.squared = (points.targets - points.mean).square()
        self.centre, self.width = torch.tensor([BELIEF[name] for name in self.names], dtype=torch.float64).unbind(-1)

    def start(self, noise: float = 0.0, slope: float = 0.0, power: float = 0.0) -> ndarray:
        tail = [BELIEF["share"][0], BELIEF["factor"][0]] if self.tails else []
        return np.array([noise] * self.q + [slope] * self.q + [power] + tail)

    def head_start(self) -> ndarray:
        return self.initial_head.numbers().numpy() if self.initial_head else np.empty(0)

    def head(self, x: Tensor) -> NoiseHead | None:
        return self.initial_head.with_numbers(x[len(self.names) :]) if self.initial_head else None

    def log_density(self, x: Tensor) -> Float[Tensor, " n"]:
        """Of each point under the mixture of its networks."""
        q, head = self.q, self.head(x)
        log_a = x[:q] if head is None else x[:q] + head.log_factor(self.points.inputs)
        log_var = self.log_noise + torch.logaddexp(log_a, x[q : 2 * q] + x[2 * q].exp() * self.log_ratio)
        each = self._gaussian(log_var)
        if self.tails:
            share, factor = x[2 * q + 1 : 2 * q + 3]
            log_in, log_out = (torch.nn.functional.logsigmoid(s * share) for s in (-1, 1))
            each = torch.logaddexp(log_in + each, log_out + self._gaussian(log_var + factor))
        return torch.logsumexp(precision_weights(log_var).log() + each, dim=0)

    def _gaussian(self, log_var: Tensor) -> Tensor:
        return -0.5 * (self.squared * (-log_var).exp() + log_var + LOG_2PI).sum(-1)

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

    def solve(self, start: ndarray) -> tuple[float, ndarray]:
        limits = [LIMITS[name] for name in self.names] + [(-np.inf, np.inf)] * (len(start) - len(self.names))
        end = minimize(self.value, start, jac=True, method="L-BFGS-B", bounds=limits, options={"maxiter": 500})
        return float(end.fun), end.x

    def curve(self, x: ndarray) -> Curve:
        q, (share, factor) = self.q, (0.0, 1.0)
        if self.tails:
            share, factor = 1 / (1 + np.exp(-x[2 * q + 1])), np.exp(x[2 * q + 2])
        return Curve(
            np.exp(x[:q]),
            np.exp(x[q : 2 * q]),
            power=float(np.exp(x[2 * q])),
            reach=float(self.points.ratio.max()),
            tail_share=float(share),
            tail_factor=float(factor),
        )
