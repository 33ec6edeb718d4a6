"""Arrays of users as NumPy arrays and as tensors of a type; errors name the rows at fault."""

from typing import Any

import numpy as np
import torch
from numpy import ndarray

from lastlayer.errors import InputError

WIDENED = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
"""Types of torch that NumPy lacks, and what they are converted to."""


def as_array(values: Any) -> Any:
    """Convert torch tensors to NumPy arrays, widened where NumPy lacks the type; return anything else unchanged."""
    if not isinstance(values, torch.Tensor):
        return values
    values = values.detach().cpu()
    return values.to(WIDENED.get(values.dtype, values.dtype)).numpy()


def converted(x: torch.Tensor, dtype: torch.dtype, device: torch.device | str | None = None) -> torch.Tensor:
    """Convert to another floating-point type and device; integers, such as ids, stay integers."""
    return x.to(device=device, dtype=dtype if x.is_floating_point() else x.dtype)


def contiguous(a: ndarray) -> ndarray:
    """Return an array that torch accepts: contiguous, without the negative strides that a single column may have."""
    return np.ascontiguousarray(a) if all(step >= 0 for step in a.strides) else a.copy()


def check_finite(values: ndarray, name: str, *, largest: float | None = None) -> None:
    """Raise an error that counts the values that are not finite, or too large, and names the first such row."""
    bad = ~np.isfinite(values)
    if bad.any():
        rows = rows_with(bad)
        counts = ((int(np.isnan(values).sum()), "NaN"), (int(np.isinf(values).sum()), "infinite (inf)"))
        what = " and ".join(f"{n} {word} values" for n, word in counts if n)
        raise InputError(f"{name} has {what} in {len(rows)} rows (first: row {rows[0]}); drop or impute them")
    if largest is not None and float(np.abs(values).max(initial=0)) > largest:
        rows = rows_with(np.abs(values) > largest)
        raise InputError(
            f"{name} has values beyond {largest:g} in {len(rows)} rows (first: row {rows[0]}); fix them, or give "
            f"{name} in another unit"
        )


def rows_with(bad: ndarray, place: ndarray | None = None) -> ndarray:
    """Indices of the rows with a bad value; `place` is that of each of the user's rows among these, -1 for none."""
    rows = np.asarray(bad.reshape(len(bad), -1).any(1))
    return np.flatnonzero(rows if place is None else rows[place] & (place >= 0))
