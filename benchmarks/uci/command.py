"""Implementation of `python -m benchmarks.uci`: from command-line options to tables, methods and files."""

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.commands import named, split_list, whole_numbers, write_files
from benchmarks.uci import picture, tables
from benchmarks.uci.data import KINDS, Table, load_folder
from benchmarks.uci.ours import OURS
from benchmarks.uci.peers import PEERS, TARGET
from benchmarks.uci.protocol import Method
from benchmarks.uci.run import Failure
from benchmarks.uci.run import run as run_all
from benchmarks.uci.store import open_store
from lastlayer.errors import InputError, check_choice
from lastlayer.studies.paper import check_folder

METHODS: dict[str, Method] = {method.name: method for method in (*OURS, *PEERS)}
GROUPS = {"all": (*OURS, *PEERS), "ours": OURS, "peers": PEERS}


@dataclass(frozen=True)
class Asked:
    """Checked options of a benchmark, before anything is run."""

    tables: list[Table]
    methods: list[Method]
    kinds: list[str]
    splits: list[int]
    out: Path
    device: str
    again: bool
    messages: list[str]
    """Messages for the user before the start."""

    @classmethod
    def parse(
        cls, *, data: Path, methods: str, sets: str | None, splits: str, kinds: str, out: Path, device: str, again: bool
    ) -> "Asked":
        chosen = choose_methods(methods)
        present = [method for method in chosen if not method.missing()]
        absent = [method for method in chosen if method.missing()]
        messages = [f"left out: {m.name} needs {', '.join(m.missing())}; {TARGET} installs it" for m in absent]
        if not present:
            raise InputError(f"none of the methods can run: {'; '.join(messages)}")
        found = load_folder(data, None if sets is None else split_list(sets))
        numbers = whole_numbers("splits", splits)
        chosen_kinds = [check_choice("kind", kind, KINDS) for kind in split_list(kinds)]
        if "given" in chosen_kinds:
            gaps = {table.name: sorted(set(numbers) - set(table.splits("given", numbers))) for table in found}
            messages += [f"{name} has no given split {', '.join(map(str, gap))}" for name, gap in gaps.items() if gap]
        check_folder(out)
        return cls(found, present, chosen_kinds, numbers, out, _device(device), again, messages)


def choose_methods(text: str) -> list[Method]:
    """Look up methods by the name of a group or by their own names, which may contain commas."""
    if text.strip() in GROUPS:
        return list(GROUPS[text.strip()])
    return named("method", text, METHODS)


def run(asked: Asked, *, progress: bool = False) -> list[Failure]:
    return run_all(
        asked.tables,
        asked.methods,
        open_store(asked.out),
        kinds=asked.kinds,
        splits=asked.splits,
        device=asked.device,
        again=asked.again,
        progress=progress,
    )


def write(out: Path) -> tables.Summary:
    """Write tables and figure of all results in the folder, from any run; each file is replaced as a whole."""
    results = list(open_store(out).results.values())
    summary = tables.Summary(results, list(METHODS.values()))
    texts = {"tables.md": tables.as_markdown(summary), "scores.csv": tables.as_csv(results)}
    write_files(out, texts, {"uci.png": picture.picture(summary)} if summary.methods else {})
    return summary


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return str(torch.device(name))
    except RuntimeError:
        raise InputError(f"device={name!r} is not known: give 'auto', 'cpu' or 'cuda'") from None
