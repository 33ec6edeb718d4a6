"""One thread for small steps: below some milliseconds a second one costs more in waiting than it saves in work."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_STEP = 20_000_000
"""Multiplications of a step below which one thread is faster, on an idle machine and even more on a busy one."""


@contextmanager
def threads_for(multiplications: int) -> Iterator[None]:
    """Within it torch uses one thread if a step is small; afterwards as many as before."""
    before = torch.get_num_threads()
    if multiplications < SMALL_STEP:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
