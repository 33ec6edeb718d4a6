"""Fitting the curves: maximum held-out log predictive density of the mixture, under a weak prior; gradients by hand."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits
from torch import Tensor

from lastlayer._internal.work import row_chunks
from lastlayer.calibration.curve import (
    LOG_FRACTION,
    OF_MIXTURE,
    Calibration,
    CalibrationPoints,
    Curve,
    NoiseHead,
    Outside,
    Shrinkage,
    Tails,
)
from lastlayer.calibration.points import HeldOutPoints
from lastlayer.formula.ops import NumPyOps, TorchOps
from lastlayer.formula.predictive import State, log_noise_factor, log_shape, log_variance, member_weights, shrunk
from lastlayer.likelihoods.base import Gaussian, HeldOutReadings, Likelihood, Predicted, by_output
from lastlayer.settings.types import ADDITIVE, FOURIER, Family

NO_MIXTURE = np.array([-math.inf, 0.0, -math.inf, -math.inf])
"""Values of `OF_MIXTURE` that switch all of them off."""
NO_FACTOR = torch.zeros(())
SHARPNESS = 1.0
"""Members are weighted by this power of their precision."""
FIRST_POINTS, SOME_POINTS, MOST_POINTS, SHARE = 500, 1_500, 5_000, 8
"""Points of each kind in the first descent; in the last one, one in `SHARE`, at least some and at most so many: curves
need no more, noise that depends on the input does."""
AT_ONCE = 10_000
"""Numbers per array in a chunk, so that it stays in the processor's cache."""
UNKNOWN, MANY_UNKNOWN = 3, 8.0
"""Parameters of a curve that are found from the points, and the smallest number of points assumed for widening it."""
DECIDING_POINTS, DECIDING_UNITS, WORTH = 150, 3, 0.01
"""For noise that depends on the input: fewest points (four times as many are used at most), units, and least gain."""
DENSE = 200
"""Number of parameters up to which a dense matrix of curvatures is cheap."""


