"""How good predictions of dynamics are, one step and many steps ahead."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer.dynamics.episodes import Episode
from lastlayer.dynamics.model import DynamicsModel, Propagation
from lastlayer.dynamics.propagation import Unscented
from lastlayer.dynamics.rollout import Feedback, Rollout
from lastlayer.dynamics.samples import SampledWeights
from lastlayer.metrics import coverage, rmse
from lastlayer.prediction import Prediction

CANDIDATES: tuple[Propagation, ...] = (SampledWeights(), SampledWeights(calibrated=False), Unscented())


@dataclass(frozen=True)
class Scores:
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
    def of(cls, prediction: Prediction, outputs: Float[ndarray, "m q"]) -> "Scores":
        """Of the distribution itself, every point one step ahead."""
        density = np.asarray(prediction.log_prob(outputs, per_output=True)).sum(-1)
        return cls(
            float(density.mean()),
            np.asarray(rmse(prediction, outputs, per_output=True)),
            float(coverage(prediction, outputs, 0.9)),
            density.mean(keepdims=True),
        )

    @classmethod
    def of_rollout(cls, rollout: Rollout, outputs: Float[ndarray, "b h q"]) -> "Scores":
        """Densities are those of the Gaussian of the same moments: with a few hundred draws it is the steadier one."""
        b, h, q = outputs.shape
        flat = outputs.reshape(-1, q)
        density = np.asarray(rollout.gaussian().prediction().log_prob(flat, per_output=True)).sum(-1)
        prediction = rollout.prediction()
        return cls(
            float(density.mean()),
            np.asarray(rmse(prediction, flat, per_output=True)),
            float(coverage(prediction, flat, 0.9)),
            density.reshape(b, h).mean(0),
        )


def one_step_scores(model: DynamicsModel, episodes: Sequence[Episode]) -> Scores:
    """Every step of the episodes predicted from what was measured before it."""
    table = model.lags.table(episodes)
    return Scores.of(model.next(table.X), table.next_outputs)


def multi_step_scores(
    model: DynamicsModel,
    episodes: Sequence[Episode],
    horizon: int,
    *,
    by: Propagation | None = None,
    noise: Feedback = "process",
) -> tuple[Scores, Rollout]:
    """Stretches of the episodes predicted from their starts and inputs alone; and the prediction itself."""
    windows = model.lags.windows(episodes, horizon)
    rollout = model.rollout(windows.starts, windows.inputs, by=by, noise=noise)
    return Scores.of_rollout(rollout, windows.outputs), rollout


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
