"""Correlated noise with targets that are partly missing, against the dense Gaussian over all that was observed."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lastlayer import BLLRegressor, load
from lastlayer.bayes.coupled import CoupledEquations, PatternStatistics
from lastlayer.bayes.evidence import general_nlml, profiled_nlml
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.maximum import by_evidence
from lastlayer.bayes.partial_posterior import by_pattern, posterior_of
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Statistics
from lastlayer.data.observe import Value
from lastlayer.errors import InputError

Q, K, M = 3, 4, 14
NOISE = torch.tensor([[0.5, 0.3, -0.1], [0.3, 0.6, 0.2], [-0.1, 0.2, 0.9]], dtype=torch.float64)


def rows(seed: int = 0, share: float = 0.4):
    """Affine features, targets, and which of them are known: of every row at least one, of every output two."""
    g = torch.Generator().manual_seed(seed)
    Phi = affine_features(torch.randn(M, K, generator=g, dtype=torch.float64) + 2.0)
    T = torch.randn(M, Q, generator=g, dtype=torch.float64)
    present = (torch.rand(M, Q, generator=g) > share).double()
    present[torch.arange(M), torch.randint(Q, (M,), generator=g)] = 1.0
    present[:2] = 1.0
    return Phi, T * present, present


def dense(Phi, T, present, log_alpha, bias_var):
    """Phi (x) I for the observed targets alone, with the noise between those of a row; prior alpha Sigma_E (x) I."""
    m, q = T.shape
    p = Phi.shape[1]
    places = [(i, j) for j in range(q) for i in range(m) if present[i, j]]
    big = torch.zeros(len(places), p * q, dtype=torch.float64)
    for r, (i, j) in enumerate(places):
        big[r, j * p : (j + 1) * p] = Phi[i]
    E = torch.stack([torch.stack([NOISE[j, b] if i == a else NOISE[0, 0] * 0 for a, b in places]) for i, j in places])
    alpha = math.exp(log_alpha)
    prior = torch.full((p,), alpha, dtype=torch.float64)
    if bias_var is not None:
        prior[-1] = bias_var
    W = torch.kron(NOISE, torch.diag(prior))
    t = torch.stack([T[i, j] for i, j in places])
    return big, t, E, W


def conditioned(new, big, t, E, W):
    """Mean and covariance of the function at new points, by the joint Gaussian over values."""
    q = len(NOISE)
    at_new = torch.kron(torch.eye(q, dtype=torch.float64), new)
    gain = torch.linalg.solve(big @ W @ big.T + E, big @ W @ at_new.T).T
    return gain @ t, at_new @ W @ at_new.T - gain @ big @ W @ at_new.T


def test_what_stands_in_the_place_of_a_missing_target_does_not_matter():
    Phi, T, present = rows()
    found = PatternStatistics.from_rows(Phi, T, present)
    other = PatternStatistics.from_rows(Phi, torch.where(present > 0, T, 1e3), present)
    for name in ("count", "mean", "scatter"):
        torch.testing.assert_close(getattr(other, name), getattr(found, name), rtol=0, atol=0)


@given(seed=st.integers(0, 10_000), share=st.floats(0.0, 0.8))
def test_the_posterior_is_the_dense_gaussian_over_what_was_observed(seed, share):
    Phi, T, present = rows(seed, share)
    posterior = posterior_of(PatternStatistics.from_rows(Phi, T, present), 0.7, NOISE, "full", "shared")
    new = affine_features(torch.randn(5, K, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64))
    mean, cov = conditioned(new, *dense(Phi, T, present, 0.7, None))
    torch.testing.assert_close(posterior.mean(new).T.flatten(), mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(posterior.joint(new).function_cov(), cov, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        posterior.predict(new).variance_ratio.T.flatten() * NOISE.diagonal().repeat_interleave(5), cov.diagonal()
    )
    torch.testing.assert_close(new @ posterior.weights, posterior.mean(new))
    each = torch.stack([cov[i::5, i::5] for i in range(5)])
    torch.testing.assert_close(posterior.function_cov(new), each)


@given(seed=st.integers(0, 10_000))
def test_a_flat_bias_is_the_limit_of_a_wide_prior(seed):
    Phi, T, present = rows(seed)
    posterior = posterior_of(PatternStatistics.from_rows(Phi, T, present), 0.7, NOISE, "full", "flat")
    new = affine_features(torch.randn(5, K, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64))
    mean, cov = conditioned(new, *dense(Phi, T, present, 0.7, 1e7))
    torch.testing.assert_close(posterior.mean(new).T.flatten(), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(posterior.joint(new).function_cov(), cov, rtol=1e-5, atol=1e-5)


@given(seed=st.integers(0, 10_000), log_alpha=st.floats(-2, 3))
def test_the_evidence_is_that_of_lemma_2(seed, log_alpha):
    Phi, T, present = rows(seed)
    big, t, E, W = dense(Phi, T, present, log_alpha, None)
    equations = CoupledEquations.of(PatternStatistics.from_rows(Phi, T, present), "shared")
    value = equations.at(log_alpha, torch.linalg.cholesky(NOISE)).nlml()
    expected = general_nlml(big, t, E, W) / present.sum(0).max()
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias_prior", ["flat", "shared"])
def test_with_every_target_known_it_is_the_posterior_of_all_outputs(bias_prior):
    Phi, T, _ = rows(share=0.0)
    statistics = Statistics.from_features(Phi, T)
    together = Posterior(statistics, 0.3, NOISE, "full", bias_prior)
    coupled = by_pattern(together)
    new = affine_features(torch.randn(6, K, dtype=torch.float64))
    torch.testing.assert_close(coupled.mean(new), together.mean(new))
    torch.testing.assert_close(coupled.variance_ratio(new), together.variance_ratio(new)[:, None].expand(-1, Q))
    torch.testing.assert_close(coupled.joint(new).target_cov(), together.joint(new).target_cov())
    (best,) = by_evidence([PatternStatistics.complete(statistics)], bias_prior=bias_prior)
    value = profiled_nlml(Phi, T, torch.tensor(best.log_alpha), noise="full", bias_prior=bias_prior)
    assert best.nlml == pytest.approx(float(value), abs=1e-6)


def test_gradients_of_the_evidence():
    Phi, T, present = rows()
    linear = Phi[:, :-1].clone().requires_grad_()
    log_alpha = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    root = torch.linalg.cholesky(NOISE).requires_grad_()

    def value(linear, log_alpha, root):
        statistics = PatternStatistics.from_rows(affine_features(linear), T, present)
        return CoupledEquations.of(statistics).at(log_alpha, root.tril()).nlml()

    assert torch.autograd.gradcheck(value, (linear, log_alpha, root), rtol=1e-5)


def test_statistics_add_up_and_go_again():
    Phi, T, present = rows()
    whole = PatternStatistics.from_rows(Phi, T, present)
    first, second = (
        PatternStatistics.from_rows(Phi[part], T[part], present[part]) for part in (slice(10), slice(10, M))
    )
    new = affine_features(torch.randn(4, K, dtype=torch.float64))
    say = lambda statistics: posterior_of(statistics, 0.7, NOISE, "full").joint(new)
    for statistics in (first + second, whole + first - first, (whole - first) + first):
        torch.testing.assert_close(say(statistics).mean, say(whole).mean)
        torch.testing.assert_close(say(statistics).ratio_cov, say(whole).ratio_cov)
    torch.testing.assert_close(whole.n_by_output, present.sum(0))
    only = PatternStatistics.from_rows(Phi, T, torch.ones_like(T))
    with pytest.raises(InputError, match="not all added"):
        only - PatternStatistics.from_rows(Phi[:3], T[:3], torch.eye(3, dtype=torch.float64))


def test_draws_of_the_weights_have_the_covariance_of_the_posterior():
    Phi, T, present = rows()
    posterior = posterior_of(PatternStatistics.from_rows(Phi, T, present), 0.7, NOISE, "full")
    new = affine_features(torch.randn(2, K, dtype=torch.float64))
    draws = new @ posterior.sample_weights(40_000, generator=torch.Generator().manual_seed(0))
    drawn = torch.cov(draws.transpose(1, 2).flatten(1).T)
    cov = posterior.joint(new).function_cov()
    torch.testing.assert_close(drawn, cov, rtol=0.05, atol=0.02 * float(cov.diagonal().max()))


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (160, 2))
    noise = 0.3 * rng.standard_normal((160, 2)) @ np.linalg.cholesky([[1.0, 0.9], [0.9, 1.0]]).T
    Y = np.column_stack([np.sin(2 * X[:, 0]), X[:, 1] ** 2]) + noise
    known = Y.copy()
    known[40:120][np.arange(80), rng.integers(0, 2, 80)] = np.nan
    return X, Y, known


@pytest.fixture(scope="module")
def model(table):
    X, _, known = table
    with pytest.warns(UserWarning, match="missing"):
        return BLLRegressor(preset="evidence", noise="full", hidden=(12,), max_epochs=150, random_state=0).fit(
            X[:140], known[:140]
        )


def test_a_regressor_learns_the_correlation_of_noise_from_targets_partly_missing(table, model):
    X, Y, _ = table
    p = model.predictive(X[140:])
    C = p.correlation[0]
    assert 0.6 < C[0, 1] < 1.0
    other = BLLRegressor(preset="evidence", hidden=(12,), max_epochs=150, random_state=0)
    with pytest.warns(UserWarning, match="missing"):
        other.fit(X[:140], table[2][:140])
    assert p.log_prob(Y[140:]).mean() > other.predictive(X[140:]).log_prob(Y[140:]).mean() + 0.1


def test_what_a_coupled_model_says_agrees_with_itself(table, model, tmp_path):
    X, _, known = table
    new = X[140:]
    p, joint = model.predictive(new), model.joint(new)
    of_functionals = model.joint_of([Value(0).at(new[:3]), Value(1).at(new[:3])])
    np.testing.assert_allclose(of_functionals.cov(), model.joint(new[:3], noise=False).cov(), rtol=1e-9)
    m = len(new)
    at_points = np.stack([joint.cov()[i::m, i::m] for i in range(m)])
    np.testing.assert_allclose(p.cov(), at_points, rtol=1e-9, atol=1e-12)
    draws = model.sample_y(new[:2], 20_000, random_state=0)  # (m, q, n)
    np.testing.assert_allclose(np.cov(draws.transpose(1, 0, 2).reshape(4, -1)), model.joint(new[:2]).cov(), atol=0.01)
    model.save(tmp_path / "coupled.lastlayer")
    loaded = load(tmp_path / "coupled.lastlayer")
    np.testing.assert_array_equal(loaded.predictive(new).cov(), p.cov())
    loaded.update(new, known[140:])
    assert (loaded.predictive(new).epistemic_var < p.epistemic_var).all()
    loaded.remove(new, known[140:])
    np.testing.assert_allclose(loaded.predictive(new).cov(), p.cov(), rtol=1e-8)
    assert np.isfinite(loaded.update(X[60:62], known[60:62]).reestimate().predictive(new).mean).all()
