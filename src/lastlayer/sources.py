"""Where rows come from, when they do not all fit into memory: passes over batches, in an order that a seed decides.

One small protocol, `Source`, and what speaks it. Rows on disk (memory maps; Parquet files, in `parquet`) are read unit
by unit: a pass reads its units in random order, a pool of them at a time, and shuffles the rows of the pool. So what is
read lies together on disk, and memory is that of a pool.
"""

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

from lastlayer.digests import Digest, digest_of
from lastlayer.distributed import ONE, ProcessGroup
from lastlayer.errors import InputError
from lastlayer.inputs import LARGEST_TARGET
from lastlayer.networks.structured import Inputs, as_inputs, converted, named
from lastlayer.process_state import isolated
from lastlayer.scaling import Standardizer
from lastlayer.statistics import Statistics, row_chunks

POOL_NUMBERS = 2**20
"""Inputs that a pool holds, unless batches are large: 8 MB in float64."""
BLOCK_ROWS = 1_024

Columns = tuple[ndarray, ndarray, ndarray | None]
"""Inputs, targets, weights of some rows."""


@dataclass(frozen=True)
class Batch:
    """Some rows: inputs, targets (r, q), and weights (r,) or, for a stack of networks, (s, r)."""

    X: Tensor
    T: Tensor
    weight: Tensor | None = None
    total: int = 0
    """Rows of this batch on all processes."""

    @property
    def kind(self) -> dict[str, Any]:
        """What all batches have in common, on all processes."""
        return {
            "shape of a row of X": tuple(self.X.shape[1:]),
            "dtype of X": str(self.X.dtype),
            "outputs": self.T.shape[1],
            "weighted": self.weight is not None,
        }

    @classmethod
    def of(cls, parts: Iterable[Any], total: int) -> "Batch":
        """From arrays or tensors: X, y and, where there are any, weights."""
        X, y, *weight = (torch.as_tensor(part) for part in parts if part is not None)
        return cls(X, y[:, None] if y.dim() == 1 else y, weight[0] if weight else None, total)


@dataclass(frozen=True)
class Samples:
    """What a loader gives at a time: inputs of any structure, targets of any shape, and weights of the samples."""

    inputs: Inputs
    y: Tensor
    weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)


@runtime_checkable
class Source(Protocol):
    """Rows that can be passed over again and again. The same seed must give the same batches."""

    @property
    def n_rows(self) -> int | None:
        """In a pass, on all processes; None: not known before the first."""
        ...

    def batches(
        self, size: int, *, seed: int | None = None, first: int = 0, process_group: ProcessGroup = ONE
    ) -> Iterator[Batch]:
        """One pass, in order or shuffled by `seed`, from batch number `first` on; the rows of this process."""
        ...


def common_of(source: Source) -> dict[str, Any]:
    """What the sources of all processes have in common, as far as it is known before rows are read."""
    units = digest_of(source.unit_rows) if isinstance(source, Pooled) else None
    columns = getattr(source, "columns", None)
    return {"source": type(source).__name__, "rows": source.n_rows, "columns": columns, "digest of row groups": units}


@dataclass(frozen=True)
class TensorSource:
    """Rows that lie in memory as they are needed, on the device of the network."""

    X: Tensor
    T: Tensor
    weight: Tensor | None = None
    """(m,), or (s, m) for a stack of networks."""

    @property
    def n_rows(self) -> int:
        return len(self.X)

    def batches(
        self, size: int, *, seed: int | None = None, first: int = 0, process_group: ProcessGroup = ONE
    ) -> Iterator[Batch]:
        order: Tensor | None = None
        if seed is not None:
            generator = torch.Generator(self.X.device).manual_seed(seed)
            order = torch.randperm(len(self.X), generator=generator, device=self.X.device)
        for cut in row_chunks(len(self.X), size)[first:]:
            rows = slice(cut.start + process_group.rank, cut.stop, process_group.world_size)
            at = rows if order is None else order[rows]
            weight = None if self.weight is None else self.weight[..., at]
            yield Batch(self.X[at], self.T[at], weight, cut.stop - cut.start)


