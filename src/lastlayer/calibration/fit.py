"""Fitting the curves: maximum held-out log predictive density, under a weak prior around the uncalibrated posterior."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits
from torch import Tensor

from lastlayer._internal.chunks import row_chunks
from lastlayer.calibration.curve import Calibration, CalibrationPoints, Curve, NoiseHead, Outside, Shrinkage, Tails
from lastlayer.calibration.likelihood import NO_MIXTURE, Likelihood, Said
from lastlayer.calibration.points import HeldOutPoints
from lastlayer.formula.ops import TorchOps
from lastlayer.formula.predictive import log_noise_factor
from lastlayer.settings.types import ADDITIVE, FOURIER, Family

LIMITS = {
    "noise": (-7.0, 7.0),
    "slope": (-20.0, 20.0),
    "power": (-2.0, 1.5),
    "trust": (-10.0, 10.0),
    "share": (-5.0, 0.0),
    "factor": (0.0, 4.0),
    "shrinkage": (-12.0, 2.0),
    "outside": (-10.0, 8.0),
}
"""Bounds of log a, log b, log gamma, log trust, logit of the tails' share, log of their factor, log precision of the
shrinkage, log factor of the process outside the data."""
PRIOR = {
    "noise": (0.0, 3.0),
    "slope": (0.0, 5.0),
    "power": (0.0, 1.0),
    "trust": (0.0, 1.0),
    "share": (-2.0, 2.0),
    "factor": (2.0, 2.0),
    "shrinkage": (0.0, 2.0),
    "outside": (3.0, 1.0),
}
"""Prior mean and standard deviation of the same: with few held-out points the curve stays near the mean."""
NO_FACTOR = torch.zeros(())
OF_MIXTURES = ("share", "factor", "shrinkage", "outside")
STARTS = ((0.0, 0.0, 0.0), (-1.0, 1.0, -0.5), (0.0, 3.0, 0.0))
SHARPNESS = 1.0
"""Members are weighted by this power of their precision."""
FIRST_POINTS, MOST_POINTS = 1_000, 5_000
"""Points of each kind in the first and in the last descent; more would add less than 0.001 to the LPD of new points."""
AT_ONCE = 10_000
"""Numbers per array in a chunk, so that it stays in the processor's cache."""
UNKNOWN, MANY_UNKNOWN = 3, 8.0
"""Parameters of a curve that are found from the points, and the smallest number of points assumed for widening it."""
DECIDING_POINTS, DECIDING_UNITS, WORTH = 150, 3, 0.01
"""Points, units and gain in log density required to find that the noise depends on the input.

At least so many points (at most four times as many are used), a head of so many units, and at least so large a gain.
"""
DENSE = 200
"""Number of parameters up to which a dense matrix of curvatures is cheap."""


def fit_curves(points: HeldOutPoints, *, mixture: bool, input_noise: bool | None = False) -> Calibration:
    """Fit the curves of largest held-out LPD, under a weak prior around the uncalibrated posterior."""
    with threadpool_limits(1, "blas"):  # the products are too small for a second thread to help
        return _fit_curves(points.usable(), mixture, input_noise)


def _fit_curves(points: HeldOutPoints, mixture: bool, input_noise: bool | None) -> Calibration:
    n, q = points.targets.shape
    families = list(dict.fromkeys(points.families))
    if not n:
        empty = CalibrationPoints(np.empty(0), np.empty((0, q)), points.kind)
        return Calibration(dict.fromkeys(families, Curve.identity(q)), empty, lpd=math.nan, lpd_before=math.nan)
    some = points.some(MOST_POINTS)
    singles = {s: CurveProblem(some.of(s), [s], mixture=False) for s in families}
    numbers = {s: p.best([p.lowest([p.start(*start) for start in STARTS])]) for s, p in singles.items()}
    alone = {s: CurveProblem(points.of(s), [s], mixture=False).lpd(numbers[s]) for s in families}
    families.sort(key=lambda s: -alone[s])
    problem, head = CurveProblem(points.some(FIRST_POINTS), families, mixture), None
    x = problem.best([problem.start(curves=[numbers[s] for s in families]), problem.start()])
    x = CurveProblem(some, families, mixture).best([x])
    if input_noise is None:
        input_noise = noise_depends_on_input(points, families, mixture, x)
    if input_noise:
        head = NoiseHead.initial(points.inputs, q)
        x = CurveProblem(some, families, mixture, head).best([np.concatenate([x, head.numbers().numpy()])])
    uncalibrated = CurveProblem(points, families, mixture=False, sharpness=0.0)
    lpd_before = uncalibrated.lpd(uncalibrated.start())
    problem = CurveProblem(points, families, mixture, head)
    return problem.calibration(problem.widened(x), alone, lpd_before)


