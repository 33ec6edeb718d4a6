"""`BLLRegressor`: the front door, in scikit-learn's conventions. It conducts the rooms and holds the state."""

import copy
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from lastlayer import files
from lastlayer.errors import FlooredNoiseWarning, InputError, choose
from lastlayer.estimator import DTYPES, Shell, as_covariance_parts, chunks, columns
from lastlayer.evidence import optimal_alpha
from lastlayer.extrapolation import AlphaCurve, cost_quantile, leave_one_out_cost, tune_alpha
from lastlayer.features import MLP, WithInputs, affine_features
from lastlayer.inputs import check_weight, check_Xy
from lastlayer.posterior import Posterior
from lastlayer.prediction import JointPrediction, Prediction
from lastlayer.scaling import Standardizer
from lastlayer.statistics import Statistics
from lastlayer.training import Data, Optimiser, Training, Validation, make_objective, train
from lastlayer.types import BIAS_PRIORS, NOISE_STRUCTURES, BiasPrior, NoiseStructure

KEPT_COSTS = 1001


@dataclass(frozen=True)
class Extrapolation:
    """How far points lie outside what the features were trained on."""

    affine_cost: Float[ndarray, " m"]
    """At alpha_star_: the variance of the function over that of the noise (Theorem 2)."""
    quantile: Float[ndarray, " m"]
    """Share of the training points that would cost less if they were new; 1: farther out than all of them."""


