"""Targets that are partly missing, noise that is known, functionals of the function: against dense Gaussian forms."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import close, last_layer_rows, precision_matrix, refused, reloaded
from hypothesis import given, settings
from hypothesis import strategies as st
from models import holes
from scipy.optimize import approx_fprime
from test_calibration import held_out, problem_of
from torch import Tensor, nn

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.bayes.evidence import (
    by_evidence,
    known_noise_nlml,
    optimal_alpha,
    optimal_alphas,
    profile,
    statistics_nlml,
)
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.noise_groups import StatisticsByNoise, Targets
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Readings, Statistics
from lastlayer.data.observe import (
    Derivative,
    Difference,
    Functionals,
    Gradient,
    Integral,
    StandardFunctionals,
    Sum,
    Value,
)
from lastlayer.data.rows import Points, Rows
from lastlayer.data.scaling import Standardizer
from lastlayer.errors import MissingTargetsWarning
from lastlayer.networks.fourier import fourier_features, fourier_network, frequencies
from lastlayer.networks.mlp import MLP
from lastlayer.settings.types import FOURIER, LINEAR, NETWORK
from lastlayer.tables import TableRegressor, read
from lastlayer.training import KnownNoise, Profiled, SampledRows

pytestmark = pytest.mark.usefixtures("small_process")

EVIDENCE = {"preset": "evidence", "hidden": (8,), "max_epochs": 60, "random_state": 0}


def rows(m: int = 24, k: int = 3, q: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    Phi = affine_features(torch.randn(m, k, generator=g, dtype=torch.float64) + 1.5)
    return Phi, torch.randn(m, q, generator=g, dtype=torch.float64) + torch.arange(q)


def dense(Phi: Tensor, t: Tensor, noise_var: Tensor, prior_var: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and covariance at new rows, and the log evidence, of one output as a Gaussian process over its features."""
    K = Phi @ torch.diag(prior_var) @ Phi.T + torch.diag(noise_var)
    cross = new @ torch.diag(prior_var) @ Phi.T
    mean = cross @ torch.linalg.solve(K, t)
    cov = new @ torch.diag(prior_var) @ new.T - cross @ torch.linalg.solve(K, cross.T)
    evidence = torch.distributions.MultivariateNormal(torch.zeros_like(t), K).log_prob(t)
    return mean, cov, evidence


def curved(X: np.ndarray) -> np.ndarray:
    return np.stack([np.sin(2 * X[:, 0]) + X[:, 1], X[:, 0] * X[:, 1], np.cos(X[:, 0] + X[:, 1])], 1)


def table(m: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (m, 2)) * [1, 20] + [0, 3]
    return X, 5 * curved((X - [0, 3]) / [1, 20]) + 0.3 * rng.normal(size=(m, 3)) + 10


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=12, max_size=20), st.integers(0, 99))
def test_whatever_is_missing_the_posterior_is_that_of_the_targets_that_are_known(pattern: list, seed: int) -> None:
    known = np.array(pattern)
    known[:4] = True  # every output needs some
    Phi, T = rows(len(known), 2, 3, seed)
    given_ = Statistics.of(Phi[..., :-1], Readings(T, 1 / (torch.from_numpy(known).double())))
    new, log_alpha, noise = rows(3, 2, 3, seed + 100)[0], 0.7, torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    posterior = Posterior(given_, log_alpha, torch.diag(noise), bias_prior="shared")
    joint = posterior.joint(new)
    for j in range(3):
        own = torch.from_numpy(known[:, j])
        prior = noise[j] * math.exp(log_alpha) * torch.ones(3, dtype=torch.float64)
        mean, cov, _ = dense(Phi[own], T[own, j], noise[j].expand(int(own.sum())), prior, new)
        close(posterior.mean(new)[:, j], mean)
        close(noise[j] * posterior.variance_ratio(new)[:, j], cov.diagonal())
        close(joint.function_cov()[3 * j : 3 * j + 3, 3 * j : 3 * j + 3], cov)
    assert not joint.function_cov()[:3, 3:].any()


@pytest.mark.parametrize("bias_prior", ["flat", "shared"])
def test_outputs_observed_alike_are_what_they_are_together(bias_prior: str) -> None:
    Phi, T = rows(30, 4, 3)
    together = Statistics.from_features(Phi, T)
    for apart in (together.each_output(), Statistics.of(Phi[..., :-1], Readings(T, 1 / (torch.ones_like(T))))):
        one, other = (optimal_alphas(Statistics.stacked([s]), bias_prior=bias_prior)[0] for s in (together, apart))
        assert one.nlml == pytest.approx(other.nlml, abs=1e-10)
        close(one.noise_cov, other.noise_cov, loose=100)  # alpha is found to 1e-10
        p, o = (Posterior(s, 1.3, bias_prior=bias_prior) for s in (together, apart))
        new = rows(5, 4, 3, 1)[0]
        close(o.mean(new), p.mean(new))
        close(o.weights, p.weights)
        close(o.variance_ratio(new), p.variance_ratio(new)[:, None].expand(-1, 3))
        close(o.joint(new).target_cov(), p.joint(new).target_cov())
        close(*(each.predict(new).function_cov().diagonal(dim1=1, dim2=2) for each in (o, p)))
        grid = torch.tensor([0.0, 2.0], dtype=torch.float64)
        close(o.variance_ratios(new, grid), p.variance_ratios(new, grid)[..., None].expand(-1, -1, 3))
    close(replace(p, statistics=p.statistics.each_output()).mean(new), p.mean(new))


