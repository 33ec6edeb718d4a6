"""Global state of torch in a process: random generators, which are restored after use, and threads after a fork."""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")

_turn = threading.RLock()
"""Held by the thread that has temporarily changed a global generator."""


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Context in which torch's global generators start from `seed`; afterwards their state is restored."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    with _turn:
        before = [generator.get_state() for generator in generators]
        for generator in generators:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


def isolated(items: Iterable[Item], generator: torch.Generator, seed: int) -> Iterator[Item]:
    """Iterate over `items` while `generator` has a separate state that starts from `seed`."""
    own = torch.Generator().manual_seed(seed).get_state()
    iterator: Iterator[Item] | None = None
    while True:
        with _turn:
            before = generator.get_state()
            generator.set_state(own)
            try:
                iterator = iter(items) if iterator is None else iterator
                item = next(iterator)
            except StopIteration:
                return
            finally:
                own = generator.get_state()
                generator.set_state(before)
        yield item


def _start_of_child() -> None:
    """Restrict a forked child to one thread: it would wait forever for OpenMP's threads, which a fork does not copy."""
    global _turn
    _turn = threading.RLock()
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_start_of_child)
