"""Helpers shared by the benchmark commands: lists of names and numbers, files, printed tables."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from lastlayer._internal.files import replacing
from lastlayer.cli.console import Output
from lastlayer.errors import InputError, check_choice

console = Console()
Thing = TypeVar("Thing")


def split_list(text: str) -> list[str]:
    """Split comma-separated names."""
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


def named(kind: str, text: str, every: Mapping[str, Thing]) -> list[Thing]:
    """Look up objects by comma-separated names; a name may itself contain a comma."""
    names = {name.replace(", ", ","): name for name in every}
    found, parts = [], split_list(text)
    while parts:
        whole = next((n for n in range(len(parts), 0, -1) if ",".join(parts[:n]) in names), 1)
        name = ",".join(parts[:whole])
        found.append(every[check_choice(kind, names.get(name, name), every)])
        parts = parts[whole:]
    return found


def write_files(folder: Path, texts: Mapping[str, str], figures: Mapping[str, Figure]) -> None:
    """Write texts and figures; each file is replaced as a whole or not at all."""
    for name, text in texts.items():
        with replacing(folder / name) as file:
            file.write(text.encode())
    for name, figure in figures.items():
        with replacing(folder / name) as file:
            figure.savefig(file, format="png", dpi=200, metadata={"Software": None})


def run_benchmark(study: Any, asked: Any, picture: str, show: Callable[[Any], None], as_json: bool) -> None:
    """Run a `study` (with `run` and `write`) and print its results as tables or as JSON."""
    output, out = Output(as_json), asked.out
    for message in asked.messages:
        output.note(message) if as_json else console.print(message, style="yellow", highlight=False)
    try:
        failures = study.run(asked, progress=True)
    finally:  # an interrupted run also writes its tables
        summary = study.write(out)
    output.result(tables=str(out / "tables.md"), picture=str(out / picture), failures=[str(f) for f in failures])
    if not as_json:
        show(summary)
        for failure in failures:
            console.print(f"[bold red]failed:[/bold red] {failure}", highlight=False)
        console.print(f"\nall tables, and the tuning of each method: {out / 'tables.md'}; figure: {out / picture}")
    if failures:
        raise typer.Exit(1)


def print_rows(rows: list[list[str]]) -> None:
    """Print a table from a header and rows; the first entry of the header is the title."""
    (title, *head), *body = rows
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("", no_wrap=True)
    for name in head:
        table.add_column(name, justify="right")
    for row in body:
        table.add_row(*row)
    console.print(table)