def test_the_evidence_is_the_sum_over_outputs_of_the_targets_that_are_known() -> None:
    Phi, T = rows(20, 3, 2)
    known = torch.rand(20, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) < 0.6
    apart = Statistics.of(Phi[..., :-1], Readings(T, 1 / (known.double())))
    log_alpha = torch.tensor(0.4, dtype=torch.float64)
    found = profile(apart, log_alpha, bias_prior="shared")
    total = 0.0
    for j in range(2):
        own = known[:, j]
        var = found.noise_cov[j, j]
        prior = var * log_alpha.exp() * torch.ones(4, dtype=torch.float64)
        total += float(dense(Phi[own], T[own, j], var.expand(int(own.sum())), prior, Phi[:1])[2])
        for factor in (0.99, 1.01):  # the noise is at its best
            less = dense(Phi[own], T[own, j], factor * var.expand(int(own.sum())), factor * prior, Phi[:1])[2]
            assert less < dense(Phi[own], T[own, j], var.expand(int(own.sum())), prior, Phi[:1])[2]
    n = known.sum(0).max()
    assert float(found.nlml) * float(n) == pytest.approx(-total, abs=1e-9)
    assert float(statistics_nlml(apart, log_alpha, bias_prior="shared")) == pytest.approx(float(found.nlml), abs=1e-10)
    h = 1e-5
    slope = (profile(apart, log_alpha + h).nlml - profile(apart, log_alpha - h).nlml) / (2 * h)
    assert float(profile(apart, log_alpha).slope) == pytest.approx(float(slope), rel=1e-6)


def test_alpha_is_where_the_evidence_of_all_outputs_is_largest() -> None:
    Phi, T = rows(40, 3, 2)
    T = T + 2 * Phi[:, :2]
    known = (torch.arange(80).reshape(40, 2) % 3 > 0).double()
    best = optimal_alphas(Statistics.stacked([Statistics.of(Phi[..., :-1], Readings(T, 1 / (known)))]))[0]
    apart = Statistics.of(Phi[..., :-1], Readings(T, 1 / (known)))
    around = [float(profile(apart, best.log_alpha + move).nlml) for move in (-1e-2, 0.0, 1e-2)]
    assert min(around) == around[1] == pytest.approx(best.nlml, abs=1e-12)


def test_calibration_skips_what_is_missing_and_knows_what_noise_is_known() -> None:
    """The log density of a point is that of its known targets; slopes are those of differences."""
    points = held_out(14, 2, 3, families=(NETWORK, FOURIER, LINEAR), outside=3.0)
    missing = np.random.default_rng(0).random((14, 2)) < 0.4
    missing[missing.all(1), 0] = False
    known_var = torch.from_numpy(np.random.default_rng(1).uniform(0.1, 2, (14, 2)))
    cost = points.cost[..., None] * torch.tensor([1.0, 2.0], dtype=torch.float64)
    known = torch.where(torch.from_numpy(missing), torch.nan, points.readings.values)
    partly = replace(points, readings=Readings.of(known, known_var), cost=cost)
    problem = problem_of(partly.usable(), True)
    x = problem.starts[0] + np.random.default_rng(2).normal(0, 0.4, len(problem.starts[0]))
    gradient = problem.value(x)[1]
    np.testing.assert_allclose(gradient, approx_fprime(x, lambda z: problem.value(z)[0], 1e-6), rtol=1e-4, atol=1e-4)
    # a point with all its targets but one missing, and with the same one alone
    single = replace(partly, readings=Readings.of(partly.readings.values), cost=points.cost)
    one = problem_of(single.usable(), True).log_density(x)
    i = int(np.flatnonzero((~missing).sum(1) == 1)[0])
    j = int(np.flatnonzero(~missing[i])[0])
    also = single.readings.values.clone()
    also[i, 1 - j] = 0.3
    assert problem_of(replace(single, readings=Readings.of(also)).usable(), True).log_density(x)[i] != one[i]
    other = single.readings.values.clone()
    other[i, j] += 100.0
    assert problem_of(replace(single, readings=Readings.of(other)).usable(), True).log_density(x)[i] < one[i] - 1
    # where a target is missing, what was predicted for it does not count
    astray = replace(single, mean=single.mean + 3.0 * torch.from_numpy(missing))
    np.testing.assert_allclose(problem_of(astray.usable(), True).log_density(x), one, rtol=1e-12)
    empty = replace(partly, readings=Readings.of(torch.full_like(partly.readings.values, torch.nan)))
    assert len(empty.usable().readings.t) == 0


@pytest.fixture(scope="module")
def partly() -> tuple[BLLRegressor, np.ndarray, np.ndarray]:
    X, Y = table()
    Y = holes(Y)
    return BLLRegressor((6,), preset="fast", max_epochs=25, random_state=0).fit(X, Y), X, Y


