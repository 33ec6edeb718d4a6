"""What commands say: words for people, or one JSON object for machines. Errors and notes go to stderr."""

import functools
import json
import signal
import threading
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
Force = Annotated[bool, typer.Option("--force", help="Replace a file that lastlayer did not write, or an input.")]
INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and SIGTERM, as shells have them."""
LONGEST_MESSAGE, MOST_LINES = 3_000, 200
"""Characters of a message and lines of a table that are shown: a name in a broken file may have megabytes."""
NO_NUMBERS = {"NaN": None, "Infinity": "inf", "-Infinity": "-inf"}


@dataclass(frozen=True)
class Output:
    """Words if a person listens, JSON if not."""

    as_json: bool
    notes: list[str] = field(default_factory=list)
    """What the user should know, as it came."""

    def words(self, text: str = "", style: str = "") -> None:
        if not self.as_json:
            Console().print(Text(shown(text)), style=style, soft_wrap=True)

    def note(self, text: str) -> None:
        """On stderr in any case, and in the JSON."""
        self.notes.append(text)
        Console(stderr=True).print(Text(f"note: {shown(text)}"), style="yellow", soft_wrap=True)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
        """Columns in which every cell begins as a number does stand to the right, all others to the left."""
        if self.as_json:
            return
        table = Table(title=Text(shown(title)) if title else None, title_justify="left", box=None, pad_edge=False)
        for i, name in enumerate(head):
            numbers = i > 0 and all(row[i][:1] in "-0123456789" for row in rows)
            table.add_column(Text(shown(name)), justify="right" if numbers else "left", style=None, header_style="dim")
        for row in rows[:MOST_LINES]:
            table.add_row(*(Text(shown(cell, 200)) for cell in row))
        Console().print(table)
        if len(rows) > MOST_LINES:
            self.words(f"... and {len(rows) - MOST_LINES:,} more")

    def result(self, **values: Any) -> None:
        """The JSON, which knows neither infinity nor NaN."""
        if self.as_json:
            text = json.dumps(values | {"notes": self.notes}, default=lambda v: getattr(v, "tolist", lambda: str(v))())
            _echo_json(json.loads(text, parse_constant=NO_NUMBERS.get))

    @contextmanager
    def heeding(self) -> Iterator[None]:
        """The library's warnings become notes, as they come."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", category=UserWarning)
            warnings.showwarning = lambda message, *_, **__: self.note(str(message))
            yield


def helpful(command: Callable[..., None]) -> Callable[..., None]:
    """A user's mistake ends a command with one message and exit code 1, an interrupt with 130, SIGTERM with 143."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        with _sigterm_interrupts() as interrupted:
            try:
                command(*args, **options)
            except typer.Exit as end:  # an interrupted training is saved first
                raise typer.Exit(interrupted() if end.exit_code == INTERRUPTED else end.exit_code) from end
            except BrokenPipeError:
                raise  # whoever read the output has seen enough: typer ends quietly
            except (KeyboardInterrupt, LastLayerError, OSError, MemoryError, RuntimeError, UnicodeError) as error:
                message = _message(error)
                if message is None:
                    raise
                message = shown(message)
                if options.get("as_json"):
                    _echo_json({"error": message})
                Console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
                raise typer.Exit(interrupted() if isinstance(error, KeyboardInterrupt) else 1) from error

    return run


def shown(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """A text as a terminal may show it: neither control characters nor what UTF-8 cannot hold, and not without end."""
    if len(text) > longest:
        text = f"{text[: longest // 2]} ... ({len(text):,} characters) ... {text[-longest // 4 :]}"
    if text.isprintable():
        return text
    escaped = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return "".join(escaped)


@contextmanager
def _sigterm_interrupts() -> Iterator[Callable[[], int]]:
    """SIGTERM takes the way of Ctrl-C, so that files are left whole; the exit code of an interrupted command."""
    came = []

    def interrupt(*_: object) -> None:
        came.append(True)
        raise KeyboardInterrupt

    code = lambda: TERMINATED if came else INTERRUPTED
    if threading.current_thread() is not threading.main_thread():
        yield code
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield code
    finally:
        signal.signal(signal.SIGTERM, before)


def _echo_json(content: Any) -> None:
    """Text as it is, or escaped where UTF-8 cannot hold it."""
    text = json.dumps(content, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(content)
    typer.echo(text)


def _message(error: BaseException) -> str | None:
    """None for an error that is not the user's."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted: nothing was written by what was going on, older files are as they were"
    if isinstance(error, LastLayerError):
        return str(error)
    if isinstance(error, UnicodeError):
        return (
            f"a name or a text cannot be written as UTF-8 ({error}): nothing was written; take such characters, "
            "halves of surrogate pairs, out of the table"
        )
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}: nothing was written, an older file is as it was"
    if isinstance(error, MemoryError) or "allocate memory" in str(error):  # torch has no error of its own for it
        return "there is not enough memory for that: take fewer rows or a smaller network"
    return None
