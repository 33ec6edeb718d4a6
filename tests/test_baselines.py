import math

import numpy as np
import pytest
import torch
from helpers import close, last_layer_rows, refused
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch.distributions import MultivariateNormal, kl_divergence

from lastlayer import TrainingOptions
from lastlayer.bayes.evidence import general_nlml, optimal_alpha
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.statistics import Readings, Statistics
from lastlayer.data.rows import Points
from lastlayer.studies import baselines
from lastlayer.studies.baselines import BayesByBackpropRegressor, BayesianNetwork, BLRRegressor, VariationalLinear


def wave(m=60, seed=0):
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(0, 1, (m, 1)), axis=0)
    return x, np.hstack([np.sin(6 * x), x**2]) + rng.normal(size=(m, 2)) * [0.05, 0.2]


@pytest.mark.filterwarnings("ignore::lastlayer.errors.FlooredNoiseWarning")
@parametrize_with_checks(
    [BLRRegressor(hidden=(5,), max_epochs=20), BayesByBackpropRegressor(hidden=(5,), max_epochs=50, n_components=5)]
)
def test_scikit_learns_checks(estimator, check, as_a_user):
    check(estimator)


@pytest.mark.parametrize("std", [1e-6, 1e-2, 1.0])
@pytest.mark.parametrize("local", [True, False])
def test_the_spread_of_draws_is_that_of_the_weights_however_small(local, std, generator):
    """Local: draws of outputs, which are for training."""
    layer = VariationalLinear(2, 2, prior_std=1.0, generator=generator).train(local)
    x = torch.tensor([[0.5, -1.0], [2.0, 0.3]], dtype=torch.float64)
    truth = affine_features(x) @ layer.mean.detach()

    def deviations(std):
        layer.rho.data = std.expm1().log()
        return layer(x.expand(100_000, 2, 2), torch.Generator().manual_seed(2)).detach() - truth

    stds = std * torch.tensor([[1.0, 0.2], [0.5, 3.0], [0.1, 2.0]], dtype=torch.float64)
    draws = deviations(stds)
    spread = (affine_features(x).square() @ stds.square()).sqrt()
    assert (draws.mean(0) / spread).abs().max() < 0.02
    assert (draws.std(0) / spread - 1).abs().max() < 0.02
    # the same weights serve all samples of a draw: those outputs are correlated, local ones are not
    correlation = abs(float(torch.corrcoef(draws[:, :, 0].T)[0, 1]))
    assert correlation < 0.02 if local else correlation > 0.1
    # the same noise: the spread is proportional to the deviations of the weights
    close(draws, std * deviations(stds / std), loose=max(1.0, 1e-3 / std))  # digits lost beside the mean


@pytest.mark.parametrize("local", [True, False])
def test_the_bound_is_likelihood_and_divergence_of_all_weights_a_sample(local, generator):
    """Of both outputs and every layer, with densities of vectors in place of sums over entries."""
    network = BayesianNetwork(3, (4,), 2, prior_std=0.7, generator=generator)
    network.requires_grad_(False).train(local)
    network.log_last_prior_std.fill_(0.4)
    network.log_sigma_e.copy_(torch.tensor([-0.5, 0.3]))
    X, T = (torch.randn(9, d, generator=generator, dtype=torch.float64) for d in (3, 2))
    bound = sum(network.bound_terms(X, T, n_draws=5, generator=torch.Generator().manual_seed(1)))
    draws = network(X.expand(5, 9, 3), torch.Generator().manual_seed(1))
    noise = MultivariateNormal(torch.zeros(2, dtype=torch.float64), torch.diag((2 * network.log_sigma_e).exp()))
    likelihood = torch.stack([sum(noise.log_prob(T[i] - y[i]) for i in range(9)) for y in draws]).mean()
    divergence = torch.zeros((), dtype=torch.float64)
    for layer, prior_std in ((network.hidden[0], 0.7), (network.last, math.exp(0.4))):
        mean, std = layer.mean.flatten(), layer.std.flatten()
        prior = MultivariateNormal(torch.zeros_like(mean), prior_std**2 * torch.eye(len(mean), dtype=torch.float64))
        divergence += kl_divergence(MultivariateNormal(mean, torch.diag(std**2)), prior)
    close(bound, (divergence - likelihood) / 9)


def exact_bound(network: BayesianNetwork, X: torch.Tensor, T: torch.Tensor) -> torch.Tensor:
    """Minus the bound of a network without hidden layer, its expectation in closed form; total."""
    Phi, layer = affine_features(X), network.last
    sigma = network.log_sigma_e.exp()
    expected = (T - Phi @ layer.mean).square() + Phi.square() @ layer.std.square()
    return (0.5 * expected / sigma**2 + sigma.log() + 0.5 * math.log(2 * math.pi)).sum() + layer.kl()