@pytest.mark.parametrize("bias_prior", ["flat", "shared"])
def test_the_variance_of_an_output_is_that_of_the_rows_where_it_is_known(bias_prior: str) -> None:
    """Lambda_bar written down entry by entry from these rows alone."""
    X, Y = table(30)
    Y = holes(Y)
    model = BLLRegressor(**EVIDENCE | {"max_epochs": 5}, training=TrainingOptions(bias_prior=bias_prior)).fit(X, Y)
    posterior, scale = model.members_[0].posterior, model.fitted_.targets.scale
    seen, new = (last_layer_rows(model, points, Y)[0] for points in (X, 1.5 * X))
    for j, known in enumerate(torch.from_numpy(~np.isnan(Y)).T):
        Lambda = precision_matrix(seen[known][:, :-1], float(posterior.log_alpha), bias_prior)
        cost = (new * torch.linalg.solve(Lambda, new.T).T).sum(1)
        var = model.predictive(1.5 * X, noise=False).var[:, j]
        close(torch.from_numpy(var), cost * posterior.Sigma_E[j, j] * scale[j] ** 2)


def test_each_output_has_a_variance_of_its_own_and_joint_agrees(partly: tuple) -> None:
    model, X, _ = partly
    p, joint = model.predictive(X[:7], noise=False), model.joint(X[:7], noise=False)
    np.testing.assert_allclose(joint.mean, p.mean, rtol=1e-12)
    every = np.arange(7)
    np.testing.assert_allclose(joint.cov_of_outputs()[every, every], p.var, rtol=1e-10)
    draws = model.sample_y(X[:7], 4000, random_state=0, noise=False)
    np.testing.assert_allclose(draws.mean(-1), p.mean, atol=5 * p.std.max() / 60)
    np.testing.assert_allclose(draws.std(-1), p.std, rtol=0.1)


def test_rows_are_learned_and_forgotten_and_files_keep_them(partly: tuple, tmp_path) -> None:
    model, X, Y = partly
    again = reloaded(model, tmp_path)
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    weights = lambda: torch.cat([member.posterior.weights.flatten() for member in again.members_])
    before = weights()
    again.update(X[:9] + 0.1, Y[:9])
    assert float((weights() - before).abs().max()) > 1e-6
    again.remove(X[:9] + 0.1, Y[:9])
    close(weights(), before, loose=1e5)  # several hundred features, nearly collinear
    again.reestimate()
    assert np.isfinite(again.predictive(X).std).all()


def test_a_model_of_complete_rows_learns_incomplete_ones() -> None:
    X, Y = table(40)
    model = BLLRegressor(**EVIDENCE).fit(X, Y)
    more = holes(Y[:10])
    posterior = model.members_[0].posterior
    model.update(X[:10], more)
    Phi, T = last_layer_rows(model, X[:10], np.nan_to_num(more))
    for j in range(3):
        known, noise_cov = ~np.isnan(more[:, j]), posterior.Sigma_E[j : j + 1, j : j + 1]
        alone = Posterior(posterior.statistics.each_output().output(j), posterior.log_alpha, noise_cov)
        alone = alone.update(Statistics.from_features(Phi[known], T[known, j : j + 1]))
        close(model.members_[0].posterior.mean(Phi)[:, j], alone.mean(Phi)[:, 0])
        close(model.members_[0].posterior.variance_ratio(Phi)[:, j], alone.variance_ratio(Phi))


def test_empty_cells_of_a_table_are_missing_targets(tmp_path) -> None:
    X, Y = table(30)
    path = tmp_path / "t.csv"
    cells = np.where(np.isnan(holes(Y[:, :2])), "", holes(Y[:, :2]).astype(str))
    rows_ = [",".join([*map(str, x), *y]) for x, y in zip(X.tolist(), cells.tolist(), strict=True)]
    path.write_text("\n".join(["a,b,u,v", *rows_]))
    fitted = TableRegressor(**EVIDENCE | {"max_epochs": 5}).fit(read(path), target=["u", "v"])
    assert fitted.fitted_.by_output
    fitted.update(read(path))
    path.write_text("a,b,u,v\n1,2,,\n2,3,1,2\n3,4,2,5")
    refused(r"all targets are missing in 1 rows \(first: row 1", TableRegressor().fit, read(path), target=["u", "v"])
    path.write_text("a,b,u,v\n1,2,,3\n2,3,1,2\n3,4,2,5")
    refused("missing", TableRegressor().fit, read(path), target="u")


def test_what_is_missing_is_counted_and_what_needs_complete_targets_says_so() -> None:
    X, Y = table(30)
    some = Y.copy()
    some[[0, 1, 2], [0, 0, 1]] = np.nan
    with pytest.warns(MissingTargetsWarning, match=r"3 of 90 targets are missing.*\(28, 29, 30\)"):
        BLLRegressor(**EVIDENCE | {"max_epochs": 2}).fit(X, some)
    refused("all known", BLLRegressor(**EVIDENCE, training=TrainingOptions(chunk_size=8)).fit, X, holes(Y))
    refused("noise_std or observations", BLLRegressor(**EVIDENCE, noise="full").fit, X, Y, noise_std=0.1)
    missing = 'correlates the outputs.*use noise="diagonal", or drop the rows with missing targets'
    refused(missing, BLLRegressor(**EVIDENCE, noise="full").fit, X, holes(Y))
    model = BLLRegressor(**EVIDENCE | {"max_epochs": 2}, noise="full").fit(X, Y)
    for revise in (model.update, model.remove):
        refused(missing, revise, X, holes(Y))


