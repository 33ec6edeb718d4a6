"""Conversion of a fitted model to tensors and a JSON header, the content of a model file, and back."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor, nn

from lastlayer import likelihoods
from lastlayer._internal import checked, codec
from lastlayer._internal.codec import Limits
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import MOMENTS, SUMS, Statistics, check_scatter
from lastlayer.calibration import curve as calibration
from lastlayer.calibration.curve import Calibration
from lastlayer.data.scaling import Standardizer
from lastlayer.networks.architecture import Architecture
from lastlayer.networks.mlp import PiecewiseEncoding, copied, parts_of
from lastlayer.predictions.prediction import Prediction
from lastlayer.predictor.fitted import Fitted
from lastlayer.predictor.member import Member, Unseen
from lastlayer.settings.types import DTYPES, FOURIER, STRUCTURES, Family

PROBES = 13
"""Number of random points at which a model from a file is tested."""
SMALLEST, FARTHEST = float(np.finfo(float).tiny), 1e150
"""Smallest scale, and largest ratio of mean to scale."""
LOWEST = dict.fromkeys(("count", "energy", "observations"), 0.0)
"""Lower bounds of sums."""


@dataclass(frozen=True)
class About:
    """What a file holds of a model beside its scalers and members."""

    n_features_in: int
    feature_names_in: tuple[str, ...] | None
    y_ndim: Literal[1, 2]
    sample_cost: Float[Tensor, " costs"]
    family_scores: dict[Family, float]
    conformal_scores: Float[ndarray, "r q"] | None
    calibration: Calibration | None


@dataclass(frozen=True)
class AboutMember:
    """What a file holds of a member beside its network and its statistics."""

    family: Family
    log_alpha_star: float
    tuned: float | None
    noise_cov: Float[Tensor, "q q"]
    unseen: Unseen
    process: bool
    """Whether it is the process of a model that has no such member."""


LIMITS = calibration.LIMITS | {
    About: {
        "sample_cost": Limits(0.0, infinite=True),
        "family_scores": Limits(infinite=True, missing=True),
        "conformal_scores": Limits(0.0),
    },
    AboutMember: {"tuned": Limits(infinite=True)},
    Unseen: {"weight": Limits(0.0)},
}


def pack(fitted: Fitted) -> tuple[dict[str, Tensor], dict[str, Any]]:
    names = None if fitted.feature_names is None else tuple(map(str, fitted.feature_names))
    y_ndim, scores = cast(Literal[1, 2], fitted.y_ndim), (fitted.family_scores, fitted.conformal_scores)
    about = About(int(fitted.n_features_in), names, y_ndim, fitted.sample_cost, *scores, fitted.calibration)
    tensors, packed = codec.pack(about, "about")
    scalers, members = [("targets", fitted.targets), ("inputs", fitted.inputs)], []
    for name, scaler in scalers:
        tensors |= {} if scaler is None else {f"{name}.{key}": value for key, value in vars(scaler).items()}
    for i, member in enumerate((*fitted.members, *([] if fitted.process is None else [fitted.process]))):
        p, aside = member.posterior, i == len(fitted.members)
        of_member = AboutMember(member.family, member.log_alpha_star, member.tuned, p.Sigma_E, member.unseen, aside)
        own, packed_member = codec.pack(of_member, f"{i}")
        members.append(packed_member)
        tensors |= own | {f"{i}.network.{k}": v for k, v in member.network.state_dict().items()}
        sums = {k: getattr(p.statistics, k) for k in (*MOMENTS, *SUMS)}
        tensors |= {f"{i}.statistics.{k}": v for k, v in sums.items() if v is not None}
    header = {"settings": fitted.settings.to_json(), "likelihood": asdict(fitted.likelihood), "about": packed}
    return tensors, header | {"members": members}


def unpack(tensors: dict[str, Tensor], header: dict[str, Any], architecture: Architecture) -> Fitted:
    """Restore a packed model; raises KeyError, TypeError, ValueError or RuntimeError if the parts are inconsistent."""
    settings, targets = architecture.settings, _scaler(tensors, "targets", None)
    reader = codec.Reader(tensors, {"q": len(targets.mean)}, LIMITS)
    about: About = reader.unpack(About, header["about"], "about")
    d, q, names = about.n_features_in, len(targets.mean), about.feature_names_in
    inputs = _scaler(tensors, "inputs", d) if {"inputs.mean", "inputs.scale"} & tensors.keys() else None
    if d < 1 or q < 1 or (about.y_ndim == 1 and q > 1) or reader.sizes.get("d", d) != d:
        raise ValueError(f"{d} inputs, {q} outputs and targets of {about.y_ndim} dimensions are inconsistent")
    if inputs is None and settings.network.backbone is None:
        raise ValueError("inputs.mean is missing")
    if names is not None and len(names) != d:
        raise ValueError(f"{len(names)} names of {d} inputs")
    if not len(about.sample_cost):
        raise ValueError("sample_cost is empty")
    contents = checked.typed("members", header["members"], list[Any])
    each = [_member(tensors, str(i), own, architecture, d, q) for i, own in enumerate(contents)]
    found = [member for member, aside in each if not aside]
    if not found or [aside for _, aside in each[: len(found)]] != [False] * len(found) or len(each) > len(found) + 1:
        raise ValueError("members are needed, and at most one process after them")
    process = each[-1][0] if len(each) > len(found) else None
    if about.calibration is not None:
        families = {member.family for member in found}
        if not families <= about.calibration.curves.keys():
            raise ValueError("a family of members has no curve")
        if about.calibration.outside is not None and FOURIER not in families and process is None:
            raise ValueError("the process is missing")
    fitted = Fitted(
        inputs=inputs,
        targets=targets,
        members=tuple(found),
        process=process,
        sample_cost=about.sample_cost,
        settings=settings,
        n_features_in=d,
        y_ndim=about.y_ndim,
        likelihood=likelihoods.restored(settings.layer.likelihood, header["likelihood"]),
        feature_names=names,
        calibration=about.calibration,
        family_scores=about.family_scores,
        conformal_scores=about.conformal_scores,
    )
    check_predictions(fitted, fitted.predictive)
    return fitted


def check_predictions(fitted: Fitted, predictive: Callable[[ndarray], Prediction]) -> None:
    """Raise ValueError if a model's predictions at a few points inside its data are not finite."""
    if fitted.inputs is None:
        return
    corners = np.concatenate([np.zeros((1, fitted.n_features_in)), [[1.0], [-1.0]] * np.ones(fitted.n_features_in)])
    normal = np.random.default_rng(0).standard_normal((PROBES, fitted.n_features_in))
    Z = np.concatenate([corners, normal])
    p = predictive(Z * fitted.inputs.scale.numpy() + fitted.inputs.mean.numpy())
    for name, values in (("mean", p.mean), ("standard deviation", p.std), ("affine cost", p.affine_cost)):
        if not np.isfinite(values).all():
            raise ValueError(f"the {name} of its predictions is not finite")
    if not (p.std > 0).all():
        raise ValueError("the standard deviation of its predictions is zero")


