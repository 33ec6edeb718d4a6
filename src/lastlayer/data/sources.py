"""Sources of rows that may not fit into memory: passes over batches, in an order determined by a seed."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from numpy import ndarray
from torch import Tensor

from lastlayer._internal.arrays import converted
from lastlayer._internal.digests import Digest, digest_of
from lastlayer._internal.process_state import isolated
from lastlayer._internal.work import row_chunks
from lastlayer.bayes.statistics import Statistics
from lastlayer.data.distributed import ONE, ProcessGroup
from lastlayer.data.rows import Batch
from lastlayer.data.scaling import LARGEST_TARGET, Scales, Standardizer
from lastlayer.errors import InputError
from lastlayer.networks.structured import Inputs, as_inputs, named

POOL_NUMBERS = 2**20
"""Input values in a pool, unless batches are large: 8 MB in float64."""
BLOCK_ROWS = 1_024

Columns = list[ndarray]
"""Inputs, targets and perhaps weights of some rows."""


@dataclass(frozen=True)
class Samples:
    """A batch from a loader: inputs of any structure, targets of any shape."""

    inputs: Inputs
    y: Tensor
    weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)


@runtime_checkable
class Source(Protocol):
    """Rows that can be passed over repeatedly; the same seed must give the same batches."""

    @property
    def n_rows(self) -> int | None:
        """Rows in a pass over all processes; None if unknown before the first pass."""
        ...

    def batches(
        self, size: int, *, seed: int | None = None, first: int = 0, process_group: ProcessGroup = ONE
    ) -> Iterator[Batch]:
        """One pass over the rows, in order or shuffled."""
        ...


def common_of(source: Source) -> dict[str, Any]:
    """Describe what the sources of all processes must have in common, before any row is read."""
    units = digest_of(source.unit_rows) if isinstance(source, Pooled) else None
    columns = getattr(source, "columns", None)
    return {"source": type(source).__name__, "rows": source.n_rows, "columns": columns, "digest of row groups": units}


@dataclass(frozen=True)
class LoaderSource:
    """A DataLoader, or any iterable that can be iterated repeatedly.

    Batches are (X, y) or (X, y, weight), where X is a tensor, a tuple of tensors or a dictionary of them, or
    dictionaries that hold the targets too. Only `lastlayer.attach` accepts inputs other than one tensor. Batches keep
    the loader's size, whatever size is requested, and the loader decides whether they are shuffled. With several
    processes, each has a loader for its share of the rows, for example with a DistributedSampler.

    Parameters
    ----------
    loader : iterable of batches
        The loader.
    targets : str, default "labels"
        Key of the targets in dictionaries.
    weight : str, default "sample_weight"
        Key of the weights in dictionaries.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> from lastlayer.data.sources import LoaderSource
    >>> X = torch.linspace(-1, 1, 64)[:, None]
    >>> source = LoaderSource(DataLoader(TensorDataset(X, X[:, 0] ** 2), batch_size=16))
    >>> len(list(source.batches(16)))
    4
    """

    loader: Iterable[Any]
    targets: str = "labels"
    weight: str = "sample_weight"

    n_rows = None
    """Unknown before a pass, because of samplers, workers and dropped batches."""

    def batches(
        self, size: int, *, seed: int | None = None, first: int = 0, process_group: ProcessGroup = ONE
    ) -> Iterator[Batch]:
        for some in self.samples(seed=seed, first=first):
            if not isinstance(some.inputs, Tensor):
                raise InputError(
                    f"the loader gave {len(some.inputs)} inputs ({', '.join(named(some.inputs))}), and training takes "
                    "one tensor: train the network in your own loop, then call lastlayer.attach(network, loader)"
                )
            yield Batch.loaded((some.inputs, some.y, some.weight), len(some) * process_group.world_size)

    def samples(self, *, seed: int | None = None, first: int = 0) -> Iterator[Samples]:
        """Iterate over the batches once, in the loader's order, with inputs of any structure."""
        return map(self._parsed, itertools.islice(self._seeded(seed), first, None))

    def _parsed(self, item: Any) -> Samples:
        if isinstance(item, Mapping):
            if self.targets not in item:
                raise InputError(
                    f"the loader gave a dictionary of {', '.join(map(repr, item))} in place of one with "
                    f"{self.targets!r}: name the entry that holds the targets, LoaderSource(loader, targets=...)"
                )
            X: Any = {name: value for name, value in item.items() if name not in (self.targets, self.weight)}
            y, weight = item[self.targets], item.get(self.weight)
        elif isinstance(item, (tuple, list)) and len(item) in (2, 3):
            X, y, weight = (*item, None)[:3]
        else:
            raise InputError(
                f"the loader gave a {type(item).__name__} in place of (X, y) or (X, y, weight): wrap the dataset "
                "so that every item is such a tuple, or a dictionary"
            )
        return Samples(as_inputs(X), torch.as_tensor(y), None if weight is None else torch.as_tensor(weight))

    def _seeded(self, seed: int | None) -> Iterator[Any]:
        """Iterate with seeded generators, the loader's and torch's default one, and restore both."""
        seed, generator = seed or 0, getattr(self.loader, "generator", None)
        items = isolated(self.loader, torch.default_generator, seed)
        if isinstance(generator, torch.Generator):
            items = isolated(items, generator, seed)
        sampler: Any = getattr(self.loader, "sampler", None)
        if not hasattr(sampler, "set_epoch"):
            return items
        before = getattr(sampler, "epoch", 0)
        sampler.set_epoch(seed)
        first = list(itertools.islice(items, 1))  # samplers fix their order at the first batch
        sampler.set_epoch(before)
        return itertools.chain(first, items)


