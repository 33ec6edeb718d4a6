"""`BLLRegressor`: the front door, in scikit-learn's conventions. It conducts the rooms and holds the state."""

import copy
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from lastlayer import files
from lastlayer.errors import FlooredNoiseWarning, InputError, choose
from lastlayer.estimator import DTYPES, chunks
from lastlayer.evidence import optimal_alpha
from lastlayer.extrapolation import leave_one_out_cost
from lastlayer.features import MLP, WithInputs
from lastlayer.model import LastLayerModel, check_features
from lastlayer.posterior import Posterior
from lastlayer.scaling import Standardizer
from lastlayer.statistics import Statistics
from lastlayer.training import Data, Optimiser, Training, Validation, make_objective, train
from lastlayer.types import BIAS_PRIORS, NOISE_STRUCTURES, BiasPrior, NoiseStructure

KEPT_COSTS = 1001


class BLLRegressor(LastLayerModel):
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
            n_features = check_features(self.network_.eval()(data.X[:2]), data.X[:2]).shape[1]
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

    @property
    def history_(self) -> dict[str, Any]:
        return dict(vars(self.training_))

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
        if not 0 < self.learning_rate < math.inf:
            raise InputError(f"learning_rate={self.learning_rate} must be positive and finite")

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


def _rows(data: Data, rows: Tensor) -> Data:
    return Data(data.X[rows], data.T[rows], None if data.weight is None else data.weight[rows])
