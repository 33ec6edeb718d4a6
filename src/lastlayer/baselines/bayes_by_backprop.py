"""A Bayesian neural network by variational inference: Bayes by Backprop (Section "Bayes by Backprop")."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor
from tqdm import tqdm

from lastlayer.baselines.variational import BayesianNetwork
from lastlayer.errors import InputError
from lastlayer.estimator import Shell
from lastlayer.prediction import Prediction


class BayesByBackpropRegressor(Shell):
    """Every weight Gaussian (mean-field), trained on the evidence lower bound; predicts a Gaussian mixture.

    Parameters
    ----------
    hidden, activation : the network; batch normalisation follows every hidden variational layer.
    prior_std : standard deviation of the fixed prior on hidden weights; the last layer's prior is learned.
    local_reparameterization : draw outputs instead of weights, one draw a sample: gradients of less variance.
    n_draws : draws of the weights in a training step.
    n_components : weight samples in a prediction, the components of its mixture.
    learning_rate, max_epochs : full-batch Adam with a constant rate.
    device, random_state, progress : as in BLLRegressor.

    Attributes
    ----------
    network_ : the variational network. noise_std_ : (q,) in target units. history_ : minus the bound, an epoch each.
    """

    dtype = "float64"

    def __init__(
        self,
        hidden: Sequence[int] = (20, 20),
        *,
        activation: str = "tanh",
        prior_std: float = 0.5,
        local_reparameterization: bool = True,
        n_draws: int = 1,
        n_components: int = 100,
        learning_rate: float = 1e-2,
        max_epochs: int = 2000,
        device: str = "auto",
        random_state: Any = None,
        progress: bool = False,
    ) -> None:
        self.hidden = hidden
        self.activation = activation
        self.prior_std = prior_std
        self.local_reparameterization = local_reparameterization
        self.n_draws = n_draws
        self.n_components = n_components
        self.learning_rate = learning_rate
        self.max_epochs = max_epochs
        self.device = device
        self.random_state = random_state
        self.progress = progress

    def fit(self, X: Any, y: Any) -> "BayesByBackpropRegressor":
        """Maximise the evidence lower bound over means, deviations, the last layer's prior and the noise."""
        if not self.prior_std > 0 or self.n_components < 1 or self.n_draws < 1:
            raise InputError(
                f"prior_std={self.prior_std}, n_components={self.n_components} and n_draws={self.n_draws} "
                "must all be positive"
            )
        data, self._seed = self._begin(X, y, None)
        generator = torch.Generator(data.X.device).manual_seed(self._seed)
        self.network_ = BayesianNetwork(
            data.X.shape[1],
            tuple(self.hidden),
            data.T.shape[1],
            activation=self.activation,
            prior_std=self.prior_std,
            local=self.local_reparameterization,
            generator=torch.Generator().manual_seed(self._seed),
        ).to(data.X.device)
        steps = torch.optim.Adam(self.network_.parameters(), lr=self.learning_rate)
        bound = []
        for _ in tqdm(range(self.max_epochs), disable=not self.progress, desc="BNN", unit="epoch", mininterval=0.5):
            steps.zero_grad()
            loss = self.network_.negative_elbo(data.X, data.T, n_draws=self.n_draws, generator=generator)
            loss.backward()
            steps.step()
            bound.append(loss.detach())
        self.network_.eval()
        self.history_ = {"negative_elbo": [float(x) for x in bound]}
        return self

    def predictive(self, X: Any, *, noise: bool = True) -> Prediction:
        """The mixture over weight samples. eq:BNN_predictive_distribution_approx"""
        draws = self.draw_functions(X)
        noise_var = np.square(self.noise_std_) * float(noise)
        # without noise a component is a point; a variance far below anything keeps its density defined
        floor = np.square(1e-6 * self._targets.scale.numpy()) * float(not noise)
        spread = np.square(draws - draws.mean(0)).mean(0) / np.square(self.noise_std_)
        return Prediction(
            component_mean=draws,
            component_epistemic_var=np.broadcast_to(floor, draws.shape).copy(),
            component_noise_var=np.broadcast_to(noise_var, draws.shape).copy(),
            affine_cost=spread.mean(1),
            weights=np.full(draws.shape[:2], 1 / len(draws)),
        )

    def draw_functions(self, X: Any) -> Float[ndarray, "c m q"]:
        """Outputs under `n_components` draws of all weights, the same draws at every call, in target units."""
        Z = self._checked(X)
        generator = torch.Generator(Z.device).manual_seed(self._seed + 1)
        with torch.no_grad():
            outputs: Tensor = self.network_(Z.expand(self.n_components, *Z.shape), generator)
        return self._unscaled(outputs)

    @property
    def noise_std_(self) -> Float[ndarray, " q"]:
        return self.network_.log_sigma_e.detach().exp().cpu().numpy() * self._targets.scale.numpy()

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "history_")