def test_mini_batches_learn_from_targets_partly_missing() -> None:
    X, Y = table(200)
    with pytest.warns(MissingTargetsWarning):
        model = BLLRegressor(**EVIDENCE | {"max_epochs": 30}, batch_size=50).fit(X, holes(Y))
    assert model.settings_.training.batch_size == 50
    assert (np.sqrt(np.mean((model.predict(X) - Y) ** 2, 0)) < 0.7 * Y.std(0)).all()


@pytest.mark.parametrize("known", [False, True])
def test_rows_drawn_for_a_step_stand_for_all(known: bool) -> None:
    """Twice the same rows: half of them, drawn so that each is there once, have the evidence of all."""
    Phi, T = rows(20, 3, 2)
    present = (torch.arange(40).reshape(20, 2) % 3 > 0).double()
    noise_var = torch.full_like(T, 0.3) if known else None
    twice = lambda x: None if x is None else torch.cat([x, x])
    data = Points.of(twice(Phi[:, :-1]), twice(T.where(present > 0, torch.nan)), None, twice(noise_var))
    objective = KnownNoise(2, bias_prior="flat") if known else Profiled(bias_prior="flat")
    whole, part = (objective.of_rows(nn.Identity(), d) for d in (Rows(data), Rows(data).sampled(torch.arange(20))))
    assert float(part.detach()) == pytest.approx(float(whole.detach()), abs=1e-10)
    problem = SampledRows(nn.Identity(), objective, Rows(data), batch_size=15, seed=0)
    first, second = (list(problem.steps(epoch, 0)) for epoch in (0, 1))
    assert len(first) == problem.n_steps
    assert sorted(torch.cat(first).tolist()) == list(range(len(data.X)))
    assert torch.cat(first).tolist() != torch.cat(second).tolist()
    assert [rows.tolist() for rows in problem.steps(0, 1)] == [rows.tolist() for rows in first[1:]]
    expected = objective.of_rows(nn.Identity(), Rows(data).sampled(first[0]))
    assert float(problem.gradient(first[0], 1.0).detach()) == float(expected.detach())


