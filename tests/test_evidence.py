"""Every form of the evidence against the Gaussian density, and against each other."""

import math
from dataclasses import replace
from inspect import getmodule

import pytest
import torch
from helpers import close, precision_matrix, problem, refused, sine
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import MultivariateNormal

from lastlayer import BLLRegressor
from lastlayer.bayes import evidence
from lastlayer.bayes.evidence import (
    by_evidence,
    general_nlml,
    nlml,
    optimal_alpha,
    optimal_alphas,
    profile,
    profiled_nlml,
)
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.precision import NOISE_FLOOR, NormalEquations
from lastlayer.bayes.statistics import Readings, Statistics

PRIORS = ("flat", "shared")
NOISES = ("diagonal", "full")


def total_density(P, T, log_alpha, Sigma_E, bias_prior, known=None):
    """-log p(T) by the density of vec(T), weights integrated out; flat: a bias variance large enough, density one.

    `known` variances of targets join the noise."""
    m, q = T.shape
    big = 1e9
    K = math.exp(log_alpha) * P @ P.T + (math.exp(log_alpha) if bias_prior == "shared" else 0.0)
    cov = torch.kron(Sigma_E, torch.eye(m, dtype=torch.float64) + K)
    cov = cov if known is None else cov + torch.diag(known.T.reshape(-1))
    if bias_prior == "flat":
        cov = cov + big * torch.kron(torch.eye(q, dtype=torch.float64), torch.ones(m, m, dtype=torch.float64))
    density = -MultivariateNormal(torch.zeros(m * q, dtype=torch.float64), cov).log_prob(T.T.reshape(-1))
    return density - (q * 0.5 * math.log(2 * math.pi * big) if bias_prior == "flat" else 0.0)


@pytest.mark.parametrize("bias_prior", PRIORS)
@given(m=st.integers(3, 12), k=st.integers(1, 15), q=st.integers(1, 3), log_alpha=st.floats(-3, 4))
def test_results_1_to_3_are_the_gaussian_density(bias_prior, m, k, q, log_alpha):
    P, T = problem(m, k, q, seed=m * k)
    log_sigma = torch.linspace(-0.5, 0.4, q, dtype=torch.float64)
    truth = total_density(P, T, log_alpha, torch.diag(torch.exp(2 * log_sigma)), bias_prior) / m
    got = nlml(affine_features(P), T, torch.tensor(log_alpha, dtype=torch.float64), log_sigma, bias_prior=bias_prior)
    close(got, truth, loose=1e5 if bias_prior == "flat" else 10)  # the limit of a finite bias variance


def test_lemma_2_with_general_covariances_is_the_gaussian_density(generator):
    P, T = problem(9, 4, 1)
    Phi = affine_features(P)
    A, B = (torch.randn(n, n, generator=generator, dtype=torch.float64) for n in (9, 5))
    Sigma_E, Sigma_W = A @ A.T + torch.eye(9), B @ B.T + 0.1 * torch.eye(5)
    truth = -MultivariateNormal(torch.zeros(9, dtype=torch.float64), Sigma_E + Phi @ Sigma_W @ Phi.T).log_prob(T[:, 0])
    close(general_nlml(Phi, T[:, 0], Sigma_E, Sigma_W), truth)


@pytest.mark.parametrize("bias_prior", PRIORS)
def test_theorem_1_augmented_is_exact_at_its_minimum_over_the_weights(bias_prior, generator):
    P, T = problem(15, 4, 2)
    Phi = affine_features(P).requires_grad_()
    log_alpha = torch.tensor(1.1, dtype=torch.float64, requires_grad=True)
    log_sigma = torch.tensor([-0.2, 0.3], dtype=torch.float64, requires_grad=True)
    W = torch.linalg.solve(precision_matrix(P, 1.1, bias_prior), Phi.detach().T @ T).requires_grad_()
    exact = nlml(Phi, T, log_alpha, log_sigma, bias_prior=bias_prior)
    augmented = nlml(Phi, T, log_alpha, log_sigma, W=W, bias_prior=bias_prior)
    close(augmented, exact)
    assert torch.autograd.grad(augmented, W, retain_graph=True)[0].abs().max() < 1e-12
    moved = nlml(Phi, T, log_alpha, log_sigma, W=W + 0.1 * torch.randn_like(W), bias_prior=bias_prior)
    assert moved > exact
    for a, b in zip(*(torch.autograd.grad(J, (Phi, log_alpha, log_sigma)) for J in (augmented, exact)), strict=True):
        a, b = (x[:, :-1] if x.dim() == 2 else x for x in (a, b))
        close(a, b)


