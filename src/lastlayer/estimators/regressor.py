"""`BLLRegressor`, the main estimator, which follows scikit-learn's conventions."""

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from numpy import ndarray
from torch import Tensor, nn

from lastlayer._internal import checked, files
from lastlayer._internal.digests import digest_of
from lastlayer.data.copies import SHARE, distinct, whole_groups
from lastlayer.data.distributed import ProcessGroup
from lastlayer.data.observe import Observations
from lastlayer.data.parquet import ParquetSource
from lastlayer.data.rows import Rows
from lastlayer.data.sources import ArraySource, Source, Without
from lastlayer.data.validation import check_groups, seed_of, validated
from lastlayer.ensemble.crossfit import CrossFit, Fit, cross_fit
from lastlayer.ensemble.likelihood import chosen
from lastlayer.ensemble.run import Run, running
from lastlayer.ensemble.source import train_on_source
from lastlayer.ensemble.splits import folds_for
from lastlayer.errors import CopiesWarning, FlooredNoiseWarning, InputError, MissingTargetsWarning, check_choice
from lastlayer.estimators.base import LastLayerRegressor, with_gradients
from lastlayer.estimators.held_out import HeldOutRows
from lastlayer.estimators.stage import FeatureStage
from lastlayer.likelihoods import NAMES, Gaussian
from lastlayer.networks.architecture import Architecture
from lastlayer.networks.mlp import copied
from lastlayer.predictor import revisions
from lastlayer.predictor.codec import pack, unpack
from lastlayer.predictor.fitted import Fitted
from lastlayer.predictor.member import training_costs
from lastlayer.settings.resolve import check as check_parameters
from lastlayer.settings.resolve import options_of, resolve
from lastlayer.settings.types import DTYPES, Given, NoiseModel, Plan, Settings, Shape, TrainingOptions

STREAMED_ROWS = 200_000
"""Memory maps with more rows than this are streamed from disk by default."""
MAX_HELD_ROWS = 10_000
"""Largest number of rows of a memory map that are held out for calibration."""
FLOORED_NOISE = (
    "the network fits the targets without error: the noise was set to its floor, 1e-6 of their standard deviation; "
    "expect intervals that are too narrow, and give more data or a smaller network"
)
logger = logging.getLogger(__name__)