def known_noise_case(q: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (Phi, T), g = rows(16, 3, q), torch.Generator().manual_seed(7)
    constant = torch.tensor([0.0, 0, 1, 2, -1], dtype=torch.float64)[:, None]
    Psi = torch.cat([torch.randn(5, 3, generator=g, dtype=torch.float64), constant], 1)
    u = torch.randn(5, generator=g, dtype=torch.float64)
    noise_var, own_var = torch.rand(16, q, generator=g, dtype=torch.float64), torch.rand(5, generator=g).double() + 0.1
    return Phi, T, noise_var, Psi, u, own_var


@pytest.mark.parametrize("bias_prior", ["flat", "shared"])
def test_the_evidence_with_known_noise_and_functionals_is_the_dense_one(bias_prior: str) -> None:
    Phi, T, noise_var, Psi, u, own_var = known_noise_case()
    log_alpha, log_sigma = torch.tensor(0.6).double(), torch.tensor([-0.2, 0.3]).double()
    learned, total = torch.exp(2 * log_sigma), 0.0
    v = learned + noise_var
    functionals = Statistics.from_functionals(Psi, u[:, None], learned[1] / own_var)
    given_ = Statistics.of(Phi[..., :-1], Readings(T, 1 / (learned / v))) + Statistics.of_outputs(
        [functionals.nothing(), functionals]
    )
    found = known_noise_nlml(given_, log_alpha, log_sigma, bias_prior=bias_prior)
    new = torch.cat([Phi[:3], Psi[:2]])
    posterior = Posterior(given_, float(log_alpha), torch.diag(learned), bias_prior=bias_prior)
    for j in range(2):
        with_functionals = torch.cat([Phi, Psi]), torch.cat([T[:, 1], u]), torch.cat([v[:, 1], own_var])
        A, t, var = with_functionals if j else (Phi, T[:, 0], v[:, 0])
        prior = learned[j] * log_alpha.exp() * torch.ones(4, dtype=torch.float64)
        free = 1e7 if bias_prior == "flat" else float(prior[0])
        prior[-1] = free
        mean, cov, evidence = dense(A, t, var, prior, new)
        total += float(evidence) + (0.5 * math.log(2 * math.pi * free) if bias_prior == "flat" else 0.0)
        loose = 1e5 if bias_prior == "flat" else 1.0  # of a flat prior the dense form has a wide one
        close(posterior.mean(Phi[:3])[:, j], mean[:3], loose=loose)
        close(learned[j] * posterior.variance_ratio(Phi[:3])[:, j], cov.diagonal()[:3], loose=loose)
    n = 21
    assert float(found) * n == pytest.approx(-total, abs=1e-9 if bias_prior == "shared" else 1e-5)


def test_the_gradient_of_the_evidence_with_missing_targets_or_known_noise_is_that_of_differences() -> None:
    Phi, T = rows(10, 2, 2)
    known = (torch.arange(20).reshape(10, 2) % 4 > 0).double()
    log_alpha = torch.tensor(0.3, dtype=torch.float64)
    missing = lambda linear: statistics_nlml(Statistics.of(linear, Readings(T, 1 / known)), log_alpha)
    torch.autograd.gradcheck(missing, (Phi[:, :-1].clone().requires_grad_(),))
    Phi, T, noise_var, Psi, u, own_var = known_noise_case()

    def value(linear: Tensor, psi: Tensor, log_alpha: Tensor, log_sigma: Tensor) -> Tensor:
        learned = torch.exp(2 * log_sigma)
        v = learned + noise_var
        more = Statistics.from_functionals(torch.cat([psi, Psi[:, -1:]], 1), u[:, None], learned[0] / own_var)
        given_ = Statistics.of(linear, Readings(T, 1 / (learned / v)))
        given_ = given_ + Statistics.of_outputs([more, more.nothing()])
        return known_noise_nlml(given_, log_alpha, log_sigma)

    numbers = (Phi[:, :-1], Psi[:, :-1], torch.tensor(0.6).double(), torch.tensor([-0.2, 0.3]).double())
    torch.autograd.gradcheck(value, [x.clone().requires_grad_() for x in numbers])


def test_statistics_of_functionals_add_up_and_values_are_among_them() -> None:
    Phi, T = rows(12, 3, 2)
    close(Statistics.from_functionals(Phi, T).scatter, Statistics.from_features(Phi, T).scatter)
    _, _, _, Psi, u, _ = known_noise_case()
    one = torch.cat([Phi[:, :4], Psi]), torch.cat([T[:, :1], u[:, None]])
    whole = Statistics.from_functionals(*one)
    parts = Statistics.from_features(Phi, T[:, :1]) + Statistics.from_functionals(Psi, u[:, None])
    for name in ("count", "mean", "scatter"):
        close(getattr(parts, name), getattr(whole, name))
    assert float(parts.n) == float(whole.n) == 17
    assert float(parts.count) == 12 + 1 + 4 + 1
    less = parts - Statistics.from_functionals(Psi, u[:, None])
    close(less.scatter, Statistics.from_features(Phi, T[:, :1]).scatter)


def test_the_last_layer_with_known_noise_is_at_the_maximum_of_the_evidence() -> None:
    Phi, T, noise_var, *_ = known_noise_case()
    T = T + 2 * Phi[:, :2]
    linear = nn.Identity()
    (posterior,) = by_evidence([Rows(Points.of(Phi[:, :-1], T, None, noise_var)).by_noise(linear)])

    def evidence(log_alpha: float, log_sigma: Tensor) -> float:
        learned = torch.exp(2 * log_sigma)
        v = learned + noise_var
        statistics = Statistics.of(Phi[..., :-1], Readings(T, 1 / (learned / v)))
        return float(known_noise_nlml(statistics, torch.tensor(log_alpha).double(), log_sigma))

    log_sigma = 0.5 * posterior.Sigma_E.diagonal().log()
    best = evidence(float(posterior.log_alpha), log_sigma)
    assert posterior.nlml == pytest.approx(best, abs=1e-9)
    for move in (-0.05, 0.05):
        assert evidence(float(posterior.log_alpha) + move, log_sigma) > best
        for j in range(2):
            assert evidence(float(posterior.log_alpha), log_sigma + move * torch.eye(2)[j].double()) > best


def test_known_noise_of_zero_is_none() -> None:
    Phi, T = rows(25, 3, 1)
    T = T + Phi[:, :1]
    plain = optimal_alpha(Statistics.from_features(Phi, T))
    (posterior,) = by_evidence([Rows(Points.of(Phi[:, :-1], T, None, torch.zeros_like(T))).by_noise(nn.Identity())])
    assert posterior.nlml == pytest.approx(plain.nlml, abs=1e-7)
    assert float(posterior.log_alpha) == pytest.approx(plain.log_alpha, abs=1e-2)
    close(posterior.Sigma_E, plain.noise_cov, loose=1e8)


FUNCTIONALS = {
    "value": lambda X: Value().at(X),
    "derivative": lambda X: Derivative(1).at(X),
    "gradient": lambda X: Gradient().at(X),
    "sum": lambda X: Sum(np.stack([X, X + 0.1], 0), [2.0, -0.5] if len(X) == 2 else None),
    "difference": lambda X: Difference(X, X[::-1] + 0.3),
    "integral": lambda X: Integral(X, 3.0),
}


def slowly(functionals: Functionals, function: Callable[[np.ndarray], np.ndarray], h: float = 1e-5) -> np.ndarray:
    """L of a function, derivatives by differences."""
    out = [0.0] * len(functionals)
    for i, s in np.ndindex(functionals.weights.shape):
        x = functionals.points[i, s]
        out[i] = out[i] + functionals.weights[i, s] * function(x[None])[0]
        if functionals.directions is not None:
            g = functionals.directions[i, s]
            out[i] = out[i] + (function((x + h * g)[None])[0] - function((x - h * g)[None])[0]) / (2 * h)
    return np.array(out)


@pytest.mark.parametrize("name", FUNCTIONALS)
def test_the_features_of_a_functional_are_the_functional_of_the_features(name: str) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4, 2)) * [1, 10] + [0, 5]
    network = MLP(2, (5, 4), generator=torch.Generator().manual_seed(0)).double()
    inputs = Standardizer.fit(torch.tensor(X))
    functionals = FUNCTIONALS[name](X)
    found = StandardFunctionals.of(functionals, inputs).features(network).detach().numpy()
    with torch.no_grad():
        features = lambda x: network(inputs.forward(torch.tensor(x))).numpy()
        np.testing.assert_allclose(found[:, :-1], slowly(functionals, features), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(found[:, -1], functionals.weights.sum(1))


@pytest.fixture(scope="module")
def mixture() -> tuple[BLLRegressor, np.ndarray]:
    X, Y = table()
    return BLLRegressor((5,), preset="fast", max_epochs=20, random_state=0).fit(X, Y), X


@pytest.mark.parametrize("of", ["mixture", "partly"])
@pytest.mark.parametrize("name", FUNCTIONALS)
def test_a_functional_of_a_model_is_that_of_its_joint_distribution(name: str, of: str, request) -> None:
    """Mean and covariance, calibration and mixture included, derivatives against differences of `joint`."""
    model, X = request.getfixturevalue(of)[:2]
    beside = X[:2] + 0.01 * X.std(0)  # encodings may have a kink at a row
    functionals = replace(FUNCTIONALS[name](beside), output=1)
    found, h = model.predictive_of(functionals), 1e-4
    points, maps = [], []
    for i, s in np.ndindex(functionals.weights.shape):
        x, row = functionals.points[i, s], np.eye(len(functionals))[i]
        points.append(x)
        maps.append(functionals.weights[i, s] * row)
        if functionals.directions is not None:
            g = functionals.directions[i, s]
            scale = h * X.std(0).max() / np.linalg.norm(g)
            points += [x + scale * g, x - scale * g]
            maps += [0.5 / scale * row, -0.5 / scale * row]
    L = np.stack(maps, 1)
    joint = model.joint(np.array(points), noise=False)
    n = len(points)
    cov = joint.cov()[n : 2 * n, n : 2 * n]
    np.testing.assert_allclose(found.mean, L @ joint.mean[:, 1], rtol=5e-4, atol=1e-6)
    np.testing.assert_allclose(found.cov(), L @ cov @ L.T, rtol=1e-3, atol=1e-6 * np.abs(found.cov()).max())
    np.testing.assert_allclose(found.var, np.diag(found.cov()))
    low, high = found.interval(0.9)
    np.testing.assert_allclose((high - low) / found.std, 2 * 1.6448536269514722)


@pytest.mark.parametrize("of", ["mixture", "partly"])
def test_functionals_of_two_outputs_are_independent_where_these_are(of: str, request) -> None:
    model, X = request.getfixturevalue(of)[:2]
    both = model.joint_of([Value(0).at(X[:3]), Value(1).at(X[:3])])
    np.testing.assert_allclose(both.cov(), model.joint(X[:3], noise=False).cov()[:6, :6], atol=1e-9 * both.var.max())


def test_values_and_derivatives_are_correlated(mixture: tuple) -> None:
    model, X = mixture
    both = model.joint_of([Value(2).at(X[:3]), Derivative(0, output=2).at(X[:3])])
    np.testing.assert_allclose(both.mean[:3], model.predict(X[:3])[:, 2], rtol=1e-9)
    np.testing.assert_allclose(both.std[:3], model.predictive(X[:3], noise=False).std[:, 2], rtol=1e-9)
    assert np.abs(both.cov()[:3, 3:]).max() > 0
    backwards = model.predictive_of(Value(), X[:5][::-1]).mean
    np.testing.assert_allclose(backwards, model.predictive_of(Value(), X[:5]).mean[::-1])
    assert np.linalg.eigvalsh(both.cov()).min() > -1e-9 * both.var.max()


@pytest.mark.parametrize("noise_std", [None, 0.2])
def test_observations_are_learned_as_a_dense_gaussian_would(noise_std: float | None) -> None:
    """The last layer after an update, against a Gaussian process over the same features, alpha and noise."""
    X, Y = table(40)
    model = BLLRegressor(**EVIDENCE, training=TrainingOptions(bias_prior="shared")).fit(X, Y)
    fitted, posterior = model.fitted_, model.members_[0].posterior
    functionals = replace(Gradient().at(X[:6] + 0.5), output=2)
    y = np.random.default_rng(0).normal(size=12)
    model.update_observations([functionals.observed(y, noise_std)])
    scale, middle = fitted.targets.scale[2], fitted.targets.mean[2]
    Phi, T = last_layer_rows(model, X, Y)
    Psi = StandardFunctionals.of(functionals, fitted.inputs).features(fitted.members[0].network).detach()
    var = float(posterior.Sigma_E[2, 2])
    own = var if noise_std is None else (noise_std / float(scale)) ** 2
    t = torch.cat([T[:, 2], (torch.tensor(y) - middle * Psi[:, -1]) / scale])
    noise = torch.cat([torch.full((40,), var), torch.full((12,), own)]).double()
    prior = var * math.exp(float(posterior.log_alpha)) * torch.ones(Phi.shape[1], dtype=torch.float64)
    new = fitted.features(0, fitted.standardized(X[:5] + 0.2))
    mean, cov, _ = dense(torch.cat([Phi, Psi]), t, noise, prior, new)
    found = model.predictive(X[:5] + 0.2, noise=False)
    np.testing.assert_allclose(found.mean[:, 2], (mean * scale + middle).numpy(), rtol=1e-8)
    np.testing.assert_allclose(found.var[:, 2], (cov.diagonal() * scale**2).numpy(), rtol=1e-6)
    untouched = BLLRegressor(**model.get_params()).fit(X, Y).predictive(X[:5] + 0.2, noise=False)
    np.testing.assert_allclose(found.mean[:, :2], untouched.mean[:, :2], rtol=1e-9)


def test_derivatives_teach_what_values_leave_open() -> None:
    rng = np.random.default_rng(0)
    f, g = (lambda x: (x**2 - 1) ** 2 / 2), (lambda x: 2 * x * (x**2 - 1))
    X, at = rng.uniform(-1.6, 1.6, (8, 1)), np.linspace(-1.6, 1.6, 20)[:, None]
    seen = Derivative(0).at(at).observed(g(at[:, 0]) + 0.05 * rng.normal(size=20), noise_std=0.05)
    grid = np.linspace(-1.5, 1.5, 50)[:, None]
    parameters = {"preset": "evidence", "hidden": (20,), "random_state": 0}
    without = BLLRegressor(**parameters).fit(X, f(X[:, 0]))
    model = BLLRegressor(**parameters).fit(X, f(X[:, 0]), observations=[seen])
    rmse = [float(np.sqrt(np.mean((m.predict(grid) - f(grid[:, 0])) ** 2))) for m in (without, model)]
    assert rmse[1] < 0.3 * rmse[0]
    before, slope = (m.predictive_of(Derivative(0), grid) for m in (without, model))
    assert np.sqrt(np.mean((slope.mean - g(grid[:, 0])) ** 2)) < 0.3
    assert slope.log_prob(g(grid[:, 0]), 0.05).mean() > before.log_prob(g(grid[:, 0]), 0.05).mean()


def test_early_stopping_knows_the_noise_too() -> None:
    X, Y = table(120)
    seen = Derivative(0).at(X[:5]).observed(np.zeros(5), noise_std=1.0)
    model = BLLRegressor(**EVIDENCE | {"max_epochs": 30}).fit(X, Y[:, 0], noise_std=0.3, observations=[seen])
    assert model.settings_.training.early_stopping
    assert np.isfinite(model.predictive(X).std).all()
    refused("fit again with all rows", model.reestimate)  # what depends on the learned noise is not found from sums


def test_rows_of_much_known_noise_say_little() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (60, 1))
    y, noise_std = np.sin(2 * X[:, 0]) + 0.05 * rng.normal(size=60), np.where(np.arange(60) % 2, 3.0, 0.0)
    spoilt = y + noise_std * rng.normal(size=60)
    known, column = (BLLRegressor(**EVIDENCE).fit(X, spoilt, noise_std=s) for s in (noise_std, noise_std[:, None]))
    error = lambda model: float(np.sqrt(np.mean((model.predict(X) - np.sin(2 * X[:, 0])) ** 2)))
    assert error(known) < 0.5 * error(BLLRegressor(**EVIDENCE).fit(X, spoilt))
    assert known.noise_std_[0] < 0.3
    np.testing.assert_allclose(known.predict(X), column.predict(X))


