"""What the benchmarks share: results kept as JSON lines, a loop of tasks that resumes, options, tables, files."""

import argparse
import csv
import io
import json
import math
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import rankdata
from tqdm import tqdm

from lastlayer._internal.files import replacing
from lastlayer.errors import InputError, LastLayerError, check_choice
from lastlayer.studies.paper import check_folder

PACKAGES = ("lastlayer", "torch", "numpy", "scipy", "scikit-learn")
Thing = TypeVar("Thing")
Key = tuple[Any, ...]
Rows = list[list[str]]  # cells of a table; the first row is the header, whose first cell may be a title


@dataclass(frozen=True)
class Job:
    """Work with one result, a dataclass; its fields identify it. To run in another process, it must be picklable."""

    @property
    def key(self) -> Key:
        return astuple(self)

    def run(self) -> Any:
        raise NotImplementedError

    def __str__(self) -> str:
        return ", ".join(map(str, self.key))


class Store:
    """Results in a file of JSON lines, each written at once; lines cut off or of another version are skipped."""

    def __init__(self, path: Path, kind: type[Any]) -> None:
        self.path, self.results = path, dict[Key, Any]()
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
            try:
                content = json.loads(line)
                self.results[tuple(content["key"])] = revived(kind, content["result"])
            except (ValueError, TypeError, KeyError, AttributeError):
                continue  # its task is repeated

    def append(self, key: Key, result: Any) -> None:
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")  # the last run was cut off inside a line
            line = {"key": key, "result": asdict(result)}
            file.write((json.dumps(line) + "\n").encode())
        self.results[key] = result


def revived(kind: type[Thing], content: Mapping[str, Any]) -> Thing:
    """A dataclass, with dataclasses among its fields, from JSON."""
    kinds = get_type_hints(kind)
    nested = lambda name, value: revived(kinds[name], value) if is_dataclass(kinds[name]) else value
    return kind(**{name: nested(name, value) for name, value in content.items()})


@dataclass(frozen=True)
class Outcome:
    """What became of a task: its result, or the reason why there is none."""

    task: Any
    result: Any = None
    why_not: str = ""
    failed: bool = False  # whether it was tried and failed

    def __str__(self) -> str:
        return f"{self.task}: {self.why_not or 'done'}"


def perform(
    tasks: Sequence[Any],
    store: Store,
    *,
    again: bool = False,
    processes: int = 1,
    isolated: bool = False,
    unable: Callable[[Any], str | None] = lambda task: None,
) -> Iterator[Outcome]:
    """Run the tasks whose results are missing, or with `again` all; a task that fails does not stop the others.

    More than one of `processes` work in parallel, in any order; `isolated` gives each task a process of its own, one
    after the other. `unable` may tell why a task cannot be run, before its turn.
    """
    new = [task for task in tasks if again or task.key not in store.results]
    with tqdm(total=len(tasks), initial=len(tasks) - len(new), file=sys.stderr, unit="task") as bar:

        def kept(outcome: Outcome) -> Outcome:
            bar.update()
            if outcome.result is not None:
                store.append(outcome.task.key, outcome.result)
            return outcome

        if processes > 1 and not isolated:
            yield from (Outcome(task, store.results[task.key]) for task in tasks if task not in new)
            with pool_of(processes) as pool:
                asked = {pool.submit(_outcome, task): task for task in new}
                yield from (kept(_ended(asked[done], done)) for done in as_completed(asked))
            return
        for task in tasks:
            if task not in new:
                yield Outcome(task, store.results[task.key])
            elif why_not := unable(task):
                yield Outcome(task, why_not=why_not)
            else:
                bar.set_description(str(task))
                yield kept(_alone(task) if isolated else _outcome(task))


def complete(
    tasks: Sequence[Any], store: Store, write: Callable[[Sequence[Outcome]], None] = lambda outcomes: None, **how: Any
) -> list[Any]:
    """Results of all tasks that can be run; failures end the program after the others.

    `write` is given what there is at the end, or where the program is interrupted.
    """
    outcomes: list[Outcome] = []
    try:
        outcomes.extend(perform(tasks, store, **how))
    finally:
        write(outcomes)
    failures = [outcome for outcome in outcomes if outcome.failed]
    for failure in failures:
        print(f"failed: {failure}")
    if failures:
        sys.exit(1)
    return [store.results[task.key] for task in tasks if task.key in store.results]


def pool_of(processes: int) -> Executor:
    return ProcessPoolExecutor(processes, get_context("spawn"))  # forks would share locks of torch's threads


def in_own_process(work: Callable[..., Thing], *given: Any) -> Thing:
    with pool_of(1) as pool:
        return pool.submit(work, *given).result()


def _ended(task: Any, done: Future[Outcome]) -> Outcome:
    try:
        return done.result()
    except Exception as error:  # the process itself was ended
        return _failed(task, error)


