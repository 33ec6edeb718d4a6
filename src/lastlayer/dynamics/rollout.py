"""What is predicted along trajectories."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer.prediction import Prediction

Feedback: TypeAlias = Literal["process", "measurement"]
"""Where the noise of a step acts: on the state that the next step starts from, or on what is measured alone."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """Predicted outputs of b trajectories over h steps; c components, one for a Gaussian, one a draw for samples."""

    component_mean: Float[ndarray, "c b h q"]
    component_var: Float[ndarray, "c b h q"]
    """Within a component, noise included."""
    cov: Float[ndarray, "b h q q"]
    """Between the outputs of a step, noise included."""
    affine_cost: Float[ndarray, "b h"]
    """At the mean of the state, or averaged over the draws: how far a step extrapolates."""

    @property
    def mean(self) -> Float[ndarray, "b h q"]:
        mean: ndarray = self.component_mean.mean(0)
        return mean

    @property
    def std(self) -> Float[ndarray, "b h q"]:
        std: ndarray = np.sqrt(np.diagonal(self.cov, axis1=-2, axis2=-1))
        return std

    def interval(self, level: float = 0.9) -> tuple[Float[ndarray, "b h q"], Float[ndarray, "b h q"]]:
        """Lower and upper bound of each output at each step."""
        lower, upper = self.prediction().interval(level)
        return lower.reshape(self.mean.shape), upper.reshape(self.mean.shape)

    def prediction(self) -> Prediction:
        """All steps of all trajectories as the points of one prediction, outputs independent within a component."""
        c, q = len(self.component_mean), self.component_mean.shape[-1]
        mean, var = (x.reshape(c, -1, q) for x in (self.component_mean, self.component_var))
        return Prediction(
            component_mean=mean,
            component_epistemic_var=np.zeros_like(var),
            component_noise_var=var,
            affine_cost=self.affine_cost.reshape(-1),
            weights=np.full(mean.shape[:2], 1 / c),
        )

    def gaussian(self) -> "Rollout":
        """The Gaussian of the same mean and covariance at every step."""
        var = np.diagonal(self.cov, axis1=-2, axis2=-1)
        return Rollout(self.mean[None], var[None].copy(), self.cov, self.affine_cost)

    def __getitem__(self, trajectories: slice) -> "Rollout":
        """Some of the trajectories."""
        return Rollout(
            self.component_mean[:, trajectories],
            self.component_var[:, trajectories],
            self.cov[trajectories],
            self.affine_cost[trajectories],
        )
