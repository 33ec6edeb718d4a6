"""Shapes of targets and predictions: 1-D targets without an axis for the output, alignment, DataFrames."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer.errors import InputError, need


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


def frame(
    by_output: Mapping[str, Float[ndarray, "m q"]],
    by_point: Mapping[str, ndarray],
    *,
    outputs: Sequence[str] | None,
    index: Any,
) -> Any:
    """A pandas DataFrame of values per output, then per point; the names of several outputs prefix the columns."""
    q = next(iter(by_output.values())).shape[1]
    names = ["" if q == 1 else f"y{i}_" for i in range(q)] if outputs is None else [f"{name}_" for name in outputs]
    if isinstance(outputs, str) or len(names) != q:
        raise InputError(f"outputs={outputs!r} must be a list of {q} names, one for each output")
    columns = {f"{name}{word}": values[:, i] for i, name in enumerate(names) for word, values in by_output.items()}
    return need("pandas", extra="pandas").DataFrame(columns | dict(by_point), index=index)
