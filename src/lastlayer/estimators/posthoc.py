"""`attach`: an exact Bayesian last layer for a network that was trained elsewhere."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lastlayer._internal.chunks import CHUNK_ROWS
from lastlayer._internal.digests import digest_of_parameters
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.maximum import by_evidence
from lastlayer.bayes.statistics import Statistics
from lastlayer.calibration.points import HeldOutPoints
from lastlayer.data.distributed import ProcessGroup
from lastlayer.data.rows import Points
from lastlayer.data.scaling import Standardizer
from lastlayer.data.sources import LoaderSource, Samples, Source, check_finite
from lastlayer.errors import InputError, check_choice
from lastlayer.estimators.attached import AttachedRegressor, features_at, labelled_rows, outputs_axis
from lastlayer.estimators.base import with_gradients
from lastlayer.estimators.notes import warn_of_floored_noise
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.networks.feature_extractor import FeatureExtractor, last_linear
from lastlayer.networks.mlp import copied
from lastlayer.networks.structured import moved, named
from lastlayer.predictor import revisions
from lastlayer.predictor.fitted import Fitted, cost_quantiles
from lastlayer.predictor.module import Member
from lastlayer.settings.parameters import DTYPES, TrainingOptions
from lastlayer.settings.resolve import SOURCE_BATCH, DataShape, resolve
from lastlayer.settings.types import BIAS_PRIORS, NETWORK, NOISE_STRUCTURES, BiasPrior, NoiseStructure
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
    of the evidence. The network is copied and not changed. It receives the inputs as the loader yields them, in
    evaluation mode: floating-point numbers in the network's dtype, ids and masks unchanged.

    Parameters
    ----------
    network : torch.nn.Module
        Called with X, with the tensors of a tuple X as positional arguments, or with those of a dictionary X by name.
    loader : iterable of batches, or Source
        Batches (X, y) or (X, y, weight); dictionaries with the targets as "labels"; or a source of them (see
        lastlayer.sources, where `LoaderSource` takes other names). Where the layer is applied to many positions per
        sample, such as tokens, the targets have one entry per position, and each position is a row. NaN, -100 in
        integer targets, or a 0 in the input "attention_mask" marks a position without a target.
    layer : str or None, default "auto"
        The linear layer, or convolution with kernels of size 1, to replace: its name, as in `network.named_modules()`.
        "auto": the one evaluated last. None: the network has no such layer and returns the features.
    calibration : iterable of batches, or Source, default None
        Rows that the network was not trained on, to fit the curve from affine cost to variance.
    noise : {"diagonal", "full"}, default "diagonal"
        As in `BLLRegressor`.
    bias_prior : str, default "flat"
        As in `BLLRegressor`.
    process_group : ProcessGroup, default None
        Processes that call `attach` together, each with a loader for its share of the rows; all get one model of all
        rows. None: those of the current torch.distributed group. `lastlayer.distributed.ONE`: this process alone.
        Network and columns must be the same on all processes; buffers, such as those of batch norm, are taken from the
        first process.

    Raises
    ------
    MismatchError
        If network or columns differ between processes.

    Examples
    --------
    >>> import torch
    >>> import lastlayer
    >>> from torch import nn
    >>> X = torch.linspace(-1, 1, 60)[:, None]
    >>> loader = [(X, X[:, 0] ** 2 + 0.1 * torch.sin(50 * X[:, 0]))]
    >>> network = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))  # trained elsewhere
    >>> model = lastlayer.attach(network, loader)
    >>> mean, std = model.predict([[0.5]], return_std=True)
    """
    process_group = process_group or ProcessGroup.current()
    with process_group.guarded():
        return _attached(_unwrapped(network), loader, layer, calibration, noise, bias_prior, process_group)


