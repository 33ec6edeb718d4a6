"""Training of feature networks by the marginal likelihood, on tensors and modules."""

from lastlayer._internal.work import threads_for
from lastlayer.data.rows import Points, Rows
from lastlayer.training.bound import FrozenLayer
from lastlayer.training.checkpoint import Checkpoint, clear_checkpoints
from lastlayer.training.engine import Optimizer, Plateau, Problem, TrainingHistory, Validation, train
from lastlayer.training.objectives import Augmented, KnownNoise, MeanSquaredError, Objective, Profiled
from lastlayer.training.problems import FullBatch, MiniBatches, SampledRows, chunked_nlml, streamed_statistics
from lastlayer.training.running_posterior import RunningPosterior, UpdateSchedule
from lastlayer.training.stack import StackedNetworks
from lastlayer.training.structure import batches_for, objective_for, problem_for

__all__ = [
    "Augmented",
    "Checkpoint",
    "FrozenLayer",
    "FullBatch",
    "KnownNoise",
    "MeanSquaredError",
    "MiniBatches",
    "Objective",
    "Optimizer",
    "Plateau",
    "Points",
    "Problem",
    "Profiled",
    "Rows",
    "RunningPosterior",
    "SampledRows",
    "StackedNetworks",
    "TrainingHistory",
    "UpdateSchedule",
    "Validation",
    "batches_for",
    "chunked_nlml",
    "clear_checkpoints",
    "objective_for",
    "problem_for",
    "streamed_statistics",
    "threads_for",
    "train",
]
