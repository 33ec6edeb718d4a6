"""Lengths by the evidence: value and slopes against slow forms, weights, what is found, and the features made of it."""

import math

import numpy as np
import pytest
import torch
from helpers import close
from scipy.linalg import null_space

from lastlayer.evidence import optimal_alphas, profile
from lastlayer.features import affine_features
from lastlayer.networks.mlp import fourier_network
from lastlayer.statistics import Statistics
from lastlayer.training import last_layers
from lastlayer.training.lengths import (
    LOG_ALPHA,
    LOG_ALPHA_STD,
    LOG_LENGTH_STD,
    fit_lengths,
    likely_log_length,
    value_and_slopes,
)
from lastlayer.types import WEAK_NOISE_PRIOR, NoisePrior


def tables(generator, b=2, m=9, d=3, q=2):
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    return rand(b, m, d), rand(b, m, q), torch.ones(b, m, dtype=torch.float64), 0.5 + 0.3 * rand(b, d), rand(b)


def slow(Z, T, log_length, log_alpha):
    """Of one table: contrasts of the targets, which know nothing of a bias, are Gaussian; their noise is integrated at
    its best under the weak prior."""
    a = (Z / log_length.exp()).numpy()
    square = ((a[:, None] - a[None]) ** 2).sum(-1)
    N = null_space(np.ones((1, len(a))))
    C = N.T @ (np.eye(len(a)) + math.exp(float(log_alpha)) * (np.exp(-0.5 * square) + a @ a.T)) @ N
    value = 0.0
    for t in (N.T @ T.numpy()).T:
        n = len(t) + WEAK_NOISE_PRIOR.rows
        misfit = t @ np.linalg.solve(C, t) + WEAK_NOISE_PRIOR.rows * WEAK_NOISE_PRIOR.share
        value += 0.5 * (n * math.log(misfit) + np.linalg.slogdet(C)[1])
    away = (log_length.numpy() - likely_log_length(a.shape[1])) / LOG_LENGTH_STD
    return value + 0.5 * (away @ away + ((float(log_alpha) - LOG_ALPHA) / LOG_ALPHA_STD) ** 2)


def test_the_value_is_that_of_contrasts_up_to_a_constant(generator):
    Z, T, weight, log_length, log_alpha = tables(generator)
    ours = value_and_slopes(Z, T, weight, log_length, log_alpha)[0]
    other = value_and_slopes(Z, T, weight, log_length + 0.2, log_alpha - 0.5)[0]
    for i in range(2):
        by_hand = slow(Z[i], T[i], log_length[i] + 0.2, log_alpha[i] - 0.5) - slow(
            Z[i], T[i], log_length[i], log_alpha[i]
        )
        assert float(other[i] - ours[i]) == pytest.approx(by_hand, rel=1e-9)


def test_slopes_are_those_of_differences(generator):
    Z, T, _, log_length, log_alpha = tables(generator)
    weight = torch.rand(2, 9, generator=generator, dtype=torch.float64)
    _, by_length, by_alpha = value_and_slopes(Z, T, weight, log_length, log_alpha)
    value = lambda lengths, alphas: value_and_slopes(Z, T, weight, lengths, alphas)[0]
    step = 1e-6
    for j in range(3):
        move = step * torch.nn.functional.one_hot(torch.tensor(j), 3).double()
        slope = (value(log_length + move, log_alpha) - value(log_length - move, log_alpha)) / (2 * step)
        torch.testing.assert_close(by_length[:, j], slope, rtol=1e-5, atol=1e-6)
    slope = (value(log_length, log_alpha + step) - value(log_length, log_alpha - step)) / (2 * step)
    torch.testing.assert_close(by_alpha, slope, rtol=1e-5, atol=1e-6)


def test_weights_count_copies_and_zero_counts_nothing(generator):
    Z, T, weight, log_length, log_alpha = tables(generator, b=1)
    weight[0, 2], weight[0, 5] = 2, 0
    rows = [0, 1, 2, 2, 3, 4, 6, 7, 8]
    weighted = value_and_slopes(Z, T, weight, log_length, log_alpha)
    copied = value_and_slopes(Z[:, rows], T[:, rows], torch.ones(1, 9).double(), log_length, log_alpha)
    for a, b in zip(weighted[1:], copied[1:], strict=True):
        close(a, b, loose=100)


def test_inputs_without_effect_get_the_longest_lengths():
    rng = np.random.default_rng(0)
    X = torch.from_numpy(rng.normal(size=(3, 60, 4)))
    T = (torch.sin(2 * X[..., 1]) + 0.1 * torch.from_numpy(rng.normal(size=(3, 60))))[..., None]
    lengths = fit_lengths(X, T, torch.ones(3, 60, dtype=torch.float64))
    assert (lengths.argmin(1) == 1).all()
    assert (lengths[:, [0, 2, 3]].amin(1) - lengths[:, 1] > 1.0).all()
    alone = fit_lengths(X[1:2], T[1:2], torch.ones(1, 60, dtype=torch.float64))
    close(lengths[1:2], alone, loose=1e6)  # tables side by side do not meet; rounding grows over the steps


def test_a_table_that_cannot_be_factored_leaves_the_others_alone(generator):
    Z, T, weight, log_length, log_alpha = tables(generator)
    Z[0, 0, 0] = math.nan
    value, *slopes = value_and_slopes(Z, T, weight, log_length, log_alpha)
    assert torch.isfinite(value[1])
    for slope in slopes:
        assert bool((slope[0] == 0).all())
        assert bool(torch.isfinite(slope[1]).all())


def test_fourier_features_are_the_process(generator):
    log_length = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64)
    network = fourier_network(log_length, 30_000, generator=generator).requires_grad_(False)
    Z = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    a = Z / log_length.exp()
    kernel = torch.exp(-0.5 * torch.cdist(a, a).square()) + a @ a.mT
    phi = network(Z)
    torch.testing.assert_close(phi @ phi.mT / 30_000, kernel, atol=0.02, rtol=0)
    assert network(Z).shape == (6, 60_003)


# the prior of the noise -----------------------------------------------------------------------------------------------


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
    alone, held = (last_layers([statistics], noise_prior=prior)[0] for prior in (NoisePrior(), WEAK_NOISE_PRIOR))
    same = profile(statistics, alone.posterior.log_alpha)
    close(alone.posterior.Sigma_E, same.noise_cov)
    least = WEAK_NOISE_PRIOR.rows * WEAK_NOISE_PRIOR.share / (9 + WEAK_NOISE_PRIOR.rows) * float(T.var(unbiased=False))
    assert float(held.posterior.Sigma_E) >= least
    values = held.posterior.equations.spectrum.values
    ridge = math.exp(-held.posterior.log_alpha)
    assert held.determined == pytest.approx(float((values / (values + ridge)).sum()), rel=1e-6)
