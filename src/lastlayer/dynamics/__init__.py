"""Learned dynamics with honest uncertainty: from measured episodes to one-step models and many-step predictions.

Time is discrete: output y_k is measured at step k, and input u_k acts from step k to k + 1.
"""

from lastlayer.dynamics.episodes import Episode
from lastlayer.dynamics.folds import EpisodeFolds
from lastlayer.dynamics.lags import Lags, Table, Windows
from lastlayer.dynamics.model import DynamicsModel
from lastlayer.dynamics.propagation import Linearised, Unscented
from lastlayer.dynamics.rollout import Rollout
from lastlayer.dynamics.samples import SampledWeights
from lastlayer.dynamics.scores import Scores, best_propagation, multi_step_scores, one_step_scores

__all__ = [
    "DynamicsModel",
    "Episode",
    "EpisodeFolds",
    "Lags",
    "Linearised",
    "Rollout",
    "SampledWeights",
    "Scores",
    "Table",
    "Unscented",
    "Windows",
    "best_propagation",
    "multi_step_scores",
    "one_step_scores",
]
