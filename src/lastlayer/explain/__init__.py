"""Explanations of a fitted model: how much each input matters, and how predictions depend on it."""

from lastlayer.explain.additive import Effect, additive_effects
from lastlayer.explain.dependence import Dependence, partial_dependence
from lastlayer.explain.importance import Importance, permutation_importance
from lastlayer.explain.inputs import Input

__all__ = [
    "Dependence",
    "Effect",
    "Importance",
    "Input",
    "additive_effects",
    "partial_dependence",
    "permutation_importance",
]
