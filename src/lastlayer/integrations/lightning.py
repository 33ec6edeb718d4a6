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
    """Call `lastlayer.attach` on the trained module at the end of `trainer.fit`."""

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
        """Fit the last layer; Lightning calls this at the end of `trainer.fit`."""
        loader = trainer.train_dataloader if self.loader is None else self.loader
        self.model = attach(pl_module, loader, **self.options)
