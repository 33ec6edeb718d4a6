"""Regression with neural networks that know what they do not know."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastlayer.attaching import attach
    from lastlayer.prediction import Prediction
    from lastlayer.regressor import BLLRegressor, load
    from lastlayer.training.loss import BLLLoss

__version__ = "0.1.0.dev0"
__all__ = ["BLLLoss", "BLLRegressor", "Prediction", "__version__", "attach", "load"]
_HOMES = {
    "BLLLoss": "training.loss",
    "BLLRegressor": "regressor",
    "Prediction": "prediction",
    "attach": "attaching",
    "load": "regressor",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are asked for: `lastlayer --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lastlayer' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"lastlayer.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOMES.keys())
