"""Fitting a feature network by the marginal likelihood. Tensors and modules only."""

from lastlayer.training.last_layer import LastLayer, last_layer
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
from lastlayer.training.stack import train_stack
from lastlayer.training.threads import threads_for

__all__ = [
    "Augmented",
    "Data",
    "Exact",
    "LastLayer",
    "MeanSquaredError",
    "MembersTraining",
    "Objective",
    "Optimiser",
    "Profiled",
    "Training",
    "Validation",
    "last_layer",
    "make_objective",
    "mean_squared_error",
    "output_layer",
    "threads_for",
    "train",
    "train_members",
    "train_stack",
]