def _attached(
    network: nn.Module,
    loader: Iterable[Any] | Source,
    layer: str | None,
    calibration: Iterable[Any] | Source | None,
    noise: NoiseStructure,
    bias_prior: BiasPrior,
    process_group: ProcessGroup,
) -> BLLRegressor:
    check_choice("noise", noise, NOISE_STRUCTURES)
    check_choice("bias_prior", bias_prior, BIAS_PRIORS)
    place = next(network.parameters(), torch.zeros(()))
    samples = _samples(loader, place, process_group)
    first = next(samples, None)
    if first is None:
        raise InputError("the loader gave no batch: it must yield at least one (X, y)")
    extractor = _extractor(network, layer, first)
    form = _Form.of(extractor, first)
    process_group.agree(
        {
            "noise": noise,
            "bias_prior": bias_prior,
            "with calibration": calibration is not None,
            "layer": getattr(extractor, "layer", None),
            "dtype": str(place.dtype),
            "inputs": {name: str(x.dtype) for name, x in named(first.inputs).items()},
            "columns of X": form.n_inputs,
            "outputs": _labelled(extractor, first).T.shape[1],
            "digest of the network's weights": digest_of_parameters(extractor, buffers=False),
        }
    )
    process_group.broadcast_state(extractor)  # buffers, such as those of batch norm, may differ between processes
    some: list[Tensor] = []

    def features() -> Iterator[tuple[Tensor, ...]]:
        for rows in _rows(extractor, chain([first], samples)):
            if sum(len(each) for each in some) < CHUNK_ROWS:
                some.append(rows.X)
            yield (rows.X, rows.T) if rows.weight is None else (rows.X, rows.T, rows.weight)

    raw = process_group.reduce(Statistics.from_batches(features()))
    var = raw.target_scatter.diagonal() / raw.count
    targets = Standardizer.of_moments(raw.target_mean, var, int(raw.count))
    standard = raw.with_targets(targets.mean, targets.scale)
    (exact,) = by_evidence([standard], noise=noise, bias_prior=bias_prior)
    warn_of_floored_noise([Member(extractor, exact)], varied=bool((var > 0).all()))
    cost = torch.cat([exact.variance_ratio(Phi) for Phi in some])
    model = form.kind(
        backbone=extractor,
        n_members=1,
        calibration=None if calibration is None else "auto",
        hidden_prior=0.0,
        noise=noise,
        training=TrainingOptions(bias_prior=bias_prior),
        max_epochs=0,
        device=str(place.device),
        dtype=_NAMES[place.dtype],
    )
    model.n_features_in_, model.training_ = form.n_inputs, TrainingHistory()
    fitted = Fitted(
        inputs=form.scaler,
        targets=targets.to("cpu"),
        members=(Member(extractor if form.kind is BLLRegressor else nn.Identity(), exact),),
        log_alphas=(float(exact.log_alpha),),
        sample_cost=cost_quantiles(torch.cat(process_group.gather(cost.cpu()))[None]),
        settings=resolve(model.get_params(deep=False), DataShape(None, calibration is not None), seed=0),
        n_features_in=form.n_inputs,
        y_ndim=form.y_ndim,
    )
    if calibration is not None:
        points = []
        for rows in _rows(extractor, _samples(calibration, place, process_group)):
            # inputs, which may be large, are not kept
            held_out = Points.of(rows.T[:, :0], targets.forward(rows.T), rows.weight)
            points.append(HeldOutPoints.by(exact, rows.X, held_out, "validation", NETWORK))
        joined = HeldOutPoints.joined([each for theirs in process_group.gather(points) for each in theirs])
        fitted = revisions.calibrate(fitted, joined)
    model.fitted_ = fitted
    return model


@dataclass(frozen=True)
class _Form:
    """The kind of model that the first batch requires."""

    kind: type[BLLRegressor]
    n_inputs: int
    scaler: Standardizer | None
    y_ndim: int

    @classmethod
    def of(cls, extractor: nn.Module, first: Samples) -> "_Form":
        X, phi_tilde = first.inputs, _features(extractor, first)
        if isinstance(X, Tensor) and X.is_floating_point() and X.dim() > 1 and phi_tilde.shape[:-1] == X.shape[:1]:
            d, q = X.shape[1], 1 if first.y.dim() == 1 else first.y.shape[1]
            return cls(BLLRegressor, d, _unit(d) if X.dim() == 2 else None, min(q, 2))
        k = phi_tilde.shape[-1]
        return cls(AttachedRegressor, k, _unit(k), 2 if first.y.dim() == phi_tilde.dim() else 1)


def _unit(d: int) -> Standardizer:
    """A scaler that changes nothing."""
    return Standardizer(torch.zeros(d, dtype=torch.float64), torch.ones(d, dtype=torch.float64))


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
    q = _labelled(extractor, first).T.shape[1]
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


def _rows(extractor: nn.Module, samples: Iterable[Samples]) -> Iterator[Points]:
    """Rows with affine features as inputs, one per position that has a target; both in float64."""
    seen = 0
    for some in samples:
        check_finite(named(some.inputs), seen)
        rows = _labelled(extractor, some)
        check_finite({"y": rows.T}, seen)
        seen += len(some)
        if len(rows.X):
            yield replace(rows, X=affine_features(rows.X).double())


def _labelled(extractor: nn.Module, samples: Samples) -> Points:
    return labelled_rows(_features(extractor, samples), samples, axis=outputs_axis(extractor))


def _features(extractor: nn.Module, samples: Samples) -> Tensor:
    with torch.no_grad():
        return features_at(extractor, samples.inputs)
