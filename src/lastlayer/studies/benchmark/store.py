"""Results as lines of JSON, one for each data set, split and method; a broken run is taken up where it stopped."""

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lastlayer.studies.benchmark.protocol import Method, Scores, Task

Key = tuple[str, str, int, str, str]
PACKAGES = ("lastlayer", "torch", "numpy", "scipy", "scikit-learn")


@dataclass(frozen=True)
class Result:
    """One line."""

    data: str
    kind: str
    split: int
    method: str
    config: str
    scores: Scores
    cpu_seconds: float
    """Of the processor, tuning included: other work on the machine does not lengthen them."""
    seconds: float
    device: str
    versions: dict[str, str]

    @property
    def key(self) -> Key:
        return self.data, self.kind, self.split, self.method, self.config


def key_of(task: Task, method: Method) -> Key:
    return task.data, task.kind, task.split, method.name, method.config


class Store:
    """The file results.jsonl of a folder. A later line of the same key takes the place of an earlier one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.jsonl"
        self.results = {result.key: result for result in self._read()}

    def __contains__(self, key: object) -> bool:
        return key in self.results

    def append(self, result: Result) -> None:
        """Write one line, at once."""
        line = json.dumps({**asdict(result), "scores": asdict(result.scores)}) + "\n"
        with self.path.open("a+b") as file:
            if file.tell() and not _ends_with_newline(file):
                line = "\n" + line  # the last run was cut off inside a line
            file.write(line.encode())
            file.flush()
        self.results[result.key] = result

    def _read(self) -> Iterator[Result]:
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                content = json.loads(line)
                yield Result(**{**content, "scores": Scores(**content["scores"])})
            except (ValueError, TypeError, KeyError):
                continue  # cut off: its task is done again


def versions_of(method: Method) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in (*PACKAGES, *method.packages):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, 2)
    last: bytes = file.read(1)
    return last == b"\n"