def _scaler(tensors: dict[str, Tensor], name: str, n: int | None) -> Standardizer:
    mean = checked.tensor(tensors, f"{name}.mean", n)
    scale = checked.tensor(tensors, f"{name}.scale", len(mean), low=SMALLEST)
    if bool((mean.abs() / scale > FARTHEST).any()):
        raise ValueError(f"{name}.mean is beyond {FARTHEST:g} times {name}.scale, where squares overflow")
    return Standardizer(mean, scale)


def _member(
    tensors: dict[str, Tensor], name: str, content: Any, architecture: Architecture, d: int, q: int
) -> tuple[Member, bool]:
    """A member, and whether it is a process aside."""
    settings = architecture.settings
    about: AboutMember = codec.Reader(tensors, {"q": q}, LIMITS).unpack(AboutMember, content, name)
    posterior = Posterior(
        _statistics(tensors, f"{name}.statistics.", q).to(settings.place.device),
        about.log_alpha_star,
        checked.covariance(f"{name}.noise_cov", about.noise_cov).to(settings.place.device),
        STRUCTURES[settings.layer.noise],
        settings.layer.bias_prior,
        checked=False,
    )
    network = _network(tensors, f"{name}.network.", about.family, architecture, d)
    return Member(copied(network), posterior, about.family, about.unseen, about.tuned), about.process


def _network(tensors: dict[str, Tensor], prefix: str, family: Family, architecture: Architecture, d: int) -> nn.Module:
    place, encoding = architecture.settings.place, None
    own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    if family.encoding != "raw":  # of the right width; its numbers are loaded below
        numbers = own["encoding.slope" if "encoding.slope" in own else "network.encoding.slope"]
        encoding = PiecewiseEncoding(torch.zeros(len(numbers), dtype=torch.long), numbers.clone(), numbers.clone())
    # convert the type before loading: a float32 module would round float64 weights
    with architecture.seeded():
        network = architecture.build(d, torch.Generator(), family, encoding)
    network = network.to(place.device, None if family.once else DTYPES[place.dtype])
    for name, value in network.state_dict().items():
        checked.tensor(own, name, *value.shape, dtype=value.dtype)
    network.load_state_dict(own)
    bins = parts_of(network)[1]
    if bins is not None and not bool(((bins.column >= 0) & (bins.column < d)).all()):
        raise ValueError(f"{prefix}encoding.column has places that are no inputs")
    return network


def _statistics(tensors: dict[str, Tensor], prefix: str, q: int) -> Statistics:
    batch, mean = tensors[f"{prefix}count"].shape, tensors[f"{prefix}mean"]
    n_targets, columns = 1 if batch else q, mean.shape[-1] if mean.dim() else 0
    if columns <= n_targets or len(batch) > 1 or (n_targets < q and batch != (q,)):
        raise ValueError(f"{prefix}count and {prefix}mean of shapes {tuple(batch)} and {tuple(mean.shape)}")
    shapes = {"mean": (columns,), "scatter": (columns, columns), "energy": (columns,)}
    parts: dict[str, Any] = {
        name: checked.tensor(tensors, prefix + name, *batch, *shapes.get(name, ()), low=LOWEST.get(name, -math.inf))
        for name in (*MOMENTS, *SUMS)
        if name in MOMENTS or prefix + name in tensors
    }
    check_scatter(parts["scatter"])
    if not bool((parts["count"] > 0).any()):
        raise ValueError(f"{prefix}count is zero")
    return Statistics(**parts, n_outputs=n_targets, by_output=bool(batch))
