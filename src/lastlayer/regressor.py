"""`BLLRegressor`: the front door, in scikit-learn's conventions. It conducts the rooms and holds the state."""

import math
import numbers
import os
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from lastlayer import files
from lastlayer.calibration import CrossFit, Ensemble, Member
from lastlayer.description import describe
from lastlayer.errors import FlooredNoiseWarning, InputError, choose
from lastlayer.estimator import DTYPES
from lastlayer.extrapolation import HeldOut, leave_one_out_cost, tune_alpha_on
from lastlayer.fitting import Architecture, Trainer
from lastlayer.model import LastLayerModel
from lastlayer.module import PredictiveModule
from lastlayer.plans import LARGE_TABLE, make_plan
from lastlayer.ranks import Ranks
from lastlayer.saved import pack, unpack
from lastlayer.sources import ArraySource, Source
from lastlayer.streaming import BATCH_SIZE, Streamer
from lastlayer.training import Data, Optimiser, Refresh
from lastlayer.types import BIAS_PRIORS, NOISE_MODELS, BiasPrior, NoiseModel, NoiseStructure

KEPT_COSTS = 1001
TABLE_BATCH = 1_024
"""Rows of a mini-batch, where it was left to us."""
STREAMED_ROWS = 200_000
"""Of a memory map, from which on it stays on disk without being asked to."""
MAX_HELD_ROWS = 10_000
"""Of a memory map, kept for calibration."""
PRESETS = ("honest", "fast")


