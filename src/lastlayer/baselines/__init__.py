"""What a Bayesian last layer is compared with, behind the same face: estimators that return a `Prediction`."""

from lastlayer.baselines.bayes_by_backprop import BayesByBackpropRegressor
from lastlayer.baselines.blr import BLRRegressor

__all__ = ["BLRRegressor", "BayesByBackpropRegressor"]
