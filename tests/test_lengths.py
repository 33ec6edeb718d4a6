"""Lengths and the linear part by the evidence: value and slopes against slow forms, weights, what is found, and the
features made of it."""

import math

import numpy as np
import pytest
import torch
from helpers import close
from scipy.linalg import null_space

from lastlayer.bayes.evidence import by_evidence, optimal_alphas, profile
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.statistics import Statistics
from lastlayer.networks.fourier import fourier_network, frequencies
from lastlayer.settings.types import WEAK_NOISE_PRIOR, NoisePrior
from lastlayer.training.lengths import (
    COMMON,
    LOG_ALPHA,
    LOG_ALPHA_STD,
    LOG_LENGTH_STD,
    LOG_LINEAR,
    LOG_LINEAR_STD,
    fit_lengths,
    likely_log_length,
    value_and_slopes,
)


def tables(generator, b=2, m=9, d=3, q=2):
    """Inputs, targets, weights, and the numbers: log lengths, log rho, log alpha."""
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    return rand(b, m, d), rand(b, m, q), torch.ones(b, m, dtype=torch.float64), [0.5 + 0.3 * rand(b, d), *rand(2, b)]


def slow(Z, T, log_length, log_linear, log_alpha):
    """Of one table: contrasts of the targets, which know nothing of a bias, are Gaussian; their noise is integrated at
    its best under the weak prior. Log lengths have a part in common, of so many times the variance of the own one."""
    a, rho, alpha = (Z / log_length.exp()).numpy(), math.exp(float(log_linear)), math.exp(float(log_alpha))
    square = ((a[:, None] - a[None]) ** 2).sum(-1)
    N = null_space(np.ones((1, len(a))))
    C = N.T @ (np.eye(len(a)) + alpha * (np.exp(-0.5 * square) + rho * a @ a.T)) @ N
    value = 0.0
    for t in (N.T @ T.numpy()).T:
        n = len(t) + WEAK_NOISE_PRIOR.rows
        misfit = t @ np.linalg.solve(C, t) + WEAK_NOISE_PRIOR.rows * WEAK_NOISE_PRIOR.share
        value += 0.5 * (n * math.log(misfit) + np.linalg.slogdet(C)[1])
    d = a.shape[1]
    away = log_length.numpy() - likely_log_length(d)
    prior = away @ np.linalg.solve(LOG_LENGTH_STD**2 * (np.eye(d) + COMMON * np.ones((d, d))), away)
    prior += ((float(log_linear) - LOG_LINEAR) / LOG_LINEAR_STD) ** 2
    prior += ((float(log_alpha) - LOG_ALPHA) / LOG_ALPHA_STD) ** 2
    return value + 0.5 * prior


def test_the_value_is_that_of_contrasts_up_to_a_constant(generator):
    Z, T, weight, numbers = tables(generator)
    moves = torch.tensor([0.2, -0.1, 0.4], dtype=torch.float64), 0.7, -0.5
    moved = [number + move for number, move in zip(numbers, moves, strict=True)]
    ours, other = (value_and_slopes(Z, T, weight, *x)[0] for x in (numbers, moved))
    for i in range(2):
        here, there = (slow(Z[i], T[i], *(number[i] for number in x)) for x in (numbers, moved))
        assert float(other[i] - ours[i]) == pytest.approx(there - here, rel=1e-9)


def test_slopes_are_those_of_differences(generator):
    Z, T, _, numbers = tables(generator)
    weight = torch.rand(2, 9, generator=generator, dtype=torch.float64)
    _, slopes = value_and_slopes(Z, T, weight, *numbers)
    step, eye = 1e-6, torch.eye(3, dtype=torch.float64)
    # lengths one by one, then rho, then alpha
    for which, move in [*((0, row) for row in eye), (1, 1.0), (2, 1.0)]:
        up, down = ([x + way * step * move if i == which else x for i, x in enumerate(numbers)] for way in (1, -1))
        slope = (value_and_slopes(Z, T, weight, *up)[0] - value_and_slopes(Z, T, weight, *down)[0]) / (2 * step)
        ours = slopes[which] if which else slopes[0] @ move
        torch.testing.assert_close(ours, slope, rtol=1e-5, atol=1e-6)


def test_weights_count_copies_and_zero_counts_nothing(generator):
    Z, T, weight, numbers = tables(generator, b=1)
    weight[0, 2], weight[0, 5] = 2, 0
    rows = [0, 1, 2, 2, 3, 4, 6, 7, 8]
    _, weighted = value_and_slopes(Z, T, weight, *numbers)
    _, copied = value_and_slopes(Z[:, rows], T[:, rows], torch.ones(1, 9).double(), *numbers)
    for a, b in zip(weighted, copied, strict=True):
        close(a, b, loose=100)


def test_inputs_without_effect_get_the_longest_lengths():
    rng = np.random.default_rng(0)
    X = torch.from_numpy(rng.normal(size=(3, 60, 4)))
    T = (torch.sin(2 * X[..., 1]) + 0.1 * torch.from_numpy(rng.normal(size=(3, 60))))[..., None]
    lengths, linear = fit_lengths(X, T, torch.ones(3, 60, dtype=torch.float64))
    assert (lengths.argmin(1) == 1).all()
    assert (lengths[:, [0, 2, 3]].amin(1) - lengths[:, 1] > 1.0).all()
    alone = fit_lengths(X[1:2], T[1:2], torch.ones(1, 60, dtype=torch.float64))
    for together, by_itself in zip((lengths, linear), alone, strict=True):
        close(together[1:2], by_itself, loose=1e6)  # tables side by side do not meet; rounding grows over the steps