@pytest.mark.parametrize("bias_prior", PRIORS)
@pytest.mark.parametrize("noise", NOISES)
def test_profiling_puts_the_noise_at_the_minimum(bias_prior, noise):
    P, T = problem(20, 3, 2)
    log_alpha = torch.tensor(0.8, dtype=torch.float64)
    J = profiled_nlml(affine_features(P), T, log_alpha, noise=noise, bias_prior=bias_prior)
    best = profile(Statistics.from_features(affine_features(P), T), 0.8, noise=noise, bias_prior=bias_prior)
    close(best.nlml, J)
    n = 20 - (bias_prior == "flat")
    W = torch.linalg.solve(precision_matrix(P, 0.8, bias_prior), affine_features(P).T @ T)
    R, penalised = T - affine_features(P) @ W, W[:-1] if bias_prior == "flat" else W
    S = R.T @ R + math.exp(-0.8) * penalised.T @ penalised
    close(best.noise_cov, S / n if noise == "full" else torch.diag(S.diagonal()) / n)
    truth = total_density(P, T, 0.8, best.noise_cov, bias_prior) / 20
    close(J, truth, loose=1e5 if bias_prior == "flat" else 10)
    for factor in (0.9, 1.1):
        assert total_density(P, T, 0.8, best.noise_cov * factor, bias_prior) / 20 > truth


@pytest.mark.parametrize("bias_prior", PRIORS)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("m", "k", "rank"), [(12, 3, 3), (6, 9, 9), (10, 5, 2)])
def test_the_closed_form_gradient_is_the_gradient(bias_prior, noise, m, k, rank):
    P, T = problem(m, k, 2, rank=rank)
    weight = torch.linspace(0.5, 2, m, dtype=torch.float64)
    words = {"noise": noise, "bias_prior": bias_prior, "sample_weight": weight}
    f = lambda P, T, a: profiled_nlml(affine_features(P), T, a, **words)
    log_alpha = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(f, (P.requires_grad_(), T.requires_grad_(), log_alpha))


@pytest.mark.parametrize("bias_prior", PRIORS)
def test_the_gradient_does_not_depend_on_its_chunks(bias_prior, monkeypatch):
    P, T = problem(12, 3)
    weight = torch.linspace(0.5, 2, 12, dtype=torch.float64)

    def gradient():
        p = P.clone().requires_grad_()
        a = torch.tensor(0.5, dtype=torch.float64)
        J = profiled_nlml(affine_features(p), T, a, bias_prior=bias_prior, sample_weight=weight)
        return torch.autograd.grad(J, p)[0]

    whole = gradient()
    monkeypatch.setattr(evidence, "GRADIENT_ROWS", 5)
    close(gradient(), whole)


def test_the_augmented_and_exact_gradients_are_gradients():
    P, T = problem(8, 3, 2)
    arguments = (torch.tensor(0.5).double(), torch.tensor([0.1, -0.1]).double(), torch.randn(4, 2).double())
    P, *arguments = (x.requires_grad_() for x in (P, *arguments))
    assert torch.autograd.gradcheck(lambda P, a, s: nlml(affine_features(P), T, a, s), (P, *arguments[:2]))
    assert torch.autograd.gradcheck(lambda P, a, s, W: nlml(affine_features(P), T, a, s, W=W), (P, *arguments))


def test_many_problems_go_through_as_one():
    problems = [problem(seed=s) for s in range(4)]
    P, T = (torch.stack(x) for x in zip(*problems, strict=True))
    log_alpha = torch.linspace(-1, 3, 4, dtype=torch.float64).requires_grad_()
    weight = (torch.rand(4, 40, generator=torch.Generator().manual_seed(1)) > 0.3).double()
    P.requires_grad_()
    J = profiled_nlml(affine_features(P), T, log_alpha, sample_weight=weight)
    grads = torch.autograd.grad(J.sum(), (P, log_alpha))
    for i, (p, t) in enumerate(problems):
        keep = weight[i] > 0
        p = p[keep].requires_grad_()
        a = log_alpha[i].detach().requires_grad_()
        one = profiled_nlml(affine_features(p), t[keep], a)
        close(J[i], one)
        g = torch.autograd.grad(one, (p, a))
        close(grads[0][i][keep], g[0])
        assert bool((grads[0][i][~keep] == 0).all())
        close(grads[1][i], g[1])


