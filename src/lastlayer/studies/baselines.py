"""Baselines for comparison with a Bayesian last layer: estimators that return a `Prediction`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from sklearn.utils.validation import check_is_fitted
from torch import Generator, Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import softplus

from lastlayer._internal.work import progress_bar
from lastlayer.data.rows import Rows
from lastlayer.data.scaling import Scales
from lastlayer.data.validation import check_X, seed_of, validated
from lastlayer.errors import InputError
from lastlayer.estimators.base import BaseRegressor, with_gradients
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.likelihoods.base import Gaussian
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.settings.types import NoiseModel, TrainingOptions

INITIAL_STD = 0.003
"""Initial standard deviation of the weights: with 0.05, the study's network ended at a bound 0.33 nats lower."""
LEARNING_RATE = 0.01
KL_WARMUP = 0.5
"""Share of the epochs over which the weight of the divergence grows to 1; else most units collapse to their prior."""


class BLRRegressor(BLLRegressor):
    """Bayesian linear regression on the features of a network trained on the mean squared error.

    Parameters
    ----------
    hidden, activation, input_skip, backbone, noise, max_epochs, training, device, dtype, random_state, progress : Any
        As in `BLLRegressor`; the `objective` of `training` is ignored.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (50, 50),
        *,
        activation: str = "tanh",
        input_skip: bool | str = "auto",
        backbone: nn.Module | Callable[[], nn.Module] | None = None,
        noise: NoiseModel = "diagonal",
        max_epochs: int | str = "auto",
        training: TrainingOptions | None = None,
        device: str = "auto",
        dtype: str = "float64",
        random_state: Any = None,
        progress: bool = False,
    ) -> None:
        super().__init__(hidden, activation=activation, input_skip=input_skip, backbone=backbone, preset="evidence")
        self.noise, self.max_epochs, self.training, self.device = noise, max_epochs, training, device
        self.dtype, self.random_state, self.progress = dtype, random_state, progress

    def _parameters(self) -> dict[str, Any]:
        options = TrainingOptions() if self.training is None else self.training
        if isinstance(options, TrainingOptions):
            options = replace(options, objective="mse")
        return super()._parameters() | {"training": options}

    def fit_source(self, source: Any, validation_data: Any = None) -> "BLRRegressor":
        raise InputError(
            "BLRRegressor trains on the squared error of all rows at once: call fit(X, y), or use "
            "BLLRegressor().fit_source(source)"
        )


class BayesByBackpropRegressor(BaseRegressor):
    """Bayesian neural network with mean-field Gaussian weights, trained on the evidence lower bound.

    Parameters
    ----------
    hidden, prior_std : sequence of int, float
        Widths of the hidden layers, and the deviation of their weights' prior; that of the last layer is learned.
    n_components, max_epochs : int
        Draws of the weights, which are the components of a prediction, and steps of full-batch Adam.
    device, random_state, progress : object
        As in `BLLRegressor`.

    Attributes
    ----------
    network_, noise_std_, history_ : BayesianNetwork, ndarray of shape (q,), dict
        The network, the noise in target units, and under "negative_elbo" minus the bound of each epoch.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (20, 20),
        *,
        prior_std: float = 0.5,
        n_components: int = 100,
        max_epochs: int = 2000,
        device: str = "auto",
        random_state: Any = None,
        progress: bool = False,
    ) -> None:
        self.hidden, self.prior_std, self.n_components, self.max_epochs = hidden, prior_std, n_components, max_epochs
        self.device, self.random_state, self.progress = device, random_state, progress

    @with_gradients
    def fit(self, X: Any, y: Any) -> "BayesByBackpropRegressor":
        """Maximise the evidence lower bound over weight means and deviations, the last layer's prior and the noise."""
        if not self.prior_std > 0 or self.n_components < 1:
            raise InputError(f"prior_std={self.prior_std} and n_components={self.n_components} must be positive")
        self._fit_seed, given = seed_of(self.random_state), validated(self, X, y)
        self._scales, self._y_ndim = Scales.of(given, Gaussian().read(given)), given.y_ndim
        rows = Rows.of(given, Gaussian(), self._scales)
        device = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        data = rows.main.to(torch.device(device), torch.float64)
        generator = Generator(data.X.device).manual_seed(self._fit_seed)
        (d, q), start = (data.X.shape[1], data.T.shape[1]), Generator().manual_seed(self._fit_seed)
        network = BayesianNetwork(d, self.hidden, q, prior_std=self.prior_std, generator=start)
        self.network_ = network.to(data.X.device)
        steps = torch.optim.Adam(self.network_.parameters(), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(steps, self.max_epochs)
        warmup, bound = KL_WARMUP * self.max_epochs, []
        for epoch in progress_bar(range(self.max_epochs), disable=not self.progress, desc="BNN", unit="epoch"):
            steps.zero_grad()
            misfit, kl = self.network_.bound_terms(data.X, data.T, generator=generator)
            (misfit + (epoch / warmup if epoch < warmup else 1.0) * kl).backward()
            steps.step()
            schedule.step()
            bound.append((misfit + kl).detach())
        self.network_.eval()
        self.history_ = {"negative_elbo": [float(x) for x in bound]}
        return self

    def predictive(self, X: Any, *, noise: bool = True) -> MixturePrediction:
        """Compute the mixture over draws of the weights. eq:BNN_predictive_distribution_approx."""
        draws = self.draw_functions(X)
        noise_var = np.square(self.noise_std_) * float(noise)
        # without noise a component is a point; a negligible variance keeps its density defined
        floor = np.square(1e-6 * self._scales.targets.scale.numpy()) * float(not noise)
        spread = np.square(draws - draws.mean(0)).mean(0) / np.square(self.noise_std_)
        epistemic_var, noise_var = (np.broadcast_to(var, draws.shape).copy() for var in (floor, noise_var))
        weights = np.full(draws.shape[:2], 1 / len(draws))
        return MixturePrediction(draws, epistemic_var, noise_var, spread.mean(1), weights, y_ndim=self._y_ndim)

    def draw_functions(self, X: Any) -> Float[ndarray, "c m q"]:
        """Evaluate `n_components` draws of all weights; the draws are the same at every call."""
        check_is_fitted(self)
        X = check_X(self, X, reset=False, nd=False)
        inputs = self._scales.inputs
        assert inputs is not None
        inputs.check_reach(X, "X")
        Z = inputs.forward(torch.tensor(X.copy())).to(self.network_.log_sigma_e)
        generator = Generator(Z.device).manual_seed(self._fit_seed + 1)
        with torch.no_grad():
            outputs: Tensor = self.network_(Z.expand(self.n_components, *Z.shape), generator)
        return outputs.cpu().numpy() * self._scales.targets.scale.numpy() + self._scales.targets.mean.numpy()

    @property
    def noise_std_(self) -> Float[ndarray, " q"]:
        return self.network_.log_sigma_e.detach().exp().cpu().numpy() * self._scales.targets.scale.numpy()

    def __sklearn_is_fitted__(self) -> bool:
        return "history_" in vars(self)


class VariationalLinear(nn.Module):
    """x -> [x, 1] W with independent W ~ N(mean, std^2), and a prior N(0, prior_std^2) on every entry.

    In training, outputs are drawn instead of weights, one draw per sample, which reduces the variance of gradients.
    """

    def __init__(
        self, n_inputs: int, n_outputs: int, *, prior_std: float | nn.Parameter, generator: Generator | None = None
    ) -> None:
        super().__init__()
        mean = torch.zeros(n_inputs + 1, n_outputs, dtype=torch.float64)
        nn.init.xavier_uniform_(mean[:-1], generator=generator)
        self.mean = nn.Parameter(mean)
        self.rho = nn.Parameter(torch.full_like(mean, math.log(math.expm1(INITIAL_STD))))
        self.log_prior_std = prior_std if isinstance(prior_std, nn.Parameter) else math.log(prior_std)

    @property
    def std(self) -> Float[Tensor, "p q"]:
        return softplus(self.rho)

    def kl(self) -> Float[Tensor, ""]:
        """Compute KL(q || prior) in closed form. eq:KLD_surrogate_posterior."""
        prior_std = torch.as_tensor(self.log_prior_std, dtype=self.mean.dtype, device=self.mean.device).exp()
        return kl_divergence(Normal(self.mean, self.std), Normal(torch.zeros_like(self.mean), prior_std)).sum()

    def forward(self, x: Float[Tensor, "*s m d"], generator: Generator | None = None) -> Float[Tensor, "*s m q"]:
        """Apply one draw of the weights; with leading dimensions of x, an independent draw for each of them."""
        x = torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)
        if self.training:
            loc, scale = x @ self.mean, (x.square() @ self.std.square()).sqrt()
            return loc + scale * _noise(scale.shape, loc, generator)
        shape = (*x.shape[:-2], *self.mean.shape)
        return x @ (self.mean + self.std * _noise(shape, self.mean, generator))


