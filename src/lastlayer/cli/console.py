"""What commands say: words for people, or one JSON object for machines. Errors and notes go to stderr."""

import functools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lastlayer.errors import LastLayerError

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for machines.")]
NO_NUMBERS = {"NaN": None, "Infinity": "inf", "-Infinity": "-inf"}


@dataclass(frozen=True)
class Output:
    """Words if a person listens, JSON if not."""

    as_json: bool
    notes: list[str] = field(default_factory=list)
    """What the user should know, as it came."""

    def words(self, text: str = "", style: str = "") -> None:
        if not self.as_json:
            Console().print(Text(text), style=style, soft_wrap=True)

    def note(self, text: str) -> None:
        """On stderr in any case, and in the JSON."""
        self.notes.append(text)
        Console(stderr=True).print(Text(f"note: {text}"), style="yellow", soft_wrap=True)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
        """Columns in which every cell begins as a number does stand to the right, all others to the left."""
        if self.as_json:
            return
        table = Table(title=Text(title) if title else None, title_justify="left", box=None, pad_edge=False)
        for i, name in enumerate(head):
            numbers = i > 0 and all(row[i][:1] in "-0123456789" for row in rows)
            table.add_column(Text(name), justify="right" if numbers else "left", style=None, header_style="dim")
        for row in rows:
            table.add_row(*map(Text, row))
        Console().print(table)

    def result(self, **values: Any) -> None:
        """The JSON, which knows neither infinity nor NaN."""
        if self.as_json:
            text = json.dumps(values | {"notes": self.notes}, default=lambda v: getattr(v, "tolist", lambda: str(v))())
            typer.echo(json.dumps(json.loads(text, parse_constant=NO_NUMBERS.get), ensure_ascii=False))

    @contextmanager
    def heeding(self) -> Iterator[None]:
        """The library's warnings become notes, as they come."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", category=UserWarning)
            warnings.showwarning = lambda message, *_, **__: self.note(str(message))
            yield


def helpful(command: Callable[..., None]) -> Callable[..., None]:
    """A user's mistake ends a command with one message and exit code 1, an interrupt with 130; no traceback."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except (KeyboardInterrupt, LastLayerError, OSError, MemoryError, RuntimeError) as error:
            message = _message(error)
            if message is None:
                raise
            if options.get("as_json"):
                typer.echo(json.dumps({"error": message}, ensure_ascii=False))
            Console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
            raise typer.Exit(130 if isinstance(error, KeyboardInterrupt) else 1) from error

    return run


def _message(error: BaseException) -> str | None:
    """None for an error that is not the user's."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted: nothing was written by what was going on, older files are as they were"
    if isinstance(error, LastLayerError):
        return str(error)
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}: nothing was written, an older file is as it was"
    if isinstance(error, MemoryError) or "allocate memory" in str(error):  # torch has no error of its own for it
        return "there is not enough memory for that: take fewer rows or a smaller network"
    return None
