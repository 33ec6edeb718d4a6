"""Median and quartiles of the regret, ranks, and seconds per step, as Markdown, CSV and a figure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy import ndarray

from benchmarks.bo.methods import METHODS, Method, Result
from benchmarks.bo.problems import PROBLEMS, Problem
from benchmarks.runner import Rows, as_csv, markdown, rank
from lastlayer.plots.drawing import BLUE, GREEN, GREY, ORANGE
from lastlayer.studies.figures import STYLE

COLOURS = {"lastlayer": BLUE, "SingleTaskGP": GREEN, "VBLL": ORANGE, "random": GREY}
FLOOR = 1e-6  # smallest regret drawn; smaller values are drawn here


@dataclass(frozen=True)
class Curves:
    seeds: tuple[int, ...]
    regret: Float[ndarray, "s n"]
    seconds: Float[ndarray, "s t"]

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
        found: dict[tuple[str, str], list[Result]] = {}
        for result in sorted(results, key=lambda r: r.seed):
            found.setdefault((result.problem, result.method), []).append(result)
        self.curves: dict[tuple[str, str], Curves] = {}
        for (problem, method), every in found.items():
            longest = max(len(r.regret) for key, rs in found.items() if key[0] == problem for r in rs)
            if kept := [r for r in every if len(r.regret) == longest]:
                regret, seconds = (np.array([getattr(r, name) for r in kept]) for name in ("regret", "seconds"))
                self.curves[problem, method] = Curves(tuple(r.seed for r in kept), regret, seconds)
        problems, methods = ({key[i] for key in self.curves} for i in range(2))
        self.problems: list[Problem] = [problem for name, problem in PROBLEMS.items() if name in problems]
        self.methods: list[Method] = [method for name, method in METHODS.items() if name in methods]

    @property
    def ranked(self) -> list[Problem]:
        return [problem for problem in self.problems if not problem.timing]

    def of(self, problem: Problem, method: Method) -> Curves | None:
        return self.curves.get((problem.name, method.name))

    def ranks(self, problem: Problem) -> dict[str, float]:
        """Rank of the final regret among the methods, averaged over the seeds that all of them have; 1 is best."""
        finals = {m.name: c.final for m in self.methods if (c := self.of(problem, m)) is not None}
        seeds = set.intersection(*map(set, finals.values())) if finals else set()
        if not seeds:
            return {}
        each = [rank([final[seed] for final in finals.values()]) for seed in sorted(seeds)]
        return dict(zip(finals, np.mean(each, axis=0).tolist(), strict=True))

    def average_ranks(self) -> dict[str, float]:
        """Average the ranks over the ranked problems that every method has finished."""
        complete = [row for p in self.ranked if len(row := self.ranks(p)) == len(self.methods)]
        return {m.name: float(np.mean([row[m.name] for row in complete])) for m in self.methods} if complete else {}


def _table(
    title: str, summary: Summary, problems: list[Problem], cell: Callable[[Problem, Method], str | None]
) -> Rows:
    """A row for each method, a column for each problem."""
    rows = [[method.name, *(cell(problem, method) or "-" for problem in problems)] for method in summary.methods]
    return [[title, *(problem.name for problem in problems)], *rows]


def regret_table(summary: Summary) -> Rows:
    def cell(problem: Problem, method: Method) -> str | None:
        curves = summary.of(problem, method)
        return None if curves is None else "{1:.3g} ({0:.2g}, {2:.2g})".format(*curves.quartiles()[:, -1])

    average = summary.average_ranks()
    last = ["rank", *(f"{average[method.name]:.2f}" if average else "-" for method in summary.methods)]
    rows = _table("last regret", summary, summary.ranked, cell)
    return [[*row, end] for row, end in zip(rows, last, strict=True)]


def rank_table(summary: Summary) -> Rows:
    ranks = {problem.name: summary.ranks(problem) for problem in summary.ranked}

    def cell(problem: Problem, method: Method) -> str | None:
        own = ranks[problem.name].get(method.name)
        return None if own is None else f"{own:.2f}"

    return _table("rank", summary, summary.ranked, cell)


def seconds_table(summary: Summary) -> Rows:
    def cell(problem: Problem, method: Method) -> str | None:
        curves = summary.of(problem, method)
        return None if curves is None else f"{curves.seconds_a_step:.2f}"

    return _table("seconds per step", summary, summary.problems, cell)


TABLES = (regret_table, rank_table, seconds_table)


def as_markdown(summary: Summary) -> str:
    seeds = {len(c.seeds) for c in summary.curves.values()}
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
