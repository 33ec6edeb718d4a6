"""Measurement of one method at one size: `python -m benchmarks.fit.measure METHOD ROWS THREADS` prints a line of JSON.

Each measurement runs in a separate process, so that the processor time is that of this method alone. A small warm-up
fit comes first, so that imports and other one-time costs are not counted.
"""

import json
import os
import platform
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.fit.data import make_rows
from benchmarks.fit.methods import METHODS
from benchmarks.jsonl import Store, versions
from benchmarks.timing import time_in_turns, timed
from benchmarks.uci.protocol import Method, Scores, Task, score

ROOT = Path(__file__).parents[2]
TEST_ROWS, WARM_UP_ROWS = 2_000, 60
TRAINING, TESTING, WARM_UP = range(3)
"""Seeds."""
CALLS = 30
"""Number of single-row predictions; the median is reported."""

Key = tuple[str, str, int, int, str]


@dataclass(frozen=True)
class Result:
    """Result of one measurement: one line of the file."""

    method: str
    config: str
    rows: int
    threads: int
    machine: str
    load: float
    """Load of the machine at the start."""
    cpu_seconds: float
    """Processor seconds of the fit, all threads."""
    seconds: float
    """Wall seconds of the fit."""
    row_us: float
    """Processor microseconds per row for a prediction of all test rows."""
    single_us: float
    """Processor microseconds for a prediction of one row."""
    scores: Scores
    versions: dict[str, str]

    @property
    def key(self) -> Key:
        return self.method, self.config, self.rows, self.threads, self.machine


def key_of(method: Method, rows: int, threads: int) -> Key:
    return method.name, method.config, rows, threads, this_machine()


def this_machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores"


def read(content: dict[str, Any]) -> Result:
    return Result(**{**content, "scores": Scores(**content["scores"])})


def open_store(folder: Path) -> Store[Result]:
    return Store(folder / "fit.jsonl", read)


def measure(method: Method, rows: int, threads: int) -> Result:
    """Fit, predict and score in this process."""
    load = os.getloadavg()[0]
    torch.set_num_threads(threads)
    task = Task("fit", "given", 0)
    X_test, y_test = make_rows(TEST_ROWS, TESTING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of other packages
        method.fit(*make_rows(WARM_UP_ROWS, WARM_UP), task)(X_test)
        X, y = make_rows(rows, TRAINING)
        predict, cpu, wall = timed(lambda: method.fit(X, y, task))
        scores = score(predict(X_test), y_test)
        (many,) = time_in_turns(lambda: predict(X_test), clock=time.process_time)
        (single,) = time_in_turns(lambda: predict(X_test[:1]), repeats=CALLS, clock=time.process_time)
    return Result(
        method=method.name,
        config=method.config,
        rows=rows,
        threads=threads,
        machine=this_machine(),
        load=round(load, 2),
        cpu_seconds=round(cpu, 3),
        seconds=round(wall, 3),
        row_us=round(1e6 * many.median / TEST_ROWS, 3),
        single_us=round(1e6 * single.median, 1),
        scores=scores,
        versions=versions(method.packages),
    )


def in_a_process(method: Method, rows: int, threads: int) -> Result:
    """Measure in a separate process; an error has the last line of its output."""
    kinds = ("OMP", "MKL", "OPENBLAS")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fit.measure", method.name, str(rows), str(threads)],
        env={**os.environ, **{f"{kind}_NUM_THREADS": str(threads) for kind in kinds}},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        raise ChildProcessError(words[-1])
    return read(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    print(json.dumps(asdict(measure(METHODS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])))))
