"""Fitting a feature network by the marginal likelihood. Tensors and modules only."""

from lastlayer.training.loop import Data, Optimiser, Training, Validation, train
from lastlayer.training.objectives import Augmented, Exact, Objective, Profiled, make_objective

__all__ = [
    "Augmented",
    "Data",
    "Exact",
    "Objective",
    "Optimiser",
    "Profiled",
    "Training",
    "Validation",
    "make_objective",
    "train",
]
