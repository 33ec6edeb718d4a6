"""Implementation of `python -m benchmarks.bo`: from command-line options to runs and files."""

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.bo import picture, tables
from benchmarks.bo.methods import METHODS
from benchmarks.bo.problems import PROBLEMS
from benchmarks.bo.run import Failure, Task, open_store
from benchmarks.bo.run import run as run_all
from benchmarks.commands import named, write_files
from lastlayer.errors import InputError
from lastlayer.studies.paper import check_folder

SEEDS, TIMING_SEEDS, OUT = 10, 3, Path("results/bo")


@dataclass(frozen=True)
class Asked:
    """Checked options of a benchmark, before anything is run."""

    tasks: list[Task]
    out: Path
    processes: int
    again: bool
    messages: list[str]
    """Messages for the user before the start."""

    @classmethod
    def parse(
        cls,
        *,
        problems: str | None = None,
        methods: str | None = None,
        seeds: int = SEEDS,
        steps: int | None = None,
        processes: int = 1,
        out: Path = OUT,
        again: bool = False,
    ) -> "Asked":
        asked = list(PROBLEMS.values()) if problems is None else named("problem", problems, PROBLEMS)
        chosen = list(METHODS.values()) if methods is None else named("method", methods, METHODS)
        if seeds < 1 or processes < 1 or (steps is not None and steps < 1):
            raise InputError(f"seeds={seeds}, steps={steps}, processes={processes}: each must be 1 or more")
        messages = [f"left out: {m.name} needs {', '.join(m.missing())}" for m in chosen if m.missing()]
        present = [m for m in chosen if not m.missing()]
        if not present:
            raise InputError(f"none of the methods can run: {'; '.join(messages)}")
        check_folder(out)
        tasks = [
            Task(p.name, m.name, seed, min(p.n_steps, steps or p.n_steps))
            for seed in range(seeds)
            for p in sorted(asked, key=lambda p: -p.n_steps)  # long runs first, so that no core is idle at the end
            for m in present
            if not p.timing or (seed < TIMING_SEEDS and not m.slow)
        ]
        return cls(tasks, out, processes, again, messages)


def run(asked: Asked, *, progress: bool = False) -> list[Failure]:
    torch.set_num_threads(1)
    store = open_store(asked.out)
    missing = [task for task in asked.tasks if asked.again or task.key not in store]
    return run_all(missing, store, processes=asked.processes, progress=progress)


def write(out: Path) -> tables.Summary:
    """Write tables and figure of all results in the folder; each file is replaced as a whole or not at all."""
    results = list(open_store(out).results.values())
    summary = tables.Summary(results)
    texts = {"tables.md": tables.as_markdown(summary), "scores.csv": tables.as_csv(results)}
    ranked = any(problem.ranked for problem in summary.problems)
    write_files(out, texts, {"bo.png": picture.picture(summary)} if ranked else {})
    return summary