class BLLRegressor(Shell):
    """Neural network regression with an exact Bayesian last layer, trained by the log marginal likelihood.

    Parameters
    ----------
    hidden : widths of the hidden layers of the built-in network.
    activation : "tanh", "silu", "relu", ... (see lastlayer.features.ACTIVATIONS).
    input_skip : pass the inputs on to the last layer too, so that the variance grows without bound outside the data.
        "auto": with the built-in network, not with a backbone.
    backbone : an nn.Module that maps a batch to features (m, k), trained from its present weights in a copy, or a
        callable that returns a fresh one. Inputs of more than two dimensions are passed on to it unscaled.
    objective : "profiled" (weights and noise in closed form at every step), "exact" or "augmented" (the paper's).
    noise : "diagonal", one noise an output, or "full", correlated between the outputs.
    bias_prior : "flat" (Theorem 2) or "shared" (what reproduces the paper's printed evidence).
    optimizer : "adam" with a cosine schedule, or "lbfgs".
    learning_rate : first step size of Adam.
    max_epochs : passes over the data; an iteration of L-BFGS counts as one.
    early_stopping : hold rows out, score them under the posterior of the others, and keep the best network.
        "auto": from 100 samples on.
    validation_fraction : share of the rows held out for that; they count in the final posterior.
    patience : epochs without improvement before stopping.
    device : "auto" (a GPU if there is one), or a torch device.
    dtype : "float64" or "float32", of the network; the last layer is always float64.
    random_state : seed of initialisation and splits.
    progress : show a progress bar.

    Attributes
    ----------
    alpha_star_, alpha_ : signal-to-noise ratio that maximises the evidence, and the one in use for the variance.
    noise_std_ : (q,) standard deviation of the noise, in target units.
    nlml_ : negative log marginal likelihood per sample, standardised targets.
    network_, posterior_ : features and last layer, in standardised units.
    history_ : what happened in training, a list an epoch.
    alpha_curve_ : validation LPD against alpha, after `tune_alpha`.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (50, 50),
        *,
        activation: str = "tanh",
        input_skip: bool | str = "auto",
        backbone: nn.Module | Callable[[], nn.Module] | None = None,
        objective: str = "profiled",
        noise: NoiseStructure = "diagonal",
        bias_prior: BiasPrior = "flat",
        optimizer: str = "adam",
        learning_rate: float = 1e-2,
        max_epochs: int = 1000,
        early_stopping: bool | str = "auto",
        validation_fraction: float = 0.15,
        patience: int = 200,
        device: str = "auto",
        dtype: str = "float64",
        random_state: Any = None,
        progress: bool = False,
    ) -> None:
        self.hidden = hidden
        self.activation = activation
        self.input_skip = input_skip
        self.backbone = backbone
        self.objective = objective
        self.noise = noise
        self.bias_prior = bias_prior
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.max_epochs = max_epochs
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.device = device
        self.dtype = dtype
        self.random_state = random_state
        self.progress = progress

    # fitting ----------------------------------------------------------------------------------------------------

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, validation_data: tuple[Any, Any] | None = None
    ) -> "BLLRegressor":
        """Train the features by the evidence, then the exact posterior of the last layer on every row.

        `sample_weight` counts copies of a row. `validation_data` (X_val, y_val) serves Algorithm 1 alone.
        """
        for name in ("posterior_", "alpha_curve_"):
            vars(self).pop(name, None)  # a fit that fails leaves no half of a model
        self._check_words()
        data, seed = self._begin(X, y, sample_weight, nd=self.backbone is not None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            generator = torch.Generator().manual_seed(seed)
            network = self._build_network(tuple(data.X.shape), generator)
            self.network_ = network.to(device=data.X.device, dtype=DTYPES[self.dtype])
            self.training_ = self._train(data, generator)
        self._finish(data)
        if validation_data is not None:
            self.tune_alpha(*validation_data)
        return self

    def _train(self, data: Data, generator: torch.Generator) -> Training:
        m = len(data.X)
        with torch.no_grad():
            n_features = _check_features(self.network_.eval()(data.X[:2]), data.X[:2]).shape[1]
        objective = make_objective(
            self.objective,
            n_features=n_features,
            n_outputs=data.T.shape[1],
            noise=self.noise,
            bias_prior=self.bias_prior,
            generator=generator,
        ).to(data.X.device)
        optimiser = Optimiser(self.optimizer, learning_rate=self.learning_rate, max_epochs=int(self.max_epochs))
        held = round(self.validation_fraction * m)
        stop_early = m >= 100 if self.early_stopping == "auto" else bool(self.early_stopping)
        if not stop_early or held < 1 or m - held < 2:
            return train(self.network_, objective, data, optimiser, progress=self.progress)
        order = torch.randperm(m, generator=generator).to(data.X.device)
        rest, held_out = (_rows(data, rows) for rows in (order[held:], order[:held]))
        validation = Validation(
            lambda: objective.held_out_score(self.network_(rest.X), rest, self.network_(held_out.X), held_out),
            first=min(50, optimiser.max_epochs // 10),
            every=max(1, min(10, optimiser.max_epochs // 20)),
            patience=self.patience,
        )
        return train(self.network_, objective, rest, optimiser, validation=validation, progress=self.progress)

    def _finish(self, data: Data) -> None:
        """The exact last layer on every row: alpha, noise and weights at the maximum of the evidence."""
        statistics = Statistics.from_batches(
            (self._features(data.X[rows]), data.T[rows], *([] if data.weight is None else [data.weight[rows]]))
            for rows in chunks(len(data.X))
        )
        best = optimal_alpha(statistics, noise=self.noise, bias_prior=self.bias_prior)
        if best.noise_floored and float(statistics.target_scatter.diagonal().min()) > 0:
            warnings.warn(
                "the network fits the targets without error: the noise was set to its floor, 1e-6 of their standard "
                "deviation; expect intervals that are too narrow, and give more data or a smaller network",
                FlooredNoiseWarning,
                stacklevel=3,
            )
        # rounding reaches the variance of far points only, where its size is all that matters
        self.posterior_ = Posterior(
            statistics, best.log_alpha, best.noise_cov, self.noise, self.bias_prior, rtol=math.inf
        )
        self._log_alpha = best.log_alpha
        self.nlml_ = best.nlml
        costs = torch.cat([self.posterior_.variance_ratio(self._features(data.X[r])) for r in chunks(len(data.X))])
        levels = torch.linspace(0, 1, min(KEPT_COSTS, len(costs)), dtype=costs.dtype, device=costs.device)
        self._sample_cost = leave_one_out_cost(costs)[: 2**24].quantile(levels)

    def tune_alpha(self, X: Any, y: Any) -> "BLLRegressor":
        """Algorithm 1: choose the alpha of the variance by the LPD of validation data; the mean does not move."""
        Phi, T = self._features_and_targets(X, y)
        self.alpha_curve_: AlphaCurve = tune_alpha(self.posterior_, Phi, T)
        self._log_alpha = self.alpha_curve_.log_alpha
        return self

    def update(self, X: Any, y: Any, sample_weight: Any = None, *, forgetting: float = 1.0) -> "BLLRegressor":
        """Take in more rows in closed form: features, alpha and noise stay; old rows lose weight by `forgetting`."""
        Phi, T = self._features_and_targets(X, y)
        weight = check_weight(sample_weight, np.empty((len(T), 1)))
        statistics = Statistics.from_features(
            Phi, T, sample_weight=None if weight is None else torch.tensor(weight, device=Phi.device)
        )
        self.posterior_ = self.posterior_.update(statistics, forgetting=forgetting)
        return self

    # asking -----------------------------------------------------------------------------------------------------

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

    @property
    def history_(self) -> dict[str, Any]:
        return dict(vars(self.training_))

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "posterior_")

    # files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted model to one file (safetensors); the old file stays whole until the new one is."""
        check_is_fitted(self)
        words = set(BLLRegressor._get_param_names()) - {"backbone", "random_state"}
        parameters = {word: getattr(self, word) for word in sorted(words)}
        parameters["hidden"] = [int(width) for width in self.hidden]
        statistics = self.posterior_.statistics
        tensors = {f"network.{k}": v for k, v in self.network_.state_dict().items()}
        tensors |= {f"statistics.{k}": getattr(statistics, k) for k in ("count", "mean", "scatter", "energy")}
        tensors |= {"noise_cov": self.posterior_.Sigma_E, "sample_cost": self._sample_cost}
        tensors |= {"targets.mean": self._targets.mean, "targets.scale": self._targets.scale}
        if self._inputs is not None:
            tensors |= {"inputs.mean": self._inputs.mean, "inputs.scale": self._inputs.scale}
        header = {
            "model": "BLLRegressor",
            "parameters": parameters,
            "own_backbone": self.backbone is not None,
            "n_features_in": int(self.n_features_in_),
            "feature_names_in": [str(n) for n in self.feature_names_in_]
            if hasattr(self, "feature_names_in_")
            else None,
            "y_ndim": self._y_ndim,
            "log_alpha_star": float(self.posterior_.log_alpha),
            "log_alpha": str(float(self._log_alpha)),
            "nlml": self.nlml_,
        }
        files.write(path, tensors, header)

    @classmethod
    def _restore(cls, tensors: dict[str, Tensor], header: dict[str, Any], backbone: nn.Module | None) -> "BLLRegressor":
        if header["model"] != cls.__name__:
            raise ValueError(f"it holds a {header['model']}")
        model = cls(**header["parameters"], backbone=backbone)
        if model.device.startswith("cuda") and not torch.cuda.is_available():
            model.device = "auto"
        model.hidden = tuple(model.hidden)
        model.n_features_in_ = header["n_features_in"]
        if header["feature_names_in"] is not None:
            model.feature_names_in_ = np.array(header["feature_names_in"], dtype=object)
        model._y_ndim = header["y_ndim"]
        model._log_alpha = float(header["log_alpha"])
        model.nlml_ = header["nlml"]
        device = model._device()
        scaler = lambda name: Standardizer(tensors[f"{name}.mean"], tensors[f"{name}.scale"])
        model._inputs = scaler("inputs") if "inputs.mean" in tensors else None
        model._targets = scaler("targets")
        prefix = "network."
        state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        model.network_ = model._build_network((1, header["n_features_in"]), None)
        # first the type, then the numbers: a float32 module would round float64 weights
        model.network_ = model.network_.to(device=device, dtype=DTYPES[model.dtype]).eval()
        model.network_.load_state_dict(state)
        fields = {k: tensors[f"statistics.{k}"] for k in ("count", "mean", "scatter", "energy")}
        statistics = Statistics(**fields, n_outputs=len(tensors["targets.mean"])).to(device)
        model.posterior_ = Posterior(
            statistics,
            header["log_alpha_star"],
            tensors["noise_cov"].to(device),
            model.noise,
            model.bias_prior,
            rtol=math.inf,
        )
        model._sample_cost = tensors["sample_cost"].to(device)
        return model

    # inside -----------------------------------------------------------------------------------------------------

    def _check_words(self) -> None:
        choose("noise", self.noise, NOISE_STRUCTURES)
        choose("bias_prior", self.bias_prior, BIAS_PRIORS)
        choose("dtype", self.dtype, DTYPES)
        for name in ("input_skip", "early_stopping"):
            if getattr(self, name) not in (True, False):
                choose(name, getattr(self, name), ("auto",))
        if not 0 < self.validation_fraction < 1:
            raise InputError(f"validation_fraction={self.validation_fraction} must lie strictly between 0 and 1")
        if self.max_epochs < 0 or int(self.max_epochs) != self.max_epochs:
            raise InputError(f"max_epochs={self.max_epochs} must be a whole number, 0 or more")
        if not self.learning_rate > 0:
            raise InputError(f"learning_rate={self.learning_rate} must be positive")

    def _build_network(self, shape: tuple[int, ...], generator: torch.Generator | None) -> nn.Module:
        if self.backbone is None:
            network: nn.Module = MLP(shape[1], self.hidden, activation=self.activation, generator=generator)
        elif isinstance(self.backbone, nn.Module):
            network = copy.deepcopy(self.backbone)
        else:
            network = self.backbone()
            if not isinstance(network, nn.Module):
                raise InputError(f"backbone() returned a {type(network).__name__}, not a torch.nn.Module")
        skip = self.backbone is None if self.input_skip == "auto" else bool(self.input_skip)
        if skip and len(shape) != 2:
            raise InputError(f"input_skip=True needs a table, but X has shape {shape}: leave it at 'auto' or False")
        return WithInputs(network) if skip else network

    def _features(self, Z: Tensor) -> Tensor:
        with torch.no_grad():
            return affine_features(_check_features(self.network_(Z), Z)).double()

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


