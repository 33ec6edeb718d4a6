"""What commands say: words for people, or one JSON object for machines. Errors and notes go to stderr."""

import functools
import json
import math
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


@dataclass(frozen=True)
class Say:
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

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "") -> None:
        """Numbers to the right, words to the left."""
        if self.as_json:
            return
        table = Table(title=Text(title) if title else None, title_justify="left", box=None, pad_edge=False)
        numeric = [all(isinstance(row[i], float | int) for row in rows) for i in range(len(head))]
        for name, right in zip(head, numeric, strict=True):
            table.add_column(Text(name), justify="right" if right else "left", style=None, header_style="dim")
        for row in rows:
            table.add_row(*(Text(cell if isinstance(cell, str) else f"{cell:.4g}") for cell in row))
        Console().print(table)

    def result(self, **values: Any) -> None:
        if self.as_json:
            typer.echo(json.dumps(_plain(values | {"notes": self.notes}), ensure_ascii=False, allow_nan=False))

    @contextmanager
    def heeding(self) -> Iterator[None]:
        """The library's warnings become notes, as they come."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", category=UserWarning)
            warnings.showwarning = lambda message, *_, **__: self.note(str(message))
            yield


def _plain(value: Any) -> Any:
    """JSON knows neither infinity nor NaN."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else f"{value}"
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def helpful(command: Callable[..., None]) -> Callable[..., None]:
    """A user's mistake ends a command with one message and exit code 1, an interrupt with 130; no traceback."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except KeyboardInterrupt as error:
            fail("interrupted: nothing was written by what was going on, older files are as they were", options)
            raise typer.Exit(130) from error
        except (LastLayerError, OSError, MemoryError) as error:
            fail(_message(error), options)
            raise typer.Exit(1) from error
        except RuntimeError as error:
            if "allocate memory" not in str(error):  # torch has no name of its own for a full memory
                raise
            fail(_message(MemoryError()), options)
            raise typer.Exit(1) from error

    return run


def fail(message: str, options: dict[str, Any]) -> None:
    if options.get("as_json"):
        typer.echo(json.dumps({"error": message}, ensure_ascii=False))
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def _message(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "there is not enough memory for that: take fewer rows or a smaller network"
    if isinstance(error, OSError) and not isinstance(error, LastLayerError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}: nothing was written, an older file is as it was"
    return str(error)
