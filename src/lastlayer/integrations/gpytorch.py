"""A fitted last layer as a Gaussian process of GPyTorch: `LinearKernel` on the features, to be composed with others.

In target units, one output at a time, weights under N(0, sigma_w^2) and a bias under N(0, beta sigma_e^2) give

    k(x, x') = sigma_w^2 psi(x) psi(x')',  psi = [phi_tilde - centre, sqrt(beta / alpha)],  sigma_w^2 = alpha sigma_e^2.

Under the shared prior beta = alpha and nothing is centred. The flat prior is the limit of a large beta: around the mean
of training features and targets a finite one changes the variance by less than sigma_e^2 / (m^2 beta), and nothing
else.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.errors import need
from lastlayer.inputs import as_array
from lastlayer.predictor.fitted import Fitted, as_fitted

gp: Any = need("gpytorch", extra="gpytorch")

FLAT = 1e6
"""beta of the flat prior: large beside 1 / m, small beside what float64 can factor."""


class LastLayerFeatures(nn.Module):
    """psi: what the linear kernel takes, of inputs in original units."""

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
        z = (x.double() - self.input_mean) / self.input_scale
        phi = self.layer.features(None, z.flatten(0, -2))[0]
        psi = torch.cat([phi, self.bias.expand(len(phi), 1)], dim=-1)
        return psi.reshape(*x.shape[:-1], -1)


class FeatureKernel(gp.kernels.Kernel):  # type: ignore[misc]
    """A kernel on features in place of inputs."""

    def __init__(self, features: nn.Module, kernel: Any) -> None:
        super().__init__()
        self.features, self.kernel = features, kernel

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **options: Any) -> Any:
        return self.kernel.forward(self.features(x1), self.features(x2), diag=diag, **options)


class LastLayerGP(gp.models.ExactGP):  # type: ignore[misc]
    """A constant mean and a kernel, given rows."""

    def __init__(self, X: Tensor, y: Tensor, mean: Any, kernel: Any, likelihood: Any) -> None:
        super().__init__(X, y, likelihood)
        self.mean_module, self.covar_module = mean, kernel

    def forward(self, x: Tensor) -> Any:
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def feature_kernel(model: Any, *, member: int = 0, output: int = 0) -> FeatureKernel:
    """What the last layer of one member believes of one output before it has seen data; x and y in original units."""
    fitted = as_fitted(model).with_shared_rows("GPyTorch")
    alpha = torch.as_tensor(fitted.members[member].layer.posterior.log_alpha, dtype=torch.float64).exp()
    linear = gp.kernels.LinearKernel().double()
    linear.variance = alpha * _noise_var(fitted, member, output)
    return FeatureKernel(LastLayerFeatures(fitted, member), linear)


def to_gpytorch(model: Any, X: Any, y: Any, *, member: int = 0, output: int = 0) -> LastLayerGP:
    """An exact GP whose posterior given the training rows (X, y) is the last layer's own, in evaluation mode.

    It has the alpha and the noise of the evidence (`alpha_star_`, `noise_std_`), no curve and no other members.
    `gp.likelihood` is its likelihood, `gp.covar_module` the kernel to compose with.
    """
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
