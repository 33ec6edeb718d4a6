"""Conversion of a fitted model to tensors and a JSON header, the content of a model file, and back."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, nn

from lastlayer import likelihoods
from lastlayer._internal import checked, codec
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import MOMENTS, SUMS, Statistics, check_scatter
from lastlayer.calibration.curve import LIMITS, Calibration
from lastlayer.data.scaling import Standardizer
from lastlayer.networks.architecture import Architecture
from lastlayer.networks.encoding import PiecewiseEncoding
from lastlayer.networks.mlp import copied, encoding_of
from lastlayer.predictions.prediction import Prediction
from lastlayer.predictor.fitted import Fitted
from lastlayer.predictor.member import Member
from lastlayer.predictor.unseen import Unseen
from lastlayer.settings.types import FOURIER, Family

PROBES = 13
"""Number of random points at which a model from a file is tested."""
SMALLEST, FARTHEST = float(np.finfo(float).tiny), 1e150
"""Smallest scale, and largest ratio of mean to scale."""


def pack(fitted: Fitted) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Convert a fitted model to tensors and a header; numbers that may be infinite are strings."""
    tensors = {"sample_cost": fitted.sample_cost}
    members = []
    for i, member in enumerate((*fitted.members, *([] if fitted.process is None else [fitted.process]))):
        own, about = _packed(member)
        tensors |= {f"{i}.{key}": value for key, value in own.items()}
        members.append(about | {"process": i == len(fitted.members)})
    tensors |= {"targets.mean": fitted.targets.mean, "targets.scale": fitted.targets.scale}
    if fitted.inputs is not None:
        tensors |= {"inputs.mean": fitted.inputs.mean, "inputs.scale": fitted.inputs.scale}
    if fitted.conformal_scores is not None:
        tensors["conformal_scores"] = torch.from_numpy(fitted.conformal_scores)
    header: dict[str, Any] = {
        "settings": fitted.settings.to_json(),
        "n_features_in": int(fitted.n_features_in),
        "feature_names_in": None if fitted.feature_names is None else [str(name) for name in fitted.feature_names],
        "y_ndim": fitted.y_ndim,
        "likelihood": asdict(fitted.likelihood),
        "members": members,
        "family_scores": [[str(family), str(lpd)] for family, lpd in fitted.family_scores.items()],
        "calibration": None,
    }
    if fitted.calibration is not None:
        more, header["calibration"] = codec.pack(fitted.calibration, "calibration")
        tensors |= more
    return tensors, header


