"""Shapes of targets and predictions: 1-D targets without an axis for the output, alignment."""

from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer.errors import InputError


def like_targets(values: Float[ndarray, "*s q"], y_ndim: int) -> Float[ndarray, "*t"]:
    """Values of each output in the shape of the targets: 1-D targets have no axis for their single output."""
    return values[..., 0] if y_ndim == 1 else values


def align(y: Any, shape: tuple[int, ...]) -> Float[ndarray, "m q"]:
    """Targets of m points and q outputs as (m, q); an error for any other shape, as nothing is broadcast."""
    given, (m, q) = np.asarray(y, dtype=float), shape
    if given.shape != (m, q) and not (q == 1 and given.shape == (m,)):
        raise InputError(
            f"targets have shape {given.shape}, but the prediction is of {m} points and {q} outputs: give "
            f"targets of shape ({m}, {q}){f' or ({m},)' if q == 1 else ''}"
        )
    return given.reshape(m, q)
