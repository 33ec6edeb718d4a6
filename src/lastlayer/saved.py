"""What a fitted model is made of, as tensors and a JSON header, and back: the content of a model file."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lastlayer.calibration import Anchor, Calibration, CalibrationPoints, Curve, Member, NoiseHead, Tails
from lastlayer.model import LastLayerModel
from lastlayer.posterior import Posterior
from lastlayer.scaling import Standardizer
from lastlayer.statistics import MOMENTS, Statistics
from lastlayer.training import LastLayer
from lastlayer.types import BiasPrior, NoiseStructure

Build = Callable[[float], nn.Module]
"""An untrained network of a strength of the prior, of the right type and on the right device."""


def pack(model: LastLayerModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that fitting found out; numbers that may be infinite or not there are texts."""
    tensors = {"sample_cost": model._sample_cost}
    for i, member in enumerate(model.members_):
        posterior = member.layer.posterior
        tensors |= {f"{i}.network.{k}": v for k, v in member.network.state_dict().items()}
        tensors |= {f"{i}.statistics.{k}": getattr(posterior.statistics, k) for k in MOMENTS}
        tensors |= {f"{i}.noise_cov": posterior.Sigma_E}
    tensors |= {"targets.mean": model._targets.mean, "targets.scale": model._targets.scale}
    if model._inputs is not None:
        tensors |= {"inputs.mean": model._inputs.mean, "inputs.scale": model._inputs.scale}
    if model.conformal_scores_ is not None:
        tensors["conformal_scores"] = torch.from_numpy(model.conformal_scores_)
    names = getattr(model, "feature_names_in_", None)
    header = {
        "n_features_in": int(model.n_features_in_),
        "feature_names_in": None if names is None else [str(name) for name in names],
        "y_ndim": model._y_ndim,
        "log_alpha_star": model._stars(),
        "log_alpha": [str(float(log_alpha)) for log_alpha in model._log_alphas],
        "nlml": [member.layer.nlml for member in model.members_],
        "strength": [str(member.strength) for member in model.members_],
        "hidden_prior_scores": _by_strength(model.hidden_prior_scores_),
        "calibration": None,
    }
    if model.calibration_ is not None:
        more, header["calibration"] = _pack_calibration(model.calibration_)
        tensors |= more
    return tensors, header


def unpack(
    model: LastLayerModel,
    tensors: dict[str, Tensor],
    header: dict[str, Any],
    build: Build,
    *,
    noise: NoiseStructure,
    bias_prior: BiasPrior,
) -> None:
    """Make a model that has its words, but nothing else, the one that was packed."""
    model.n_features_in_ = header["n_features_in"]
    if header["feature_names_in"] is not None:
        model.feature_names_in_ = np.array(header["feature_names_in"], dtype=object)
    model._y_ndim = header["y_ndim"]
    model._log_alphas = [float(log_alpha) for log_alpha in header["log_alpha"]]
    model.hidden_prior_scores_ = {float(s): float(lpd) for s, lpd in header["hidden_prior_scores"]}
    scaler = lambda name: Standardizer(tensors[f"{name}.mean"], tensors[f"{name}.scale"])
    model._inputs = scaler("inputs") if "inputs.mean" in tensors else None
    model._targets = scaler("targets")
    model._sample_cost = tensors["sample_cost"]
    scores = tensors.get("conformal_scores")
    model.conformal_scores_ = None if scores is None else scores.numpy()
    saved = header["calibration"]
    model.calibration_ = None if saved is None else _unpack_calibration(tensors, saved)
    model.members_ = []
    for i, (log_alpha, nlml, text) in enumerate(
        zip(header["log_alpha_star"], header["nlml"], header["strength"], strict=True)
    ):
        prefix, device, strength = f"{i}.network.", model._device(), float(text)
        network = build(strength)
        network.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        moments = {k: tensors[f"{i}.statistics.{k}"] for k in MOMENTS}
        statistics = Statistics(**moments, n_outputs=len(model._targets.mean)).to(device)
        noise_cov = tensors[f"{i}.noise_cov"].to(device)
        posterior = Posterior(statistics, log_alpha, noise_cov, noise, bias_prior, rtol=math.inf)
        model.members_.append(Member(network, LastLayer(posterior, nlml, noise_floored=False), strength))


def _pack_calibration(found: Calibration) -> tuple[dict[str, Tensor], dict[str, Any]]:
    points = found.points
    kinds = sorted(set(points.kind.tolist()))
    curves = [
        {
            "strength": str(strength),
            "noise": curve.noise.tolist(),
            "slope": curve.slope.tolist(),
            "power": curve.power,
            "reach": str(curve.reach),
        }
        for strength, curve in found.curves.items()
    ]
    header = {
        "curves": curves,
        "tails": [found.tails.share, found.tails.factor],
        "anchor": found.anchor.precision,
        "alone": _by_strength(found.alone),
        "lpd": str(found.lpd),
        "lpd_before": str(found.lpd_before),
        "kinds": kinds,
    }
    tensors = {
        "calibration.ratio": torch.from_numpy(points.ratio),
        "calibration.squared_error": torch.from_numpy(points.squared_error),
        "calibration.kind": torch.tensor([kinds.index(kind) for kind in points.kind.tolist()]),
    }
    if found.head is not None:
        tensors |= {f"head.{f.name}": getattr(found.head, f.name) for f in fields(found.head)}
    return tensors, header


def _unpack_calibration(tensors: dict[str, Tensor], saved: dict[str, Any]) -> Calibration:
    curves = {
        float(one["strength"]): Curve(
            np.array(one["noise"], dtype=float),
            np.array(one["slope"], dtype=float),
            power=one["power"],
            reach=float(one["reach"]),
        )
        for one in saved["curves"]
    }
    kinds = np.array([saved["kinds"][i] for i in tensors["calibration.kind"].tolist()], dtype=str)
    ratio, squared = (tensors[f"calibration.{name}"].numpy() for name in ("ratio", "squared_error"))
    return Calibration(
        curves,
        CalibrationPoints(ratio, squared, kinds),
        lpd=float(saved["lpd"]),
        lpd_before=float(saved["lpd_before"]),
        tails=Tails(*saved["tails"]),
        anchor=Anchor(float(saved.get("anchor", 0.0))),
        head=NoiseHead(**{f.name: tensors[f"head.{f.name}"] for f in fields(NoiseHead)})
        if "head.U" in tensors
        else None,
        alone={float(s): float(lpd) for s, lpd in saved["alone"]},
    )


def _by_strength(numbers: dict[float, float]) -> list[list[str]]:
    return [[str(strength), str(number)] for strength, number in numbers.items()]
