"""How far to believe a network: rows it never saw, the strength of its prior, and the curve from cost to variance."""

from lastlayer.calibration.crossfit import CrossFit, Ensemble, Job, Member, Trained, predict_held_out
from lastlayer.calibration.curve import (
    Anchor,
    Calibration,
    CalibrationPoints,
    Curve,
    Tails,
    anchored,
    fit_curves,
    precision_weights,
)
from lastlayer.calibration.noise_head import NoiseHead
from lastlayer.calibration.points import HeldOutPoints
from lastlayer.calibration.splits import Split, blocked_splits, given_splits, random_splits

__all__ = [
    "Anchor",
    "Calibration",
    "CalibrationPoints",
    "CrossFit",
    "Curve",
    "Ensemble",
    "HeldOutPoints",
    "Job",
    "Member",
    "NoiseHead",
    "Split",
    "Tails",
    "Trained",
    "anchored",
    "blocked_splits",
    "fit_curves",
    "given_splits",
    "precision_weights",
    "predict_held_out",
    "random_splits",
]