def load(path: str | os.PathLike[str], *, backbone: nn.Module | None = None) -> BLLRegressor:
    """Load a model that `save` wrote; give the `backbone` module if the model had one of yours."""
    tensors, header = files.read(path)
    if header.get("own_backbone") and backbone is None:
        raise InputError(
            f"{path} was fitted with a backbone of yours: pass a module of the same kind, load(path, backbone=...)"
        )
    try:
        return BLLRegressor._restore(tensors, header, backbone)
    except (KeyError, TypeError, RuntimeError, ValueError) as error:
        raise files.ModelFileError(
            f"{path} does not fit this version of lastlayer or this backbone: {error}"
        ) from error


def _check_features(phi_tilde: Any, Z: Tensor) -> Tensor:
    if not isinstance(phi_tilde, Tensor) or phi_tilde.dim() != 2 or len(phi_tilde) != len(Z):
        shape = tuple(phi_tilde.shape) if isinstance(phi_tilde, Tensor) else type(phi_tilde).__name__
        raise InputError(
            f"the backbone turned a batch of shape {tuple(Z.shape)} into {shape}: it must return features of shape "
            f"({len(Z)}, k), one row a sample; flatten or pool the other dimensions"
        )
    return phi_tilde


def _rows(data: Data, rows: Tensor) -> Data:
    return Data(data.X[rows], data.T[rows], None if data.weight is None else data.weight[rows])


def _exp(x: float | Tensor) -> float:
    return math.exp(min(float(x), 700.0)) if math.isfinite(float(x)) else math.inf
