"""Fitting a feature network by the marginal likelihood. Tensors and modules only."""

from lastlayer.training.loop import Optimiser, Training, Validation, train
from lastlayer.training.members import MembersTraining, train_members
from lastlayer.training.objectives import (
    Augmented,
    Data,
    Exact,
    MeanSquaredError,
    Objective,
    Profiled,
    make_objective,
    mean_squared_error,
    output_layer,
)

__all__ = [
    "Augmented",
    "Data",
    "Exact",
    "MeanSquaredError",
    "MembersTraining",
    "Objective",
    "Optimiser",
    "Profiled",
    "Training",
    "Validation",
    "make_objective",
    "mean_squared_error",
    "output_layer",
    "train",
    "train_members",
]
