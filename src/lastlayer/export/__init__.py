"""A fitted model for places without torch: numbers in an .npz file, and one module that reads it with NumPy alone."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, nn

from lastlayer.calibration import Member
from lastlayer.errors import InputError
from lastlayer.export.numpy_bundle import FORMAT
from lastlayer.features import WithInputs
from lastlayer.files import replacing
from lastlayer.precision import Precision
from lastlayer.regressor import BLLRegressor
from lastlayer.tables import Schema, TableModel
from lastlayer.tables.columns import MISSING

READER = Path(__file__).with_name("numpy_bundle.py")


def export_bundle(fitted: TableModel, folder: Path) -> list[Path]:
    """Write model.npz and predict.py into a folder; older ones stay as they were until the new ones are whole."""
    arrays = to_arrays(fitted.model, fitted.schema)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}; choose another --out") from error
    paths = [folder / "model.npz", folder / "predict.py"]
    with replacing(paths[0]) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    with replacing(paths[1]) as file:
        file.write(READER.read_bytes())
    return paths


def to_arrays(model: BLLRegressor, schema: Schema | None = None) -> dict[str, Any]:
    """All that `numpy_bundle` needs; with a schema also how to read raw columns."""
    if model.backbone is not None or model._inputs is None:
        raise InputError("only the built-in network can be exported to NumPy, and this model has a backbone of yours")
    members, curve = model.members_, model.curve_
    layers = [[m for m in member.network.modules() if isinstance(m, nn.Linear)] for member in members]
    equations = [member.layer.posterior.equations for member in members]
    flat = model.bias_prior == "flat"
    q = len(model._targets.mean)
    about = {
        "format": FORMAT,
        "activation": model.activation,
        "layers": len(layers[0]),
        "input_skip": isinstance(members[0].network, WithInputs),
        "bias_prior": model.bias_prior,
        "calibrated": model.calibration_ is not None,
        "missing": sorted(MISSING),
        "columns": None if schema is None else schema.as_json()["columns"],
        "targets": [f"y{i + 1}" for i in range(q)] if schema is None else list(schema.targets),
        "impute": schema is not None and schema.impute,
    }
    arrays = {
        "about": np.array(json.dumps(about)),
        "inputs_mean": _array(model._inputs.mean),
        "inputs_scale": _array(model._inputs.scale),
        "targets_mean": _array(model._targets.mean),
        "targets_scale": _array(model._targets.scale),
        "centre": np.stack([_array(e.feature_mean) for e in equations]),
        "target_mean": np.stack([_array(e.target_mean) if flat else np.zeros(q) for e in equations]),
        "bias_variance": np.array([float(e.bias_variance) for e in equations]),
        "weights": np.stack([_array(m.layer.posterior.precision.penalised_weights) for m in members]),
        "half_star": np.stack([_half(member.layer.posterior.precision) for member in members]),
        "noise_var": model._noise_vars()[:, 0],
        "noise": curve.noise,
        "slope": curve.slope,
        "power": np.array(curve.power),
        "reach": np.array(curve.reach),
        "tail_share": np.array(curve.tail_share),
        "tail_factor": np.array(curve.tail_factor),
        "sample_cost": np.sort(_array(model._sample_cost)),
    }
    if model.log_alphas_ != [float(member.layer.posterior.log_alpha) for member in members]:
        arrays["half"] = np.stack([_half_at(m, a) for m, a in zip(members, model.log_alphas_, strict=True)])
    for i in range(len(layers[0])):
        arrays[f"W{i}"] = np.stack([_array(linears[i].weight.mT) for linears in layers])
        arrays[f"b{i}"] = np.stack([_array(linears[i].bias) for linears in layers])
    if model.calibration_ is not None and (head := model.calibration_.head) is not None:
        arrays |= {f"head_{f.name}": _array(getattr(head, f.name)) for f in fields(head)}
    return arrays


def _half_at(member: Member, log_alpha: float) -> ndarray:
    posterior = member.layer.posterior
    own = log_alpha == float(posterior.log_alpha)
    return _half(posterior.precision if own else posterior.equations.spectral_at(log_alpha))


def _half(precision: Precision) -> ndarray:
    """H with z H H' z' = z Lambda^-1 z'."""
    gram = precision.equations.gram
    return _array(precision.factor.half(torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)))


def _array(tensor: Tensor) -> ndarray:
    array: ndarray = tensor.detach().cpu().double().numpy()
    return array