def test_the_default_mixture_takes_observations_and_known_noise() -> None:
    X, Y = table(30)
    model = BLLRegressor((4,), preset="fast", max_epochs=5, random_state=0).fit(
        X, Y[:, 0], noise_std=0.1, observations=[Sum(X[:3]).observed(Y[:3, 0].sum(), noise_std=0.5)]
    )
    assert np.isfinite(model.predictive(X).std).all()
    assert np.isfinite(model.predictive_of(Integral(X)).std).all()


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda X: Derivative(2).at(X), r"Derivative\(2\) of points with 2 inputs"),
        (lambda X: Value().at(X[:, 0]), "give a table"),
        (lambda X: Sum(X[0]), r"points have shape \(2,\)"),
        (lambda X: Difference(X, X[:2]), "needs pairs"),
        (lambda X: Value().at(X).observed([1.0]), "y has 1 numbers, but there are 5 functionals"),
        (lambda X: Value().at(X).observed(np.ones(5), 0.0), "noise_std must be positive"),
        (lambda X: Gradient().at(X).observed(np.ones((5, 2)), np.ones(5)), r"noise_std has shape \(5,\)"),
        (lambda X: Sum(X, np.ones(3)), r"weights have shape \(3,\)"),
        (lambda X: Sum(X, math.nan), "weights has 5 NaN values"),
        (lambda X: Value().at(X).observed(np.full(5, np.nan)), "y has 5 NaN"),
        (lambda X: Value().at(np.full((2, 2), np.nan)), "X has 4 NaN"),
    ],
)
def test_wrong_functionals_say_what_is_wrong(ask: Callable, words: str) -> None:
    refused(words, ask, np.zeros((5, 2)))


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda m, X: m.predictive_of(Derivative(0)), "needs points"),
        (lambda m, X: m.predictive_of(Derivative(0).at(X), X), "already have points"),
        (lambda m, X: m.predictive_of("Derivative", X), "is not a functional"),
        (lambda m, X: m.predictive_of(Value(3), X), "output=3 is not one of the 3"),
        (lambda m, X: m.predictive_of(Value(), X[:, :1]), "have 1 inputs, but the model takes 2"),
        (lambda m, X: m.update_observations([Value().at(X)]), "Functionals is not a measurement"),
        (lambda m, X: m.update_observations(Value().at(X).observed(np.zeros(len(X)))), "must be a list"),
        (lambda m, X: m.predictive_of(Value(), X).log_prob(np.zeros(3)), "y has 3 numbers"),
        (lambda m, X: m.update_observations([Value(5).at(X).observed(np.zeros(len(X)))]), "output=5"),
    ],
)
def test_wrong_questions_say_what_is_wrong(ask: Callable, words: str, mixture: tuple) -> None:
    refused(words, ask, *mixture)


