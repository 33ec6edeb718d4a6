"""Figure: regret against evaluations on every problem, median and quartiles, and the cost of a step."""

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.bo.problems import Problem
from benchmarks.bo.tables import Summary
from lastlayer.plots.drawing import BLUE, GREEN, GREY, ORANGE
from lastlayer.studies.figures import STYLE

COLOURS = {"lastlayer": BLUE, "SingleTaskGP": GREEN, "VBLL": ORANGE, "random": GREY}
FLOOR = 1e-6
"""Smallest regret drawn; smaller values are drawn here."""


def picture(summary: Summary) -> Figure:
    shown = [problem for problem in summary.problems if problem.ranked]
    with mpl.rc_context(STYLE):
        columns = 3
        lines = -(-(len(shown) + 1) // columns)
        figure = Figure(figsize=(2.6 * columns, 2.1 * lines), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False).flatten()
        for ax in axes[len(shown) + 1 :]:
            ax.set_visible(False)
        for ax, problem in zip(axes, shown, strict=False):
            _regret(ax, summary, problem)
        _seconds(axes[len(shown)], summary, shown)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def _regret(ax: Axes, summary: Summary, problem: Problem) -> None:
    for method in summary.methods:
        curves = summary.of(problem, method)
        if curves is None:
            continue
        low, middle, high = np.maximum(curves.quartiles()[:, problem.n_initial - 1 :], FLOOR)
        steps = problem.n_initial + np.arange(len(middle))
        ax.plot(steps, middle, color=COLOURS[method.name], label=method.name)
        ax.fill_between(steps, low, high, color=COLOURS[method.name], alpha=0.15, lw=0)
    ax.set_yscale("log")
    ax.set_title(problem.name)
    ax.set_xlabel("evaluations")
    ax.set_ylabel("missing hypervolume" if problem.reference else "simple regret")


def _seconds(ax: Axes, summary: Summary, shown: list[Problem]) -> None:
    for method in summary.methods:
        each = [summary.of(problem, method) for problem in shown]
        seconds = [np.nan if curves is None else max(curves.seconds_a_step, 1e-4) for curves in each]
        ax.plot(range(len(shown)), seconds, "o", color=COLOURS[method.name], ms=4)
    ax.set_yscale("log")
    ax.set_xticks(range(len(shown)), [problem.name for problem in shown], rotation=30, ha="right", fontsize=6.5)
    ax.set_title("seconds per step")
