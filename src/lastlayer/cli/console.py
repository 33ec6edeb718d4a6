"""Output of the commands: text for people, or one JSON object for programs. Errors and notes go to stderr."""

import functools
import inspect
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

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text, for programs.")]
Force = Annotated[
    bool, typer.Option("--force", help="Overwrite a file even if lastlayer did not write it, or if it is an input.")
]
INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and SIGTERM, as in shells."""
LONGEST_MESSAGE, MOST_LINES = 3_000, 200
"""Limits for the characters of a message and the lines of a table: a name in a broken file may have megabytes."""
NO_NUMBERS = {"NaN": None, "Infinity": "inf", "-Infinity": "-inf"}


@dataclass(frozen=True)
class Output:
    """Prints text, or collects one JSON object."""

    as_json: bool
    notes: list[str] = field(default_factory=list)

    def words(self, text: str = "", style: str = "") -> None:
        """Print a line of text, unless the output is JSON."""
        if not self.as_json:
            Console().print(Text(shown(text)), style=style, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a note to stderr, and add it to the JSON."""
        self.notes.append(text)
        Console(stderr=True).print(Text(f"note: {shown(text)}"), style="yellow", soft_wrap=True)

    def table(self, lines: Sequence[Sequence[str]], title: str = "") -> None:
        """Print a table below its header, unless the output is JSON; columns of numbers are right-aligned."""
        if self.as_json:
            return
        head, *rows = lines
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
        """Print the JSON object; infinities become texts, and NaN becomes null."""
        if self.as_json:
            text = json.dumps(values | {"notes": self.notes}, default=lambda v: getattr(v, "tolist", lambda: str(v))())
            typer.echo(json.dumps(json.loads(text, parse_constant=NO_NUMBERS.get)))

    @contextmanager
    def heeding(self) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", category=UserWarning)
            warnings.showwarning = lambda message, *_, **__: self.note(str(message))
            yield


def helpful(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command exit with one message and code 1 on errors of the user, 130 on Ctrl-C, 143 on SIGTERM."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        with _sigterm_interrupts() as interrupted:
            try:
                command(*args, **options)
            except typer.Exit as end:  # an interrupted training is saved first
                raise typer.Exit(interrupted() if end.exit_code == INTERRUPTED else end.exit_code) from end
            except BrokenPipeError:
                raise  # the reader of the output has closed it: typer exits quietly
            except (KeyboardInterrupt, LastLayerError, OSError, MemoryError, RuntimeError, UnicodeError) as error:
                message = _message(error)
                if message is None:
                    raise
                message = shown(message)
                if options.get("as_json"):
                    typer.echo(json.dumps({"error": message}))
                Console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
                raise typer.Exit(interrupted() if isinstance(error, KeyboardInterrupt) else 1) from error

    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    run.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)  # typer keeps line breaks
    return run


def shown(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """A text that is safe to print: control characters escaped, and at most `longest` characters."""
    if len(text) > longest:
        text = f"{text[: longest // 2]} ... ({len(text):,} characters) ... {text[-longest // 4 :]}"
    if text.isprintable():
        return text
    escaped = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return "".join(escaped)


@contextmanager
def _sigterm_interrupts() -> Iterator[Callable[[], int]]:
    """Handle SIGTERM like Ctrl-C, so that files stay complete; yield a function that returns the exit code."""
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


def _message(error: BaseException) -> str | None:
    """Message for the user; None for an error that the user cannot fix."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted: nothing was written, and existing files are unchanged"
    if isinstance(error, LastLayerError):
        return str(error)
    if isinstance(error, UnicodeError):
        return (
            f"a name or text cannot be written as UTF-8 ({error}): nothing was written; remove such characters "
            "(halves of surrogate pairs) from the table"
        )
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}: nothing was written, and an existing file is unchanged"
    if isinstance(error, MemoryError) or "allocate memory" in str(error):  # torch raises a RuntimeError
        return "not enough memory: use fewer rows or a smaller network"
    return None
