"""Summary: mean and standard error over splits, ranks over data sets, as Markdown, CSV and a figure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.runner import Rows, as_csv, markdown, mean_and_error, rank, with_error
from benchmarks.uci.data import KINDS
from benchmarks.uci.protocol import RULES, Method, Result
from lastlayer.plots.drawing import BLUE, GREY, ORANGE
from lastlayer.studies.figures import STYLE


@dataclass(frozen=True)
class Score:
    name: str
    of: Callable[[Result], float | None]
    digits: int
    better: str  # "larger", "smaller", or "0.9": nearest to it

    def cost(self, value: float) -> float:
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

    values: Sequence[float]

    @property
    def mean(self) -> float:
        return mean_and_error(self.values)[0]

    @property
    def error(self) -> float:
        """Standard error of the mean; NaN for a single split."""
        return mean_and_error(self.values)[1]

    @property
    def n(self) -> int:
        return len(self.values)


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
                    self._cells[kind, data, method, name] = Cell(values)

    def cell(self, kind: str, data: str, method: str, score: str) -> Cell | None:
        return self._cells.get((kind, data, method, score))

    def row(self, kind: str, data: str, score: str) -> dict[str, Cell]:
        cells = {m.name: self.cell(kind, data, m.name, score) for m in self.methods}
        return {name: cell for name, cell in cells.items() if cell is not None}

    def best(self, kind: str, data: str, score: str) -> str | None:
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


def score_table(summary: Summary, kind: str, score: str) -> Rows:
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
            line.append("-" if cell is None else with_error(cell.values, SCORES[score].digits) + star)
        if ranked:
            line += [f"{ranks[method.name]:.1f}" if method.name in ranks else "-" for ranks in (every, neural)]
        table.append(line)
    return table


def splits_note(summary: Summary, kind: str) -> str:
    counts = []
    for data in summary.sets:
        ns = sorted({cell.n for cell in summary.row(kind, data, "crps").values()})
        if ns:
            counts.append(f"{data} {ns[0]}" + (f" to {ns[-1]}" if len(ns) > 1 else ""))
    return f"mean ± standard error over splits: {', '.join(counts)}"


def as_markdown(summary: Summary) -> str:
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
            lines += ["", markdown(score_table(summary, kind, score))]
    lines += ["", "## Tuning", ""]
    lines += [f"- {method.name} ({method.family}): {method.tuning}." for method in summary.methods]
    return "\n".join([*lines, ""])


def scores_csv(results: Iterable[Result]) -> str:
    rows: list[list[object]] = [["data", "kind", "split", "method", *SCORES, "config"]]
    for r in sorted(results, key=lambda r: (r.data, r.kind, r.split, r.method, r.config)):
        values = [score.of(r) for score in SCORES.values()]
        rows.append([r.data, r.kind, r.split, r.method, *("" if v is None else repr(v) for v in values), r.config])
    return as_csv(rows)


SHOWN = ("lpd", "crps")
SPAN = 3.0
"""Interquartile ranges shown beyond the quartiles; points farther out are drawn at the edge, with their value."""


def picture(summary: Summary) -> Figure:
    """Draw LPD and CRPS with standard errors; right is better for LPD, left for CRPS."""
    columns, lines = max(1, len(summary.sets)), max(1, len(summary.kinds) * len(SHOWN))
    with mpl.rc_context(STYLE):
        height = 0.6 + 0.16 * len(summary.methods)
        figure = Figure(figsize=(2.0 + 1.9 * columns, 0.4 + height * lines), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False)
        for row, (kind, score) in enumerate(product(summary.kinds, SHOWN)):
            for column, data in enumerate(summary.sets):
                _panel(axes[row, column], summary, kind, data, score, labels=column == 0)
        figure.supxlabel("LPD: right is better. CRPS: left is better. Bars: standard error over splits.", fontsize=7)
    return figure


def _panel(ax: Axes, summary: Summary, kind: str, data: str, score: str, *, labels: bool) -> None:
    row = summary.row(kind, data, score)
    ax.set_visible(bool(row))
    if not row:
        return
    values = np.array([cell.mean for cell in row.values()])
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    reach = SPAN * max(high - low, 1e-3 * abs(middle), 1e-12)
    start, end = max(values.min(), low - reach), min(values.max(), high + reach)
    margin = 0.12 * max(end - start, 1e-9)
    best = summary.best(kind, data, score)
    for i, method in enumerate(summary.methods):
        cell = row.get(method.name)
        if cell is None:
            continue
        colour = BLUE if method.name.startswith("lastlayer") else ORANGE if method.family == "neural" else GREY
        at = float(np.clip(cell.mean, start, end))
        error = 0.0 if np.isnan(cell.error) else cell.error
        filled = colour if method.name == best else "white"
        ax.errorbar(at, i, xerr=error, fmt="o", ms=4, color=colour, mfc=filled, elinewidth=1)
        if at != cell.mean:
            offset, align = (-5, "right") if at < cell.mean else (5, "left")
            words: dict[str, Any] = {"xytext": (offset, 0), "textcoords": "offset points", "va": "center", "ha": align}
            ax.annotate(f"{cell.mean:.{SCORES[score].digits}f}", (at, i), fontsize=5.5, color=colour, **words)
    ax.set_xlim(start - margin, end + margin)
    ax.set_ylim(len(summary.methods) - 0.5, -0.5)
    names = [method.name for method in summary.methods]
    ax.set_yticks(range(len(names)), names if labels else [""] * len(names))
    ax.tick_params(labelsize=6.5)
    ax.grid(axis="x", lw=0.4, color="0.9")
    ax.set_title(f"{data}, {kind}: {SCORES[score].name}")
