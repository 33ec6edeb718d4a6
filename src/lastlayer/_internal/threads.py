"""Number of torch threads for a piece of work."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_STEP = 20_000_000
"""Number of multiplications per step below which one thread is faster, even more so on a busy machine."""


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Use `n` threads of torch, and restore their number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def threads_for(multiplications: int) -> Iterator[None]:
    """Use one thread of torch if a step is small, and restore the number of threads afterwards."""
    with threads(1 if multiplications < SMALL_STEP else torch.get_num_threads()):
        yield
