"""Plots of a model and of its predictions; each function returns a matplotlib figure."""

from lastlayer.plots.figures import (
    additive_curves,
    alpha_curve,
    calibration_curve,
    cost_to_variance,
    coverage_by_cost,
    extrapolation_error,
    importance,
    one_input,
    parity,
    partial_dependence,
    sharpness,
)

__all__ = [
    "additive_curves",
    "alpha_curve",
    "calibration_curve",
    "cost_to_variance",
    "coverage_by_cost",
    "extrapolation_error",
    "importance",
    "one_input",
    "parity",
    "partial_dependence",
    "sharpness",
]
