"""Regression with neural networks that quantify their uncertainty: a Bayesian last layer, in PyTorch."""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastlayer.estimators.posthoc import attach
    from lastlayer.estimators.regressor import BLLRegressor
    from lastlayer.parameters import TrainingOptions
    from lastlayer.prediction import Prediction
    from lastlayer.tables.regressor import TableRegressor, load
    from lastlayer.training.loss import BLLLoss

__version__ = "0.1.0"
__all__ = [
    "BLLLoss",
    "BLLRegressor",
    "Prediction",
    "TableRegressor",
    "TrainingOptions",
    "__version__",
    "attach",
    "load",
]
_HOMES = {
    "BLLLoss": "training.loss",
    "BLLRegressor": "estimators.regressor",
    "Prediction": "prediction",
    "TableRegressor": "tables.regressor",
    "TrainingOptions": "parameters",
    "attach": "estimators.posthoc",
    "load": "tables.regressor",
}
_MODULES = frozenset(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))


def __getattr__(name: str) -> Any:
    """Import public names and modules on first use, so that `lastlayer --help` does not wait for torch."""
    if name in _HOMES:
        value: Any = getattr(import_module(f"lastlayer.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"lastlayer.{name}")
    else:
        raise AttributeError(f"module 'lastlayer' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOMES.keys() | _MODULES)
