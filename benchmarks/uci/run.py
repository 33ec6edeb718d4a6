"""Loop over splits, tables and methods: missing results are computed, and failures reported without stopping."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from benchmarks.jsonl import Store
from benchmarks.timing import timed
from benchmarks.uci.data import Table
from benchmarks.uci.protocol import Method, Task, score
from benchmarks.uci.store import Result, key_of, versions_of


@dataclass(frozen=True)
class Failure:
    """A method that raised an error on a task."""

    task: Task
    method: str
    error: str

    def __str__(self) -> str:
        return f"{self.method} on {self.task.data}, {self.task.kind} split {self.task.split}: {self.error}"


def tasks(
    tables: Sequence[Table], kinds: Sequence[str], splits: Sequence[int], device: str
) -> Iterator[tuple[Task, Table]]:
    """List tasks split by split, so that partial results are balanced over tables and methods."""
    found = [
        (Task(table.name, kind, split, table.hidden, device), table)
        for kind in kinds
        for table in tables
        for split in table.splits(kind, splits)
    ]
    yield from sorted(found, key=lambda pair: pair[0].split)


def run(
    tables: Sequence[Table],
    methods: Sequence[Method],
    store: Store[Result],
    *,
    kinds: Sequence[str],
    splits: Sequence[int],
    device: str = "cpu",
    again: bool = False,
    progress: bool = False,
) -> list[Failure]:
    """Compute what is not in the store, or with `again` everything; failures are returned and not written."""
    asked = [(task, table, m) for task, table in tasks(tables, kinds, splits, device) for m in methods]
    missing = [one for one in asked if again or key_of(one[0], one[2]) not in store]
    failures = []
    with tqdm(missing, disable=not progress, file=sys.stderr, unit="fit") as bar:
        for task, table, method in bar:
            bar.set_description(f"{task.data} {task.kind} {task.split}, {method.name}")
            try:
                store.append(evaluate(task, table, method))
            except Exception as error:  # an error of one method does not stop the others
                failures.append(Failure(task, method.name, f"{type(error).__name__}: {error}"))
    return failures


def evaluate(task: Task, table: Table, method: Method) -> Result:
    """Fit one method to one split and score it."""
    test = table.test_rows(task.kind, task.split)
    train = np.setdiff1d(np.arange(len(table.X)), test)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of other packages
        prediction, cpu, wall = timed(lambda: method.fit(table.X[train], table.y[train], task)(table.X[test]))
    return Result(
        data=task.data,
        kind=task.kind,
        split=task.split,
        method=method.name,
        config=method.config,
        scores=score(prediction, table.y[test]),
        cpu_seconds=round(cpu, 3),
        seconds=round(wall, 3),
        device=task.device,
        versions=versions_of(method),
    )
