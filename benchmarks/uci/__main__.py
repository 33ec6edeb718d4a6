"""Tables of yours, standard splits: lastlayer beside ten peers, by one protocol (docs/uci.md).

Every fit is saved when it is done; a second run computes what is missing. At the end, and after an interruption,
`tables.md`, `scores.csv` and `uci.png` are made of all results in the folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import runner
from benchmarks.timing import timed
from benchmarks.uci import tables
from benchmarks.uci.data import KINDS, Table, load_folder
from benchmarks.uci.methods import METHODS, OURS, PEERS
from benchmarks.uci.protocol import Method, Result, Task, score
from lastlayer.errors import InputError, check_choice

GROUPS = {"all": (*OURS, *PEERS), "ours": OURS, "peers": PEERS}


@dataclass(frozen=True)
class Job(runner.Job):
    task: Task
    table: Table
    method: Method

    def __str__(self) -> str:
        return f"{self.method.name} on {self.task.data}, {self.task.kind} split {self.task.split}"

    @property
    def key(self) -> tuple[str, str, int, str, str]:
        return self.task.data, self.task.kind, self.task.split, self.method.name, self.method.config

    def run(self) -> Result:
        X, y, X_test, y_test = self.table.parts(self.task.kind, self.task.split)
        prediction, cpu, wall = timed(lambda: self.method.fit(X, y, self.task)(X_test))
        scores, versions = score(prediction, y_test), runner.versions(self.method.packages)
        return Result(*self.key, scores, round(cpu, 3), round(wall, 3), self.task.device, versions)


def jobs(
    found: Sequence[Table], methods: Sequence[Method], kinds: Sequence[str], splits: Sequence[int], device: str
) -> list[Job]:
    """Split by split, so that partial results are balanced over tables and methods."""
    each = [
        Job(Task(table.name, kind, split, table.hidden, device), table, method)
        for kind in kinds
        for table in found
        for split in table.splits(kind, splits)
        for method in methods
    ]
    return sorted(each, key=lambda job: job.task.split)


def main(arguments: list[str] | None = None) -> None:
    parser = runner.options_of(__doc__, out="results/uci", again=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of .npz or .csv tables (docs/uci.md)")
    parser.add_argument("--methods", default="all", help="comma-separated methods, or 'ours', 'peers', 'all'")
    parser.add_argument("--sets", help="comma-separated tables; default: all in the folder")
    parser.add_argument("--splits", default="0,1,2,3,4", help="given splits; outer splits are always 0,1")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated kinds of splits; default: all")
    parser.add_argument("--device", default="auto", help="'cpu', 'cuda', or 'auto'")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with runner.helpful():
        chosen = GROUPS.get(asked.methods.strip()) or runner.named("method", asked.methods, METHODS)
        methods = runner.installed(chosen, "; make bench-uci installs it")
        found = load_folder(asked.data, None if asked.sets is None else runner.split_list(asked.sets))
        splits = runner.whole_numbers("splits", asked.splits)
        kinds = [check_choice("kind", kind, KINDS) for kind in runner.split_list(asked.kinds)]
        for table in found if "given" in kinds else ():
            if gap := sorted(set(splits) - set(table.splits("given", splits))):
                print(f"{table.name} has no given split {', '.join(map(str, gap))}")
        device = _device(asked.device)
    store = runner.Store(asked.out / "results.jsonl", Result)

    def write(_: object) -> None:
        results = list(store.results.values())
        summary = tables.Summary(results, list(METHODS.values()))
        texts = {"tables.md": tables.as_markdown(summary), "scores.csv": tables.scores_csv(results)}
        runner.write_files(asked.out, texts, {"uci.png": tables.picture(summary)} if summary.methods else {})
        for kind in summary.kinds:
            for name in tables.RANKED:
                (title, *head), *rows = tables.score_table(summary, kind, name)
                print(runner.aligned([[f"{title}, {kind} splits", *head], *rows]))
            print(f"  {tables.splits_note(summary, kind)}")

    runner.complete(jobs(found, methods, kinds, splits, device), store, write, again=asked.again)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return str(torch.device(name))
    except RuntimeError:
        raise InputError(f"device={name!r} is not known: give 'auto', 'cpu' or 'cuda'") from None


if __name__ == "__main__":
    main()
