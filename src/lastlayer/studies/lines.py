"""A file of results that survives an interruption: lines of JSON, written at once; broken ones are skipped."""

import json
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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