def test_a_weight_counts_copies_in_the_evidence():
    (P, T), copies, a = problem(10), torch.tensor([1, 2] * 5), torch.tensor(1.0, dtype=torch.float64)
    Phi, twice = affine_features(P), lambda x: x.repeat_interleave(copies, 0)
    for f in (profiled_nlml, lambda *x, **o: nlml(*x, torch.zeros(2, dtype=torch.float64), **o)):
        close(f(Phi, T, a, sample_weight=copies.double()), f(twice(Phi), twice(T), a))


def test_float32_features_get_float32_gradients_of_a_float64_value():
    P, T = problem()
    p32 = P.float().requires_grad_()
    J = profiled_nlml(affine_features(p32), T.float(), torch.tensor(1.0))
    assert J.dtype == torch.float64
    (g,) = torch.autograd.grad(J, p32)
    p64 = P.float().double().requires_grad_()
    (g64,) = torch.autograd.grad(profiled_nlml(affine_features(p64), T.float().double(), torch.tensor(1.0)), p64)
    assert g.dtype == torch.float32
    close(g, g64)


@pytest.mark.parametrize("bias_prior", PRIORS)
@pytest.mark.parametrize("noise", NOISES)
@given(seed=st.integers(0, 30), rank=st.integers(1, 6), m=st.integers(4, 40))
def test_the_optimum_in_alpha_is_a_stationary_point_and_global(bias_prior, noise, seed, rank, m):
    P, T = problem(m, 6, 2, seed=seed, rank=rank)
    s = Statistics.from_features(affine_features(P), T)
    best = optimal_alpha(s, noise=noise, bias_prior=bias_prior)
    scan = profile(s, torch.linspace(-15, 25, 400, dtype=torch.float64), noise=noise, bias_prior=bias_prior)
    assert best.nlml <= float(scan.nlml.min()) + (2e-6 if best.at_bound else 1e-9)
    if not best.at_bound:
        at = profile(s, best.log_alpha, noise=noise, bias_prior=bias_prior)
        assert abs(float(at.slope)) < 1e-8
        assert abs(float(at.fixed_point) - best.log_alpha) < 1e-6
        close(at.noise_cov, best.noise_cov)


def test_the_slope_in_alpha_is_the_derivative():
    P, T = problem()
    s = Statistics.from_features(affine_features(P), T)
    for bias_prior in PRIORS:
        a = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
        (g,) = torch.autograd.grad(profiled_nlml(affine_features(P), T, a, bias_prior=bias_prior), a)
        close(profile(s, 0.4, bias_prior=bias_prior).slope, g)