@dataclass(frozen=True)
class LoaderSource:
    """A DataLoader, or anything that can be iterated again and again.

    Batches are (X, y) or (X, y, weight), where X is a tensor, a tuple of tensors or a dictionary of them; or
    dictionaries that hold the targets too. Only `lastlayer.attach` takes inputs other than one tensor. Batches are
    taken as they come, whatever size was asked for; the loader decides whether they are shuffled. With several
    processes each of them has a loader of its own rows, such as one with a DistributedSampler.

    Parameters
    ----------
    loader : iterable of batches
    targets, weight : str, default "labels" and "sample_weight"
        The entries of a dictionary that are no inputs.
    """

    loader: Iterable[Any]
    targets: str = "labels"
    weight: str = "sample_weight"

    @property
    def n_rows(self) -> int | None:
        return None  # what samplers, workers and dropped batches leave is known after a pass

    def batches(
        self, size: int, *, seed: int | None = None, first: int = 0, process_group: ProcessGroup = ONE
    ) -> Iterator[Batch]:
        for some in self.samples(seed=seed, first=first):
            if not isinstance(some.inputs, Tensor):
                raise InputError(
                    f"the loader gave {len(some.inputs)} inputs ({', '.join(named(some.inputs))}), and training takes "
                    "one tensor: train the network in a loop of your own, then lastlayer.attach(network, loader)"
                )
            yield Batch.of((some.inputs, some.y, some.weight), len(some) * process_group.world_size)

    def samples(self, *, seed: int | None = None, first: int = 0) -> Iterator[Samples]:
        """One pass over the batches as they are, in the loader's order: the same for the same seed, or without one."""
        return map(self._parsed, itertools.islice(self._seeded(seed), first, None))

    def _parsed(self, item: Any) -> Samples:
        if isinstance(item, Mapping):
            rest = dict(item)
            if self.targets not in rest:
                raise InputError(
                    f"the loader gave a dictionary of {', '.join(map(repr, rest))} in place of one with "
                    f"{self.targets!r}: name the entry that holds the targets, LoaderSource(loader, targets=...)"
                )
            y, weight = rest.pop(self.targets), rest.pop(self.weight, None)
            return Samples(as_inputs(rest), torch.as_tensor(y), None if weight is None else torch.as_tensor(weight))
        if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
            raise InputError(
                f"the loader gave a {type(item).__name__} in place of (X, y) or (X, y, weight): wrap the dataset "
                "so that every item is such a tuple, or a dictionary"
            )
        X, y, *weights = item
        return Samples(as_inputs(X), torch.as_tensor(y), torch.as_tensor(weights[0]) if weights else None)

    def _seeded(self, seed: int | None) -> Iterator[Any]:
        """Samplers draw from the loader's generator, or else from torch's own; both are left as they were."""
        seed = 0 if seed is None else seed
        generator = getattr(self.loader, "generator", None)
        items = isolated(self.loader, torch.default_generator, seed)
        if isinstance(generator, torch.Generator):
            items = isolated(items, generator, seed)
        sampler: Any = getattr(self.loader, "sampler", None)
        if not hasattr(sampler, "set_epoch"):
            return items
        before = getattr(sampler, "epoch", 0)
        sampler.set_epoch(seed)
        first = list(itertools.islice(items, 1))  # samplers decide on their order with the first batch
        sampler.set_epoch(before)
        return itertools.chain(first, items)


@dataclass(frozen=True)
class Scales:
    """What one pass over raw rows tells."""

    inputs: Standardizer | None
    """None: integers, or inputs of more than two dimensions, which are passed on as they are."""
    targets: Standardizer
    n_rows: int
    count: float
    """Sum of the weights."""


def scales_of(source: Source, size: int, *, process_group: ProcessGroup = ONE, digest: Digest | None = None) -> Scales:
    """Means and standard deviations of the columns, of all processes' rows; refuses rows that are not finite.

    Processes whose rows are not of the same kind, or not in as many batches, are refused. `digest` takes in the rows.
    """
    total: Statistics | None = None
    n_rows, is_table, common = 0, True, Digest()
    found: dict[str, Any] = {"batches in a pass": 0}
    for batch in source.batches(size, process_group=process_group):
        is_table = batch.X.dim() == 2 and batch.X.is_floating_point()
        common.add(str(batch.total))
        found |= batch.kind | {"batches in a pass": found["batches in a pass"] + 1}
        if digest is not None:
            digest.add(batch.X, batch.T, batch.weight)
        check_finite({"X": batch.X, "y": batch.T}, n_rows)
        columns = batch.X.double() if is_table else batch.T.double()[:, :0]
        part = Statistics.from_linear_features(columns, batch.T.double(), sample_weight=batch.weight)
        total = part if total is None else total + part
        n_rows += batch.total
    process_group.agree(found | {"rows in a pass": n_rows, "digest of the batches' sizes": str(common)})
    if total is None or n_rows < 2:
        raise InputError(f"the source gave {n_rows} rows in its first pass: at least 2 are needed")
    total = process_group.reduce(total)
    both = Standardizer.of_moments(total.mean, total.scatter.diagonal() / total.count, n_rows)
    k = total.n_linear
    inputs = Standardizer(both.mean[:k], both.scale[:k]) if is_table else None
    return Scales(inputs, Standardizer(both.mean[k:], both.scale[k:]), n_rows, float(total.count))


@dataclass(frozen=True)
class StandardizedSource:
    """A source whose batches come standardised, in one type, on one device."""

    source: Source
    scales: Scales
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
            yield Batch(self._moved(X), self._moved(scales.targets.forward(batch.T)), weight, batch.total)

    def _moved(self, values: Tensor) -> Tensor:
        return converted(values, self.dtype).to(self.device, non_blocking=True)


