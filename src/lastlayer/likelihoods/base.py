"""`Likelihood`: how targets are read as Gaussian readings of the function, and predicted."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer.bayes.readings import Readings
from lastlayer.errors import InputError
from lastlayer.likelihoods.marginal import NO_TAILS, HeldOutReadings, Marginal, Predicted, gaussian
from lastlayer.predictions.joint import add_noise
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.predictions.prediction import Prediction
from lastlayer.settings.types import Given


@dataclass(frozen=True)
class Likelihood:
    """Distribution of the targets given the function; what is not overridden is that of Gaussian noise.

    A model is fitted to the working targets that `read` makes; `predict` turns their Gaussian mixture into the
    distribution of the targets. Numbers of its own are fields, which model files keep.
    """

    name: ClassVar[str]
    """The value of the parameter `likelihood`."""
    modelled: ClassVar[str] = ""
    """What the working targets are, in words, if they are not the targets."""
    point_name: ClassVar[str] = Prediction.point_name
    """What `predict` returns: "mean" or "median"."""
    iterated: ClassVar[bool] = False
    """Whether the Gaussian readings depend on the prediction, see `sites`."""
    linear: ClassVar[bool] = True
    """Whether working targets are the targets, with the mean and the variance of these."""

    def suits(self, y: Float[ndarray, "m q"]) -> bool:
        """Whether `likelihood="auto"` selects it for these targets, of which some may be missing (NaN)."""
        return False

    def read(self, given: Given) -> Readings:
        """Check targets, of which some may be missing (NaN), and convert them to working targets."""
        known = None if given.noise_std is None else torch.tensor(given.noise_std, dtype=torch.float64).square()
        return Readings.of(torch.tensor(given.y, dtype=torch.float64), known)

    def sites(
        self,
        r: Readings,
        mean: Float[Tensor, "*b m q"],
        var: Float[Tensor, "*b m q"],
        noise_var: Float[Tensor, "*#b #q"],
    ) -> Readings:
        """The Gaussian readings that stand for those of an iterated likelihood at the present prediction."""
        return r

    def refitted(self, r: Readings, mean: Float[Tensor, "c n q"], var: Float[Tensor, "c n q"]) -> "Likelihood":
        """Estimate the likelihood's own numbers from held-out predictions of working targets."""
        return self

    def log_marginal(self, r: HeldOutReadings, p: Predicted, tails: tuple[float, float] = NO_TAILS) -> Marginal:
        """Log densities of held-out working targets with the function integrated out, and their slopes."""
        return gaussian(r, p, tails)

    def predict(self, working: MixturePrediction) -> Prediction:
        """Convert a prediction of the working targets to one of the targets."""
        return working

    def draw(
        self, function: Float[ndarray, "n m q"], noise_cov: Float[ndarray, "m q q"] | None, rng: np.random.RandomState
    ) -> Float[ndarray, "n m q"]:
        """Draw targets given draws of the function; `noise_cov`: None for targets without noise."""
        return function if noise_cov is None else function + add_noise(noise_cov, rng.standard_normal(function.shape))

    def check_linear(self, use: str) -> None:
        """Raise an error where the working targets are not the targets."""
        if not self.linear:
            raise InputError(
                f'{use} needs Gaussian predictions of the targets, and this model has likelihood="{self.name}": fit '
                f'one to {self.modelled}, with likelihood="gaussian", and transform its predictions'
            )


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Gaussian noise."""

    name = "gaussian"
