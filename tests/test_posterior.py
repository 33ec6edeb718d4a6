"""Lemma 1 and everything built on it, against the slow forms; accuracy against 50 digits."""

import contextlib
import math

import mpmath
import pytest
import torch
from helpers import close, precision_matrix, problem, refused
from hypothesis import given
from hypothesis import strategies as st

from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.precision import Cholesky, eigh
from lastlayer.bayes.statistics import Statistics
from lastlayer.errors import PrecisionError

PRIORS = ("flat", "shared")


def posterior(P, T, log_alpha=0.7, **options) -> Posterior:
    return Posterior(Statistics.from_features(affine_features(P), T), log_alpha, **options)


@pytest.mark.parametrize("bias_prior", PRIORS)
@given(m=st.integers(2, 30), k=st.integers(1, 12), rank=st.integers(1, 12), log_alpha=st.floats(-6, 8))
def test_lemma_1_weights_and_variance(bias_prior, m, k, rank, log_alpha):
    P, T = problem(m, k, 2, seed=m, rank=min(rank, k))
    Phi, Lambda = affine_features(P), precision_matrix(P, log_alpha, bias_prior)
    phi = affine_features(problem(5, k, seed=99)[0])
    got = posterior(P, T, log_alpha, bias_prior=bias_prior)
    loose = 1e5 * math.exp(max(log_alpha, 0))  # the slow form solves with the uncentred matrix
    close(got.weights, torch.linalg.solve(Lambda, Phi.T @ T), loose=loose)
    truth = (phi * torch.linalg.solve(Lambda, phi.T).T).sum(1)
    close(got.variance_ratio(phi), truth, loose=loose)
    close(got.variance_ratio(phi, log_alpha), truth, loose=loose)  # the spectral form
    close(got.predict(phi).mean, phi @ got.weights, loose=10)
    close(got.predict(phi).variance_ratio, truth, loose=loose)


