"""Hulls against other solvers and their certificates, the affine cost against its programme, alpha against search."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import TOLERANCE, close, precision_matrix, problem, refused, sine
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from torch import Tensor
from torch.distributions import MultivariateNormal

from lastlayer import BLLRegressor
from lastlayer.bayes.affine_cost import affine_cost, affine_cost_program
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.held_out import HeldOut, held_out_lpd
from lastlayer.bayes.hulls import (
    distance_to_affine_hull,
    distance_to_convex_hull,
    distance_to_span,
    nearest_in_affine_hull,
    nearest_in_convex_hull,
    nearest_in_span,
)
from lastlayer.bayes.posterior import Posterior, leave_one_out_cost
from lastlayer.bayes.statistics import Statistics
from lastlayer.calibration.alpha import tune_alpha, tune_alpha_on
from lastlayer.ensemble.splits import blocked_folds

F64 = torch.float64
GAMMAS = [1e-2, 3.0, 1e4]
NEAREST = [nearest_in_span, nearest_in_affine_hull, nearest_in_convex_hull]
TOL = 1e-7  # a tenth of what nearest_in_convex_hull promises


def points(r: int, d: int, seed: int = 1, reach: float = 2.0) -> Tensor:
    return reach * torch.randn(r, d, generator=torch.Generator().manual_seed(seed), dtype=F64)


shapes = st.fixed_dictionaries(
    {"m": st.integers(2, 12), "k": st.integers(1, 5), "rank": st.integers(1, 5), "seed": st.integers(0, 999)}
)


def samples(m: int, k: int, rank: int, seed: int) -> Tensor:
    return problem(m=m, k=k, rank=min(rank, k), seed=seed)[0]


def residual_of_lstsq(x: Tensor, B: Tensor) -> Tensor:
    """Distance of each x from the span of the rows of B."""
    A = B.numpy().T
    found = [np.linalg.norm(p - A @ np.linalg.lstsq(A, p, rcond=1e-12)[0]) for p in x.numpy()]
    return torch.tensor(found, dtype=F64)


def kkt_cost(x: Tensor, X: Tensor, gamma: float) -> Tensor:
    """The programme of the affine cost by its optimality conditions: one linear system for (nu, e, multipliers)."""
    m, k = X.shape
    W = np.diag(np.r_[np.ones(m), np.full(k, gamma)])
    D = np.block([[X.numpy().T, np.eye(k)], [np.ones((1, m)), np.zeros((1, k))]])
    K = np.block([[W, D.T], [D, np.zeros((k + 1, k + 1))]])
    rhs = np.hstack([np.zeros((len(x), m + k)), affine_features(x).numpy()])
    p = np.linalg.solve(K, rhs.T)[: m + k]
    return torch.as_tensor(np.einsum("ir,ij,jr->r", p, W, p))


def ratio(P: Tensor, p: Tensor, log_alpha: float, bias_prior: str = "flat") -> Tensor:
    """phi' Lambda_bar^-1 phi by an inverse."""
    Phi = affine_features(p)
    return (Phi @ torch.linalg.inv(precision_matrix(P, log_alpha, bias_prior)) * Phi).sum(-1)


def lpd(posterior: Posterior, ratios: Tensor, Phi: Tensor, T: Tensor) -> Tensor:
    """Mean log predictive density around the posterior's own mean."""
    cov = (1 + ratios)[:, None, None] * posterior.Sigma_E
    return MultivariateNormal(posterior.mean(Phi), cov).log_prob(T).mean()


@given(shape=shapes)
def test_span_and_affine_hull_are_those_of_least_squares(shape: dict[str, int]) -> None:
    X = samples(**shape)
    x = points(4, shape["k"])
    scale = x.norm()
    for distance, expected in (
        (distance_to_span(x, X), residual_of_lstsq(x, X)),
        (distance_to_affine_hull(x, X), residual_of_lstsq(x - X[0], X[1:] - X[0])),
    ):
        close(distance + scale, expected + scale, loose=100)  # rounding grows with the condition of the samples


