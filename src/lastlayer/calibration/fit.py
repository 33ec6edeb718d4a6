"""Fitting the curves: the largest held-out log predictive density, under a weak prior around the posterior itself.

The likelihood is that of `lastlayer.formula`, members mixed and outputs correlated as they will be in a prediction.
"""

import math
from types import SimpleNamespace

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.optimize import minimize
from torch import Tensor

from lastlayer.calibration.curve import Calibration, CalibrationPoints, Curve, NoiseHead, Shrinkage, Tails
from lastlayer.calibration.points import HeldOutPoints
from lastlayer.evidence import LOG_2PI
from lastlayer.formula import log_noise_factor, log_shape, log_variance, member_weights, output_cov, shrunk
from lastlayer.ops import TorchOps
from lastlayer.training.engine import threads_for

LIMITS = {
    "noise": (-7.0, 7.0),
    "slope": (-20.0, 20.0),
    "power": (-2.0, 1.5),
    "share": (-5.0, 0.0),
    "factor": (0.0, 4.0),
    "shrinkage": (-12.0, 2.0),
}
"""Bounds of log a, log b, log gamma, logit of the tails' share, log of their factor, log precision of the shrinkage."""
PRIOR = {
    "noise": (0.0, 3.0),
    "slope": (0.0, 5.0),
    "power": (0.0, 1.0),
    "share": (-2.0, 2.0),
    "factor": (2.0, 2.0),
    "shrinkage": (0.0, 2.0),
}
"""Mean and standard deviation of the same before any held-out point was seen: with few of them the curve stays near."""
OF_MIXTURES = ("share", "factor", "shrinkage")
STARTS = ((0.0, 0.0, 0.0), (-1.0, 1.0, -0.5), (0.0, 3.0, 0.0))
SHARPNESS = 2.0
"""Members are weighted by this power of their precision."""


def fit_curves(points: HeldOutPoints, *, mixture: bool, input_noise: bool = False) -> Calibration:
    """The curves of largest held-out LPD, held near the posterior as it stands by a weak prior.

    A smooth problem of 2 q + 1 parameters per prior precision (in a `mixture` three more, of tails and shrinkage): each
    prior precision alone from several starts, then all together; no grid, so no edge of one. With `input_noise`, a
    network for the noise at each input joins in.
    """
    points = points.usable()
    n, q = points.targets.shape
    precisions = points.prior_precisions
    if not n:
        empty = CalibrationPoints(np.empty(0), np.empty((0, q)), points.kind)
        return Calibration(dict.fromkeys(precisions, Curve.identity(q)), empty, lpd=math.nan, lpd_before=math.nan)
    with threads_for(20 * points.mean.numel()):
        singles = {s: CurveProblem(points.of(s), [s], mixture=False) for s in precisions}
        numbers = {s: single.best([single.start(*start) for start in STARTS]) for s, single in singles.items()}
        alone = {s: single.lpd(numbers[s]) for s, single in singles.items()}
        precisions.sort(key=lambda s: -alone[s])
        problem = CurveProblem(points, precisions, mixture)
        x = problem.best([problem.start(curves=[numbers[s] for s in precisions]), problem.start()])
        if input_noise:
            problem = CurveProblem(points, precisions, mixture, NoiseHead.initial(points.inputs, q))
            x = problem.best([np.concatenate([x, problem.initial_head.numbers().numpy()])])  # type: ignore[union-attr]
    uncalibrated = CurveProblem(points, precisions, mixture=False, sharpness=0.0)
    return problem.calibration(x, alone, lpd_before=uncalibrated.lpd(uncalibrated.start()))


