"""The Gaussian process of GPyTorch with the last layer's kernel says what the last layer says."""

import numpy as np
import pytest
import torch
from models import FAST, data, far
from torch import nn

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.errors import need

gpytorch = need("gpytorch", extra="gpytorch")
from lastlayer.integrations.gpytorch import FLAT, feature_kernel, to_gpytorch  # noqa: E402

PRIORS = [("flat", 1e-6), ("shared", 1e-9)]  # a flat prior is a limit, which float64 cannot reach


def model_of(bias_prior):
    X, y = data()
    return BLLRegressor(**FAST, training=TrainingOptions(bias_prior=bias_prior)).fit(X, y), X, y


@pytest.mark.parametrize(("bias_prior", "rtol"), PRIORS)
def test_its_posterior_is_ours_at_points_and_between_them(bias_prior, rtol):
    model, X, y = model_of(bias_prior)
    points = far(X)
    p, joint = model.predictive(points), model.joint(points, noise=False)
    for output in range(2):
        gp = to_gpytorch(model, X, y, output=output)
        with torch.no_grad():
            function = gp(torch.tensor(points))
            target = gp.likelihood(function)
        np.testing.assert_allclose(function.mean, p.mean[:, output], rtol=rtol, atol=rtol * np.abs(p.mean).max())
        np.testing.assert_allclose(function.variance, p.epistemic_var[:, output], rtol=rtol)
        np.testing.assert_allclose(target.variance, p.var[:, output], rtol=rtol)
        cov = joint.cov_of_outputs()[..., output]
        np.testing.assert_allclose(function.covariance_matrix, cov, atol=rtol * cov.max())


@pytest.mark.parametrize(("bias_prior", "rtol"), PRIORS)
def test_its_kernel_is_the_prior_of_the_weights(bias_prior, rtol):
    """sigma_w^2 = alpha sigma_e^2 on every feature, target units; the bias apart."""
    model, X, _ = model_of(bias_prior)
    noise_var = model.noise_std_[1] ** 2
    with torch.no_grad():
        K = feature_kernel(model, output=1)(torch.tensor(X)).to_dense().numpy()
    Phi = model.fitted_.features(0, model.fitted_.standardized(X)).numpy()[:, :-1]
    Z = Phi - Phi.mean(0) if bias_prior == "flat" else Phi
    bias = FLAT if bias_prior == "flat" else model.alpha_star_
    np.testing.assert_allclose(K, noise_var * (model.alpha_star_ * Z @ Z.T + bias), rtol=1e-9)


def test_it_composes_with_other_kernels():
    model, X, y = model_of("shared")
    both = feature_kernel(model) + gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
    gp = to_gpytorch(model, X, y)
    alone = gp(torch.tensor(far(X))).variance.detach()
    gp.covar_module = both
    gp.train()
    gp.eval()
    assert bool((gp(torch.tensor(far(X))).variance.detach() > alone).all())


def test_in_training_mode_dropout_and_batch_statistics_of_the_network_stay_off():
    """Parameters of a composed kernel may be trained; the features are those of the fitted model all the while."""
    X, y = data()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5)).double()
    model = BLLRegressor(backbone=network, **FAST | {"max_epochs": 3}).fit(X, y)
    kernel, points = feature_kernel(model), torch.tensor(far(X))
    before = kernel.eval()(points).to_dense().detach()
    for _ in range(2):
        assert torch.equal(kernel.train()(points).to_dense().detach(), before)
