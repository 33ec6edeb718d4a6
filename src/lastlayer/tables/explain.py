"""What a model has learned, as plain data."""

from dataclasses import asdict
from typing import Any

import numpy as np

from lastlayer.regressor import BLLRegressor
from lastlayer.tables.model import TableModel


def explain(table_model: TableModel) -> dict[str, Any]:
    """Noise, alpha, calibration, the training range of every input and the condition of the features."""
    model, schema = table_model.model, table_model.schema
    return {
        "card": table_model.card,
        "targets": [
            {"target": name, "noise_std": float(std)}
            for name, std in zip(schema.targets, model.noise_std_, strict=True)
        ],
        "inputs": schema.as_json()["columns"],
        "impute": schema.impute,
        "members": len(model.members_),
        "alpha_star": model.alpha_star_,
        "alpha": model.alpha_,
        "nlml": model.nlml_,
        "hidden_prior": model.hidden_prior_,
        "calibration": _calibration(model),
        "features": _features(model),
        "network": {word: model.get_params()[word] for word in ("hidden", "activation", "noise", "preset", "dtype")},
    }


def _calibration(model: BLLRegressor) -> dict[str, Any] | None:
    if model.calibration_ is None:
        return None
    found = model.calibration_
    return {
        "curves": [
            {"strength": strength} | {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in asdict(own).items()}
            for strength, own in found.curves.items()
        ],
        "tails": asdict(found.tails),
        "words": str(found),
        "points": len(found.points.ratio),
        "lpd_before": found.lpd_before,
        "lpd": found.lpd,
    }


def _features(model: BLLRegressor) -> dict[str, Any]:
    """Of the worst member: how many features, how many of them the data determine, and their condition."""
    rows = []
    for member in model.members_:
        posterior = member.layer.posterior
        values = posterior.equations.spectrum.values.cpu().numpy()
        determined = values / (values + float(posterior.precision.ridge))
        seen = values[values > 0]
        rows.append((float(seen.max() / seen.min()) if len(seen) else 1.0, len(values), float(determined.sum())))
    condition, count, determined_count = max(rows)
    return {"count": count, "determined": determined_count, "condition": condition}