@given(shape=shapes, reach=st.sampled_from([0.3, 3.0, 1e6]), copies=st.integers(0, 3))
@settings(max_examples=25)
def test_the_convex_hull_is_as_far_as_a_separating_plane_proves(shape, reach: float, copies: int) -> None:
    """The plane across x - p keeps the hull at a distance: a lower bound, and the point itself is an upper one."""
    X = samples(**shape)
    X = torch.cat([X, X[: min(copies, 2)], X[:1].expand(copies, -1)])
    x = points(3, shape["k"], reach=reach)
    near = nearest_in_convex_hull(x, X)
    normal = (x - near.point) / near.distance.clamp_min(1e-300)[:, None]
    proven = ((x[:, None] - X) * normal[:, None]).sum(-1).min(-1).values.clamp_min(0)
    size = (X - X.mean(0)).norm(dim=-1).max() + (x - X.mean(0)).norm(dim=-1)
    assert bool((near.distance - proven <= 10 * TOL * size).all())


@pytest.mark.parametrize("nearest", NEAREST)
@given(shape=shapes)
@example(shape={"m": 2, "k": 2, "rank": 2, "seed": 1})  # centring leaves a rounding error where the rank ends
@settings(max_examples=15)
def test_a_projection_is_the_combination_it_says(nearest, shape: dict[str, int]) -> None:
    X, x = samples(**shape), points(3, shape["k"])
    near = nearest(x, X)
    close(near.point, near.coefficients @ X)
    close(near.distance, (x - near.point).norm(dim=-1))
    if nearest is not nearest_in_span:
        close(near.coefficients.sum(-1), torch.ones(3, dtype=F64))
    if nearest is nearest_in_convex_hull:
        assert bool((near.coefficients >= 0).all())


@pytest.mark.parametrize("copies", [1, 3])
def test_one_sample_is_its_own_hull(copies: int) -> None:
    X, x = points(1, 3).expand(copies, -1), points(4, 3, seed=2)
    away = (x - X[0]).norm(dim=-1)
    close(distance_to_affine_hull(x, X), away)
    close(distance_to_convex_hull(x, X), away, loose=10 * TOL / 1e-10)
    close(distance_to_span(x, X), residual_of_lstsq(x, X))


@pytest.mark.parametrize("offset", [1e3, 1e6, 1e8])
@pytest.mark.parametrize("distance", [distance_to_affine_hull, distance_to_convex_hull])
@pytest.mark.parametrize("m", [3, 7])
def test_distances_to_hulls_move_with_the_data(distance, m: int, offset: float) -> None:
    """Whole numbers on a plane in four dimensions: the move is exact, and so must the rank be seen."""
    g = torch.Generator().manual_seed(0)
    directions = torch.tensor([[1, 2, 0, -1], [0, 1, 3, 1]], dtype=F64)
    X = torch.randint(-5, 6, (m, 2), generator=g).double() @ directions
    x = torch.randint(-5, 6, (6, 4), generator=g).double()
    moved = distance(x + offset, X + offset)
    assert float((moved - distance(x, X)).abs().max()) <= 1e-6 + 1e-15 * offset


@pytest.mark.parametrize("distance", [distance_to_span, distance_to_affine_hull])
def test_single_precision_sees_the_rank_too(distance) -> None:
    X, x = samples(20, 5, 2, 0), points(4, 5)
    close(distance(x.float(), X.float()), distance(x, X))


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("nearest", NEAREST)
def test_hulls_need_samples_of_the_same_columns_and_take_no_points(nearest) -> None:
    refused(r"\(3, 2\).*\(4, 5\)", nearest, points(3, 2), points(4, 5))
    refused(r"\(0, 2\)", nearest, points(3, 2), points(0, 2))
    assert nearest(points(0, 2), points(3, 2)).distance.shape == (0,)


@pytest.mark.parametrize("gamma", GAMMAS)
@given(shape=shapes)
@settings(max_examples=20)
def test_three_ways_to_the_affine_cost(gamma: float, shape: dict[str, int]) -> None:
    """Closed form, orthogonal factorisation, optimality conditions."""
    X, x = samples(**shape), points(4, shape["k"])
    cost = affine_cost(x, X, gamma)
    # rounding of the moments, times gamma where no sample holds a direction
    loose = max(1.0, 1e-3 * gamma * float(X.square().sum()))
    close(cost, affine_cost_program(x, X, gamma).cost, loose=loose)
    close(cost, kkt_cost(x, X, gamma), loose=loose)


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("rank", [4, 2])
def test_the_programme_keeps_its_constraints_and_no_feasible_point_costs_less(gamma: float, rank: int) -> None:
    X, x = samples(9, 4, rank, 0), points(5, 4)
    cost, nu, e = affine_cost_program(x, X, gamma)
    close(nu @ X + e, x)
    close(nu.sum(-1), torch.ones(5, dtype=F64))
    close(cost, nu.square().sum(-1) + gamma * e.square().sum(-1))
    for seed in range(5):
        step = points(5, 9, seed, reach=1e-2)
        other = nu + step - step.mean(-1, keepdim=True)
        slack = x - other @ X
        assert bool((other.square().sum(-1) + gamma * slack.square().sum(-1) > cost).all())


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("rank", [5, 2])
@pytest.mark.parametrize("noise", ["diagonal", "full"])
def test_affine_cost_is_the_covariance_over_the_noise(gamma: float, rank: int, noise: str) -> None:
    """Theorem 2."""
    (P, T), p = problem(rank=rank), points(6, 5)
    posterior = Posterior(Statistics.from_linear_features(P, T), math.log(gamma), noise=noise)
    marginals = posterior.predict(affine_features(p))
    cost = affine_cost(p, P, gamma)
    close(marginals.variance_ratio, cost)
    close(marginals.function_cov(), cost[:, None, None] * marginals.noise_cov)
    close(cost, ratio(P, p, math.log(gamma)), loose=1e-3 * max(1e3, gamma * float(P.square().sum())))


