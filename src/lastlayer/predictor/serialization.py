"""A fitted model as tensors and a JSON header, and back: the content of a model file."""

import math
from typing import Any

import torch
from torch import Tensor

from lastlayer.calibration import Calibration
from lastlayer.networks.architecture import Architecture
from lastlayer.networks.encoding import PiecewiseEncoding
from lastlayer.networks.mlp import copied
from lastlayer.partial_posterior import posterior_of
from lastlayer.patterns import PatternStatistics
from lastlayer.predictor.fitted import Fitted
from lastlayer.predictor.module import Member
from lastlayer.predictor.unseen import Unseen
from lastlayer.scaling import Standardizer
from lastlayer.statistics import MOMENTS, OutputStatistics, Statistics
from lastlayer.training.last_layer import LastLayer
from lastlayer.types import Family


def pack(fitted: Fitted) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that fitting found out; numbers that may be infinite are strings."""
    tensors = {"sample_cost": fitted.sample_cost}
    for i, member in enumerate(fitted.members):
        posterior = member.layer.posterior
        tensors |= {f"{i}.network.{k}": v for k, v in member.network.state_dict().items()}
        tensors |= {f"{i}.statistics.{k}": getattr(posterior.statistics, k) for k in MOMENTS}
        if posterior.statistics.observations is not None:
            tensors[f"{i}.statistics.observations"] = posterior.statistics.observations
        if isinstance(posterior.statistics, PatternStatistics):
            tensors[f"{i}.statistics.patterns"] = posterior.statistics.patterns
        tensors |= {f"{i}.noise_cov": posterior.Sigma_E}
        tensors |= {f"{i}.unseen.{k}": torch.from_numpy(v) for k, v in vars(member.unseen).items()}
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
        "log_alpha_star": list(fitted.stars),
        "log_alpha": [str(log_alpha) for log_alpha in fitted.log_alphas],
        "nlml": [member.layer.nlml for member in fitted.members],
        "families": [str(member.family) for member in fitted.members],
        "family_scores": [[str(family), str(lpd)] for family, lpd in fitted.family_scores.items()],
        "calibration": None,
    }
    if fitted.calibration is not None:
        more, header["calibration"] = fitted.calibration.pack()
        tensors |= more
    return tensors, header


def _encoding(tensors: dict[str, Tensor], prefix: str, family: Family) -> PiecewiseEncoding | None:
    """Of the right width, for the numbers to be filled in."""
    if family.encoding == "raw":
        return None
    numbers = tensors[f"{prefix}network.encoding.slope"]
    return PiecewiseEncoding(torch.zeros(len(numbers), dtype=torch.long), numbers.clone(), numbers.clone())


def _statistics(moments: dict[str, Tensor], tensors: dict[str, Tensor], prefix: str, n_outputs: int) -> Statistics:
    observations, patterns = tensors.get(f"{prefix}observations"), tensors.get(f"{prefix}patterns")
    if patterns is not None:
        return PatternStatistics(**moments, n_outputs=n_outputs, observations=observations, patterns=patterns)
    if moments["count"].dim():
        return OutputStatistics(**moments, n_outputs=1, observations=observations)
    return Statistics(**moments, n_outputs=n_outputs, observations=observations)


def unpack(tensors: dict[str, Tensor], header: dict[str, Any], architecture: Architecture) -> Fitted:
    """The model that was packed; KeyError, TypeError, ValueError or RuntimeError if the parts do not fit."""
    settings, n_inputs = architecture.settings, int(header["n_features_in"])
    device = settings.torch_device

    def scaler(name: str) -> Standardizer:
        return Standardizer(tensors[f"{name}.mean"], tensors[f"{name}.scale"])

    targets = scaler("targets")
    members = []
    for i, (log_alpha, nlml, text) in enumerate(
        zip(header["log_alpha_star"], header["nlml"], header["families"], strict=True)
    ):
        prefix, family = f"{i}.network.", Family.parse(text)
        # the type before the numbers: a float32 module would round float64 weights
        with architecture.seeded():
            network = architecture.build(n_inputs, torch.Generator(), family, _encoding(tensors, prefix, family))
        network = network.to(device)
        network = network if family.kind == "fourier" else network.to(settings.torch_dtype)
        network.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        moments = {k: tensors[f"{i}.statistics.{k}"] for k in MOMENTS}
        statistics = _statistics(moments, tensors, f"{i}.statistics.", len(targets.mean)).to(device)
        noise_cov = tensors[f"{i}.noise_cov"].to(device)
        posterior = posterior_of(
            statistics, log_alpha, noise_cov, settings.noise_structure, settings.bias_prior, rtol=math.inf
        )
        unseen = Unseen(tensors[f"{i}.unseen.keys"].numpy(), tensors[f"{i}.unseen.weight"].numpy())
        members.append(Member(copied(network), LastLayer(posterior, nlml, noise_floored=False), family, unseen))
    names, saved, scores = header["feature_names_in"], header["calibration"], tensors.get("conformal_scores")
    return Fitted(
        inputs=scaler("inputs") if "inputs.mean" in tensors else None,
        targets=targets,
        members=tuple(members),
        log_alphas=tuple(float(text) for text in header["log_alpha"]),
        sample_cost=tensors["sample_cost"],
        settings=settings,
        n_features_in=n_inputs,
        y_ndim=header["y_ndim"],
        feature_names=None if names is None else tuple(names),
        calibration=None if saved is None else Calibration.unpack(tensors, saved),
        family_scores={Family.parse(text): float(lpd) for text, lpd in header["family_scores"]},
        conformal_scores=None if scores is None else scores.numpy(),
    )