@dataclass(frozen=True)
class SourceScales(Scales):
    """Scalers found in one pass over the raw rows."""

    n_rows: int
    count: float
    """Sum of their weights."""


def scales_of(
    source: Source, size: int, *, process_group: ProcessGroup = ONE, digest: Digest | None = None
) -> SourceScales:
    """Compute the scalers from one pass over the rows of all processes."""
    total: Statistics | None = None
    n_rows, is_table, sizes = 0, True, Digest()
    found: dict[str, Any] = {"batches in a pass": 0}
    for batch in source.batches(size, process_group=process_group):
        is_table = batch.X.dim() == 2 and batch.X.is_floating_point()
        sizes.add(str(batch.total))
        found |= batch.kind | {"batches in a pass": found["batches in a pass"] + 1}
        if digest is not None:
            digest.add(batch.X, batch.T, batch.weight)
        check_finite({"X": batch.X, "y": batch.T}, n_rows)
        columns = batch.X.double() if is_table else batch.T.double()[:, :0]
        part = Statistics.from_linear_features(columns, batch.T.double(), sample_weight=batch.weight)
        total = part if total is None else total + part
        n_rows += batch.total
    process_group.agree(found | {"rows in a pass": n_rows, "digest of the batches' sizes": str(sizes)})
    if total is None or n_rows < 2:
        raise InputError(f"the source gave {n_rows} rows in its first pass: at least 2 are needed")
    total = process_group.reduce(total)
    k, var = total.n_linear, total.scatter.diagonal() / total.count
    parts = (slice(k), slice(k, None))
    inputs, targets = (Standardizer.of_moments(total.mean[at], var[at], n_rows) for at in parts)
    return SourceScales(inputs if is_table else None, targets, n_rows, float(total.count))


@dataclass(frozen=True)
class StandardizedSource:
    """A source whose batches are standardised and converted to one dtype and device."""

    source: Source
    scales: SourceScales
    device: torch.device
    dtype: torch.dtype

    @property
    def n_rows(self) -> int:
        return self.scales.n_rows

    def batches(
        self, size: int, *, seed: int | None = None, first: int = 0, process_group: ProcessGroup = ONE
    ) -> Iterator[Batch]:
        scales, inputs = self.scales, self.scales.inputs
        for batch in self.source.batches(size, seed=seed, first=first, process_group=process_group):
            X = batch.X if inputs is None else inputs.forward(batch.X)
            weight = None if batch.weight is None else self._moved(batch.weight)
            readings = scales.read(batch.readings).map(self._moved)
            yield Batch(self._moved(X), readings, weight, batch.total)

    def _moved(self, values: Tensor) -> Tensor:
        return converted(values, self.dtype).to(self.device, non_blocking=True)


def check_finite(tensors: dict[str, Tensor], seen: int) -> None:
    """Check that all values are finite and that their squares do not overflow."""
    for name, values in tensors.items():
        fine = torch.isfinite(values) & (values.double().abs() <= LARGEST_TARGET)
        if not bool(fine.all()):
            row = int(torch.nonzero(~fine.reshape(len(values), -1).all(1))[0])
            raise InputError(
                f"{name} has NaN or infinite values, or some beyond {LARGEST_TARGET:g} (first: row {row} of the batch "
                f"after {seen} rows); drop or impute them, or give {name} in another unit"
            )


