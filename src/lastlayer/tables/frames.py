"""Tables from pandas and polars DataFrames, and from dictionaries of columns."""

from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from numpy import ndarray

from lastlayer.errors import InputError
from lastlayer.tables.files import Table, typed

CELLS = (str, Real, Decimal, date, time, type(None), np.bool_)


def is_table(X: Any) -> bool:
    return isinstance(X, Table | Mapping) or (hasattr(X, "columns") and hasattr(X, "__getitem__"))


def as_table(X: Any) -> Table:
    """Convert a pandas or polars DataFrame or a dictionary of columns; a `Table` is returned as it is."""
    if isinstance(X, Table):
        return X
    if not is_table(X):
        raise InputError(f"X must be a table with named columns, such as a DataFrame, but it is a {type(X).__name__}")
    names = list(X if isinstance(X, Mapping) else X.columns)
    if strange := [name for name in names if not isinstance(name, str) or not name.strip()]:
        raise InputError(f"the column name {strange[0]!r} is not a text: rename it, for instance to 'x{strange[0]}'")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"there are two columns called {twice!r}: rename one of them")
    columns = {name: column_cells(X[name], name) for name in names}
    if len({len(cells) for cells in columns.values()}) != 1 or not len(next(iter(columns.values()))):
        raise InputError(f"the table has {len(names)} columns, but no rows, or columns of different lengths")
    return Table(columns)


def column_cells(column: Any, name: str) -> ndarray:
    """Convert a pandas or polars column, a NumPy array or a sequence to a column of a table."""
    library = type(column).__module__.split(".")[0]
    if library == "polars":
        values = _of_polars(column)
    elif hasattr(column, "notna"):
        values = _of_pandas(column)
    else:
        values = np.asarray(column)
        values = typed(values.tolist()) if values.dtype.kind in "OUT" and values.ndim == 1 else values
    strange = {type(cell) for cell in values if not isinstance(cell, CELLS)} if values.dtype.kind == "O" else set()
    if values.ndim != 1 or values.dtype.kind not in "biufMO" or strange:
        what = f"holds a {min(kind.__name__ for kind in strange)}" if strange else f"is {values.dtype}"
        shape = f" of shape {values.shape}" if values.ndim != 1 else ""
        raise InputError(f"column {name!r} {what}{shape}: columns contain numbers, texts or dates")
    if values.dtype.kind in "iuf":
        return values.astype(float)
    return values.astype("datetime64[us]") if values.dtype.kind == "M" else values


def _of_pandas(column: Any) -> ndarray:
    kind = column.dtype.kind
    if kind in "iuf":
        return np.asarray(column.to_numpy(dtype=float, na_value=np.nan))
    if kind == "b" and not column.isna().any():
        return np.asarray(column.to_numpy(dtype=bool))
    if kind == "M":
        naive = column.dt.tz_localize(None) if getattr(column.dtype, "tz", None) is not None else column
        return np.asarray(naive.to_numpy(dtype="datetime64[us]"))
    return typed([None if gone else cell for cell, gone in zip(column.astype(object), column.isna(), strict=True)])


def _of_polars(column: Any) -> ndarray:
    return np.asarray(column.cast(float)) if column.dtype.is_numeric() else typed(column.to_list())
