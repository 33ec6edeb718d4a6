"""Facts about a fitted model of a table, as plain data and as text."""

import math
from dataclasses import asdict
from typing import Any

from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.tables.numbers import percent, written
from lastlayer.tables.regressor import TableRegressor

MEASURED = ("held_out", "importance")
"""Entries of the card that `lastlayer fit` measures on held-out rows."""
SHAPED = "the noise is not bell-shaped: its shape is modelled"


def explain(model: TableRegressor) -> dict[str, Any]:
    """Collect settings, noise, alpha, calibration, training ranges of the inputs and condition of the features."""
    schema, card = model.schema_, model.card_
    noise = zip(schema.targets, model.noise_std_.tolist(), strict=True)
    shaped = model.calibration_ is not None and model.calibration_.shape is not None
    return {
        "card": {name: value for name, value in card.items() if name not in MEASURED},
        **{name: card.get(name) for name in MEASURED},
        "targets": [{"target": name, "noise_std": std} for name, std in noise],
        "inputs": schema.as_json()["columns"],
        "impute": schema.impute,
        "members": len(model.members_),
        "alpha_star": model.alpha_star_,
        "alpha": model.alpha_,
        "nlml": model.nlml_,
        "family": str(model.members_[0].family),
        "calibration": _calibration(model),
        "features": _features(model),
        "settings": model.settings_.to_json(),
        "modelled": model.fitted_.likelihood.modelled,
        "described": model.fitted_.likelihood.described or (SHAPED if shaped else ""),
    }


def facts(model: TableRegressor) -> dict[str, str]:
    """The model card: the same facts as text, by subject."""
    found, card = explain(model), model.card_
    settings, features = model.settings_, found["features"]
    trained = [
        family.activation or settings.network.activation for family in settings.ensemble.families if family.trained
    ]
    activations = " and ".join(dict.fromkeys(trained)) or "none"
    of = f" of {found['modelled']}" if found["modelled"] else ""
    log_alpha, log_star = (math.log(a) if a > 0 else -math.inf for a in (found["alpha"], found["alpha_star"]))
    return {
        "targets": ", ".join(
            f"{each['target']} (noise std{of} {written(each['noise_std'])})" for each in found["targets"]
        ),
        "inputs": ", ".join(model.schema_.features),
        "missing values": "filled with the median or the most frequent text" if found["impute"] else "rejected",
        "training rows": str(card.get("rows", "unknown")),
        "fitted": "{}, on {}, by lastlayer {}".format(*(card.get(k, "unknown") for k in ("fitted", "data", "version"))),
        "training": "interrupted" if card.get("interrupted") else "complete",
        "networks": f"{found['members']}, hidden layers {list(settings.network.hidden)}, {activations}",
        "noise": settings.layer.noise,
        "best family": found["family"],
        "features": f"{features['count']}, of which the data determine {features['determined']:.1f}; "
        f"condition {features['condition']:.1e}",
        "log alpha": f"{log_star:.3f} by the evidence, {log_alpha:.3f} in use",
        "NLML per sample": f"{found['nlml']:.4f} (standardised targets)",
        "calibration": "none" if found["calibration"] is None else found["calibration"]["words"],
        "held-out rows": _held_out(found["held_out"]),
        "notes": "; ".join(card.get("notes", [])) or "none",
    }


def _held_out(saved: Any) -> str:
    """Scores of the model that `lastlayer fit` measured on held-out rows, without the baselines."""
    try:
        return "; ".join(
            f"{own['target']}: R2 {own['r2']:.3f}, RMSE {written(own['rmse'], 3)}, {percent(own['coverage_90'])} in "
            "90% intervals"
            for own in saved["methods"]
            if own["lpd"] is not None
        )
    except (KeyError, TypeError, ValueError):  # nothing was held out, or the file is damaged
        return "not scored"


def _calibration(model: BLLRegressor) -> dict[str, Any] | None:
    if (found := model.calibration_) is None:
        return None
    return {
        "curves": [{"family": str(family), **asdict(own)} for family, own in found.curves.items()],
        "tails": asdict(found.tails),
        "words": str(found),
        "points": len(found.points.cost),
        "lpd_before": found.lpd_before,
        "lpd": found.lpd,
    }


def _features(model: BLLRegressor) -> dict[str, Any]:
    """Facts about the worst-conditioned member: features, how many of them the data determine, condition."""
    rows = []
    for posterior in (member.posterior for member in model.members_):
        values = posterior.eigenvalues().cpu().numpy()
        seen = values[values > 0]
        determined = seen / (seen + math.exp(-float(posterior.log_alpha)))
        rows.append((float(seen.max() / seen.min()) if len(seen) else 1.0, len(values), float(determined.sum())))
    return dict(zip(("condition", "count", "determined"), max(rows), strict=True))
