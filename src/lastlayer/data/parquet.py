"""Rows from Parquet files, folders or buckets, read row group by row group; each process reads its share."""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from lastlayer.data.distributed import ONE, ProcessGroup
from lastlayer.data.rows import Batch
from lastlayer.data.sources import Columns, Order, Pooled, batch_lengths
from lastlayer.errors import InputError, need


@dataclass(frozen=True)
class ParquetSource(Pooled):
    """Columns of Parquet files as a source for `fit_source`; needs pyarrow (`pip install "lastlayer[parquet]"`).

    In each pass, a process reads only the row groups that hold its rows; a row group at the border between two
    processes is read by both. Memory holds a pool of row groups, at least one: write files with row groups of at most
    about 100,000 rows.

    Parameters
    ----------
    paths : str, Path or a sequence of them
        A file, a folder (searched recursively), a pattern such as `"data/2024-*.parquet"`, or several files. A single
        string may also be a URI that pyarrow supports, such as "s3://bucket/folder". In a folder, names that begin with
        "." or "_" are ignored, and folders called "name=value" become a column "name".
    inputs : sequence of str
        Names of the input columns. Integers, floats, decimals and booleans are read as float64.
    targets : sequence of str
        Names of the target columns.
    sample_weight : str, default None
        Name of the column of weights.

    Examples
    --------
    >>> source = ParquetSource("measurements/", inputs=["flow", "speed"], targets=["head"])  # doctest: +SKIP
    >>> model = BLLRegressor(max_epochs=20).fit_source(source)  # doctest: +SKIP
    """

    paths: str | Path | Sequence[str | Path]
    inputs: Sequence[str]
    targets: Sequence[str]
    sample_weight: str | None = None

    def __post_init__(self) -> None:
        for name in ("inputs", "targets"):
            if isinstance(given := getattr(self, name), str) or not given:
                raise InputError(f"{name}={given!r} must be a list of column names, such as {name}=['flow']")

    def batches(
        self, size: int, *, seed: int | None = None, first: int = 0, process_group: ProcessGroup = ONE
    ) -> Iterator[Batch]:
        """One pass, in which each process reads consecutive rows of the order of row groups."""
        totals = batch_lengths(self.n_rows, size)
        own = [process_group.local_count(total) for total in totals]
        rank, n = process_group.rank, process_group.world_size
        start = sum(total // n * rank + min(rank, total % n) for total in totals)  # rows of the processes before
        order = Order.of(self.unit_rows, seed).within(start, start + sum(own))
        for total, rows in zip(totals[first:], self.pieces(order, own, size=size, first=first), strict=True):
            yield Batch.loaded(rows, total)

    @property
    def columns(self) -> list[str]:
        """Names of the inputs, the targets and the weight, in this order."""
        return [*self.inputs, *self.targets, *([] if self.sample_weight is None else [self.sample_weight])]

    @cached_property
    def _row_groups(self) -> list[Any]:
        pa, dataset = need("pyarrow", extra="parquet"), need("pyarrow.dataset", extra="parquet")
        try:
            files = dataset.dataset(_files(self.paths), format="parquet", partitioning="hive")
            fragments = sorted(files.get_fragments(), key=lambda fragment: fragment.path)
            for fragment in fragments:
                self._check(fragment)
            groups = [group for fragment in fragments for group in fragment.split_by_row_group()]
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{self.paths} cannot be read as Parquet: {error}") from error
        if not sum(group.row_groups[0].num_rows for group in groups):
            raise InputError(f"{self.paths} has no rows: {len(fragments)} Parquet files were found there")
        return groups

    def _check(self, fragment: Any) -> None:
        """Raise an error if a file lacks a column or a column is not numeric."""
        types = need("pyarrow.types", extra="parquet")
        kinds = _kinds(fragment)
        if missing := [name for name in self.columns if name not in kinds]:
            raise InputError(f"{fragment.path} has no columns {missing}; it has {sorted(kinds)}")
        numeric = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean)
        for name in self.columns:
            if not any(is_kind(kinds[name]) for is_kind in numeric):
                raise InputError(
                    f"column {name!r} of {fragment.path} is of type {kinds[name]}: a column must hold numbers in every "
                    "file; convert it, or encode text as numbers, before fit_source"
                )

    @cached_property
    def unit_rows(self) -> Int[ndarray, " u"]:
        return np.array([group.row_groups[0].num_rows for group in self._row_groups], dtype=np.int64)

    @property
    def n_inputs(self) -> int:
        return len(self.inputs)

    def read(self, unit: int) -> Columns:
        group, pa = self._row_groups[unit], need("pyarrow", extra="parquet")
        kinds = _kinds(group)
        table = group.to_table(schema=pa.schema([(name, kinds[name]) for name in dict.fromkeys(self.columns)]))
        columns = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            if column.null_count:
                raise InputError(
                    f"column {name!r} of {group.path} has {column.null_count} nulls in row group "
                    f"{group.row_groups[0].id}: drop or impute these rows before fit_source"
                )
            columns[name] = column.cast(pa.float64(), safe=False).to_numpy()
        stacked = lambda names: np.stack([columns[name] for name in names], axis=1)
        weight = [] if self.sample_weight is None else [columns[self.sample_weight]]
        return [stacked(self.inputs), stacked(self.targets), *weight]


def _files(paths: str | Path | Sequence[str | Path]) -> str | list[str]:
    """Convert paths to what pyarrow accepts for a dataset: a folder or URI unchanged, otherwise a list of files."""
    if isinstance(paths, (str, Path)):
        text = str(paths)
        if "://" in text or Path(text).exists():
            return text
        found = sorted(glob.glob(text, recursive=True))
        if not found:
            raise InputError(f"there is no file or folder {text}, and as a pattern it matches nothing")
        return found
    if missing := [str(path) for path in paths if not Path(path).is_file()]:
        raise InputError(f"there is no file {missing[0]}: give a list of files, or one folder or pattern")
    return [str(path) for path in paths]


def _kinds(fragment: Any) -> dict[str, Any]:
    pa, dataset = need("pyarrow", extra="parquet"), need("pyarrow.dataset", extra="parquet")
    keys = dataset.get_partition_keys(fragment.partition_expression)
    named = {name: pa.scalar(value).type for name, value in keys.items()}
    return named | {field.name: field.type for field in fragment.physical_schema}
