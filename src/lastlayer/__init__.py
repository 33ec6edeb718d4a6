"""Regression with neural networks that know what they do not know."""

from lastlayer.prediction import Prediction
from lastlayer.regressor import BLLRegressor, load

__version__ = "0.1.0.dev0"
__all__ = ["BLLRegressor", "Prediction", "__version__", "load"]
