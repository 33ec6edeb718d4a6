"""Features and readings of the rows of a Bayesian linear regression, and their additive sufficient statistics."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer._internal.numbers import EPS, TINY
from lastlayer._internal.work import CHUNK_ROWS, row_chunks
from lastlayer.errors import InputError

MOMENTS = ("count", "mean", "scatter", "energy")
"""Fields of `Statistics` that are moments of the rows."""
SUMS = ("observations", "log_scale")
"""Fields that are None where they follow from the moments."""
PILOT_ROWS = 256
"""Rows whose mean serves as the centre of a chunk; it is close enough to the true mean to cost no digits."""
GPU_CHUNK = 2**27
"""Numbers per chunk on a GPU: large enough that launching kernels takes a negligible share of the time."""


def affine_features(phi_tilde: Float[Tensor, "*b m k"]) -> Float[Tensor, "*b m p"]:
    """Append a column of ones to linear features: phi = [phi_tilde, 1]. eq:Features_vs_augmented_Features.

    Parameters
    ----------
    phi_tilde : Tensor of shape (..., m, k)
        Linear features.
    """
    return torch.cat([phi_tilde, phi_tilde.new_ones(*phi_tilde.shape[:-1], 1)], dim=-1)


def linear_features(Phi: Float[Tensor, "*b m p"]) -> Float[Tensor, "*b m k"]:
    """Remove the last column of affine features, which must be ones.

    Parameters
    ----------
    Phi : Tensor of shape (..., m, p)
        Affine features.
    """
    bias = Phi[..., -1] if Phi.shape[-1] else Phi.new_zeros(1)
    if Phi.device.type != "cpu":
        torch._assert_async((bias == 1).all())
    elif not bool((bias == 1).all()):
        raise InputError(
            f"the last column of the affine features, of shape {tuple(Phi.shape)}, is not all ones: "
            "make them with lastlayer.features.affine_features(phi_tilde)"
        )
    return Phi[..., :-1]


@dataclass(frozen=True)
class Readings:
    """Working targets with their noise; leading dimensions index members, a last axis of 1 serves all outputs."""

    t: Float[Tensor, "*b m q"]
    """Working targets; 0 where a target is not read."""
    scale: Float[Tensor, "*#b m #q"] | None = None
    """Factor on the learned noise variance; inf: not read; 0: no learned noise; None: 1."""
    known: Float[Tensor, "*#b m #q"] | None = None
    """Known noise variance in addition; None: 0."""
    lower: Float[Tensor, "*b m q"] | None = None
    """Lower bound of a target of which only a range is known, in which `t` lies; None: all are known."""
    upper: Float[Tensor, "*b m q"] | None = None
    """Upper bound of the range."""

    @classmethod
    def of(cls, T: Float[Tensor, "*b m q"], noise_var: Float[Tensor, "*#b m #q"] | None = None) -> "Readings":
        """Read targets, of which some may be missing (NaN), with known noise variances beside the learned noise."""
        missing = T.isnan()
        if not bool(missing.any()):
            return cls(T, known=noise_var)
        known = None if noise_var is None else torch.where(missing, 0.0, noise_var)
        scale = torch.where(missing, torch.inf, torch.ones_like(T))
        return cls(T.nan_to_num(0.0), scale, known)

    @property
    def complete(self) -> bool:
        """Whether every target is read, with the learned noise alone."""
        return self.scale is None and self.known is None

    @property
    def read(self) -> Float[Tensor, "*#b m #q"] | None:
        """1 where a target is read, 0 elsewhere; None: every target is."""
        return None if self.scale is None else torch.isfinite(self.scale).to(self.scale)

    @property
    def values(self) -> Float[Tensor, "*b m q"]:
        """Working targets, NaN where they are not read."""
        return self.t if self.scale is None else torch.where(torch.isfinite(self.scale), self.t, torch.nan)

    def precision(self, noise_var: Float[Tensor, "*#b #q"] | None = None) -> Float[Tensor, "*#b m #q"] | None:
        """Precision of each reading relative to that of the learned noise; None: all ones."""
        if self.scale is None and self.known is None:
            return None
        scale = torch.ones_like(self.t) if self.scale is None else self.scale
        if self.known is None:
            return 1 / scale
        assert noise_var is not None
        return 1 / (scale + self.known / noise_var[..., None, :])

    @classmethod
    def joined(cls, parts: "Sequence[Readings]", join: Callable[[list[Tensor]], Tensor]) -> "Readings":
        """Join the tensors of several readings; noise that only some of them have is filled in."""
        filled = {"scale": torch.ones_like, "known": torch.zeros_like}
        always = ("t",) if parts[0].lower is None else ("t", "lower", "upper")
        tensors = {name: join([getattr(part, name) for part in parts]) for name in always}
        for name, fill in filled.items():
            own = [getattr(part, name) for part in parts]
            if any(x is not None for x in own):
                tensors[name] = join([fill(p.t) if x is None else x for p, x in zip(parts, own, strict=True)])
        return cls(**tensors)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Readings":
        """Change every tensor."""
        return Readings(*(None if x is None else change(x) for x in vars(self).values()))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Statistics:
    """Count, mean and scatter of rows [phi_tilde, t] in float64.

    `a + b` adds rows, `a - b` removes them, `a.scaled(c)` scales their weights. Outputs that are read at the same rows
    with the same noise share all moments; others have moments of their own (`by_output`).
    """

    count: Float[Tensor, "*b"]
    """m: the sum of the sample weights."""
    mean: Float[Tensor, "*b c"]
    """Weighted mean of [phi_tilde, t]; c = k + q columns."""
    scatter: Float[Tensor, "*b c c"]
    """Sum of w (row - mean)' (row - mean)."""
    energy: Float[Tensor, "*b c"]
    """Diagonal of all scatter ever added, including what was removed again: rounding errors are relative to it."""
    n_outputs: int
    """q: the number of targets, which are the last columns."""
    observations: Float[Tensor, "*b"] | None = None
    """n: the number of targets, also of known noise and of derivatives, which `count` weighs less; None: `count`."""
    log_scale: Float[Tensor, "*b"] | None = None
    """Sum over the targets of the log of their noise variance over the learned one; None: no noise is known."""
    by_output: bool = False
    """Whether the last axis of a batch indexes the outputs, with one target column each."""

    @classmethod
    def of(
        cls,
        phi_tilde: Float[Tensor, "*b m k"],
        readings: Readings,
        *,
        weight: Float[Tensor, "*#b m"] | None = None,
        noise_var: Float[Tensor, "*#b q"] | None = None,
    ) -> "Statistics":
        """Statistics of readings: of each output unless all share their noise; known noise needs the learned one."""
        precision, T, parts = readings.precision(noise_var), readings.t, []
        if precision is None:
            return cls.from_linear_features(phi_tilde, T, sample_weight=weight)
        weight = torch.ones_like(T[..., 0]) if weight is None else weight.to(T)
        for t, each in zip(T.split(1, -1), precision.expand_as(T).unbind(-1), strict=True):
            own = weight * each.to(T)
            part = cls.from_linear_features(phi_tilde, t, sample_weight=own)
            n, log_scale = (weight * (own > 0)).sum(-1), log_scales(each.to(T), weight)
            n, log_scale = (x.expand(part.count.shape).double() for x in (n, log_scale))
            parts.append(replace(part, observations=n, log_scale=log_scale))
        return cls.of_outputs(parts)

    @classmethod
    def from_functionals(
        cls, Psi: Float[Tensor, "*b n p"], t: Float[Tensor, "*#b n q"], precision: Float[Tensor, "*#b n"] | None = None
    ) -> "Statistics":
        """Statistics of functionals: rows [L phi_tilde, L 1], and precisions relative to the learned noise."""
        t = t.expand(*Psi.shape[:-2], *t.shape[-2:])
        rows, one = torch.cat([Psi[..., :-1], t], -1).double(), Psi[..., -1:].double()
        w = torch.ones_like(one) if precision is None else precision.double().expand(one.shape[:-1])[..., None]
        count = (w * one.square()).sum((-2, -1))
        mean = (w * one * rows).sum(-2) / count.clamp_min(TINY)[..., None]
        rest = rows - one * mean[..., None, :]
        scatter = rest.mT @ (w * rest)
        n = torch.full_like(count, float(Psi.shape[-2]))
        log_scale = None if precision is None else log_scales(precision.double()).expand(count.shape)
        return cls(count, mean, scatter, torch.linalg.diagonal(scatter).detach(), t.shape[-1], n, log_scale)

    @classmethod
    def from_features(
        cls,
        Phi: Float[Tensor, "*b m p"],
        T: Float[Tensor, "*b m q"],
        *,
        sample_weight: Float[Tensor, "*#b m"] | None = None,
    ) -> "Statistics":
        """Compute the statistics of affine features and targets.

        Parameters
        ----------
        Phi, T : Tensor of shape (..., m, p), Tensor of shape (..., m, q)
            Affine features, with a last column of ones, and targets.
        sample_weight : Tensor of shape (..., m), default None
            Weight of each row; a weight of 2 counts as the row given twice.

        Examples
        --------
        >>> Phi, T = torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([[1.0], [5.0]])
        >>> (Statistics.from_features(Phi[:1], T[:1]) + Statistics.from_features(Phi[1:], T[1:])).mean.tolist()
        [1.0, 3.0]
        """
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
        """Compute the statistics from features without the column of ones, chunk by chunk.

        Parameters
        ----------
        phi_tilde, T : Tensor of shape (..., m, k), Tensor of shape (..., m, q)
            Linear features and targets.
        sample_weight : Tensor of shape (..., m), default None
            Weight of each row.
        dtype : torch.dtype, default torch.float64
            Type of the products within a chunk; `energy` takes into account that float32 is less accurate.
        """
        m = phi_tilde.shape[-2]
        if m == 0 or T.shape[-2] != m:
            raise InputError(f"{m} rows of features and {T.shape[-2]} of targets: give equally many, at least one")
        on_gpu = phi_tilde.device.type != "cpu"
        size = max(CHUNK_ROWS, GPU_CHUNK // max(1, phi_tilde[..., :1, :].numel())) if on_gpu else CHUNK_ROWS
        weight = lambda rows: None if sample_weight is None else sample_weight[..., rows]
        parts = (cls._of_chunk(phi_tilde[..., at, :], T[..., at, :], weight(at), dtype) for at in row_chunks(m, size))
        return reduce(operator.add, parts)

    @classmethod
    def from_batches(cls, batches: Iterable[tuple[Tensor, ...]]) -> "Statistics":
        """Compute the statistics of batches, with one in memory at a time.

        Parameters
        ----------
        batches : iterable of tuple of Tensor
            (Phi, T) or (Phi, T, sample_weight).
        """
        parts = (cls.from_features(Phi, T, sample_weight=w[0] if w else None) for Phi, T, *w in batches)
        if (first := next(parts, None)) is None:
            raise InputError("the iterator of batches is empty: at least one batch (Phi, T) is needed")
        return reduce(operator.add, parts, first)

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
            """Rows minus a centre close to their mean, the centre, and the mean of the remainder."""
            mean = lambda rows: weighted(rows).sum(-2) / count.clamp_min(TINY)[..., None]
            rows = rows.to(dtype)
            some = rows[..., :: max(1, rows.shape[-2] // PILOT_ROWS), :]
            centre = some.mean(-2) if weight is None else mean(rows)  # rows of weight zero must have no effect
            rows = rows - centre[..., None, :]
            return rows, centre, mean(rows)

        # features and targets separately: products whose width is a power of two are much faster on a GPU
        (Z, z, z_rest), (Y, y, y_rest) = centred(phi_tilde), centred(T)
        wZ, wY = weighted(Z), weighted(Y)
        cross = Z.mT @ wY
        scatter = torch.cat([torch.cat([Z.mT @ wZ, cross], dim=-1), torch.cat([cross.mT, Y.mT @ wY], dim=-1)], dim=-2)
        rest = torch.cat([z_rest, y_rest], dim=-1)
        scatter = (scatter - count[..., None, None] * (rest[..., :, None] * rest[..., None, :])).double()
        energy = torch.linalg.diagonal(scatter).detach()
        if dtype == torch.float32:
            energy = coarse(energy, T.shape[-1])
        mean = torch.cat([z, y], dim=-1) + rest
        return cls(count.double(), mean.double(), scatter, energy, T.shape[-1])

    @classmethod
    def of_moments(
        cls, moments: Float[Tensor, "*b c1 c1"], centre: Float[Tensor, "*#b c"], n_outputs: int, *, exact: bool
    ) -> "Statistics":
        """Statistics from sums of products of the columns [phi_tilde, t] - centre and 1; `exact`: not in float32."""
        total, count = moments[..., :-1, -1], moments[..., -1, -1]
        rest = total / count.clamp_min(TINY)[..., None]
        scatter = moments[..., :-1, :-1] - rest[..., :, None] * total[..., None, :]
        energy = torch.linalg.diagonal(scatter)
        return cls(count, centre + rest, scatter, energy if exact else coarse(energy, n_outputs), n_outputs)

    def __add__(self, other: "Statistics") -> "Statistics":
        """Statistics of both sets of rows together (Chan's rule for means and scatters)."""
        self, other = self._matched(other)
        count = self.count + other.count
        share = (other.count / count.clamp_min(TINY))[..., None]
        step = other.mean - self.mean
        between = ((self.count * share[..., 0])[..., None, None]) * (step[..., :, None] * step[..., None, :])
        return replace(
            self,
            count=count,
            mean=self.mean + share * step,
            scatter=self.scatter + other.scatter + between,
            energy=self.energy + other.energy + torch.linalg.diagonal(between).detach(),
            **self._sums(operator.add, other),
        )

    def __sub__(self, other: "Statistics") -> "Statistics":
        """Statistics without the rows of `other`; an error if these cannot have been among the rows."""
        self, other = self._matched(other)
        count = self.count - other.count
        if bool((count <= EPS * self.count).any()):
            raise InputError(
                f"cannot remove {other.count.max().item():g} rows (by weight) from {self.count.min().item():g}: "
                "some must remain; start from new statistics instead"
            )
        step = (other.mean - self.mean) * (self.count / count)[..., None]
        between = (count * other.count / self.count)[..., None, None] * (step[..., :, None] * step[..., None, :])
        rest = replace(
            self,
            count=count,
            mean=self.mean - (other.count / self.count)[..., None] * step,
            scatter=self.scatter - other.scatter - between,
            energy=self.energy + other.energy + torch.linalg.diagonal(between).detach(),
            **self._sums(operator.sub, other),
        )
        scale = rest.energy.clamp_min(TINY).rsqrt()
        lowest = torch.linalg.eigvalsh((scale[..., None] * rest.scatter * scale[..., None, :]).cpu()).min()
        if bool(lowest < -1e-10 * rest.scatter.shape[-1]):
            raise InputError(
                "the rows to remove were not all added before: the remaining rows would have a negative variance "
                f"({lowest.item():.1e} of the total); remove only rows that were added, with the same weight"
            )
        return rest

    def scaled(self, factor: float) -> "Statistics":
        """Multiply every weight by a factor; below one, it makes old rows count less (exponential forgetting).

        Parameters
        ----------
        factor : float
            The factor.
        """
        if not factor > 0:
            raise InputError(f"factor={factor} must be positive: weights cannot vanish or turn negative")
        return self.weighing(factor * self.count)

    def weighing(self, count: Float[Tensor, "*b"]) -> "Statistics":
        """Scale the weights of the rows to another total."""
        factor = torch.where(self.count > 0, count / self.count, 0.0)
        sums = {name: factor * total for name in SUMS if (total := getattr(self, name)) is not None}
        return self._times(factor, **sums)

    def weighted(self, factor: Float[Tensor, "*b"]) -> "Statistics":
        """Scale the precision of every target; the number of targets does not change."""
        return self._times(factor, observations=self.n, log_scale=self._log_scale - self.n * factor.log())

    def _times(self, factor: Float[Tensor, "*b"], **sums: Any) -> "Statistics":
        scatter, energy = factor[..., None, None] * self.scatter, factor[..., None] * self.energy
        return replace(self, count=factor * self.count, scatter=scatter, energy=energy, **sums)

    @staticmethod
    def stacked(parts: "Sequence[Statistics]", dim: int = 0) -> "Statistics":
        """Stack the statistics of several models along a new dimension; `stack[i]` is that of one of them."""
        first, *others = parts
        for part in others:
            first._matched(part)
        moments: dict[str, Any] = {name: torch.stack([getattr(part, name) for part in parts], dim) for name in MOMENTS}
        return replace(first, **moments, **first._sums(lambda *sums: torch.stack(sums, dim), *others))

    def __getitem__(self, i: int | Tensor) -> "Statistics":
        return self._each(lambda moment: moment[i])

    def with_targets(self, mean: Float[Tensor, " q"], scale: Float[Tensor, " q"]) -> "Statistics":
        """Standardise the targets, so that one pass over raw targets is enough."""
        k = self.n_linear
        mean, scale = (x[:, None] if self.by_output else x for x in (mean, scale))
        shift = torch.cat([torch.zeros_like(self.mean[..., :k]), mean.to(self.mean)], dim=-1)
        unit = torch.cat([torch.ones_like(self.mean[..., :k]), 1 / scale.to(self.mean)], dim=-1)
        return replace(
            self,
            mean=(self.mean - shift) * unit,
            scatter=self.scatter * unit[..., :, None] * unit[..., None, :],
            energy=self.energy * unit.square(),
        )

    @staticmethod
    def of_outputs(parts: "Sequence[Statistics]") -> "Statistics":
        """Combine the statistics of single outputs."""
        return replace(Statistics.stacked(parts, parts[0].count.dim()), by_output=True)

    def each_output(self) -> "Statistics":
        """Split statistics that the outputs share into those of each output."""
        if self.by_output:
            return self
        k, q = self.n_linear, self.n_outputs
        columns = torch.stack([torch.tensor([*range(k), k + j], device=self.mean.device) for j in range(q)])
        of_each = lambda total: total[..., None].expand(*total.shape, q)
        return Statistics(
            count=of_each(self.count),
            mean=self.mean[..., columns],
            scatter=self.scatter[..., columns[:, :, None], columns[:, None, :]],
            energy=self.energy[..., columns],
            n_outputs=1,
            observations=of_each(self.n),
            log_scale=None if self.log_scale is None else of_each(self.log_scale),
            by_output=True,
        )

    def output(self, j: int) -> "Statistics":
        """Select the statistics of one output."""
        each = self.each_output()
        return replace(each._each(lambda moment: moment.select(each.count.dim() - 1, j)), by_output=False)

    def to(self, device: torch.device | str) -> "Statistics":
        return self._each(lambda moment: moment.to(device))

    def nothing(self) -> "Statistics":
        """Return the statistics of no rows, with the same columns."""
        zero = torch.zeros_like(self.count)
        return replace(self._each(torch.zeros_like), observations=zero, log_scale=None)

    @property
    def n(self) -> Float[Tensor, "*b"]:
        """The number of targets."""
        return self.count if self.observations is None else self.observations

    @property
    def _log_scale(self) -> Float[Tensor, "*b"]:
        return torch.zeros_like(self.count) if self.log_scale is None else self.log_scale

    @property
    def n_linear(self) -> int:
        """k: the number of linear features."""
        return self.mean.shape[-1] - self.n_outputs

    @property
    def feature_mean(self) -> Float[Tensor, "*b k"]:
        """Mean of the linear features."""
        return self.mean[..., : self.n_linear]

    def _sums(self, join: Callable[..., Tensor], *others: "Statistics") -> dict[str, Any]:
        """The fields that are None where they follow from the moments, joined where any of the parts has them."""
        parts = (self, *others)
        return {
            "observations": join(*(p.n for p in parts)) if any(p.observations is not None for p in parts) else None,
            "log_scale": join(*(p._log_scale for p in parts)) if any(p.log_scale is not None for p in parts) else None,
        }

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Statistics":
        has = {name: x for name in (*MOMENTS, *SUMS) if (x := getattr(self, name)) is not None}
        moved: dict[str, Any] = {name: change(x) for name, x in has.items()}
        return replace(self, **moved)

    def _matched(self, other: "Statistics") -> "tuple[Statistics, Statistics]":
        """Both in the finer of their layouts."""
        if self.by_output != other.by_output:
            self, other = self.each_output(), other.each_output()
        if self.mean.shape[-1] != other.mean.shape[-1] or self.n_outputs != other.n_outputs:
            raise InputError(
                f"statistics of {self.n_linear} features and {self.n_outputs} targets cannot be combined with those of "
                f"{other.n_linear} features and {other.n_outputs} targets"
            )
        return self, other


def log_scales(precision: Float[Tensor, "*b m"], weight: Float[Tensor, "*b m"] | None = None) -> Float[Tensor, "*b"]:
    """Sum of the log noise variances of targets of given relative precision, without those of precision zero."""
    each = -torch.where(precision > 0, precision, 1.0).log()
    return (each if weight is None else weight * each).sum(-1)


def coarse(energy: Float[Tensor, "*b c"], n_outputs: int) -> Float[Tensor, "*b c"]:
    """Energy of products in float32: rounding errors of features grow as sqrt(k); those of targets affect the floor."""
    features, targets = energy.split([energy.shape[-1] - n_outputs, n_outputs], -1)
    factor = torch.finfo(torch.float32).eps / EPS / (4 * max(features.shape[-1], 1) ** 0.5)
    return torch.cat([features * factor, targets], -1)


def check_scatter(scatter: Float[Tensor, "*b c c"]) -> None:
    """Check that a matrix can be the scatter of rows."""
    squares = torch.linalg.diagonal(scatter)
    size = squares.clamp_min(0.0).sqrt()
    bound = size[..., :, None] * size[..., None, :]
    loose = 1e-6 * bound + 1e-9 * bound.amax()
    if bool((squares < -1e-9 * bound.amax()).any()) or bool((scatter.abs() > bound + loose).any()):
        raise ValueError("the scatter is not that of any rows")
    if bool(((scatter - scatter.mT).abs() > loose).any()):
        raise ValueError("the scatter is not symmetric")
