"""The predictive formula, written once over any array library."""

from lastlayer.formula.joint import Functions as Functions
from lastlayer.formula.joint import functions as functions
from lastlayer.formula.predictive import *  # noqa: F403