class CurveProblem:
    """Negative held-out LPD plus prior, of the parameters [log a, log b, log gamma] of each prior precision in turn,
    then (logit share, log factor) of the tails, the log precision of the shrinkage, and the weights of the noise head,
    where there are such."""

    def __init__(
        self,
        points: HeldOutPoints,
        precisions: list[float],
        mixture: bool,
        head: NoiseHead | None = None,
        *,
        sharpness: float = SHARPNESS,
    ) -> None:
        self.points, self.precisions, self.initial_head, self.sharpness = points, precisions, head, sharpness
        self.q = points.targets.shape[-1]
        self.each = ["noise"] * self.q + ["slope"] * self.q + ["power"]
        self.of_mixture = list(OF_MIXTURES) if mixture else []
        self.names = self.each * len(precisions) + self.of_mixture
        self.of_network = torch.tensor([precisions.index(s) for s in points.prior_precision.tolist()])
        self.log_cost = points.cost.log()[..., None]
        self.log_noise_var = points.noise_var.log()
        self.no_reach = torch.tensor(math.inf, dtype=torch.float64)
        self.centre, self.width = torch.tensor([PRIOR[name] for name in self.names], dtype=torch.float64).unbind(-1)

    def start(
        self, noise: float = 0.0, slope: float = 0.0, power: float = 0.0, *, curves: list[ndarray] | None = None
    ) -> ndarray:
        """The parameters of each curve, and those of the mixture at their prior means."""
        alike = [np.array([noise] * self.q + [slope] * self.q + [power])] * len(self.precisions)
        return np.concatenate([*(curves or alike), [PRIOR[name][0] for name in self.of_mixture]])

    def parts(self, x: Tensor) -> tuple[Float[Tensor, "s p"], Float[Tensor, " t"], NoiseHead | None]:
        """The parameters of the curves, of the mixture, and the noise head."""
        n, of_mixture = len(self.names), len(self.of_mixture)
        head = self.initial_head.with_numbers(x[n:]) if self.initial_head else None
        return x[: n - of_mixture].reshape(len(self.precisions), -1), x[n - of_mixture : n], head

    def members(
        self, x: Tensor
    ) -> tuple[Float[Tensor, "c n q"], Float[Tensor, "c n q"], SimpleNamespace, Tensor | float]:
        """Mean and log variance of each point by each network; the curves; the log factor of the noise."""
        curves, of_mixture, head = self.parts(x)
        log_a, log_b, log_power = curves.split([self.q, self.q, 1], -1)
        log_a, log_b, log_power = (number[self.of_network][:, None] for number in (log_a, log_b, log_power))
        factor = 0.0 if head is None else log_noise_factor(TorchOps, head, self.points.inputs.to(head.low))
        curve = SimpleNamespace(log_noise=log_a, log_slope=log_b, power=log_power.exp(), log_reach=self.no_reach)
        log_var = self.log_noise_var + log_variance(TorchOps, curve, self.log_cost, factor)
        mean = self.points.mean
        if self.of_mixture:
            mean = shrunk(TorchOps, mean, log_var, 0.0, of_mixture[-1])
        return mean, log_var, curve, factor

    def log_density(self, x: Tensor) -> Float[Tensor, " n"]:
        """Of each point under the mixture of its networks."""
        said = self.members(x)
        each = self._gaussian(*said)
        if self.of_mixture:
            share, wider, _ = self.parts(x)[1]
            log_in, log_out = (torch.nn.functional.logsigmoid(s * share) for s in (-1, 1))
            each = torch.logaddexp(log_in + each, log_out + self._gaussian(*said, wider))
        weights = member_weights(TorchOps, said[1], self.sharpness)[..., 0]
        return torch.logsumexp(weights.log() + each, dim=0)

    def _gaussian(
        self, mean: Tensor, log_var: Tensor, curve: SimpleNamespace, factor: Tensor | float, wider: Tensor | None = None
    ) -> Float[Tensor, "c n"]:
        """Log density of each point by each network, joint over the outputs; `wider` is the log factor of the tails."""
        residual, correlation = self.points.targets - mean, self.points.correlation
        if correlation is None:
            log_var = log_var if wider is None else log_var + wider
            return -0.5 * (residual.square() * (-log_var).exp() + log_var + LOG_2PI).sum(-1)
        log_noise = self.log_noise_var if wider is None else self.log_noise_var + wider
        epistemic = (log_noise + curve.log_slope + log_shape(TorchOps, curve, self.log_cost)).exp()
        L = torch.linalg.cholesky(
            output_cov(TorchOps, correlation, epistemic, (log_noise + curve.log_noise + factor).exp())
        )
        scaled = torch.linalg.solve_triangular(L, residual[..., None], upper=False)[..., 0]
        logdet = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -0.5 * (scaled.square().sum(-1) + logdet + self.q * LOG_2PI)

    def lpd(self, x: ndarray) -> float:
        with torch.no_grad():
            w = self.points.weight
            return float((w * self.log_density(torch.from_numpy(x))).sum() / w.sum())

    def value(self, x: ndarray) -> tuple[float, ndarray]:
        """To be minimised, and its gradient."""
        point = torch.tensor(x, requires_grad=True)
        prior = 0.5 * ((point[: len(self.names)] - self.centre) / self.width).square().sum()
        head = self.parts(point)[2]
        if head is not None:
            prior = prior + head.neg_log_prior()
        loss = prior - (self.points.weight * self.log_density(point)).sum()
        loss.backward()
        assert point.grad is not None
        return float(loss.detach()), point.grad.numpy()

    def best(self, starts: list[ndarray]) -> ndarray:
        """The lowest of the minima that lie below the starts; the first start if none is finite."""
        limits = [LIMITS[name] for name in self.names] + [(-np.inf, np.inf)] * (len(starts[0]) - len(self.names))
        ends = [
            minimize(self.value, start, jac=True, method="L-BFGS-B", bounds=limits, options={"maxiter": 500})
            for start in starts
        ]
        found = min((end for end in ends if np.isfinite(end.fun)), key=lambda end: float(end.fun), default=None)
        return starts[0] if found is None else found.x

    def calibration(self, x: ndarray, alone: dict[float, float], lpd_before: float) -> Calibration:
        """What was found, and the points as plots show them."""
        point, points = torch.from_numpy(x), self.points
        curves, of_mixture, head = self.parts(point)
        reach = [float(points.of(s).cost.max()) for s in self.precisions]
        first = points.prior_precision.tolist().index(self.precisions[0])
        squared = (points.targets - self.members(point)[0][first]).square() / points.noise_var[first]
        tails, shrinkage = Tails(), Shrinkage()
        if self.of_mixture:
            tails = Tails(float(of_mixture[0].sigmoid()), float(of_mixture[1].exp()))
            shrinkage = Shrinkage(float(of_mixture[2].exp()))
        return Calibration(
            {
                s: Curve(own[: self.q], own[self.q : -1], float(own[-1]), farthest)
                for s, own, farthest in zip(self.precisions, np.exp(curves.numpy()), reach, strict=True)
            },
            CalibrationPoints(points.cost[first].numpy(), squared.numpy(), points.kind),
            self.lpd(x),
            lpd_before,
            tails,
            shrinkage,
            head,
            alone,
        )
