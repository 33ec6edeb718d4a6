"""Digests of data and networks, by which equal data are recognised: every byte counts."""

import hashlib
import re
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CHUNK_BYTES = 2**24
"""Bytes of a memory map in memory at a time."""


class Digest:
    """Digest of a sequence of arrays: their types, shapes and bytes."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, *arrays: Any) -> "Digest":
        """Add arrays, tensors and texts; None counts as well."""
        for array in arrays:
            if array is None or isinstance(array, str):
                self._hash.update(f"{array!r};".encode())
                continue
            values = array if isinstance(array, Tensor) else np.asanyarray(array)
            self._hash.update(f"{values.dtype}{tuple(values.shape)};".encode())
            rows = values.reshape(1) if values.ndim == 0 else values
            step = max(1, CHUNK_BYTES // max(1, int(rows[:1].nbytes)))
            for i in range(0, len(rows), step):
                self._hash.update(_bytes(rows[i : i + step]))
        return self

    def __str__(self) -> str:
        return self._hash.hexdigest()


def digest_of(*arrays: Any) -> str:
    return str(Digest().add(*arrays))


def digest_of_parameters(network: nn.Module, *, buffers: bool = True) -> str:
    """Digest of all weights, which of them are trained, and the buffers."""
    weights = [(name, str(p.requires_grad), p) for name, p in network.named_parameters()]
    return digest_of(*chain(*weights, *(network.named_buffers() if buffers else ())))


def layout_of(network: nn.Module) -> str:
    """Printed form of the network, with names, shapes and types of all its parameters and buffers."""
    held = chain(network.named_parameters(), network.named_buffers())
    return "\n".join([printed(network), *(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in held)])


def printed(network: nn.Module) -> str:
    """Printed form of the network without memory addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(network))


def name_of(function: Callable[..., Any]) -> str:
    """Module and qualified name of a function or class, or of the class of any other callable."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _bytes(values: Any) -> Any:
    """Bytes of some rows, in an order that does not depend on their memory layout."""
    if isinstance(values, Tensor):  # NumPy lacks some of torch's types
        return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if values.dtype.hasobject:
        return repr(values.tolist()).encode()
    return np.ascontiguousarray(values).tobytes()
