"""One-step models of dynamic systems, a regression that knows what it does not know behind lags; and their scores."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from lastlayer.dynamics.data import Episode, EpisodeFolds, Lags, check_episodes
from lastlayer.dynamics.rollout import Feedback, Propagation, Rollout, SampledWeights, Unscented
from lastlayer.errors import InputError, check_choice
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.metrics import coverage, rmse
from lastlayer.prediction import Prediction

CANDIDATES: tuple[Propagation, ...] = (SampledWeights(), SampledWeights(calibrated=False), Unscented())


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
        groups = {}
        if isinstance(regressor, BLLRegressor):
            if regressor.target_transform is not None:
                raise InputError(
                    f"target_transform={regressor.target_transform!r} cannot be combined with a DynamicsModel, whose "
                    "steps add up: leave it at None, and give the logarithm of the outputs if they grow like it"
                )
            if len(listed) > 1 or regressor.calibration == "auto":  # rows of an episode are held out together
                groups = {"groups": table.episode}
            if regressor.calibration == "auto" and regressor.preset != "evidence":
                regressor.set_params(calibration=EpisodeFolds())
        self.regressor_ = regressor.fit(table.X, table.targets, **groups)
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
        self, starts: Any, inputs: Any, *, by: Propagation | None = None, noise: Feedback = "process"
    ) -> Rollout:
        """Predict the outputs after each of h inputs, from one state or several.

        `by` a propagation: `SampledWeights` (the default: one draw of the weights for a whole trajectory), `Unscented`
        or `Linearized`. `noise="process"` feeds the noise back into the dynamics, as the one-step model has it;
        "measurement" adds it to what is measured alone.
        """
        self._fitted()
        check_choice("noise", noise, get_args(Feedback))
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


@dataclass(frozen=True)
class StepScores:
    """Means over steps and trajectories."""

    lpd: float
    """Log predictive density of each output, summed over the outputs; larger is better."""
    rmse: Float[ndarray, " q"]
    """Of each output."""
    coverage: float
    """Share of measurements inside their central 90% interval."""
    lpd_by_step: Float[ndarray, " h"]
    """The LPD at each step ahead."""

    @classmethod
    def of(cls, prediction: Prediction, outputs: Float[ndarray, "m q"]) -> "StepScores":
        """Of the distribution itself, every point one step ahead."""
        return cls._of(prediction, prediction, outputs[:, None])

    @classmethod
    def of_rollout(cls, rollout: Rollout, outputs: Float[ndarray, "b h q"]) -> "StepScores":
        """Densities are those of the Gaussian of the same moments: with a few hundred draws it is the steadier one."""
        return cls._of(rollout.prediction(), rollout.gaussian().prediction(), outputs)

    @classmethod
    def _of(cls, p: Prediction, density: Prediction, outputs: Float[ndarray, "b h q"]) -> "StepScores":
        flat = outputs.reshape(-1, outputs.shape[2])
        lpd = density.log_prob(flat, per_output=True).sum(-1).reshape(outputs.shape[:2]).mean(0)
        return cls(float(lpd.mean()), rmse(p, flat, per_output=True), coverage(p, flat, 0.9), lpd)


def one_step_scores(model: DynamicsModel, episodes: Sequence[Episode]) -> StepScores:
    """Every step of the episodes predicted from what was measured before it."""
    table = model.lags.table(episodes)
    return StepScores.of(model.next(table.X), table.next_outputs)


def multi_step_scores(
    model: DynamicsModel,
    episodes: Sequence[Episode],
    horizon: int,
    *,
    by: Propagation | None = None,
    noise: Feedback = "process",
) -> tuple[StepScores, Rollout]:
    """Stretches of the episodes predicted from their starts and inputs alone; and the prediction itself."""
    windows = model.lags.windows(episodes, horizon)
    rollout = model.rollout(windows.starts, windows.inputs, by=by, noise=noise)
    return StepScores.of_rollout(rollout, windows.outputs), rollout


def best_propagation(
    model: DynamicsModel,
    episodes: Sequence[Episode],
    horizon: int,
    *,
    candidates: Sequence[Propagation] = CANDIDATES,
    noise: Feedback = "process",
) -> Propagation:
    """The candidate of largest LPD many steps ahead, on episodes that the model has not seen."""
    lpd = [multi_step_scores(model, episodes, horizon, by=by, noise=noise)[0].lpd for by in candidates]
    return candidates[int(np.argmax(lpd))]
