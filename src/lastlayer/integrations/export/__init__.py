"""Export of a fitted model for use without torch: an .npz file, and a Python module that reads it with NumPy alone."""

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np

from lastlayer._internal.files import replacing
from lastlayer.errors import InputError
from lastlayer.formula import State, predictive
from lastlayer.formula.ops import NumPyOps
from lastlayer.integrations.export import bundle
from lastlayer.integrations.export.bundle import FORMAT
from lastlayer.predictor.fitted import as_array, as_fitted
from lastlayer.tables import Schema, TableRegressor, cells


def export_bundle(fitted: TableRegressor, folder: Path) -> list[Path]:
    arrays = to_arrays(fitted, fitted.schema_)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create the folder {folder}: {error.strerror}; choose another --out") from error
    paths = [folder / "model.npz", folder / "predict.py"]
    with replacing(paths[0]) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    with replacing(paths[1]) as file:
        file.write(reader().encode())
    return paths


def reader() -> str:
    """Return the source of predict.py, the module that reads exported models."""
    source = inspect.getsource(bundle)
    first, last = source.index("# the code of the library:"), source.index("# the reader:")
    parts = [inspect.getsource(part) for part in (predictive, NumPyOps, cells)]
    return source[:first] + "\n\n".join(part.strip() for part in parts) + "\n\n\n" + source[last:]


def to_arrays(model: Any, schema: Schema | None = None) -> dict[str, Any]:
    fitted = as_fitted(model, "a bundle")
    if fitted.settings.network.backbone is not None or fitted.inputs is None:
        raise InputError("this model has a custom backbone: only the built-in network can be exported to NumPy")
    more = {"tails": np.array([fitted.tails.share, fitted.tails.factor]), "sample_cost": np.sort(fitted.sample_cost)}
    state = State(**vars(fitted.state.map(as_array)) | more)
    arrays, plain = State(model=state).flat()
    about = {
        "format": FORMAT,
        "state": plain,
        "references": fitted.references,
        "columns": None if schema is None else schema.as_json()["columns"],
        "y_ndim": fitted.y_ndim,
        "targets": [f"y{i + 1}" for i in range(fitted.n_outputs)] if schema is None else list(schema.targets),
        "impute": schema is not None and schema.impute,
    }
    return arrays | {"about": np.array(json.dumps(about))}