@pytest.mark.parametrize("orthogonal", [True, False])
def test_the_bound_stays_below_the_evidence_and_reaches_it_where_it_can(orthogonal, generator):
    X = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    if orthogonal:  # then the exact posterior factorises, and mean-field is no restriction
        X = math.sqrt(12) * torch.linalg.qr(torch.cat([torch.ones(12, 1).double(), X], 1)).Q[:, 1:]
    T = X @ torch.tensor([[1.0], [-0.5]], dtype=torch.float64) + 0.3 * torch.randn(12, 1, generator=generator).double()
    network = BayesianNetwork(2, (), 1, prior_std=1.0, generator=generator).eval()
    network.log_sigma_e.requires_grad_(False)
    network.log_last_prior_std.requires_grad_(False)
    steps = torch.optim.LBFGS(network.parameters(), max_iter=500, line_search_fn="strong_wolfe", tolerance_change=1e-14)

    def closure():
        steps.zero_grad()
        loss = exact_bound(network, X, T)
        loss.backward()
        return loss

    steps.step(closure)
    network.requires_grad_(False)
    sigma2 = float(network.log_sigma_e.exp() ** 2)
    truth = general_nlml(affine_features(X), T[:, 0], sigma2 * torch.eye(12).double(), torch.eye(3).double())
    gap = float(exact_bound(network, X, T) - truth)
    assert gap > -1e-9
    assert gap < (1e-6 if orthogonal else 1.0)
    assert orthogonal or gap > 1e-3
    # the sampled bound is an unbiased estimate of the one in closed form
    sampled = 12 * sum(network.bound_terms(X, T, n_draws=20_000, generator=generator))
    assert abs(float(sampled - exact_bound(network, X, T))) < 0.1


def test_bayes_by_backprop_predicts_the_mixture_over_its_draws():
    X, y = wave()
    model = BayesByBackpropRegressor(hidden=(10,), max_epochs=300, n_components=50, random_state=0).fit(X, y)
    p, draws = model.predictive(X), model.draw_functions(X)
    assert p.component_mean.shape == draws.shape == (50, 60, 2)
    np.testing.assert_allclose(p.mean, draws.mean(0))
    np.testing.assert_allclose(p.var, draws.var(0) + model.noise_std_**2)
    assert np.isfinite(p.log_prob(y)).all()
    np.testing.assert_array_equal(p.mean, model.predictive(X).mean)
    again = BayesByBackpropRegressor(hidden=(10,), max_epochs=300, n_components=50, random_state=0).fit(X, y)
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert model.score(X, y) > 0.2
    assert model.history_["negative_elbo"][-1] < model.history_["negative_elbo"][0]
    function = model.predictive(X, noise=False)
    assert (function.noise_var == 0).all()
    refused(r"prior_std=0\.0", BayesByBackpropRegressor(prior_std=0.0).fit, X, y)


def test_the_divergence_joins_in_over_the_warmup(monkeypatch):
    """The last layer's prior is in no other term, so it moves with the divergence alone."""

    def prior(kl_warmup, epochs):
        monkeypatch.setattr(baselines, "KL_WARMUP", kl_warmup)
        model = BayesByBackpropRegressor((4,), max_epochs=epochs, random_state=0).fit(*wave())
        return float(model.network_.log_last_prior_std.detach()), model.history_

    without, at_once = prior(1.0, 1), prior(0.0, 1)
    assert without[0] == 0 != at_once[0]
    assert without[1] == at_once[1]
    assert prior(0.5, 2)[0] != 0  # nothing in the first step, all of it in the second


def test_blr_is_the_evidences_optimum_on_features_that_the_squared_error_made():
    X, y = wave()
    model = BLRRegressor(hidden=(10,), max_epochs=200, random_state=0).fit(X, y)
    assert model.score(X, y) > 0.5
    Phi, T = last_layer_rows(model, X, y)
    best = optimal_alpha(Statistics.from_features(Phi, T))
    assert math.log(model.alpha_star_) == pytest.approx(best.log_alpha, abs=1e-6)
    assert model.nlml_ == pytest.approx(best.nlml)
    # training followed the squared error, not the evidence
    assert model.history_["nlml"][-1] < 0.5 * model.history_["nlml"][0]
    assert set(model.history_["log_alpha"]) == {4.0}


def test_blr_checks_its_parameters_as_every_estimator_does_and_takes_no_source(as_a_user):
    for options, said in (
        ({"noise": "diagnal"}, "noise='diagnal'.*did you mean 'diagonal'"),
        ({"training": TrainingOptions(bias_prior="flatt")}, "bias_prior='flatt'.*did you mean 'flat'"),
        ({"training": {"objective": "mse"}}, "TrainingOptions"),
        ({"max_epochs": -1}, "max_epochs=-1"),
    ):
        refused(said, BLRRegressor(**options).fit, *wave())
    source = Points(torch.zeros(10, 1), Readings(torch.zeros(10, 1)))
    refused(r"BLRRegressor.*call fit\(X, y\)", BLRRegressor().fit_source, source)


def test_the_objective_of_blr_is_the_squared_error_whatever_its_options_say():
    X, y = wave()
    options = {"hidden": (4,), "max_epochs": 5, "random_state": 0}
    plain = BLRRegressor(**options).fit(X, y)
    asked = BLRRegressor(**options, training=TrainingOptions(objective="profiled")).fit(X, y)
    assert plain.settings_.training.objective == asked.settings_.training.objective == "mse"
    np.testing.assert_array_equal(plain.predict(X), asked.predict(X))
