"""`attach`: the exact last layer for a network that was trained elsewhere, by whatever loop."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lastlayer.calibration import HeldOutPoints
from lastlayer.digests import digest_of_parameters
from lastlayer.distributed import ProcessGroup
from lastlayer.errors import InputError, check_choice
from lastlayer.estimators.attached import AttachedRegressor, features_at, labelled_rows, outputs_axis
from lastlayer.estimators.base import with_gradients
from lastlayer.estimators.notes import warn_of_floored_noise
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.features import affine_features
from lastlayer.networks.feature_extractor import FeatureExtractor, last_linear
from lastlayer.networks.mlp import copied
from lastlayer.networks.structured import moved, named
from lastlayer.parameters import DTYPES
from lastlayer.predictor import revisions
from lastlayer.predictor.fitted import Fitted, cost_quantiles
from lastlayer.predictor.module import Member
from lastlayer.scaling import Standardizer
from lastlayer.settings import SOURCE_BATCH, DataShape, resolve
from lastlayer.sources import LoaderSource, Samples, Source, check_finite
from lastlayer.statistics import CHUNK_ROWS, Statistics
from lastlayer.training import Data, TrainingHistory, last_layer
from lastlayer.types import BIAS_PRIORS, NETWORK, NOISE_STRUCTURES, BiasPrior, NoiseStructure

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
    """The exact Bayesian last layer on the features of a trained network, as a fitted model: nothing is trained.

    One pass over the loader sums up the statistics; alpha, noise and weights follow in closed form at the maximum of
    the evidence. The network, which is copied and left as it is, sees the inputs as the loader gives them, in
    evaluation mode: floating-point numbers in its own type, ids and masks as they are.

    Parameters
    ----------
    network : torch.nn.Module
        Called with X, with the tensors of a tuple X in their order, or with those of a dictionary X by name.
    loader : iterable of batches, or Source
        Batches (X, y) or (X, y, weight); dictionaries with the targets as "labels"; or a source of them (see
        lastlayer.sources, where `LoaderSource` takes other names). Where the layer is applied to many positions per
        sample, such as tokens, the targets have as many, and each is a row: NaN, -100 among integers, or a 0 in the
        input "attention_mask" says that a position has no target.
    layer : str or None, default "auto"
        The linear layer, or convolution with kernels of size 1, that the new one stands in for. "auto": the one
        evaluated last. Or its name, as in `network.named_modules()`. None: the network has no such layer, what it
        returns are the features.
    calibration : iterable of batches, or Source, optional
        Rows that the network was not trained on; they fit the curve from affine cost to variance.
    noise, bias_prior : str
        As in `BLLRegressor`.
    process_group : ProcessGroup, optional
        Processes that call `attach` together, each with a loader of its own rows: all get one model of all rows.
        None: those of the present torch.distributed group. `lastlayer.distributed.ONE`: this process alone, whatever
        the others do. All have the same network and columns, or they are refused (`MismatchError`); buffers, such as
        those of batch norm, are the first process's.

    Returns
    -------
    BLLRegressor
        Of inputs other than one floating-point tensor, or with several rows per sample, an `AttachedRegressor`.

    Examples
    --------
    >>> model = lastlayer.attach(network, loader, calibration=held_out)  # doctest: +SKIP
    >>> mean, std = model.predict(X, return_std=True)  # doctest: +SKIP
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
        raise InputError("the loader gave no batch: at least one of (X, y) is needed")
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
    process_group.broadcast_state(extractor)  # buffers, such as those of batch norm, are a process's own
    some: list[Tensor] = []

    def features() -> Iterator[tuple[Tensor, ...]]:
        for rows in _rows(extractor, chain([first], samples)):
            if sum(len(each) for each in some) < CHUNK_ROWS:
                some.append(rows.X)
            yield (rows.X, rows.T) if rows.weight is None else (rows.X, rows.T, rows.weight)

    raw = process_group.reduce(Statistics.from_batches(features()))
    var = raw.target_scatter.diagonal() / raw.count
    targets = Standardizer.of_moments(raw.target_mean, var, int(raw.count))
    exact = last_layer(raw.with_targets(targets), noise=noise, bias_prior=bias_prior)
    warn_of_floored_noise([Member(extractor, exact)], varied=bool((var > 0).all()))
    cost = torch.cat([exact.posterior.variance_ratio(Phi) for Phi in some])
    model = form.kind(
        backbone=extractor,
        n_members=1,
        calibration=None if calibration is None else "auto",
        hidden_prior=0.0,
        noise=noise,
        bias_prior=bias_prior,
        max_epochs=0,
        device=str(place.device),
        dtype=_NAMES[place.dtype],
    )
    model.n_features_in_, model.training_ = form.n_inputs, TrainingHistory()
    fitted = Fitted(
        inputs=form.scaler,
        targets=targets.to("cpu"),
        members=(Member(extractor if form.kind is BLLRegressor else nn.Identity(), exact),),
        log_alphas=(float(exact.posterior.log_alpha),),
        sample_cost=cost_quantiles(torch.cat(process_group.gather(cost.cpu()))[None]),
        settings=resolve(model.get_params(deep=False), DataShape(None, calibration is not None), seed=0),
        n_features_in=form.n_inputs,
        y_ndim=form.y_ndim,
    )
    if calibration is not None:
        points = []
        for rows in _rows(extractor, _samples(calibration, place, process_group)):
            # inputs, which may be large, are not kept
            held_out = Data(rows.T[:, :0], targets.forward(rows.T), rows.weight)
            points.append(HeldOutPoints.by(exact, rows.X, held_out, "validation", NETWORK))
        joined = HeldOutPoints.joined([each for theirs in process_group.gather(points) for each in theirs])
        fitted = revisions.calibrate(fitted, joined)
    model.fitted_ = fitted
    return model


