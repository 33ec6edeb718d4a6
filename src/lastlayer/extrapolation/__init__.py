"""Where the data end: hulls and distances, the affine cost, and Algorithm 1. Features in, answers out, no networks."""

from lastlayer.extrapolation.affine_cost import (
    affine_cost,
    affine_cost_program,
    cost_quantile,
    leave_one_out_cost,
)
from lastlayer.extrapolation.folds import blocked_folds
from lastlayer.extrapolation.hulls import (
    Projection,
    distance_to_affine_hull,
    distance_to_convex_hull,
    distance_to_span,
    nearest_in_affine_hull,
    nearest_in_convex_hull,
    nearest_in_span,
)
from lastlayer.extrapolation.tuning import (
    AlphaCurve,
    HeldOut,
    alpha_range_for,
    held_out_lpd,
    search_alpha,
    tune_alpha,
    tune_alpha_on,
)

__all__ = [
    "AlphaCurve",
    "HeldOut",
    "Projection",
    "affine_cost",
    "affine_cost_program",
    "alpha_range_for",
    "blocked_folds",
    "cost_quantile",
    "distance_to_affine_hull",
    "distance_to_convex_hull",
    "distance_to_span",
    "held_out_lpd",
    "leave_one_out_cost",
    "nearest_in_affine_hull",
    "nearest_in_convex_hull",
    "nearest_in_span",
    "search_alpha",
    "tune_alpha",
    "tune_alpha_on",
]
