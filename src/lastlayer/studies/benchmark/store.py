"""Results as lines of JSON, one for each data set, split and method; a broken run is taken up where it stopped."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lastlayer.studies.benchmark.protocol import Method, Scores, Task
from lastlayer.studies.lines import Lines, versions

Key = tuple[str, str, int, str, str]


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
        self.lines = Lines(folder / "results.jsonl")
        self.results = {result.key: result for result in self._read()}

    def __contains__(self, key: object) -> bool:
        return key in self.results

    def append(self, result: Result) -> None:
        """Write one line, at once."""
        self.lines.append({**asdict(result), "scores": asdict(result.scores)})
        self.results[result.key] = result

    def _read(self) -> Iterator[Result]:
        for content in self.lines:
            try:
                yield Result(**{**content, "scores": Scores(**content["scores"])})
            except (TypeError, KeyError):
                continue  # of another version: its task is done again


def versions_of(method: Method) -> dict[str, str]:
    return versions(method.packages)
