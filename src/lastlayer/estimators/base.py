"""What estimators share: validation, scaling, shapes; and everything that can be asked of fitted last layers."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from lastlayer.ensemble import copies
from lastlayer.errors import InputError
from lastlayer.extrapolation import AlphaCurve
from lastlayer.inputs import LARGEST_TARGET, check_noise_std, check_weight, check_X, check_Xy
from lastlayer.networks.mlp import copied
from lastlayer.networks.structured import converted
from lastlayer.observe import Functionals, Observations, Pointwise, check_observations, functionals_at
from lastlayer.prediction import FunctionalPrediction, JointPrediction, Prediction
from lastlayer.predictor import revisions
from lastlayer.predictor.fitted import Extrapolation, Fitted, geometric_mean
from lastlayer.predictor.module import Predictor
from lastlayer.scaling import Standardizer
from lastlayer.shapes import like_targets
from lastlayer.training.data import Data

Self = TypeVar("Self", bound="LastLayerRegressor")
Value = TypeVar("Value")
Parameters = ParamSpec("Parameters")


def with_gradients(made: Callable[Parameters, Value]) -> Callable[Parameters, Value]:
    """What makes or changes a model works the same under `torch.no_grad()` and `torch.inference_mode()`."""

    @wraps(made)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Value:
        with torch.inference_mode(False), torch.enable_grad():
            return made(*args, **kwargs)

    return call


class BaseRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Base of the estimators; a subclass has `random_state`, and says how to fit and predict."""

    n_features_in_: int
    feature_names_in_: ndarray
    random_state: Any
    _y_ndim: int

    def predictive(self, X: Any, *, noise: bool = True) -> Prediction:
        """The predictive distribution of the targets, or with `noise=False` of the function behind them."""
        raise NotImplementedError

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Mean of the targets, shaped like y in fit, and with `return_std` their standard deviation, noise included."""
        p = self.predictive(X)
        return (p.mean, p.std) if return_std else p.mean

    def _seed(self) -> int:
        return int(random_numbers(self.random_state).randint(2**31 - 1))

    def _validate_and_scale(
        self, X: Any, y: Any, sample_weight: Any, *, nd: bool = False, partly: bool = False, noise_std: Any = None
    ) -> "ScaledData":
        """Checked training data, and the scalers that belong to them; `partly`: some targets may be missing."""
        X, y = check_Xy(self, X, y, reset=True, nd=nd, partly=partly, ids=nd)
        if len(X) < 2:
            raise InputError(f"fit needs at least 2 samples, and n_samples = {len(X)} was given")
        weight = check_weight(sample_weight, X)
        self._y_ndim = y.ndim
        known = None if noise_std is None else torch.tensor(check_noise_std(noise_std, y.reshape(len(y), -1)))
        data = ScaledData(
            torch.tensor(X),
            torch.tensor(y).double().reshape(len(y), -1),
            None if weight is None else torch.tensor(weight),
            known,
        )
        data.check()
        return data


def random_numbers(random_state: Any) -> np.random.RandomState:
    """scikit-learn's `check_random_state`, but None is a fresh seed: NumPy's global state is neither read nor moved."""
    return check_random_state(int(np.random.default_rng().integers(2**32)) if random_state is None else random_state)


class ScaledData:
    """Training rows in original units, and standardised ones made of them."""

    def __init__(
        self, X: Tensor, y: Float[Tensor, "m q"], weight: Tensor | None, noise_std: Float[Tensor, "m q"] | None = None
    ) -> None:
        self.X, self.y, self.weight, self.noise_std = X, y, weight, noise_std
        self.place = np.arange(len(X))
        """Of every given row among these; -1: it has no weight."""
        is_table = X.dim() == 2 and X.is_floating_point()
        self.inputs = Standardizer.fit(X, sample_weight=weight) if is_table else None
        self.targets = Standardizer.fit(y, sample_weight=weight)

    def check(self) -> None:
        """An error for numbers whose standardised values, or variances in original units, float64 does not have."""
        if self.inputs is not None:
            self.inputs.check_reach(self.X.numpy(), "X")
        self.targets.check_reach(self.y.numpy(), "y")
        if bool((self.targets.scale < 1 / LARGEST_TARGET).any()):
            raise InputError(
                f"the targets differ by about {float(self.targets.scale.min()):g}, less than {1 / LARGEST_TARGET:g}: "
                "give y in another unit"
            )

    def merged(self) -> "ScaledData":
        """Each row once, with the weight of its copies."""
        weight = None if self.weight is None else self.weight.numpy()
        kept, place, weight = copies.distinct(self.X.numpy(), self.y.numpy(), weight)
        if len(kept) < 2:
            return self
        merged = ScaledData(self.X[kept], self.y[kept], None if weight is None else torch.tensor(weight))
        merged.place = place
        return merged

    def logged(self) -> "ScaledData":
        """With the logarithm of the targets."""
        return ScaledData(self.X, self.y.log(), self.weight, self.noise_std)

    def copies(self) -> Int[ndarray, " m"]:
        """The number of each row's group, of those that are nearly equal."""
        assert self.inputs is not None
        return copies.near_groups(
            self.inputs.forward(self.X).double().numpy(), self.targets.forward(self.y).double().numpy()
        )

    @property
    def known_share(self) -> float:
        """Of the targets."""
        return float((~self.y.isnan()).double().mean())

    @property
    def alike(self) -> bool:
        """Whether all targets are known, and none of their noise is."""
        return self.noise_std is None and not bool(self.y.isnan().any())

    def to(self, device: torch.device, dtype: torch.dtype, observations: Sequence[Observations] = ()) -> Data:
        """Rows and functionals as training takes them."""
        Z = self.X if self.inputs is None else self.inputs.forward(self.X)
        weight = None if self.weight is None else self.weight.to(device)
        T, noise_var = self.targets.forward(self.y).to(device), None
        if self.noise_std is not None:
            noise_var = (self.noise_std / self.targets.scale).square().to(device)
        seen = tuple(one.standardized(self._inputs(), self.targets) for one in observations)
        return Data.partly(converted(Z, dtype, device), T, weight, noise_var, observations=seen)

    def _inputs(self) -> Standardizer:
        if self.inputs is None:
            raise InputError("observations need a table: these inputs are integers, or have more than two dimensions")
        return self.inputs


