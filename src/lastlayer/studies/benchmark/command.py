"""What stands behind `lastlayer bench uci`: the words of the command line made into tables and methods, and files."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from lastlayer.errors import InputError, choose
from lastlayer.studies.benchmark import picture, tables
from lastlayer.studies.benchmark.data import KINDS, Table, load_folder
from lastlayer.studies.benchmark.ours import OURS
from lastlayer.studies.benchmark.peers import PEERS, TARGET
from lastlayer.studies.benchmark.protocol import Method
from lastlayer.studies.benchmark.run import Failure
from lastlayer.studies.benchmark.run import run as run_all
from lastlayer.studies.benchmark.store import open_store
from lastlayer.studies.results import check_folder

METHODS: dict[str, Method] = {method.name: method for method in (*OURS, *PEERS)}
GROUPS = {"all": (*OURS, *PEERS), "ours": OURS, "peers": PEERS}


@dataclass(frozen=True)
class Asked:
    """A benchmark as asked for: everything checked, nothing run."""

    tables: list[Table]
    methods: list[Method]
    kinds: list[str]
    splits: list[int]
    out: Path
    device: str
    again: bool
    messages: list[str]
    """What the user should know before it starts."""

    @classmethod
    def parse(
        cls,
        *,
        data: Path,
        methods: str,
        sets: str | None,
        splits: str,
        kinds: str,
        out: Path,
        device: str,
        again: bool,
    ) -> "Asked":
        chosen = choose_methods(methods)
        present = [method for method in chosen if not method.missing()]
        absent = [method for method in chosen if method.missing()]
        messages = [f"left out: {m.name} needs {', '.join(m.missing())}; {TARGET} installs it" for m in absent]
        if not present:
            raise InputError(f"none of the methods can run: {'; '.join(messages)}")
        found = load_folder(data, None if sets is None else _words(sets))
        numbers = _numbers(splits)
        words = [choose("kind", kind, KINDS) for kind in _words(kinds)]
        if "given" in words:
            gaps = {table.name: sorted(set(numbers) - set(table.splits("given", numbers))) for table in found}
            messages += [f"{name} has no given split {', '.join(map(str, gap))}" for name, gap in gaps.items() if gap]
        check_folder(out)
        return cls(found, present, words, numbers, out, _device(device), again, messages)


def choose_methods(words: str) -> list[Method]:
    """Methods by a group's name or by their own; names with a comma inside are found too."""
    if words.strip() in GROUPS:
        return list(GROUPS[words.strip()])
    chosen, parts = [], _words(words)
    while parts:
        whole = next((n for n in range(len(parts), 0, -1) if ", ".join(parts[:n]) in METHODS), 1)
        chosen.append(METHODS[choose("method", ", ".join(parts[:whole]), METHODS)])
        parts = parts[whole:]
    return chosen


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
    """Tables and picture of all that the folder's results hold, whichever run they stem from; whole files or none."""
    results = list(open_store(out).results.values())
    summary = tables.Summary(results, list(METHODS.values()))
    texts = {"tables.md": tables.as_markdown(summary), "scores.csv": tables.as_csv(results)}
    for name, text in texts.items():
        aside = out / f".{name}.unfinished"
        aside.write_text(text)
        os.replace(aside, out / name)
    if summary.methods:
        aside = out / ".uci.unfinished.png"
        picture.picture(summary).savefig(aside, dpi=200, metadata={"Software": None})
        os.replace(aside, out / "uci.png")
    return summary


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise InputError("an empty list was given: name at least one, with commas between them")
    return words


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in _words(text)]
    except ValueError:
        raise InputError(f"splits={text!r} must be whole numbers with commas between them, such as 0,1,2") from None
    if min(numbers) < 0:
        raise InputError(f"splits={text!r} must be 0 or more")
    return sorted(set(numbers))


def _device(word: str) -> str:
    if word == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return str(torch.device(word))
    except RuntimeError:
        raise InputError(f"device={word!r} is not known: give 'auto', 'cpu' or 'cuda'") from None
