"""Optional packages, asked for when they are needed."""

import warnings
from importlib import import_module
from typing import Any

from lastlayer.errors import LastLayerError


class MissingPackageError(LastLayerError, ImportError):
    """A package that this part of lastlayer needs is not installed."""


def need(package: str, *, extra: str) -> Any:
    """Import a package, silent about parts and futures of its own, or say how to install it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(package)
    except ImportError as error:
        raise MissingPackageError(
            f"{package} is needed here and could not be imported ({error}): pip install 'lastlayer[{extra}]'"
        ) from error
