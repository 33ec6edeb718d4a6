"""A file of results that survives an interruption: lines of JSON, written at once; broken ones are skipped."""

import json
import platform
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

PACKAGES = ("lastlayer", "torch", "numpy", "scipy", "scikit-learn")


class Lines:
    """Iterates over the contents of its file, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, content: dict[str, Any]) -> None:
        line = json.dumps(content) + "\n"
        with self.path.open("a+b") as file:
            if file.tell() and not _ends_with_newline(file):
                line = "\n" + line  # the last run was cut off inside a line
            file.write(line.encode())
            file.flush()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                content = json.loads(line)
            except ValueError:
                continue  # cut off: its task is done again
            if isinstance(content, dict):
                yield content


@runtime_checkable
class Keyed(Protocol):
    """A result, a dataclass, that knows what it is the result of."""

    @property
    def key(self) -> Hashable: ...


Result = TypeVar("Result", bound=Keyed)


class Store(Generic[Result]):
    """The results of a file. A later line of the same key takes the place of an earlier one."""

    def __init__(self, path: Path, read: Callable[[dict[str, Any]], Result]) -> None:
        self.lines = Lines(path)
        self.results: dict[Hashable, Result] = {}
        for content in self.lines:
            try:
                result = read(content)
            except (TypeError, KeyError):
                continue  # of another version: its task is done again
            self.results[result.key] = result

    def __contains__(self, key: object) -> bool:
        return key in self.results

    def append(self, result: Result) -> None:
        """Write one line, at once."""
        self.lines.append(asdict(result))  # type: ignore[call-overload]
        self.results[result.key] = result


def versions(packages: Sequence[str] = ()) -> dict[str, str]:
    """Of Python, of what every run needs, and of these packages."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, 2)
    last: bytes = file.read(1)
    return last == b"\n"
