"""`attach`: an exact Bayesian last layer for a network that was trained elsewhere."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lastlayer._internal.digests import digest_of_parameters
from lastlayer._internal.work import CHUNK_ROWS
from lastlayer.bayes.evidence import by_evidence
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Statistics
from lastlayer.calibration.points import HeldOutPoints
from lastlayer.data.distributed import ProcessGroup
from lastlayer.data.rows import Points
from lastlayer.data.scaling import Standardizer
from lastlayer.data.sources import LoaderSource, Samples, Source, check_finite
from lastlayer.errors import FlooredNoiseWarning, InputError, check_choice
from lastlayer.estimators.base import with_gradients
from lastlayer.estimators.regressor import FLOORED_NOISE, BLLRegressor
from lastlayer.estimators.stage import FeatureStage
from lastlayer.networks.feature_extractor import FeatureExtractor, last_linear
from lastlayer.networks.mlp import copied
from lastlayer.networks.structured import moved, named
from lastlayer.predictor import revisions
from lastlayer.predictor.fitted import Fitted
from lastlayer.predictor.member import Member, cost_quantiles
from lastlayer.settings.resolve import SOURCE_BATCH, resolve
from lastlayer.settings.types import (
    BIAS_PRIORS,
    DTYPES,
    NETWORK,
    NOISE_STRUCTURES,
    BiasPrior,
    NoiseStructure,
    Shape,
    TrainingOptions,
)
from lastlayer.training import TrainingHistory

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@with_gradients
def attach(
    network: nn.Module,
    loader: Iterable[Any] | Source,
    *,
    layer: str | None = "auto",
    calibration: Iterable[Any] | Source | None = None,
    noise: NoiseStructure = "diagonal",
    bias_prior: BiasPrior = "flat",
    process_group: ProcessGroup | None = None,
) -> BLLRegressor:
    """Put an exact Bayesian last layer on the features of a trained network, without training.

    One pass over the loader accumulates the statistics; alpha, noise and weights follow in closed form at the maximum
    of the evidence. The network is copied, and receives the inputs as the loader yields them, in evaluation mode:
    floating-point numbers in the network's dtype, ids and masks unchanged.

    If a sample is a single tensor of numbers with one row of features, the result is a `BLLRegressor` with the network
    as its backbone. Otherwise X is whatever the network is called with, each position that the last layer is applied
    to, such as a token or a pixel, is a row, and `predict` returns arrays shaped like the targets; `predictive`,
    `joint`, `sample_y`, `extrapolation` and `features` return one row per position. `fitted_` is then a model of the
    features, a table: for ONNX, CasADi, `OnlineModel` and functionals, use `model.features(X)`.

    Parameters
    ----------
    network : torch.nn.Module
        Called with X, with the tensors of a tuple X as positional arguments, or with those of a dictionary X by name.
    loader : iterable of batches, or Source
        Batches (X, y) or (X, y, weight); dictionaries with the targets as "labels"; or a source of them (see
        `lastlayer.sources`). Where the layer is applied to many positions per sample, the targets have one entry per
        position. NaN, -100 in integer targets, or a 0 in the input "attention_mask" marks one without a target.
    layer : str or None, default "auto"
        The linear layer, or convolution with kernels of size 1, to replace: its name, as in `network.named_modules()`.
        "auto": the one evaluated last. None: the network has no such layer and returns the features.
    calibration : iterable of batches, or Source, default None
        Rows that the network was not trained on, to fit the curve from affine cost to variance.
    noise, bias_prior : str, str
        As in `BLLRegressor`: "diagonal" or "full"; as in `TrainingOptions`.
    process_group : ProcessGroup, default None
        Processes that call `attach` together, each with a loader for its share of the rows; all get one model of all
        rows. None: those of the current torch.distributed group. `lastlayer.distributed.ONE`: this process alone.
        Buffers, such as those of batch norm, are taken from the first process.

    Raises
    ------
    MismatchError
        If network or columns differ between processes.

    Examples
    --------
    >>> import torch
    >>> X = torch.linspace(-1, 1, 60)[:, None]
    >>> network = torch.nn.Sequential(torch.nn.Linear(1, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
    >>> model = attach(network, loader=[(X, X[:, 0] ** 2 + 0.1 * torch.sin(50 * X[:, 0]))])
    """
    process_group, network = process_group or ProcessGroup.current(), _unwrapped(network)
    with process_group.guarded():
        check_choice("noise", noise, NOISE_STRUCTURES)
        check_choice("bias_prior", bias_prior, BIAS_PRIORS)
        place = next(network.parameters(), torch.zeros(()))
        samples = _samples(loader, place, process_group)
        first = next(samples, None)
        if first is None:
            raise InputError("the loader gave no batch: it must yield at least one (X, y)")
        stage = FeatureStage(_extractor(network, layer, first))
        phi_tilde = stage.features(first.inputs)
        X, is_table = phi_tilde.flatten(0, -2), False
        if isinstance(first.inputs, Tensor) and first.inputs.is_floating_point() and first.inputs.dim() > 1:
            is_table = phi_tilde.shape[:-1] == first.inputs.shape[:1]
            X = first.inputs if is_table else X
        inputs = {name: str(x.dtype) for name, x in named(first.inputs).items()}
        taken = stage.network.layer if isinstance(stage.network, FeatureExtractor) else None
        process_group.agree(
            {"noise": noise, "bias_prior": bias_prior, "with calibration": calibration is not None}
            | {"layer": taken, "dtype": str(stage.place.dtype), "inputs": inputs}
            | {"outputs": stage.labelled(first).T.shape[1], "columns of X": X.shape[1]}
            | {"digest of the network's weights": digest_of_parameters(stage.network, buffers=False)}
        )
        process_group.broadcast_state(stage.network)  # buffers, such as those of batch norm, may differ
        rows = _rows(stage, chain([first], samples))
        exact, targets, sample_cost = _last_layer(rows, process_group, noise=noise, bias_prior=bias_prior)
        model = BLLRegressor(
            backbone=stage.network,
            n_members=1,
            calibration=None if calibration is None else "auto",
            hidden_prior=0.0,
            noise=noise,
            training=TrainingOptions(bias_prior=bias_prior),
            max_epochs=0,
            device=str(place.device),
            dtype=_NAMES[place.dtype],
        )
        model.n_features_in_, model.history_ = X.shape[1], vars(TrainingHistory())
        model._stage = None if is_table else stage
        unit = Standardizer(torch.zeros(X.shape[1]).double(), torch.ones(X.shape[1]).double())
        fitted = Fitted(
            inputs=unit if X.dim() == 2 else None,
            targets=Standardizer(targets.mean.cpu(), targets.scale.cpu()),
            members=(Member(stage.network if is_table else nn.Identity(), exact),),
            sample_cost=sample_cost,
            settings=resolve(model.get_params(deep=False), Shape(None, calibration is not None), seed=0),
            n_features_in=X.shape[1],
            y_ndim=2 if first.y.dim() == phi_tilde.dim() and (not is_table or first.y.shape[1] > 1) else 1,
        )
        if calibration is not None:
            rows = _rows(stage, _samples(calibration, place, process_group))
            fitted = revisions.calibrate(fitted, _held_out(rows, exact, targets, process_group))
        model.fitted_ = fitted
        return model


def _last_layer(
    rows: Iterable[Points], process_group: ProcessGroup, *, noise: NoiseStructure, bias_prior: BiasPrior
) -> tuple[Posterior, Standardizer, Tensor]:
    """Compute the last layer of the rows of all processes, the scaler of the targets, and quantiles of the costs."""
    some: list[Tensor] = []

    def features() -> Iterator[tuple[Tensor, ...]]:
        for part in rows:
            if sum(len(each) for each in some) < CHUNK_ROWS:
                some.append(part.X)
            yield (part.X, part.T) if part.weight is None else (part.X, part.T, part.weight)

    raw = process_group.reduce(Statistics.from_batches(features()))
    k = raw.n_linear
    var = raw.scatter.diagonal()[k:] / raw.count
    targets = Standardizer.of_moments(raw.mean[k:], var, int(raw.count))
    standard = raw.with_targets(targets.mean, targets.scale)
    (exact,) = by_evidence([standard], noise=noise, bias_prior=bias_prior)
    if exact.noise_floored and bool((var > 0).all()):
        warnings.warn(FLOORED_NOISE, FlooredNoiseWarning, stacklevel=4)
    cost = torch.cat([exact.variance_ratio(Phi) for Phi in some])
    return exact, targets, cost_quantiles(torch.cat(process_group.gather(cost.cpu()))[None])


def _held_out(
    rows: Iterable[Points], exact: Posterior, targets: Standardizer, process_group: ProcessGroup
) -> HeldOutPoints:
    """Held-out rows of all processes as points to calibrate on; their inputs, which may be large, are not kept."""
    points = []
    for part in rows:
        labels = Points.of(part.T[:, :0], targets.forward(part.T), part.weight)
        points.append(HeldOutPoints.by(exact, part.X, labels, "validation", NETWORK))
    return HeldOutPoints.joined([each for theirs in process_group.gather(points) for each in theirs])


def _unwrapped(network: nn.Module) -> nn.Module:
    """The network without the wrappers of data-parallel training and compilation."""
    if isinstance(network, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return _unwrapped(network.module)
    inner = getattr(network, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else network


def _extractor(network: nn.Module, layer: str | None, first: Samples) -> nn.Module:
    """A copy of the network that returns the features, tested on the first batch."""
    strange = {p.dtype for p in network.parameters()} - _NAMES.keys()
    if strange:
        raise InputError(f"the network has weights of {', '.join(map(str, strange))}: convert it, network.float()")
    network = copied(network)
    if layer is None:
        return network
    if layer != "auto":
        return FeatureExtractor(network, layer)
    extractor = FeatureExtractor(network, last_linear(network, first.inputs))
    q = FeatureStage(extractor).labelled(first).T.shape[1]
    if extractor.n_outputs != q:
        raise InputError(
            f"the linear layer evaluated last, {extractor.layer!r}, gives {extractor.n_outputs} numbers, and the "
            f"targets have {q}: name the output layer, layer=..., or give layer=None if the network returns the "
            "features"
        )
    return extractor


def _samples(loader: Iterable[Any] | Source, place: Tensor, process_group: ProcessGroup) -> Iterator[Samples]:
    """Batches with inputs converted to the network's dtype and device."""
    if isinstance(loader, Source) and not isinstance(loader, LoaderSource):
        batches = loader.batches(SOURCE_BATCH, process_group=process_group)
        samples: Iterator[Samples] = (Samples(batch.X, batch.T, batch.weight) for batch in batches)
    else:
        samples = (loader if isinstance(loader, LoaderSource) else LoaderSource(loader)).samples()
    return (replace(some, inputs=moved(some.inputs, place)) for some in samples)


def _rows(stage: FeatureStage, samples: Iterable[Samples]) -> Iterator[Points]:
    """Rows with affine features as inputs, one per position that has a target; both in float64."""
    seen = 0
    for some in samples:
        check_finite(named(some.inputs), seen)
        rows = stage.labelled(some)
        check_finite({"y": rows.T}, seen)
        seen += len(some)
        if len(rows.X):
            yield replace(rows, X=affine_features(rows.X).double())