def _packed(member: Member) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a member."""
    statistics = member.posterior.statistics
    tensors = {f"network.{k}": v for k, v in member.network.state_dict().items()}
    tensors |= {f"statistics.{k}": getattr(statistics, k) for k in MOMENTS}
    tensors |= {f"statistics.{k}": v for k in SUMS if (v := getattr(statistics, k)) is not None}
    tensors |= {f"unseen.{k}": torch.from_numpy(v) for k, v in vars(member.unseen).items()}
    tuned = None if member.tuned is None else str(member.tuned)
    header = {"family": str(member.family), "log_alpha_star": member.log_alpha_star, "tuned": tuned}
    return tensors | {"noise_cov": member.posterior.Sigma_E}, header


def unpack(tensors: dict[str, Tensor], header: dict[str, Any], architecture: Architecture) -> Fitted:
    """Restore a packed model; raises KeyError, TypeError, ValueError or RuntimeError if the parts are inconsistent."""
    settings = architecture.settings
    n_inputs = checked.typed("n_features_in", header["n_features_in"], int)
    targets, y_ndim = _scaler(tensors, "targets", None), checked.typed("y_ndim", header["y_ndim"], Literal[1, 2])
    inputs = _scaler(tensors, "inputs", n_inputs) if {"inputs.mean", "inputs.scale"} & tensors.keys() else None
    q = len(targets.mean)
    if n_inputs < 1 or q < 1 or (y_ndim == 1 and q > 1):
        raise ValueError(f"{n_inputs} inputs, {q} outputs and targets of {y_ndim} dimensions are inconsistent")
    if inputs is None and settings.network.backbone is None:
        raise ValueError("inputs.mean is missing")
    reader = _Members(tensors, architecture, n_inputs, q)
    about = checked.typed("members", header["members"], tuple[Any, ...])
    found = [reader.member(str(i), own) for i, own in enumerate(about)]
    aside = [checked.typed("process", own["process"], bool) for own in about]
    if not aside or aside[0] or sum(aside) > aside[-1]:
        raise ValueError("members are needed, and at most one process after them")
    process = found.pop() if aside[-1] else None
    names = checked.typed("feature_names_in", header["feature_names_in"], tuple[str, ...] | None)
    if names is not None and len(names) != n_inputs:
        raise ValueError(f"{len(names)} names of {n_inputs} inputs")
    calibration, scores = None, None
    if header["calibration"] is not None:
        parts = codec.Reader(tensors, {"d": n_inputs, "q": q}, LIMITS)
        calibration = parts.unpack(Calibration, header["calibration"], "calibration")
        families = {member.family for member in found}
        if not families <= calibration.curves.keys():
            raise ValueError("a family of members has no curve")
        if calibration.outside is not None and FOURIER not in families and process is None:
            raise ValueError("the process is missing")
    if "conformal_scores" in tensors:
        scores = checked.tensor(tensors, "conformal_scores", None, q, low=0.0).numpy()
    fitted = Fitted(
        inputs=inputs,
        targets=targets,
        members=tuple(found),
        process=process,
        sample_cost=checked.tensor(tensors, "sample_cost", None, low=0.0, infinite=True),
        settings=settings,
        n_features_in=n_inputs,
        y_ndim=y_ndim,
        likelihood=likelihoods.restored(settings.layer.likelihood, header["likelihood"]),
        feature_names=names,
        calibration=calibration,
        family_scores={Family.parse(text): float(lpd) for text, lpd in header["family_scores"]},
        conformal_scores=scores,
    )
    if not len(fitted.sample_cost):
        raise ValueError("sample_cost is empty")
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


@dataclass(frozen=True)
class _Members:
    """The members in the tensors of a file."""

    tensors: dict[str, Tensor]
    architecture: Architecture
    n_inputs: int
    n_outputs: int

    def member(self, name: str, about: dict[str, Any]) -> Member:
        settings, q, about = self.architecture.settings, self.n_outputs, checked.typed(name, about, dict)
        family = Family.parse(checked.typed(f"{name}.family", about["family"], str))
        network, statistics = self._network(f"{name}.network.", family), self._statistics(f"{name}.statistics.")
        noise_cov = checked.covariance(f"{name}.noise_cov", checked.tensor(self.tensors, f"{name}.noise_cov", q, q))
        posterior = Posterior(
            statistics.to(settings.place.torch_device),
            checked.typed(f"{name}.log_alpha_star", about["log_alpha_star"], float),
            noise_cov.to(settings.place.torch_device),
            settings.layer.noise_structure,
            settings.layer.bias_prior,
            checked=False,
        )
        keys = checked.tensor(self.tensors, f"{name}.unseen.keys", None, dtype=torch.int64)
        weight = checked.tensor(self.tensors, f"{name}.unseen.weight", len(keys), low=0.0)
        if bool((keys[1:] <= keys[:-1]).any()):
            raise ValueError(f"{name}.unseen.keys are not in ascending order")
        tuned = None if about["tuned"] is None else checked.number("tuned", about["tuned"], infinite=True)
        return Member(copied(network), posterior, family, Unseen(keys.numpy(), weight.numpy()), tuned)

    def _network(self, prefix: str, family: Family) -> nn.Module:
        settings = self.architecture.settings
        own = {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}
        encoding = None
        if family.encoding != "raw":  # of the right width; its numbers are loaded below
            numbers = own["encoding.slope" if "encoding.slope" in own else "network.encoding.slope"]
            encoding = PiecewiseEncoding(torch.zeros(len(numbers), dtype=torch.long), numbers.clone(), numbers.clone())
        # convert the type before loading: a float32 module would round float64 weights
        with self.architecture.seeded():
            network = self.architecture.build(self.n_inputs, torch.Generator(), family, encoding)
        network = network.to(settings.place.torch_device)
        network = network if family.once else network.to(settings.place.torch_dtype)
        for name, value in network.state_dict().items():
            checked.tensor(own, name, *value.shape, dtype=value.dtype)
        network.load_state_dict(own)
        bins = encoding_of(network)
        if bins is not None and not bool(((bins.column >= 0) & (bins.column < self.n_inputs)).all()):
            raise ValueError(f"{prefix}encoding.column has places that are no inputs")
        return network

    def _statistics(self, prefix: str) -> Statistics:
        own, q = {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}, self.n_outputs
        batch = own["count"].shape
        n_targets = 1 if batch else q
        columns = own["mean"].shape[-1] if own["mean"].dim() else 0
        if columns <= n_targets or len(batch) > 1 or (n_targets < q and batch != (q,)):
            raise ValueError(f"{prefix}count and {prefix}mean of shapes {tuple(batch)} and {tuple(own['mean'].shape)}")
        shapes: dict[str, tuple[int, ...]] = {"count": (), "mean": (columns,), "scatter": (columns, columns)}
        shapes |= {"energy": (columns,)}
        moments = {
            name: checked.tensor(own, name, *batch, *shape, low=0.0 if name in ("count", "energy") else -math.inf)
            for name, shape in shapes.items()
        }
        check_scatter(moments["scatter"])
        if not bool((moments["count"] > 0).any()):
            raise ValueError(f"{prefix}count is zero")
        lows = {"observations": 0.0, "log_scale": -math.inf}
        sums = {name: checked.tensor(own, name, *batch, low=lows[name]) for name in SUMS if name in own}
        parts: dict[str, Any] = {**moments, **sums, "n_outputs": n_targets}
        return Statistics(**parts, by_output=bool(batch))
