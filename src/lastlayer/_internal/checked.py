"""Validation of the content of model files: a digest shows that a file is intact, not that its content is valid."""

import math
import types
import typing
from collections.abc import Mapping
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


def typed(name: str, value: Any, annotation: Any) -> Any:
    """Return a JSON value of the annotated type; lists become tuples, and integers floats, where that is annotated."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if origin in (Union, types.UnionType):
        for option in inner:
            try:
                return typed(name, value, option)
            except ValueError:
                pass
    elif origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in inner):
            return value
    elif origin is tuple and isinstance(value, list | tuple):
        return tuple(typed(name, part, inner[0]) for part in value)
    elif origin is list and isinstance(value, list):
        return [typed(name, part, inner[0]) for part in value]
    elif annotation is None or annotation is types.NoneType:
        if value is None:
            return None
    elif annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        return number(name, value)
    elif isinstance(annotation, type) and is_dataclass(annotation) and isinstance(value, dict):
        return instance(annotation, value, name)
    elif isinstance(annotation, type) and (
        type(value) is annotation or (is_dataclass(value) and isinstance(value, annotation))
    ):
        return value
    wanted = getattr(annotation, "__name__", None) if origin is None else str(annotation).replace("typing.", "")
    raise ValueError(f"{name} is {_shortened(value)}, and {wanted} is needed")


def instance(cls: type[Value], content: Any, name: str = "") -> Value:
    """Build a dataclass from a JSON object of its fields, after checking the type of each."""
    if not isinstance(content, dict):
        raise ValueError(f"{name or cls.__name__} is {_shortened(content)}, and an object is needed")
    known = {field.name: hint for field in fields(cls) for hint in [typing.get_type_hints(cls)[field.name]]}  # type: ignore[arg-type]
    if content.keys() != known.keys():
        strange = sorted(map(str, content.keys() ^ known.keys()))
        raise ValueError(f"{name or cls.__name__} has other fields than it should: {', '.join(strange)}")
    return cls(**{field: typed(f"{name or cls.__name__}.{field}", content[field], known[field]) for field in known})


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
