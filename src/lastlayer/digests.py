"""Digests of data and networks: two trainings are of the same data if every byte is the same."""

import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CHUNK_BYTES = 2**24
"""Bytes of a memory map that are in memory at a time."""


class Digest:
    """Of arrays, one after the other: their types, shapes and bytes."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, *arrays: Any) -> "Digest":
        """Take in arrays, tensors and texts; None counts as one that is not there."""
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
    """Of all bytes of the arrays, their types and shapes."""
    return str(Digest().add(*arrays))


def digest_of_parameters(network: nn.Module, *, buffers: bool = True) -> str:
    """Of all weights, which of them are trained, and the buffers."""
    digest = Digest()
    for name, p in network.named_parameters():
        digest.add(name, str(p.requires_grad), p)
    for name, b in network.named_buffers() if buffers else ():
        digest.add(name, b)
    return str(digest)


def layout_of(network: nn.Module) -> str:
    """The network as it prints, with names, shapes and types of all that it holds."""
    held = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in _held(network)]
    return "\n".join([printed(network), *held])


def printed(network: nn.Module) -> str:
    """The network as it prints, without addresses in memory, which are others in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(network))


def name_of(function: Callable[..., Any]) -> str:
    """Module and qualified name of a function or class; of another callable, those of its class."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _held(network: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from network.named_parameters()
    yield from network.named_buffers()


def _bytes(values: Any) -> Any:
    """Of some rows, in an order that does not depend on how they lie in memory."""
    if isinstance(values, Tensor):  # NumPy does not know every type of torch
        return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if values.dtype.hasobject:
        return repr(values.tolist()).encode()
    return np.ascontiguousarray(values).tobytes()
