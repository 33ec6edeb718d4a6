"""One-step models of dynamic systems, as a regression on lagged outputs and inputs, and their scores."""

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
from lastlayer.ensemble.likelihood import candidates
from lastlayer.errors import InputError, check_choice
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.predictions.metrics import coverage, rmse
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.settings.types import Given

CANDIDATES: tuple[Propagation, ...] = (SampledWeights(), SampledWeights(calibrated=False), Unscented())


class DynamicsModel:
    """One-step model y_{k+1} = f(lags) + noise, with a Bayesian last layer for f.

    Parameters
    ----------
    lags : Lags, default Lags()
        Outputs and inputs that a step depends on, and whether values or increments are learned.
    regressor : BLLRegressor, default BLLRegressor()
        Cloned and fitted, or any model with `fit(X, Y)` and `predictive(X)`; calibration="auto" holds out episodes.

    Attributes
    ----------
    regressor_, state_scale_ : BLLRegressor, ndarray of shape (n,)
        The fitted clone, and the standard deviation of each component of the state in the data.
    n_outputs_, n_inputs_ : int
        Numbers of outputs and inputs.
    """

    def __init__(self, lags: Lags | None = None, regressor: Any = None) -> None:
        self.lags = Lags() if lags is None else lags
        self.regressor = BLLRegressor() if regressor is None else regressor

    def fit(self, episodes: Sequence[Episode]) -> "DynamicsModel":
        """Fit the one-step model to all steps of all episodes.

        Parameters
        ----------
        episodes : sequence of Episode
            Measured episodes with the same numbers of outputs and inputs.
        """
        listed = check_episodes(episodes)
        table, regressor = self.lags.table(listed), clone(self.regressor)
        groups = {}
        if isinstance(regressor, BLLRegressor):
            regressor.likelihood = "gaussian" if regressor.likelihood == "auto" else regressor.likelihood
            likelihood = candidates(regressor.likelihood, Given(table.X, table.targets))[0]
            likelihood.check_linear("a DynamicsModel, whose steps add up,")
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

    def next(self, X: Float[ndarray, "m d"]) -> MixturePrediction:
        """Predict the outputs one step after each row of a lag table, noise included.

        Parameters
        ----------
        X : ndarray of shape (m, d)
            Rows as `Lags.join` arranges them.
        """
        prediction: MixturePrediction = self._fitted().predictive(X)
        if not self.lags.increments:
            return prediction
        return replace(prediction, component_mean=prediction.component_mean + X[:, : self.n_outputs_])

    def rollout(
        self, starts: Any, inputs: Any, *, by: Propagation | None = None, noise: Feedback = "process"
    ) -> Rollout:
        """Predict the outputs after each of h inputs, from one state or several.

        Parameters
        ----------
        starts, inputs : array-like of shape (b, n) and (b, h, d), or (n,) and (h, d)
            States to start from, as `lags.state(episode)` returns them, and the inputs of every trajectory.
        by : Propagation, default SampledWeights()
            Propagation method: `SampledWeights`, `Unscented` or `Linearized`.
        noise : {"process", "measurement"}, default "process"
            Whether the noise of a step acts on the state that the next step starts from, or only on the measurement.
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
    """Scores averaged over steps and trajectories."""

    lpd: float
    """Log predictive density of each output, summed over the outputs; larger is better."""
    rmse: Float[ndarray, " q"]
    """Root mean squared error of each output."""
    coverage: float
    """Fraction of measurements inside their central 90% interval."""
    lpd_by_step: Float[ndarray, " h"]
    """LPD at each number of steps ahead."""

    @classmethod
    def _of(cls, p: MixturePrediction, density: MixturePrediction, outputs: Float[ndarray, "b h q"]) -> "StepScores":
        flat = outputs.reshape(-1, outputs.shape[2])
        lpd = density.log_prob(flat, per_output=True).sum(-1).reshape(outputs.shape[:2]).mean(0)
        return cls(float(lpd.mean()), rmse(p, flat, per_output=True), coverage(p, flat, 0.9), lpd)


def one_step_scores(model: DynamicsModel, episodes: Sequence[Episode]) -> StepScores:
    """Score the prediction of every step from the measurements before it.

    Parameters
    ----------
    model, episodes : DynamicsModel, sequence of Episode
        A fitted model, and episodes to score on, normally ones that the model has not seen.
    """
    table = model.lags.table(episodes)
    p = model.next(table.X)
    return StepScores._of(p, p, table.next_outputs[:, None])


def multi_step_scores(
    model: DynamicsModel,
    episodes: Sequence[Episode],
    horizon: int,
    *,
    by: Propagation | None = None,
    noise: Feedback = "process",
) -> tuple[StepScores, Rollout]:
    """Predict segments of episodes from their first states and inputs; return the scores and the trajectories.

    Densities are those of the Gaussian with the same mean and covariance, which vary less between runs.

    Parameters
    ----------
    model, episodes, horizon : DynamicsModel, sequence of Episode, int
        A fitted model, episodes to score on, and the number of steps per segment.
    by, noise : Propagation, {"process", "measurement"}
        As in `DynamicsModel.rollout`.
    """
    windows = model.lags.windows(episodes, horizon)
    rollout = model.rollout(windows.starts, windows.inputs, by=by, noise=noise)
    return StepScores._of(rollout.prediction(), rollout.gaussian().prediction(), windows.outputs), rollout


def best_propagation(
    model: DynamicsModel,
    episodes: Sequence[Episode],
    horizon: int,
    *,
    candidates: Sequence[Propagation] = CANDIDATES,
    noise: Feedback = "process",
) -> Propagation:
    """Choose the propagation method of largest LPD many steps ahead.

    Parameters
    ----------
    model, episodes, horizon : object
        As in `multi_step_scores`.
    candidates : sequence of Propagation, default CANDIDATES
        Methods to compare: calibrated and uncalibrated `SampledWeights`, and `Unscented`.
    noise : {"process", "measurement"}, default "process"
        As in `multi_step_scores`.
    """
    lpd = [multi_step_scores(model, episodes, horizon, by=by, noise=noise)[0].lpd for by in candidates]
    return candidates[int(np.argmax(lpd))]