def _alone(task: Any) -> Outcome:
    with pool_of(1) as pool:
        return _ended(task, pool.submit(_outcome, task))


def _failed(task: Any, error: Exception) -> Outcome:
    return Outcome(task, why_not=f"{type(error).__name__}: {error}", failed=True)


def _outcome(task: Any) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages
        try:
            return Outcome(task, task.run())
        except Exception as error:  # an error of one method does not stop the others
            return _failed(task, error)


def versions(packages: Sequence[str] = ()) -> dict[str, str]:
    """Versions of Python, of the packages that every run needs, and of the packages given."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def options_of(doc: str | None, *, out: str | None = None, again: bool = False) -> argparse.ArgumentParser:
    """A parser with the text of a module as help, and on request the options `--out` and `--again`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if out is not None:
        parser.add_argument("--out", type=folder, default=out, help=f"folder for results, default {out}")
    if again:
        parser.add_argument("--again", action="store_true", help="repeat what already has results")
    return parser


def folder(name: str) -> Path:
    """A folder that can be written to, or the end of the program."""
    with helpful():
        check_folder(Path(name))
    return Path(name)


def split_list(text: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise InputError("an empty list was given: name at least one, with commas between them")
    return found


def whole_numbers(name: str, text: str, least: int = 0, example: str = "0,1,2") -> list[int]:
    """Parse comma-separated whole numbers; the result is sorted and without duplicates."""
    try:
        numbers = [int(part) for part in split_list(text)]
    except ValueError:
        raise InputError(f"{name}={text!r} must be whole numbers with commas between them, such as {example}") from None
    if min(numbers) < least:
        raise InputError(f"{name}={text!r} must be {least} or more")
    return sorted(set(numbers))


def named(kind: str, text: str | None, every: Mapping[str, Thing]) -> list[Thing]:
    """Look up objects by comma-separated names, which may themselves contain commas; None: all of them."""
    if text is None:
        return list(every.values())
    names = {name.replace(", ", ","): name for name in every}
    found, parts = [], split_list(text)
    while parts:
        whole = next((n for n in range(len(parts), 0, -1) if ",".join(parts[:n]) in names), 1)
        name = ",".join(parts[:whole])
        found.append(every[check_choice(kind, names.get(name, name), every)])
        parts = parts[whole:]
    return found


def installed(methods: Sequence[Any], hint: str = "") -> list[Any]:
    """Methods none of whose packages are `missing()`; the others are printed."""
    absent = [f"{method.name} needs {', '.join(method.missing())}{hint}" for method in methods if method.missing()]
    present = [method for method in methods if not method.missing()]
    if not present:
        raise InputError(f"none of the methods can run: {'; '.join(absent)}")
    for text in absent:
        print(f"left out: {text}")
    return present


@contextmanager
def helpful() -> Iterator[None]:
    """Errors of the user end the program with a message."""
    try:
        yield
    except LastLayerError as error:
        sys.exit(f"error: {error}")


def mean_ranks(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Ranks of names by their costs, 1 for the smallest, averaged over rows; equal costs share their ranks."""
    ranks = [rankdata(list(row.values())) for row in rows]
    return dict(zip(rows[0], np.mean(ranks, axis=0).tolist(), strict=True)) if ranks else {}


def grouped(results: Iterable[Thing], key: Callable[[Thing], Any]) -> dict[Any, list[Thing]]:
    """Results by a key of theirs, in the order in which the keys occur."""
    found: dict[Any, list[Thing]] = {}
    for result in results:
        found.setdefault(key(result), []).append(result)
    return found


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, which is NaN for a single value."""
    n = len(values)
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(n)) if n > 1 else math.nan


def with_error(values: Sequence[float], digits: int) -> str:
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def markdown(rows: Rows) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))


def as_csv(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def aligned(rows: Rows) -> str:
    """The table in text: the title above, the first column flush left, the others flush right."""
    (title, *head), *body = rows
    whole = [["", *head], *body]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    cells = ([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])] for first, *rest in whole)
    return "\n".join([title, *("  ".join(line).rstrip() for line in cells)])


def sized(ax: Axes, sizes: Sequence[int], label: str) -> None:
    """Ticks of a logarithmic axis at the sizes that were measured."""
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30, fontsize=7)
    ax.set_xlabel(label)
    ax.minorticks_off()
    ax.grid(lw=0.4, color="0.9")


def write_files(folder: Path, texts: Mapping[str, str], figures: Mapping[str, Figure] | None = None) -> None:
    """Write texts and figures, each replaced as a whole or not at all, and print their paths."""
    check_folder(folder)
    contents: dict[str, Any] = {**texts, **(figures or {})}
    for name, content in contents.items():
        with replacing(folder / name) as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                content.savefig(file, format="png", dpi=200, metadata={"Software": None})
    print(f"written to {folder}: {', '.join(contents)}")
