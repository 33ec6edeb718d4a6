"""Bayesian linear regression on the features of a network that was trained on the squared error."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lastlayer.regressor import BLLRegressor
from lastlayer.types import BiasPrior, NoiseModel


class BLRRegressor(BLLRegressor):
    """A network trained on the mean squared error; then alpha and noise at the maximum of the evidence of its features.

    All else, the exact last layer and what can be asked of it, is as in BLLRegressor.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (50, 50),
        *,
        activation: str = "tanh",
        input_skip: bool | str = "auto",
        backbone: nn.Module | Callable[[], nn.Module] | None = None,
        noise: NoiseModel = "diagonal",
        bias_prior: BiasPrior = "flat",
        optimizer: str = "adam",
        learning_rate: float = 2e-2,
        max_epochs: int = 500,
        early_stopping: bool | str = "auto",
        validation_fraction: float = 0.15,
        patience: int = 200,
        device: str = "auto",
        dtype: str = "float64",
        random_state: Any = None,
        progress: bool = False,
    ) -> None:
        super().__init__(
            hidden,
            activation=activation,
            input_skip=input_skip,
            backbone=backbone,
            preset="fast",
            objective="mse",
            noise=noise,
            bias_prior=bias_prior,
            optimizer=optimizer,
            learning_rate=learning_rate,
            max_epochs=max_epochs,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            patience=patience,
            device=device,
            dtype=dtype,
            random_state=random_state,
            progress=progress,
        )
