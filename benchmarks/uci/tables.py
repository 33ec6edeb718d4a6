"""Summary: mean and standard error over splits, ranks over data sets, as text, Markdown and CSV."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.ranking import rank
from benchmarks.uci.data import KINDS
from benchmarks.uci.protocol import RULES, Method
from benchmarks.uci.store import Result


@dataclass(frozen=True)
class Score:
    """A score of the results: its name, and how to read, format and compare it."""

    name: str
    of: Callable[[Result], float | None]
    digits: int
    better: str
    """"larger", "smaller", or "0.9": nearest to it."""

    def cost(self, value: float) -> float:
        """Convert to a cost, of which smaller values are better."""
        return {"larger": -value, "smaller": value}.get(self.better, abs(value - 0.9))


SCORES = {
    "lpd": Score("LPD", lambda r: r.scores.lpd, 2, "larger"),
    "crps": Score("CRPS", lambda r: r.scores.crps, 3, "smaller"),
    "rmse": Score("RMSE", lambda r: r.scores.rmse, 3, "smaller"),
    "coverage_90": Score("90% in", lambda r: r.scores.coverage_90, 2, "0.9"),
    "calibration_error": Score("calibration error", lambda r: r.scores.calibration_error, 3, "smaller"),
    "cpu_seconds": Score("fit s", lambda r: r.cpu_seconds, 1, "smaller"),
}
RANKED = ("lpd", "crps")


@dataclass(frozen=True)
class Cell:
    """One score of one method on one data set, over its splits."""

    mean: float
    error: float
    """Standard error of the mean; NaN for a single split."""
    n: int

    @classmethod
    def over(cls, values: Sequence[float]) -> "Cell":
        n = len(values)
        error = float(np.std(values, ddof=1) / math.sqrt(n)) if n > 1 else math.nan
        return cls(float(np.mean(values)), error, n)

    def text(self, digits: int) -> str:
        error = "" if math.isnan(self.error) else f" ± {self.error:.{digits}f}"
        return f"{self.mean:.{digits}f}{error}"


class Summary:
    """Cells by kind, data set, method and score, for the current configurations of the given methods."""

    def __init__(self, results: Iterable[Result], methods: Sequence[Method]) -> None:
        configs = {method.name: method.config for method in methods}
        kept = [r for r in results if configs.get(r.method) == r.config]
        present = {r.method for r in kept}
        self.methods = [method for method in methods if method.name in present]
        self.kinds = [kind for kind in KINDS if any(r.kind == kind for r in kept)]
        self.sets = list(dict.fromkeys(r.data for r in sorted(kept, key=lambda r: r.data)))
        self._cells: dict[tuple[str, str, str, str], Cell] = {}
        groups: dict[tuple[str, str, str], list[Result]] = {}
        for r in kept:
            groups.setdefault((r.kind, r.data, r.method), []).append(r)
        for (kind, data, method), group in groups.items():
            for name, score in SCORES.items():
                values = [value for r in group if (value := score.of(r)) is not None]
                if values:
                    self._cells[kind, data, method, name] = Cell.over(values)

    def cell(self, kind: str, data: str, method: str, score: str) -> Cell | None:
        return self._cells.get((kind, data, method, score))

    def row(self, kind: str, data: str, score: str) -> dict[str, Cell]:
        """Cells of all methods that have one."""
        cells = {m.name: self.cell(kind, data, m.name, score) for m in self.methods}
        return {name: cell for name, cell in cells.items() if cell is not None}

    def best(self, kind: str, data: str, score: str) -> str | None:
        """Name of the method with the best mean."""
        row = self.row(kind, data, score)
        return min(row, key=lambda name: SCORES[score].cost(row[name].mean)) if row else None

    def ranks(self, kind: str, score: str, *, family: str | None = None) -> dict[str, float]:
        """Rank methods by the mean, averaged over the data sets on which all of them have the score; 1 is best.

        Equal means share their ranks. Methods that never have the score, such as an LPD, are excluded.
        """
        names = [m.name for m in self.methods if family in (None, m.family)]
        rows = {data: self.row(kind, data, score) for data in self.sets}
        names = [name for name in names if any(name in row for row in rows.values())]
        complete = [row for row in rows.values() if all(name in row for name in names)]
        if not complete:
            return {}
        ranks = [rank([SCORES[score].cost(row[name].mean) for name in names]) for row in complete]
        return dict(zip(names, np.mean(ranks, axis=0).tolist(), strict=True))

    def complete_sets(self, kind: str, score: str) -> list[str]:
        """Data sets that count in the ranks among all methods."""
        names = {name for data in self.sets for name in self.row(kind, data, score)}
        return [data for data in self.sets if names and set(self.row(kind, data, score)) == names]


def score_table(summary: Summary, kind: str, score: str) -> list[list[str]]:
    """Make a table: one row per method, one column per data set, ranks at the end; the best mean has a star."""
    ranked = score in RANKED
    every = summary.ranks(kind, score) if ranked else {}
    neural = summary.ranks(kind, score, family="neural") if ranked else {}
    head = [SCORES[score].name, *summary.sets, *(["rank", "rank, neural"] if ranked else [])]
    table = [head]
    for method in summary.methods:
        line = [method.name]
        for data in summary.sets:
            cell = summary.cell(kind, data, method.name, score)
            star = " *" if summary.best(kind, data, score) == method.name and score != "cpu_seconds" else ""
            line.append("-" if cell is None else cell.text(SCORES[score].digits) + star)
        if ranked:
            line += [f"{ranks[method.name]:.1f}" if method.name in ranks else "-" for ranks in (every, neural)]
        table.append(line)
    return table


def splits_note(summary: Summary, kind: str) -> str:
    """Describe the number of splits for each data set."""
    counts = []
    for data in summary.sets:
        ns = sorted({cell.n for cell in summary.row(kind, data, "crps").values()})
        if ns:
            counts.append(f"{data} {ns[0]}" + (f" to {ns[-1]}" if len(ns) > 1 else ""))
    return f"mean ± standard error over splits: {', '.join(counts)}"


def as_markdown(summary: Summary) -> str:
    """Format all tables and the rules of the protocol."""
    lines = ["# The library beside its peers", "", *(f"- {rule}" for rule in RULES)]
    lines += ["- A star marks the best mean. Ranks are by the mean, over data sets that every method has finished."]
    for kind in summary.kinds:
        lines += [
            "",
            f"## {kind.capitalize()} splits: {KINDS[kind]}",
            "",
            f"{splits_note(summary, kind).capitalize()}.",
        ]
        for score in SCORES:
            head, *rows = score_table(summary, kind, score)
            lines += ["", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
            lines += ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", "## Tuning", ""]
    lines += [f"- {method.name} ({method.family}): {method.tuning}." for method in summary.methods]
    return "\n".join([*lines, ""])


def as_csv(results: Iterable[Result]) -> str:
    """Format one line per result."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["data", "kind", "split", "method", *SCORES, "config"])
    for r in sorted(results, key=lambda r: r.key):
        values = [score.of(r) for score in SCORES.values()]
        writer.writerow([r.data, r.kind, r.split, r.method, *("" if v is None else repr(v) for v in values), r.config])
    return out.getvalue()
