"""Targets as Gaussian readings of the function: reading t has noise variance `scale * sigma^2 + known`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Readings:
    """Working targets with their noise; leading dimensions index members, a last axis of 1 serves all outputs."""

    t: Float[Tensor, "*b m q"]
    """Working targets; 0 where a target is not read."""
    scale: Float[Tensor, "*#b m #q"] | None = None
    """Factor on the learned noise variance; inf: not read; 0: no learned noise; None: 1."""
    known: Float[Tensor, "*#b m #q"] | None = None
    """Known noise variance in addition; None: 0."""

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
        if self.complete:
            return None
        scale = torch.ones_like(self.t) if self.scale is None else self.scale
        if self.known is None:
            return 1 / scale
        assert noise_var is not None
        return 1 / (scale + self.known / noise_var[..., None, :])

    def take(self, rows: Tensor | slice) -> "Readings":
        """Select rows."""
        return self.map(lambda x: x[..., rows, :])

    @classmethod
    def joined(cls, parts: "Sequence[Readings]", join: Callable[[list[Tensor]], Tensor]) -> "Readings":
        """Join the tensors of several readings; those that only some of them have are filled in."""
        filled = {"scale": torch.ones_like, "known": torch.zeros_like}
        tensors = {"t": join([part.t for part in parts])}
        for name, fill in filled.items():
            own = [getattr(part, name) for part in parts]
            if any(x is not None for x in own):
                tensors[name] = join([fill(p.t) if x is None else x for p, x in zip(parts, own, strict=True)])
        return cls(**tensors)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Readings":
        """Change every tensor."""
        return Readings(*(None if x is None else change(x) for x in vars(self).values()))  # type: ignore[arg-type]
