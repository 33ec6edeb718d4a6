"""Standardisation of rows that come in batches: one pass for the scales, then every batch as it is needed."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lastlayer.errors import InputError
from lastlayer.ranks import ONE, Ranks
from lastlayer.scaling import Standardizer
from lastlayer.sources.batch import Batch, Source
from lastlayer.statistics import Statistics


@dataclass(frozen=True)
class Scales:
    """What one pass over raw rows tells."""

    inputs: Standardizer | None
    """None: inputs of more than two dimensions, which are passed on as they are."""
    targets: Standardizer
    n_rows: int
    count: float
    """Sum of the weights."""


def scales_of(source: Source, size: int, *, ranks: Ranks = ONE) -> Scales:
    """Means and standard deviations of the columns, of all processes' rows; refuses rows that are not finite."""
    total: Statistics | None = None
    n_rows, is_table = 0, True
    for batch in source.batches(size, ranks=ranks):
        is_table = batch.X.dim() == 2
        check_finite_batch(batch, n_rows)
        columns = batch.X.double() if is_table else batch.T.double()[:, :0]
        part = Statistics.from_linear_features(columns, batch.T.double(), sample_weight=batch.weight)
        total = part if total is None else total + part
        n_rows += batch.total
    if total is None or n_rows < 2:
        raise InputError(f"the source gave {n_rows} rows in its first pass: at least 2 are needed")
    total = ranks.reduce(total)
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

    def batches(self, size: int, *, seed: int | None = None, first: int = 0, ranks: Ranks = ONE) -> Iterator[Batch]:
        scales, inputs = self.scales, self.scales.inputs
        for batch in self.source.batches(size, seed=seed, first=first, ranks=ranks):
            X = batch.X if inputs is None else inputs.forward(batch.X)
            weight = None if batch.weight is None else self._moved(batch.weight)
            yield Batch(self._moved(X), self._moved(scales.targets.forward(batch.T)), weight, batch.total)

    def _moved(self, values: Tensor) -> Tensor:
        return values.to(dtype=self.dtype).to(self.device, non_blocking=True)


def check_finite_batch(batch: Batch, seen: int) -> None:
    """An error that names the first row with a value that is not finite."""
    for name, values in (("X", batch.X), ("y", batch.T)):
        if not bool(torch.isfinite(values).all()):
            row = int(torch.nonzero(~torch.isfinite(values).reshape(len(values), -1).all(1))[0])
            raise InputError(
                f"{name} has NaN or infinite values (first: row {row} of the batch after {seen} rows); drop or impute "
                "them"
            )
