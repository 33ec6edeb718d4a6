"""A fitted last layer as a GPyTorch Gaussian process: `LinearKernel` on the features, to be composed with others."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer._internal.arrays import as_array
from lastlayer.errors import need
from lastlayer.predictor.fitted import Fitted, as_fitted

gp: Any = need("gpytorch", extra="gpytorch")

FLAT = 1e6
"""beta of the flat prior: large compared with 1 / m, small enough for a Cholesky factorisation in float64."""


class LastLayerFeatures(nn.Module):
    """Feature map psi of the linear kernel, for inputs in original units."""

    input_mean: Tensor
    input_scale: Tensor
    bias: Tensor

    def __init__(self, fitted: Fitted, member: int) -> None:
        super().__init__()
        one, posterior = fitted.alone(member), fitted.members[member].layer.posterior
        self.layer = one.module().groups()[0]
        over_alpha = FLAT * torch.exp(-torch.as_tensor(posterior.log_alpha, dtype=torch.float64))
        self.register_buffer("input_mean", one.predictor.input_mean.clone())
        self.register_buffer("input_scale", one.predictor.input_scale.clone())
        self.register_buffer("bias", over_alpha.sqrt() if posterior.bias_prior == "flat" else torch.ones(()).double())

    def forward(self, x: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m p"]:
        """Compute the features of inputs in original units."""
        z = (x.double() - self.input_mean) / self.input_scale
        phi = self.layer.features(None, z.flatten(0, -2))[0]
        psi = torch.cat([phi, self.bias.expand(len(phi), 1)], dim=-1)
        return psi.reshape(*x.shape[:-1], -1)


class FeatureKernel(gp.kernels.Kernel):  # type: ignore[misc]
    """A kernel applied to features of the inputs."""

    def __init__(self, features: nn.Module, kernel: Any) -> None:
        super().__init__()
        self.features, self.kernel = features, kernel

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **options: Any) -> Any:
        """Compute the covariance between two sets of inputs."""
        return self.kernel.forward(self.features(x1), self.features(x2), diag=diag, **options)


class LastLayerGP(gp.models.ExactGP):  # type: ignore[misc]
    """Exact GP with a mean and a kernel, conditioned on rows."""

    def __init__(self, X: Tensor, y: Tensor, mean: Any, kernel: Any, likelihood: Any) -> None:
        super().__init__(X, y, likelihood)
        self.mean_module, self.covar_module = mean, kernel

    def forward(self, x: Tensor) -> Any:
        """Return the prior distribution at some inputs."""
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def feature_kernel(model: Any, *, member: int = 0, output: int = 0) -> FeatureKernel:
    """Return the prior covariance of one output under one member's last layer, as a kernel in original units."""
    fitted = as_fitted(model).with_shared_rows("GPyTorch")
    alpha = torch.as_tensor(fitted.members[member].layer.posterior.log_alpha, dtype=torch.float64).exp()
    linear = gp.kernels.LinearKernel().double()
    linear.variance = alpha * _noise_var(fitted, member, output)
    return FeatureKernel(LastLayerFeatures(fitted, member), linear)


def to_gpytorch(model: Any, X: Any, y: Any, *, member: int = 0, output: int = 0) -> LastLayerGP:
    """Build an exact GP whose posterior given the training rows is that of the last layer."""
    fitted = as_fitted(model).with_shared_rows("GPyTorch")
    rows, targets = (torch.as_tensor(as_array(values), dtype=torch.float64) for values in (X, y))
    scale, centre = fitted.targets.scale[output], fitted.targets.mean[output]
    posterior = fitted.members[member].layer.posterior
    mean = gp.means.ConstantMean().double()
    mean.initialize(
        constant=centre + scale * (posterior.bias_prior == "flat") * posterior.equations.target_mean[output]
    )
    likelihood = gp.likelihoods.GaussianLikelihood(noise_constraint=gp.constraints.Positive()).double()
    likelihood.noise = _noise_var(fitted, member, output)
    kernel = feature_kernel(fitted, member=member, output=output)
    return LastLayerGP(rows, targets if targets.dim() == 1 else targets[:, output], mean, kernel, likelihood).eval()


def _noise_var(fitted: Fitted, member: int, output: int) -> Tensor:
    return torch.tensor(fitted.noise_cov[member, output, output])
