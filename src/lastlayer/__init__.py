"""Regression with neural networks that quantify their uncertainty: a Bayesian last layer, in PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastlayer import online, plots
    from lastlayer.bayes import evidence, features, posterior, statistics
    from lastlayer.data import distributed, observe, sources
    from lastlayer.estimators import extrapolation
    from lastlayer.estimators.posthoc import attach
    from lastlayer.estimators.regressor import BLLRegressor
    from lastlayer.predictions import metrics, scorers
    from lastlayer.predictions.prediction import Prediction
    from lastlayer.settings.types import TrainingOptions
    from lastlayer.studies import baselines
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
    "baselines",
    "distributed",
    "evidence",
    "extrapolation",
    "features",
    "load",
    "metrics",
    "observe",
    "online",
    "plots",
    "posterior",
    "scorers",
    "sources",
    "statistics",
]
_HOMES = {  # the module of each public name, or the public module itself
    "BLLLoss": "training.loss",
    "BLLRegressor": "estimators.regressor",
    "Prediction": "predictions.prediction",
    "TableRegressor": "tables.regressor",
    "TrainingOptions": "settings.types",
    "attach": "estimators.posthoc",
    "baselines": "studies.baselines",
    "distributed": "data.distributed",
    "evidence": "bayes.evidence",
    "extrapolation": "estimators.extrapolation",
    "features": "bayes.features",
    "load": "tables.regressor",
    "metrics": "predictions.metrics",
    "observe": "data.observe",
    "online": "online",
    "plots": "plots",
    "posterior": "bayes.posterior",
    "scorers": "predictions.scorers",
    "sources": "data.sources",
    "statistics": "bayes.statistics",
}


def __getattr__(name: str) -> Any:
    """Import public names and modules on first use, so that `lastlayer --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lastlayer' has no attribute {name!r}")
    home = import_module(f"lastlayer.{_HOMES[name]}")
    globals()[name] = value = home if home.__name__.endswith(f".{name}") else getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
