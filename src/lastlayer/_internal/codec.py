"""Dataclasses as tensors and JSON for model files, and back: driven by the types of their fields."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, get_args, get_origin, runtime_checkable

import numpy as np
import torch
from jaxtyping import AbstractArray
from numpy import ndarray
from torch import Tensor

from lastlayer._internal import checked


@runtime_checkable
class Text(Protocol):
    """A value that is stored as text."""

    @staticmethod
    def parse(text: str) -> Any:
        """Inverse of `str`."""


@dataclass(frozen=True)
class Limits:
    """Which numbers a field may hold."""

    low: float = -math.inf
    high: float = math.inf
    infinite: bool = False
    missing: bool = False
    """Whether they may be NaN."""


ANY = Limits()


def pack(value: Any, name: str) -> tuple[dict[str, Tensor], Any]:
    """Convert a value to tensors, whose names start with that of the value, and to JSON for all but these."""
    tensors: dict[str, Tensor] = {}
    return tensors, _packed(value, name, tensors)


def _packed(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Text):
        return str(value)
    if is_dataclass(value):
        return {part.name: _packed(getattr(value, part.name), f"{name}.{part.name}", tensors) for part in fields(value)}
    if isinstance(value, ndarray) and value.dtype.kind == "U":
        words, places = np.unique(value, return_inverse=True)
        tensors[name] = torch.from_numpy(places)
        return words.tolist()
    if isinstance(value, Tensor | ndarray):
        tensors[name] = torch.tensor(value) if isinstance(value, ndarray) else value
        return "tensor"
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, tuple | list):
        return [_packed(part, f"{name}.{i}", tensors) for i, part in enumerate(value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Reader:
    """What is needed to restore packed values; raises ValueError for content that does not fit."""

    tensors: Mapping[str, Tensor]
    sizes: dict[str, int]
    """Lengths by the names of axes in annotations; new names take the length that they are first met with, in each
    part of a tuple anew."""
    limits: Mapping[type, Mapping[str, Limits]]
    """Limits of the fields of each dataclass."""

    def unpack(self, hint: Any, content: Any, name: str, limits: Limits = ANY) -> Any:
        origin, inner = get_origin(hint), get_args(hint)
        if origin is dict:
            pairs = checked.typed(name, content, tuple[tuple[Any, ...], ...])
            if any(len(pair) != 2 for pair in pairs):
                raise ValueError(f"{name} has items that are not pairs")
            part = lambda i, j: self.unpack(inner[j], pairs[i][j], f"{name}.{i}.{j}", limits)
            return {part(i, 0): part(i, 1) for i in range(len(pairs))}
        if hint is float:
            if limits.missing and content == "nan":
                return math.nan
            return checked.number(name, content, low=limits.low, high=limits.high, infinite=limits.infinite)
        if hint is ndarray:
            return self._words(content, name)
        if isinstance(hint, type) and issubclass(hint, AbstractArray):
            return self._array(hint, name, limits)
        if isinstance(hint, type) and issubclass(hint, Text):
            return hint.parse(checked.typed(name, content, str))
        of_fields = self.limits.get(hint, {}) if isinstance(hint, type) and is_dataclass(hint) else None

        def read(part: str, value: Any, kind: Any) -> Any:
            own = limits if of_fields is None else of_fields.get(part.rpartition(".")[2], ANY)
            reader = replace(self, sizes=dict(self.sizes)) if origin is tuple else self
            return reader.unpack(kind, value, part, own)

        return checked.typed(name, content, hint, read)

    def _array(self, hint: Any, name: str, limits: Limits) -> Any:
        axes, found = hint.dim_str.split(), self.tensors.get(name)
        shape: list[int | None] = [None] * len(axes)
        if found is not None and found.dim() == len(axes):
            named = zip(axes, found.shape, strict=True)
            shape = [int(axis) if axis.isdigit() else self.sizes.setdefault(axis, n) for axis, n in named]
        dtype = torch.int64 if "int64" in hint.dtypes else torch.float64
        value = checked.tensor(
            self.tensors, name, *shape, dtype=dtype, low=limits.low, infinite=limits.infinite, missing=limits.missing
        )
        return value.numpy() if hint.array_type is ndarray else value

    def _words(self, content: Any, name: str) -> ndarray:
        words = checked.typed(name, content, tuple[str, ...])
        places = checked.tensor(self.tensors, name, None, dtype=torch.int64)
        if bool(((places < 0) | (places >= len(words))).any()):
            raise ValueError(f"{name} has places outside its list of words")
        return np.array(words, dtype=str)[places.numpy()] if words else np.empty(0, dtype=str)
