"""Median and quartiles of the regret, ranks, and seconds per step, as Markdown, CSV and a figure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy import ndarray

from benchmarks.bo.methods import METHODS, Method, Result
from benchmarks.bo.problems import PROBLEMS, Problem
from benchmarks.runner import Rows, as_csv, grouped, markdown, mean_ranks
from lastlayer.plots.drawing import BLUE, GREEN, GREY, ORANGE
from lastlayer.studies.figures import STYLE

COLOURS = {"lastlayer": BLUE, "SingleTaskGP": GREEN, "VBLL": ORANGE, "random": GREY}
FLOOR = 1e-6  # smallest regret drawn; smaller values are drawn here


@dataclass(frozen=True)
class Curves:
    seeds: tuple[int, ...]
    regret: Float[ndarray, "s n"]
    seconds: Float[ndarray, "s t"]

    @classmethod
    def of(cls, runs: Sequence[Result]) -> "Curves":
        regret, seconds = (np.array([getattr(r, name) for r in runs]) for name in ("regret", "seconds"))
        return cls(tuple(r.seed for r in runs), regret, seconds)

    def quartiles(self) -> Float[ndarray, "3 n"]:
        return np.asarray(np.quantile(self.regret, [0.25, 0.5, 0.75], axis=0))

    @property
    def final(self) -> dict[int, float]:
        return dict(zip(self.seeds, self.regret[:, -1].tolist(), strict=True))

    @property
    def seconds_a_step(self) -> float:
        return float(np.median(self.seconds))


class Summary:
    """Curves by problem and method; if runs differ in length, only the longest are used."""

    def __init__(self, results: Iterable[Result]) -> None:
        by_problem = grouped(sorted(results, key=lambda r: r.seed), lambda r: r.problem)
        self.problems: list[Problem] = [problem for name, problem in PROBLEMS.items() if name in by_problem]
        self.curves: dict[str, dict[str, Curves]] = {}
        for problem in self.problems:
            longest = max(len(r.regret) for r in by_problem[problem.name])
            own = grouped([r for r in by_problem[problem.name] if len(r.regret) == longest], lambda r: r.method)
            self.curves[problem.name] = {name: Curves.of(own[name]) for name in METHODS if name in own}
        methods = {method for own in self.curves.values() for method in own}
        self.methods: list[Method] = [method for name, method in METHODS.items() if name in methods]

    @property
    def ranked(self) -> list[Problem]:
        return [problem for problem in self.problems if not problem.timing]

    def ranks(self, problem: Problem) -> dict[str, float]:
        """Rank of the final regret among the methods, averaged over the seeds that all of them have; 1 is best."""
        finals = {name: curves.final for name, curves in self.curves[problem.name].items()}
        seeds = sorted(set.intersection(*map(set, finals.values())))
        return mean_ranks([{name: final[seed] for name, final in finals.items()} for seed in seeds])

    def average_ranks(self) -> dict[str, float]:
        """Average the ranks over the ranked problems that every method has finished."""
        complete = [row for p in self.ranked if len(row := self.ranks(p)) == len(self.methods)]
        return {m.name: float(np.mean([row[m.name] for row in complete])) for m in self.methods} if complete else {}

    def table(self, title: str, columns: Mapping[str, Mapping[str, Any]], cell: Callable[[Any], str]) -> Rows:
        """A row for each method; "-" where a column has nothing of it."""
        texts = [{name: cell(value) for name, value in column.items()} for column in columns.values()]
        return [[title, *columns], *([m.name, *(column.get(m.name, "-") for column in texts)] for m in self.methods)]


def regret_table(summary: Summary) -> Rows:
    last = {problem.name: summary.curves[problem.name] for problem in summary.ranked}
    rows = summary.table("last regret", last, lambda c: "{1:.3g} ({0:.2g}, {2:.2g})".format(*c.quartiles()[:, -1]))
    ranks = summary.table("", {"rank": summary.average_ranks()}, "{:.2f}".format)
    return [[*row, rank] for row, (_, rank) in zip(rows, ranks, strict=True)]


def rank_table(summary: Summary) -> Rows:
    return summary.table("rank", {p.name: summary.ranks(p) for p in summary.ranked}, "{:.2f}".format)


def seconds_table(summary: Summary) -> Rows:
    return summary.table("seconds per step", summary.curves, lambda c: f"{c.seconds_a_step:.2f}")


TABLES = (regret_table, rank_table, seconds_table)


def as_markdown(summary: Summary) -> str:
    seeds = {len(c.seeds) for own in summary.curves.values() for c in own.values()}
    count = f"{min(seeds)} to {max(seeds)}" if len(seeds) > 1 else str(max(seeds, default=0))
    ranks = "Ranks are of the final regret, per seed, averaged over seeds and then over problems; 1 is best."
    lines = ["# Bayesian optimisation", "", f"Median (quartiles) over {count} seeds. {ranks}"]
    lines += [part for table in TABLES for part in ("", markdown(table(summary)))]
    lines += ["", "## Problems", ""]
    lines += [f"- {p.name}: {p.note}; {p.n_initial} Sobol points, then {p.n_steps} steps." for p in summary.problems]
    lines += ["", "## Methods", "", *(f"- {m.name}: {m.note}." for m in summary.methods)]
    return "\n".join([*lines, ""])


def scores_csv(results: Iterable[Result]) -> str:
    rows: list[list[object]] = [["problem", "method", "seed", "last regret", "median seconds per step", "config"]]
    for r in sorted(results, key=lambda r: (r.problem, r.method, r.seed, r.config)):
        seconds = float(np.median(r.seconds)) if r.seconds else 0.0
        rows.append([r.problem, r.method, r.seed, repr(r.regret[-1]), repr(seconds), r.config])
    return as_csv(rows)


def picture(summary: Summary) -> Figure:
    shown = summary.ranked
    with mpl.rc_context(STYLE):
        columns = 3
        lines = -(-(len(shown) + 1) // columns)
        figure = Figure(figsize=(2.6 * columns, 2.1 * lines), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False).flatten()
        for ax in axes[len(shown) + 1 :]:
            ax.remove()
        for ax, problem in zip(axes, shown, strict=False):
            _regret(ax, summary, problem)
        _seconds(axes[len(shown)], summary, shown)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def _regret(ax: Axes, summary: Summary, problem: Problem) -> None:
    for name, curves in summary.curves[problem.name].items():
        low, middle, high = np.maximum(curves.quartiles()[:, problem.n_initial - 1 :], FLOOR)
        steps = problem.n_initial + np.arange(len(middle))
        ax.plot(steps, middle, color=COLOURS[name], label=name)
        ax.fill_between(steps, low, high, color=COLOURS[name], alpha=0.15, lw=0)
    ylabel = "missing hypervolume" if problem.reference else "simple regret"
    ax.set(yscale="log", title=problem.name, xlabel="evaluations", ylabel=ylabel)


def _seconds(ax: Axes, summary: Summary, shown: list[Problem]) -> None:
    for i, problem in enumerate(shown):
        for name, curves in summary.curves[problem.name].items():
            ax.plot(i, max(curves.seconds_a_step, 1e-4), "o", color=COLOURS[name], ms=4)
    ax.set(yscale="log", title="seconds per step")
    ax.set_xticks(range(len(shown)), [problem.name for problem in shown], rotation=30, ha="right", fontsize=6.5)
