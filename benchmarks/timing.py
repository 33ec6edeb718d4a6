"""Helpers shared by the benchmarks: timing in turns, ratios with targets, a description of the machine."""

import os
import platform
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

Done = TypeVar("Done")

STEADY = 1.5  # ratio of slowest to fastest repeat above which a timing is reported as unsteady


@dataclass(frozen=True)
class Timing:
    """Median time of one side over its repeats, in seconds."""

    median: float
    spread: float  # slowest over fastest

    @classmethod
    def of(cls, seconds: list[float]) -> "Timing":
        return cls(statistics.median(seconds), max(seconds) / min(seconds))

    def __str__(self) -> str:
        return f"{1e3 * self.median:9.1f} ms (spread {self.spread:.2f})"


@dataclass(frozen=True)
class Ratio:
    """One line of the table: the two sides, their ratio, and its target."""

    subject: str
    measured: str
    value: float
    at_least: float | None = None
    spread: float = 1.0  # the larger spread of the two sides

    @classmethod
    def of_times(cls, subject: str, measured: str, above: Timing, below: Timing, at_least: float | None) -> "Ratio":
        return cls(subject, measured, above.median / below.median, at_least, max(above.spread, below.spread))

    def __str__(self) -> str:
        target = "" if self.at_least is None else f">= {self.at_least:g}"
        verdict = "" if self.at_least is None else "PASS" if self.value >= self.at_least else "short"
        unsteady = "" if self.spread <= STEADY else f" unsteady: repeats differ {self.spread:.1f} times"
        return f"{self.subject:<17} {self.measured:<44} {self.value:>8.2f} {target:>7} {verdict}{unsteady}"


def time_in_turns(
    *sides: Callable[[], object], repeats: int = 7, clock: Callable[[], float] = time.perf_counter
) -> list[Timing]:
    """Time each side; the sides take turns, so that other work on the machine slows all of them.

    With `clock=time.process_time` other work has little effect.
    """
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(repeats + 1):
        for side, taken in zip(sides, seconds, strict=True):
            start = clock()
            side()
            if turn:  # the first turn warms up
                taken.append(clock() - start)
    return [Timing.of(taken) for taken in seconds]


def now(device: str) -> float:
    """Seconds of a clock, once the device has done its work."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], Done]) -> tuple[Done, float, float]:
    """Run a function; return its result, the processor seconds of all threads of this process, and wall seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    done = work()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return done, cpu, wall


def memory(kind: str = "VmRSS", file: str = "/proc/self/status") -> float:
    """Megabytes of this process: resident ones, or those in another line of such a file."""
    lines = Path(file).read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def peak_of(work: Callable[[], object], *, kind: str = "VmRSS", every: float = 0.0005) -> float:
    """By how many megabytes a call raises the process's resident memory, or another line of /proc/self/status."""
    before, peak, done = memory(kind), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(every):
            peak[0] = max(peak[0], memory(kind))

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return peak[0] - before


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError where the work takes longer on the wall; between two lines of Python, in the main thread."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"stopped after {seconds:,.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def describe_machine() -> str:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    return f"{machine}; torch {torch.__version__}, threads in use: {torch.get_num_threads()}"


def print_ratios(ratios: list[Ratio]) -> None:
    print(f"\n{'':<17} {'ratio of':<44} {'measured':>8} {'target':>7}")
    print(*ratios, sep="\n")
