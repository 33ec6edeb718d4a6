"""What lastlayer says when something is wrong: what was wrong, what was given, what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class LastLayerError(Exception):
    """Base of every error that lastlayer raises on purpose."""


class InputError(LastLayerError, ValueError):
    """Data or an argument that cannot be used as given."""


class PrecisionError(LastLayerError, ArithmeticError):
    """A number that float64 moments of these features cannot deliver to the accuracy asked for."""


class FlooredNoiseWarning(UserWarning):
    """The noise came out below what targets of this scale can resolve and was raised to that floor."""


def choose(name: str, given: object, allowed: Iterable[str]) -> str:
    """Return `given` if it is one of the `allowed` words; otherwise an error that names the nearest one."""
    words = sorted(allowed)
    if isinstance(given, str) and given in words:
        return given
    near = get_close_matches(str(given), words, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InputError(f"{name}={given!r} is not known: choose one of {', '.join(map(repr, words))}{hint}")
