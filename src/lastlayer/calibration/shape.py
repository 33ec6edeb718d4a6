"""The shape of the noise: Gaussians beside the calibrated mixture, with weights that depend on the input."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits
from torch import Tensor

from lastlayer.formula.ops import TorchOps
from lastlayer.formula.predictive import WIDEST, State, gaussians

logger = logging.getLogger(__name__)

FEWEST, REPEATED, RARE, COMMON = 150, 5, 0.002, 0.05
"""Fewest held-out points; targets are levels if values that occur more than so many times, and in more than this share
of the points, together make up more than that share."""
RESIDUALS, START_SHARE = (-1.5, -0.5, 0.5, 1.5), 0.05
"""First centres of the Gaussians that follow the mixture, in its standard deviations; their weight at the start."""
FEW_KNOTS, MANY_KNOTS, POINTS_PER_KNOT = 12, 24, 100
UNITS, LARGE = 16, 12_000
"""Hidden units; number of points from which the recipe is that of large tables."""
PENALTIES, FOLDS, CHECKS = (3.0, 30.0), 4, (10, 20, 40, 80)
WORTH, SURE = 0.01, 3.0
"""Least gain in held-out log density, and the number of its standard errors that it must exceed."""
FIRST_POINTS, FIRST_STEPS, FIRST_SURE = 1_500, 15, 1.0
"""Points and iterations of the first try, and the standard errors from which the whole search is worth its time."""
BATCH, EPOCHS, RATE = 512, 40, 1e-2


@dataclass(frozen=True)
class ShapeHead:
    """A network of the inputs and of the mixture's mean and log standard deviation, all clipped to their range.

    Its outputs are the log weights, centres and log widths of Gaussians; the first stands for the mixture itself.
    Those that follow the mixture have centres and widths in units of its standard deviation, the others stay in place.
    """

    low: Float[Tensor, " inputs"]
    high: Float[Tensor, " inputs"]
    U: Float[Tensor, "inputs units"]
    u: Float[Tensor, " units"]
    V: Float[Tensor, "3 units gaussians"]
    v: Float[Tensor, "3 gaussians"]
    follows: Float[Tensor, " gaussians"]
    """1 for Gaussians that follow the mixture, 0 for those at knots."""
    reach: float
    """Affine cost of the process, or of the best family, from which on the mixture itself comes back."""
    gain: float
    """Gain in held-out log density."""

    def state(self) -> State:
        """The numbers that the formula takes."""
        first = torch.zeros_like(self.follows)
        first[0] = 1.0
        V = self.V.movedim(0, 1).flatten(1)
        own = {name: getattr(self, name) for name in ("low", "high", "U", "u", "follows")}
        return State(**own, V=V, v=self.v.flatten(), first=first)

    def __str__(self) -> str:
        fixed = int((self.follows == 0).sum())
        return f", shape of {len(self.follows) - 1} Gaussians ({fixed} fixed): {self.gain:+.3f}"


@dataclass(frozen=True)
class ShapePoints:
    """Held-out targets of one output and the calibrated mixture there, in standardised units."""

    z: Float[Tensor, "n d"]
    t: Float[Tensor, "n 1"]
    mean: Float[Tensor, "n 1"]
    std: Float[Tensor, "n 1"]
    log_density: Float[Tensor, "n 1"]
    weight: Float[Tensor, " n"]
    cost: Float[Tensor, " n"]
    """Affine cost by the process, or else by the best family."""

    def __getitem__(self, rows: ndarray | Tensor) -> "ShapePoints":
        return ShapePoints(*(getattr(self, part.name)[rows] for part in fields(self)))

    def inputs(self) -> Float[Tensor, "n inputs"]:
        """What the network is given."""
        return torch.cat([self.z, self.mean, self.std.log()], 1)

    def average(self, values: Float[ndarray, "n *s"]) -> Float[ndarray, "*s"]:
        """Weighted mean over the points."""
        return np.asarray(np.average(values, axis=0, weights=self.weight.numpy()))


def is_gain(gain: Float[ndarray, " n"], weight: Float[ndarray, " n"], *, least: float, sure: float) -> bool:
    """Whether the mean exceeds a number and so many standard errors; a weight of k counts as k points."""
    mean = float(np.average(gain, weights=weight))
    error = math.sqrt(float(np.average((gain - mean) ** 2, weights=weight)) / float(weight.sum()))
    return mean > max(least, sure * error)


def continuous(y: Float[ndarray, " n"]) -> bool:
    """Whether targets are no levels: few occur several times, apart from a lower and an upper bound."""
    inner = y[(y > y.min()) & (y < y.max())]
    counts = np.unique(inner, return_counts=True)[1]
    often = counts[counts > max(REPEATED, RARE * len(y))]  # a fine resolution repeats values in large tables
    return 2 * len(inner) > len(y) and bool(often.sum() <= COMMON * len(inner))


class Recipe(NamedTuple):
    """What a head is fitted with."""

    knots: int
    penalty: float
    units: int = UNITS
    batches: bool = False
    inside: float = 0.99
    """Share of the held-out points that count as inside the data."""


OF_LARGE_TABLES = Recipe(knots=40, penalty=1.0, units=128, batches=True, inside=0.7)
"""A process that has seen some of the rows tells less well what lies outside, and a larger head errs more there."""


class ShapeProblem:
    """Negative log density of the points plus a ridge penalty, as a function of the numbers of a head."""

    def __init__(self, points: ShapePoints, recipe: Recipe) -> None:
        self.points, self.recipe = points, recipe
        inputs, weight = points.inputs(), points.weight / points.weight.sum()
        self.low, self.high = inputs.amin(0), inputs.amax(0)
        self.centre = weight @ inputs
        self.scale = (weight @ (inputs - self.centre).square()).sqrt()
        self.scale = torch.where(self.scale > 1e-9 * self.centre.abs().clamp_min(1.0), self.scale, math.inf)
        n_follow = 1 + len(RESIDUALS)
        knots, spacing = _knots(points.t[:, 0], points.weight, recipe.knots)
        g, d, h = n_follow + len(knots), inputs.shape[1], recipe.units
        self.follows = (torch.arange(g) < n_follow).double()
        self.free = torch.stack([torch.ones(g), *[self.follows] * 2]).double()
        self.free[1:, 0] = 0.0
        self.v = torch.zeros(3, g, dtype=torch.float64)
        self.v[0, 1:n_follow] = math.log(START_SHARE / len(RESIDUALS))
        self.v[1, 1:n_follow] = torch.tensor(RESIDUALS, dtype=torch.float64)
        self.v[2, 1:n_follow] = math.log(0.5)
        self.v[0, n_follow:] = math.log(START_SHARE) + (spacing / math.sqrt(2 * math.pi)).log()
        self.v[1, n_follow:] = knots
        self.v[2, n_follow:] = WIDEST * torch.atanh((spacing.log() / WIDEST).clamp(-0.95, 0.95))
        normal = torch.randn(d + 1, h, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.shapes = [(d, h), (h,), (3, h, g), (3, g)]
        start = [normal[:d] / d**0.5, normal[d], torch.zeros(3 * h * g), torch.zeros(3 * g)]
        self.start = torch.cat([part.flatten().double() for part in start])

    def head(self, x: Tensor) -> ShapeHead:
        """The head with these numbers, of which the weights are those of standardised inputs."""
        parts = x.split([math.prod(shape) for shape in self.shapes])
        U, u, V, v = (part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True))
        U = U / self.scale[:, None]
        V, v = V * self.free[:, None], self.v + v * self.free
        return ShapeHead(self.low, self.high, U, u - self.centre @ U, V, v, self.follows, math.inf, 0.0)

    def loss(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Objective to be minimised; of some of the points, scaled to the weight of all."""
        points = self.points if rows is None else self.points[rows]
        weight = points.weight if rows is None else points.weight * (len(self.points.weight) / len(rows))
        away = 0.5 * self.recipe.penalty * x[: -3 * len(self.follows)].square().sum()
        away = away + 0.5 * x[-3 * len(self.follows) :].square().sum()
        return away - weight @ log_density(self.head(x), points)

    def value(self, x: ndarray) -> tuple[float, ndarray]:
        """The objective and its gradient."""
        at = torch.tensor(x, requires_grad=True)
        loss = self.loss(at)
        (slope,) = torch.autograd.grad(loss, at)
        return loss.item(), slope.numpy()

    def best(self, checks: tuple[int, ...], watch: Callable[[Tensor], bool] = lambda _: False) -> Tensor:
        """Minimise; the numbers after so many iterations are shown to `watch`, which may end it."""
        if self.recipe.batches:
            return self.by_batches()
        step, found = 0, self.start

        def callback(x: ndarray) -> None:
            nonlocal step, found
            step, found = step + 1, torch.tensor(x)
            if step in checks and watch(found):
                raise StopIteration

        options = {"maxiter": checks[-1], "maxcor": 20}
        minimize(self.value, self.start.numpy(), jac=True, method="L-BFGS-B", options=options, callback=callback)
        return found

    def by_batches(self) -> Tensor:
        """Minimise by Adam on batches, with a rate that falls to zero."""
        x, n = self.start.clone().requires_grad_(), len(self.points.weight)
        per_epoch, generator = n // BATCH, torch.Generator().manual_seed(0)
        optimizer = torch.optim.Adam([x], lr=RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * per_epoch)
        for _ in range(EPOCHS):
            for rows in torch.randperm(n, generator=generator)[: per_epoch * BATCH].split(BATCH):
                optimizer.zero_grad()
                (self.loss(x, rows) / n).backward()
                optimizer.step()
                schedule.step()
        return x.detach()


