"""A Lightning callback that computes the exact Bayesian last layer of the trained network."""

import importlib.util
import sys
from collections.abc import Iterable
from typing import Any

from lastlayer.errors import need
from lastlayer.estimators.posthoc import attach
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.settings.types import BiasPrior, NoiseStructure


def _home() -> str:
    """Name of the Lightning package: it has two, and one that is already imported takes precedence."""
    names = ("lightning", "pytorch_lightning")
    there = [n for n in names if n in sys.modules] or [n for n in names if importlib.util.find_spec(n)]
    return "lightning.pytorch" if there[:1] == ["lightning"] else "pytorch_lightning"


pl: Any = need(_home(), extra="lightning")


class AttachLastLayer(pl.Callback):  # type: ignore[misc]
    """Call `lastlayer.attach` on the trained module at the end of `trainer.fit`; the fitted model is `callback.model`.

    The module's `forward` must predict the targets. It may take one tensor, several, or several by name, as in
    `lastlayer.attach`. With several processes, the statistics are summed over them.

    Parameters
    ----------
    loader : iterable of batches, default None
        Training rows, as `lastlayer.attach` takes them. None: the trainer's loader.
    layer : str or None, default "auto"
        The linear layer to replace, as in `lastlayer.attach`.
    calibration : iterable of batches, default None
        Held-out rows to calibrate on, as in `lastlayer.attach`.
    noise : {"diagonal", "full"}, default "diagonal"
        Structure of the noise covariance, as in `lastlayer.attach`.
    bias_prior : {"flat", "shared"}, default "flat"
        Prior of the bias, as in `lastlayer.attach`.

    Examples
    --------
    >>> callback = AttachLastLayer(calibration=held_out)  # doctest: +SKIP
    >>> Trainer(callbacks=[callback]).fit(module, loader)  # doctest: +SKIP
    >>> callback.model.predict(X, return_std=True)  # doctest: +SKIP
    """

    model: BLLRegressor | None
    options: dict[str, Any]

    def __init__(
        self,
        loader: Iterable[Any] | None = None,
        *,
        layer: str | None = "auto",
        calibration: Iterable[Any] | None = None,
        noise: NoiseStructure = "diagonal",
        bias_prior: BiasPrior = "flat",
    ) -> None:
        super().__init__()
        self.loader, self.model = loader, None
        self.options = {"layer": layer, "calibration": calibration, "noise": noise, "bias_prior": bias_prior}

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Fit the last layer; Lightning calls this at the end of `trainer.fit`.

        Parameters
        ----------
        trainer : Trainer
            The trainer.
        pl_module : LightningModule
            The trained module.
        """
        loader = trainer.train_dataloader if self.loader is None else self.loader
        self.model = attach(pl_module, loader, **self.options)
