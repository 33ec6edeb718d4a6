"""What stands behind `lastlayer bench bo` and `python -m lastlayer.studies.bo`."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from lastlayer.errors import InputError, choose
from lastlayer.studies.bo import tables
from lastlayer.studies.bo.methods import METHODS
from lastlayer.studies.bo.problems import PROBLEMS
from lastlayer.studies.bo.run import Failure, Task, open_store
from lastlayer.studies.bo.run import run as run_all
from lastlayer.studies.results import check_folder

SEEDS, TIMING_SEEDS, OUT = 10, 3, Path("results/bo")


@dataclass(frozen=True)
class Asked:
    """A benchmark as asked for: everything checked, nothing run."""

    tasks: list[Task]
    out: Path
    processes: int
    again: bool
    messages: list[str]
    """What the user should know before it starts."""

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
        asked = [PROBLEMS[choose("problem", word, PROBLEMS)] for word in _words(problems, PROBLEMS)]
        chosen = [METHODS[choose("method", word, METHODS)] for word in _words(methods, METHODS)]
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
            for p in sorted(asked, key=lambda p: -p.n_steps)  # long runs first, so that no core waits at the end
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
    """Tables and picture of all that the folder's results hold; whole files or none."""
    results = list(open_store(out).results.values())
    summary = tables.Summary(results)
    for name, text in {"tables.md": tables.as_markdown(summary), "scores.csv": tables.as_csv(results)}.items():
        aside = out / f".{name}.unfinished"
        aside.write_text(text)
        os.replace(aside, out / name)
    if any(problem.ranked for problem in summary.problems) and find_spec("matplotlib"):
        from lastlayer.studies.bo import picture  # tables do without it

        aside = out / ".bo.unfinished.png"
        picture.picture(summary).savefig(aside, dpi=200, metadata={"Software": None})
        os.replace(aside, out / "bo.png")
    return summary


def main(arguments: list[str] | None = None) -> int:
    """The same without typer and rich."""
    parser = argparse.ArgumentParser(prog="python -m lastlayer.studies.bo", description="Bayesian optimisation.")
    parser.add_argument("--problems", help=f"with commas, of {', '.join(PROBLEMS)}; all if left out")
    parser.add_argument("--methods", help=f"with commas, of {', '.join(METHODS)}; all if left out")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, help="at most so many steps a run, for a try")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, a thread each")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--again", action="store_true", help="do anew what is already there")
    try:
        asked = Asked.parse(**vars(parser.parse_args(arguments)))
    except InputError as error:
        parser.error(str(error))
    for message in asked.messages:
        print(message)
    failures: list[Failure] = []
    try:
        failures = run(asked, progress=True)
    finally:  # an interrupted run too leaves its tables
        write(asked.out)
    print((asked.out / "tables.md").read_text())
    for failure in failures:
        print(f"failed: {failure}")
    return 1 if failures else 0


def _words(text: str | None, every: Mapping[str, object]) -> list[str]:
    """Names with commas between them; a name may hold a comma itself."""
    if text is None:
        return list(every)
    words, parts = [], [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InputError("an empty list was given: name at least one, with commas between them")
    while parts:
        whole = next((n for n in range(len(parts), 0, -1) if ",".join(parts[:n]) in every), 1)
        words.append(",".join(parts[:whole]))
        parts = parts[whole:]
    return words