@given(shape=shapes)
@settings(max_examples=20)
def test_inside_the_affine_hull_an_infinite_gamma_costs_the_least_norm(shape: dict[str, int]) -> None:
    X = samples(**shape)
    nu = points(4, shape["m"], shape["seed"])
    x = (nu - nu.mean(-1, keepdim=True) + 1 / shape["m"]) @ X
    least = nearest_in_affine_hull(x, X).coefficients.square().sum(-1)
    values = torch.linalg.svdvals(X - X.mean(0))
    condition = values[0] / values[values > 1e-12 * values[0]].min()
    close(affine_cost(x, X, math.inf), least, loose=float(condition**2))  # moments square the condition


def test_one_sample_leaves_only_the_residual_and_gamma_must_be_positive() -> None:
    """nu = 1 is all there is: the cost is 1 + gamma |x - X|^2."""
    X, x = points(1, 3), points(4, 3, seed=2)
    for cost in (affine_cost, lambda *given: affine_cost_program(*given).cost):
        for gamma in GAMMAS:
            close(cost(x, X, gamma), 1 + gamma * (x - X).square().sum(-1))
        for gamma in (0.0, -2.5, math.nan):
            refused(f"gamma={gamma}", cost, points(2, 3), points(5, 3), gamma)


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("rank", [4, 2])
def test_leave_one_out_cost_is_the_cost_without_the_sample(gamma: float, rank: int) -> None:
    X = samples(12, 4, rank, 0)
    without = [affine_cost(X[i : i + 1], torch.cat([X[:i], X[i + 1 :]]), gamma) for i in range(12)]
    close(leave_one_out_cost(affine_cost(X, X, gamma)), torch.cat(without), loose=100)  # 1 - c cancels


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_blocks_do_not_depend_on_the_units_of_columns(unit: float, column: int) -> None:
    X = samples(60, 3, 3, 0).numpy()
    other = X.copy()
    other[:, column] = unit * X[:, column] + 7.0
    for block, same in zip(blocked_folds(X, 5), blocked_folds(other, 5), strict=True):
        np.testing.assert_array_equal(block, same)


CASES = [
    pytest.param({}, id="plain"),
    pytest.param({"rank": 2}, id="rank-deficient"),
    pytest.param({"noise": "full"}, id="full-noise"),
    pytest.param({"noise": "full", "bias_prior": "shared", "rank": 3}, id="shared-bias"),
]


def tuning_problem(
    rank: int = 5, reach: float = 2.0, misfit: float = 0.2, log_alpha: float = -4.0, **options
) -> tuple[Tensor, Posterior, Tensor, Tensor]:
    """Training features, their posterior, and validation points off the hull with residuals of their own size."""
    P, T = problem(rank=rank)
    posterior = Posterior(Statistics.from_linear_features(P, T), log_alpha, **options)
    Phi = affine_features(P.mean(0) + points(15, 5, reach=reach))
    return P, posterior, Phi, posterior.mean(Phi) + misfit * points(15, 2, seed=2)


