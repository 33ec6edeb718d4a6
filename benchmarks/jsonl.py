"""A file of results that survives interruptions: JSON lines, written immediately; broken lines are skipped."""

import json
import platform
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

PACKAGES = ("lastlayer", "torch", "numpy", "scipy", "scikit-learn")


class Lines:
    """JSON lines of a file, which need not exist yet; iterating yields their contents."""

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
                continue  # cut off: its task is repeated
            if isinstance(content, dict):
                yield content


@runtime_checkable
class Keyed(Protocol):
    """A result (a dataclass) with a key that identifies its task."""

    @property
    def key(self) -> Hashable: ...


Result = TypeVar("Result", bound=Keyed)


class Store(Generic[Result]):
    """Results of a file; a later line replaces an earlier one with the same key."""

    def __init__(self, path: Path, read: Callable[[dict[str, Any]], Result]) -> None:
        self.lines = Lines(path)
        self.results: dict[Hashable, Result] = {}
        for content in self.lines:
            try:
                result = read(content)
            except (TypeError, KeyError):
                continue  # of another version: its task is repeated
            self.results[result.key] = result

    def __contains__(self, key: object) -> bool:
        return key in self.results

    def append(self, result: Result) -> None:
        """Write one line immediately."""
        self.lines.append(asdict(result))  # type: ignore[call-overload]
        self.results[result.key] = result


def versions(packages: Sequence[str] = ()) -> dict[str, str]:
    """Versions of Python, of the packages that every run needs, and of the packages given."""
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