class FromFitted(Generic[Value]):
    """An attribute of a regressor that is read from its fitted value."""

    def __init__(self, read: Callable[[Fitted], Value]) -> None:
        self.read = read

    def __get__(self, model: "LastLayerRegressor | None", owner: type) -> Value:
        if model is None:
            raise AttributeError("an attribute of fitted models")
        check_is_fitted(model)
        return self.read(model.fitted_)

    def __set__(self, model: object, value: object) -> None:
        raise AttributeError("what fitting found is read-only: revise the model, or hold another value by with_fitted")


class LastLayerRegressor(BaseRegressor):
    """A regressor whose `fit` sets `fitted_`; revisions such as `update` put a new value in its place."""

    fitted_: Fitted
    alpha_curve_: AlphaCurve

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        """Mean of the targets, shaped like y in fit; with their standard deviation, or covariance over the points.

        The covariance is (m, m), or (m, m, q) for several outputs; noise included, as in the standard deviation.
        """
        if return_std and return_cov:
            raise InputError("return_std and return_cov together: ask for one of them, the diagonal is std squared")
        if return_cov:
            joint = self.joint(X)
            return joint.mean, joint.cov_of_outputs()
        fitted, X = self._fitted(), self._checked(X)
        if not return_std:
            return like_targets(fitted.mean(X), fitted.y_ndim)
        mean, var = fitted.mean_and_var(X)
        return like_targets(mean, fitted.y_ndim), like_targets(np.sqrt(var), fitted.y_ndim)

    def predictive(self, X: Any, *, noise: bool = True) -> Prediction:
        """The predictive distribution of the targets, or with `noise=False` of the function behind them.

        Its results are shaped like y in fit: (m,) for 1-D targets, (m, q) for 2-D ones.
        """
        return self._fitted().predictive(self._checked(X), noise=noise)

    def joint(self, X: Any, *, noise: bool = True) -> JointPrediction:
        """The Gaussian over all points and outputs together; O(m^2) numbers per member."""
        return self._fitted().joint(self._checked(X), noise=noise)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0, *, noise: bool = True) -> ndarray:
        """Draws of whole functions, plus noise: (m, n_samples), or (m, q, n_samples) for 2-D targets.

        They are draws of `joint`: each takes one set of weights per member, so it costs O(p) per point.
        """
        fitted, rng = self._fitted(), random_numbers(random_state)
        draws = fitted.sample(self._checked(X), n_samples, rng, noise=noise)
        return np.moveaxis(like_targets(draws, fitted.y_ndim), 0, -1)

    def predictive_of(self, functional: Pointwise | Functionals, X: Any = None) -> FunctionalPrediction:
        """What the model says of linear functionals of the function (see `lastlayer.observe`), without noise.

        `model.predictive_of(Derivative(0), X)` are the derivatives by the first input at the rows of X.
        """
        return self._fitted().predictive_of([functionals_at(functional, X)])

    def joint_of(self, functionals: Sequence[Functionals]) -> FunctionalPrediction:
        """The same of several kinds together: values and derivatives, say, in the order in which they are given."""
        return self._fitted().predictive_of(functionals)

    @with_gradients
    def update_observations(self: Self, observations: Sequence[Observations]) -> Self:
        """Add measurements of functionals in closed form; features, alpha and noise stay."""
        self.fitted_ = revisions.with_observations(self._fitted(), check_observations(observations))
        return self

    def extrapolation(self, X: Any) -> Extrapolation:
        """The affine cost of points and its rank among the training points."""
        return self._fitted().extrapolation(self._checked(X))

    def module(self) -> Predictor:
        """The fitted model as a `torch.nn.Module`, differentiable in its inputs; ONNX and torch.export start here.

        It maps a batch, original units, to a dictionary of tensors that `predictive` has as arrays: mean, var,
        epistemic_var, noise_var, affine_cost. It is a copy on the model's device; `.to(...)` moves it.
        """
        return self._fitted().module()

    members_ = FromFitted(lambda fitted: fitted.members)
    """The networks with their last layers, in standardised units."""
    settings_ = FromFitted(lambda fitted: fitted.settings)
    """What every "auto" became."""
    network_ = FromFitted(lambda fitted: copied(fitted.members[0].network))
    """Features of the first member: a copy, so that nothing done to it reaches the model."""
    posterior_ = FromFitted(lambda fitted: fitted.members[0].layer.posterior)
    """Last layer of the first member, in standardised units."""
    calibration_ = FromFitted(lambda fitted: fitted.calibration)
    """The curves from affine cost to variance; None: as the evidence has it."""
    conformal_scores_ = FromFitted(lambda fitted: fitted.conformal_scores)
    """What `conformalize` keeps."""
    family_ = FromFitted(lambda fitted: fitted.members[0].family)
    """The kind of features and the prior of the members that do best alone, if there are several families."""
    family_scores_ = FromFitted(lambda fitted: fitted.family_scores)
    """Held-out LPD of each family that was tried."""
    nlml_ = FromFitted(lambda fitted: float(np.mean([member.layer.nlml for member in fitted.best])))
    """Negative log marginal likelihood per sample, standardised targets; the mean over the best members."""
    alpha_star_ = FromFitted(lambda fitted: geometric_mean(fitted.stars[: len(fitted.best)]))
    """Signal-to-noise ratio that maximises the evidence; the geometric mean over the best members."""
    alpha_ = FromFitted(lambda fitted: geometric_mean(fitted.log_alphas[: len(fitted.best)]))
    """The same for the one in use for the variance."""
    log_alphas_ = FromFitted(lambda fitted: list(fitted.log_alphas))
    """log of the alpha that each member's variance uses."""
    noise_std_ = FromFitted(lambda fitted: fitted.noise_std[: len(fitted.best)].mean(0))
    """Standard deviation of the noise before calibration, target units; the mean over the best members."""
    curve_ = FromFitted(lambda fitted: fitted.curve(0))
    """From affine cost to variance, of the first member; without calibration, the posterior as it stands."""

    def __sklearn_is_fitted__(self) -> bool:
        return "fitted_" in vars(self)

    def at_alpha(self: Self, log_alpha: float) -> Self:
        """A view of the model with another alpha for the variance; members shift together, the mean does not move.

        `log_alpha` means what `alpha_` does. Conformal scores no longer hold, and are not kept.
        """
        return self.with_fitted(revisions.at_alpha(self._fitted(), log_alpha))

    @with_gradients
    def tune_alpha(self: Self, X: Any, y: Any) -> Self:
        """Algorithm 1: choose the alpha of the variance by the LPD of validation data; the mean does not move.

        Members shift their log alphas together. A curve stays in force: it maps the new affine costs.
        """
        self.fitted_, self.alpha_curve_ = revisions.tune_alpha(self._fitted(), self._rows(X, y))
        return self

    @with_gradients
    def calibrate(self: Self, X: Any, y: Any) -> Self:
        """Fit the curve from affine cost to variance to rows that the model has not seen; of a mixture, tails and
        shrinkage too.

        It maps the costs at alpha*: an alpha that `tune_alpha` chose is given up.
        """
        fitted = self._fitted()
        self.fitted_ = revisions.calibrate(fitted, revisions.held_out_points(fitted, self._rows(X, y)))
        return self

    def conformalize(self: Self, X: Any, y: Any) -> Self:
        """Take fresh rows for `interval(level, method="conformal")`: they must not have been used in any other way.

        The guarantee is for rows exchangeable with these. What changes the model afterwards discards them.
        """
        self.fitted_ = revisions.conformalize(self._fitted(), *self._checked_rows(X, y))
        return self

    @with_gradients
    def update(self: Self, X: Any, y: Any, sample_weight: Any = None, *, forgetting: float = 1.0) -> Self:
        """Add rows in closed form; features, alpha and noise stay.

        Their residuals before they are learned are held-out errors: where they are larger than calibration expected,
        by more than three standard errors, the curves are widened.
        Old rows are down-weighted by `forgetting`, the prior is not. For rows that come one by one,
        `lastlayer.online.OnlineModel` does the same much faster.
        """
        if not 0 < forgetting <= 1:
            raise InputError(f"forgetting={forgetting} must be above 0 and at most 1: the weight that old rows keep")
        rows = self._rows(X, y, sample_weight)
        self.fitted_ = revisions.with_rows(self._fitted(), rows, forgetting=forgetting)
        return self

    @with_gradients
    def remove(self: Self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Take rows out again that `fit` or `update` put in, with the weight they have now; all else stays.

        Rows that cannot have been in are refused, and the model is left as it was.
        """
        rows = self._rows(X, y, sample_weight)
        self.fitted_ = revisions.without_rows(self._fitted(), rows)
        return self

    @with_gradients
    def reestimate(self: Self) -> Self:
        """alpha and noise from the rows that count now, at the maximum of the evidence; the features stay.

        The curve is as it was calibrated, in units of the new noise. A tuned alpha keeps its distance from alpha*.
        """
        self.fitted_ = revisions.reestimate(self._fitted())
        return self

    def with_fitted(self: Self, fitted: Fitted) -> Self:
        """A model of its own with the same parameters that holds another fitted value."""
        view = object.__new__(type(self))
        vars(view).update(vars(self))
        view.fitted_ = fitted
        return view

    def _fitted(self) -> Fitted:
        check_is_fitted(self)
        return self.fitted_

    def _checked(self, X: Any) -> ndarray:
        fitted = self._fitted()
        X = check_X(self, X, reset=False, nd=fitted.inputs is None, ids=fitted.settings.ids)
        fitted.check_reach(X)
        return X

    def _checked_rows(self, X: Any, y: Any, *, partly: bool = False) -> tuple[ndarray, ndarray]:
        fitted = self._fitted()
        ids = fitted.settings.ids
        X, y = check_Xy(self, X, y, reset=False, nd=fitted.inputs is None, partly=partly, ids=ids)
        q = y.shape[1] if y.ndim > 1 else 1
        if q != fitted.n_outputs:
            raise InputError(f"y has {q} outputs, but the model was fitted to {fitted.n_outputs}")
        fitted.check_reach(X, y.reshape(len(y), -1))
        return X, y

    def _rows(self, X: Any, y: Any, sample_weight: Any = None) -> Data:
        X, y = self._checked_rows(X, y, partly=True)
        return self._fitted().data(X, y, check_weight(sample_weight, np.empty((len(y), 1))))
