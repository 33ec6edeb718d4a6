"""Cost and scores of a default fit against the number of rows, beside four peers: hours (docs/benchmarks.md).

Methods are configured as in `benchmarks.uci`. Each measurement runs in a process of its own, after a small warm-up fit;
a second run computes what is missing. The function is Friedman's first, with a step along the sixth of ten columns.
"""

import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from numpy import ndarray

from benchmarks import runner
from benchmarks.timing import time_in_turns, timed
from benchmarks.uci.gaussian_processes import EXACT_ROWS
from benchmarks.uci.methods import METHODS as UCI
from benchmarks.uci.protocol import Method, Scores, Task, score
from lastlayer.plots.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, log_axis, log_padded
from lastlayer.studies.figures import STYLE

N_INPUTS = 10
NOISE = 1.0  # standard deviation, the same everywhere
ORACLE_LPD = -0.5 * math.log(2 * math.pi * math.e * NOISE**2)
ORACLE_CRPS = NOISE / math.sqrt(math.pi)  # expected scores of the true function with its noise
OWN, EXACT = "lastlayer", "exact GP"
MATRICES = 17  # number of m x m matrices that fit and prediction of the exact process hold at their peak, as measured
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        replace(UCI["lastlayer, own network"], name=OWN, tuning="BLLRegressor(), untuned"),
        replace(UCI["Gaussian process"], name=EXACT),
        *(UCI[name] for name in ("deep ensemble", "NGBoost", "CatBoost")),
    )
}
COLOURS = dict(zip(METHODS, (BLUE, GREEN, ORANGE, PURPLE, GREY), strict=True))
TEST_ROWS, WARM_UP_ROWS = 2_000, 60
TRAINING, TESTING, WARM_UP = range(3)  # seeds
CALLS = 30  # number of single-row predictions; the median is reported
APART = 0.055  # smallest distance between two labels of the figure, as a share of its height


def function(X: Float[ndarray, "m 10"]) -> Float[ndarray, " m"]:
    interaction = 10 * np.sin(np.pi * X[:, 0] * X[:, 1])
    smooth: ndarray = interaction + 20 * (X[:, 2] - 0.5) ** 2 + 10 * X[:, 3] + 5 * X[:, 4]
    return smooth + 5.0 * (X[:, 5] > 0.6)


def make_rows(m: int, seed: int) -> tuple[Float[ndarray, "m 10"], Float[ndarray, " m"]]:
    """Draw uniform inputs and noisy targets; for the same seed, smaller tables are prefixes of larger ones."""
    inputs, noise = (np.random.default_rng([seed, part]) for part in range(2))
    X = inputs.random((m, N_INPUTS))
    return X, function(X) + NOISE * noise.standard_normal(m)


@dataclass(frozen=True)
class Result:
    method: str
    config: str
    rows: int
    threads: int
    machine: str
    load: float  # load of the machine at the start
    cpu_seconds: float  # processor seconds of the fit, all threads
    seconds: float  # wall seconds of the fit
    row_us: float  # processor microseconds per row for a prediction of all test rows
    single_us: float  # processor microseconds for a prediction of one row
    scores: Scores
    versions: dict[str, str]


@dataclass(frozen=True)
class Job(runner.Job):
    name: str
    rows: int
    threads: int

    def __str__(self) -> str:
        return f"{self.rows:,} rows, {self.name}"

    @property
    def method(self) -> Method:
        return METHODS[self.name]

    @property
    def key(self) -> tuple[str, str, int, int, str]:
        return self.name, self.method.config, self.rows, self.threads, f"{platform.machine()}, {os.cpu_count()} cores"

    def run(self) -> Result:
        load = os.getloadavg()[0]
        torch.set_num_threads(self.threads)
        fit, task = self.method.fit, Task("fit", "given", 0)
        X_test, y_test = make_rows(TEST_ROWS, TESTING)
        fit(*make_rows(WARM_UP_ROWS, WARM_UP), task)(X_test)
        X, y = make_rows(self.rows, TRAINING)
        predict, cpu, wall = timed(lambda: fit(X, y, task))
        scores = score(predict(X_test), y_test)
        (many,) = time_in_turns(lambda: predict(X_test), clock=time.process_time)
        (single,) = time_in_turns(lambda: predict(X_test[:1]), repeats=CALLS, clock=time.process_time)
        costs = round(cpu, 3), round(wall, 3), round(1e6 * many.median / TEST_ROWS, 3), round(1e6 * single.median, 1)
        return Result(*self.key, round(load, 2), *costs, scores, runner.versions(self.method.packages))


def unable(job: Job, taken: Sequence[Result], limit: float) -> str | None:
    if missing := job.method.missing():
        return f"needs {', '.join(missing)}; make bench-fit installs it"
    need, free = MATRICES * 8 * job.rows**2 / 1e9, free_memory()
    if job.name == EXACT and (job.rows > EXACT_ROWS or need > free):
        return f"needs about {need:,.0f} GB of memory, {free:,.0f} GB are free"
    over = [r for r in taken if r.method == job.name and r.rows < job.rows and r.seconds > limit]
    if over:
        return f"{over[-1].seconds:,.0f} s for {over[-1].rows:,} rows, above the limit of {limit:,.0f} s"
    return None