class BLLRegressor(LastLayerRegressor):
    """Neural network regression with exact Bayesian last layers, trained on the log marginal likelihood.

    By default, `fit` trains an ensemble of small networks, with weak and with stronger priors on their hidden weights
    and with raw and with piecewise-linear encoded inputs, together with a linear model, an additive model and a
    Gaussian process in random features. All are calibrated on held-out rows and regions, and their mixture weights the
    members at each point by their calibrated precision. Fitting 1,000 rows by 10 columns takes seconds on two cores.
    Most users need only `preset`, `calibration`, `noise`, `likelihood`, `backbone`, `device`, `n_jobs`, `progress` and
    `random_state`; "auto" is chosen from the size and kind of the data.

    Parameters
    ----------
    hidden : sequence of int or "auto", default "auto"
        Widths of the hidden layers. "auto": two layers of one unit per six distinct rows, at least 5 and at most 50.
    activation : str, default "auto"
        Activation of the hidden layers, one of `lastlayer.features.ACTIVATIONS`. "auto": "tanh"; above 5,000 rows,
        "silu" for those networks of a mixture that have raw inputs and the strong prior.
    input_skip : bool or "auto", default "auto"
        Whether to pass the inputs on to the last layer as well, so that the variance grows without bound outside
        the data. "auto": yes with the built-in network, no with a backbone.
    encoding : "auto", "raw", "piecewise" or "fourier", default "auto"
        Inputs of the networks: "raw", or "piecewise", a piecewise-linear encoding by quantiles, which learns steps
        and thresholds easily and is constant outside the data. "auto": a mixture of both. "fourier": a Gaussian process
        approximated by 256 random Fourier features, whose length scales maximise the evidence, in place of a network.
    backbone : torch.nn.Module, callable or None, default None
        A module that maps a batch to features (m, k), of which a copy is trained from its present weights, or a
        callable that returns a new one. Integers, such as ids, and inputs of more than two dimensions are passed to it
        unchanged.
    preset : "calibrated", "fast" or "evidence", default "calibrated"
        Meaning of "auto" in the other parameters. "fast": as "calibrated", with a third of the networks and fewer
        steps. "evidence": one network, no calibration, early stopping from 100 samples on.
    n_members : int or "auto", default "auto"
        Number of networks of each family. "auto": five, up to 20 below 250 samples, 10 above 5,000; 1 with a backbone
        or without calibration by curves. 1: a single network. A Gaussian process has one member, fitted to all rows.
    calibration : "auto", "alpha", splitter or None, default "auto"
        "auto": on rows held out at random, in blocks and in shells; with a backbone, on 15% of the rows. "alpha":
        Algorithm 1 on blocks, which adjusts alpha alone. A scikit-learn splitter such as TimeSeriesSplit: for
        trajectories, where random rows leak. None: no calibration, the variance is that of the evidence.
    hidden_prior : float or "auto", default "auto"
        Precision c of the Gaussian prior N(0, 1 / (c * fan_in)) on hidden weights; 0: no prior. "auto": 0.03 and 0.3
        in one mixture, 0.3 for a single network; 0 with a backbone or without calibration by curves.
    noise : "auto", "diagonal", "full" or "input", default "auto"
        "diagonal": one noise variance per output. "full": noise correlated between the outputs. "input": one that
        depends on the input, by a small network fitted to the errors of held-out rows (needs calibration and a table).
        "auto": "input" where that raises the density of other held-out rows, else "diagonal".
    likelihood : {"auto", "gaussian", "lognormal", "counts", "levels", "student"}, default "auto"
        Distribution of the targets. "lognormal": positive, their logarithm is modelled (`LogPrediction`). "counts":
        whole numbers from 0 on, modelled on the scale of their square root or logarithm; "levels": the values that y
        has in `fit`, at most 50, each with a probability (`DiscretePrediction`). "student": Student-t noise, for
        targets with outliers, which then hardly change the function; refuses `noise="full"`, `calibration="alpha"`,
        `remove` and `reestimate`. All but "gaussian" refuse `noise_std`, `observations`, and uses of a Gaussian such as
        `joint` and CasADi. "auto": of those that suit the targets, the one under which held-out targets are most
        probable, given a small model; Gaussian noise then gets the shape of held-out residuals (`calibration_.shape`),
        if that raises the density of others.
    max_epochs : int or "auto", default "auto"
        Largest number of passes over the data; networks of a mixture stop when held-out errors no longer fall. "auto":
        250, or as many as 250 to 800 mini-batch steps take; 500 with early stopping or a backbone, 60 with a source.
    batch_size : int, "auto" or None, default "auto"
        Rows per mini-batch, in float32 with a running average of the last layer, which is exact in the end. None: all
        rows in every step. "auto": 512 for tables of 1,000 samples and more, 1,024 above 5,000.
    training : TrainingOptions or None, default None
        Objective, learning rate, early stopping, checkpoints and the like.
    device : str, default "auto"
        A torch device. "auto": a GPU if one is available.
    dtype : "float64" or "float32", default "float64"
        Type of the networks; ensembles of built-in networks are trained in float32. Last layers are always float64.
    random_state : int, Generator, RandomState or None, default None
        Seed of initialisation and splits. None: a new seed in every fit, whatever the state of `numpy.random`.
    progress : bool, default False
        Whether to show a progress bar.
    n_jobs : int or None, default None
        Threads that `fit` may use in torch, BLAS and OpenMP. None: as many as torch uses (`torch.get_num_threads()`);
        -1: all cores; -2: all but one. Another number may change the last digits of the result.
    verbose : int, default 0
        1 shows the stages of a fit and its summary, 2 also settings and training runs: messages of the logger
        "lastlayer" (levels info and debug), on stderr unless `logging` is configured. 0 leaves the choice to `logging`.

    Attributes
    ----------
    fitted_ : Fitted
        The fitted model as a frozen value, from which all predictions are computed.
    settings_ : Settings
        The settings in use, with every "auto" resolved.
    members_ : tuple of Member
        Networks with their last layers, in standardised units; those of the family that scores best alone come first.
    calibration_ : Calibration or None
        Curves from affine cost to variance, the held-out points they were fitted to, and the expected LPD.
    alpha_star_, alpha_ : float
        Signal-to-noise ratio that maximises the evidence, and that in use for the variance; geometric means over the
        members of the best family.
    noise_std_ : ndarray of shape (q,)
        Noise standard deviation at the maximum of the evidence, before calibration, in target units; with
        `likelihood="lognormal"`, that of the logarithm. The mean over the same members.
    nlml_ : float
        Negative log marginal likelihood per sample, for standardised targets. The mean over the same members.
    history_ : dict
        Training history: one entry per epoch, and the reason for stopping.
    alpha_curve_ : AlphaCurve
        Validation LPD against alpha, after `tune_alpha`.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.random.default_rng(0).uniform(-2, 2, (60, 1))
    >>> model = BLLRegressor(preset="fast", max_epochs=5, random_state=0).fit(X, np.sin(2 * X[:, 0]))
    >>> mean, std = model.predict(X, return_std=True)
    """

    def __init__(
        self,
        hidden: Sequence[int] | str = "auto",
        *,
        activation: str = "auto",
        input_skip: bool | str = "auto",
        encoding: str = "auto",
        backbone: nn.Module | Callable[[], nn.Module] | None = None,
        preset: str = "calibrated",
        n_members: int | str = "auto",
        calibration: Any = "auto",
        hidden_prior: float | str = "auto",
        noise: NoiseModel = "auto",
        likelihood: str = "auto",
        max_epochs: int | str = "auto",
        batch_size: int | str | None = "auto",
        training: TrainingOptions | None = None,
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
        self.likelihood = likelihood
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.training = training
        self.device = device
        self.dtype = dtype
        self.random_state = random_state
        self.progress = progress
        self.n_jobs = n_jobs
        self.verbose = verbose

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
    ) -> "BLLRegressor":
        """Train the ensemble, compute exact last layers, and calibrate the variance on held-out rows.

        Parameters
        ----------
        X : array-like of shape (m, d)
            Inputs; with a backbone, an array of any number of dimensions. A memory map of more than 200,000 rows, or
            with a given `batch_size`, stays on disk, and one network is trained on it.
        y : array-like of shape (m,) or (m, q)
            Targets. Of several targets some may be missing (NaN): each output learns from the rows where it is known.
        sample_weight : array-like of shape (m,), default None
            Weight of each row; a weight of 2 counts as the row given twice.
        validation_data : tuple (X_val, y_val), default None
            Rows to calibrate on, in place of held-out rows of X; without calibration, rows for Algorithm 1.
        groups : array-like of shape (m,), default None
            A label per row. Rows with the same label, such as those of one patient or one run, are held out together. A
            splitter given as `calibration` is passed the labels unchanged.
        noise_std : float or array-like, default None
            Known standard deviation of the measurement noise: one number, one per row, or an array of the shape of y.
            It adds to the learned noise, which is the only noise that predictions include.
        observations : sequence of Observations, default ()
            Measurements of functionals of the function, such as derivatives (see `lastlayer.observe`); never held out.
        """
        self._forget()
        mapped = isinstance(X, np.memmap) and self.batch_size is not None and self.n_members in ("auto", 1)
        if mapped and (self.batch_size != "auto" or len(X) > STREAMED_ROWS):
            with ProcessGroup.current().guarded():
                return self._fit_mapped(X, y, sample_weight, validation_data, groups)
        seed = seed_of(self.random_state)
        nd, known = self.backbone is not None, {"noise_std": noise_std, "observations": observations}
        given = validated(self, X, y, sample_weight, groups=groups, nd=nd, partly=True, **known)
        by_splitter = not (self.calibration is None or isinstance(self.calibration, str))
        used = given if by_splitter else distinct(given)
        plain = self.calibration == "auto" and self.noise != "full" and self.training is None and not nd
        likelihood = Gaussian() if self.likelihood == "gaussian" else chosen(self.likelihood, used, plain=plain)
        if not isinstance(likelihood, Gaussian):
            likelihood.check_options(self.noise, self.calibration, options_of(self.training).bias_prior)
        rows = Rows.of(used, likelihood)
        shape = replace(rows.shape, validation=validation_data is not None)
        asked = {"likelihood": likelihood.name, "shape": self.likelihood == "auto" and isinstance(likelihood, Gaussian)}
        settings = resolve(self._parameters() | asked, shape, seed=seed)
        with running(self.n_jobs, self.verbose, self.progress, self.training) as run:
            run.digest = "" if run.checkpoint is None else digest_of(given.X, given.y, given.weight)
            _note(given, rows, settings)
            if likelihood.described:
                logger.info('likelihood "%s": %s', likelihood.name, likelihood.described)
            rows = rows.to(settings.place.device, DTYPES[settings.place.dtype])
            splits = folds_for(settings, rows, splitter=self.calibration, labels=groups)
            fits = cross_fit(rows, splits, Architecture(settings, self.backbone), run)
            with run.stage("calibration"):
                self._conclude(run, fits, settings, validation_data, y_ndim=given.y_ndim, likelihood=likelihood)
                place = np.arange(len(used.X)) if used.place is None else used.place
                self._held_out = self.fitted_, fits.folds, place
        return self

    @with_gradients
    def fit_source(self, source: Source, validation_data: tuple[Any, Any] | None = None) -> "BLLRegressor":
        """Train one network on a source of batches, in memory that does not grow with the number of rows.

        In a torch.distributed group, every process calls it with the same parameters and `validation_data`, and all of
        them get the same model; without a `random_state`, the seed is that of the first process.

        Parameters
        ----------
        source : Source
            Batches of rows (see `lastlayer.sources`).
        validation_data : tuple (X_val, y_val), default None
            Rows to calibrate on, which must not be in the source; without them the model is not calibrated.

        Raises
        ------
        MismatchError
            If processes of a group differ in their parameters or validation data; raised at the start.
        ProcessError
            If another process of the group has failed.
        """
        with ProcessGroup.current().guarded():
            self._fit_source(source, validation_data, self._common_seed())
        return self

    def _common_seed(self) -> int:
        """Seed of the first process, for all; a given `random_state` must be the same on all processes."""
        group, seed = ProcessGroup.current(), seed_of(self.random_state)
        group.agree({"random_state": "None" if self.random_state is None else f"seed {seed}"})
        return group.gather(seed)[0]

    def _fit_source(self, source: Source, validation_data: tuple[Any, Any] | None, seed: int) -> None:
        self._forget()
        held_out = None if validation_data is None else digest_of(*map(np.asarray, validation_data))
        ProcessGroup.current().agree({"digest of validation_data": held_out})
        settings = resolve(self._parameters(), Shape(None, validation_data is not None), seed=seed)
        architecture = Architecture(settings, self.backbone)
        with running(self.n_jobs, self.verbose, self.progress, self.training) as run:
            with architecture.seeded():
                fits = train_on_source(source, architecture, run)
            X = fits.rows.main.X
            settings = replace(settings, network=replace(settings.network, ids=not X.is_floating_point()))
            self.n_features_in_ = int(X.shape[1])  # scikit-learn's definition, also for images
            vars(self).pop("feature_names_in_", None)
            if isinstance(source, ParquetSource):
                self.feature_names_in_ = np.array(source.inputs, dtype=object)
            self._conclude(run, fits, settings, validation_data, y_ndim=min(2, fits.rows.main.T.shape[1]))

    @cached_property
    def held_out_(self) -> HeldOutRows | None:
        """After `fit`, training rows with the networks that were not trained on them, for unbiased scores of this fit.

        None if no network held out single rows. Neither saved with the model nor pickled.
        """
        return None if self._held_out is None else HeldOutRows.of(*self._held_out)

    history_: dict[str, Any]
    _held_out: tuple[Fitted, list[Fit], Int[ndarray, " n"]] | None = None
    """The model that `fit` made, and the arguments of `HeldOutRows.of`."""

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name not in ("held_out_", "_held_out")}

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> "BLLRegressor":
        """Fit on the first call, which needs enough rows to train networks; on later calls, `update` the last layers.

        `likelihood="auto"` is "gaussian" here: the targets to come are not known.

        Parameters
        ----------
        X, y : array-like of shape (m, d), array-like of shape (m,) or (m, q)
            Inputs and targets.
        sample_weight : array-like of shape (m,), default None
            Weight of each row.
        """
        if hasattr(self, "fitted_"):
            return self.update(X, y, sample_weight)
        asked = self.likelihood
        self.likelihood = "gaussian" if asked == "auto" else asked
        try:
            return self.fit(X, y, sample_weight)
        finally:
            self.likelihood = asked

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted model to one file (safetensors), which replaces an existing one only when it is complete.

        Parameters
        ----------
        path : str or path
            The file to write.
        """
        files.write(path, *self.packed())

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the contents of a model file."""
        kept = set(BLLRegressor._get_param_names()) - {"backbone", "random_state", "training"}
        parameters = {name: getattr(self, name) for name in sorted(kept)}
        parameters["hidden"] = self.hidden if self.hidden == "auto" else [int(width) for width in self.hidden]
        if not (isinstance(self.calibration, str) or self.calibration is None):
            parameters["calibration"] = "auto"  # a splitter is not needed after fitting
        options = None if self.training is None else vars(self.training) | {"checkpoint": None}
        about = {"model": type(self).__name__, "parameters": parameters, "training": options}
        tensors, header = pack(self._fitted())
        if self._stage is not None:  # some of its weights may be shared, which safetensors refuses
            tensors |= {f"stage.{name}": x.clone() for name, x in self._stage.network.state_dict().items()}
        return tensors, about | header | {"staged": self._stage is not None}

    def _parameters(self) -> dict[str, Any]:
        """Parameters that settings are resolved from, as `BLLRegressor` names them, also in subclasses."""
        return {name: getattr(self, name) for name in BLLRegressor._get_param_names()}

    def _forget(self) -> None:
        """Remove results of an earlier fit, so that a fit that fails leaves the estimator unfitted."""
        if self._stage is not None:
            raise InputError("an attached model is not trained: call lastlayer.attach(network, loader) again")
        for name in ("fitted_", "alpha_curve_", "held_out_", "_held_out"):
            vars(self).pop(name, None)

    def _conclude(
        self, run: Run, fits: CrossFit, settings: Settings, validation_data: tuple[Any, Any] | None, **known: Any
    ) -> None:
        """Store the members as a fitted value, calibrated as the settings say."""
        members, rows = fits.members(), fits.rows
        assert rows.scales is not None
        if any(member.posterior.noise_floored for member in members) and rows.main.varied:
            warnings.warn(FLOORED_NOISE, FlooredNoiseWarning, stacklevel=3)
        self.fitted_ = Fitted(
            inputs=rows.scales.inputs,
            targets=rows.scales.targets,
            members=tuple(members),
            sample_cost=training_costs(members, rows.main),
            settings=settings,
            n_features_in=self.n_features_in_,
            feature_names=tuple(getattr(self, "feature_names_in_", ())) or None,
            **known,
        )
        self.history_, plan = dict(vars(run.history)), settings.plan
        if validation_data is not None:
            (self.calibrate if plan.what == "curve" else self.tune_alpha)(*validation_data)
        elif plan.what == "curve":
            self.fitted_ = revisions.calibrate(self.fitted_, fits.held_out())
        elif plan.what == "alpha":
            self.fitted_, self.alpha_curve_ = revisions.tune_alpha_on_folds(self.fitted_, fits.alpha_folds())
        found = self.fitted_
        logger.info("fitted %d members; best alone: %s", len(found.members), found.members[0].family)
        logger.info("%s", "not calibrated" if found.calibration is None else found.calibration)

    def _fit_mapped(
        self, X: np.memmap, y: Any, sample_weight: Any, validation_data: tuple[Any, Any] | None, groups: Any
    ) -> "BLLRegressor":
        """Fit a memory map from disk; some random rows, or whole groups of them, are held out for calibration."""
        held, seed = np.empty(0, dtype=np.int64), self._common_seed()
        if validation_data is None and self.preset != "evidence" and self.calibration == "auto":
            fraction = options_of(self.training).validation_fraction
            rng = np.random.default_rng(seed)
            n = min(MAX_HELD_ROWS, round(fraction * len(X)))
            if groups is None:
                held = np.sort(rng.choice(len(X), n, replace=False))
            else:
                labels = check_groups(groups, len(X))
                held = whole_groups(labels, n, rng.permutation(labels.max() + 1))
            if not len(held):
                raise InputError("all rows belong to one group: give two or more groups, or omit `groups`")
            validation_data = np.asarray(X[held]), np.asarray(y[held])
        self._fit_source(Without(ArraySource(X, y, sample_weight), held), validation_data, seed)
        self.fitted_ = replace(self.fitted_, y_ndim=np.ndim(y))
        return self

    @classmethod
    def _restore(cls, tensors: dict[str, Tensor], header: dict[str, Any], backbone: nn.Module | None) -> "BLLRegressor":
        if header["model"] != cls.__name__:
            raise ValueError(f"it holds a {header['model']}")
        if backbone is None:  # before a network is built that the file has no numbers for
            widths = [header["about"]["n_features_in"], *header["settings"]["network"]["hidden"]]
            wanted = sum(fan_in * fan_out for fan_in, fan_out in pairwise(widths))
            if not all(isinstance(width, int) for width in widths) or wanted > sum(t.numel() for t in tensors.values()):
                raise ValueError(f"a network of layers {widths} is not in it")
        options = header["training"]
        training = None if options is None else checked.instance(TrainingOptions, options)
        model = cls(**header["parameters"], backbone=backbone, training=training)
        model.hidden = checked.typed("hidden", model.hidden, Literal["auto"] | tuple[int, ...])
        model.progress = checked.typed("progress", model.progress, bool)
        own = None if backbone is None else type(backbone)  # restoring trained members takes one module only
        check_parameters(model._parameters() | {"backbone": own})
        check_choice("likelihood", model.likelihood, NAMES)
        settings = Settings.from_json(header["settings"])
        if settings.place.device.startswith("cuda") and not torch.cuda.is_available():
            model.device, settings = "auto", replace(settings, place=replace(settings.place, device="cpu"))
        if header["staged"]:
            if backbone is None:
                raise ValueError("it needs the network: load(path, backbone=FeatureExtractor(network, layer))")
            model.backbone, backbone = copied(backbone), nn.Identity()
            weights = {name.removeprefix("stage."): x for name, x in tensors.items() if name.startswith("stage.")}
            model.backbone.load_state_dict(weights)
            model._stage = FeatureStage(model.backbone)
        model.fitted_ = fitted = unpack(tensors, header, Architecture(settings, backbone))
        model.n_features_in_ = fitted.n_features_in
        if fitted.feature_names is not None:
            model.feature_names_in_ = np.array(fitted.feature_names, dtype=object)
        return model