def check_finite(tensors: dict[str, Tensor], seen: int) -> None:
    """An error that names the first row with a value that is not finite or has no square, after so many before."""
    for name, values in tensors.items():
        fine = torch.isfinite(values) & (values.double().abs() <= LARGEST_TARGET)
        if not bool(fine.all()):
            row = int(torch.nonzero(~fine.reshape(len(values), -1).all(1))[0])
            raise InputError(
                f"{name} has NaN or infinite values, or some beyond {LARGEST_TARGET:g} (first: row {row} of the batch "
                f"after {seen} rows); drop or impute them, or give {name} in another unit"
            )


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

    def batches(
        self, size: int, *, seed: int | None = None, first: int = 0, process_group: ProcessGroup = ONE
    ) -> Iterator[Batch]:
        """One pass; every process reads the same pools and keeps its own rows of each batch."""
        order = Order.of(self.unit_rows, seed)
        totals = batch_lengths(self.n_rows, size)
        for total, rows in zip(totals[first:], self.pieces(order, totals, size=size, first=first), strict=True):
            yield Batch.of(_taken(rows, slice(process_group.rank, None, process_group.world_size)), total)

    def pieces(self, order: "Order", lengths: list[int], *, size: int, first: int) -> Iterator[Columns]:
        """The rows in pieces of these lengths, from piece number `first` on; a pool of units in memory at a time."""
        at_least = max(4 * size, POOL_NUMBERS // max(self.n_inputs, 1))
        ends = np.cumsum(lengths)
        todo = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)][first:]
        position = 0  # rows before the pool
        held: Columns | None = None  # rows that wait for their piece to be full
        for pool in order.pools(at_least):
            n = int(order.rows[pool].sum())
            shuffled = np.arange(n) if order.rng is None else order.rng.permutation(n)  # drawn also for skipped pools
            if not todo or 0 < n <= todo[0].start - position:
                position += n
                continue
            read = _joined([_taken(self.read(int(order.units[i])), order.kept(i)) for i in pool.tolist()])
            skipped = max(0, todo[0].start - position) if held is None else 0
            held = _joined([held, _taken(read, shuffled[skipped:])])
            position += n
            while todo and todo[0].stop <= position:
                cut = todo.pop(0)
                yield _taken(held, slice(cut.stop - cut.start))
                held = _taken(held, slice(cut.stop - cut.start, None))
            held = held if len(held[0]) else None


@dataclass(frozen=True)
class Order:
    """The units of a pass in the order in which they are read, and which of their rows are wanted."""

    units: Int[ndarray, " u"]
    starts: Int[ndarray, " u"]
    stops: Int[ndarray, " u"]
    rng: np.random.Generator | None
    """Shuffles the rows of a pool; None: rows come in order."""

    @classmethod
    def of(cls, rows: Int[ndarray, " u"], seed: int | None) -> "Order":
        """All rows of all units."""
        rng = None if seed is None else np.random.default_rng(seed)
        units = np.arange(len(rows)) if rng is None else rng.permutation(len(rows))
        return cls(units, np.zeros_like(rows), rows[units], rng)

    def within(self, start: int, stop: int) -> "Order":
        """Rows `start` to `stop` of the pass; units outside are not read."""
        before = np.cumsum(self.rows) - self.rows
        starts, stops = (np.clip(at - before, 0, self.rows) for at in (start, stop))
        wanted = stops > starts
        wanted[0] |= not wanted.any()  # no row of it, but the columns are known
        return Order(self.units[wanted], starts[wanted], stops[wanted], self.rng)

    @property
    def rows(self) -> Int[ndarray, " u"]:
        return self.stops - self.starts

    def kept(self, i: int) -> slice:
        """The wanted rows of the i-th unit."""
        return slice(int(self.starts[i]), int(self.stops[i]))

    def pools(self, at_least: int) -> "list[Int[ndarray, ' n']]":
        """Positions of units that are in memory together: about `at_least` rows."""
        pool_of = np.cumsum(self.rows) // at_least
        return np.split(np.arange(len(self.units)), np.flatnonzero(np.diff(pool_of)) + 1)


def batch_lengths(n_rows: int, size: int) -> list[int]:
    """Rows in each batch of a pass."""
    return [cut.stop - cut.start for cut in row_chunks(n_rows, size)]


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
        kept = lambda values: np.delete(values[rows], self._left_out[first:last] - rows.start, axis=0)
        return kept(self.X), kept(self.y), None if self.sample_weight is None else kept(self.sample_weight)


def _joined(parts: "list[Columns | None]") -> Columns:
    given = [part for part in parts if part is not None]
    if len(given) == 1:
        return given[0]
    X, y, weight = zip(*given, strict=True)
    return np.concatenate(X), np.concatenate(y), None if weight[0] is None else np.concatenate(weight)


def _taken(rows: Columns, at: "ndarray | slice") -> Columns:
    X, y, weight = rows
    return X[at], y[at], None if weight is None else weight[at]
