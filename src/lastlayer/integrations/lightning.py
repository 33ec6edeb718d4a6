"""A callback for Lightning: the exact last layer of whatever network the trainer has trained."""

import importlib.util
import sys
from collections.abc import Iterable
from typing import Any

from lastlayer.errors import need
from lastlayer.estimators.posthoc import attach
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.types import BiasPrior, NoiseStructure


def _home() -> str:
    """Lightning goes by two names; the one that the user has imported counts."""
    names = ("lightning", "pytorch_lightning")
    there = [n for n in names if n in sys.modules] or [n for n in names if importlib.util.find_spec(n)]
    return "lightning.pytorch" if there[:1] == ["lightning"] else "pytorch_lightning"


pl: Any = need(_home(), extra="lightning")


class AttachLastLayer(pl.Callback):  # type: ignore[misc]
    """At the end of `trainer.fit`, `lastlayer.attach` on the trained module; the fitted model is `callback.model`.

    The module's `forward` must predict the targets, called with a tensor, several, or several by name, as
    `lastlayer.attach` does it. With several processes the statistics are summed over them.

    Parameters
    ----------
    loader : iterable of batches, optional
        Training rows, as `lastlayer.attach` takes them. None: the trainer's own.
    layer, calibration, noise, bias_prior
        As in `lastlayer.attach`.

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
        loader = trainer.train_dataloader if self.loader is None else self.loader
        self.model = attach(pl_module, loader, **self.options)