def free_memory() -> float:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 / 1e9


def table(outcomes: Sequence[runner.Outcome]) -> str:
    results = [o.result for o in outcomes if o.result is not None]
    own = {r.rows: r.cpu_seconds for r in results if r.method == OWN}
    head = f"{'rows':>8}  {'':<13} {'cpu s':>9} {'wall s':>9} {'cpu ratio':>9} {'LPD':>7} {'CRPS':>7} "
    lines = [_heading(results), "", f"{head}{'us/row':>9} {'us, one':>9}"]
    for before, outcome in zip([None, *outcomes], outcomes, strict=False):
        task = outcome.task
        size = f"{task.rows:,}" if before is None or before.task.rows != task.rows else ""
        cells = _cells(outcome.result, own.get(task.rows)) if outcome.result else f"not measured: {outcome.why_not}"
        lines.append(f"{size:>8}  {task.name:<13} {cells}")
    rows = f"{TEST_ROWS:,} fresh rows; the true function with its noise has {ORACLE_LPD:.3f} and {ORACLE_CRPS:.3f}"
    costs = f"processor microseconds per row for a prediction of {TEST_ROWS:,} rows"
    notes = f"cpu s, wall s: of the fit, tuning included; cpu ratio: to {OWN} at the same size"
    notes += f"\nLPD (larger is better), CRPS (smaller is better): {rows}"
    return "\n".join([*lines, "", notes, f"us/row: {costs}; us, one: for a prediction of one row"])


def _heading(results: Sequence[Result]) -> str:
    if not results:
        return "nothing measured"
    machines = "; ".join(dict.fromkeys(f"{r.machine}, torch {r.versions['torch']}" for r in results))
    threads = ", ".join(str(n) for n in sorted({r.threads for r in results}))
    loads = sorted(r.load for r in results)
    began = f"load {loads[0]:.1f} to {loads[-1]:.1f} as each began"
    return f"{machines}; {threads} thread(s), {began}; rows by {N_INPUTS} columns"


def _cells(r: Result, own: float | None) -> str:
    ratio = "-" if not own else f"{r.cpu_seconds / own:.2f}"
    lpd = "-" if r.scores.lpd is None else f"{r.scores.lpd:.3f}"
    scores = f"{lpd:>7} {r.scores.crps:7.3f} {r.row_us:9,.1f} {r.single_us:9,.0f}"
    return f"{r.cpu_seconds:9,.1f} {r.seconds:9,.1f} {ratio:>9} {scores}"


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
        _label(ax, {name: points[-1] for name, points in lines.items()})
    return figure


def _label(ax: Axes, ends: dict[str, tuple[int, float]]) -> None:
    """Put labels next to the last points, moved up where they would overlap."""
    to_axes = ax.transScale + ax.transLimits
    heights: dict[int, float] = {}
    style: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 7.5}
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        x, y = to_axes.transform(end)
        height = heights[end[0]] = max(y, heights.get(end[0], -np.inf) + APART)
        ax.annotate(name, (x, height), xycoords="axes fraction", color=COLOURS[name], annotation_clip=False, **style)


def main(arguments: list[str] | None = None) -> None:
    parser = runner.options_of(__doc__, out="results", again=True)
    parser.add_argument("--rows", default="300,1000,3000,10000,100000", help="comma-separated numbers of rows")
    parser.add_argument("--methods", help="comma-separated methods; default: all")
    parser.add_argument("--threads", type=int, default=2, help="threads of each method")
    limit = "seconds; a method whose fit takes longer is not run with more rows"
    parser.add_argument("--limit", type=float, default=1800, help=limit)
    asked = parser.parse_args(arguments)
    with runner.helpful():
        chosen = runner.named("method", asked.methods, METHODS)
        sizes = runner.whole_numbers("rows", asked.rows, least=WARM_UP_ROWS, example="300,1000")
    os.environ |= {f"{kind}_NUM_THREADS": str(asked.threads) for kind in ("OMP", "MKL", "OPENBLAS")}
    # size by size, the smallest first, so that methods are compared under similar load
    jobs = [Job(method.name, size, asked.threads) for size in sizes for method in chosen]
    store = runner.Store(asked.out / "fit.jsonl", Result)

    def write(outcomes: Sequence[runner.Outcome]) -> None:
        text, results = table(outcomes), [outcome.result for outcome in outcomes if outcome.result is not None]
        print(f"\n{text}\n")
        runner.write_files(asked.out, {"fit.txt": text + "\n"}, {"fit.png": picture(results)} if results else {})

    taken = lambda: [store.results[job.key] for job in jobs if job.key in store.results]
    why_not = lambda job: unable(job, taken(), asked.limit)
    runner.summarised(jobs, store, write, again=asked.again, isolated=True, unable=why_not)


if __name__ == "__main__":
    main()
