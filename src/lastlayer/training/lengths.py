"""Length scales of a Gaussian process by its evidence: the distance along each input over which a function changes."""

import math
from itertools import product

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.bayes.evidence import known_noise_nlml, minimum
from lastlayer.data.rows import Rows
from lastlayer.networks.fourier import fourier_features, frequencies
from lastlayer.settings.types import WEAK_NOISE_PRIOR, BiasPrior, NoisePrior
from lastlayer.training.engine import Adam

LENGTH, LOG_LENGTH_STD = 2.0, 1.0
"""Prior mode of a length scale over the root of the number of inputs, for standardised inputs; standard deviation of
its log."""
START = 1.0
"""Initial length scales, in the same unit: a descent from long ones may end where everything is explained as noise."""
COMMON = 3.0
"""Prior variance of the part that the log length scales of a table share, over that of each one's own part."""
LOG_ALPHA, LOG_ALPHA_STD = 4.0, 4.0
LOG_LINEAR, LOG_LINEAR_STD = -2.0, 2.0
"""Prior mean and standard deviation of log rho."""
STEPS, RATE = 30, 0.5
MOST_ROWS = 128
"""Maximum number of rows to fit length scales to; more add little."""
MOST_FUNCTIONALS = 480
FEWER_FREQUENCIES = 96
"""Number of random frequencies for length scales with known noise or functionals."""
STARTS = (LOG_ALPHA, 12.0), (-2.0, -4.0)
"""Starting values of log alpha and of the log noise standard deviation: the search begins at the best pair."""


def fit_lengths(
    Z: Float[Tensor, "b m d"],
    T: Float[Tensor, "b m q"],
    weight: Float[Tensor, "b m"],
    *,
    noise_prior: NoisePrior = WEAK_NOISE_PRIOR,
    length: float = LENGTH,
    length_std: float = LOG_LENGTH_STD,
    steps: int = STEPS,
) -> tuple[Float[Tensor, "b d"], Float[Tensor, " b"]]:
    """Fit log length scales and log rho of several tables side by side; rows of weight zero are ignored.

    Parameters
    ----------
    Z, T, weight : Tensor of shape (b, m, d), (b, m, q), (b, m)
        Standardised inputs, targets and weights of the tables.
    noise_prior : NoisePrior
        Prior of the noise variance.
    length, length_std : float
        Prior median of a length scale over the root of d, and prior standard deviation of its log.
    steps : int
        Steps of Adam.
    """
    b, _, d = Z.shape
    log_length = torch.full((b, d), math.log(START * math.sqrt(d)), dtype=Z.dtype, device=Z.device)
    log_alpha = torch.full((b,), LOG_ALPHA, dtype=Z.dtype, device=Z.device)
    log_linear = torch.full_like(log_alpha, LOG_LINEAR)
    numbers = [log_length, log_linear, log_alpha]
    adam = Adam(numbers)
    for step in range(steps):
        rate = RATE * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        _, slopes = value_and_slopes(
            Z, T, weight, *numbers, noise_prior=noise_prior, length=length, length_std=length_std
        )
        for number, slope in zip(numbers, slopes, strict=True):
            number.grad = slope
        adam.step(rate)
    return log_length, log_linear


def likely_log_length(d: int, length: float = LENGTH) -> float:
    """Prior mode of the log length scale for d inputs."""
    return math.log(length * math.sqrt(d))


def refine_lengths(
    rows: Rows,
    log_length: Float[Tensor, " d"],
    log_linear: Float[Tensor, ""],
    *,
    bias_prior: BiasPrior = "flat",
    generator: torch.Generator | None = None,
) -> tuple[Float[Tensor, " d"], Float[Tensor, ""]]:
    """Refit log length scales and log rho to targets with known noise and to functionals, from given values."""
    d, q = len(log_length), rows.main.T.shape[-1]
    waves = frequencies(d, FEWER_FREQUENCIES, generator).to(log_length)

    def value(numbers: Tensor) -> Tensor:
        lengths, linear, log_alpha, log_std = numbers[:d], numbers[d], numbers[d + 1], numbers[d + 2 :]
        learned = torch.exp(2 * log_std)
        features = lambda x: fourier_features(x.to(waves), lengths, linear, waves)
        seen = rows.statistics(features, learned)
        nlml = known_noise_nlml(seen, log_alpha - math.log(waves.shape[1]), log_std, bias_prior=bias_prior)
        return seen.n.amax() * nlml + neg_log_prior(lengths, linear, log_alpha)

    with torch.no_grad():
        common = torch.full_like(log_length, math.log(START * math.sqrt(d)))
        starts = [
            torch.cat([lengths, log_linear[None], log_length.new_tensor([log_alpha, *[log_std] * q])])
            for lengths, log_alpha, log_std in product((log_length, common, common + 0.7), *STARTS)
        ]
        start = min(starts, key=lambda numbers: np.nan_to_num(float(value(numbers)), nan=np.inf))
    limits = [(-5.0, 8.0)] * d + [(-12.0, 8.0), (-10.0, 25.0)] + [(-13.8, 5.0)] * q
    best = torch.tensor(minimum(value, start, limits).x).to(log_length)
    return best[:d], best[d]


