"""The final step of every training: the exact last layer at the maximum of the evidence of fixed features."""

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch
from numpy import ndarray
from scipy.optimize import OptimizeResult, minimize
from torch import Tensor

from lastlayer._internal.chunks import row_chunks
from lastlayer._internal.threads import threads_for
from lastlayer.bayes.coupled import CoupledEquations, PatternStatistics
from lastlayer.bayes.evidence import known_noise_nlml, optimal_alphas
from lastlayer.bayes.last_layer import LastLayer
from lastlayer.bayes.partial_posterior import posterior_of
from lastlayer.bayes.statistics import Statistics
from lastlayer.data.rows import Rows
from lastlayer.settings.types import NO_NOISE_PRIOR, BiasPrior, NoisePrior, NoiseStructure
from lastlayer.training.noise_groups import StatisticsByNoise
from lastlayer.training.objectives import root_of

STARTS, LIMITS = ((-2.0, 2.0, 6.0), (-0.5, -2.0, -4.0)), ((-25.0, 25.0), (-13.8, 5.0))
"""Starting values and limits of log alpha and the log noise standard deviation; the search begins at the best pair."""
STEEPEST = 30.0
"""Limit of the off-diagonal entries of the noise's root."""
SEARCH = {"ftol": 1e-9, "maxiter": 60}
STACKED = 2**22
"""Maximum number of entries of the Gram matrices in a batch: wide models are processed one by one."""


def last_layer(
    statistics: Statistics, *, noise: NoiseStructure = "diagonal", bias_prior: BiasPrior = "flat"
) -> LastLayer:
    """Compute alpha, noise and weights at the maximum of the evidence."""
    return last_layers([statistics], noise=noise, bias_prior=bias_prior)[0]


def known_noise_layer(rows: Rows, linear: Callable[[Tensor], Tensor], *, bias_prior: BiasPrior = "flat") -> LastLayer:
    """Compute the last layer at the maximum of the evidence for targets whose noise is partly known."""
    statistics, q = StatisticsByNoise.of(rows, linear), rows.main.T.shape[-1]
    fewer = statistics.reduced()

    def value(numbers: Tensor) -> Tensor:
        learned = torch.exp(2 * numbers[1:])
        log_variances = rows.log_variances(learned)
        return known_noise_nlml(fewer(learned), numbers[0], numbers[1:], log_variances, bias_prior=bias_prior)

    with torch.no_grad():
        starts = [
            torch.tensor([a, *[e] * q], dtype=torch.float64, device=rows.main.T.device) for a, e in product(*STARTS)
        ]
        start = min(starts, key=lambda numbers: np.nan_to_num(float(value(numbers)), nan=np.inf))
    best = minimum(value, start, [LIMITS[0], *[LIMITS[1]] * q])
    learned = torch.tensor(np.exp(2 * best.x[1:]), device=rows.main.T.device)
    with torch.no_grad():
        end = statistics(learned)
        posterior = posterior_of(end, float(best.x[0]), torch.diag(learned), "diagonal", bias_prior, rtol=math.inf)
        determined = float(posterior.equations.spectral_at(float(best.x[0])).determined.mean())
    return LastLayer(posterior, float(best.fun), bool(best.x[1:].min() <= LIMITS[1][0]), determined)


def coupled_layer(statistics: PatternStatistics, *, bias_prior: BiasPrior = "flat") -> LastLayer:
    """Compute the last layer at the maximum of the evidence for correlated noise and partly missing targets."""
    equations, q = CoupledEquations.of(statistics, bias_prior), statistics.n_outputs
    places = torch.tril_indices(q, q, device=statistics.mean.device)

    def root(numbers: Tensor) -> Tensor:
        return root_of(torch.zeros(q, q).to(numbers).index_put(tuple(places), numbers[1:]))

    def value(numbers: Tensor) -> Tensor:
        return equations.at(numbers[0], root(numbers)).nlml()

    own = places[0] == places[1]
    diagonal = [torch.where(own, e, 0.0 * own) for e in STARTS[1]]
    with torch.no_grad():
        starts = [torch.cat([torch.full_like(d[:1], a), d]).double() for a in STARTS[0] for d in diagonal]
        start = min(starts, key=lambda numbers: np.nan_to_num(float(value(numbers)), nan=np.inf))
    free = (-STEEPEST, STEEPEST)
    best = minimum(value, start, [LIMITS[0], *(LIMITS[1] if on else free for on in own.tolist())])
    with torch.no_grad():
        L = root(torch.tensor(best.x, device=statistics.mean.device))
        posterior = posterior_of(statistics, float(best.x[0]), L @ L.mT, "full", bias_prior, rtol=math.inf)
        seen = posterior.eigenvalues()
        determined = float((seen / (seen + math.exp(-best.x[0]))).sum()) / q
    floored = bool(best.x[1:][own.cpu().numpy()].min() <= LIMITS[1][0])
    return LastLayer(posterior, float(best.fun), floored, determined)


def minimum(value: Callable[[Tensor], Tensor], start: Tensor, limits: list[tuple[float, float]]) -> OptimizeResult:
    """Minimise a function within limits by L-BFGS, with gradients by torch."""

    def value_and_slope(x: ndarray) -> tuple[float, ndarray]:
        numbers = torch.tensor(x, device=start.device, requires_grad=True)
        J = value(numbers)
        J.backward()
        return float(J.detach()), numbers.grad.cpu().numpy()  # type: ignore[union-attr]

    x = start.cpu().numpy()
    return minimize(value_and_slope, x, jac=True, method="L-BFGS-B", bounds=limits, options=SEARCH)


def last_layers(
    models: Sequence[Statistics],
    *,
    noise: NoiseStructure = "diagonal",
    bias_prior: BiasPrior = "flat",
    noise_prior: NoisePrior = NO_NOISE_PRIOR,
) -> list[LastLayer]:
    """Compute the last layers of several models; those with the same number of features are batched."""
    layers: dict[int, LastLayer] = {}
    for k in {statistics.n_linear for statistics in models}:
        same = [i for i, statistics in enumerate(models) if statistics.n_linear == k]
        for places in (same[part] for part in row_chunks(len(same), max(1, STACKED // max(1, k * k)))):
            stack = Statistics.stacked([models[i] for i in places])
            with threads_for(20 * k**3):
                found = optimal_alphas(stack, noise=noise, bias_prior=bias_prior, noise_prior=noise_prior)
            for i, best in zip(places, found, strict=True):
                # rounding affects only the variance of far points, of which only the magnitude matters
                posterior = posterior_of(models[i], best.log_alpha, best.noise_cov, noise, bias_prior, rtol=math.inf)
                layers[i] = LastLayer(posterior, best.nlml, best.noise_floored, best.determined)
    return [layers[i] for i in range(len(models))]