@pytest.mark.parametrize("options", CASES)
def test_the_curve_is_the_validation_lpd(options: dict) -> None:
    P, posterior, Phi, T = tuning_problem(**options)
    curve = tune_alpha(posterior, Phi, T)
    assert len(curve.log_alphas) == len(curve.lpds) == 201
    for i in range(0, 120, 17):
        log_alpha = float(curve.log_alphas[i])
        expected = lpd(posterior, ratio(P, Phi[:, :-1], log_alpha, posterior.bias_prior), Phi, T)
        close(curve.lpds[i], expected, loose=max(1.0, math.exp(log_alpha)))  # rounding of the moments, times alpha
        assert held_out_lpd(posterior, Phi, T, log_alpha) == pytest.approx(float(curve.lpds[i]), rel=TOLERANCE[F64])
    assert held_out_lpd(posterior, Phi, T) == curve.lpd_before
    close(curve.lpds[-1], lpd(posterior, posterior.variance_ratio(Phi, math.inf), Phi, T))
    close(np.float64(curve.lpd_before), lpd(posterior, posterior.predict(Phi).variance_ratio, Phi, T))


@pytest.mark.parametrize("options", CASES)
def test_at_every_alpha_missing_targets_leave_the_density_of_the_others(options: dict) -> None:
    _, posterior, Phi, T = tuning_problem(**options)
    known = torch.rand(15, generator=torch.Generator().manual_seed(0)) < 0.5
    T[~known, 0] = math.nan
    curve = tune_alpha(posterior, Phi, T)
    second = replace(posterior, statistics=posterior.statistics.output(1), noise_cov=posterior.Sigma_E[1:, 1:])
    for i in (0, 60, 120):
        ratios = posterior.variance_ratio(Phi, float(curve.log_alphas[i]))
        share, both = float(known.double().mean()), lpd(posterior, ratios[known], Phi[known], T[known])
        one = lpd(second, ratios[~known], Phi[~known], T[~known, 1:])
        close(curve.lpds[i], share * both + (1 - share) * one, loose=100)


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("misfit", [0.01, 0.2, 20.0])
def test_no_alpha_on_a_fine_grid_is_better_and_the_posterior_is_left_alone(options: dict, misfit: float) -> None:
    _, posterior, Phi, T = tuning_problem(misfit=misfit, **options)
    before = posterior.mean(Phi)
    curve = tune_alpha(posterior, Phi, T)
    anyhow = replace(posterior, checked=False)
    of = lambda log_alpha: lpd(posterior, anyhow.variance_ratio(Phi, float(log_alpha)), Phi, T)
    values = map(of, np.linspace(curve.log_alphas[0], curve.log_alphas[-1], 250))
    assert curve.lpd >= float(max(values)) - 1e-8 * abs(curve.lpd)
    assert posterior.log_alpha == -4.0
    assert torch.equal(posterior.mean(Phi), before)
    if misfit == 0.2:
        assert math.isfinite(curve.log_alpha)
        assert not curve.at_infinity
        assert curve.lpd > curve.lpd_before
        close(np.float64(curve.lpd), of(curve.log_alpha))


@given(log_alpha=st.floats(-30, 30), misfit=st.sampled_from([0.0, 1.0, 1e3]), rank=st.sampled_from([2, 5]))
def test_tuning_never_makes_it_worse(log_alpha: float, misfit: float, rank: int) -> None:
    _, posterior, Phi, T = tuning_problem(rank, misfit=misfit)
    posterior = replace(posterior, log_alpha=log_alpha, noise_cov=posterior.Sigma_E)
    curve = tune_alpha(posterior, Phi, T)
    assert curve.lpd >= curve.lpd_before


def test_a_coarse_curve_does_not_make_it_worse_either() -> None:
    """The posterior stands at the optimum already, and no point of the curve comes near it."""
    _, posterior, Phi, T = tuning_problem(rank=2, misfit=1e3)
    at_best = replace(posterior, log_alpha=tune_alpha(posterior, Phi, T).log_alpha, noise_cov=posterior.Sigma_E)
    T = T - posterior.mean(Phi) + at_best.mean(Phi)
    for n_curve in (2, 3, 5, 10):
        curve = tune_alpha(at_best, Phi, T, n_curve=n_curve)
        assert curve.lpd >= curve.lpd_before


