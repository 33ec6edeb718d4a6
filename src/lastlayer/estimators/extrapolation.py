"""Extrapolation in feature space: distances to hulls, the affine cost, Algorithm 1, and folds of held-out regions."""

from lastlayer.bayes.affine_cost import AffineCostSolution, affine_cost, affine_cost_program
from lastlayer.bayes.held_out import HeldOut, held_out_lpd
from lastlayer.bayes.hulls import (
    Projection,
    distance_to_affine_hull,
    distance_to_convex_hull,
    distance_to_span,
    nearest_in_affine_hull,
    nearest_in_convex_hull,
    nearest_in_span,
)
from lastlayer.bayes.posterior import leave_one_out_cost
from lastlayer.calibration.alpha import AlphaCurve, search_alpha, tune_alpha, tune_alpha_on
from lastlayer.ensemble.splits import blocked_folds, outer_folds

# fmt: off
__all__ = [
    "AffineCostSolution", "AlphaCurve", "HeldOut", "Projection", "affine_cost", "affine_cost_program",
    "blocked_folds", "distance_to_affine_hull", "distance_to_convex_hull", "distance_to_span", "held_out_lpd",
    "leave_one_out_cost", "nearest_in_affine_hull", "nearest_in_convex_hull", "nearest_in_span", "outer_folds",
    "search_alpha", "tune_alpha", "tune_alpha_on",
]