def test_lengths_are_found_from_functionals_too() -> None:
    """Few values and many gradients of a function that changes along one input alone."""
    rng = np.random.default_rng(0)
    X, at = rng.uniform(-2, 2, (12, 2)), rng.uniform(-2, 2, (60, 2))
    f, slope = lambda x: np.sin(3 * x[:, 0]), lambda x: np.stack([3 * np.cos(3 * x[:, 0]), 0 * x[:, 1]], 1)
    model = BLLRegressor(preset="evidence", encoding="fourier", random_state=0)
    model.fit(X, f(X), noise_std=0.01, observations=[Gradient().at(at).observed(slope(at), noise_std=0.05)])
    assert [member.family for member in model.members_] == [FOURIER]
    new = rng.uniform(-1.8, 1.8, (200, 2))
    assert np.sqrt(np.mean((model.predict(new) - f(new)) ** 2)) < 0.05
    d = model.predictive_of(Gradient(), new)
    low, high = d.interval(0.95)
    assert np.mean((low <= slope(new).ravel()) & (slope(new).ravel() <= high)) > 0.85


def test_features_as_a_function_of_lengths_are_those_of_the_network() -> None:
    g = torch.Generator().manual_seed(0)
    x, log_length = torch.randn(7, 3, generator=g).double(), torch.tensor([0.3, -0.2, 1.0]).double()
    rho = torch.tensor(-1.0).double()
    network = fourier_network(log_length, rho, 16, generator=torch.Generator().manual_seed(1))
    waves = frequencies(3, 16, torch.Generator().manual_seed(1))
    close(network(x), fourier_features(x, log_length, rho, waves))


