"""Neural peers without a package: deep ensemble, Monte Carlo dropout, a plain network with conformal intervals."""

import math
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from benchmarks.uci.protocol import Predict, Quantiles, Task, hold_out
from benchmarks.uci.stacks import (
    Found,
    HeldOut,
    Loss,
    Recipe,
    Stack,
    Standard,
    gaussian_nll,
    mean_and_variance,
    refit,
    search,
    squared_error,
    standardised,
)

MEMBERS = 5
PASSES = 200
LENGTHSCALE = 1e-2
DECAYS = (0.0, 1e-5, 1e-4, 1e-3)
DROPOUT_RATES = (0.005, 0.01, 0.05, 0.1)
TAUS = tuple(float(tau) for tau in np.geomspace(1, 1e4, 25))  # precisions of the noise, of standardised targets
CONFORMAL_LEVELS = np.linspace(0.01, 0.99, 99)

ENSEMBLE = Recipe(2e-2, batch_size=100, max_epochs=1200, decays=DECAYS, members=MEMBERS, n_outputs=2)
DROPOUT = Recipe(3e-3, batch_size=100, max_epochs=2000, decays=(0.0,) * 4, dropout=DROPOUT_RATES)
PLAIN = Recipe(1e-2, batch_size=100, max_epochs=800, decays=DECAYS)


@standardised
def deep_ensemble(x: Tensor, t: Tensor, task: Task) -> Standard:
    def held_out(stack: Stack, x: Tensor, t: Tensor) -> list[tuple[float, float]]:
        mean, var = mean_and_variance(stack(stack.spread(x)))
        log_prob = torch.distributions.Normal(mean, var.sqrt()).log_prob(t).reshape(-1, MEMBERS, len(t))
        nll = -(log_prob.logsumexp(1) - math.log(MEMBERS)).mean(-1)
        return [(float(value), math.nan) for value in nll]

    stack, _ = chosen_stack(x, t, gaussian_nll, ENSEMBLE, held_out, task)
    return lambda x: mean_and_variance(stack(stack.spread(x)))


@standardised
def mc_dropout(x: Tensor, t: Tensor, task: Task) -> Standard:
    recipe = replace(DROPOUT, decays=tuple(LENGTHSCALE**2 * (1 - rate) / (2 * len(x)) for rate in DROPOUT_RATES))

    def held_out(stack: Stack, x: Tensor, t: Tensor) -> list[tuple[float, float]]:
        error = (passes(stack, x, PASSES // 2) - t).square()
        nll = torch.stack([_noise_nll(error, tau) for tau in TAUS])
        lowest = nll.min(0)
        return [(float(v), TAUS[int(i)]) for v, i in zip(lowest.values, lowest.indices, strict=True)]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        stack, found = chosen_stack(x, t, squared_error, recipe, held_out, task)
        after = torch.get_rng_state()

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(after)
            means = passes(stack, x, PASSES)[:, 0]
        return means, torch.full_like(means, 1 / found.note)

    return predict


@standardised
def plain_network(x: Tensor, t: Tensor, task: Task) -> Standard:
    """A mean, without a variance."""
    network, _ = chosen_stack(x, t, squared_error, PLAIN, held_out_error, task)
    return lambda x: (network(network.spread(x))[0, :, 0], torch.zeros(len(x)))


def conformal(X: ndarray, y: ndarray, task: Task) -> Predict:
    proper, calibration = hold_out(len(X), task.seed + 1)
    predict = plain_network(X[proper], y[proper], task)
    errors = np.abs(y[calibration] - predict(X[calibration]).mean[0])
    return lambda X: conformal_quantiles(predict(X).mean[0], errors)


def chosen_stack(
    x: Float[Tensor, "m d"], t: Float[Tensor, " m"], loss: Loss, recipe: Recipe, held_out: HeldOut, task: Task
) -> tuple[Stack, Found]:
    """The configuration and epoch that are best on held-out rows, fitted to all rows."""
    found = search(x, t, loss, recipe, held_out, task)
    best = min(range(len(found)), key=lambda i: found[i].score)
    return refit(x, t, loss, recipe, best, found[best].epoch, task), found[best]


def held_out_error(stack: Stack, x: Tensor, t: Tensor) -> list[tuple[float, float]]:
    return [(float(error), math.nan) for error in squared_error(stack(stack.spread(x)), t)]


def passes(stack: Stack, x: Float[Tensor, "m d"], n: int) -> Float[Tensor, "n e m"]:
    return torch.stack([stack(stack.spread(x))[..., 0] for _ in range(n)])


def _noise_nll(squared: Float[Tensor, "n e m"], tau: float) -> Float[Tensor, " e"]:
    """Log density of a mixture of n Gaussians with variance 1 / tau, from squared distances to their means."""
    log_prob = (-0.5 * tau * squared).logsumexp(0) - math.log(len(squared)) + 0.5 * math.log(tau / (2 * math.pi))
    return -log_prob.mean(-1)


def conformal_quantiles(mean: Float[ndarray, " m"], errors: Float[ndarray, " n"]) -> Quantiles:
    """Intervals of mean +- the ceil((n + 1) level)-th smallest error, or the largest if that rank exceeds n."""
    ranked = np.sort(errors)
    halves = np.abs(2 * CONFORMAL_LEVELS - 1)
    rank = np.ceil((len(ranked) + 1) * halves - 1e-9).astype(int)
    width = np.where(rank > 0, ranked[(rank - 1).clip(0, len(ranked) - 1)], 0.0)
    return Quantiles(CONFORMAL_LEVELS, mean + (np.sign(CONFORMAL_LEVELS - 0.5) * width)[:, None], mean)
