"""Summary: mean and standard error over splits, ranks over data sets, as Markdown, CSV and a figure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.runner import Rows, as_csv, grouped, markdown, mean_and_error, mean_ranks, with_error
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
RANKED = ("lpd", "crps")  # with ranks, and in the picture


class Summary:
    """Scores by kind, data set and method, one for each split, of the current configurations of the given methods."""

    def __init__(self, results: Iterable[Result], methods: Sequence[Method]) -> None:
        configs = {method.name: method.config for method in methods}
        kept = [r for r in results if configs.get(r.method) == r.config]
        self._groups = grouped(kept, lambda r: (r.kind, r.data, r.method))
        kinds, sets, present = ({key[i] for key in self._groups} for i in range(3))
        self.methods = [method for method in methods if method.name in present]
        self.kinds = [kind for kind in KINDS if kind in kinds]
        self.sets: list[str] = sorted(sets)

    def row(self, kind: str, data: str, score: str) -> dict[str, list[float]]:
        """Values of each method that has them."""
        groups = {m.name: self._groups.get((kind, data, m.name), []) for m in self.methods}
        values = {name: [v for r in group if (v := SCORES[score].of(r)) is not None] for name, group in groups.items()}
        return {name: each for name, each in values.items() if each}

    def costs(self, kind: str, data: str, score: str) -> dict[str, float]:
        return {name: SCORES[score].cost(fmean(values)) for name, values in self.row(kind, data, score).items()}

    def best(self, kind: str, data: str, score: str) -> str | None:
        costs = self.costs(kind, data, score)
        return min(costs, key=lambda name: costs[name], default=None)

    def ranks(self, kind: str, score: str, *, family: str | None = None) -> dict[str, float]:
        """Rank methods by the mean, averaged over the data sets on which all of them have the score; 1 is best.

        Equal means share their ranks. Methods that never have the score, such as an LPD, are excluded.
        """
        own = {m.name for m in self.methods if family in (None, m.family)}
        rows = [self.costs(kind, data, score) for data in self.sets]
        names = own & {name for row in rows for name in row}
        return mean_ranks([{name: row[name] for name in row if name in names} for row in rows if names <= row.keys()])


def score_table(summary: Summary, kind: str, score: str) -> Rows:
    """Make a table: one row per method, one column per data set, ranks at the end; the best mean has a star."""
    columns = []
    for data in summary.sets:
        row, best = summary.row(kind, data, score), score != "cpu_seconds" and summary.best(kind, data, score)
        shown = {name: with_error(values, SCORES[score].digits) for name, values in row.items()}
        columns.append({name: text + " *" * (name == best) for name, text in shown.items()})
    families = {"rank": None, "rank, neural": "neural"} if score in RANKED else {}
    for family in families.values():
        ranks = summary.ranks(kind, score, family=family)
        columns.append({name: f"{rank:.1f}" for name, rank in ranks.items()})
    body = [[m.name, *(column.get(m.name, "-") for column in columns)] for m in summary.methods]
    return [[SCORES[score].name, *summary.sets, *families], *body]


def splits_note(summary: Summary, kind: str) -> str:
    numbers = {data: {len(values) for values in summary.row(kind, data, "crps").values()} for data in summary.sets}
    counts = [f"{data} {' to '.join(map(str, sorted({min(ns), max(ns)})))}" for data, ns in numbers.items() if ns]
    return f"mean ± standard error over splits: {', '.join(counts)}"


def as_markdown(summary: Summary) -> str:
    lines = ["# The library beside its peers", "", *(f"- {rule}" for rule in RULES)]
    lines += ["- A star marks the best mean. Ranks are by the mean, over data sets that every method has finished."]
    for kind in summary.kinds:
        lines += ["", f"## {kind.capitalize()} splits: {KINDS[kind]}", ""]
        lines += [f"{splits_note(summary, kind).capitalize()}."]
        lines += [part for score in SCORES for part in ("", markdown(score_table(summary, kind, score)))]
    lines += ["", "## Tuning", ""]
    lines += [f"- {method.name} ({method.family}): {method.tuning}." for method in summary.methods]
    return "\n".join([*lines, ""])


def scores_csv(results: Iterable[Result]) -> str:
    rows: list[list[object]] = [["data", "kind", "split", "method", *SCORES, "config"]]
    for r in sorted(results, key=lambda r: (r.data, r.kind, r.split, r.method, r.config)):
        values = [score.of(r) for score in SCORES.values()]
        rows.append([r.data, r.kind, r.split, r.method, *("" if v is None else repr(v) for v in values), r.config])
    return as_csv(rows)


SPAN = 3.0
"""Interquartile ranges shown beyond the quartiles; points farther out are drawn at the edge, with their value."""


def picture(summary: Summary) -> Figure:
    """Draw LPD and CRPS with standard errors; right is better for LPD, left for CRPS."""
    columns, lines = max(1, len(summary.sets)), max(1, len(summary.kinds) * len(RANKED))
    with mpl.rc_context(STYLE):
        height = 0.6 + 0.16 * len(summary.methods)
        figure = Figure(figsize=(2.0 + 1.9 * columns, 0.4 + height * lines), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False)
        for row, (kind, score) in enumerate(product(summary.kinds, RANKED)):
            for column, data in enumerate(summary.sets):
                _panel(axes[row, column], summary, kind, data, score, labels=column == 0)
        figure.supxlabel("LPD: right is better. CRPS: left is better. Bars: standard error over splits.", fontsize=7)
    return figure


def _panel(ax: Axes, summary: Summary, kind: str, data: str, score: str, *, labels: bool) -> None:
    row = {name: mean_and_error(values) for name, values in summary.row(kind, data, score).items()}
    ax.set_visible(bool(row))
    if not row:
        return
    values = np.array([mean for mean, _ in row.values()])
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    reach = SPAN * max(high - low, 1e-3 * abs(middle), 1e-12)
    start, end = max(values.min(), low - reach), min(values.max(), high + reach)
    margin = 0.12 * max(end - start, 1e-9)
    best = summary.best(kind, data, score)
    for i, method in enumerate(summary.methods):
        if method.name not in row:
            continue
        mean, error = row[method.name]
        colour = BLUE if method.name.startswith("lastlayer") else ORANGE if method.family == "neural" else GREY
        at = float(np.clip(mean, start, end))
        filled = colour if method.name == best else "white"
        ax.errorbar(at, i, xerr=np.nan_to_num(error), fmt="o", ms=4, color=colour, mfc=filled, elinewidth=1)
        if at != mean:
            offset, align = (-5, "right") if at < mean else (5, "left")
            words: dict[str, Any] = {"xytext": (offset, 0), "textcoords": "offset points", "va": "center", "ha": align}
            ax.annotate(f"{mean:.{SCORES[score].digits}f}", (at, i), fontsize=5.5, color=colour, **words)
    ax.set_xlim(start - margin, end + margin)
    ax.set_ylim(len(summary.methods) - 0.5, -0.5)
    names = [method.name for method in summary.methods]
    ax.set_yticks(range(len(names)), names if labels else [""] * len(names))
    ax.tick_params(labelsize=6.5)
    ax.grid(axis="x", lw=0.4, color="0.9")
    ax.set_title(f"{data}, {kind}: {SCORES[score].name}")