def test_targets_that_the_features_say_nothing_about_send_alpha_to_zero():
    P, _ = problem(200, 3)
    T = torch.randn(200, 1, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    T -= affine_features(P) @ torch.linalg.lstsq(affine_features(P), T).solution
    best = optimal_alpha(Statistics.from_features(affine_features(P), T))
    assert best.at_bound == "zero"


@pytest.mark.parametrize("noise", NOISES)
def test_a_perfect_fit_is_held_up_by_the_noise_floor_and_said(noise):
    P, _ = problem(30, 3)
    T = affine_features(P) @ torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    best = optimal_alpha(Statistics.from_features(affine_features(P), T), noise=noise)
    assert best.noise_floored
    variance = T.var(0, correction=0)
    assert bool((best.noise_cov.diagonal() >= 0.9 * NOISE_FLOOR * variance).all())
    J = profiled_nlml(affine_features(P.requires_grad_()), T, torch.tensor(best.log_alpha).double(), noise=noise)
    assert torch.isfinite(J)
    assert bool(torch.isfinite(torch.autograd.grad(J, P)[0]).all())


def slow_alpha(statistics, noise, bias_prior):
    """One model by hand: a scan, then halves of the bracket of the slope. (log alpha, at_bound)"""
    at = lambda a: profile(statistics, a, noise=noise, bias_prior=bias_prior)
    grid = NormalEquations.of(statistics, bias_prior).alpha_range(257)
    J = at(grid).nlml
    best = int(J.argmin())
    if best == 0:
        return float(grid[0]), "zero"
    near = max((i + 1 for i in range(best) if J[i] > J[best] + 1e-6), default=0)
    if grid[best] - grid[near] > 2:
        return float(grid[near]), "infinity"
    if best == 256:
        return float(grid[256]), "infinity"
    lo, hi = float(grid[best - 1]), float(grid[best + 1])
    while hi - lo > 1e-11:
        middle = (lo + hi) / 2
        lo, hi = (middle, hi) if at(middle).slope < 0 else (lo, middle)
    return (lo + hi) / 2, ""


def all_sorts(q=2, k=6):
    """Models of one shape: ordinary, collinear, of few rows, without noise, without signal, weighted, of many rows."""
    found = []
    for seed, (m, rank) in enumerate([(40, k), (40, 3), (k - 1, k), (200, k), (9, 2)]):
        P, T = problem(m, k, q, seed=seed, rank=rank)
        found.append(Statistics.from_features(affine_features(P), T))
    P, T = problem(60, k, q, seed=9)
    W = torch.randn(k + 1, q, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found.append(Statistics.from_features(affine_features(P), affine_features(P) @ W))
    rest = T - affine_features(P) @ torch.linalg.lstsq(affine_features(P), T).solution
    found.append(Statistics.from_features(affine_features(P), rest))
    weight = torch.rand(60, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found.append(Statistics.from_features(affine_features(1e4 * P), 1e-3 * T, sample_weight=weight))
    return [*found, Statistics.from_features(affine_features(P), T, sample_weight=1e7 * weight)]


@pytest.mark.parametrize("bias_prior", PRIORS)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("q", [1, 2])
def test_a_batch_of_models_is_each_of_them_alone_and_the_slow_search(q, noise, bias_prior):
    models = all_sorts(q)
    batch = optimal_alphas(Statistics.stacked(models), noise=noise, bias_prior=bias_prior)
    for statistics, found in zip(models, batch, strict=True):
        one = optimal_alpha(statistics, noise=noise, bias_prior=bias_prior)
        slow, at_bound = slow_alpha(statistics, noise, bias_prior)
        assert found.at_bound == one.at_bound == at_bound
        assert found.log_alpha == pytest.approx(one.log_alpha, abs=1e-8)
        assert found.log_alpha == pytest.approx(slow, abs=1e-8)
        assert found.nlml == pytest.approx(one.nlml, rel=1e-9)
        assert found.noise_floored == one.noise_floored
        assert found.n_steps < 15
        close(found.noise_cov, one.noise_cov, loose=1e3 if found.noise_floored else 10)  # a floor has no more digits
    assert {found.at_bound for found in batch} >= {"", "zero", "infinity"}
    assert {found.noise_floored for found in batch} == {True, False}


@pytest.mark.parametrize("numbers", [1, 40, 10**6])
def test_last_layers_of_models_of_any_shape_come_in_their_order(numbers, monkeypatch):
    monkeypatch.setattr(getmodule(by_evidence), "STACKED", numbers)
    wide, narrow = all_sorts(2, 6), all_sorts(2, 4)
    mixed = [model for pair in zip(wide, narrow, strict=True) for model in pair]
    for statistics, found in zip(mixed, by_evidence(mixed, noise="full"), strict=True):
        (one,) = by_evidence([statistics], noise="full")
        assert found.statistics is statistics
        assert found.log_alpha == pytest.approx(one.log_alpha, abs=1e-8)
        assert found.nlml == pytest.approx(one.nlml, rel=1e-9)
        assert found.noise_floored == one.noise_floored
    assert by_evidence([]) == []


@pytest.mark.parametrize("bias_prior", PRIORS)
@pytest.mark.parametrize("noise", [*NOISES, "by output", "known"])
def test_the_evidence_of_a_posterior_is_that_of_its_rows_whatever_was_added(bias_prior, noise):
    """At its own alpha and noise, which an update keeps; so it changes with every row."""
    (P, T), g = problem(24, 3, 2), torch.Generator().manual_seed(0)
    known = torch.rand(24, 2, generator=g, dtype=torch.float64)
    learned = torch.tensor([0.5, 0.8], dtype=torch.float64)

    def of_rows(rows):
        Phi = affine_features(P[rows])
        if noise == "known":
            return Statistics.of(Phi[..., :-1], Readings(T[rows], known=known[rows]), noise_var=learned)
        statistics = Statistics.from_features(Phi, T[rows])
        return statistics.each_output() if noise == "by output" else statistics

    structure = "full" if noise == "full" else "diagonal"
    cov = torch.diag(learned) if noise == "known" else None
    posterior = Posterior(of_rows(slice(0, 16)), 0.7, cov, structure, bias_prior)
    posterior = replace(posterior, noise_cov=posterior.Sigma_E)
    assert math.isfinite(posterior.nlml)
    for rows, model in ((16, posterior), (24, posterior.update(of_rows(slice(16, 24))))):
        own = known[:rows] if noise == "known" else None
        total = total_density(P[:rows], T[:rows], 0.7, posterior.Sigma_E, bias_prior, own)
        assert model.nlml * rows == pytest.approx(float(total), rel=1e-6)


def test_the_evidence_of_a_model_follows_its_rows():
    X, y = sine(60)
    model = BLLRegressor(preset="evidence", hidden=(6,), max_epochs=5, random_state=0).fit(X[:40], y[:40])
    before = model.nlml_
    model.update(X[40:], y[40:])
    (member,) = model.members_
    rows = model.fitted_.data(X, y)
    Phi, log_sigma_e = model.fitted_.features(0, rows.X), 0.5 * member.posterior.Sigma_E.diagonal().log()
    value = nlml(Phi, rows.T, torch.tensor(member.posterior.log_alpha), log_sigma_e)
    assert model.nlml_ == pytest.approx(float(value), rel=1e-9) != before


def test_a_scan_in_pieces_is_the_scan(monkeypatch):
    stack = Statistics.stacked(all_sorts())
    whole = optimal_alphas(stack)
    monkeypatch.setattr(evidence, "SCANNED", {"cpu": 1})
    for a, b in zip(optimal_alphas(stack), whole, strict=True):
        assert a.log_alpha == pytest.approx(b.log_alpha, abs=1e-12)


@pytest.mark.parametrize("bias_prior", PRIORS)
@pytest.mark.parametrize("log_alpha", [-40.0, 0.0, 40.0, math.inf])
@pytest.mark.parametrize("P", [torch.zeros(8, 3), torch.ones(8, 3), torch.eye(8), 1e8 * torch.eye(8)[:, :3]])
def test_dead_constant_and_huge_features_stay_finite(bias_prior, log_alpha, P):
    T = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    P = P.double().requires_grad_()
    J = profiled_nlml(affine_features(P), T, torch.tensor(log_alpha).double(), bias_prior=bias_prior)
    assert torch.isfinite(J)
    assert bool(torch.isfinite(torch.autograd.grad(J, P)[0]).all())


def test_the_flat_evidence_is_bounded_when_features_outnumber_samples():
    P, T = problem(6, 12, 1)
    s = Statistics.from_features(affine_features(P), T)
    J = profile(s, torch.linspace(0, 20, 5, dtype=torch.float64)).nlml
    assert bool((J[1:] > J[:-1] - 0.35).all())  # with m in the place of n it would fall by 5/6 a unit of log alpha


def test_too_few_samples_and_wrong_words_speak(as_a_user):
    P, T = problem(4)
    one = Statistics.from_features(affine_features(P[:1]), T[:1])
    refused(r"total weight of 1.*degree of freedom", profile, one, 0.0)
    refused("optimal_alphas takes a batch", optimal_alpha, Statistics.stacked([one, one]))
    profile(one, 0.0, bias_prior="shared")
    refused("did you mean 'diagonal'", profiled_nlml, affine_features(P), T, torch.tensor(0.0), noise="diag")
    refused("did you mean 'shared'", profiled_nlml, affine_features(P), T, torch.tensor(0.0), bias_prior="share")