class BayesianNetwork(nn.Module):
    """A fully connected network of variational layers, with batch normalisation after each hidden layer."""

    def __init__(
        self, n_inputs: int, hidden: Sequence[int], n_outputs: int, *, prior_std: float, generator: Generator
    ) -> None:
        super().__init__()
        layer = partial(VariationalLinear, generator=generator)
        self.log_last_prior_std = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.log_sigma_e = nn.Parameter(torch.full((n_outputs,), -1.0, dtype=torch.float64))
        widths = [n_inputs, *hidden]
        self.hidden = nn.ModuleList(layer(a, b, prior_std=prior_std) for a, b in zip(widths, hidden, strict=False))
        self.norms = nn.ModuleList(nn.BatchNorm1d(b, dtype=torch.float64) for b in hidden)
        self.last = layer(widths[-1], n_outputs, prior_std=self.log_last_prior_std)

    def forward(self, x: Float[Tensor, "*s m d"], generator: Generator | None = None) -> Float[Tensor, "*s m q"]:
        """Compute the outputs of one draw of all weights, or of one draw per leading index."""
        for layer, norm in zip(self.hidden, self.norms, strict=True):
            h = layer(x, generator).tanh()
            x = norm(h.flatten(0, -2)).view(h.shape)
        return self.last(x, generator)

    def kl(self) -> Float[Tensor, ""]:
        return torch.stack([layer.kl() for layer in self.modules() if isinstance(layer, VariationalLinear)]).sum()

    def bound_terms(
        self, x: Float[Tensor, "m d"], T: Float[Tensor, "m q"], *, n_draws: int = 1, generator: Generator | None = None
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Compute the two terms of the negative evidence lower bound, per sample."""
        y = self(x.expand(n_draws, *x.shape), generator)
        misfit = -Normal(y, self.log_sigma_e.exp()).log_prob(T).sum() / n_draws
        return misfit / len(T), self.kl() / len(T)


def _noise(shape: tuple[int, ...] | torch.Size, like: Tensor, generator: Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
