"""Additive sufficient statistics of a Bayesian linear regression on affine features.

All that the last layer ever needs of m rows are their weighted count, the means, and the centred second moments
of [phi_tilde, T]: over chunks, machines and time they simply add up. They are kept centred because differences of
large raw sums lose the digits that the variance lives on; Phi'Phi, Phi'T and T'T follow from them.

Where outputs are observed at different rows, or with different known noise, each has statistics of its own
(`OutputStatistics`). A row may also be a linear functional of the function, such as a derivative: its features are
those of the functional, and so is the number that stands in place of the one (`from_functionals`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.errors import InputError
from lastlayer.features import linear_features
from lastlayer.linalg import EPS, TINY, eigvalsh
from lastlayer.scaling import Standardizer

MOMENTS = ("count", "mean", "scatter", "energy")
"""The fields of `Statistics` that are numbers of the rows."""
CHUNK_ROWS = 16_384
PILOT_ROWS = 256
"""Rows whose mean is near enough to that of a chunk for the difference to cost no digits."""
GPU_CHUNK = 2**27
"""Numbers of a chunk on a GPU: large enough that starting its kernels costs nothing beside their work."""


def row_chunks(m: int, size: int = CHUNK_ROWS) -> list[slice]:
    """m rows in pieces of nearly the same number, at most `size`: no small rest at the end."""
    n = -(-m // size)
    return [slice(i * m // n, (i + 1) * m // n) for i in range(n)]


@dataclass(frozen=True)
class Statistics:
    """Count, mean and scatter of the rows [phi_tilde, t] seen so far, in float64. `a + b`, `a - b`, `a.scaled(c)`."""

    count: Float[Tensor, "*b"]
    """m: the sum of the sample weights."""
    mean: Float[Tensor, "*b c"]
    """Weighted mean of [phi_tilde, t]; c = k + q columns."""
    scatter: Float[Tensor, "*b c c"]
    """Sum of w (row - mean)' (row - mean)."""
    energy: Float[Tensor, "*b c"]
    """Diagonal of all scatter that ever went in, also what was taken out again: rounding errors are relative to it."""
    n_outputs: int
    """q: how many of the last columns are targets."""
    observations: Float[Tensor, "*b"] | None = None
    """n: how many targets they are; None: `count`. A target of known noise counts as one, but weighs less in the
    moments; a derivative is one too, and says nothing of the bias, which `count` is the precision of."""

    @classmethod
    def from_functionals(
        cls, Psi: Float[Tensor, "*b n p"], t: Float[Tensor, "*#b n q"], precision: Float[Tensor, "*#b n"] | None = None
    ) -> "Statistics":
        """Statistics of linear functionals: rows [L phi_tilde, L 1] in place of [phi_tilde, 1].

        `precision` is the variance of the noise of the function over that of each target.
        """
        t = t.expand(*Psi.shape[:-2], *t.shape[-2:])
        rows, one = torch.cat([Psi[..., :-1], t], -1).double(), Psi[..., -1:].double()
        w = torch.ones_like(one) if precision is None else precision.double().expand(one.shape[:-1])[..., None]
        count = (w * one.square()).sum((-2, -1))
        mean = (w * one * rows).sum(-2) / count.clamp_min(TINY)[..., None]
        rest = rows - one * mean[..., None, :]
        scatter = rest.mT @ (w * rest)
        n = torch.full_like(count, float(Psi.shape[-2]))
        return cls(count, mean, scatter, _diagonal(scatter).detach(), t.shape[-1], n)

    @classmethod
    def from_features(
        cls,
        Phi: Float[Tensor, "*b m p"],
        T: Float[Tensor, "*b m q"],
        *,
        sample_weight: Float[Tensor, "*#b m"] | None = None,
    ) -> "Statistics":
        """Statistics of affine features and targets; a weight of 2 counts as the row given twice."""
        return cls.from_linear_features(linear_features(Phi), T, sample_weight=sample_weight)

    @classmethod
    def from_linear_features(
        cls,
        phi_tilde: Float[Tensor, "*b m k"],
        T: Float[Tensor, "*#b m q"],
        *,
        sample_weight: Float[Tensor, "*#b m"] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> "Statistics":
        """The same from features without the column of ones; rows are converted and centred chunk by chunk.

        In float32 the products of a chunk are as coarse as that, which `energy` remembers; sums are float64 anyway.
        """
        m = phi_tilde.shape[-2]
        if m == 0 or T.shape[-2] != m:
            raise InputError(f"{m} rows of features and {T.shape[-2]} of targets: give as many of each, at least one")
        total: Statistics | None = None
        step = chunk_rows(phi_tilde)
        for start in range(0, m, step):
            rows = slice(start, start + step)
            weight = None if sample_weight is None else sample_weight[..., rows]
            part = cls._of_chunk(phi_tilde[..., rows, :], T[..., rows, :], weight, dtype)
            total = part if total is None else total + part
        assert total is not None
        return total

    @classmethod
    def from_batches(cls, batches: Iterable[tuple[Tensor, ...]]) -> "Statistics":
        """Statistics of an iterator of (Phi, T) or (Phi, T, sample_weight) batches, one batch in memory at a time."""
        total: Statistics | None = None
        for Phi, T, *weight in batches:
            part = cls.from_features(Phi, T, sample_weight=weight[0] if weight else None)
            total = part if total is None else total + part
        if total is None:
            raise InputError("the iterator of batches gave nothing: at least one batch (Phi, T) is needed")
        return total

    @classmethod
    def _of_chunk(cls, phi_tilde: Tensor, T: Tensor, weight: Tensor | None, dtype: torch.dtype) -> "Statistics":
        T = T.expand(*phi_tilde.shape[:-2], *T.shape[-2:])
        if weight is None:
            count = torch.full(phi_tilde.shape[:-2], phi_tilde.shape[-2], dtype=dtype, device=phi_tilde.device)
            weighted = lambda rows: rows
        else:
            w = weight.to(dtype).expand(phi_tilde.shape[:-1])[..., None]
            count = w.sum((-2, -1))
            weighted = lambda rows: w * rows

        def centred(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Rows without a centre close to their mean; the centre; the mean that is left in them."""
            mean = lambda rows: weighted(rows).sum(-2) / count.clamp_min(TINY)[..., None]
            rows = rows.to(dtype)
            some = rows[..., :: max(1, rows.shape[-2] // PILOT_ROWS), :]
            centre = some.mean(-2) if weight is None else mean(rows)  # rows of weight zero have no part in anything
            rows = rows - centre[..., None, :]
            return rows, centre, mean(rows)

        # features and targets apart: products whose width is a power of two are much faster on a GPU
        (Z, z, z_rest), (Y, y, y_rest) = centred(phi_tilde), centred(T)
        wZ, wY = weighted(Z), weighted(Y)
        cross = Z.mT @ wY
        scatter = torch.cat([torch.cat([Z.mT @ wZ, cross], dim=-1), torch.cat([cross.mT, Y.mT @ wY], dim=-1)], dim=-2)
        rest = torch.cat([z_rest, y_rest], dim=-1)
        scatter = (scatter - count[..., None, None] * _outer(rest)).double()
        energy = _diagonal(scatter).detach()
        if dtype == torch.float32:
            # rounding errors of features add up like sqrt(k); those of targets only meet a floor
            k = phi_tilde.shape[-1]
            coarse = torch.finfo(dtype).eps / EPS / (4 * max(k, 1) ** 0.5)
            energy = torch.cat([energy[..., :k] * coarse, energy[..., k:]], dim=-1)
        mean = torch.cat([z, y], dim=-1) + rest
        return cls(count.double(), mean.double(), scatter, energy, T.shape[-1])

    def __add__(self, other: "Statistics") -> "Statistics":
        """Statistics of both sets of rows together (Chan's rule for means and scatters)."""
        self._check_same_columns(other)
        count = self.count + other.count
        share = (other.count / count.clamp_min(TINY))[..., None]
        step = other.mean - self.mean
        between = ((self.count * share[..., 0])[..., None, None]) * _outer(step)
        return replace(
            self,
            count=count,
            mean=self.mean + share * step,
            scatter=self.scatter + other.scatter + between,
            energy=self.energy + other.energy + _diagonal(between).detach(),
            observations=self._observations(other, 1.0),
        )

    def __sub__(self, other: "Statistics") -> "Statistics":
        """Statistics with the rows of `other` taken out again; an error if they cannot have been in."""
        self._check_same_columns(other)
        count = self.count - other.count
        if bool((count <= EPS * self.count).any()):
            raise InputError(
                f"cannot take {other.count.max().item():g} rows (by weight) out of {self.count.min().item():g}: "
                "some must be left; start from new statistics instead"
            )
        step = (other.mean - self.mean) * (self.count / count)[..., None]
        between = (count * other.count / self.count)[..., None, None] * _outer(step)
        rest = replace(
            self,
            count=count,
            mean=self.mean - (other.count / self.count)[..., None] * step,
            scatter=self.scatter - other.scatter - between,
            energy=self.energy + other.energy + _diagonal(between).detach(),
            observations=self._observations(other, -1.0),
        )
        scale = rest.energy.clamp_min(TINY).rsqrt()
        lowest = eigvalsh(scale[..., None] * rest.scatter * scale[..., None, :]).min()
        if bool(lowest < -1e-10 * rest.scatter.shape[-1]):
            raise InputError(
                "the rows to take out were not all among those put in: what would be left has a negative variance "
                f"({lowest.item():.1e} of the whole); remove only rows that were added, with the same weight"
            )
        return rest

    def scaled(self, factor: float) -> "Statistics":
        """Every weight times `factor`; below one, old rows are forgotten."""
        if not factor > 0:
            raise InputError(f"factor={factor} must be positive: weights cannot vanish or turn negative")
        return self.weighing(factor * self.count)

    def weighing(self, count: Float[Tensor, "*b"]) -> "Statistics":
        """The same rows with another total weight; where there are none, none."""
        factor = torch.where(self.count > 0, count / self.count, 0.0)
        observations = None if self.observations is None else factor * self.observations
        return replace(self.weighted(factor), observations=observations)

    def weighted(self, factor: Float[Tensor, "*b"]) -> "Statistics":
        """Every target weighs so much more, as one of another precision does, and still counts as one."""
        return replace(
            self,
            count=factor * self.count,
            scatter=factor[..., None, None] * self.scatter,
            energy=factor[..., None] * self.energy,
            observations=self.n,
        )

    @staticmethod
    def stacked(parts: "Sequence[Statistics]", dim: int = 0) -> "Statistics":
        """Those of several models side by side, in a leading dimension; `stack[i]` is one of them again."""
        first = parts[0]
        moved: dict[str, Any] = {name: torch.stack([getattr(part, name) for part in parts], dim) for name in MOMENTS}
        for part in parts:
            first._check_same_columns(part)
        if any(part.observations is not None for part in parts):
            moved["observations"] = torch.stack([part.n for part in parts], dim)
        return replace(first, **moved)

    def __getitem__(self, i: int | Tensor) -> "Statistics":
        return self._each(lambda moment: moment[i])

    def with_targets(self, scaling: Standardizer) -> "Statistics":
        """The same rows with standardised targets: one pass over raw targets is enough."""
        k = self.n_linear
        shift = torch.cat([torch.zeros_like(self.mean[..., :k]), scaling.mean.to(self.mean)], dim=-1)
        unit = torch.cat([torch.ones_like(self.mean[..., :k]), 1 / scaling.scale.to(self.mean)], dim=-1)
        return replace(
            self,
            mean=(self.mean - shift) * unit,
            scatter=self.scatter * unit[..., :, None] * unit[..., None, :],
            energy=self.energy * unit.square(),
        )

    def to(self, device: torch.device | str) -> "Statistics":
        """The same numbers on another device."""
        return self._each(lambda moment: moment.to(device))

    def nothing(self) -> "Statistics":
        """Those of no rows."""
        return replace(self._each(torch.zeros_like), observations=torch.zeros_like(self.count))

    @property
    def n(self) -> Float[Tensor, "*b"]:
        """The number of targets."""
        return self.count if self.observations is None else self.observations

    @property
    def n_linear(self) -> int:
        """k: the number of linear features."""
        return self.mean.shape[-1] - self.n_outputs

    @property
    def feature_mean(self) -> Float[Tensor, "*b k"]:
        return self.mean[..., : self.n_linear]

    @property
    def target_mean(self) -> Float[Tensor, "*b q"]:
        return self.mean[..., self.n_linear :]

    @property
    def target_scatter(self) -> Float[Tensor, "*b q q"]:
        return self.scatter[..., self.n_linear :, self.n_linear :]

    def _observations(self, other: "Statistics", sign: float) -> Tensor | None:
        if self.observations is None and other.observations is None:
            return None
        return self.n + sign * other.n

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Statistics":
        names = MOMENTS if self.observations is None else (*MOMENTS, "observations")
        moved: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return replace(self, **moved)

    def _check_same_columns(self, other: "Statistics") -> None:
        if type(self) is not type(other):
            raise InputError("statistics of each output apart do not go together with those of all: convert these")
        mine, theirs = (self.n_linear, self.n_outputs), (other.n_linear, other.n_outputs)
        if mine != theirs:
            raise InputError(
                f"statistics of {mine[0]} features and {mine[1]} targets do not go together with those of "
                f"{theirs[0]} features and {theirs[1]} targets"
            )


@dataclass(frozen=True)
class OutputStatistics(Statistics):
    """Statistics of each output apart, for targets that are not all observed at the same rows, or not alike.

    The last axis of a batch counts the outputs; each of them is a regression with one target.
    """

    @classmethod
    def from_rows(
        cls,
        Phi: Float[Tensor, "*b m p"],
        T: Float[Tensor, "*#b m q"],
        precision: Float[Tensor, "*#b m q"],
        *,
        sample_weight: Float[Tensor, "*#b m"] | None = None,
    ) -> "OutputStatistics":
        """`precision`: of each target beside the noise that is learned; 0: it is missing, 1: there is no other."""
        weight = torch.ones_like(T[..., 0]) if sample_weight is None else sample_weight.to(T)
        parts = []
        for j in range(T.shape[-1]):
            own = weight * precision[..., j].to(T)
            part = Statistics.from_features(Phi, T[..., j : j + 1].expand(*Phi.shape[:-1], 1), sample_weight=own)
            n = (weight * (own > 0)).sum(-1).expand(part.count.shape)
            parts.append(replace(part, observations=n.double()))
        return cls.of_outputs(parts)

    @classmethod
    def of_outputs(cls, parts: "Sequence[Statistics]") -> "OutputStatistics":
        """From those of each output."""
        return cls(**vars(Statistics.stacked(parts, parts[0].count.dim())))

    @classmethod
    def split(cls, statistics: Statistics) -> "OutputStatistics":
        """Those of several outputs at the same rows, taken apart."""
        k, q = statistics.n_linear, statistics.n_outputs
        columns = torch.stack([torch.tensor([*range(k), k + j], device=statistics.mean.device) for j in range(q)])
        rest = statistics.count.shape
        scatter = statistics.scatter[..., columns[:, :, None], columns[:, None, :]]
        return cls(
            count=statistics.count[..., None].expand(*rest, q),
            mean=statistics.mean[..., columns],
            scatter=scatter,
            energy=statistics.energy[..., columns],
            n_outputs=1,
            observations=statistics.n[..., None].expand(*rest, q),
        )

    def output(self, j: int) -> Statistics:
        """Those of one output."""
        axis = self.count.dim() - 1
        return Statistics(**vars(self._each(lambda moment: moment.select(axis, j))))

    def with_targets(self, scaling: Standardizer) -> "OutputStatistics":
        parts = zip(scaling.mean, scaling.scale, strict=True)
        return self.of_outputs(
            [self.output(j).with_targets(Standardizer(m[None], s[None])) for j, (m, s) in enumerate(parts)]
        )


def check_scatter(scatter: Float[Tensor, "*b c c"]) -> None:
    """ValueError if it is not that of any rows: not symmetric, or with a covariance beyond what the variances allow."""
    size = _diagonal(scatter).clamp_min(0.0).sqrt()
    bound = size[..., :, None] * size[..., None, :]
    loose = 1e-6 * bound + 1e-9 * bound.amax()
    if bool((_diagonal(scatter) < -1e-9 * bound.amax()).any()) or bool((scatter.abs() > bound + loose).any()):
        raise ValueError("the scatter is not that of any rows")
    if bool(((scatter - scatter.mT).abs() > loose).any()):
        raise ValueError("the scatter is not symmetric")


def chunk_rows(phi_tilde: Float[Tensor, "*b m k"]) -> int:
    """Rows that are worked on at a time."""
    if phi_tilde.device.type == "cpu":
        return CHUNK_ROWS
    width = max(1, phi_tilde[..., :1, :].numel())
    return max(CHUNK_ROWS, GPU_CHUNK // width)


def _outer(x: Tensor) -> Tensor:
    return x[..., :, None] * x[..., None, :]


def _diagonal(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1)
