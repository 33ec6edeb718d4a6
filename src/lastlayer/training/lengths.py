"""Lengths of a Gaussian process by its evidence: over which distance along each input a function changes.

The process has k(x, x') = exp(-|a - a'|^2 / 2) + rho a'a', a = x / length: a smooth function on top of a linear one.
With noise of variance sigma^2, a function of variance alpha sigma^2, C = I + alpha k and a flat prior on the bias,
targets t have

    NLML = 1/2 sum_j n log(t_j' P t_j) + q/2 log |C| + q/2 log(1' C^-1 1),    P = C^-1 - C^-1 1 1' C^-1 / (1' C^-1 1)

up to a constant, sigma^2 at its best. The weak prior on the noise keeps it from vanishing.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.training.adam import Adam
from lastlayer.types import WEAK_NOISE_PRIOR, NoisePrior

LENGTH, LOG_LENGTH_STD = 2.0, 1.0
"""Most likely length over the root of the number of inputs, standardised inputs; standard deviation of its log."""
START = 1.0
"""Where the descent begins, in the same unit: from long lengths it may end where all is noise."""
COMMON = 3.0
"""Variance of what the log lengths of a table have in common, over that of what each has on its own."""
LOG_ALPHA, LOG_ALPHA_STD = 4.0, 4.0
LOG_LINEAR, LOG_LINEAR_STD = -2.0, 2.0
"""log rho before data."""
STEPS, RATE = 60, 0.3
MOST_ROWS = 160
"""More rows would tell little more of the lengths."""


def fit_lengths(
    Z: Float[Tensor, "b m d"],
    T: Float[Tensor, "b m q"],
    weight: Float[Tensor, "b m"],
    *,
    noise_prior: NoisePrior = WEAK_NOISE_PRIOR,
    length_std: float = LOG_LENGTH_STD,
    steps: int = STEPS,
) -> tuple[Float[Tensor, "b d"], Float[Tensor, " b"]]:
    """Log lengths and log rho of each of several tables side by side; rows of weight zero do not count."""
    b, _, d = Z.shape
    log_length = torch.full((b, d), math.log(START * math.sqrt(d)), dtype=Z.dtype, device=Z.device)
    log_alpha = torch.full((b,), LOG_ALPHA, dtype=Z.dtype, device=Z.device)
    log_linear = torch.full_like(log_alpha, LOG_LINEAR)
    numbers = [log_length, log_linear, log_alpha]
    adam = Adam(numbers, RATE)
    for step in range(steps):
        adam.param_groups[0]["lr"] = RATE * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        _, slopes = value_and_slopes(Z, T, weight, *numbers, noise_prior=noise_prior, length_std=length_std)
        for number, slope in zip(numbers, slopes, strict=True):
            number.grad = slope
        adam.step()
    return log_length, log_linear


def likely_log_length(d: int) -> float:
    return math.log(LENGTH * math.sqrt(d))


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
    length_std: float = LOG_LENGTH_STD,
) -> tuple[Float[Tensor, " b"], list[Tensor]]:
    """Negative log of evidence times prior of each table, up to a constant, and its slopes by the three arguments."""
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
    away = (log_length - likely_log_length(d)) / length_std
    away_alpha, away_linear = (log_alpha - LOG_ALPHA) / LOG_ALPHA_STD, (log_linear - LOG_LINEAR) / LOG_LINEAR_STD
    away = torch.stack([away, COMMON / (1 + COMMON * d) * away.sum(-1, keepdim=True).expand_as(away)])
    prior = (away[0] * (away[0] - away[1])).sum(-1) + away_linear.square() + away_alpha.square()
    away = away[0] - away[1]
    value = 0.5 * ((n * misfit.log()).sum(-1) + q * logdet + prior)
    G = 0.5 * (q * P - (u * (n / misfit)[:, None]) @ u.mT)  # slope by C
    by_alpha = (G * K).sum((-2, -1)) + away_alpha / LOG_ALPHA_STD
    G = G * both * alpha
    by_smooth, rho = G * smooth, log_linear.exp()[:, None, None]
    by_linear = (G * linear).sum((-2, -1)) + away_linear / LOG_LINEAR_STD
    # sum_ik W_ik (a_ij - a_kj)^2 = 2 sum_i a_ij^2 sum_k W_ik - 2 a_j' W a_j; the linear part falls with the square
    by_length = 2 * ((by_smooth.sum(-1)[..., None] * a - (by_smooth + rho * G) @ a) * a).sum(1) + away / length_std
    fine = (failed == 0) & torch.isfinite(value)
    zero = lambda x: torch.where(fine.reshape(-1, *[1] * (x.dim() - 1)), x, torch.zeros_like(x))
    return value, [zero(by_length), zero(by_linear), zero(by_alpha)]
