"""Validation of the content of model files: a digest shows that a file is intact, not that its content is valid."""

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

Value = TypeVar("Value")


def tensor(
    tensors: Mapping[str, Tensor],
    name: str,
    *shape: int | None,
    dtype: torch.dtype = torch.float64,
    low: float = -math.inf,
    infinite: bool = False,
    missing: bool = False,
) -> Tensor:
    """Return a tensor after checking its shape (None: any length), type and values."""
    found = tensors.get(name)
    fits = found is not None and found.dim() == len(shape) and found.dtype == dtype
    if found is None or not fits or any(n not in (None, m) for n, m in zip(shape, found.shape, strict=True)):
        given = "is missing" if found is None else f"has shape {tuple(found.shape)} and type {found.dtype}"
        wanted = str(tuple("any" if n is None else n for n in shape)).replace("'", "")
        raise ValueError(
            f"{name} {given}, and {str(dtype).removeprefix('torch.')} numbers of shape {wanted} are needed"
        )
    if dtype.is_floating_point:
        if (not missing and bool(found.isnan().any())) or (not infinite and bool(found.isinf().any())):
            raise ValueError(f"{name} has values that are not finite")
        if bool((found < low).any()):
            raise ValueError(f"{name} has values below {low:g}")
    return found


def covariance(name: str, matrix: Tensor) -> Tensor:
    """Return a matrix after checking that it is symmetric and positive definite."""
    if not torch.allclose(matrix, matrix.mT, rtol=1e-6, atol=0.0):
        raise ValueError(f"{name} is not symmetric")
    if bool(torch.linalg.cholesky_ex(matrix).info.any()):
        raise ValueError(f"{name} is not positive definite")
    return matrix


def number(
    name: str, value: Any, *, low: float | int = -math.inf, high: float = math.inf, infinite: bool = False
) -> float:
    """Return a number, given as such or as text, since JSON has no infinity, after checking its range."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{name} is {value!r}, and a number is needed")
    try:
        found = float(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} is {value!r}, and a number is needed") from error
    if math.isnan(found) or not low <= found <= high or (math.isinf(found) and not infinite):
        raise ValueError(f"{name} is {found:g}, and must be {'' if infinite else 'finite and '}in [{low:g}, {high:g}]")
    return found


def typed(name: str, value: Any, annotation: Any, read: Callable[[str, Any, Any], Any] | None = None) -> Any:
    """Return a JSON value of the annotated type, its parts by `read`.

    Lists become tuples, and integers floats, where that is annotated.
    """
    read, origin, inner = read or typed, get_origin(annotation), get_args(annotation)
    if annotation is Any or (value is None and types.NoneType in inner):
        return value
    if origin in (Union, types.UnionType):
        options = [option for option in inner if option is not types.NoneType]
        if len(options) == 1:
            return read(name, value, options[0])
        for option in options:
            try:
                return read(name, value, option)
            except ValueError:
                pass
    elif origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in inner):
            return value
    elif origin in (tuple, list) and isinstance(value, list | tuple):
        return origin(read(f"{name}.{i}", part, inner[0]) for i, part in enumerate(value))
    elif annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        return number(name, value)
    elif isinstance(annotation, type) and (
        type(value) is annotation or (is_dataclass(value) and isinstance(value, annotation))
    ):
        return value
    elif isinstance(annotation, type) and is_dataclass(annotation):
        return instance(annotation, value, name, read)
    wanted = getattr(annotation, "__name__", None) if origin is None else str(annotation).replace("typing.", "")
    raise ValueError(f"{name} is {_shortened(value)}, and {wanted} is needed")


def instance(
    cls: type[Value], content: Any, name: str = "", read: Callable[[str, Any, Any], Any] | None = None
) -> Value:
    """Build a dataclass from a JSON object of its fields, after checking the type of each."""
    name, read = name or cls.__name__, read or typed
    if not isinstance(content, dict):
        raise ValueError(f"{name} is {_shortened(content)}, and an object is needed")
    hints = typing.get_type_hints(cls)
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    if strange := content.keys() ^ set(known):
        raise ValueError(f"{name} has other fields than it should: {', '.join(sorted(map(str, strange)))}")
    return cls(**{field: read(f"{name}.{field}", content[field], hints[field]) for field in known})


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
