"""Rows on disk, read unit by unit: memory maps and Parquet files, shuffled without ever being in memory as a whole.

A pass reads its units in random order, a pool of them at a time, and shuffles the rows of the pool. So what is read
lies together on disk, and memory is that of a pool.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy import ndarray

from lastlayer.errors import InputError
from lastlayer.ranks import ONE, Ranks
from lastlayer.sources.batch import Batch, cuts

POOL_NUMBERS = 2**20
"""Inputs that a pool holds, unless batches are large: 8 MB in float64."""
BLOCK_ROWS = 1_024

Columns = tuple[ndarray, ndarray, ndarray | None]
"""Inputs, targets, weights of some rows."""


class Pooled:
    """What sources on disk share: a subclass knows its units and how to read one."""

    @property
    def unit_rows(self) -> Int[ndarray, " u"]:
        """Rows in each unit."""
        raise NotImplementedError

    @property
    def n_inputs(self) -> int:
        """Numbers in a row of inputs."""
        raise NotImplementedError

    def read(self, unit: int) -> Columns:
        """The rows of one unit."""
        raise NotImplementedError

    @property
    def n_rows(self) -> int:
        return int(self.unit_rows.sum())

    def batches(self, size: int, *, seed: int | None = None, first: int = 0, ranks: Ranks = ONE) -> Iterator[Batch]:
        """One pass; every process reads the same pools and keeps its own rows of each batch."""
        rng = np.random.default_rng(seed)
        rows = self.unit_rows
        units = np.arange(len(rows)) if seed is None else rng.permutation(len(rows))
        at_least = max(4 * size, POOL_NUMBERS // max(self.n_inputs, 1))
        pool_of = np.cumsum(rows[units]) // at_least
        pools = np.split(units, np.flatnonzero(np.diff(pool_of)) + 1)
        todo = cuts(int(rows.sum()), size)[first:]
        position = 0  # rows before the pool
        held: Columns | None = None  # rows that wait for their batch to be full
        for pool in pools:
            n = int(rows[pool].sum())
            order = np.arange(n) if seed is None else rng.permutation(n)  # drawn also for pools that are skipped
            if not todo or position + n <= todo[0].start:
                position += n
                continue
            read = _joined([self.read(int(unit)) for unit in pool])
            skipped = max(0, todo[0].start - position) if held is None else 0
            held = _joined([held, _taken(read, order[skipped:])])
            position += n
            while todo and todo[0].stop <= position:
                cut = todo.pop(0)
                length = cut.stop - cut.start
                yield _batch(_taken(held, slice(ranks.rank, length, ranks.world)), length)
                held = _taken(held, slice(length, None))
            held = held if len(held[0]) else None


@dataclass(frozen=True)
class ArraySource(Pooled):
    """NumPy arrays, memory maps among them, which stay on disk."""

    X: Any
    y: Any
    sample_weight: Any = None
    left_out: tuple[int, ...] = ()
    """Rows never given out, in rising order."""

    def __post_init__(self) -> None:
        if len(self.X) != len(self.y) or not len(self.X):
            raise InputError(f"X has {len(self.X)} rows and y has {len(self.y)}: give as many of each, at least one")

    @cached_property
    def _left_out(self) -> Int[ndarray, " n"]:
        return np.asarray(self.left_out, dtype=np.int64)

    @cached_property
    def unit_rows(self) -> Int[ndarray, " u"]:
        starts = np.append(np.arange(0, len(self.X), BLOCK_ROWS), len(self.X))
        return np.diff(starts) - np.diff(np.searchsorted(self._left_out, starts))

    @property
    def n_inputs(self) -> int:
        return int(np.prod(self.X.shape[1:]))

    def read(self, unit: int) -> Columns:
        rows = slice(unit * BLOCK_ROWS, (unit + 1) * BLOCK_ROWS)
        first, last = np.searchsorted(self._left_out, [rows.start, rows.stop])
        without = self._left_out[first:last] - rows.start
        weight = None if self.sample_weight is None else np.delete(self.sample_weight[rows], without, axis=0)
        return np.delete(self.X[rows], without, axis=0), np.delete(self.y[rows], without, axis=0), weight

    def rows(self, at: Int[ndarray, " n"]) -> Columns:
        """Some rows, in memory."""
        weight = None if self.sample_weight is None else np.asarray(self.sample_weight[at])
        return np.asarray(self.X[at]), np.asarray(self.y[at]), weight


@dataclass(frozen=True)
class ParquetSource(Pooled):
    """Columns of Parquet files, read row group by row group; needs pyarrow (`pip install "lastlayer[parquet]"`)."""

    paths: Sequence[str | Path]
    inputs: Sequence[str]
    targets: Sequence[str]
    sample_weight: str | None = None

    @cached_property
    def _groups(self) -> list[tuple[Any, int, int]]:
        """File, number of the row group, rows."""
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise InputError('ParquetSource needs pyarrow: pip install "lastlayer[parquet]"') from error
        files = [parquet.ParquetFile(path) for path in self.paths]
        for path, file in zip(self.paths, files, strict=True):
            missing = sorted(set(self._columns) - set(file.schema_arrow.names))
            if missing:
                raise InputError(f"{path} has no columns {missing}; it has {sorted(file.schema_arrow.names)}")
        return [
            (file, g, file.metadata.row_group(g).num_rows)
            for file in files
            for g in range(file.metadata.num_row_groups)
        ]

    @property
    def _columns(self) -> list[str]:
        return [*self.inputs, *self.targets, *([] if self.sample_weight is None else [self.sample_weight])]

    @cached_property
    def unit_rows(self) -> Int[ndarray, " u"]:
        return np.array([rows for _, _, rows in self._groups], dtype=np.int64)

    @property
    def n_inputs(self) -> int:
        return len(self.inputs)

    def read(self, unit: int) -> Columns:
        file, group, _ = self._groups[unit]
        table = file.read_row_group(group, columns=self._columns)
        columns = {name: table.column(name).to_numpy().astype(np.float64) for name in self._columns}
        stacked = lambda names: np.stack([columns[name] for name in names], axis=1)
        weight = None if self.sample_weight is None else columns[self.sample_weight]
        return stacked(self.inputs), stacked(self.targets), weight


def _joined(parts: "list[Columns | None]") -> Columns:
    given = [part for part in parts if part is not None]
    if len(given) == 1:
        return given[0]
    X, y, weight = zip(*given, strict=True)
    return np.concatenate(X), np.concatenate(y), None if weight[0] is None else np.concatenate(weight)


def _taken(rows: Columns, at: "ndarray | slice") -> Columns:
    X, y, weight = rows
    return X[at], y[at], None if weight is None else weight[at]


def _batch(rows: Columns, total: int) -> Batch:
    X, y, weight = (None if part is None else torch.from_numpy(np.ascontiguousarray(part)) for part in rows)
    assert X is not None
    assert y is not None
    return Batch(X, y[:, None] if y.dim() == 1 else y, weight, total)
