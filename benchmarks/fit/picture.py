"""Figure: processor seconds of a fit against rows, one labelled line per method."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from benchmarks.fit.data import N_INPUTS
from benchmarks.fit.measure import Result
from lastlayer.plots.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, log_axis, log_padded
from lastlayer.studies.figures import STYLE

COLOURS = {"lastlayer": BLUE, "exact GP": GREEN, "deep ensemble": ORANGE, "NGBoost": PURPLE, "CatBoost": GREY}
APART = 0.055
"""Smallest distance between two labels, as a share of the height."""


def picture(results: Sequence[Result]) -> Figure:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        ax = figure.subplots()
        lines: dict[str, list[tuple[int, float]]] = {}
        for r in sorted(results, key=lambda r: r.rows):
            lines.setdefault(r.method, []).append((r.rows, r.cpu_seconds))
        for name, points in lines.items():
            ax.plot(*zip(*points, strict=True), "o-", ms=3.5, color=COLOURS[name])
        log_axis(ax, "x", *log_padded(np.array([r.rows for r in results], float)))
        log_axis(ax, "y", *log_padded(np.array([r.cpu_seconds for r in results], float)))
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        sizes = sorted({r.rows for r in results})
        ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
        ax.minorticks_off()
        ax.grid(lw=0.4, color="0.9")
        ax.set_xlabel(f"training rows, {N_INPUTS} columns")
        ax.set_title("processor seconds of a fit, tuning included", loc="left")
        _name(ax, {name: points[-1] for name, points in lines.items()})
    return figure


def _name(ax: Axes, ends: dict[str, tuple[int, float]]) -> None:
    """Put labels next to the last points, moved up where they would overlap."""
    to_axes = ax.transScale + ax.transLimits
    heights: dict[int, float] = {}
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        x, y = to_axes.transform(end)
        height = heights[end[0]] = max(y, heights.get(end[0], -np.inf) + APART)
        ax.annotate(
            name,
            (x, height),
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=COLOURS[name],
            fontsize=7.5,
            annotation_clip=False,
        )
