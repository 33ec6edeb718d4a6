"""Rows as training takes them: readings of a function at points, and of functionals of it beside them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from numpy import ndarray
from torch import Tensor

from lastlayer._internal.arrays import converted
from lastlayer._internal.work import CHUNK_ROWS, row_chunks
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.noise_groups import StatisticsByNoise, Targets
from lastlayer.bayes.statistics import Readings, Statistics
from lastlayer.data.copies import fingerprints, joined, near_groups
from lastlayer.data.distributed import ONE, ProcessGroup
from lastlayer.data.observe import FeatureMap, Measurements
from lastlayer.data.scaling import Scales
from lastlayer.errors import InputError
from lastlayer.likelihoods.base import Gaussian, Likelihood
from lastlayer.settings.types import Given, Shape


@dataclass(frozen=True)
class Points:
    """Readings of a function at the rows of X."""

    X: Tensor
    """Standardised inputs, (m, ...); (s, m, d) for a stack of networks with rows of their own."""
    readings: Readings
    """Standardised targets with their noise."""
    weight: Tensor | None = None
    """Sample weights (m,), or (s, m) for a stack; None: 1."""

    @classmethod
    def of(cls, X: Tensor, T: Tensor, weight: Tensor | None = None, noise_var: Tensor | None = None) -> "Points":
        """Read targets of which some may be missing (NaN), with known noise variances."""
        return cls(X, Readings.of(T, noise_var), weight)

    @property
    def T(self) -> Tensor:
        return self.readings.t

    @property
    def varied(self) -> bool:
        """Whether every target takes at least two values."""
        return all(bool(len(t[~t.isnan()].unique()) > 1) for t in self.readings.values.T)

    def take(self, rows: Tensor | ndarray | slice) -> "Points":
        """Select rows; of a stack, the same of every network."""
        rows = rows if isinstance(rows, slice) else torch.as_tensor(rows, device=self.X.device)
        X = self.X[rows] if self.readings.t.dim() == 2 else self.X[..., rows, :]
        weight = None if self.weight is None else self.weight[..., rows]
        return Points(X, self.readings.map(lambda x: x[..., rows, :]), weight)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Points":
        """Move to a device, with inputs of another type; ids stay integers."""
        weight = None if self.weight is None else self.weight.to(device)
        return Points(converted(self.X, dtype, device), self.readings.map(lambda x: x.to(device)), weight)

    def float(self) -> "Points":
        """Inputs, targets and weights in float32; ids stay integers."""
        weight = None if self.weight is None else self.weight.float()
        readings = replace(self.readings, t=self.T.float())
        return Points(converted(self.X, torch.float32), readings, weight)

    def keys(self) -> Int64[ndarray, " m"]:
        """Fingerprints of the rows, inputs and targets."""
        columns = [x.detach().cpu().double().flatten(1).numpy() for x in (self.X, self.readings.values)]
        return fingerprints(np.concatenate(columns, 1))

    def features(self, linear: FeatureMap) -> Float[Tensor, "*b m p"]:
        """Affine features in float64."""
        return affine_features(linear(self.X)).double()

    def moments(self, linear: FeatureMap, noise_var: Tensor | None = None) -> Statistics:
        """Statistics of linear features, computed at once and with gradients, also for a stack."""
        return Statistics.of(linear(self.X).double(), self.readings, weight=self.weight, noise_var=noise_var)

    def targets(self, linear: FeatureMap) -> list[Targets]:
        """Targets of each output with their known noise."""
        Phi, readings = self.features(linear), self.readings
        weight = torch.ones_like(Phi[:, 0]) if self.weight is None else self.weight.to(Phi)
        known = torch.zeros_like(self.T) if readings.known is None else readings.known
        read = torch.ones_like(self.T) if readings.read is None else readings.read
        columns = zip(self.T.to(Phi).T, known.to(Phi).T, read.T > 0, strict=True)
        return [Targets(j, Phi[at], t[at], weight[at], v[at], True) for j, (t, v, at) in enumerate(columns)]

    @torch.no_grad()
    def statistics(self, linear: FeatureMap, noise_var: Tensor | None = None) -> Statistics:
        """Statistics of linear features, computed chunk by chunk."""
        parts = [self] if len(self.X) <= CHUNK_ROWS else self.chunks()
        return reduce(add, (part.moments(linear, noise_var) for part in parts))

    def chunks(self, size: int = CHUNK_ROWS) -> "Iterator[Points]":
        """Split the rows into chunks that fit into memory with their features."""
        return (self.take(rows) for rows in row_chunks(len(self.X), size))

    @property
    def n_rows(self) -> int:
        """Rows in a pass."""
        return self.T.shape[-2]

    def batches(
        self, size: int, *, seed: int | None = None, first: int = 0, process_group: ProcessGroup = ONE
    ) -> "Iterator[Batch]":
        """One pass over the rows, in order or shuffled: rows in memory are a `Source`."""
        order: Tensor | None = None
        if seed is not None:
            generator = torch.Generator(self.X.device).manual_seed(seed)
            order = torch.randperm(self.n_rows, generator=generator, device=self.X.device)
        for cut in row_chunks(self.n_rows, size)[first:]:
            rows = slice(cut.start + process_group.rank, cut.stop, process_group.world_size)
            part = self.take(rows if order is None else order[rows])
            yield Batch(part.X, part.readings, part.weight, cut.stop - cut.start)


@dataclass(frozen=True)
class Batch(Points):
    """Rows of a pass, of which other processes may have some more."""

    total: int = 0
    """Rows of this batch over all processes."""

    @property
    def kind(self) -> dict[str, Any]:
        """Properties that all batches of all processes must share."""
        return {
            "shape of a row of X": tuple(self.X.shape[1:]),
            "dtype of X": str(self.X.dtype),
            "outputs": self.T.shape[1],
            "weighted": self.weight is not None,
        }

    @classmethod
    def loaded(cls, parts: Iterable[Any], total: int) -> "Batch":
        """Inputs, targets and perhaps weights, as arrays or tensors."""
        X, y, *weight = (torch.as_tensor(part) for part in parts if part is not None)
        return cls(X, Readings(y[:, None] if y.dim() == 1 else y), weight[0] if weight else None, total)


@dataclass(frozen=True)
class Rows:
    """The rows of a table, and measured functionals beside them."""

    main: Points
    """The rows of the table."""
    beside: tuple[Measurements, ...] = ()
    """Measured functionals of the same function."""
    scales: Scales | None = None
    """Standardisation of the rows."""
    given: Given | None = None
    """The rows in original units."""
    copies: Int[ndarray, " m"] | None = None
    """Index of each row's group of nearly equal rows; None: such rows were not looked for."""
    groups: Int[ndarray, " m"] | None = None
    """Index of each row's group as given, where groups that share copies are one; None: there are no groups."""
    likelihood: Likelihood = Gaussian()  # noqa: RUF009
    """Distribution of the targets given the function."""
    complete: bool = field(init=False)
    """Whether every target is read with the learned noise alone, and there are no functionals."""
    learned: bool = field(init=False)
    """Whether all noise is learned."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "complete", self.main.readings.complete and not self.beside)
        object.__setattr__(self, "learned", self.main.readings.known is None and not self.beside)

    @classmethod
    def of(cls, given: Given, likelihood: Likelihood, scales: Scales | None = None) -> "Rows":
        """Read and standardise rows, in float64 on the CPU.

        Without scalers these are training rows: the scalers are fitted to them, and copies searched for in a table.
        """
        working, copies, groups, to_train = likelihood.read(given), None, given.groups, scales is None
        scales = Scales.of(given, working) if scales is None else scales
        readings, X = scales.read(working), torch.tensor(given.X)
        if scales.inputs is not None:
            X = scales.inputs.forward(X)
            copies = near_groups(X.numpy(), readings.values.numpy()) if to_train else None
            groups = groups if copies is None or groups is None else joined(copies, groups)
        beside: tuple[Measurements, ...] = ()
        if given.observations:
            inputs = scales.inputs
            if inputs is None:
                raise InputError(
                    "observations need a table: these inputs are integers, or have more than two dimensions"
                )
            beside = tuple(Measurements.of(one, inputs, scales.targets) for one in given.observations)
        weight = None if given.weight is None else torch.tensor(given.weight)
        return cls(Points(X, readings, weight), beside, scales, given, copies, groups, likelihood)

    @property
    def shape(self) -> Shape:
        """What the settings depend on."""
        read, n_groups = self.main.readings.read, None
        if self.copies is not None:
            n_groups = round((int(self.copies.max()) + 1) * (1.0 if read is None else float(read.double().mean())))
        return Shape(
            tuple(self.main.X.shape),
            n_groups=n_groups,
            n_together=None if self.groups is None else int(self.groups.max()) + 1,
            complete=self.complete,
            learned=self.learned,
            n_beside=sum(len(seen.readings.t) for seen in self.beside),
            ids=not self.main.X.is_floating_point(),
        )

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Rows":
        """Move to a device, with inputs of another type; ids stay integers."""
        beside = tuple(seen.to(device, dtype) for seen in self.beside)
        return replace(self, main=self.main.to(device, dtype), beside=beside)

    def take(self, rows: Tensor | ndarray | slice) -> "Rows":
        """Select rows of the table; functionals stay."""
        return Rows(self.main.take(rows), self.beside, likelihood=self.likelihood)

    def sampled(self, at: Int[Tensor, " n"]) -> "Rows":
        """Select rows of the table, each weighted for all rows that it stands for; functionals stay."""
        part = self.main.take(at)
        weight = torch.ones(len(at), dtype=torch.float64, device=part.X.device) if part.weight is None else part.weight
        return Rows(replace(part, weight=weight * (self.main.T.shape[-2] / len(at))), self.beside)

    def stacked(self, parts: Sequence[Int[ndarray, "_"]]) -> "Rows":
        """Rows of each network of a stack side by side, padded with rows of weight zero."""
        main, longest = self.main, max(len(part) for part in parts)
        index = torch.from_numpy(np.stack([np.resize(part, longest) for part in parts])).to(main.X.device)
        weight = None if main.weight is None else main.weight[index]
        if any(len(part) < longest for part in parts):
            used = torch.stack([torch.arange(longest) < len(part) for part in parts]).to(index.device)
            weight = used.double() if weight is None else used * weight
        return Rows(Points(main.X[index], main.readings.map(lambda x: x[index]), weight), self.beside)

    @property
    def kinds(self) -> tuple[Points | Measurements, ...]:
        """Everything that was observed of the function: each kind has `readings`, `moments` and `targets`."""
        return (self.main, *self.beside)

    def statistics(self, linear: FeatureMap, noise_var: Float[Tensor, "*b q"] | None = None) -> Statistics:
        """Statistics of all observations, computed at once and with gradients, also for a stack."""
        return reduce(add, (kind.moments(linear, noise_var) for kind in self.kinds))

    @torch.no_grad()
    def by_noise(self, linear: FeatureMap) -> StatisticsByNoise:
        """Statistics of linear features as a function of the learned noise."""
        return StatisticsByNoise([targets for kind in self.kinds for targets in kind.targets(linear)])
