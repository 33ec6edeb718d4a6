"""Calibration of the variance: held-out points, and the curve from affine cost to variance fitted to them."""

from lastlayer.calibration.curve import Calibration, CalibrationPoints, Curve, NoiseHead, Outside, Shrinkage, Tails
from lastlayer.calibration.fit import SHARPNESS, fit_curves
from lastlayer.calibration.points import HeldOutPoints

__all__ = [
    "SHARPNESS",
    "Calibration",
    "CalibrationPoints",
    "Curve",
    "HeldOutPoints",
    "NoiseHead",
    "Outside",
    "Shrinkage",
    "Tails",
    "fit_curves",
]
