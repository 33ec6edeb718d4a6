"""Last layers at the maximum of the evidence."""

from collections.abc import Callable, Iterable
from itertools import product

import numpy as np
import torch
from numpy import ndarray
from scipy.optimize import OptimizeResult, minimize
from torch import Tensor

from lastlayer._internal.chunks import row_chunks
from lastlayer._internal.threads import threads_for
from lastlayer.bayes.evidence import known_noise_nlml, optimal_alphas
from lastlayer.bayes.noise_groups import StatisticsByNoise
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Statistics
from lastlayer.settings.types import NO_NOISE_PRIOR, BiasPrior, NoisePrior, NoiseStructure

STARTS, LIMITS = ((-2.0, 2.0, 6.0), (-0.5, -2.0, -4.0)), ((-25.0, 25.0), (-13.8, 5.0))
"""Starting values and limits of log alpha and the log noise standard deviation; the search begins at the best pair."""
SEARCH = {"ftol": 1e-9, "maxiter": 60}
STACKED = 2**22
"""Maximum number of entries of the Gram matrices in a batch: wide models are processed one by one."""


def by_evidence(
    sums: Iterable[Statistics | StatisticsByNoise],
    *,
    noise: NoiseStructure = "diagonal",
    bias_prior: BiasPrior = "flat",
    noise_prior: NoisePrior = NO_NOISE_PRIOR,
) -> list[Posterior]:
    """Find the posteriors of several models at the alpha and noise that maximise the evidence.

    Models with the same number of features are batched. Where the noise is partly known, sums depend on the noise to
    be found: such models are searched one by one.

    Parameters
    ----------
    sums : iterable of Statistics or StatisticsByNoise
        Statistics of each model, or a function of the learned noise that computes them.
    noise : "diagonal" or "full", default "diagonal"
        Noise covariance between the outputs.
    bias_prior : "flat" or "shared", default "flat"
        Prior on the bias.
    noise_prior : NoisePrior, default NO_NOISE_PRIOR
        Prior on the noise, whose density multiplies the evidence; not used where noise is partly known.

    Examples
    --------
    >>> import torch
    >>> from lastlayer.bayes.features import affine_features
    >>> from lastlayer.bayes.statistics import Statistics
    >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    >>> (posterior,) = by_evidence([Statistics.from_features(affine_features(x), x + 0.1 * torch.cos(40 * x))])
    >>> posterior.nlml < Posterior(posterior.statistics, log_alpha=-20.0).nlml
    True
    """
    found: dict[int, Posterior] = {}
    models: dict[int, Statistics] = {}
    for i, each in enumerate(sums):
        match each:
            case StatisticsByNoise():
                found[i] = _with_known_noise(each, bias_prior)
            case _:
                models[i] = each
    for k in {statistics.n_linear for statistics in models.values()}:
        same = [i for i, statistics in models.items() if statistics.n_linear == k]
        for places in (same[part] for part in row_chunks(len(same), max(1, STACKED // max(1, k * k)))):
            stack = Statistics.stacked([models[i] for i in places])
            with threads_for(20 * k**3):
                optima = optimal_alphas(stack, noise=noise, bias_prior=bias_prior, noise_prior=noise_prior)
            for i, best in zip(places, optima, strict=True):
                found[i] = Posterior(models[i], best.log_alpha, best.noise_cov, noise, bias_prior, checked=False)
    return [found[i] for i in range(len(found))]


def _with_known_noise(sums: StatisticsByNoise, bias_prior: BiasPrior) -> Posterior:
    fewer = sums.reduced()

    def value(numbers: Tensor) -> Tensor:
        return known_noise_nlml(fewer(torch.exp(2 * numbers[1:])), numbers[0], numbers[1:], bias_prior=bias_prior)

    q, options = sums.n_outputs, {"dtype": torch.float64, "device": sums.device}
    with torch.no_grad():
        starts = [torch.tensor([a, *[e] * q], **options) for a, e in product(*STARTS)]  # type: ignore[arg-type]
        start = min(starts, key=lambda x: np.nan_to_num(float(value(x)), nan=np.inf))
    best = minimum(value, start, [LIMITS[0], *[LIMITS[1]] * q])
    learned = torch.tensor(np.exp(2 * best.x[1:]), device=sums.device)
    with torch.no_grad():
        end = sums(learned)
    return Posterior(end, float(best.x[0]), torch.diag(learned), "diagonal", bias_prior, checked=False)


def minimum(value: Callable[[Tensor], Tensor], start: Tensor, limits: list[tuple[float, float]]) -> OptimizeResult:
    """Minimise a function within limits by L-BFGS, with gradients by torch."""

    def value_and_slope(x: ndarray) -> tuple[float, ndarray]:
        numbers = torch.tensor(x, device=start.device, requires_grad=True)
        J = value(numbers)
        J.backward()
        return float(J.detach()), numbers.grad.cpu().numpy()  # type: ignore[union-attr]

    x = start.cpu().numpy()
    return minimize(value_and_slope, x, jac=True, method="L-BFGS-B", bounds=limits, options=SEARCH)
