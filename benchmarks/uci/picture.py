"""Figure of the benchmark: one panel per data set and kind of split, one line per method."""

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.uci.tables import SCORES, Summary
from lastlayer.plots.drawing import BLUE, GREY, ORANGE
from lastlayer.studies.figures import STYLE

SHOWN = ("lpd", "crps")
SPAN = 3.0
"""Interquartile ranges shown beyond the quartiles; points farther out are drawn at the edge, with their value."""


def picture(summary: Summary) -> Figure:
    """Draw LPD and CRPS with standard errors; right is better for LPD, left for CRPS."""
    panels = [
        (score, kind, data)
        for kind in summary.kinds
        for score in SHOWN
        for data in summary.sets
        if summary.row(kind, data, score)
    ]
    columns = max(1, len(summary.sets))
    lines = max(1, len(summary.kinds) * len(SHOWN))
    with mpl.rc_context(STYLE):
        height = 0.6 + 0.16 * len(summary.methods)
        figure = Figure(figsize=(2.0 + 1.9 * columns, 0.4 + height * lines), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False)
        for ax in axes.flat:
            ax.set_visible(False)
        for score, kind, data in panels:
            row = summary.kinds.index(kind) * len(SHOWN) + SHOWN.index(score)
            column = summary.sets.index(data)
            _panel(axes[row, column], summary, kind, data, score, labels=column == 0)
        figure.supxlabel("LPD: right is better. CRPS: left is better. Bars: standard error over splits.", fontsize=7)
    return figure


def _panel(ax: Axes, summary: Summary, kind: str, data: str, score: str, *, labels: bool) -> None:
    ax.set_visible(True)
    row = summary.row(kind, data, score)
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
            side = "left" if at < cell.mean else "right"
            ax.annotate(
                f"{cell.mean:.{SCORES[score].digits}f}",
                (at, i),
                xytext=(-5 if side == "left" else 5, 0),
                textcoords="offset points",
                fontsize=5.5,
                color=colour,
                va="center",
                ha="right" if side == "left" else "left",
            )
    ax.set_xlim(start - margin, end + margin)
    ax.set_ylim(len(summary.methods) - 0.5, -0.5)
    names = [method.name for method in summary.methods]
    ax.set_yticks(range(len(names)), names if labels else [""] * len(names))
    ax.tick_params(labelsize=6.5)
    ax.grid(axis="x", lw=0.4, color="0.9")
    ax.set_title(f"{data}, {kind}: {SCORES[score].name}")