class BLLRegressor(LastLayerModel):
    """Neural network regression with exact Bayesian last layers, trained by the log marginal likelihood.

    As it stands, `fit` trains small networks under weak and strong priors on their hidden weights, each leaving a fifth
    of the rows out, and calibrates their variance on these rows and on whole blocks left out; the mixture is the model,
    in which at every point those speak that know it best. On 1,000 rows by 10 columns that takes less than a minute on
    two cores. `preset="fast"` is a single uncalibrated network, in seconds.

    Parameters
    ----------
    hidden : widths of the hidden layers of the built-in network.
    activation : "tanh", "silu", "relu", ... (see lastlayer.features.ACTIVATIONS).
    input_skip : pass the inputs on to the last layer too, so that the variance grows without bound outside the data.
        "auto": with the built-in network, not with a backbone.
    backbone : an nn.Module that maps a batch to features (m, k), trained from its present weights in a copy, or a
        callable that returns a fresh one. Inputs of more than two dimensions are passed on to it unscaled.
    preset : what the "auto" of the next four means: "honest", or "fast" (1, None, 0, from 100 samples on).
    n_members : networks in the mixture. "auto": five of every strength of the prior; for one strength 10, or 5 above
        5,000 samples; 1 with a backbone.
    calibration : "auto", rows left out at random and in blocks; with a backbone, 15% of the rows. "alpha": Algorithm 1
        on blocks, which moves alpha alone. A scikit-learn splitter such as GroupKFold or TimeSeriesSplit, with
        `groups` in fit: for trajectories and groups, where random rows leak. None: as the evidence has it.
    hidden_prior : strength of the Gaussian prior N(0, 1 / (strength * fan_in)) on hidden weights; 0: none. "auto":
        several, also infinite (linear regression), in one mixture; with a number of members or without calibration, the
        one that does best on rows left out; 0 with a backbone.
    early_stopping : hold rows out, score them under the posterior of the others, and keep the best network.
        "auto": with a backbone.
    objective : "profiled" (weights and noise in closed form at every step), "exact" or "augmented" (the paper's).
    noise : "diagonal", one noise an output; "full", correlated between the outputs; "input", one an output that depends
        on the input, by a small network fitted to the errors of rows left out (it needs calibration and a table).
    bias_prior : "flat" (Theorem 2) or "shared" (what reproduces the paper's printed evidence).
    optimizer : "adam" with a cosine schedule, or "lbfgs".
    learning_rate : first step size of Adam. "auto": 0.02; 0.05 with mini-batches and a single hidden layer.
    max_epochs : passes over the data; an iteration of L-BFGS counts as one. "auto": 500; 60 with mini-batches.
    batch_size : rows of a mini-batch, which trains in float32 on a running average of the last layer; None: all rows in
        every step. The last layer of the result is exact either way. "auto": 1,024 above 5,000 samples of a table.
    statistics : where mini-batches have their last layer from. "running": an average of recent ones. "epoch", or a
        number of steps: that average begins anew so often, from the exact statistics of a pass over all rows.
    chunk_size : rows in memory at a time, with the gradient of all of them, at the price of a second forward pass.
    checkpoint : a folder in which mini-batch training keeps its state every minute; a fit that was killed goes on from
        there, and one that ends leaves nothing behind.
    validation_fraction : share of the rows held out for early stopping; they count in the final posterior.
    patience : epochs without improvement before stopping.
    device : "auto" (a GPU if there is one), or a torch device.
    dtype : "float64" or "float32", of the network; the last layer is always float64.
    random_state : seed of initialisation and splits.
    progress : show a progress bar.

    Attributes
    ----------
    members_ : the networks with their last layers, in standardised units; `network_`, `posterior_` are the first's.
    calibration_ : the curves from affine cost to variance, the held-out points behind them, and the LPD they promise.
    hidden_prior_, hidden_prior_scores_ : the strength that does best alone; the held-out LPD of each that was tried.
    alpha_star_, alpha_ : signal-to-noise ratio that maximises the evidence, and the one in use for the variance;
        geometric means over the members of that strength, as the next two are means over them.
    noise_std_ : (q,) standard deviation of the noise at the maximum of the evidence, target units, before calibration.
    nlml_ : negative log marginal likelihood per sample, standardised targets.
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
        preset: str = "honest",
        n_members: int | str = "auto",
        calibration: Any = "auto",
        hidden_prior: float | str = "auto",
        early_stopping: bool | str = "auto",
        objective: str = "profiled",
        noise: NoiseModel = "diagonal",
        bias_prior: BiasPrior = "flat",
        optimizer: str = "adam",
        learning_rate: float | str = "auto",
        max_epochs: int | str = "auto",
        batch_size: int | str | None = "auto",
        statistics: int | str = "running",
        chunk_size: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
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
        self.preset = preset
        self.n_members = n_members
        self.calibration = calibration
        self.hidden_prior = hidden_prior
        self.early_stopping = early_stopping
        self.objective = objective
        self.noise = noise
        self.bias_prior = bias_prior
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.statistics = statistics
        self.chunk_size = chunk_size
        self.checkpoint = checkpoint
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.device = device
        self.dtype = dtype
        self.random_state = random_state
        self.progress = progress

    # fitting ----------------------------------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        validation_data: tuple[Any, Any] | None = None,
        groups: Any = None,
    ) -> "BLLRegressor":
        """Train the members, put the exact last layers on every row, and calibrate.

        `sample_weight` counts copies of a row. `validation_data` (X_val, y_val) takes the place of rows left out in
        calibration (without calibration: Algorithm 1 on it). `groups` are for the splitter given as `calibration`.
        """
        for name in ("members_", "alpha_curve_"):
            vars(self).pop(name, None)  # a fit that fails leaves no half of a model
        self._check_words()
        mapped = isinstance(X, np.memmap) and self.batch_size is not None and self.n_members in ("auto", 1)
        if mapped and (self.batch_size != "auto" or len(X) > STREAMED_ROWS):
            return self._fit_mapped(X, y, sample_weight, validation_data)
        data, seed = self._begin(X, y, sample_weight, nd=self.backbone is not None)
        fast, own_network = self.preset == "fast", self.backbone is not None
        plan = make_plan(
            data,
            calibration=None if validation_data is not None and self.calibration == "auto" else self.calibration,
            n_members=self.n_members,
            hidden_prior=self.hidden_prior,
            fast=fast,
            own_network=own_network,
            skips=self._architecture().skips,
            validation_fraction=self.validation_fraction,
            groups=groups,
            seed=seed,
        )
        if self.noise == "input" and ((plan.calibration is None and validation_data is None) or data.X.dim() != 2):
            raise InputError(
                'noise="input" is fitted to rows left out in calibration, of a table: it does not go with '
                f"calibration={self.calibration!r}, preset={self.preset!r}, {len(data.X)} rows of shape "
                f"{tuple(data.X.shape[1:])}"
            )
        stop_early = (fast or own_network) and len(data.X) >= 100
        batch_size = self._batch_rows(len(data.X))
        trainer = Trainer(
            self._architecture(),
            data,
            objective=self.objective,
            noise=self._structure(),
            bias_prior=self.bias_prior,
            optimiser=self._optimiser(batch_size),
            stop_early=stop_early if self.early_stopping == "auto" else bool(self.early_stopping),
            validation_fraction=self.validation_fraction,
            patience=self.patience,
            dtype=DTYPES[self.dtype],
            seed=seed,
            progress=self.progress,
            batch_size=batch_size,
            refresh=self._refresh(),
            chunk_size=self.chunk_size,
            checkpoint=self._checkpoints(),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            crossfit = CrossFit(data, trainer, self._features, self._structure(), self.bias_prior)
            ensemble = plan.carry_out(crossfit)
        self.training_ = trainer.record
        self._take(ensemble, data)
        if validation_data is not None:
            self._use_validation(*validation_data)
        elif plan.calibration == "alpha":
            self._tune_alpha_on(ensemble, data)
        elif ensemble.folds:
            self._calibrate(crossfit.held_out(ensemble.folds))
            self._put_first(ensemble.scores)
        self._clear_checkpoints()
        return self

    def fit_source(self, source: Source, validation_data: tuple[Any, Any] | None = None) -> "BLLRegressor":
        """Train one network on a source of batches (see lastlayer.sources), in memory that does not grow with the rows.

        Every process of a torch.distributed group calls it with the same words, and all get the same model. Nothing is
        held out: give `validation_data` (X_val, y_val), rows that the source does not have, to calibrate.
        """
        for name in ("members_", "alpha_curve_"):
            vars(self).pop(name, None)
        self._check_words()
        for name, given, allowed in (
            ("n_members", self.n_members, ("auto", 1)),
            ("objective", self.objective, ("profiled",)),
            ("optimizer", self.optimizer, ("adam",)),
            ("chunk_size", self.chunk_size, (None,)),
        ):
            if given not in allowed:
                raise InputError(f"{name}={given!r} does not go with a source of batches: leave it at {allowed[0]!r}")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        train = Streamer(
            self._architecture(),
            self._structure(),
            self.bias_prior,
            self._optimiser(BATCH_SIZE),
            batch_size=BATCH_SIZE if self.batch_size in (None, "auto") else int(self.batch_size),
            refresh=self._refresh(),
            strength=0.0 if isinstance(self.hidden_prior, str) else float(self.hidden_prior),
            device=self._device(),
            dtype=DTYPES[self.dtype],
            seed=seed,
            checkpoint=self._checkpoints(),
            progress=self.progress,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            streamed = train(source)
        self._inputs, self._targets = streamed.scales.inputs, streamed.scales.targets
        self._y_ndim, self.training_ = 2 if len(self._targets.mean) > 1 else 1, streamed.training
        self.n_features_in_ = int(streamed.sample.X.shape[1])  # as scikit-learn counts, also of images
        members = [Member(streamed.network, streamed.layer, train.strength)]
        self._take(Ensemble(members, [], {}), streamed.sample)
        if validation_data is not None:
            self._use_validation(*validation_data)
        self._clear_checkpoints()
        return self

    def _use_validation(self, X: Any, y: Any) -> None:
        (self.calibrate if self.preset != "fast" and self.calibration == "auto" else self.tune_alpha)(X, y)

    def _fit_mapped(
        self, X: np.memmap, y: Any, sample_weight: Any, validation_data: tuple[Any, Any] | None
    ) -> "BLLRegressor":
        """A memory map stays on disk; some random rows are kept for calibration."""
        y_ndim = np.ndim(y)
        held = np.empty(0, dtype=np.int64)
        if validation_data is None and self.preset == "honest" and self.calibration == "auto":
            n = min(MAX_HELD_ROWS, round(self.validation_fraction * len(X)))
            rng = np.random.default_rng(check_random_state(self.random_state).randint(2**31 - 1))
            held = np.sort(rng.choice(len(X), n, replace=False))
            validation_data = np.asarray(X[held]), np.asarray(y[held])
        self.fit_source(ArraySource(X, y, sample_weight, left_out=tuple(held.tolist())), validation_data)
        self._y_ndim = y_ndim
        return self

    def _checkpoints(self) -> Path | None:
        """The folder for states of training."""
        if self.checkpoint is None:
            return None
        folder = Path(self.checkpoint)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"checkpoint={str(folder)!r} must be a folder, or a path where one can be made") from error
        return folder

    def _clear_checkpoints(self) -> None:
        """A training that has ended leaves nothing behind."""
        if self.checkpoint is not None and not Ranks.started().rank:
            for file in Path(self.checkpoint).glob("training*.safetensors"):
                file.unlink()

    def _take(self, ensemble: Ensemble, data: Data) -> None:
        """The members, and what they cost at the training points."""
        self._hold(ensemble, varied=bool((data.T.std(0) > 0).all()))
        self._keep_costs(torch.from_numpy(self._marginals(data.X).cost))

    def _hold(self, ensemble: Ensemble, *, varied: bool) -> None:
        """The members as they stand, uncalibrated; targets that never `varied` need no warning."""
        if varied and any(member.layer.noise_floored for member in ensemble.members):
            warnings.warn(
                "the network fits the targets without error: the noise was set to its floor, 1e-6 of their standard "
                "deviation; expect intervals that are too narrow, and give more data or a smaller network",
                FlooredNoiseWarning,
                stacklevel=4,
            )
        self.members_ = ensemble.members
        self.hidden_prior_scores_ = ensemble.scores
        self.calibration_ = self.conformal_scores_ = None
        self._log_alphas = self._stars()

    def _keep_costs(self, cost: Float[Tensor, "c m"]) -> None:
        """Quantiles of what training points would cost if they were new."""
        costs = leave_one_out_cost(cost).mean(0)
        levels = torch.linspace(0, 1, min(KEPT_COSTS, len(costs)), dtype=costs.dtype)
        self._sample_cost = costs[: 2**24].quantile(levels)

    def _put_first(self, scores: dict[float, float]) -> None:
        """The members of the strength that does best alone; the others follow in their order."""
        assert self.calibration_ is not None
        self.hidden_prior_scores_ = scores or self.calibration_.alone
        order = list(self.calibration_.curves)
        places = sorted(range(len(self.members_)), key=lambda i: order.index(self.members_[i].strength))
        self.members_ = [self.members_[i] for i in places]
        self._log_alphas = [self._log_alphas[i] for i in places]

    def _tune_alpha_on(self, ensemble: Ensemble, data: Data) -> None:
        """Algorithm 1 on the blocks left out: one alpha for all members."""
        folds = []
        for t in ensemble.folds:
            held = data.rows(torch.from_numpy(t.job.split.held).to(data.X.device))
            folds.append(HeldOut(t.layer.posterior, self._features(t.network, held.X), held.T))
        self.alpha_curve_ = tune_alpha_on(folds, float(np.mean(self._log_alphas)))
        self._log_alphas = [self.alpha_curve_.log_alpha] * len(self.members_)

    @property
    def history_(self) -> dict[str, Any]:
        return dict(vars(self.training_))

    # elsewhere --------------------------------------------------------------------------------------------------

    def module(self) -> PredictiveModule:
        """The fitted model as a `torch.nn.Module`, differentiable in its inputs; ONNX and torch.export start here.

        It maps a batch, original units, to a dictionary of tensors that `predictive` has as arrays: mean, var,
        epistemic_var, noise_var, affine_cost. It is a copy on the model's device; `.to(...)` moves it.
        """
        return PredictiveModule(describe(self)).to(self._device())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted model to one file (safetensors); the old file stays whole until the new one is."""
        check_is_fitted(self)
        kept = set(BLLRegressor._get_param_names()) - {"backbone", "random_state", "checkpoint"}
        parameters = {word: getattr(self, word) for word in sorted(kept)}
        parameters["hidden"] = [int(width) for width in self.hidden]
        if not (isinstance(self.calibration, str) or self.calibration is None):
            parameters["calibration"] = "auto"  # a splitter has done its work
        words = {"model": type(self).__name__, "parameters": parameters, "own_backbone": self.backbone is not None}
        tensors, header = pack(self)
        files.write(path, tensors, words | header)

    @classmethod
    def _restore(cls, tensors: dict[str, Tensor], header: dict[str, Any], backbone: nn.Module | None) -> "BLLRegressor":
        if header["model"] != cls.__name__:
            raise ValueError(f"it holds a {header['model']}")
        model = cls(**header["parameters"], backbone=backbone)
        if model.device.startswith("cuda") and not torch.cuda.is_available():
            model.device = "auto"
        model.hidden = tuple(model.hidden)

        def build(strength: float) -> nn.Module:
            network = model._architecture().build((1, header["n_features_in"]), strength=strength)
            # the type before the numbers: a float32 module would round float64 weights
            return network.to(device=model._device(), dtype=DTYPES[model.dtype]).eval()

        unpack(model, tensors, header, build, noise=model._structure(), bias_prior=model.bias_prior)
        return model

    # inside -----------------------------------------------------------------------------------------------------

    def _check_words(self) -> None:
        choose("noise", self.noise, NOISE_MODELS)
        choose("bias_prior", self.bias_prior, BIAS_PRIORS)
        choose("dtype", self.dtype, DTYPES)
        choose("preset", self.preset, PRESETS)
        if isinstance(self.calibration, str):
            choose("calibration", self.calibration, ("auto", "alpha"))
        whole, number = _is(numbers.Integral, self.n_members), _is(numbers.Real, self.hidden_prior)
        if self.n_members != "auto" and not (whole and int(self.n_members) >= 1):
            raise InputError(f"n_members={self.n_members!r} must be 'auto' or a whole number, 1 or more")
        if self.hidden_prior != "auto" and not (number and 0 <= float(self.hidden_prior) < math.inf):
            raise InputError(f"hidden_prior={self.hidden_prior!r} must be 'auto' or a number, 0 or more")
        if isinstance(self.backbone, nn.Module) and self.n_members not in ("auto", 1):
            raise InputError(
                f"n_members={self.n_members} needs networks that start apart: give backbone a callable that returns a "
                "fresh module, such as backbone=lambda: MyNetwork(), in place of a module"
            )
        for name in ("input_skip", "early_stopping"):
            if getattr(self, name) not in (True, False):
                choose(name, getattr(self, name), ("auto",))
        sizes: dict[str, Any] = {"batch_size": self.batch_size, "chunk_size": self.chunk_size}
        for name, size in sizes.items():
            left_to_us = size is None or (size == "auto" and name == "batch_size")
            if not left_to_us and not (_is(numbers.Integral, size) and int(size) >= 2):
                raise InputError(f"{name}={size!r} must be None or a whole number of rows, 2 or more")
        if _is(numbers.Integral, self.batch_size) and (self.objective != "profiled" or self.chunk_size is not None):
            raise InputError(
                f'batch_size={self.batch_size} needs objective="profiled" and no chunk_size, but they are '
                f"{self.objective!r} and {self.chunk_size!r}"
            )
        if _is(numbers.Integral, self.statistics):
            if int(self.statistics) < 1:
                raise InputError(f"statistics={self.statistics!r} must be 'running', 'epoch' or steps, 1 or more")
        else:
            choose("statistics", self.statistics, ("running", "epoch"))
        if not 0 < self.validation_fraction < 1:
            raise InputError(f"validation_fraction={self.validation_fraction} must lie strictly between 0 and 1")
        epochs, rate = self.max_epochs, self.learning_rate
        if epochs != "auto" and not (_is(numbers.Real, epochs) and float(epochs) >= 0 and int(epochs) == epochs):
            raise InputError(f"max_epochs={epochs!r} must be 'auto' or a whole number, 0 or more")
        if rate != "auto" and not (_is(numbers.Real, rate) and 0 < float(rate) < math.inf):
            raise InputError(f"learning_rate={rate!r} must be 'auto' or a number, positive and finite")

    def _structure(self) -> NoiseStructure:
        """Of the evidence: noise that depends on the input is a matter of calibration."""
        return "full" if self.noise == "full" else "diagonal"

    def _batch_rows(self, m: int) -> int | None:
        """Rows of a mini-batch; None: all of them in every step."""
        rows = self.batch_size
        if rows == "auto":
            plain = self.objective == "profiled" and self.optimizer == "adam" and self.chunk_size is None
            rows = TABLE_BATCH if plain and self.backbone is None and m > LARGE_TABLE else None
        if rows is None and self.checkpoint is not None:
            raise InputError("checkpoint keeps the state of mini-batch training: give a batch_size with it")
        if rows is None and self.statistics != "running":
            raise InputError(f"statistics={self.statistics!r} are those of mini-batch training: give a batch_size too")
        return None if rows is None else int(rows)

    def _refresh(self) -> Refresh | None:
        if self.statistics == "running":
            return None
        return Refresh() if self.statistics == "epoch" else Refresh(int(self.statistics))

    def _optimiser(self, batch_size: int | None) -> Optimiser:
        """What "auto" means for steps."""
        rate, epochs = self.learning_rate, self.max_epochs
        if rate == "auto":
            rate = 5e-2 if batch_size is not None and self.backbone is None and len(self.hidden) == 1 else 2e-2
        if epochs == "auto":
            epochs = 500 if batch_size is None else 60
        return Optimiser(self.optimizer, learning_rate=float(rate), max_epochs=int(epochs))

    def _architecture(self) -> Architecture:
        return Architecture(self.hidden, self.activation, self.input_skip, self.backbone)


def load(path: str | os.PathLike[str], *, backbone: nn.Module | None = None) -> BLLRegressor:
    """Load a model that `save` wrote; give the `backbone` module if the model had one of yours."""
    tensors, header = files.read(path)
    if header.get("own_backbone") and backbone is None:
        raise InputError(
            f"{path} was fitted with a backbone of yours: pass a module of the same kind, load(path, backbone=...)"
        )
    try:
        if backbone is None:
            _check_size(tensors, header)
        return BLLRegressor._restore(tensors, header, backbone)
    except Exception as error:  # a file may be whole and still hold anything
        raise files.ModelFileError(
            f"{path} does not fit this version of lastlayer or this backbone: {error}"
        ) from error


def _check_size(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """The network that the words describe must not be larger than the numbers that are there to fill it."""
    widths = [header["n_features_in"], *header["parameters"]["hidden"]]
    wanted = sum(fan_in * fan_out for fan_in, fan_out in pairwise(widths))
    if not all(isinstance(width, int) for width in widths) or wanted > sum(t.numel() for t in tensors.values()):
        raise ValueError(f"a network of layers {widths} is not in it")


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind)