def neg_log_prior(
    log_length: Float[Tensor, "*b d"],
    log_linear: Float[Tensor, "*b"],
    log_alpha: Float[Tensor, "*b"],
    *,
    length: float = LENGTH,
    length_std: float = LOG_LENGTH_STD,
) -> Float[Tensor, "*b"]:
    """Negative log prior of length scales, linear part and alpha, up to a constant."""
    d = log_length.shape[-1]
    away = (log_length - likely_log_length(d, length)) / length_std
    lengths = (away * _uncommon(away)).sum(-1)
    rest = ((log_alpha - LOG_ALPHA) / LOG_ALPHA_STD).square() + ((log_linear - LOG_LINEAR) / LOG_LINEAR_STD).square()
    return 0.5 * (lengths + rest)


def _uncommon(away: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """Precision matrix of the log length scales, which have a shared part and one part each, times their deviations."""
    return away - COMMON / (1 + COMMON * away.shape[-1]) * away.sum(-1, keepdim=True)


@torch.no_grad()
def value_and_slopes(
    Z: Float[Tensor, "b m d"],
    T: Float[Tensor, "b m q"],
    weight: Float[Tensor, "b m"],
    log_length: Float[Tensor, "b d"],
    log_linear: Float[Tensor, " b"],
    log_alpha: Float[Tensor, " b"],
    *,
    noise_prior: NoisePrior = WEAK_NOISE_PRIOR,
    length: float = LENGTH,
    length_std: float = LOG_LENGTH_STD,
) -> tuple[Float[Tensor, " b"], list[Tensor]]:
    """Negative log of evidence times prior of each table, up to a constant, and its gradient in the log parameters."""
    q, d = T.shape[-1], Z.shape[-1]
    a = Z * (-log_length).exp()[:, None]
    inner = a @ a.mT
    square = inner.diagonal(dim1=-2, dim2=-1)
    smooth = (inner - 0.5 * (square[:, :, None] + square[:, None])).clamp_max_(0.0).exp_()
    root = weight.sqrt()
    both = root[:, :, None] * root[:, None]
    alpha = log_alpha.exp()[:, None, None]
    linear = log_linear.exp()[:, None, None] * inner
    K = alpha * both * (smooth + linear)
    C = K.clone()
    C.diagonal(dim1=-2, dim2=-1).add_(1.0)
    L, failed = torch.linalg.cholesky_ex(C)
    inverse = torch.cholesky_inverse(L)
    one = (inverse @ root[:, :, None])[..., 0]
    ones = (one * root).sum(-1)
    P = inverse - one[:, :, None] * one[:, None] / ones[:, None, None]
    t = root[:, :, None] * T
    u = P @ t
    n = weight.sum(-1)[:, None] - 1 + noise_prior.rows
    misfit = (t * u).sum(1) + noise_prior.rows * noise_prior.share
    logdet = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1) + ones.log()
    away = (log_length - likely_log_length(d, length)) / length_std
    away_alpha, away_linear = (log_alpha - LOG_ALPHA) / LOG_ALPHA_STD, (log_linear - LOG_LINEAR) / LOG_LINEAR_STD
    away = _uncommon(away)
    prior = neg_log_prior(log_length, log_linear, log_alpha, length=length, length_std=length_std)
    value = 0.5 * ((n * misfit.log()).sum(-1) + q * logdet) + prior
    G = 0.5 * (q * P - (u * (n / misfit)[:, None]) @ u.mT)  # gradient in C
    by_alpha = (G * K).sum((-2, -1)) + away_alpha / LOG_ALPHA_STD
    G = G * both * alpha
    by_smooth, rho = G * smooth, log_linear.exp()[:, None, None]
    by_linear = (G * linear).sum((-2, -1)) + away_linear / LOG_LINEAR_STD
    # sum_ik W_ik (a_ij - a_kj)^2 = 2 sum_i a_ij^2 sum_k W_ik - 2 a_j' W a_j; the linear part falls as length^-2
    by_length = 2 * ((by_smooth.sum(-1)[..., None] * a - (by_smooth + rho * G) @ a) * a).sum(1) + away / length_std
    fine = (failed == 0) & torch.isfinite(value)
    zero = lambda x: torch.where(fine.reshape(-1, *[1] * (x.dim() - 1)), x, torch.zeros_like(x))
    return value, [zero(by_length), zero(by_linear), zero(by_alpha)]
