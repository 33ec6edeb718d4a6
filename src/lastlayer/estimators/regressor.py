"""`BLLRegressor`: the front door, in scikit-learn's conventions."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lastlayer import checked, files
from lastlayer.digests import digest_of
from lastlayer.distributed import ProcessGroup
from lastlayer.ensemble.copies import joined, whole_groups
from lastlayer.ensemble.crossfit import CrossFit, Ensemble
from lastlayer.ensemble.splits import folds_for
from lastlayer.ensemble.streamed import train_on_source
from lastlayer.ensemble.trainer import Trainer
from lastlayer.errors import InputError
from lastlayer.estimators.base import LastLayerRegressor, with_gradients
from lastlayer.estimators.fit_context import in_fit_context
from lastlayer.estimators.held_out import HeldOutRows
from lastlayer.estimators.notes import (
    log_start,
    log_summary,
    warn_of_copies,
    warn_of_floored_noise,
    warn_of_missing_targets,
)
from lastlayer.inputs import check_groups
from lastlayer.networks.architecture import Architecture
from lastlayer.observe import Observations, check_observations
from lastlayer.parameters import TrainingOptions
from lastlayer.parameters import check as check_parameters
from lastlayer.predictor import revisions
from lastlayer.predictor.fitted import Fitted
from lastlayer.predictor.module import Member
from lastlayer.predictor.serialization import pack, unpack
from lastlayer.scaling import Standardizer
from lastlayer.settings import CURVE_FOLDS, DataShape, Settings, resolve, target_transform
from lastlayer.sources import ArraySource, Source
from lastlayer.training import Data, TrainingHistory, clear_checkpoints
from lastlayer.types import BiasPrior, Family, NoiseModel

STREAMED_ROWS = 200_000
"""Above this many rows, a memory map stays on disk without being asked to."""
MAX_HELD_ROWS = 10_000
"""Of a memory map, kept for calibration."""


class BLLRegressor(LastLayerRegressor):
    """Neural network regression with exact Bayesian last layers, trained by the log marginal likelihood.

    By default, `fit` trains small networks under weak and stronger priors on their hidden weights, half of them on
    piecewise-linear encoded inputs, and beside them a linear and an additive model, each leaving some rows out, and a
    Gaussian process in random features. It calibrates their variance on these rows and on whole regions left out. The
    model is the mixture: members are weighted by their calibrated precision.
    On 1,000 rows by 10 columns that takes seconds on two cores. `preset="fast"` has fewer networks and steps,
    `preset="evidence"` is a single uncalibrated network.

    Parameters
    ----------
    hidden : widths of the hidden layers of the built-in network. "auto": two layers, a unit for every six rows that
        differ, 5 at least and 50 at most.
    activation : "tanh", "silu", "relu", ... (see lastlayer.features.ACTIVATIONS).
    input_skip : pass the inputs on to the last layer too, so that the variance grows without bound outside the data.
        "auto": with the built-in network, not with a backbone.
    encoding : what networks see: "raw" inputs, or their "piecewise" linear encoding by quantiles, which learns steps
        and thresholds easily and is constant outside the data. "auto": a mixture of both. "fourier": no network, but
        random Fourier features with lengths by the evidence: a Gaussian process through 256 frequencies.
    backbone : an nn.Module that maps a batch to features (m, k), trained from its present weights in a copy, or a
        callable that returns a fresh one. Integers, such as ids for embeddings, and inputs of more than two dimensions
        are passed on to it as they are.
    preset : what the "auto" of the other parameters means: "calibrated"; "fast", the same with a third of the
        networks and fewer steps; "evidence", one network, no calibration, early stopping from 100 samples on.
    n_members : networks in the mixture. "auto": five of every family, up to 20 below 250 samples, 10 above 5,000; under
        one prior precision 10, or 5 above 5,000 samples; 1 with a backbone.
    calibration : "auto": rows left out at random, in blocks and in shells; with a backbone, 15% of the rows. "alpha":
        Algorithm 1 on blocks, which moves alpha alone. A scikit-learn splitter such as TimeSeriesSplit: for
        trajectories, where random rows leak. Whole groups are left out if `fit` gets `groups`. None: as the evidence
        has it.
    hidden_prior : precision c of the Gaussian prior N(0, 1 / (c * fan_in)) on hidden weights; 0: none. "auto": several
        in one mixture; with a number of members or without calibration, the one
        that does best on rows left out; 0 with a backbone.
    noise : "diagonal", one noise per output; "full", correlated between the outputs; "input", one per output that
        depends on the input, by a small network fitted to the errors of rows left out (needs calibration and a table).
        "auto": "input" where that raises the density of other rows left out, else "diagonal".
    bias_prior : "flat" (Theorem 2) or "shared" (what reproduces the paper's printed evidence).
    target_transform : "log": fit the logarithm of targets that are all positive; predictions are mixtures of
        log-normals in the units of the targets (`lastlayer.log_prediction.LogPrediction`). "auto": "log" if the
        skewness of each target is above 1 and that of its logarithm less than half as large. Not with noise_std or
        observations; CasADi, ONNX, BoTorch, `joint` and other uses of a Gaussian refuse such a model.
    max_epochs : passes over the data; an iteration of L-BFGS counts as one. "auto": 250, or as many as
        400 to 800 steps of mini-batches take, 10 at least; with early stopping or a backbone 500, of a source 60.
    batch_size : rows of a mini-batch, which trains in float32 on a running average of the last layer; None: all rows in
        every step. The last layer of the result is exact either way. "auto": 1,024 above 5,000 samples of a table.
    training : a `lastlayer.TrainingOptions`: objective, optimizer, learning rate, early stopping and the like.
    checkpoint : a folder in which mini-batch training keeps its state every minute; a fit that was killed resumes from
        there, and one that ends leaves nothing behind.
    device : "auto" (a GPU if there is one), or a torch device.
    dtype : "float64" or "float32", of the networks; an ensemble of built-in ones is trained in float32. Last layers are
        always float64.
    random_state : seed of initialisation and splits. None: another one in every fit, whatever `numpy.random.seed` was.
    progress : show a progress bar.
    n_jobs : threads that `fit` may use, in torch, BLAS and OpenMP; networks of an ensemble are shared out among them.
        None: as many as torch has (`torch.get_num_threads()`), -1: all cores, -2: all but one. Afterwards everything is
        as before. Another number may change the last digits of the result.
    verbose : 1 shows the stages of a fit and its summary, 2 also settings and trainings. They are lines of the logger
        "lastlayer" (info and debug), which go to stderr unless `logging` is configured; with 0, `logging` alone
        decides.

    Attributes
    ----------
    fitted_ : the fitted model as a frozen value; everything else that predicts is made from it.
    settings_ : what every "auto" became.
    members_ : the networks with their last layers, in standardised units; `network_`, `posterior_` are the first's.
    calibration_ : the curves from affine cost to variance, the held-out points behind them, and the LPD they promise.
    family_, family_scores_ : the kind of members that does best alone; the held-out LPD of each that was tried.
    alpha_star_, alpha_ : signal-to-noise ratio that maximises the evidence, and the one in use for the variance;
        geometric means over the members under that prior precision, as the next two are means over them.
    noise_std_ : (q,) standard deviation of the noise at the maximum of the evidence, target units, before calibration;
        with target_transform="log", that of the logarithm.
    nlml_ : negative log marginal likelihood per sample, standardised targets.
    history_ : training history, one list entry per epoch.
    alpha_curve_ : validation LPD against alpha, after `tune_alpha`.
    """

    def __init__(
        self,
        hidden: Sequence[int] | str = "auto",
        *,
        activation: str = "tanh",
        input_skip: bool | str = "auto",
        encoding: str = "auto",
        backbone: nn.Module | Callable[[], nn.Module] | None = None,
        preset: str = "calibrated",
        n_members: int | str = "auto",
        calibration: Any = "auto",
        hidden_prior: float | str = "auto",
        noise: NoiseModel = "auto",
        bias_prior: BiasPrior = "flat",
        target_transform: str | None = None,
        max_epochs: int | str = "auto",
        batch_size: int | str | None = "auto",
        training: TrainingOptions | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        device: str = "auto",
        dtype: str = "float64",
        random_state: Any = None,
        progress: bool = False,
        n_jobs: int | None = None,
        verbose: int = 0,
    ) -> None:
        self.hidden = hidden
        self.activation = activation
        self.input_skip = input_skip
        self.encoding = encoding
        self.backbone = backbone
        self.preset = preset
        self.n_members = n_members
        self.calibration = calibration
        self.hidden_prior = hidden_prior
        self.noise = noise
        self.bias_prior = bias_prior
        self.target_transform = target_transform
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.training = training
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype
        self.random_state = random_state
        self.progress = progress
        self.n_jobs = n_jobs
        self.verbose = verbose

    @in_fit_context
    @with_gradients
    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        validation_data: tuple[Any, Any] | None = None,
        groups: Any = None,
        *,
        noise_std: Any = None,
        observations: Sequence[Observations] = (),
        progress: bool | None = None,
    ) -> "BLLRegressor":
        """Train members that each leave rows out, put exact last layers on them, and calibrate them on these rows.

        Of several targets some may be missing (NaN): each output learns from the rows where it is known.
        `noise_std`, a number, one for each row or one for each target, is noise that is known, beside the noise that is
        learned and that predictions have. `observations` are measurements of functionals of the same function, such as
        derivatives (see `lastlayer.observe`): no network leaves them out.
        `sample_weight` counts copies of a row. `validation_data` (X_val, y_val) takes the place of rows left out in
        calibration (without calibration: Algorithm 1 on it). `groups`, a label per row, names rows that belong
        together, such as those of a patient or a run: wherever rows are left out, at random, in blocks or for early
        stopping, whole groups are. A splitter given as `calibration` gets them as they are.
        `progress` shows what is being done and how long it will take; None: as the parameter of that name says.
        """
        self._forget()
        mapped = isinstance(X, np.memmap) and self.batch_size is not None and self.n_members in ("auto", 1)
        if mapped and (self.batch_size != "auto" or len(X) > STREAMED_ROWS):
            with ProcessGroup.current().guarded():
                return self._fit_mapped(X, y, sample_weight, validation_data, groups, progress)
        seed = self._seed()
        rows = self._validate_and_scale(
            X, y, sample_weight, nd=self.backbone is not None, partly=True, noise_std=noise_std
        )
        digest = "" if self.checkpoint is None else digest_of(rows.X, rows.y, rows.weight)
        transform = target_transform(self.target_transform, rows.y.numpy())
        rows = rows if transform is None else rows.logged()
        n_given = len(rows.X) if rows.weight is None else int((rows.weight > 0).sum())
        by_splitter = not (self.calibration is None or isinstance(self.calibration, str))
        labels = check_groups(groups, len(rows.X))
        if rows.inputs is not None and rows.alike and not by_splitter and labels is None:
            rows = rows.merged()
        copies = rows.copies() if rows.inputs is not None else None
        n_groups = None if copies is None else int(copies.max()) + 1
        n_known = None if n_groups is None else round(n_groups * rows.known_share)
        together = labels if copies is None else copies if labels is None else joined(copies, labels)
        n_together = None if together is None or labels is None else int(together.max()) + 1
        observations = check_observations(observations)
        beside = sum(len(seen.y) for seen in observations)
        alike = rows.alike and not beside
        learned, ids = noise_std is None and not beside, not rows.X.is_floating_point()
        shape = DataShape(
            tuple(rows.X.shape), validation_data is not None, n_known, n_together, alike, learned, beside, ids
        )
        settings = resolve(self._parameters() | {"target_transform": transform}, shape, seed=seed)
        log_start(settings, rows.X.shape, rows.y.shape[1])
        warn_of_missing_targets(rows.y)
        if settings.calibration in ("random and blocked folds", "holdout"):
            warn_of_copies(n_given, n_groups)
        data = rows.to(settings.torch_device, settings.torch_dtype, observations)
        Z, T = data.X.cpu().numpy(), data.T.cpu().numpy()
        Z = Z[..., None] if ids else Z  # no points of a space, in which blocks could be left out
        folds = folds_for(settings, Z, T, together=together, splitter=self.calibration, groups=groups)
        architecture = Architecture(settings, self.backbone)
        trainer = Trainer(
            architecture,
            data,
            self._checkpoints(),
            self._shown(progress),
            digest,
            together=None if labels is None else together,
        )
        crossfit = CrossFit(trainer)
        with architecture.seeded():
            ensemble = crossfit.run(folds)
        self.training_ = trainer.history
        with trainer.stage("calibration"):
            self._hold(ensemble.members, data, rows.inputs, rows.targets, settings, ensemble.scores)
            self._calibrate(crossfit, ensemble, validation_data)
            self.held_out_ = HeldOutRows.of(self.fitted_, ensemble.folds, rows.place)
        log_summary(self.fitted_)
        self._clear_checkpoints()
        return self

    @in_fit_context
    @with_gradients
    def fit_source(
        self, source: Source, validation_data: tuple[Any, Any] | None = None, *, progress: bool | None = None
    ) -> "BLLRegressor":
        """Train one network on a source of batches (see lastlayer.sources), in memory that does not grow with the rows.

        Every process of a torch.distributed group calls it with the same parameters and `validation_data`, and all get
        the same model: without a `random_state`, by the seed of the first process. Processes that differ are refused
        at the start (`MismatchError`), and if one fails, so do the others (`ProcessError`).
        Nothing is held out: give `validation_data` (X_val, y_val), rows that the source does not have, to calibrate.
        """
        with ProcessGroup.current().guarded():
            return self._fit_source(source, validation_data, progress, self._common_seed())

    def _common_seed(self) -> int:
        """Of all processes: the first one's, and a `random_state` must be the same on all."""
        group, seed = ProcessGroup.current(), self._seed()
        group.agree({"random_state": "None" if self.random_state is None else f"seed {seed}"})
        return group.gather(seed)[0]

    def _fit_source(
        self, source: Source, validation_data: tuple[Any, Any] | None, progress: bool | None, seed: int
    ) -> "BLLRegressor":
        self._forget()
        held_out = None if validation_data is None else digest_of(*map(np.asarray, validation_data))
        ProcessGroup.current().agree({"digest of validation_data": held_out})
        settings = resolve(self._parameters(), DataShape(None, validation_data is not None), seed=seed)
        architecture = Architecture(settings, self.backbone)
        with architecture.seeded():
            streamed = train_on_source(
                source, architecture, checkpoint=self._checkpoints(), progress=self._shown(progress)
            )
        scales = streamed.scales
        settings = replace(settings, ids=not streamed.sample.X.is_floating_point())
        self.training_, self._y_ndim = streamed.history, 2 if len(scales.targets.mean) > 1 else 1
        self.n_features_in_ = int(streamed.sample.X.shape[1])  # as scikit-learn counts, also of images
        self._hold([streamed.member], streamed.sample, scales.inputs, scales.targets, settings)
        if validation_data is not None:
            self._use_validation(*validation_data)
        log_summary(self.fitted_)
        self._clear_checkpoints()
        return self

    @property
    def history_(self) -> dict[str, Any]:
        """Training history: one entry per epoch, and the reason for stopping."""
        return dict(vars(self.training_))

    training_: TrainingHistory
    held_out_: HeldOutRows | None = None
    """After `fit`, training rows with the networks that never saw them, for honest scores of this fit; None: no network
    left out single rows. It goes into no file, and not into a pickle either."""

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "held_out_"}

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> "BLLRegressor":
        """Fit to the rows of the first call; at later ones, `update`: last layers learn the rows, features stay.

        So the first call needs rows enough to train networks on. `fit` starts anew; `lastlayer.online.OnlineModel`
        takes single rows much faster.
        """
        return self.update(X, y, sample_weight) if hasattr(self, "fitted_") else self.fit(X, y, sample_weight)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted model to one file (safetensors); the old file stays whole until the new one is."""
        files.write(path, *self.packed())

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a model file holds: tensors, and a header for JSON."""
        kept = set(BLLRegressor._get_param_names()) - {"backbone", "random_state", "checkpoint", "training"}
        parameters = {name: getattr(self, name) for name in sorted(kept)}
        parameters["hidden"] = self.hidden if self.hidden == "auto" else [int(width) for width in self.hidden]
        if not (isinstance(self.calibration, str) or self.calibration is None):
            parameters["calibration"] = "auto"  # a splitter has done its work
        options = None if self.training is None else vars(self.training)
        about = {"model": type(self).__name__, "parameters": parameters, "training": options}
        tensors, header = self._packed()
        return tensors, about | header

    def _packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What the file holds of the fitted value."""
        return pack(self._fitted())

    def _parameters(self) -> dict[str, Any]:
        """All that settings are resolved from, whatever a subclass calls it."""
        return {name: getattr(self, name) for name in BLLRegressor._get_param_names()}

    def _forget(self) -> None:
        """A fit that fails leaves no half of a model."""
        for name in ("fitted_", "alpha_curve_", "held_out_"):
            vars(self).pop(name, None)

    def _hold(
        self,
        members: list[Member],
        data: Data,
        inputs: Standardizer | None,
        targets: Standardizer,
        settings: Settings,
        scores: dict[Family, float] | None = None,
    ) -> None:
        """The trained members as a fitted value, uncalibrated; `data` are training rows, or some of them."""
        warn_of_floored_noise(members, varied=data.varied)
        self.fitted_ = Fitted.of(
            members,
            data,
            inputs=inputs,
            targets=targets,
            settings=settings,
            n_features_in=self.n_features_in_,
            feature_names=tuple(getattr(self, "feature_names_in_", ())) or None,
            y_ndim=self._y_ndim,
            family_scores=scores or {},
        )

    def _calibrate(self, crossfit: CrossFit, ensemble: Ensemble, validation_data: tuple[Any, Any] | None) -> None:
        how = self.fitted_.settings.calibration
        if validation_data is not None:
            self._use_validation(*validation_data)
        elif how == "alpha on blocked folds":
            folds = crossfit.alpha_folds(ensemble.folds)
            self.fitted_, self.alpha_curve_ = revisions.tune_alpha_on_folds(self.fitted_, folds)
        elif how in CURVE_FOLDS:
            self.fitted_ = revisions.calibrate(self.fitted_, crossfit.held_out(ensemble.folds))

    def _use_validation(self, X: Any, y: Any) -> None:
        (self.calibrate if self.fitted_.settings.calibration == "curve on validation data" else self.tune_alpha)(X, y)

    def _fit_mapped(
        self,
        X: np.memmap,
        y: Any,
        sample_weight: Any,
        validation_data: tuple[Any, Any] | None,
        groups: Any,
        progress: bool | None,
    ) -> "BLLRegressor":
        """A memory map stays on disk; some random rows, or whole groups of them, are kept for calibration."""
        held, seed = np.empty(0, dtype=np.int64), self._common_seed()
        if validation_data is None and self.preset != "evidence" and self.calibration == "auto":
            fraction = (self.training or TrainingOptions()).validation_fraction
            rng = np.random.default_rng(seed)
            labels, n = check_groups(groups, len(X)), min(MAX_HELD_ROWS, round(fraction * len(X)))
            if labels is None:
                held = np.sort(rng.choice(len(X), n, replace=False))
            else:
                held = whole_groups(labels, n, rng.permutation(labels.max() + 1))
            if not len(held):
                raise InputError("all rows are of one group: give two groups or more, or leave groups out")
            validation_data = np.asarray(X[held]), np.asarray(y[held])
        source = ArraySource(X, y, sample_weight, left_out=tuple(held.tolist()))
        self._fit_source(source, validation_data, progress, seed)
        self.fitted_ = replace(self.fitted_, y_ndim=np.ndim(y))
        return self

    def _shown(self, progress: bool | None) -> bool:
        return self.progress if progress is None else progress

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
        if self.checkpoint is not None and not ProcessGroup.current().rank:
            clear_checkpoints(Path(self.checkpoint))

    @classmethod
    def _restore(cls, tensors: dict[str, Tensor], header: dict[str, Any], backbone: nn.Module | None) -> "BLLRegressor":
        if header["model"] != cls.__name__:
            raise ValueError(f"it holds a {header['model']}")
        options = header["training"]
        training = None if options is None else checked.instance(TrainingOptions, options)
        model = cls(**header["parameters"], backbone=backbone, training=training)
        model.hidden = checked.typed("hidden", model.hidden, Literal["auto"] | tuple[int, ...])
        model.progress = checked.typed("progress", model.progress, bool)
        own = None if backbone is None else type(backbone)  # one module is enough for trained members
        check_parameters(model._parameters() | {"backbone": own})
        settings = Settings.from_json(header["settings"])
        if settings.device.startswith("cuda") and not torch.cuda.is_available():
            model.device, settings = "auto", Settings.from_json(header["settings"] | {"device": "cpu"})
        model.fitted_ = fitted = unpack(tensors, header, Architecture(settings, backbone))
        model.n_features_in_ = fitted.n_features_in
        if fitted.feature_names is not None:
            model.feature_names_in_ = np.array(fitted.feature_names, dtype=object)
        return model


def load(path: str | os.PathLike[str], *, backbone: nn.Module | None = None) -> BLLRegressor:
    """Load a model that `save` wrote; give the `backbone` module if the model had one of yours."""
    tensors, header = files.read(path)
    if "online" in header:
        raise files.ModelFileError(f"{path} holds a model that was saved while it ran: use OnlineModel.load(path)")
    return unpacked(path, tensors, header, backbone)


@with_gradients
def unpacked(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, Any], backbone: nn.Module | None
) -> BLLRegressor:
    """The model that `BLLRegressor.packed` gave away, as read from a file."""
    from lastlayer.estimators.attached import AttachedRegressor  # which is a BLLRegressor

    settings = header.get("settings")
    if backbone is None and isinstance(settings, dict) and settings.get("backbone") is not None:
        raise InputError(
            f"{path} was fitted with a backbone of yours: pass a module of the same kind, load(path, backbone=...)"
        )
    try:
        if backbone is None:
            _check_size(tensors, header)
        kind = AttachedRegressor if header["model"] == AttachedRegressor.__name__ else BLLRegressor
        return kind._restore(tensors, header, backbone)
    except Exception as error:  # a file may be whole and still hold anything
        raise files.ModelFileError(
            f"{path} does not fit this version of lastlayer or this backbone: {error}"
        ) from error


def _check_size(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """The network that the header describes must not be larger than the numbers that are there to fill it."""
    widths = [header["n_features_in"], *header["settings"]["hidden"]]
    wanted = sum(fan_in * fan_out for fan_in, fan_out in pairwise(widths))
    if not all(isinstance(width, int) for width in widths) or wanted > sum(t.numel() for t in tensors.values()):
        raise ValueError(f"a network of layers {widths} is not in it")