def test_the_share_of_the_linear_part_is_found():
    """A straight line raises it, a wave without a trend lowers it."""
    x = torch.linspace(-2, 2, 40, dtype=torch.float64)
    noise = 0.05 * torch.from_numpy(np.random.default_rng(0).normal(size=(2, 40)))
    T = torch.stack([1.5 * x, torch.cos(2.5 * x)]) + noise
    _, log_linear = fit_lengths(x.expand(2, 40)[..., None], T[..., None], torch.ones(2, 40, dtype=torch.float64))
    assert log_linear[0] > LOG_LINEAR + 0.5
    assert log_linear[1] < LOG_LINEAR - 0.5


def test_a_table_that_cannot_be_factored_leaves_the_others_alone(generator):
    Z, T, weight, numbers = tables(generator)
    Z[0, 0, 0] = math.nan
    value, slopes = value_and_slopes(Z, T, weight, *numbers)
    assert len(slopes) == len(numbers)
    assert torch.isfinite(value[1])
    for slope in slopes:
        assert bool((slope[0] == 0).all())
        assert bool(torch.isfinite(slope[1]).all())


@pytest.mark.parametrize(("d", "tolerance"), [(3, 0.002), (12, 0.02)])
def test_fourier_features_are_the_process(d, tolerance, generator):
    """By frequencies of a Sobol sequence, and in many dimensions by orthogonal ones."""
    log_length = 0.4 * torch.randn(d, generator=generator, dtype=torch.float64) + 0.5 * math.log(d)
    log_linear = torch.tensor(-0.7, dtype=torch.float64)
    network = fourier_network(log_length, log_linear, 30_000, generator=generator).requires_grad_(False)
    Z = torch.randn(6, d, generator=generator, dtype=torch.float64)
    a = Z / log_length.exp()
    kernel = torch.exp(-0.5 * torch.cdist(a, a).square()) + math.exp(-0.7) * a @ a.mT
    phi = network(Z)
    torch.testing.assert_close(phi @ phi.mT / 30_000, kernel, atol=tolerance, rtol=0)
    assert phi.shape == (6, 60_000 + d)
    close(phi[:, -d:] @ phi[:, -d:].mT / 30_000, math.exp(-0.7) * a @ a.mT)


@pytest.mark.parametrize("d", [1, 4, 10, 20])
def test_frequencies_are_spread_better_than_independent_ones(d, generator):
    """Mean square error of the kernel over some draws of 256 frequencies."""
    a = torch.randn(20, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
    kernel = torch.exp(-0.5 * torch.cdist(a, a).square())
    apart = a[:, None] - a[None]
    error = lambda W: float(((apart @ W).cos().mean(-1) - kernel).square().mean())
    ours = np.mean([error(frequencies(d, 256, generator)) for _ in range(10)])
    independent = np.mean([error(torch.randn(d, 256, generator=generator, dtype=torch.float64)) for _ in range(10)])
    assert ours < (0.2 if d <= 4 else 0.8) * independent


def test_the_generator_decides_on_frequencies():
    for d in (2, 12):
        one, same, other = (frequencies(d, 16, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
        assert one.shape == (d, 16)
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_the_noise_under_its_prior_is_that_of_the_largest_product(noise, generator):
    m, q, prior = 12, 2, NoisePrior(3.0, 0.2)
    phi = torch.randn(m, 5, generator=generator, dtype=torch.float64)
    T = phi[:, :q] + 0.5 * torch.randn(m, q, generator=generator, dtype=torch.float64)
    statistics = Statistics.from_features(affine_features(phi), T)
    found = optimal_alphas(Statistics.stacked([statistics]), noise=noise, noise_prior=prior)[0]
    scale = T.var(0, unbiased=False)
    A = phi - phi.mean(0)
    t = T - T.mean(0)

    def negative_log(log_alpha, Sigma):
        """Evidence of the contrasts times the inverse Wishart density, by Cholesky factors of the rows."""
        C = torch.eye(m, dtype=torch.float64) + math.exp(log_alpha) * A @ A.mT
        N = torch.from_numpy(null_space(np.ones((1, m))))
        C, u = N.mT @ C @ N, N.mT @ t
        S = u.mT @ torch.linalg.solve(C, u) + prior.rows * prior.share * torch.diag(scale)
        if noise == "diagonal":
            S = torch.diag(S.diagonal())
        rows = m - 1 + prior.rows
        return float(
            0.5 * (q * torch.logdet(C) + rows * torch.logdet(Sigma) + torch.trace(torch.linalg.solve(Sigma, S)))
        )

    best = negative_log(found.log_alpha, found.noise_cov)
    for move in (-0.05, 0.05):
        assert negative_log(found.log_alpha + move, found.noise_cov) > best
        for i in range(q):
            other = found.noise_cov.clone()
            other[i, i] *= 1 + move
            assert negative_log(found.log_alpha, other) > best


def test_without_a_prior_the_evidence_stands_alone_and_with_it_noise_never_vanishes(generator):
    phi = torch.randn(10, 30, generator=generator, dtype=torch.float64)
    T = torch.randn(10, 1, generator=generator, dtype=torch.float64)
    statistics = Statistics.from_features(affine_features(phi), T)
    alone, held = (by_evidence([statistics], noise_prior=prior)[0] for prior in (NoisePrior(), WEAK_NOISE_PRIOR))
    same = profile(statistics, alone.log_alpha)
    close(alone.Sigma_E, same.noise_cov)
    least = WEAK_NOISE_PRIOR.rows * WEAK_NOISE_PRIOR.share / (9 + WEAK_NOISE_PRIOR.rows) * float(T.var(unbiased=False))
    assert float(held.Sigma_E) >= least
    values = held.equations.spectrum.values
    ridge = math.exp(-held.log_alpha)
    assert held.determined == pytest.approx(float((values / (values + ridge)).sum()), rel=1e-6)
