"""Facts about a fitted model and scores of its predictions of a table, as plain data and as text."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer.errors import InputError
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.predictions.metrics import calibration_error, coverage, crps, log_predictive_density, rmse
from lastlayer.predictions.prediction import Prediction
from lastlayer.settings.resolve import Settings
from lastlayer.tables.model import TableModel
from lastlayer.tables.numbers import percent, written

MEASURED = ("held_out", "importance")
"""Entries of the card that `lastlayer fit` measures on held-out rows."""


@dataclass(frozen=True)
class TargetScores:
    """Scores of one target, in its units; LPD and CRPS judge mean and uncertainty together."""

    target: str
    rmse: float
    r2: float
    """Share of the variance of the target that the mean explains."""
    lpd: float
    """Mean log predictive density; larger is better."""
    crps: float
    coverage_50: float
    coverage_95: float
    """Share of true values inside their intervals, like `coverage_50`."""
    width_95: float
    """Mean width of the 95% intervals."""


@dataclass(frozen=True)
class Scores:
    """Scores of all targets."""

    rows: int
    targets: tuple[TargetScores, ...]
    lpd: float
    """Mean log predictive density, joint over the targets."""
    calibration_error: float
    """Mean absolute difference between the level of intervals and the share of targets inside."""

    def table(self) -> list[list[str]]:
        """A header and one line per target."""
        head = ["target", "RMSE", "R2", "LPD", "CRPS", "in 50%", "in 95%", "width of 95%"]
        words = ("rmse", "r2", "lpd", "crps", "coverage_50", "coverage_95", "width_95")
        shown = lambda s, word: (percent if word.startswith("coverage") else written)(getattr(s, word))
        return [head, *([s.target, *(shown(s, word) for word in words)] for s in self.targets)]


def score(p: Prediction, y: Float[ndarray, "m q"], names: Sequence[str]) -> Scores:
    """Score predictions against the true values of all targets."""
    if len(y) < 2:
        raise InputError(f"scores need at least two rows, but the table has {len(y)}")
    p = p.with_output_axis()
    each_rmse, (lower, upper) = rmse(p, y, per_output=True), p.interval(0.95)
    columns = {
        "rmse": each_rmse,
        "r2": 1 - np.square(each_rmse) / np.maximum(y.var(0), np.finfo(float).tiny),
        "lpd": log_predictive_density(p, y, per_output=True),
        "crps": crps(p, y, per_output=True),
        "coverage_50": coverage(p, y, 0.5, per_output=True),
        "coverage_95": ((y >= lower) & (y <= upper)).mean(0),
        "width_95": (upper - lower).mean(0),
    }
    of_target = lambda i: {word: float(values[i]) for word, values in columns.items()}
    targets = tuple(TargetScores(name, **of_target(i)) for i, name in enumerate(names))
    return Scores(len(y), targets, log_predictive_density(p, y), calibration_error(p, y))


def explain(table_model: TableModel) -> dict[str, Any]:
    """Collect settings, noise, alpha, calibration, training ranges of the inputs and condition of the features."""
    model, schema = table_model.model, table_model.schema
    noise = zip(schema.targets, model.noise_std_.tolist(), strict=True)
    return {
        "card": {name: value for name, value in table_model.card.items() if name not in MEASURED},
        **{name: table_model.card.get(name) for name in MEASURED},
        "targets": [{"target": name, "noise_std": std} for name, std in noise],
        "inputs": schema.as_json()["columns"],
        "impute": schema.impute,
        "members": len(model.members_),
        "alpha_star": model.alpha_star_,
        "alpha": model.alpha_,
        "nlml": model.nlml_,
        "family": str(model.family_),
        "calibration": _calibration(model),
        "features": _features(model),
        "settings": model.settings_.to_json(),
        "modelled": model.fitted_.likelihood.modelled,
    }


def facts(table_model: TableModel) -> dict[str, str]:
    """The model card: the same facts as text, by subject."""
    found, card = explain(table_model), table_model.card
    settings, features = table_model.model.settings_, found["features"]
    of_working = f" of {found['modelled']}" if found["modelled"] else ""
    log_alpha, log_star = (math.log(a) if a > 0 else -math.inf for a in (found["alpha"], found["alpha_star"]))
    return {
        "targets": ", ".join(
            f"{row['target']} (noise std{of_working} {written(row['noise_std'])})" for row in found["targets"]
        ),
        "inputs": ", ".join(table_model.schema.features),
        "missing values": "filled with the median or the most frequent text" if found["impute"] else "rejected",
        "training rows": str(card.get("rows", "unknown")),
        "fitted": "{}, on {}, by lastlayer {}".format(*(card.get(k, "unknown") for k in ("fitted", "data", "version"))),
        "training": "interrupted" if card.get("interrupted") else "complete",
        "networks": f"{found['members']}, hidden layers {list(settings.hidden)}, {_activations(settings)}",
        "noise": settings.noise,
        "best family": found["family"],
        "features": f"{features['count']}, of which the data determine {features['determined']:.1f}; "
        f"condition {features['condition']:.1e}",
        "log alpha": f"{log_star:.3f} by the evidence, {log_alpha:.3f} in use",
        "NLML per sample": f"{found['nlml']:.4f} (standardised targets)",
        "calibration": "none" if found["calibration"] is None else found["calibration"]["words"],
        "held-out rows": _held_out(found["held_out"]),
        "notes": "; ".join(card.get("notes", [])) or "none",
    }


def _activations(settings: Settings) -> str:
    """The activations of the networks."""
    networks = [family for family in settings.families if family.kind == "network"]
    return " and ".join(dict.fromkeys(family.activation or settings.activation for family in networks)) or "none"


def _held_out(saved: Any) -> str:
    """Scores of the model that `lastlayer fit` measured on held-out rows, without the baselines."""
    try:
        own = [row for row in saved["methods"] if row["lpd"] is not None]
        words = "{}: R2 {:.3f}, RMSE {}, {} in 90% intervals"
        return "; ".join(
            words.format(row["target"], row["r2"], written(row["rmse"], 3), percent(row["coverage_90"])) for row in own
        )
    except (KeyError, TypeError, ValueError):  # nothing was held out, or the file is damaged
        return "not scored"


def _calibration(model: BLLRegressor) -> dict[str, Any] | None:
    if (found := model.calibration_) is None:
        return None
    return {
        "curves": [
            {"family": str(family)}
            | {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in asdict(own).items()}
            for family, own in found.curves.items()
        ],
        "tails": asdict(found.tails),
        "words": str(found),
        "points": len(found.points.cost),
        "lpd_before": found.lpd_before,
        "lpd": found.lpd,
    }


def _features(model: BLLRegressor) -> dict[str, Any]:
    """Facts about the worst-conditioned member: features, how many of them the data determine, condition."""
    rows = []
    for posterior in (member.layer.posterior for member in model.members_):
        values = posterior.eigenvalues().cpu().numpy()
        seen = values[values > 0]
        determined = seen / (seen + math.exp(-float(posterior.log_alpha)))
        rows.append((float(seen.max() / seen.min()) if len(seen) else 1.0, len(values), float(determined.sum())))
    return dict(zip(("condition", "count", "determined"), max(rows), strict=True))
