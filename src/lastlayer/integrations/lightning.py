"""A callback for Lightning: the exact last layer of whatever network the trainer has trained."""

import importlib.util
import sys
from collections.abc import Iterable
from typing import Any

from lastlayer.attaching import attach
from lastlayer.integrations.extras import need
from lastlayer.regressor import BLLRegressor
from lastlayer.types import BiasPrior, NoiseStructure


def _home() -> str:
    """Lightning goes by two names; the one that the user has imported counts."""
    names = ("lightning", "pytorch_lightning")
    there = [name for name in names if name in sys.modules] or [
        name for name in names if importlib.util.find_spec(name)
    ]
    return "lightning.pytorch" if there[:1] == ["lightning"] else "pytorch_lightning"


pl: Any = need(_home(), extra="lightning")


class AttachLastLayer(pl.Callback):  # type: ignore[misc]
    """At the end of `trainer.fit`, `lastlayer.attach` on the trained module; the fitted model is `callback.model`.

    The module's `forward` must predict the targets. With several processes the statistics are summed over them.

    Parameters
    ----------
    loader : batches (X, y) of training rows. None: the trainer's own.
    layer, calibration, noise, bias_prior : as in `lastlayer.attach`.
    """

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
        self.loader, self.layer, self.calibration = loader, layer, calibration
        self.noise: NoiseStructure = noise
        self.bias_prior: BiasPrior = bias_prior
        self.model: BLLRegressor | None = None

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.model = attach(
            pl_module,
            trainer.train_dataloader if self.loader is None else self.loader,
            layer=self.layer,
            calibration=self.calibration,
            noise=self.noise,
            bias_prior=self.bias_prior,
        )