def _note(given: Given, rows: Rows, settings: Settings) -> None:
    """Log what is fitted and by which settings; warn of missing targets, and of copies where rows are held out."""
    shape, q = rows.main.X.shape, given.y.shape[1]
    n_rows, inputs = f"{shape[0]:,}", " x ".join(map(str, shape[1:]))
    place = settings.place.device
    logger.info("fit to %s rows, %s inputs, %d outputs on %s; calibration: %s", n_rows, inputs, q, place, settings.plan)
    logger.debug("settings:\n%s", settings)
    missing = np.isnan(given.y)
    if missing.any():
        each = ", ".join(f"{n:,}" for n in (~missing).sum(0).tolist())
        warnings.warn(
            f"{int(missing.sum()):,} of {missing.size:,} targets are missing: each output is fitted to the rows where "
            f"it is known ({each})",
            MissingTargetsWarning,
            stacklevel=4,
        )
    n_used = len(given.X) if given.weight is None else int((given.weight > 0).sum())
    n_groups = n_used if rows.copies is None else int(rows.copies.max()) + 1
    if settings.plan in (Plan("folds", "curve"), Plan("holdout", "curve")) and n_groups <= (1 - SHARE) * n_used:
        warnings.warn(
            f"{n_used} rows are equal or nearly equal to one of {n_groups}: copies are held out together, so "
            "that the model is evaluated on rows that are new to it",
            CopiesWarning,
            stacklevel=4,
        )


@with_gradients
def unpacked(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, Any], backbone: nn.Module | None
) -> BLLRegressor:
    """Restore a model from the contents of a file, see `BLLRegressor.packed`."""
    settings = header.get("settings")
    network = settings.get("network") if isinstance(settings, dict) else None
    if backbone is None and isinstance(network, dict) and network.get("backbone") is not None:
        raise InputError(
            f"{path} was fitted with a backbone: pass a module of the same architecture, load(path, backbone=...)"
        )
    try:
        return BLLRegressor._restore(tensors, header, backbone)
    except Exception as error:  # an intact file may still hold anything
        raise files.ModelFileError(
            f"{path} does not fit this version of lastlayer or this backbone: {error}"
        ) from error
