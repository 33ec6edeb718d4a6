"""Long work: rows in chunks, torch's threads for each piece, and progress bars.

Bars are drawn by tqdm at a terminal; elsewhere, such as in a log file, they are at most one line per minute.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tqdm import tqdm

CHUNK_ROWS = 16_384
"""Rows per chunk on the processor."""
SMALL_STEP = 20_000_000
"""Number of multiplications per step below which one thread is faster, even more so on a busy machine."""
SECONDS_PER_LINE = 60.0


def row_chunks(m: int, size: int = CHUNK_ROWS) -> list[slice]:
    """Split m rows into slices of nearly equal size."""
    n = -(-m // size)
    return [slice(i * m // n, (i + 1) * m // n) for i in range(n)]


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


class _Log:
    """Output of tqdm without a terminal: one line per minute for all bars together, the first after a minute."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._last = time.monotonic()

    def write(self, text: str) -> None:
        line, now = text.strip(), time.monotonic()
        if line and now - self._last >= SECONDS_PER_LINE:
            self._last = now
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


_log: _Log | None = None


def at_terminal() -> bool:
    """Whether somebody watches stderr; without one, bars go nowhere anyway."""
    return sys.stderr is None or sys.stderr.isatty()


def progress_bar(*args: Any, **options: Any) -> Any:
    global _log
    if options.get("disable") or at_terminal():
        return tqdm(*args, mininterval=0.5, **options)
    _log = _log or _Log()
    return tqdm(*args, mininterval=1.0, file=_log, ncols=80, **options)
