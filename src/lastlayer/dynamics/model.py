"""One-step models of dynamic systems: lags, and a regression that knows what it does not know."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from lastlayer.dynamics.episodes import Episode, check_episodes
from lastlayer.dynamics.folds import EpisodeFolds
from lastlayer.dynamics.lags import Lags
from lastlayer.dynamics.rollout import Feedback, Rollout
from lastlayer.dynamics.samples import SampledWeights
from lastlayer.errors import InputError, choose
from lastlayer.prediction import Prediction
from lastlayer.regressor import BLLRegressor

FEEDBACK = ("process", "measurement")


@runtime_checkable
class Propagation(Protocol):
    """A way to predict many steps ahead."""

    def run(
        self, model: Any, starts: Float[ndarray, "b n"], inputs: Float[ndarray, "b h d"], noise: Feedback
    ) -> Rollout: ...


class DynamicsModel:
    """y_{k+1} = f(lags) + noise, f a Bayesian last layer.

    Parameters
    ----------
    lags : on how many past outputs and inputs a step depends, and whether values or increments are learned.
    regressor : a `BLLRegressor` (or any model with fit(X, Y) and predictive(X)), trained in a copy. Where its
        calibration is "auto" or not given, whole episodes are held out in place of rows.

    Attributes
    ----------
    regressor_ : the fitted copy.
    state_scale_ : standard deviation of each number of the state in the data.
    """

    def __init__(self, lags: Lags | None = None, regressor: Any = None) -> None:
        self.lags = Lags() if lags is None else lags
        self.regressor = BLLRegressor() if regressor is None else regressor

    def fit(self, episodes: Sequence[Episode]) -> "DynamicsModel":
        """Fit the one-step map to all episodes."""
        listed = check_episodes(episodes)
        table, regressor = self.lags.table(listed), clone(self.regressor)
        if isinstance(regressor, BLLRegressor):
            by_episode = regressor.calibration == "auto" and regressor.preset != "fast"
            if by_episode:
                regressor.set_params(calibration=EpisodeFolds())
            # words and None need no groups; a splitter decides itself whether it does
            regressor.fit(table.X, table.targets, groups=table.episode)
        else:
            regressor.fit(table.X, table.targets)
        self.regressor_ = regressor
        self.n_outputs_, self.n_inputs_ = listed[0].outputs.shape[1], listed[0].inputs.shape[1]
        scale, k = table.X.std(0), self.lags.outputs * self.n_outputs_
        scale = np.where(scale > 0, scale, 1.0)
        self.state_scale_ = np.concatenate([scale[:k], scale[k + self.n_inputs_ :]])
        return self

    def next(self, X: Float[ndarray, "m d"]) -> Prediction:
        """The distribution of the outputs after each row of a table of lags, noise included."""
        return self.shifted(self._fitted().predictive(X), X)

    def shifted(self, prediction: Prediction, X: Float[ndarray, "m d"]) -> Prediction:
        """A prediction of what is learned as one of the next outputs."""
        if not self.lags.increments:
            return prediction
        return replace(prediction, component_mean=prediction.component_mean + X[:, : self.n_outputs_])

    def rollout(
        self,
        starts: Any,
        inputs: Any,
        *,
        by: Propagation | None = None,
        noise: Feedback = "process",
    ) -> Rollout:
        """Predict the outputs after each of h inputs, from one state or several.

        `by` a propagation: `SampledWeights` (the default: one draw of the weights for a whole trajectory), `Unscented`
        or `Linearised`. `noise="process"` feeds the noise back into the dynamics, as the one-step model has it;
        "measurement" adds it to what is measured alone.
        """
        self._fitted()
        choose("noise", noise, FEEDBACK)
        s, u = np.atleast_2d(np.asarray(starts, float)), np.asarray(inputs, float)
        u = u[None] if u.ndim == 2 else u
        n = self.lags.n_state(self.n_outputs_, self.n_inputs_)
        if s.shape[1:] != (n,) or u.ndim != 3 or u.shape[2] != self.n_inputs_ or len(s) != len(u):
            raise InputError(
                f"starts have shape {s.shape} and inputs {u.shape}: for {len(s)} starts give (starts, {n}), as "
                f"lags.state(episode) returns, and (starts, steps, {self.n_inputs_})"
            )
        return (SampledWeights() if by is None else by).run(self, s, u, noise)

    def _fitted(self) -> Any:
        if not hasattr(self, "regressor_"):
            raise NotFittedError("this DynamicsModel is not fitted yet: call fit(episodes)")
        return self.regressor_
