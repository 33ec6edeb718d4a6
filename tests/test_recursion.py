"""Rows that come and go one by one against the same rows factored at once."""

import numpy as np
import pytest
import torch
from helpers import close, problem
from hypothesis import given
from hypothesis import strategies as st
from numpy import ndarray

from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.recursion import Recursion
from lastlayer.bayes.statistics import Statistics

LOG_ALPHA = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
PRIORS = ("flat", "shared")


def batch(m: int = 60, k: int = 5, q: int = 2) -> tuple[ndarray, ndarray]:
    """Three models' features of the same rows."""
    problems = [problem(m, k, q, seed=seed) for seed in range(3)]
    return np.stack([P.numpy() for P, _ in problems]), problems[0][1].numpy()


def of(P: ndarray, T: ndarray, bias_prior: str, weight: ndarray | None = None) -> Recursion:
    weight = None if weight is None else torch.tensor(weight)
    statistics = Statistics.from_linear_features(torch.tensor(P), torch.tensor(T), sample_weight=weight)
    return Recursion.of(statistics, LOG_ALPHA, bias_prior)


def moved(recursion: Recursion, P: ndarray, T: ndarray, weight: ndarray | None = None, sign: float = 1.0) -> Recursion:
    """The same recursion after all these rows have come or gone."""
    for i in range(len(T)):
        w = 1.0 if weight is None else float(weight[i])
        assert recursion.move(recursion.whitened(P[:, i : i + 1]), T[i], sign=sign, weight=w)
    return recursion


def same(a: Recursion, b: Recursion, *, loose: float = 10.0) -> None:
    """At new points, since roots and centres may differ."""
    rows, others = (recursion.whitened(3 * batch(20)[0]) for recursion in (a, b))
    close(a.mean(rows), b.mean(others), loose=loose)
    close(rows.variance_ratio, others.variance_ratio, loose=loose)


@pytest.mark.parametrize("bias_prior", PRIORS)
def test_it_starts_as_the_posterior(bias_prior):
    P, T = batch()
    recursion = of(P, T, bias_prior)
    new = torch.randn(7, 5, dtype=torch.float64)
    rows = recursion.whitened(np.stack([new.numpy()] * 3))
    for i, log_alpha in enumerate(LOG_ALPHA):
        statistics = Statistics.from_linear_features(torch.tensor(P[i]), torch.tensor(T))
        posterior = Posterior(statistics, log_alpha, bias_prior=bias_prior)
        close(recursion.mean(rows)[i], posterior.mean(affine_features(new)))
        close(rows.variance_ratio[i], posterior.variance_ratio(affine_features(new)))


@given(cut=st.integers(3, 50), bias_prior=st.sampled_from(PRIORS), weighted=st.booleans())
def test_rows_that_come_are_a_refit_on_all_rows(cut, bias_prior, weighted):
    P, T = batch()
    w = np.linspace(0.1, 2, 60) if weighted else None
    first, rest = (None, None) if w is None else (w[:cut], w[cut:])
    same(moved(of(P[:, :cut], T[:cut], bias_prior, first), P[:, cut:], T[cut:], rest), of(P, T, bias_prior, w))


@given(n=st.integers(1, 40), bias_prior=st.sampled_from(PRIORS))
def test_rows_that_go_are_a_refit_on_the_rest(n, bias_prior):
    P, T = batch()
    rest = moved(of(P, T, bias_prior), P[:, :n], T[:n], sign=-1.0)
    same(rest, of(P[:, n:], T[n:], bias_prior), loose=1e3)  # what is left is less than what was there


def test_a_row_that_was_never_in_cannot_go_and_nothing_happens():
    P, T = batch()
    recursion = of(P, T, "flat")
    assert not recursion.move(recursion.whitened(100 * P[:, :1]), T[0], sign=-1.0)
    for name in ("R", "W"):
        np.testing.assert_array_equal(getattr(recursion, name), getattr(of(P, T, "flat"), name))


def test_collinear_features_are_taken_by_their_spectrum():
    """Off the span of the rows the variance is z'z alpha, to the last digits: rounding is no direction."""
    P, T = problem(40, 6, 1, rank=3)
    statistics = Statistics.from_linear_features(P[None], T)
    log_alpha = torch.tensor([25.0], dtype=torch.float64)
    recursion = Recursion.of(statistics, log_alpha)
    posterior = Posterior(statistics[0], 25.0, checked=False)
    new = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for points in (P, new):
        mean = recursion.mean(recursion.whitened(points[None].numpy()))
        close(mean[0], posterior.mean(affine_features(points)))
    ratio = recursion.whitened(new[None].numpy()).variance_ratio[0]
    close(ratio, posterior.variance_ratio(affine_features(new)))
