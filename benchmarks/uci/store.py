"""Results as JSON lines, one per data set, split and method, so that an interrupted run can be continued."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.jsonl import Store, versions
from benchmarks.uci.protocol import Method, Scores, Task

Key = tuple[str, str, int, str, str]


@dataclass(frozen=True)
class Result:
    """Result of one fit: one line of the file."""

    data: str
    kind: str
    split: int
    method: str
    config: str
    scores: Scores
    cpu_seconds: float
    """Processor seconds, tuning included."""
    seconds: float
    device: str
    versions: dict[str, str]

    @property
    def key(self) -> Key:
        return self.data, self.kind, self.split, self.method, self.config


def key_of(task: Task, method: Method) -> Key:
    return task.data, task.kind, task.split, method.name, method.config


def open_store(folder: Path) -> Store[Result]:
    return Store(folder / "results.jsonl", lambda content: Result(**{**content, "scores": Scores(**content["scores"])}))


def versions_of(method: Method) -> dict[str, str]:
    return versions(method.packages)
