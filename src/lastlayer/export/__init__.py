"""A fitted model for places without torch: numbers in an .npz file, and one module that reads it with NumPy alone."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from lastlayer.description import describe
from lastlayer.errors import InputError
from lastlayer.export.numpy_bundle import FORMAT
from lastlayer.files import replacing
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
    found = describe(model)
    about = {
        "format": FORMAT,
        "activation": model.activation,
        "members": [{"layers": len(m.layers or ()), "input_skip": m.passes_inputs} for m in found.members],
        "sharpness": found.sharpness,
        "missing": sorted(MISSING),
        "columns": None if schema is None else schema.as_json()["columns"],
        "targets": [f"y{i + 1}" for i in range(found.n_outputs)] if schema is None else list(schema.targets),
        "impute": schema is not None and schema.impute,
    }
    arrays = {
        "about": np.array(json.dumps(about)),
        "input_mean": found.input_mean,
        "input_scale": found.input_scale,
        "tails": np.array([found.tails.share, found.tails.factor]),
        "anchor": found.anchor,
        "anchor_precision": found.anchor_precision,
        "sample_cost": np.sort(found.sample_cost),
    }
    for i, member in enumerate(found.members):
        own = {
            "centre": member.centre,
            "weights": member.weights,
            "offset": member.offset,
            "noise_var": np.diagonal(member.noise_cov),
            "root_star": member.spread_at_star.root,
            "shift_star": member.spread_at_star.shift,
            "noise": member.curve.noise,
            "slope": member.curve.slope,
            "shape": np.array([member.curve.power, member.curve.reach]),
        }
        if member.spread is not member.spread_at_star:
            own |= {"root": member.spread.root, "shift": member.spread.shift}
        for j, dense in enumerate(member.layers or ()):
            own |= {f"W{j}": dense.weight, f"b{j}": dense.bias}
        arrays |= {f"{i}_{name}": array for name, array in own.items()}
    if (head := found.noise_head) is not None:
        arrays |= {f"head_{f.name}": getattr(head, f.name).numpy() for f in fields(head)}
    return arrays
