"""Fitted models in BoTorch, and a model made for Bayesian optimisation. It needs `pip install lastlayer[botorch]`.

model = fit_model(X, Y)                                  # in the time of a step of Bayesian optimisation
model = BLLModel(regressor)                              # any fitted BLLRegressor
acquisition = qLogExpectedImprovement(model, best_f=Y.max())
drawn = model.draw(seed=0)                               # one function of the posterior, for Thompson sampling
"""

import warnings

from lastlayer.errors import need

with warnings.catch_warnings():  # linear_operator uses what torch is about to give up
    warnings.simplefilter("ignore", DeprecationWarning)
    need("botorch", extra="botorch")

from lastlayer.integrations.botorch.model import BLLMixture, BLLModel, DrawnFunction
from lastlayer.integrations.botorch.surrogate import Surrogate, fit_model

__all__ = ["BLLMixture", "BLLModel", "DrawnFunction", "Surrogate", "fit_model"]
