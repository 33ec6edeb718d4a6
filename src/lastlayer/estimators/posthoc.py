"""`attach`: the exact last layer for a network that was trained elsewhere, by whatever loop."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.calibration import HeldOutPoints
from lastlayer.distributed import ProcessGroup
from lastlayer.errors import InputError, check_choice
from lastlayer.estimators.notes import warn_of_floored_noise
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.features import affine_features
from lastlayer.networks.feature_extractor import FeatureExtractor, last_linear
from lastlayer.networks.mlp import copied, features_of
from lastlayer.parameters import DTYPES
from lastlayer.predictor import revisions
from lastlayer.predictor.fitted import Fitted, cost_quantiles
from lastlayer.predictor.module import Member
from lastlayer.scaling import Standardizer
from lastlayer.settings import SOURCE_BATCH, DataShape, resolve
from lastlayer.sources import LoaderSource, Source, check_finite_batch
from lastlayer.statistics import CHUNK_ROWS, Statistics
from lastlayer.training import Data, TrainingHistory, last_layer
from lastlayer.types import BIAS_PRIORS, NETWORK, NOISE_STRUCTURES, BiasPrior, NoiseStructure

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def attach(
    network: nn.Module,
    loader: Iterable[Any] | Source,
    *,
    layer: str | None = "auto",
    calibration: Iterable[Any] | Source | None = None,
    noise: NoiseStructure = "diagonal",
    bias_prior: BiasPrior = "flat",
) -> BLLRegressor:
    """The exact Bayesian last layer on the features of a trained network, as a fitted model: nothing is trained.

    One pass over the loader sums up the statistics; alpha, noise and weights follow in closed form at the maximum of
    the evidence. The network, which is copied and left as it is, sees the inputs as the loader gives them, in
    evaluation mode. Every process of a torch.distributed group may bring a loader of its own rows: all get one model.

    Parameters
    ----------
    loader : batches (X, y) or (X, y, weight), or a source of them (see lastlayer.sources).
    layer : the linear layer that the new one stands in for. "auto": the one evaluated last. Or its name, as in
        `network.named_modules()`. None: the network has no such layer, what it returns are the features.
    calibration : batches of rows that the network was not trained on; they fit the curve from affine cost to variance.
    noise, bias_prior : as in `BLLRegressor`.
    """
    check_choice("noise", noise, NOISE_STRUCTURES)
    check_choice("bias_prior", bias_prior, BIAS_PRIORS)
    network, process_group = _unwrapped(network), ProcessGroup.current()
    place = next(network.parameters(), torch.zeros(()))
    batches = _batches(loader, place, process_group)
    first = next(batches, None)
    if first is None:
        raise InputError("the loader gave no batch: at least one of (X, y) is needed")
    extractor = _extractor(network, layer, first)
    some: list[Tensor] = []

    def features() -> Iterator[tuple[Tensor, ...]]:
        for batch in chain([first], batches):
            Phi = _features(extractor, batch)
            if sum(len(each) for each in some) < CHUNK_ROWS:
                some.append(Phi)
            yield (Phi, batch.T) if batch.weight is None else (Phi, batch.T, batch.weight)

    raw = process_group.reduce(Statistics.from_batches(features()))
    var = raw.target_scatter.diagonal() / raw.count
    targets = Standardizer.of_moments(raw.target_mean, var, int(raw.count))
    exact = last_layer(raw.with_targets(targets), noise=noise, bias_prior=bias_prior)
    warn_of_floored_noise([Member(extractor, exact)], varied=bool((var > 0).all()))
    _, d, *more = first.X.shape
    model = BLLRegressor(
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
    unit = Standardizer(torch.zeros(d, dtype=torch.float64), torch.ones(d, dtype=torch.float64))
    cost = torch.cat([exact.posterior.variance_ratio(Phi) for Phi in some])
    model.n_features_in_, model.training_ = d, TrainingHistory()
    fitted = Fitted(
        inputs=None if more else unit,
        targets=targets.to("cpu"),
        members=(Member(extractor, exact),),
        log_alphas=(float(exact.posterior.log_alpha),),
        sample_cost=cost_quantiles(torch.cat(process_group.gather(cost.cpu()))[None]),
        settings=resolve(model.get_params(deep=False), DataShape(None, calibration is not None), seed=0),
        n_features_in=d,
        y_ndim=min(len(var), 2),
    )
    if calibration is not None:
        points = []
        for batch in _batches(calibration, place, process_group):
            # inputs, which may be large, are not kept
            rows = Data(batch.T[:, :0], targets.forward(batch.T), batch.weight)
            points.append(HeldOutPoints.by(exact, _features(extractor, batch), rows, "validation", NETWORK))
        joined = HeldOutPoints.joined([each for theirs in process_group.gather(points) for each in theirs])
        fitted = revisions.calibrate(fitted, joined)
    model.fitted_ = fitted
    return model


def _unwrapped(network: nn.Module) -> nn.Module:
    """Without what processes and compilers have wrapped it in."""
    if isinstance(network, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return _unwrapped(network.module)
    inner = getattr(network, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else network


def _extractor(network: nn.Module, layer: str | None, first: Data) -> nn.Module:
    """A copy that gives the features, tried on the first batch."""
    strange = {p.dtype for p in network.parameters()} - _NAMES.keys()
    if strange:
        raise InputError(f"the network has weights of {', '.join(map(str, strange))}: convert it, network.float()")
    network = copied(network)
    if layer is None:
        return network
    return FeatureExtractor(network, last_linear(network, first.X, first.T.shape[1]) if layer == "auto" else layer)


def _features(extractor: nn.Module, batch: Data) -> Float[Tensor, "m p"]:
    with torch.no_grad():
        return affine_features(features_of(extractor, batch.X)).double()


def _batches(loader: Iterable[Any] | Source, place: Tensor, process_group: ProcessGroup) -> Iterator[Data]:
    """Inputs as the network takes them, targets in float64, both where the network is."""
    source = loader if isinstance(loader, Source) else LoaderSource(loader)
    seen = 0
    for batch in source.batches(SOURCE_BATCH, process_group=process_group):
        check_finite_batch(batch, seen)
        seen += len(batch.X)
        weight = None if batch.weight is None else batch.weight.to(place.device)
        yield Data(batch.X.to(place), batch.T.to(place.device).double(), weight)