@threadpool_limits.wrap(limits=1, user_api="blas")  # type: ignore[untyped-decorator]  # the products are small
def fit_curves(
    points: HeldOutPoints,
    *,
    mixture: bool,
    input_noise: bool | None = False,
    likelihood: Likelihood = Gaussian(),  # noqa: B008
) -> Calibration:
    """Fit the curves of largest held-out LPD, under a weak prior around the uncalibrated posterior."""
    points = points.usable()
    n, q = points.readings.t.shape
    families = list(dict.fromkeys(points.families))
    if not n:
        empty = CalibrationPoints(np.empty(0), np.empty((0, q)), points.kind)
        return Calibration(dict.fromkeys(families, Curve.identity(q)), empty, lpd=math.nan, lpd_before=math.nan)
    some = points.some(min(MOST_POINTS, max(SOME_POINTS, n // SHARE)))
    singles = {s: CurveProblem(some.of(s), [s], mixture=False, likelihood=likelihood) for s in families}
    numbers = {s: p.best([*p.starts]) for s, p in singles.items()}
    alone = {s: replace(p, points=points.of(s)).lpd(numbers[s]) for s, p in singles.items()}
    families.sort(key=lambda s: -alone[s])
    first = CurveProblem(points.some(FIRST_POINTS), families, mixture, likelihood=likelihood)
    own = [numbers[s] for s in families]
    x = first.best([np.concatenate([*own, first.starts[0, first.n_curves :]]), first.starts[0]])
    whole, head = replace(first, points=some), None
    x = whole.best([x])
    if input_noise is None:
        input_noise = noise_depends_on_input(points, whole, x)
    if input_noise:
        head = NoiseHead.initial(points.inputs, q)
        x = replace(whole, head=head).best([np.concatenate([x, head.numbers().numpy()])])
    uncalibrated = CurveProblem(points, families, mixture=False, likelihood=likelihood, sharpness=0.0)
    found = replace(whole, points=points, head=head)
    return found.calibration(found.widened(x), alone, uncalibrated.lpd(uncalibrated.starts[0]))


def noise_depends_on_input(points: HeldOutPoints, problem: "CurveProblem", x: ndarray) -> bool:
    """Whether a small network for the noise, fitted to half of the points, raises the density of the other half."""
    single = np.flatnonzero(points.single)
    if len(single) < DECIDING_POINTS or points.inputs.dim() != 2:
        return False
    order = np.random.default_rng(0).permutation(single)[: 4 * DECIDING_POINTS]
    halves, gains = [points[np.sort(order[i::2])] for i in range(2)], []
    for fitted, judged in (halves, halves[::-1]):
        head = NoiseHead.initial(points.inputs, problem.q, units=DECIDING_UNITS)
        with_head, without = replace(problem, points=fitted, head=head), replace(problem, points=judged)
        found = with_head.best([np.concatenate([x, head.numbers().numpy()])])
        gains.append(replace(with_head, points=judged).log_density(found) - without.log_density(x))
    gain, weight = np.concatenate(gains), np.concatenate([half.weight.numpy() for half in halves[::-1]])
    mean = float(np.average(gain, weights=weight))
    spread = math.sqrt(float(np.average((gain - mean) ** 2, weights=weight)) / len(gain))
    return mean > max(WORTH, 2 * spread)


def of_each(numbers: Float[ndarray, "*s p"], n_outputs: int) -> list[ndarray]:
    """Split numbers into those of each of `Curve.PARAMETERS`."""
    ends = np.cumsum([n_outputs if parameter.by_output else 1 for parameter in Curve.PARAMETERS])
    return np.split(numbers, ends[:-1], axis=-1)


class Density(NamedTuple):
    """Log density of each point, and the slopes of its weighted sum."""

    log_density: Float[ndarray, " n"]
    mean: Float[ndarray, "c n q"]
    """Mean of each network, shrunk."""
    by_curves: Float[ndarray, "s p"]
    by_mixture: Float[ndarray, " 4"]
    by_log_factor: Float[ndarray, "n q"]
    """Slopes with respect to the log factor of the noise at each point."""


class MixtureDensity:
    """Density of held-out points; `curve_of` is the index of each network's curve."""

    def __init__(
        self, points: HeldOutPoints, likelihood: Likelihood, curve_of: Int[ndarray, " c"], sharpness: float
    ) -> None:
        self.likelihood, self.curve_of, self.sharpness = likelihood, curve_of, sharpness
        self.log_fraction = np.array([LOG_FRACTION.get(family, 0.0) for family in points.families])[:, None, None]
        # the networks of a family share its trust
        self.log_share = -np.log([points.families.count(family) for family in points.families])[:, None, None]
        self.log_far = None if points.log_far is None else points.log_far.numpy()[:, None]
        log_cost = (points.cost if points.cost.dim() > 2 else points.cost[..., None]).log().expand_as(points.mean)
        self.mean, self.log_noise_var, self.log_cost = (
            by_output(x.numpy()) for x in (points.mean, points.noise_var.log(), log_cost)
        )
        correlation = None if points.correlation is None else points.correlation.numpy()
        self.readings = HeldOutReadings.of(points.readings, correlation)
        self.inputs, self.weight = points.inputs, points.weight.numpy()

    @np.errstate(all="ignore")
    def at(
        self, curves: Float[ndarray, "s p"], of_mixture: Float[ndarray, " 4"], log_factor: ndarray | float
    ) -> Density:
        """Evaluate the mixture; slopes are named after their variable."""
        ops, q = NumPyOps, self.mean.shape[-1]
        share, wider, log_precision, log_outside = of_mixture
        log_noise, log_slope, log_power, log_trust = of_each(curves[self.curve_of, None], q)
        per_variance = (self.log_noise_var + log_slope).mean(-1, keepdims=True)
        curve = State(
            log_noise=log_noise,
            log_slope=log_slope,
            power=np.exp(log_power),
            log_trust=log_trust,
            log_reach=math.inf,
            log_share=log_outside + self.log_fraction - per_variance,
        )
        # variances: inside the data, and with what the process adds outside
        inside, shape = (log_shape(ops, curve, self.log_cost, far) for far in (None, self.log_far))
        log_var = self.log_noise_var + log_variance(ops, curve, shape, log_factor)
        epistemic = self.log_noise_var + curve.log_slope + shape
        noise = self.log_noise_var + curve.log_noise + log_factor
        own_var = self.log_noise_var + log_variance(ops, curve, inside, log_factor)
        # shrunk means, weights and densities
        kept = shrunk(ops, 1.0, own_var, 0.0, log_precision)  # fraction of the mean
        mean = kept * self.mean
        weights = member_weights(ops, log_var, self.sharpness, curve.log_trust + self.log_share)[..., 0]
        predicted = Predicted(mean, log_var, epistemic, noise, np.log(weights))
        marginal = self.likelihood.log_marginal(self.readings, predicted, (share, wider))
        joint = marginal.log_density
        top = joint.max(0)
        log_density = top + np.log(np.exp(joint - top).sum(0))
        # slopes, from the density of the whole back to the densities of the networks, their variances and the curves
        rho = self.weight * np.exp(joint - log_density)
        by = marginal.slopes(rho)
        by_weight = rho - self.weight * weights
        by_log_var = -(self.sharpness / q * by_weight)[..., None] + by.log_var
        part = np.exp(epistemic - log_var)  # epistemic fraction of the variance
        by_epistemic, by_noise = by.log_epistemic + by_log_var * part, by.log_noise + by_log_var * (1 - part)
        by_inside = by_epistemic * np.exp(inside - shape)
        by_far = (by_epistemic - by_inside).sum((1, 2))[:, None]
        by_shrinkage = by.mean * mean * (kept - 1)
        own_part = np.exp(self.log_noise_var + curve.log_slope + inside - own_var)
        by_own, by_noise = by_shrinkage * own_part, by_noise + by_shrinkage * (1 - own_part)
        by_slope = (by_epistemic + by_own).sum(1) - by_far / q
        by_power = ((by_inside + by_own) * inside).sum((1, 2))  # gamma log v is its own slope in log gamma
        each = np.column_stack([by_noise.sum(1), by_slope, by_power, by_weight.sum(1)])
        by_curves = (self.curve_of == np.arange(len(curves))[:, None]) @ each
        by_mixture = np.array([*by.tails, by_shrinkage.sum(), by_far.sum()])
        return Density(log_density, mean, by_curves, by_mixture, by_noise.sum(0))


@dataclass(eq=False)
class CurveProblem:
    """Negative held-out LPD plus prior, as a function of all calibration parameters."""

    points: HeldOutPoints
    families: list[Family]
    mixture: bool
    head: NoiseHead | None = None
    """Initial noise head; None: the noise does not depend on the input."""
    likelihood: Likelihood = field(default_factory=Gaussian)
    sharpness: float = SHARPNESS

    def __post_init__(self) -> None:
        c, n, self.q = self.points.mean.shape
        of_curve = [p for p in Curve.PARAMETERS for _ in range(self.q if p.by_output else 1)]
        self.n_curves = len(of_curve) * len(self.families)
        self.parameters = [*of_curve * len(self.families), *(OF_MIXTURE if self.mixture else ())]
        self.starts = np.array([parameter.starts for parameter in self.parameters]).T
        self.centre, self.width = np.array([parameter.prior for parameter in self.parameters]).T
        curve_of = np.array([self.families.index(own) for own in self.points.families])
        chunks = [self.points[np.arange(n)[rows]] for rows in row_chunks(n, max(1, AT_ONCE // (c * self.q)))]
        self.pieces = [MixtureDensity(chunk, self.likelihood, curve_of, self.sharpness) for chunk in chunks]

    def parts(self, x: ndarray) -> tuple[Float[ndarray, "s p"], Float[ndarray, " 4"], NoiseHead | None]:
        """Split the vector into the parameters of the curves, those of the mixture, and the noise head."""
        n, of_curves = len(self.parameters), x[: self.n_curves].reshape(len(self.families), -1)
        head = self.head and self.head.with_numbers(torch.tensor(x[n:]))
        return of_curves, x[self.n_curves : n] if self.mixture else NO_MIXTURE, head

    def densities(
        self, curves: Float[ndarray, "s p"], of_mixture: Float[ndarray, " 4"], head: NoiseHead | None
    ) -> Iterator[tuple[Density, MixtureDensity, Tensor]]:
        """Evaluate the mixture chunk by chunk, and the log factor of the noise."""
        for piece in self.pieces:
            factor = NO_FACTOR if head is None else log_noise_factor(TorchOps, head, piece.inputs.to(head.low))
            yield piece.at(curves, of_mixture, factor.detach().numpy()), piece, factor

    def log_density(self, x: ndarray) -> Float[ndarray, " n"]:
        """Log density of each point under the mixture of its networks."""
        return np.concatenate([found.log_density for found, _, _ in self.densities(*self.parts(x))])

    def lpd(self, x: ndarray) -> float:
        """Weighted mean log density of the points."""
        return float(np.average(self.log_density(x), weights=self.points.weight.numpy()))

    def value(self, x: ndarray) -> tuple[float, ndarray]:
        """Objective to be minimised, and its gradient."""
        n, (curves, of_mixture, head) = len(self.parameters), self.parts(x)
        away = (x[:n] - self.centre) / self.width
        loss, slope = 0.5 * float(away @ away), away / self.width
        learned = [] if head is None else [number.requires_grad_() for number in (head.U, head.u, head.V)]
        if head is not None:
            prior = head.neg_log_prior()
            prior.backward()
            loss += prior.item()
        for found, piece, factor in self.densities(curves, of_mixture, head):
            loss -= float(piece.weight @ found.log_density)
            slope = slope - np.concatenate([found.by_curves.ravel(), found.by_mixture])[:n]
            if head is not None:
                factor.backward(torch.from_numpy(-found.by_log_factor))
        return loss, np.concatenate([slope, *(number.grad.flatten() for number in learned)])  # type: ignore[union-attr]

    def best(self, starts: list[ndarray]) -> ndarray:
        """Minimise from the lowest of several starts, the first one if none has a finite value."""
        lowest = lambda xs: min(xs, key=lambda x: np.nan_to_num(self.value(x)[0], nan=np.inf))
        limits = [parameter.bounds for parameter in self.parameters]
        limits += [(-np.inf, np.inf)] * (len(starts[0]) - len(limits))
        given = {"jac": True, "bounds": limits}
        x: ndarray = lowest(starts)
        if len(limits) <= DENSE:
            options = {"maxiter": 500, "ftol": 1e-7}
            x = lowest([x, minimize(self.value, x, method="SLSQP", options=options, **given).x])
        options = {"maxiter": 500, "maxcor": 40}
        found: ndarray = minimize(self.value, x, method="L-BFGS-B", options=options, **given).x
        return found

    def widened(self, x: ndarray) -> ndarray:
        """Multiply a and b of every curve by (n + p) / (n - p - 2), for n points and p = 3 parameters of a curve."""
        n = max(float(self.points.weight[torch.from_numpy(self.points.single)].sum()), MANY_UNKNOWN)
        of_variance = np.isin([parameter.name for parameter in self.parameters], ["noise", "slope"])
        wider = x.copy()
        wider[: len(self.parameters)][of_variance] += math.log((n + UNKNOWN) / (n - UNKNOWN - 2))
        return wider

    def calibration(self, x: ndarray, alone: dict[Family, float], lpd_before: float) -> Calibration:
        """Assemble the calibration, and the points for plots."""
        points, (numbers, of_mixture, head) = self.points, self.parts(x)
        curves = {}
        for family, own in zip(self.families, np.exp(numbers), strict=True):
            parts = zip(Curve.PARAMETERS, of_each(own, self.q), strict=True)
            words: dict[str, Any] = {p.name: part if p.by_output else float(part[0]) for p, part in parts}
            curves[family] = Curve(**words, reach=float(points.of(family).cost.max()))
        first = points.families.index(self.families[0])
        mean = np.concatenate([found.mean[first] for found, _, _ in self.densities(numbers, of_mixture, head)])
        squared = (points.readings.values.numpy() - mean) ** 2 / points.noise_var[first].numpy()
        cost = points.cost[first] if points.cost.dim() == 2 else points.cost[first].mean(-1)
        shown = CalibrationPoints(cost.numpy(), squared, points.kind)
        calibration = Calibration(curves, shown, self.lpd(x), lpd_before, head=head, alone=alone)
        if not self.mixture:
            return calibration
        odds, factor, precision, of_process = np.exp(of_mixture).tolist()
        return replace(
            calibration,
            tails=Tails(odds / (1 + odds), factor),
            shrinkage=Shrinkage(precision),
            outside=None if points.log_far is None else Outside(of_process, points.inside[FOURIER]),
            additive_inside=points.inside.get(ADDITIVE),
        )
