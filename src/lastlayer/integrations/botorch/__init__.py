"""Fitted models in BoTorch, and a model made for Bayesian optimisation. It needs `pip install lastlayer[botorch]`."""

import warnings

from lastlayer.errors import need

with warnings.catch_warnings():  # linear_operator uses deprecated parts of torch
    warnings.simplefilter("ignore", DeprecationWarning)
    need("botorch", extra="botorch")

from lastlayer.integrations.botorch.model import BLLModel, DrawnFunctions, FunctionPaths
from lastlayer.integrations.botorch.single_task import SingleTaskBLL, fit_model
from lastlayer.integrations.botorch.surrogate import Surrogate

__all__ = ["BLLModel", "DrawnFunctions", "FunctionPaths", "SingleTaskBLL", "Surrogate", "fit_model"]