@dataclass(frozen=True)
class _Form:
    """What kind of model the first batch asks for."""

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
    """That changes nothing."""
    return Standardizer(torch.zeros(d, dtype=torch.float64), torch.ones(d, dtype=torch.float64))


def _unwrapped(network: nn.Module) -> nn.Module:
    """Without what processes and compilers have wrapped it in."""
    if isinstance(network, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return _unwrapped(network.module)
    inner = getattr(network, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else network


def _extractor(network: nn.Module, layer: str | None, first: Samples) -> nn.Module:
    """A copy that gives the features, tried on the first batch."""
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
            f"targets have {q}: name the output layer, layer=..., or give layer=None if what the network returns are "
            "the features"
        )
    return extractor


def _samples(loader: Iterable[Any] | Source, place: Tensor, process_group: ProcessGroup) -> Iterator[Samples]:
    """Batches as the network takes them, where it is."""
    if isinstance(loader, Source) and not isinstance(loader, LoaderSource):
        batches = loader.batches(SOURCE_BATCH, process_group=process_group)
        samples: Iterator[Samples] = (Samples(batch.X, batch.T, batch.weight) for batch in batches)
    else:
        samples = (loader if isinstance(loader, LoaderSource) else LoaderSource(loader)).samples()
    return (replace(some, inputs=moved(some.inputs, place)) for some in samples)


def _rows(extractor: nn.Module, samples: Iterable[Samples]) -> Iterator[Data]:
    """Affine features in place of inputs, one row per position that has targets; both in float64."""
    seen = 0
    for some in samples:
        check_finite(named(some.inputs), seen)
        rows = _labelled(extractor, some)
        check_finite({"y": rows.T}, seen)
        seen += len(some)
        if len(rows.X):
            yield replace(rows, X=affine_features(rows.X).double())


def _labelled(extractor: nn.Module, samples: Samples) -> Data:
    return labelled_rows(_features(extractor, samples), samples, axis=outputs_axis(extractor))


def _features(extractor: nn.Module, samples: Samples) -> Tensor:
    with torch.no_grad():
        return features_at(extractor, samples.inputs)
