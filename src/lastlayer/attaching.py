"""`attach`: the exact last layer for a network that was trained elsewhere, by whatever loop."""

import copy
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.calibration import Ensemble, HeldOutPoints, Member
from lastlayer.calibration.crossfit import predict_held_out
from lastlayer.errors import InputError, choose
from lastlayer.estimator import DTYPES
from lastlayer.features import affine_features
from lastlayer.model import check_features
from lastlayer.ranks import Ranks
from lastlayer.regressor import BLLRegressor
from lastlayer.scaling import Standardizer
from lastlayer.sources import LoaderSource, Source, check_finite_batch
from lastlayer.statistics import CHUNK_ROWS, Statistics
from lastlayer.streaming import BATCH_SIZE
from lastlayer.training import Data, LastLayer, Training, last_layer
from lastlayer.trunk import Trunk, last_linear
from lastlayer.types import BIAS_PRIORS, NOISE_STRUCTURES, BiasPrior, NoiseStructure

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
    layer : the linear layer that the new one stands in for. "auto": the one that speaks last. Or its name, as in
        `network.named_modules()`. None: the network has no such layer, what it returns are the features.
    calibration : batches of rows that the network was not trained on; they fit the curve from affine cost to variance.
    noise, bias_prior : as in `BLLRegressor`.
    """
    choose("noise", noise, NOISE_STRUCTURES)
    choose("bias_prior", bias_prior, BIAS_PRIORS)
    network, ranks = _bare(network), Ranks.started()
    place = next(network.parameters(), torch.zeros(()))
    batches = _batches(loader, place, ranks)
    first = next(batches, None)
    if first is None:
        raise InputError("the loader gave no batch: at least one of (X, y) is needed")
    trunk = _trunk(network, layer, first)
    some: list[Tensor] = []

    def features() -> Iterator[tuple[Tensor, ...]]:
        for batch in chain([first], batches):
            Phi = _features(trunk, batch)
            if sum(len(each) for each in some) < CHUNK_ROWS:
                some.append(Phi)
            yield (Phi, batch.T) if batch.weight is None else (Phi, batch.T, batch.weight)

    raw = ranks.reduce(Statistics.from_batches(features()))
    var = raw.target_scatter.diagonal() / raw.count
    targets = Standardizer.of_moments(raw.target_mean, var, int(raw.count))
    exact = last_layer(raw.with_targets(targets), noise=noise, bias_prior=bias_prior)
    model = BLLRegressor(
        backbone=trunk,
        preset="fast",
        n_members=1,
        calibration=None,
        hidden_prior=0.0,
        noise=noise,
        bias_prior=bias_prior,
        device=str(place.device),
        dtype=_NAMES[place.dtype],
    )
    _, d, *more = first.X.shape
    unit = Standardizer(torch.zeros(d, dtype=torch.float64), torch.ones(d, dtype=torch.float64))
    model.n_features_in_, model._inputs = d, None if more else unit
    model._targets, model._y_ndim, model.training_ = targets.to("cpu"), min(len(var), 2), Training()
    model._hold(Ensemble([Member(trunk, exact)], [], {}), varied=bool((var > 0).all()))
    cost = torch.cat([exact.posterior.variance_ratio(Phi) for Phi in some])
    model._keep_costs(torch.cat(ranks.gather(cost.cpu()))[None])
    if calibration is not None:
        points = [_held_out(exact, targets, trunk, batch) for batch in _batches(calibration, place, ranks)]
        model._calibrate(HeldOutPoints.joined([each for theirs in ranks.gather(points) for each in theirs]))
    return model


def _bare(network: nn.Module) -> nn.Module:
    """Without what processes and compilers have wrapped it in."""
    if isinstance(network, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return _bare(network.module)
    inner = getattr(network, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else network


def _trunk(network: nn.Module, layer: str | None, first: Data) -> nn.Module:
    """A copy that gives the features, tried on the first batch."""
    strange = {p.dtype for p in network.parameters()} - _NAMES.keys()
    if strange:
        raise InputError(f"the network has weights of {', '.join(map(str, strange))}: convert it, network.float()")
    network = copy.deepcopy(network).eval().requires_grad_(False)
    if layer is None:
        return network
    return Trunk(network, last_linear(network, first.X, first.T.shape[1]) if layer == "auto" else layer)


def _features(trunk: nn.Module, batch: Data) -> Float[Tensor, "m p"]:
    with torch.no_grad():
        return affine_features(check_features(trunk(batch.X), batch.X)).double()


def _batches(loader: Iterable[Any] | Source, place: Tensor, ranks: Ranks) -> Iterator[Data]:
    """Inputs as the network takes them, targets in float64, both where the network is."""
    source = loader if isinstance(loader, Source) else LoaderSource(loader)
    seen = 0
    for batch in source.batches(BATCH_SIZE, ranks=ranks):
        check_finite_batch(batch, seen)
        seen += len(batch.X)
        weight = None if batch.weight is None else batch.weight.to(place.device)
        yield Data(batch.X.to(place), batch.T.to(place.device).double(), weight)


def _held_out(exact: LastLayer, targets: Standardizer, trunk: nn.Module, batch: Data) -> HeldOutPoints:
    """What the last layer says of rows it has not seen; their inputs, which may be large, are not kept."""
    data = Data(batch.T[:, :0], targets.forward(batch.T), batch.weight)
    return predict_held_out(exact, _features(trunk, batch), data, "validation", 0.0)