def noise_depends_on_input(points: HeldOutPoints, families: list[Family], mixture: bool, x: ndarray) -> bool:
    """Whether a small network for the noise, fitted to half of the points, raises the density of the other half."""
    single = np.flatnonzero(points.single)
    if len(single) < DECIDING_POINTS or points.inputs.dim() != 2:
        return False
    order = np.random.default_rng(0).permutation(single)[: 4 * DECIDING_POINTS]
    halves, gains = [points[np.sort(order[i::2])] for i in range(2)], []
    for fitted, judged in (halves, halves[::-1]):
        head = NoiseHead.initial(points.inputs, points.targets.shape[1], units=DECIDING_UNITS)
        found = CurveProblem(fitted, families, mixture, head).best([np.concatenate([x, head.numbers().numpy()])])
        with_head = CurveProblem(judged, families, mixture, head).log_density(found)
        gains.append(with_head - CurveProblem(judged, families, mixture).log_density(x))
    gain, weight = np.concatenate(gains), np.concatenate([half.weight.numpy() for half in halves[::-1]])
    mean = float(np.average(gain, weights=weight))
    spread = math.sqrt(float(np.average((gain - mean) ** 2, weights=weight)) / len(gain))
    return mean > max(WORTH, 2 * spread)


class CurveProblem:
    """Negative held-out LPD plus prior, as a function of all calibration parameters."""

    def __init__(
        self,
        points: HeldOutPoints,
        families: list[Family],
        mixture: bool,
        head: NoiseHead | None = None,
        *,
        sharpness: float = SHARPNESS,
    ) -> None:
        self.points, self.families, self.initial_head = points, families, head
        c, n, self.q = points.mean.shape
        self.of_mixture = list(OF_MIXTURES) if mixture else []
        self.names = [*(["noise"] * self.q + ["slope"] * self.q + ["power", "trust"]) * len(families), *self.of_mixture]
        self.centre, self.width = np.array([PRIOR[name] for name in self.names]).T
        curve_of = np.array([families.index(own) for own in points.families])
        chunks = [points[np.arange(n)[rows]] for rows in row_chunks(n, max(1, AT_ONCE // (c * self.q)))]
        self.pieces = [Likelihood(chunk, curve_of, sharpness) for chunk in chunks]

    def start(
        self, noise: float = 0.0, slope: float = 0.0, power: float = 0.0, *, curves: list[ndarray] | None = None
    ) -> ndarray:
        """Starting values: the parameters of each curve, and those of the mixture at their prior means."""
        alike = [np.array([noise] * self.q + [slope] * self.q + [power, 0.0])] * len(self.families)
        return np.concatenate([*(curves or alike), [PRIOR[name][0] for name in self.of_mixture]])

    def lowest(self, xs: list[ndarray]) -> ndarray:
        """Return the candidate with the lowest value; the first one if none is finite."""
        return min(xs, key=lambda x: np.nan_to_num(self.value(x)[0], nan=np.inf))

    def parts(self, x: ndarray) -> tuple[Float[ndarray, "s p"], Float[ndarray, " t"], NoiseHead | None]:
        """Split the vector into the parameters of the curves, those of the mixture, and the noise head."""
        n, of_mixture = len(self.names), len(self.of_mixture)
        head = self.initial_head and self.initial_head.with_numbers(torch.tensor(x[n:]))
        return x[: n - of_mixture].reshape(len(self.families), -1), x[n - of_mixture : n], head

    def said(self, x: ndarray, head: NoiseHead | None) -> Iterator[tuple[Said, Likelihood, Tensor]]:
        """Evaluate the mixture chunk by chunk, and the log factor of the noise."""
        curves, of_mixture, _ = self.parts(x)
        for piece in self.pieces:
            factor = NO_FACTOR if head is None else log_noise_factor(TorchOps, head, piece.inputs.to(head.low))
            numbers = curves, of_mixture if self.of_mixture else NO_MIXTURE, factor.detach().numpy()
            yield piece.at(*numbers), piece, factor

    def log_density(self, x: ndarray) -> Float[ndarray, " n"]:
        """Log density of each point under the mixture of its networks."""
        return np.concatenate([said[0] for said, _, _ in self.said(x, self.parts(x)[2])])

    def lpd(self, x: ndarray) -> float:
        """Weighted mean log density of the points."""
        return float(np.average(self.log_density(x), weights=self.points.weight.numpy()))

    def value(self, x: ndarray) -> tuple[float, ndarray]:
        """Objective to be minimised, and its gradient."""
        away, head = (x[: len(self.names)] - self.centre) / self.width, self.parts(x)[2]
        loss, slope = 0.5 * float(away @ away), away / self.width
        learned = [] if head is None else [number.requires_grad_() for number in (head.U, head.u, head.V)]
        if head is not None:
            prior = head.neg_log_prior()
            prior.backward()
            loss += prior.item()
        for (log_density, _, slopes), piece, factor in self.said(x, head):
            loss -= float(piece.weight @ log_density)
            slope = slope - np.concatenate([slopes[0].ravel(), slopes[1][: len(self.of_mixture)]])
            if head is not None:
                factor.backward(torch.from_numpy(-slopes[2]))
        return loss, np.concatenate([slope, *(number.grad.flatten() for number in learned)])  # type: ignore[union-attr]

    def best(self, starts: list[ndarray]) -> ndarray:
        """Minimise from several starts, and return the lowest minimum."""
        limits = [LIMITS[name] for name in self.names] + [(-np.inf, np.inf)] * (len(starts[0]) - len(self.names))
        given = {"jac": True, "bounds": limits}
        if len(limits) <= DENSE:
            options = {"maxiter": 500, "ftol": 1e-7}
            starts = starts + [minimize(self.value, x, method="SLSQP", options=options, **given).x for x in starts]
        options = {"maxiter": 500, "maxcor": 40}
        found: ndarray = minimize(self.value, self.lowest(starts), method="L-BFGS-B", options=options, **given).x
        return found

    def widened(self, x: ndarray) -> ndarray:
        """Multiply a and b of every curve by (n + p) / (n - p - 2), for n points and p = 3 parameters of a curve."""
        n = max(float(self.points.weight[torch.from_numpy(self.points.single)].sum()), MANY_UNKNOWN)
        of_variance = np.isin(self.names, ["noise", "slope"])
        wider = x.copy()
        wider[: len(self.names)][of_variance] += math.log((n + UNKNOWN) / (n - UNKNOWN - 2))
        return wider

    def calibration(self, x: ndarray, alone: dict[Family, float], lpd_before: float) -> Calibration:
        """Assemble the calibration, and the points for plots."""
        points, (curves, of_mixture, head) = self.points, self.parts(x)
        reach = [float(points.of(s).cost.max()) for s in self.families]
        first = points.families.index(self.families[0])
        mean = np.concatenate([said[1][first] for said, _, _ in self.said(x, head)])
        squared = (points.targets.numpy() - mean) ** 2 / points.noise_var[first].numpy()
        cost = points.cost[first] if points.cost.dim() == 2 else points.cost[first].mean(-1)
        tails, shrinkage, outside, additive_inside = Tails(), Shrinkage(), None, None
        if self.of_mixture:
            odds, factor, precision, of_process = np.exp(of_mixture).tolist()
            tails, shrinkage = Tails(odds / (1 + odds), factor), Shrinkage(precision)
            outside = None if points.log_far is None else Outside(of_process, points.inside[FOURIER])
            additive_inside = points.inside.get(ADDITIVE)
        return Calibration(
            {
                s: Curve(own[: self.q], own[self.q : -2], float(own[-2]), farthest, float(own[-1]))
                for s, own, farthest in zip(self.families, np.exp(curves), reach, strict=True)
            },
            CalibrationPoints(cost.numpy(), squared, points.kind),
            self.lpd(x),
            lpd_before,
            tails,
            shrinkage,
            outside,
            additive_inside,
            head,
            alone,
        )
