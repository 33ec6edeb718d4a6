"""Learned dynamics with calibrated uncertainty: from measured episodes to one-step models and many-step predictions."""

from lastlayer.dynamics.data import Episode, EpisodeFolds, Lags, LagTable, Windows
from lastlayer.dynamics.model import DynamicsModel, StepScores, best_propagation, multi_step_scores, one_step_scores
from lastlayer.dynamics.rollout import Linearized, Rollout, SampledWeights, Unscented

__all__ = [
    "DynamicsModel",
    "Episode",
    "EpisodeFolds",
    "LagTable",
    "Lags",
    "Linearized",
    "Rollout",
    "SampledWeights",
    "StepScores",
    "Unscented",
    "Windows",
    "best_propagation",
    "multi_step_scores",
    "one_step_scores",
]
