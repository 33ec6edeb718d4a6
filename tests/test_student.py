"""Student-t noise: exact E-steps, a bound that rises, and models that outliers hardly change."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import gamma, norm
from scipy.stats import t as student_t
from torch.distributions import MultivariateNormal

import lastlayer
from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Readings, Statistics
from lastlayer.data.rows import Points
from lastlayer.data.sources import ArraySource
from lastlayer.errors import CopiesWarning, InputError, MissingTargetsWarning
from lastlayer.likelihoods import Student
from lastlayer.likelihoods.student import FACTORS, shares_of
from lastlayer.networks.mlp import InputSkip, StackedMLP
from lastlayer.settings.types import Given
from lastlayer.training import StackedNetworks
from lastlayer.training.sites import sites_at, stand_in

FAST = {"preset": "fast", "hidden": (8,), "random_state": 0}


def table(n: int, share: float, seed: int = 0, size: float = 20.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets with noise 0.1 of which a share is too large, and where these are."""
    rng = np.random.default_rng(seed)
    X, bad = rng.uniform(-1, 1, (n, 2)), rng.random(n) < share
    return X, np.sin(3 * X[:, 0]) + X[:, 1] + 0.1 * rng.standard_normal(n) + size * bad, bad


def features(m: int = 40, k: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(1)
    phi = torch.from_numpy(rng.normal(size=(m, k)))
    t = phi @ torch.from_numpy(rng.normal(size=(k, 1))) + 0.3 * torch.from_numpy(rng.standard_t(2, size=(m, 1)))
    return phi, t


def test_sites_are_weighted_by_the_mean_of_u():
    """By quadrature over u, with the function integrated out: q(u) is proportional to exp E log p(t, u | f)."""
    likelihood, sigma2 = Student(3.0), 0.5
    t = torch.tensor([[0.2], [3.0], [0.0]], dtype=torch.float64)
    r = Readings(t, torch.tensor([[1.0], [1.0], [torch.inf]]).double())
    mean, var = torch.full_like(t, -0.4), torch.tensor([[0.1], [0.7], [0.2]]).double()
    found = likelihood.sites(r, mean, var, torch.full((1, 1), sigma2).double())
    for i in range(2):
        square = float((t[i] - mean[i]) ** 2 + var[i])
        density = lambda u, square=square: u**0.5 * np.exp(-0.5 * u * square / sigma2) * gamma(1.5, scale=2 / 3).pdf(u)
        total, first = quad(density, 0, np.inf)[0], quad(lambda u, d=density: u * d(u), 0, np.inf)[0]
        assert 1 / float(found.scale[i]) == pytest.approx(first / total, rel=1e-6)
    assert torch.isinf(found.scale[2, 0])
    assert torch.equal(found.t, t)


def bound(phi, t, u, log_alpha: float, sigma2: float, nu: float, expected_log_u) -> float:
    """Evidence lower bound, slowly: exact Gaussian evidence given E u, and the rest of q(u) and p(u) term by term.

    Writing q(u_i) = Gamma(a, b_i), E log N(t | f, s/u) = log N(t | f, s/E u) + (E log u - log E u) / 2.
    """
    A = torch.cat([phi, torch.ones_like(phi[:, :1])], 1)
    prior = torch.diag(torch.tensor([*[sigma2 * np.exp(log_alpha)] * phi.shape[1], 1e8]).double())
    evidence = MultivariateNormal(torch.zeros(len(t)).double(), A @ prior @ A.mT + torch.diag(sigma2 / u))
    a = (nu + 1) / 2
    b = a / u
    prior_u = nu / 2 * np.log(nu / 2) - torch.lgamma(torch.tensor(nu / 2)) + (nu / 2 - 1) * expected_log_u - nu / 2 * u
    entropy = a - b.log() + torch.lgamma(torch.tensor(a)) + (1 - a) * torch.digamma(torch.tensor(a))
    return float(evidence.log_prob(t[:, 0]) + (0.5 * (expected_log_u - u.log()) + prior_u + entropy).sum())


def test_the_bound_rises_under_both_steps():
    (phi, t), nu, log_alpha = features(), 4.0, 2.0
    likelihood, a = Student(nu), torch.tensor((nu + 1) / 2).double()
    expected_log_u = lambda u: torch.digamma(a) - (a / u).log()
    data, sigma2, values = Points(phi, Readings(t, torch.ones_like(t))), 0.5, []
    u = torch.ones(len(t)).double()
    for _ in range(12):
        value = lambda u, sigma2: bound(phi, t, u, log_alpha - np.log(sigma2), sigma2, nu, expected_log_u(u))
        values.append(value(u, sigma2))
        sums = Statistics.of(phi, replace(data.readings, scale=(1 / u)[:, None]))
        posterior = Posterior(sums, log_alpha - np.log(sigma2), torch.full((1, 1), sigma2).double())
        Phi = torch.cat([phi, torch.ones_like(phi[:, :1])], 1)
        u = 1 / sites_at(likelihood, data, posterior, Phi).readings.scale[:, 0]
        values.append(value(u, sigma2))
        posterior = replace(posterior, statistics=Statistics.of(phi, Readings(t, (1 / u)[:, None])))
        square = (t - posterior.mean(Phi)).square() + sigma2 * posterior.variance_ratio(Phi)  # prior variance is kept
        sigma2 = float((u * square[:, 0]).mean())
    assert (np.diff(values) > -1e-6).all()
    assert values[-1] > values[0] + 1


def test_a_last_layer_of_sites_is_weighted_least_squares():
    phi, t = features()
    scale = torch.from_numpy(np.random.default_rng(2).uniform(0.2, 5, (len(t), 1)))
    posterior = Posterior(Statistics.of(phi, Readings(t, scale)), 30.0)
    A, root = np.column_stack([phi, np.ones(len(t))]), 1 / np.sqrt(scale.numpy())
    slow = np.linalg.lstsq(root * A, root * t.numpy(), rcond=None)[0]
    np.testing.assert_allclose(posterior.weights.numpy(), slow, rtol=1e-8)


def test_sites_settle_at_the_maximum_of_the_likelihood_and_weights_are_copies():
    phi, t = features(400)
    data = Points(phi, Readings(t, torch.ones_like(t)))
    settled = stand_in(Student(), data, phi, 4.0)
    again = stand_in(Student(), settled, phi, 4.0, rounds=1)
    torch.testing.assert_close(again.readings.scale, settled.readings.scale, rtol=0.1, atol=0.0)
    twice = Points(torch.cat([phi, phi[:5]]), Readings(torch.cat([t, t[:5]]), torch.ones(405, 1).double()))
    weight = torch.ones(400).double()
    weight[:5] = 2
    weighted = stand_in(Student(), replace(data, weight=weight), phi, 4.0)
    copies = stand_in(Student(), twice, twice.X, 4.0)
    torch.testing.assert_close(weighted.readings.scale, copies.readings.scale[:400], rtol=1e-8, atol=0.0)


@pytest.mark.parametrize("batch_size", [None, 12])
def test_a_stack_replaces_readings_by_the_sites_of_the_last_step(batch_size):
    """Against features and posteriors of each network alone, with weights, missing targets and unequal parts."""
    rng = np.random.default_rng(0)
    X, T = torch.from_numpy(rng.normal(size=(30, 2))), torch.from_numpy(rng.standard_t(2, size=(30, 2)))
    T[::7, 1] = torch.nan
    readings = Student().read(Given(X.numpy(), T.numpy()))
    data = Points(X, readings, torch.from_numpy(rng.uniform(0.5, 2, 30)))
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    network, parts = InputSkip(StackedMLP(2, (4,), generators=generators).double()), [np.arange(24), np.arange(10, 30)]
    words = {"prior_precision": torch.zeros(2), "batch_size": batch_size, "likelihood": Student()}
    problem = StackedNetworks(network, data, parts, **words)
    problem.gradient(None, 1.0)
    frozen = problem.frozen
    problem.gradient(None, 1.0)
    n = problem.passes.rows.shape[1]
    first = n if batch_size else 0
    index = problem.order[:, min(first, problem.order.shape[1] - n) :][:, :n]
    for i, rows in enumerate(index):
        phi = network(X.expand(2, -1, -1))[i, rows].double()
        for j in range(2):
            z = phi - frozen.centre[i, j]
            W, noise = frozen.weights[i, j, :, 0], frozen.noise_cov[i, j, 0, 0]
            var = noise * ((z @ frozen.inverse[i, j] * z).sum(-1) + 1 / frozen.count[i, j])
            one = replace(readings, t=readings.t[rows, j : j + 1], scale=readings.scale[rows, j : j + 1])
            found = Student().sites(one, (phi @ W[:-1] + W[-1])[:, None], var[:, None], noise.reshape(1, 1))
            used = problem.passes.root[i, :, 0] > 0  # shorter parts are filled up
            torch.testing.assert_close(problem.own.scale[i, used, j], found.scale[used, 0], rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("nu", [2.0, 4.0, 30.0])
def test_factors_mix_to_the_t_distribution(nu):
    shares, z = np.array(shares_of(nu)), np.array([0.1, 0.5, 1, 2, 3, 4, 6])
    mixed = (shares[:, None] * norm.cdf(z / np.sqrt(FACTORS)[:, None])).sum(0)
    np.testing.assert_allclose(mixed, student_t(nu).cdf(z), atol=0.015)


def test_degrees_of_freedom_are_those_of_the_residuals():
    rng = np.random.default_rng(0)
    zero, one = torch.zeros(2, 3000, 1).double(), torch.ones(2, 3000, 1).double()
    fit = lambda noise: Student().refitted(Readings(torch.from_numpy(noise)[:, None]), zero, 7.0 * one)
    assert 2 < fit(rng.standard_t(3, 3000)).nu < 4.5
    assert fit(rng.standard_normal(3000)).nu > 15
    contaminated = fit(np.where(rng.random(3000) < 0.05, 200.0, 1.0) * rng.standard_normal(3000))
    assert np.sum(np.array(contaminated.shares)[FACTORS > 1000]) == pytest.approx(0.05, abs=0.015)


@pytest.fixture(scope="module")
def models() -> dict[str, BLLRegressor]:
    X, y, _ = table(400, 0.05)
    words = {"random_state": 0, "preset": "fast"}
    return {name: BLLRegressor(likelihood=name, **words).fit(X, y) for name in ("gaussian", "student")}


def test_outliers_hardly_change_the_function_or_the_intervals(models):
    X, y, bad = table(2000, 0.05, 1)
    clean = np.sin(3 * X[:, 0]) + X[:, 1]
    rmse = {name: np.sqrt(np.mean((model.predict(X) - clean) ** 2)) for name, model in models.items()}
    assert rmse["student"] < 0.1
    assert rmse["student"] < 0.2 * rmse["gaussian"]
    p = models["student"].predictive(X)
    for level, low, high in ((0.5, 0.40, 0.68), (0.9, 0.85, 0.99)):
        lower, upper = p.interval(level)
        assert low < np.mean(((lower < y) & (y < upper))[~bad]) < high
    assert p.log_prob(y).mean() > models["gaussian"].predictive(X).log_prob(y).mean() + 1
    assert models["student"].predictive(X, noise=False).std.max() < 1


def test_later_steps_keep_the_likelihood(models, tmp_path):
    model, (X, y, _) = models["student"], table(300, 0.05, 2)
    model.save(tmp_path / "m")
    loaded = lastlayer.load(tmp_path / "m")
    assert loaded.fitted_.likelihood == model.fitted_.likelihood != Student()
    for same in (loaded, pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(same.predictive(X).std, model.predictive(X).std)
    clean = np.sin(3 * X[:, 0]) + X[:, 1]
    before = np.abs(model.predict(X) - clean).mean()
    loaded.update(X, y)
    assert np.abs(loaded.predict(X) - clean).mean() < before + 0.01
    assert loaded.calibration_.curve.widening == 1
    loaded.tune_alpha(X, y).calibrate(X, y).conformalize(X, y)
    lower, upper = loaded.predictive(X).interval(0.8, method="conformal")
    assert np.mean((lower < y) & (y < upper)) >= 0.75
    assert np.std(model.sample_y(X[:1], 200)) > 0


def test_one_network_by_the_evidence_has_heavy_tails():
    X, y, bad = table(150, 0.05)
    model = BLLRegressor(preset="evidence", likelihood="student", hidden=(10,), max_epochs=100, random_state=0).fit(
        X, y
    )
    p = model.predictive(X)
    assert np.sqrt(np.mean((p.mean - y)[~bad] ** 2)) < 0.2
    assert p.log_prob(p.mean + 10 * p.interval(0.68)[1] - 10 * p.interval(0.68)[0]).min() > -20
    batches = BLLRegressor(preset="evidence", likelihood="student", hidden=(10,), max_epochs=30, batch_size=64)
    assert np.median(np.abs(batches.set_params(random_state=0).fit(X, y).predict(X) - y)) < 0.3


def test_missing_targets_weights_groups_and_mini_batches():
    X, y, bad = table(160, 0.05)
    Y = np.column_stack([y, -y + 3])
    Y[::4, 1] = np.nan
    model = BLLRegressor(likelihood="student", batch_size=40, max_epochs=60, **FAST)
    with pytest.warns(MissingTargetsWarning):
        model.fit(X, Y, sample_weight=np.where(np.arange(160) % 2, 1.0, 2.0), groups=np.arange(160) // 2)
    error = np.abs(model.predict(X) - np.column_stack([y, -y + 3]))[~bad]
    assert np.median(error) < 0.2
    assert np.isfinite(model.predictive(X).log_prob(Y)).all()


def test_copies_are_weights():
    X, y, _ = table(40, 0.05)
    words = {"likelihood": "student", "max_epochs": 5, **FAST}
    with pytest.warns(CopiesWarning):
        copies = BLLRegressor(**words).fit(np.concatenate([X, X]), np.concatenate([y, y]))
    np.testing.assert_allclose(
        BLLRegressor(**words).fit(X, y, np.full(40, 2.0)).predict(X), copies.predict(X), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("words", "given", "said"),
    [
        ({}, {"noise_std": 0.1}, "noise_std or observations"),
        ({"noise": "full"}, {}, 'noise="full"'),
        ({"calibration": "alpha"}, {}, 'calibration="alpha"'),
        ({"training": TrainingOptions(bias_prior="shared")}, {}, 'bias_prior="shared"'),
        ({"training": TrainingOptions(objective="mse")}, {}, "objective"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_sentence(words, given, said):
    X, y, _ = table(40, 0.05)
    with pytest.raises(InputError, match=said):
        BLLRegressor(likelihood="student", **FAST, **words).fit(X, y, **given)


def test_what_needs_fixed_weights_or_gaussians_is_refused(models):
    model, (X, y, _) = models["student"], table(10, 0.0)
    for call in (lambda: model.remove(X, y), model.reestimate, lambda: model.joint(X), model.module):
        with pytest.raises(InputError, match='likelihood="gaussian"'):
            call()
    with pytest.raises(InputError, match="likelihood='student'"):
        BLLRegressor(likelihood="student").fit_source(ArraySource(X, y))
