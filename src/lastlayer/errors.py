"""Errors and warnings of lastlayer. A message says what was wrong, what was given, and what to do."""

import os
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any


class LastLayerError(Exception):
    """Base class of all errors that lastlayer raises deliberately."""


class InputError(LastLayerError, ValueError):
    """Data or an argument cannot be used as given."""


class InputTypeError(InputError, TypeError):
    """Data are of a type that cannot be used, such as a sparse matrix or objects that are not real numbers."""


class PrecisionError(LastLayerError, ArithmeticError):
    """A result cannot be computed to the required accuracy from float64 moments of these features."""


class MissingPackageError(LastLayerError, ImportError):
    """A package that this part of lastlayer needs is not installed."""


class MismatchError(InputError):
    """Processes that fit one model together differ in what must be equal; raised by all of them."""


class ProcessError(LastLayerError, RuntimeError):
    """Another process of the group has failed, has exited, or did not respond in time."""


class FlooredNoiseWarning(UserWarning):
    """The estimated noise is below what targets of this scale can resolve, and was raised to that floor."""


class MissingTargetsWarning(UserWarning):
    """Some targets of a table are missing: each output learns from the rows where it is known."""


class CopiesWarning(UserWarning):
    """Most rows of a table are exact or near copies of others."""


def check_choice(name: str, given: object, allowed: Iterable[str]) -> str:
    """Return `given` if it is one of the `allowed` strings."""
    words = list(allowed)
    if isinstance(given, str) and given in words:
        return given
    raise unknown_choice(name, given, words)


def unknown_choice(name: str, given: object, allowed: Iterable[str]) -> InputError:
    """The error for a word that is not one of the allowed ones, which suggests the closest of them."""
    words = sorted(allowed)
    near = get_close_matches(str(given), words, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InputError(f"{name}={given!r} is not known: choose one of {', '.join(map(repr, words))}{hint}")


def need(package: str, *, extra: str) -> Any:
    """Import an optional package, with its warnings suppressed, or raise an error with installation instructions."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(package)
    except ImportError as error:
        raise MissingPackageError(
            f"{package} is needed here and could not be imported ({error}): pip install 'lastlayer[{extra}]'"
        ) from error


def check_writable(path: Path) -> None:
    """Check before a long computation that a file can be written."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: give the name of a file in it")
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink():
        raise InputError(f"cannot write {path}: it is a symbolic link that leads to itself")
    if not target.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {target.parent}")
    if target.exists() and not target.is_file():
        raise InputError(f"{path} is neither a file nor a folder: give the name of a file")
    if not os.access(target.parent, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise InputError(f"cannot write {path}: no permission; choose another place")
