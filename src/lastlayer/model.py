"""A fitted Bayesian last layer on a network: everything that can be asked of it, in target units."""

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from lastlayer.errors import InputError
from lastlayer.estimator import Shell, as_covariance_parts, chunks, columns
from lastlayer.extrapolation import AlphaCurve, cost_quantile, tune_alpha
from lastlayer.features import affine_features
from lastlayer.inputs import check_weight, check_Xy
from lastlayer.posterior import Posterior
from lastlayer.prediction import JointPrediction, Prediction
from lastlayer.statistics import Statistics
from lastlayer.types import NoiseStructure

Model = TypeVar("Model", bound="LastLayerModel")


@dataclass(frozen=True)
class Extrapolation:
    """How far points lie outside what the features were trained on."""

    affine_cost: Float[ndarray, " m"]
    """At alpha_star_: the variance of the function over that of the noise (Theorem 2)."""
    quantile: Float[ndarray, " m"]
    """Share of the training points that would cost less if they were new; 1: farther out than all of them."""


class LastLayerModel(Shell):
    """Features `network_`, their last layer `posterior_` and the alpha of the variance, however they came about."""

    noise: NoiseStructure
    network_: nn.Module
    posterior_: Posterior
    alpha_curve_: AlphaCurve
    _log_alpha: float
    _sample_cost: Tensor

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        """Mean of the targets, shaped like y in fit; with their standard deviation, or covariance over the points.

        The covariance is (m, m), or (m, m, q) for several outputs; noise included, as in the standard deviation.
        """
        if return_std and return_cov:
            raise InputError("return_std and return_cov together: ask for one of them, the diagonal is std squared")
        if return_cov:
            joint = self.joint(X)
            cov = joint.point_cov[:, :, None] * np.diagonal(joint.output_cov)
            return self._shaped(joint.mean), cov[..., 0] if self._y_ndim == 1 else cov
        return super().predict(X, return_std)

    def predictive(self, X: Any, *, noise: bool = True) -> Prediction:
        """The predictive distribution of the targets, or with `noise=False` of the function behind them."""
        Z = self._checked(X)
        parts = [self._marginals(Z[rows]) for rows in chunks(len(Z))]
        mean, ratio = (np.concatenate(x) for x in zip(*parts, strict=True))
        noise_var, correlation = as_covariance_parts(self._noise_cov())
        return Prediction.gaussian(
            mean,
            epistemic_var=ratio[:, None] * noise_var,
            noise_var=noise_var * float(noise),
            affine_cost=ratio,
            correlation=correlation if self.noise == "full" else None,
        )

    def joint(self, X: Any, *, noise: bool = True) -> JointPrediction:
        """The Gaussian over all points and outputs together; O(m^2) numbers."""
        joint = self.posterior_.joint(self._features(self._checked(X)), self._log_alpha)
        points = joint.ratio_cov.detach().cpu().numpy()
        return JointPrediction(
            self._unscaled(joint.mean), points + np.eye(len(points)) * float(noise), self._noise_cov()
        )

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0, *, noise: bool = True) -> ndarray:
        """Draws of whole functions, plus noise: (m, n_samples), or (m, q, n_samples) for 2-D targets.

        Each draw takes one set of weights, so it is joint over all points at O(p) a point.
        """
        Phi = self._features(self._checked(X))
        rng = check_random_state(random_state)
        generator = torch.Generator(Phi.device).manual_seed(int(rng.randint(2**31 - 1)))
        at_alpha = replace(self.posterior_, log_alpha=self._log_alpha)
        deviation = at_alpha.sample_weights(n_samples, generator=generator) - at_alpha.precision.weights
        with torch.no_grad():
            draws = self._unscaled(self.posterior_.mean(Phi) + Phi.to(deviation.dtype) @ deviation)
        if noise:
            draws = draws + rng.standard_normal(draws.shape) @ np.linalg.cholesky(self._noise_cov()).T
        draws = np.moveaxis(draws, 0, -1)
        return draws[:, 0] if self._y_ndim == 1 else draws

    def extrapolation(self, X: Any) -> Extrapolation:
        """The affine cost of points and its rank among the training points."""
        Z = self._checked(X)
        with torch.no_grad():
            cost = torch.cat([self.posterior_.variance_ratio(self._features(Z[rows])) for rows in chunks(len(Z))])
            return Extrapolation(cost.cpu().numpy(), cost_quantile(cost, self._sample_cost).cpu().numpy())

    @property
    def alpha_star_(self) -> float:
        return _exp(self.posterior_.log_alpha)

    @property
    def alpha_(self) -> float:
        return _exp(self._log_alpha)

    @property
    def noise_std_(self) -> Float[ndarray, " q"]:
        return np.sqrt(np.diagonal(self._noise_cov()))

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "posterior_")

    def tune_alpha(self: Model, X: Any, y: Any) -> Model:
        """Algorithm 1: choose the alpha of the variance by the LPD of validation data; the mean does not move."""
        Phi, T = self._features_and_targets(X, y)
        self.alpha_curve_ = tune_alpha(self.posterior_, Phi, T)
        self._log_alpha = self.alpha_curve_.log_alpha
        return self

    def update(self: Model, X: Any, y: Any, sample_weight: Any = None, *, forgetting: float = 1.0) -> Model:
        """Take in more rows in closed form: features, alpha and noise stay; old rows lose weight by `forgetting`."""
        Phi, T = self._features_and_targets(X, y)
        weight = check_weight(sample_weight, np.empty((len(T), 1)))
        statistics = Statistics.from_features(
            Phi, T, sample_weight=None if weight is None else torch.tensor(weight, device=Phi.device)
        )
        self.posterior_ = self.posterior_.update(statistics, forgetting=forgetting)
        return self

    def _features(self, Z: Tensor) -> Tensor:
        with torch.no_grad():
            return affine_features(check_features(self.network_(Z), Z)).double()

    def _features_and_targets(self, X: Any, y: Any) -> tuple[Tensor, Tensor]:
        check_is_fitted(self)
        X, y = check_Xy(self, X, y, reset=False, nd=self._inputs is None)
        T = columns(y)
        if T.shape[1] != len(self._targets.mean):
            raise InputError(f"y has {T.shape[1]} outputs, but the model was fitted to {len(self._targets.mean)}")
        return self._features(self._standardised(X)), self._targets.forward(T).to(self._device())

    def _marginals(self, Z: Tensor) -> tuple[ndarray, ndarray]:
        with torch.no_grad():
            Phi = self._features(Z)
            own = self._log_alpha == self.posterior_.log_alpha
            ratio = self.posterior_.variance_ratio(Phi, None if own else self._log_alpha)
            return self._unscaled(self.posterior_.mean(Phi)), ratio.cpu().numpy()

    def _noise_cov(self) -> Float[ndarray, "q q"]:
        scale = self._targets.scale.numpy()
        cov: ndarray = self.posterior_.Sigma_E.cpu().numpy() * np.outer(scale, scale)
        return cov


def check_features(phi_tilde: Any, Z: Tensor) -> Tensor:
    if not isinstance(phi_tilde, Tensor) or phi_tilde.dim() != 2 or len(phi_tilde) != len(Z):
        shape = tuple(phi_tilde.shape) if isinstance(phi_tilde, Tensor) else type(phi_tilde).__name__
        raise InputError(
            f"the backbone turned a batch of shape {tuple(Z.shape)} into {shape}: it must return features of shape "
            f"({len(Z)}, k), one row a sample; flatten or pool the other dimensions"
        )
    return phi_tilde


def _exp(x: float | Tensor) -> float:
    return math.exp(min(float(x), 700.0)) if float(x) < math.inf else math.inf
