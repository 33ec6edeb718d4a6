"""Base classes of the estimators: validation, scaling, prediction and revision of fitted models."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from lastlayer.calibration.alpha import AlphaCurve
from lastlayer.calibration.curve import Calibration
from lastlayer.data.observe import Functionals, Observations, Pointwise, check_observations, functionals_at
from lastlayer.data.rows import Points
from lastlayer.data.validation import check_weight, check_X, check_Xy, random_numbers
from lastlayer.errors import InputError
from lastlayer.estimators.stage import FeatureStage, StagedPredictor
from lastlayer.networks.mlp import copied
from lastlayer.predictions.joint import FunctionalPrediction, JointPrediction
from lastlayer.predictions.prediction import Prediction, like_targets
from lastlayer.predictor import revisions
from lastlayer.predictor.fitted import Extrapolation, Fitted
from lastlayer.predictor.member import Member
from lastlayer.predictor.module import Predictor
from lastlayer.settings.types import Settings

Self = TypeVar("Self", bound="LastLayerRegressor")
Function = TypeVar("Function", bound=Callable[..., Any])


def with_gradients(made: Function) -> Function:
    """Run a function with gradients enabled, also under `torch.no_grad()` and `torch.inference_mode()`."""
    run: Function = torch.inference_mode(False)(torch.enable_grad()(made))
    return run


class BaseRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Base of all estimators; subclasses have a `random_state` and implement `fit` and `predictive`."""

    n_features_in_: int
    feature_names_in_: ndarray
    random_state: Any

    def predictive(self, X: Any, *, noise: bool = True) -> Prediction:
        raise NotImplementedError

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predict the mean of the targets, and their standard deviation on request."""
        p = self.predictive(X)
        return (p.point, p.std) if return_std else p.point


class LastLayerRegressor(BaseRegressor):
    """Base of regressors with Bayesian last layers: `fit` sets `fitted_`, methods such as `update` replace it."""

    fitted_: Fitted
    alpha_curve_: AlphaCurve
    _stage: FeatureStage | None = None
    """The network of a model whose `fitted_` takes features, see `attach`."""

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        """Predict the targets: their mean, or with `likelihood="lognormal"` their median, shaped like y in `fit`.

        The mean of a log-normal, `predictive(X).mean`, is governed by rare huge values, and astronomical far outside
        the data. Standard deviations and covariances include the noise.

        Parameters
        ----------
        X : array-like of shape (m, d)
            Inputs.
        return_std, return_cov : bool, default False
            Whether to return (point, std), or (point, cov) with the covariance between the points, a matrix per output.
        """
        if return_std and return_cov:
            raise InputError("return_std and return_cov are both set: set one; the diagonal of the covariance is std^2")
        if return_cov:
            if self._stage is not None:
                raise InputError("return_cov needs one row per sample: use joint(X), whose rows are the positions")
            joint = self.joint(X)
            return joint.mean, joint.cov_of_outputs()
        if self._stage is None:
            fitted, X = self._checked(X)
            shaped = partial(like_targets, y_ndim=fitted.y_ndim)
        else:
            fitted, (X, where) = self._fitted(), self._stage.rows(X)
            shaped = partial(self._stage.shaped, where=where, y_ndim=fitted.y_ndim)
        if not return_std:
            return shaped(fitted.point(X))
        point, std = fitted.point_and_std(X)
        return shaped(point), shaped(std)

    def predictive(self, X: Any, *, noise: bool = True) -> Prediction:
        """Compute the predictive distribution at the rows of X.

        Parameters
        ----------
        X : array-like of shape (m, d)
            Inputs.
        noise : bool, default True
            Whether to include the noise; False: the distribution of the function.
        """
        fitted, X = self._checked(X)
        return fitted.predictive(X, noise=noise)

    def joint(self, X: Any, *, noise: bool = True) -> JointPrediction:
        """Compute the joint Gaussian over all points and outputs; O(m^2) numbers per member.

        Parameters
        ----------
        X : array-like of shape (m, d)
            Inputs.
        noise : bool, default True
            Whether to include the noise; False: the distribution of the function.
        """
        fitted, X = self._checked(X)
        return fitted.joint(X, noise=noise)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0, *, noise: bool = True) -> ndarray:
        """Draw whole functions from `joint`; a draw takes one set of weights per member, so it costs O(p) per point.

        Parameters
        ----------
        X : array-like of shape (m, d)
            Inputs.
        n_samples : int, default 1
            Number of draws.
        random_state : int, RandomState or None, default 0
            Seed of the draws.
        noise : bool, default True
            Whether to add noise, independent between points; False: draws of the function.
        """
        fitted, X = self._checked(X)
        draws = fitted.sample(X, n_samples, random_numbers(random_state), noise=noise)
        return np.moveaxis(like_targets(draws, fitted.y_ndim), 0, -1)

    def predictive_of(self, functional: Pointwise | Functionals, X: Any = None) -> FunctionalPrediction:
        """Predict linear functionals of the function, such as derivatives, without noise.

        Parameters
        ----------
        functional : Pointwise or Functionals
            A functional of `lastlayer.observe`, such as `Derivative(0)`.
        X : array-like of shape (m, d), default None
            Points at which to evaluate a pointwise functional; None if the functional has its points.
        """
        return self._fitted().predictive_of([functionals_at(functional, X)])

    def joint_of(self, functionals: Sequence[Functionals]) -> FunctionalPrediction:
        """Predict linear functionals of several kinds jointly, such as values and derivatives, without noise.

        Parameters
        ----------
        functionals : sequence of Functionals
            The functionals, each with its points.
        """
        return self._fitted().predictive_of(functionals)

    @with_gradients
    def update_observations(self: Self, observations: Sequence[Observations]) -> Self:
        """Add measurements of functionals in closed form, keeping features, alpha and noise.

        Parameters
        ----------
        observations : sequence of Observations
            The measurements (see `lastlayer.observe`).
        """
        self.fitted_ = revisions.with_observations(self._fitted(), check_observations(observations))
        return self

    def extrapolation(self, X: Any) -> Extrapolation:
        """Measure how far points lie outside the training data.

        Parameters
        ----------
        X : array-like of shape (m, d)
            Inputs.
        """
        fitted, X = self._checked(X)
        return fitted.extrapolation(X)

    def features(self, X: Any) -> Float[ndarray, "n k"]:
        """Compute the features of the first member, one row per row of `predictive`.

        Parameters
        ----------
        X : array-like of shape (m, d)
            Inputs.
        """
        fitted, X = self._checked(X)
        phi: ndarray = fitted.features(0, fitted.standardized(X))[:, :-1].numpy(force=True)
        return phi

    def module(self) -> Predictor | StagedPredictor:
        """Convert the fitted model to a `torch.nn.Module` that is differentiable in its inputs.

        It maps a batch in original units to a dictionary of tensors with the quantities of `predictive`: mean, var,
        epistemic_var, noise_var, affine_cost. After `attach`, it is called as the network is, and includes the network.
        """
        predictor = self._fitted().module()
        return predictor if self._stage is None else StagedPredictor(copied(self._stage.network), predictor)

    @property
    def members_(self) -> tuple[Member, ...]:
        return self._fitted().members

    @property
    def settings_(self) -> Settings:
        return self._fitted().settings

    @property
    def calibration_(self) -> Calibration | None:
        return self._fitted().calibration

    @property
    def nlml_(self) -> float:
        return float(np.mean([member.posterior.nlml for member in self._fitted().best]))

    @property
    def alpha_star_(self) -> float:
        return _geometric_mean([member.log_alpha_star for member in self._fitted().best])

    @property
    def alpha_(self) -> float:
        return _geometric_mean([member.log_alpha for member in self._fitted().best])

    @property
    def noise_std_(self) -> Float[ndarray, " q"]:
        fitted = self._fitted()
        std: ndarray = fitted.noise_std[: len(fitted.best)].mean(0)
        return std

    def __sklearn_is_fitted__(self) -> bool:
        return "fitted_" in vars(self)

    def at_alpha(self: Self, log_alpha: float) -> Self:
        """Return a view of the model with another alpha for the variance; the mean is unchanged.

        All members are shifted by the same log alpha. Conformal scores do not hold for the view and are dropped.

        Parameters
        ----------
        log_alpha : float
            The logarithm of the new `alpha_`.
        """
        return self.with_fitted(revisions.at_alpha(self._fitted(), log_alpha))

    @with_gradients
    def tune_alpha(self: Self, X: Any, y: Any) -> Self:
        """Choose the alpha of the variance by the LPD of validation data (Algorithm 1); the mean is unchanged.

        All members are shifted by the same log alpha. A calibration curve stays in use and maps the new affine costs.

        Parameters
        ----------
        X, y : array-like of shape (m, d), array-like of shape (m,) or (m, q)
            Inputs and targets of the validation rows.
        """
        self.fitted_, self.alpha_curve_ = revisions.tune_alpha(self._fitted(), self._rows(X, y))
        return self

    @with_gradients
    def calibrate(self: Self, X: Any, y: Any) -> Self:
        """Fit the curve from affine cost to variance to rows that the model was not trained on.

        For a mixture, the tails and the shrinkage towards the target mean are fitted as well. The curve maps affine
        costs at alpha*: an alpha chosen by `tune_alpha` is discarded.

        Parameters
        ----------
        X, y : array-like of shape (m, d), array-like of shape (m,) or (m, q)
            Inputs and targets of the held-out rows.
        """
        fitted = self._fitted()
        self.fitted_ = revisions.calibrate(fitted, revisions.held_out_points(fitted, self._rows(X, y)))
        return self

    def conformalize(self: Self, X: Any, y: Any) -> Self:
        """Compute conformal scores for `interval(level, method="conformal")` from new rows.

        The coverage guarantee holds for rows exchangeable with these, provided that they were not used in any other
        way. Any later change to the model discards the scores.

        Parameters
        ----------
        X, y : array-like of shape (m, d), array-like of shape (m,) or (m, q)
            Inputs and targets of the new rows.
        """
        self.fitted_ = revisions.conformalize(self._fitted(), *self._checked_rows(X, y)[:2])
        return self

    @with_gradients
    def update(self: Self, X: Any, y: Any, sample_weight: Any = None, *, forgetting: float = 1.0) -> Self:
        """Add rows in closed form, keeping features, alpha and noise.

        If the rows' residuals exceed what the calibration predicts by more than three standard errors, the curves are
        widened. For a stream of single rows, `lastlayer.online.OnlineModel` is much faster.

        Parameters
        ----------
        X, y : array-like of shape (m, d), array-like of shape (m,) or (m, q)
            Inputs, and targets, NaN where missing.
        sample_weight : array-like of shape (m,), default None
            Weight of each row.
        forgetting : float, default 1.0
            Factor by which old rows, but not the prior, are down-weighted first.
        """
        if not 0 < forgetting <= 1:
            raise InputError(f"forgetting={forgetting} must be above 0 and at most 1: the weight that old rows keep")
        rows = self._rows(X, y, sample_weight)
        self.fitted_ = revisions.with_rows(self._fitted(), rows, forgetting=forgetting)
        return self

    @with_gradients
    def remove(self: Self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Remove rows that `fit` or `update` added; features, alpha and noise are unchanged.

        Parameters
        ----------
        X, y : array-like of shape (m, d), array-like of shape (m,) or (m, q)
            Inputs and targets.
        sample_weight : array-like of shape (m,), default None
            The weight that each row has now.
        """
        rows = self._rows(X, y, sample_weight)
        self.fitted_ = revisions.without_rows(self._fitted(), rows)
        return self

    @with_gradients
    def reestimate(self: Self) -> Self:
        """Re-estimate alpha and noise from the current rows by maximising the evidence; the features are unchanged.

        The calibration curve is kept, in units of the new noise. A tuned alpha keeps its distance from alpha*.
        """
        self.fitted_ = revisions.reestimate(self._fitted())
        return self

    def with_fitted(self: Self, fitted: Fitted) -> Self:
        """Return a model with the same parameters and another fitted value."""
        view = object.__new__(type(self))
        vars(view).update(vars(self))
        view.fitted_ = fitted
        return view

    def _fitted(self) -> Fitted:
        check_is_fitted(self, "fitted_")
        return self.fitted_

    def _checked(self, X: Any) -> tuple[Fitted, ndarray]:
        check_is_fitted(self, "fitted_")
        fitted = self.fitted_
        if self._stage is not None:
            return fitted, self._stage.rows(X)[0]
        X = check_X(self, X, reset=False, nd=fitted.inputs is None, ids=fitted.settings.network.ids)
        fitted.check_reach(X)
        return fitted, X

    def _checked_rows(
        self, X: Any, y: Any, sample_weight: Any = None, *, partly: bool = False
    ) -> tuple[ndarray, ndarray, ndarray | None]:
        """Inputs, targets and weights as arrays of the fitted table."""
        fitted = self._fitted()
        if self._stage is not None:
            X, y, weight = self._stage.checked_rows(X, y, sample_weight)
        else:
            ids = fitted.settings.network.ids
            X, y = check_Xy(self, X, y, reset=False, nd=fitted.inputs is None, partly=partly, ids=ids)
            weight = None if sample_weight is None else check_weight(sample_weight, len(y))
        q = y.shape[1] if y.ndim > 1 else 1
        if q != fitted.n_outputs:
            raise InputError(f"y has {q} outputs, but the model was fitted to {fitted.n_outputs}")
        fitted.check_reach(X, y.reshape(len(y), -1))
        return X, y, weight

    def _rows(self, X: Any, y: Any, sample_weight: Any = None) -> Points:
        return self._fitted().data(*self._checked_rows(X, y, sample_weight, partly=True))


def _geometric_mean(logs: Sequence[float]) -> float:
    mean = float(np.mean(logs))
    return math.exp(min(mean, 700.0)) if mean < math.inf else math.inf
