"""Fitted models in BoTorch, and a model made for Bayesian optimisation. It needs `pip install lastlayer[botorch]`.

model = SingleTaskBLL(train_X, train_Y)                  # replaces SingleTaskGP in BoTorch's tutorials and in Ax
model = fit_model(X, Y)                                  # the same, fitted at once
model = BLLModel(regressor)                              # any fitted BLLRegressor
acquisition = qLogExpectedImprovement(model, best_f=Y.max())
drawn = model.draw(16, seed=0)                           # functions drawn from the posterior, for Thompson sampling
"""

import warnings

from lastlayer.errors import need

with warnings.catch_warnings():  # linear_operator uses deprecated parts of torch
    warnings.simplefilter("ignore", DeprecationWarning)
    need("botorch", extra="botorch")

from lastlayer.integrations.botorch.members import MemberAverage
from lastlayer.integrations.botorch.model import BLLMixture, BLLModel, DrawnFunctions
from lastlayer.integrations.botorch.paths import FunctionPaths
from lastlayer.integrations.botorch.single_task import SingleTaskBLL, fit_model
from lastlayer.integrations.botorch.surrogate import Surrogate

__all__ = [
    "BLLMixture",
    "BLLModel",
    "DrawnFunctions",
    "FunctionPaths",
    "MemberAverage",
    "SingleTaskBLL",
    "Surrogate",
    "fit_model",
]