@pytest.mark.parametrize("levels", [1, 3, 40])
def test_moments_of_levels_of_noise_are_those_of_all_rows(levels: int) -> None:
    """Whatever is learned, and in as few dimensions as there are targets."""
    Phi, T = rows(40, 3, 2)
    noise_var = (torch.arange(40) % levels + 1.0).double()[:, None].expand(-1, 2) / 10
    present = (torch.arange(80).reshape(40, 2) % 7 > 0).double()
    weight = 1.0 + (torch.arange(40) % 2).double()
    data = Rows(Points.of(Phi[:, :-1], T.where(present > 0, torch.nan), weight, noise_var))
    learned = torch.tensor([0.3, 0.05]).double()
    found = data.by_noise(nn.Identity())(learned)
    expected = Statistics.of(Phi[..., :-1], Readings(T, 1 / (data.main.readings.precision(learned))), weight=weight)
    for name in ("count", "mean", "scatter", "n"):
        close(getattr(found, name), getattr(expected, name))
    wide = data.by_noise(lambda X: torch.cat([X, torch.sin(torch.outer(X[:, 0], torch.arange(80.0)))], 1))
    log_alpha = torch.tensor(1.2).double()
    say = lambda some: known_noise_nlml(some(learned), log_alpha, 0.5 * learned.log())
    assert wide.reduced()(learned).n_linear == len(T) * 2 - int((present == 0).sum())
    close(say(wide.reduced()), say(wide))


def test_a_fold_may_know_no_target_of_an_output() -> None:
    g = torch.Generator().manual_seed(0)
    Psi, t = affine_features(torch.randn(5, 2, generator=g).double()), torch.randn(5, generator=g).double()
    known, ones = torch.linspace(0.1, 0.5, 5).double(), torch.ones(5).double()
    none = Targets(0, Psi[:0], t[:0], ones[:0], known[:0], True)
    statistics = StatisticsByNoise([none, Targets(1, Psi, t, ones, known, True)])(torch.ones(2).double())
    assert statistics.observations.tolist() == [0.0, 5.0]
