"""Runs of one problem, method and seed each: missing ones are run, optionally in several processes, and saved."""

import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.bo.methods import METHODS, Method, initial_points
from benchmarks.bo.problems import PROBLEMS, Problem
from benchmarks.jsonl import Store, versions

Key = tuple[str, str, int, str]


@dataclass(frozen=True)
class Task:
    """One run, identified by names only so that any process can execute it."""

    problem: str
    method: str
    seed: int
    n_steps: int

    def __str__(self) -> str:
        return f"{self.method} on {self.problem}, seed {self.seed}"

    @property
    def key(self) -> Key:
        return self.problem, self.method, self.seed, config(PROBLEMS[self.problem], METHODS[self.method], self.n_steps)


@dataclass(frozen=True)
class Result:
    """Result of one run: one line of the file."""

    problem: str
    method: str
    seed: int
    config: str
    regret: list[float]
    """Regret after every evaluation, including the initial ones."""
    seconds: list[float]
    """Processor seconds of each step: fit and search for the next point."""
    versions: dict[str, str]

    @property
    def key(self) -> Key:
        return self.problem, self.method, self.seed, self.config


@dataclass(frozen=True)
class Failure:
    """A run that raised an error."""

    task: Task
    error: str

    def __str__(self) -> str:
        return f"{self.task}: {self.error}"


def open_store(folder: Path) -> Store[Result]:
    return Store(folder / "results.jsonl", lambda content: Result(**content))


def config(problem: Problem, method: Method, n_steps: int) -> str:
    """Configuration of a run; results of another configuration are not reused."""
    return f"{problem.n_initial} + {n_steps}, {method.config}"


def evaluate(task: Task) -> Result:
    """Execute one run."""
    problem, method = PROBLEMS[task.problem], METHODS[task.method]
    function = problem.make(task.seed)
    optimiser = method.make(problem, task.seed)
    torch.manual_seed(task.seed)
    X = initial_points(problem, task.seed, problem.n_initial)
    Y, seconds = function(X), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of other packages
        for _ in range(task.n_steps):
            start = time.process_time()
            x = optimiser.propose(X, Y)
            seconds.append(round(time.process_time() - start, 4))
            X, Y = torch.cat([X, x]), torch.cat([Y, function(x)])
    return Result(
        problem=task.problem,
        method=task.method,
        seed=task.seed,
        config=task.key[-1],
        regret=problem.regret(Y),
        seconds=seconds,
        versions=versions(method.packages),
    )


def run(tasks: Sequence[Task], store: Store[Result], *, processes: int = 1, progress: bool = False) -> list[Failure]:
    """Execute the tasks; failures are returned and not written."""
    failures = []
    with tqdm(total=len(tasks), disable=not progress, file=sys.stderr, unit="run") as bar:
        for task, outcome in _outcomes(tasks, processes):
            bar.update()
            bar.set_description(str(task))
            if isinstance(outcome, Result):
                store.append(outcome)
            else:
                failures.append(outcome)
    return failures


def _outcomes(tasks: Sequence[Task], processes: int) -> Iterator[tuple[Task, Result | Failure]]:
    if processes == 1:
        for task in tasks:
            yield _outcome(task)
        return
    # spawned processes, since forks would share locks of torch's threads
    with multiprocessing.get_context("spawn").Pool(processes, _one_thread) as pool:
        yield from pool.imap_unordered(_outcome, tasks)


def _outcome(task: Task) -> tuple[Task, Result | Failure]:
    try:
        return task, evaluate(task)
    except Exception as error:  # an error of one method does not stop the others
        return task, Failure(task, f"{type(error).__name__}: {error}")


def _one_thread() -> None:
    torch.set_num_threads(1)