class Pooled:
    """Base class of sources on disk; a subclass defines its units and how to read one."""

    @property
    def unit_rows(self) -> Int[ndarray, " u"]:
        """Rows in each unit."""
        raise NotImplementedError

    @property
    def n_inputs(self) -> int:
        """Number of input values per row."""
        raise NotImplementedError

    def read(self, unit: int) -> Columns:
        raise NotImplementedError

    @property
    def n_rows(self) -> int:
        return int(self.unit_rows.sum())

    def batches(
        self, size: int, *, seed: int | None = None, first: int = 0, process_group: ProcessGroup = ONE
    ) -> Iterator[Batch]:
        """One pass; every process reads the same pools and keeps its share of each batch."""
        order = Order.of(self.unit_rows, seed)
        totals = batch_lengths(self.n_rows, size)
        for total, rows in zip(totals[first:], self.pieces(order, totals, size=size, first=first), strict=True):
            yield Batch.loaded([part[process_group.rank :: process_group.world_size] for part in rows], total)

    def pieces(self, order: "Order", lengths: list[int], *, size: int, first: int) -> Iterator[Columns]:
        """Read the rows in pieces of given lengths, with one pool of units in memory at a time."""
        at_least = max(4 * size, POOL_NUMBERS // max(self.n_inputs, 1))
        ends = np.cumsum(lengths)
        todo = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)][first:]
        position = 0  # rows before the pool
        held: Columns | None = None  # rows waiting for their piece to be complete
        for pool in order.pools(at_least):
            n = int(order.rows[pool].sum())
            shuffled = np.arange(n) if order.rng is None else order.rng.permutation(n)  # drawn also for skipped pools
            if not todo or 0 < n <= todo[0].start - position:
                position += n
                continue
            each = zip(order.units[pool].tolist(), order.starts[pool], order.stops[pool], strict=True)
            read = _joined([[part[start:stop] for part in self.read(unit)] for unit, start, stop in each])
            shuffled = shuffled[max(0, todo[0].start - position) :] if held is None else shuffled
            read = [part[shuffled] for part in read]
            held = read if held is None else _joined([held, read])
            position += n
            while todo and todo[0].stop <= position:
                cut = todo.pop(0)
                length = cut.stop - cut.start
                yield [part[:length] for part in held]
                held = [part[length:] for part in held]
            held = held if len(held[0]) else None


@dataclass(frozen=True)
class Order:
    """The units of a pass in reading order, and the range of rows used from each."""

    units: Int[ndarray, " u"]
    starts: Int[ndarray, " u"]
    stops: Int[ndarray, " u"]
    """First row used of each unit, and the end of them."""
    rng: np.random.Generator | None
    """Generator that shuffles the rows of a pool; None: rows come in order."""

    @classmethod
    def of(cls, rows: Int[ndarray, " u"], seed: int | None) -> "Order":
        rng = None if seed is None else np.random.default_rng(seed)
        units = np.arange(len(rows)) if rng is None else rng.permutation(len(rows))
        return cls(units, np.zeros_like(rows), rows[units], rng)

    def within(self, start: int, stop: int) -> "Order":
        """Restrict the pass to a range of rows; units outside it are not read."""
        before = np.cumsum(self.rows) - self.rows
        starts, stops = (np.clip(at - before, 0, self.rows) for at in (start, stop))
        wanted = stops > starts
        wanted[0] |= not wanted.any()  # no rows, but the columns are known
        return Order(self.units[wanted], starts[wanted], stops[wanted], self.rng)

    @property
    def rows(self) -> Int[ndarray, " u"]:
        return self.stops - self.starts

    def pools(self, at_least: int) -> "list[Int[ndarray, ' n']]":
        """Group the units into pools that are in memory together."""
        pool_of = np.cumsum(self.rows) // at_least
        return np.split(np.arange(len(self.units)), np.flatnonzero(np.diff(pool_of)) + 1)


def batch_lengths(n_rows: int, size: int) -> list[int]:
    return [cut.stop - cut.start for cut in row_chunks(n_rows, size)]


@dataclass(frozen=True)
class ArraySource(Pooled):
    """NumPy arrays, including memory maps, which stay on disk.

    Examples
    --------
    >>> import numpy as np
    >>> from lastlayer.data.sources import ArraySource
    >>> source = ArraySource(np.zeros((100, 3)), np.ones(100))
    >>> [len(batch.X) for batch in source.batches(40, seed=0)]
    [33, 33, 34]
    """

    X: Any
    """Inputs, one row per sample."""
    y: Any
    """Targets (m,) or (m, q)."""
    sample_weight: Any = None
    """Weights (m,); None: 1."""

    def __post_init__(self) -> None:
        if len(self.X) != len(self.y) or not len(self.X):
            raise InputError(f"X has {len(self.X)} rows and y has {len(self.y)}: give equally many, at least one")

    @cached_property
    def unit_rows(self) -> Int[ndarray, " u"]:
        return np.diff(np.append(np.arange(0, len(self.X), BLOCK_ROWS), len(self.X)))

    @property
    def n_inputs(self) -> int:
        return int(np.prod(self.X.shape[1:]))

    def read(self, unit: int) -> Columns:
        rows = slice(unit * BLOCK_ROWS, (unit + 1) * BLOCK_ROWS)
        return [part[rows] for part in (self.X, self.y, self.sample_weight) if part is not None]


@dataclass(frozen=True)
class Without(Pooled):
    """All rows of an array source but some, which are given in ascending order."""

    source: ArraySource
    rows: Int[ndarray, " r"]

    @cached_property
    def unit_rows(self) -> Int[ndarray, " u"]:
        return self.source.unit_rows - np.bincount(self.rows // BLOCK_ROWS, minlength=len(self.source.unit_rows))

    @property
    def n_inputs(self) -> int:
        return self.source.n_inputs

    def read(self, unit: int) -> Columns:
        here = self.rows[self.rows // BLOCK_ROWS == unit] - unit * BLOCK_ROWS
        return [np.delete(part, here, axis=0) for part in self.source.read(unit)]


def _joined(parts: list[Columns]) -> Columns:
    return [each[0] if len(each) == 1 else np.concatenate(each) for each in zip(*parts, strict=True)]
