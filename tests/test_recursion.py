"""Rows that come and go one by one against the same rows factored at once."""

import math

import pytest
import torch
from helpers import close, precision_matrix, problem
from hypothesis import given
from hypothesis import strategies as st

from lastlayer.features import affine_features
from lastlayer.posterior import Posterior
from lastlayer.recursion import Recursion
from lastlayer.statistics import Statistics

LOG_ALPHA = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
PRIORS = ("flat", "shared")


def batch(m: int = 60, k: int = 5, q: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Three models' features of the same rows."""
    problems = [problem(m, k, q, seed=seed) for seed in range(3)]
    return torch.stack([P for P, _ in problems]), problems[0][1]


def of(P: torch.Tensor, T: torch.Tensor, bias_prior: str, weight: torch.Tensor | None = None) -> Recursion:
    return Recursion.of(Statistics.from_linear_features(P, T, sample_weight=weight), LOG_ALPHA, bias_prior)


def same(a: Recursion, b: Recursion, *, loose: float = 10.0) -> None:
    """At new points, since roots and centres may differ."""
    P = 3 * batch(20)[0]
    close(a.mean(a.rows(P)), b.mean(b.rows(P)), loose=loose)
    close(a.variance_ratio(a.rows(P)), b.variance_ratio(b.rows(P)), loose=loose)


@pytest.mark.parametrize("bias_prior", PRIORS)
def test_it_starts_as_the_posterior(bias_prior):
    P, T = batch()
    recursion = of(P, T, bias_prior)
    new = torch.randn(7, 5, dtype=torch.float64)
    for i, log_alpha in enumerate(LOG_ALPHA):
        statistics = Statistics.from_linear_features(P[i], T)
        posterior = Posterior(statistics, log_alpha, bias_prior=bias_prior)
        alone = Recursion.of(statistics, log_alpha, bias_prior)
        close(alone.mean(alone.rows(new)), posterior.mean(affine_features(new)))
        whole = recursion.rows(new.expand(3, 7, 5))
        close(recursion.mean(whole)[i], posterior.mean(affine_features(new)))
        close(recursion.variance_ratio(whole)[i], posterior.variance_ratio(affine_features(new)))


@given(cut=st.integers(3, 50), step=st.integers(1, 12), bias_prior=st.sampled_from(PRIORS), weighted=st.booleans())
def test_rows_that_come_are_a_refit_on_all_rows(cut, step, bias_prior, weighted):
    P, T = batch()
    w = torch.linspace(0.1, 2, 60, dtype=torch.float64) if weighted else None
    part = lambda rows: None if w is None else w[rows]
    recursion = of(P[:, :cut], T[:cut], bias_prior, part(slice(cut)))
    for start in range(cut, 60, step):
        rows = slice(start, start + step)
        recursion = recursion.added(recursion.rows(P[:, rows]), T[rows], part(rows))
    same(recursion, of(P, T, bias_prior, w))


@given(n=st.integers(1, 40), step=st.integers(1, 9), bias_prior=st.sampled_from(PRIORS))
def test_rows_that_go_are_a_refit_on_the_rest(n, step, bias_prior):
    P, T = batch()
    recursion = of(P, T, bias_prior)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        recursion, pivot = recursion.removed(recursion.rows(P[:, rows]), T[rows])
        assert (pivot > 0).all()
    same(recursion, of(P[:, n:], T[n:], bias_prior), loose=1e3)  # what is left is less than what was there


@pytest.mark.parametrize("bias_prior", PRIORS)
def test_coming_and_going_is_nothing_and_the_order_does_not_matter(bias_prior):
    P, T = batch()
    start = of(P[:, :30], T[:30], bias_prior)
    Phi = start.rows(P[:, 30:])
    there = start.added(Phi, T[30:])
    same(there.removed(Phi, T[30:])[0], start)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    one_by_one = start
    for i in order.tolist():
        one_by_one = one_by_one.added(Phi[:, i : i + 1], T[30 + i : 31 + i])
    same(one_by_one, there)


@pytest.mark.parametrize("bias_prior", PRIORS)
def test_the_root_is_one_of_the_inverse_precision(bias_prior):
    P, T = batch()
    recursion = of(P[:, :20], T[:20], bias_prior)
    recursion = recursion.added(recursion.rows(P[:, 20:]), T[20:])
    for i, log_alpha in enumerate(LOG_ALPHA.tolist()):
        around = P[i] - recursion.centre[i]
        Lambda = precision_matrix(around, log_alpha, bias_prior)
        close(recursion.R[i].T @ recursion.R[i], torch.linalg.inv(Lambda))


@pytest.mark.parametrize("n", [1, 4])
def test_rows_that_were_never_in_leave_no_positive_pivot(n):
    P, T = batch()
    recursion = of(P, T, "flat")
    pivot = recursion.removed(recursion.rows(100 * P[:, :n]), T[:n])[1]
    assert not (pivot > 0).any()


def test_collinear_features_are_taken_by_their_spectrum():
    """Off the span of the rows the variance is z'z alpha, to the last digits: rounding is no direction."""
    P, T = problem(40, 6, 1, rank=3)
    statistics = Statistics.from_linear_features(P[None], T)
    log_alpha = torch.tensor([25.0], dtype=torch.float64)
    recursion = Recursion.of(statistics, log_alpha)
    posterior = Posterior(statistics[0], 25.0, rtol=math.inf)
    new = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for points in (P, new):
        close(recursion.mean(recursion.rows(points[None]))[0], posterior.mean(affine_features(points)))
    ratio = recursion.variance_ratio(recursion.rows(new[None]))[0]
    close(ratio, posterior.variance_ratio(affine_features(new)))
