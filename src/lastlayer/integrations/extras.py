"""Optional packages, asked for when they are needed."""

from importlib import import_module
from typing import Any

from lastlayer.errors import LastLayerError


class MissingPackageError(LastLayerError, ImportError):
    """A package that this part of lastlayer needs is not installed."""


def need(package: str, *, extra: str) -> Any:
    """Import a package, or say how to install it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingPackageError(
            f"{package} is needed here and could not be imported ({error}): pip install 'lastlayer[{extra}]'"
        ) from error
