"""What a fitted model says of single inputs: how much each matters, and what predictions do as it varies."""

from lastlayer.explain.additive import Effect, additive_curves, additive_effects
from lastlayer.explain.dependence import Dependence, partial_dependence
from lastlayer.explain.importance import Importance, permutation_importance
from lastlayer.explain.inputs import Input

__all__ = [
    "Dependence",
    "Effect",
    "Importance",
    "Input",
    "additive_curves",
    "additive_effects",
    "partial_dependence",
    "permutation_importance",
]
