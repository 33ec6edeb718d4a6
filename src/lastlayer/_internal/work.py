"""Pieces of work: rows in chunks, and torch's threads for each piece."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

CHUNK_ROWS = 16_384
"""Rows per chunk on the processor."""
SMALL_STEP = 20_000_000
"""Number of multiplications per step below which one thread is faster, even more so on a busy machine."""


def row_chunks(m: int, size: int = CHUNK_ROWS) -> list[slice]:
    """Split m rows into slices of nearly equal size."""
    n = -(-m // size)
    return [slice(i * m // n, (i + 1) * m // n) for i in range(n)]


@contextmanager
def threads_for(multiplications: int) -> Iterator[None]:
    """Use one thread of torch if a step is small, and restore the number of threads afterwards."""
    before = torch.get_num_threads()
    if multiplications < SMALL_STEP:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