def test_on_folds_of_any_size_every_point_counts_the_same() -> None:
    """Each under the posterior of its own fold: the curve is the mean over all of them, not over the folds."""
    P, T = problem(m=60)
    T[:3] += 2.0  # a fold of few points that asks for another alpha
    folds, rows = [], []
    for held in (range(3), range(3, 15), range(15, 60)):
        kept = [i for i in range(60) if i not in held]
        posterior = Posterior(Statistics.from_linear_features(P[kept], T[kept]), -4.0)
        folds.append(HeldOut(posterior, affine_features(P[list(held)]), T[list(held)]))
        rows.append(P[kept])

    def pooled(log_alpha: float) -> Tensor:
        total = torch.zeros((), dtype=F64)
        for P_kept, (posterior, Phi, targets) in zip(rows, folds, strict=True):
            for i in range(len(Phi)):
                one = slice(i, i + 1)
                total += lpd(posterior, ratio(P_kept, Phi[one, :-1], log_alpha), Phi[one], targets[one])
        return total / 60

    curve = tune_alpha_on(folds, -4.0)
    for i in range(0, 120, 17):
        log_alpha = float(curve.log_alphas[i])
        close(curve.lpds[i], pooled(log_alpha), loose=max(1.0, math.exp(log_alpha)))  # rounding, times alpha
    close(np.float64(curve.lpd_before), pooled(-4.0))
    close(np.float64(curve.lpd), pooled(curve.log_alpha), loose=max(1.0, math.exp(curve.log_alpha)))


def test_an_optimum_at_infinity_is_found_and_said() -> None:
    """Off the affine hull, with residuals beyond any variance that finite moments can name."""
    _, posterior, Phi, T = tuning_problem(rank=2, misfit=1e12)
    curve = tune_alpha(posterior, Phi, T)
    assert curve.log_alpha == math.inf
    assert curve.at_infinity
    assert "infinity" in str(curve)
    assert (np.diff(curve.lpds) > 0).all()
    assert curve.lpd == curve.lpds[-1] > curve.lpd_before


def test_an_alpha_without_effect_is_kept() -> None:
    """The mean of the samples costs 1 / m whatever alpha is."""
    P, posterior, _, T = tuning_problem(log_alpha=0.7)
    curve = tune_alpha(posterior, affine_features(P.mean(0).expand(15, -1)), T)
    assert curve.log_alpha == 0.7
    assert curve.lpd == curve.lpd_before
    assert "0.700" in str(curve)


@pytest.mark.parametrize("reach", [1.0, 1e4])
def test_targets_on_the_mean_ask_for_no_variance(reach: float) -> None:
    """Without residuals the smaller alpha the better: in the limit of none only the bias is uncertain, by 1 / m."""
    P, posterior, Phi, T = tuning_problem(reach=reach, misfit=0.0)
    curve = tune_alpha(posterior, Phi, T)
    assert curve.log_alpha < -10
    limit = lpd(posterior, torch.full((15,), 1 / len(P), dtype=F64), Phi, T)
    assert curve.lpd <= limit + TOLERANCE[F64]
    assert curve.lpd >= limit - 1e-3  # the curve ends where alpha moves the variance by a few millionths


def test_an_alpha_below_the_curve_is_kept_if_it_is_best() -> None:
    _, posterior, Phi, _ = tuning_problem(reach=100.0)
    posterior = replace(posterior, log_alpha=-60.0, noise_cov=posterior.Sigma_E)
    assert tune_alpha(posterior, Phi, posterior.mean(Phi)).log_alpha == -60.0


@pytest.mark.parametrize(("noise", "given_to_fit"), [("diagonal", False), ("full", False), ("diagonal", True)])
def test_a_model_is_tuned_to_the_validation_targets_that_are_known(noise: str, given_to_fit: bool) -> None:
    """The curve's value is their density, and the rest of the targets are nowhere in it."""
    (X, Y), (Z, T) = sine(40, q=2), sine(30, q=2, seed=1)
    T = np.where(np.arange(60).reshape(30, 2) % 3, T, np.nan)
    model = BLLRegressor((5,), preset="evidence", max_epochs=20, noise=noise, random_state=0)
    model.fit(X, Y, validation_data=(Z, T)) if given_to_fit else model.fit(X, Y).tune_alpha(Z, T)
    known, p = ~np.isnan(T), model.predictive(Z)
    unit = (known * np.log(Y.std(0))).sum(1).mean()
    assert p.log_prob(T).mean() + unit == pytest.approx(model.alpha_curve_.lpd, abs=1e-9)
    lpd = lambda step: model.at_alpha(np.log(model.alpha_) + step).predictive(Z).log_prob(T).mean()
    assert lpd(0) >= max(lpd(-0.3), lpd(0.3)) - 1e-6  # as far as the search goes
    marginals = norm(p.mean, p.std).logpdf(T)[known.sum(1) == 1]  # where one target is known, it is as if alone
    np.testing.assert_allclose(p.log_prob(T)[known.sum(1) == 1], np.nansum(marginals, 1))
