"""The example of Figures 2 and 3: three samples of a line, and what alpha does to the uncertainty between them."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor, nn

from lastlayer.evidence import nlml
from lastlayer.extrapolation import AlphaCurve, held_out_lpd, tune_alpha
from lastlayer.features import affine_features
from lastlayer.posterior import Posterior
from lastlayer.scaling import Standardizer
from lastlayer.statistics import Statistics
from lastlayer.training import Augmented, Data, Optimiser, train

X_TRAIN = np.array([[0.2], [0.5], [0.8]])
X_TEST = np.linspace(0, 1, 100)[:, None]


def line(x: Float[ndarray, "m 1"]) -> Float[ndarray, "m 1"]:
    return 3 * x + 2


@dataclass(frozen=True)
class ThreeSamples:
    """A network 1-3(tanh)-2(linear)-1 with its last layer at the evidence's optimum, standardised units inside."""

    network: nn.Module
    posterior: Posterior
    inputs: Standardizer
    targets: Standardizer
    curve: AlphaCurve
    """LPD of the test points against alpha."""

    def features(self, X: Float[ndarray, "m 1"]) -> Float[Tensor, "m k"]:
        with torch.no_grad():
            return self.network(self.inputs.forward(torch.from_numpy(X)))

    def predict(self, X: Float[ndarray, "m 1"], log_alpha: float) -> tuple[ndarray, ndarray]:
        """Mean and standard deviation of the function, in target units."""
        Phi = affine_features(self.features(X))
        std = (self.posterior.variance_ratio(Phi, log_alpha) * self.posterior.Sigma_E[0, 0]).sqrt()
        mean = self.posterior.mean(Phi)[:, 0]
        scale, shift = float(self.targets.scale[0]), float(self.targets.mean[0])
        return (mean * scale + shift).numpy(), (std * scale).numpy()

    def nlml(self, log_alphas: ndarray) -> ndarray:
        """Negative log marginal likelihood per sample at the trained noise, eq:LMLH_alpha_cost."""
        Phi = affine_features(self.features(X_TRAIN))
        T = self.targets.forward(torch.from_numpy(line(X_TRAIN)))
        log_sigma_e = 0.5 * self.posterior.Sigma_E.diagonal().log()
        values = [nlml(Phi, T, torch.tensor(a), log_sigma_e, bias_prior="shared") for a in log_alphas]
        return np.array([float(v) for v in values])

    def lpd(self, X: Float[ndarray, "m 1"], log_alphas: ndarray) -> ndarray:
        """Log predictive density in standardised units."""
        Phi, T = affine_features(self.features(X)), self.targets.forward(torch.from_numpy(line(X)))
        return np.array([held_out_lpd(self.posterior, Phi, T, float(a)) for a in log_alphas])


def fit(seed: int = 0, *, max_epochs: int = 5000, progress: bool = False) -> ThreeSamples:
    """Adam 5e-3 on the augmented evidence, as in the paper."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = Standardizer.fit(torch.from_numpy(X_TRAIN)), Standardizer.fit(torch.from_numpy(line(X_TRAIN)))
    data = Data(inputs.forward(torch.from_numpy(X_TRAIN)), targets.forward(torch.from_numpy(line(X_TRAIN))))
    layers = nn.Linear(1, 3), nn.Linear(3, 2)
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
    network = nn.Sequential(layers[0], nn.Tanh(), layers[1]).double()
    objective = Augmented(2, 1, bias_prior="shared", generator=generator)
    optimiser = Optimiser(learning_rate=5e-3, max_epochs=max_epochs, cosine=False)
    train(network, objective, data, optimiser, progress=progress)
    with torch.no_grad():
        statistics = Statistics.from_features(affine_features(network(data.X)), data.T)
        noise_cov = (2 * objective.log_sigma_e).exp()[:, None]
    posterior = Posterior(
        statistics, float(objective.log_alpha.detach()), noise_cov, bias_prior="shared", rtol=float("inf")
    )
    with torch.no_grad():
        Phi_test = affine_features(network(inputs.forward(torch.from_numpy(X_TEST))))
        curve = tune_alpha(posterior, Phi_test, targets.forward(torch.from_numpy(line(X_TEST))))
    return ThreeSamples(network, posterior, inputs, targets, curve)