@pytest.mark.parametrize("bias_prior", PRIORS)
def test_the_posterior_is_bayes_rule_by_brute_force(bias_prior):
    """Weights and targets are jointly Gaussian: condition the one on the other with general formulas."""
    P, T = problem(9, 3, 2)
    Phi, q = affine_features(P), 2
    Sigma_E = torch.tensor([[0.5, 0.2], [0.2, 0.3]], dtype=torch.float64)
    prior = math.exp(0.7) * torch.eye(4, dtype=torch.float64)
    if bias_prior == "flat":
        prior[3, 3] = 1e8
    phi = affine_features(torch.randn(3, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    W_cov, big_Phi = torch.kron(Sigma_E, prior), torch.kron(torch.eye(q, dtype=torch.float64), Phi)
    big_phi = torch.kron(torch.eye(q, dtype=torch.float64), phi)
    T_cov = big_Phi @ W_cov @ big_Phi.T + torch.kron(Sigma_E, torch.eye(9, dtype=torch.float64))
    gain = torch.linalg.solve(T_cov, big_Phi @ W_cov).T
    W = gain @ T.T.reshape(-1)
    cov = big_phi @ (W_cov - gain @ big_Phi @ W_cov) @ big_phi.T
    got = posterior(P, T, 0.7, noise_cov=Sigma_E, bias_prior=bias_prior)
    loose = 1e5 if bias_prior == "flat" else 10  # the limit of a finite bias variance
    close(got.weights.T.reshape(-1), W, loose=loose)
    joint = got.joint(phi)
    close(joint.function_cov(), cov, loose=loose)
    close(joint.target_cov(), cov + torch.kron(Sigma_E, torch.eye(3, dtype=torch.float64)), loose=loose)
    marginal = got.predict(phi)
    for i in range(3):
        at = torch.tensor([i, 3 + i])
        close(marginal.function_cov()[i], joint.function_cov()[at[:, None], at])
        close(marginal.target_cov()[i], joint.target_cov()[at[:, None], at])


@pytest.mark.parametrize("bias_prior", PRIORS)
def test_weight_samples_have_the_posteriors_mean_and_covariance(bias_prior, generator):
    P, T = problem(12, 2, 2)
    Sigma_E = torch.tensor([[0.5, 0.2], [0.2, 0.3]], dtype=torch.float64)
    got = posterior(P, T, noise_cov=Sigma_E, bias_prior=bias_prior)
    draws = got.sample_weights(200_000, generator=generator)
    vec = draws.mT.contiguous().flatten(1)
    truth = torch.kron(Sigma_E, torch.linalg.inv(precision_matrix(P, 0.7, bias_prior)).contiguous())
    assert (vec.mean(0) - got.weights.T.reshape(-1)).abs().max() < 5 * (truth.diagonal().max() / len(draws)).sqrt()
    assert (vec.T.contiguous().cov() - truth).abs().max() < 0.02 * truth.abs().max()
    again = got.sample_weights(3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(again, got.sample_weights(3, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("bias_prior", PRIORS)
@given(seed=st.integers(0, 20), rank=st.integers(1, 5))
def test_the_variance_never_falls_as_alpha_grows(bias_prior, seed, rank):
    P, T = problem(15, 5, seed=seed, rank=rank)
    phi = affine_features(problem(4, 5, seed=seed + 1)[0])
    log_alphas = torch.tensor([*torch.linspace(-20, 60, 30).tolist(), math.inf], dtype=torch.float64)
    v = posterior(P, T, bias_prior=bias_prior).variance_ratios(phi, log_alphas)
    assert bool((v[1:] >= v[:-1] * (1 - 1e-12)).all())
    assert bool(torch.isfinite(v).all())
    if bias_prior == "flat":
        assert bool((v > 1 / 15).all())
        close(v[0], torch.full((4,), 1 / 15, dtype=torch.float64), loose=1e6)  # alpha -> 0 leaves the bias alone


def test_many_alphas_at_once_are_each_of_them():
    P, T = problem()
    got, phi = posterior(P, T), affine_features(problem(7, seed=3)[0])
    log_alphas = torch.tensor([-2.0, 0.0, 3.0, math.inf], dtype=torch.float64)
    for row, log_alpha in zip(got.variance_ratios(phi, log_alphas), log_alphas, strict=True):
        close(row, got.variance_ratio(phi, float(log_alpha)))


def test_infinite_alpha_is_least_squares_where_the_data_speak_and_large_where_they_do_not():
    P, T = problem(30, 4)
    Phi = affine_features(P)
    got = posterior(P, T, math.inf)
    close(got.weights, torch.linalg.lstsq(Phi, T).solution, loose=10)
    close(got.variance_ratio(Phi), (torch.linalg.qr(Phi).Q ** 2).sum(1), loose=10)
    dead = torch.cat([P, torch.zeros(30, 1, dtype=torch.float64)], 1)
    got = posterior(dead, T, math.inf)
    inside, outside = dead.clone(), dead.clone()
    outside[:, 4] = 1.0
    close(got.variance_ratio(affine_features(inside)), (torch.linalg.qr(Phi).Q ** 2).sum(1), loose=10)
    v = got.variance_ratio(affine_features(outside))
    assert bool(((v > 1e10) & torch.isfinite(v)).all())


@given(cut=st.integers(3, 37), forgetting=st.floats(0.5, 1.0))
def test_updating_and_removing_rows_is_refitting(cut, forgetting):
    P, T = problem(40)
    of = lambda rows: Statistics.from_features(affine_features(P[rows]), T[rows])
    phi = affine_features(P)
    first = Posterior(of(slice(cut)), 0.7)
    both = first.update(of(slice(cut, None)))
    close(both.weights, posterior(P, T).weights)
    close(both.variance_ratio(phi), posterior(P, T).variance_ratio(phi))
    back = both.remove(of(slice(cut, None)))
    close(back.weights, first.weights, loose=100)  # what was subtracted limits what is left
    close(back.variance_ratio(phi), first.variance_ratio(phi), loose=100)
    weight = torch.ones(40, dtype=torch.float64)
    weight[:cut] = forgetting
    forgotten = Posterior(Statistics.from_features(affine_features(P), T, sample_weight=weight), 0.7)
    close(first.update(of(slice(cut, None)), forgetting=forgetting).weights, forgotten.weights)


def test_at_infinite_alpha_collinear_features_get_the_weights_of_least_norm():
    P, T = problem(30, 6, rank=3)
    Z = P - P.mean(0)
    close(posterior(P, T, math.inf).weights[:-1], torch.linalg.pinv(Z, rtol=1e-10) @ (T - T.mean(0)), loose=100)


def test_the_joint_covariance_follows_another_alpha_too():
    P, T = problem()
    got, phi = posterior(P, T), affine_features(problem(7, seed=3)[0])
    close(got.joint(phi, 3.0).ratio_cov.diagonal(), got.variance_ratio(phi, 3.0))
    close(got.joint(phi, 3.0).mean, got.mean(phi))


def test_it_is_differentiable_in_its_input():
    P, T = problem(12, 3)
    got = posterior(P, T)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: got.variance_ratio(affine_features(x)), x)
    assert torch.autograd.gradcheck(lambda x: got.variance_ratio(affine_features(x), 2.0), x)
    assert torch.autograd.gradcheck(lambda x: got.predict(affine_features(x)).mean, x)
    assert torch.autograd.gradcheck(lambda x: got.joint(affine_features(x)).ratio_cov, x)


def test_asking_changes_nothing_and_fields_are_frozen():
    P, T = problem()
    got = posterior(P, T)
    before = got.weights.clone()
    got.variance_ratio(affine_features(P), 5.0)
    got.sample_weights(2)
    assert torch.equal(before, got.weights)
    with pytest.raises(AttributeError):
        got.log_alpha = 2.0


def test_wrong_arguments_speak(as_a_user):
    P, T = problem()
    refused("nan", posterior, P, T, math.nan)
    refused("one model", posterior, P[None], T[None])


def ill_conditioned(m, k, condition, kind, seed=0):
    """Features with a given condition number: by rotation, by columns of very different scale, or by an offset."""
    g = torch.Generator().manual_seed(seed)
    Z = torch.linalg.qr(torch.randn(m, k, generator=g, dtype=torch.float64)).Q
    singular = torch.logspace(0, -math.log10(condition), k, dtype=torch.float64)
    if kind == "rotated":
        return Z * singular @ torch.linalg.qr(torch.randn(k, k, generator=g, dtype=torch.float64)).Q
    if kind == "scaled":
        return Z * singular
    return Z + math.sqrt(condition)


def exact(P, T, phi, log_alpha):
    """Weights and variance ratio under the flat prior with 50 digits, from the float64 numbers as they are."""
    with mpmath.workdps(50):
        Phi = mpmath.matrix(affine_features(P).tolist())
        Lambda = Phi.T * Phi
        if math.isfinite(log_alpha):
            for i in range(P.shape[1]):
                Lambda[i, i] += mpmath.exp(-mpmath.mpf(log_alpha))
        W = mpmath.lu_solve(Lambda, Phi.T * mpmath.matrix(T.tolist()))
        ratio = []
        for row in affine_features(phi).tolist():
            x = mpmath.matrix(row)
            ratio.append((x.T * mpmath.lu_solve(Lambda, x))[0])
        return tuple(torch.tensor([float(x) for x in values], dtype=torch.float64) for values in (W, ratio))


@pytest.mark.parametrize("kind", ["rotated", "scaled", "offset"])
@pytest.mark.parametrize("condition", [1e2, 1e5, 1e8, 1e11, 1e14])
@pytest.mark.parametrize("log_alpha", [0.0, 10.0, 25.0, 50.0])
def test_right_to_a_millionth_against_50_digits_or_an_error(kind, condition, log_alpha):
    answers = right_answers(ill_conditioned(12, 4, condition, kind), log_alpha)
    if condition <= 1e2 or log_alpha == 0:
        assert answers == 11, "an error must not be an excuse where float64 is good enough"


@pytest.mark.parametrize("offset", [1e8, 1e9, 1e10, 1e11])
@pytest.mark.parametrize("log_alpha", [0.0, 10.0, 25.0])
def test_features_far_from_zero_are_right_or_an_error_too(offset, log_alpha):
    right_answers(ill_conditioned(12, 4, 1.0, "scaled") + offset, log_alpha)


def right_answers(P: torch.Tensor, log_alpha: float) -> int:
    """Ask for weights and variances at five points by both factorisations: none may be wrong; how many came at all."""
    g = torch.Generator().manual_seed(1)
    T = torch.randn(12, 1, generator=g, dtype=torch.float64)
    phi = torch.cat([P[:2], P.mean(0) + torch.randn(3, 4, generator=g, dtype=torch.float64)])
    W, ratio = exact(P, T, phi, log_alpha)
    got, at = posterior(P, T, log_alpha), lambda i: affine_features(phi[i : i + 1])
    answers = 0
    for ask, truth in (
        (lambda: got.weights[:, 0], W),
        *((lambda i=i: got.variance_ratio(at(i)), ratio[i : i + 1]) for i in range(5)),
        *((lambda i=i: got.variance_ratio(at(i), log_alpha), ratio[i : i + 1]) for i in range(5)),
    ):
        with contextlib.suppress(PrecisionError):
            error = float((ask() - truth).norm() / truth.norm())
            answers += 1
            assert error < 1e-6
    return answers


def test_whether_rounding_is_checked_is_a_choice():
    P = ill_conditioned(12, 4, 1e14, "rotated")
    T = torch.randn(12, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    far = affine_features(P.mean(0) + torch.ones(1, 4, dtype=torch.float64))
    refused("1e-06 is required", posterior(P, T, 33.0).variance_ratio, far, error=PrecisionError)
    assert torch.isfinite(posterior(P, T, 33.0, checked=False).variance_ratio(far)).all()


def test_where_a_gpu_gives_up_the_processor_goes_on(monkeypatch, as_a_user):
    A = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))

    class There:
        """A matrix on a device whose solver fails; what comes back is only a shape."""

        device = torch.device("meta")
        cpu = staticmethod(lambda: A)

    def picky(solver):
        def solve(matrix):
            if isinstance(matrix, There) or bool(matrix.isnan().any()):
                raise torch.linalg.LinAlgError("did not converge")
            return solver(matrix)

        return solve

    monkeypatch.setattr(torch.linalg, "eigh", picky(torch.linalg.eigh))
    assert eigh(There())[1].shape == (3, 3)
    refused("not finite", eigh, torch.full((2, 2), torch.nan, dtype=torch.float64), error=PrecisionError)


def test_a_pivot_of_zero_spoils_its_own_matrix_alone():
    L = torch.stack([torch.eye(3), torch.diag(torch.tensor([1.0, 0.0, 2.0]))]).double()
    inverse = Cholesky(L).inverse()
    close(inverse[0], torch.eye(3).double())
    assert not torch.isfinite(inverse[1]).all()
