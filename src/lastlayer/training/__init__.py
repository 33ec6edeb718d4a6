"""Fitting a feature network by the marginal likelihood. Tensors and modules only."""

from lastlayer.training.batches import Refresh, train_batches
from lastlayer.training.checkpoint import Checkpoint
from lastlayer.training.chunked import chunked_nlml, streamed_statistics
from lastlayer.training.frozen import FrozenLayer
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
from lastlayer.training.running import Pace, RunningLayer
from lastlayer.training.stack import train_stack
from lastlayer.training.threads import threads_for

__all__ = [
    "Augmented",
    "Checkpoint",
    "Data",
    "Exact",
    "FrozenLayer",
    "LastLayer",
    "MeanSquaredError",
    "MembersTraining",
    "Objective",
    "Optimiser",
    "Pace",
    "Profiled",
    "Refresh",
    "RunningLayer",
    "Training",
    "Validation",
    "chunked_nlml",
    "last_layer",
    "make_objective",
    "mean_squared_error",
    "output_layer",
    "streamed_statistics",
    "threads_for",
    "train",
    "train_batches",
    "train_members",
    "train_stack",
]