def log_density(head: ShapeHead, points: ShapePoints) -> Float[Tensor, " n"]:
    """Log density of the points under the mixture and the Gaussians of a head."""
    log_weight, mean, std = gaussians(TorchOps, head.state(), points.z, points.mean, points.std)
    each = -0.5 * ((points.t - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
    each = torch.cat([points.log_density, each[:, 1:]], 1)
    return torch.logsumexp(log_weight.log_softmax(1) + each, 1)


@threadpool_limits.wrap(limits=1, user_api="blas")  # type: ignore[untyped-decorator]  # the products are small
def fit_shape(points: ShapePoints) -> ShapeHead | None:
    """Fit a head, and keep it if it raises the density of points that it was not fitted to."""
    n = len(points.weight)
    if not continuous(points.t[:, 0].numpy()) or not promising(points):
        return None
    knots = min(MANY_KNOTS, max(FEW_KNOTS, n // POINTS_PER_KNOT))
    recipes = [Recipe(k, penalty) for k in (0, knots) for penalty in PENALTIES]
    recipes, checks = ([OF_LARGE_TABLES], (0,)) if n > LARGE else (recipes, CHECKS)
    fold = np.random.default_rng(0).permutation(n) % FOLDS
    parts = [(points[fold != i], points[fold == i]) for i in range(FOLDS)]
    first = [gains_of(ShapeProblem(parts[0][0], recipe), parts[0][1], checks) for recipe in recipes]
    best = int(np.argmax([parts[0][1].average(gains.T).max() for gains in first]))
    recipe, parts = recipes[best], parts[:1] if recipes[best].batches else parts
    others = [gains_of(ShapeProblem(fitted, recipe), judged, checks) for fitted, judged in parts[1:]]
    gains, weight = np.concatenate([first[best], *others], 1), np.concatenate([each.weight for _, each in parts])
    steps = int(np.argmax(np.average(gains, axis=1, weights=weight)))
    gain = float(np.average(gains[steps], weights=weight))
    logger.info("shape of the noise: held-out log density %+.3f by %s", gain, recipe)
    if not is_gain(gains[steps], weight, least=WORTH, sure=SURE):
        return None
    problem = ShapeProblem(points, recipe)
    head = problem.head(problem.best(checks[: steps + 1]))
    reach = float(weighted_quantile(points.cost, points.weight, torch.tensor([recipe.inside]))[0])
    return replace(head, reach=reach, gain=gain)


def promising(points: ShapePoints) -> bool:
    """Whether targets end at a bound, or a few iterations on half of some points raise the density of the others."""
    n, t = len(points.weight), points.t[:, 0]
    if max(float(points.weight[t == bound].sum()) for bound in (t.min(), t.max())) > COMMON * float(
        points.weight.sum()
    ):
        return True
    order = np.random.default_rng(1).permutation(n)[: max(FIRST_POINTS, n // 4)]
    halves = [points[order[::2]], points[order[1::2]]]
    for recipe in (Recipe(0, PENALTIES[1]), Recipe(FEW_KNOTS, PENALTIES[1])):
        gains = [
            gains_of(ShapeProblem(fitted, recipe), judged, (FIRST_STEPS,))[0]
            for fitted, judged in (halves, halves[::-1])
        ]
        weight = torch.cat([judged.weight for judged in halves[::-1]]).numpy()
        if is_gain(np.concatenate(gains), weight, least=0.0, sure=FIRST_SURE):
            return True
    return False


def gains_of(problem: ShapeProblem, judged: ShapePoints, checks: tuple[int, ...]) -> Float[ndarray, "s n"]:
    """Gain in the log density of other points after so many iterations; two falls end the descent."""
    found: list[ndarray] = []

    def watch(x: Tensor) -> bool:
        found.append((log_density(problem.head(x), judged) - judged.log_density[:, 0]).numpy())
        means = [float(judged.average(gain)) for gain in found]
        return len(means) > 2 and means[-1] < means[-2] < means[-3]

    last = problem.best(checks, watch)
    if not found:
        watch(last)
    return np.stack([*found, *[found[-1]] * (len(checks) - len(found))])


def weighted_quantile(
    x: Float[Tensor, " n"], weight: Float[Tensor, " n"], level: Float[Tensor, " k"]
) -> Float[Tensor, " k"]:
    """The smallest values that have at least these shares of the weight at or below them."""
    order = x.argsort()
    share = weight[order].cumsum(0) / weight.sum()
    return x[order][torch.searchsorted(share, level.to(share) * (1 - 1e-12)).clamp_max(len(x) - 1)]


def _knots(t: Float[Tensor, " n"], weight: Float[Tensor, " n"], n: int) -> tuple[Tensor, Tensor]:
    """Quantiles of the targets, and the distances between them."""
    if not n:
        return t[:0], t[:0]
    knots = weighted_quantile(t, weight, (torch.arange(n) + 0.5) / n).unique()
    if len(knots) < 2:
        return t[:0], t[:0]
    apart = knots.diff()
    return knots, 0.5 * (torch.cat([apart[:1], apart]) + torch.cat([apart, apart[-1:]]))
