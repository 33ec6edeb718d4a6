"""A default fit beside boosted trees and other peers: processor and wall seconds, memory, scores (docs/benchmarks.md).

Each measurement runs in a process of its own after a small warm-up fit; a second run computes what is missing. The made
table is Friedman's first function with a step along the sixth of ten columns. In place of the comparison,

    python -m benchmarks.fit --growth     measures a default fit alone, from 30 to 1,000,000 rows
    python -m benchmarks.fit --ceiling    compares its cost, in units of matrix products, with the recorded one
"""

import datetime
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray

from benchmarks import runner
from benchmarks.timing import describe_machine, memory, stopped_after, time_in_turns, timed
from benchmarks.uci import boosting, gaussian_boosting
from benchmarks.uci.data import load_folder
from benchmarks.uci.gaussian_processes import EXACT_ROWS
from benchmarks.uci.methods import METHODS as UCI
from benchmarks.uci.protocol import Method, Scores, Task, score
from lastlayer import BLLRegressor
from lastlayer.plots.drawing import new_figure

N_INPUTS = 10
NOISE = 1.0  # standard deviation, the same everywhere
ORACLE_LPD = -0.5 * math.log(2 * math.pi * math.e * NOISE**2)
ORACLE_CRPS = NOISE / math.sqrt(math.pi)  # expected scores of the true function with its noise
MADE, OWN, TREES, CHIMERA, EXACT = "made", "lastlayer", "CatBoost", "chimeraboost", "exact GP"
MATRICES = 17  # number of m x m matrices that fit and prediction of the exact process hold at their peak, as measured


def own(name: str, **parameters: Any) -> Method:
    fit = lambda X, y, task: BLLRegressor(**parameters, random_state=task.seed).fit(X, y).predictive
    return Method(name, "other", "untuned", fit, str(BLLRegressor(**parameters).get_params(deep=False)))


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        own(OWN),
        replace(UCI["CatBoost"], name=TREES, tuning="as it comes: 1,000 trees", fit=gaussian_boosting.untuned_catboost),
        replace(UCI["CatBoost"], name="CatBoost stopped", tuning="by 10%", fit=gaussian_boosting.stopped_catboost),
        Method(CHIMERA, "other", "as it comes", boosting.chimeraboost, packages=(CHIMERA,), modules=(CHIMERA,)),
        replace(UCI["CatBoost"], name="CatBoost tuned"),
        replace(UCI["Gaussian process"], name=EXACT),
        *(UCI[name] for name in ("deep ensemble", "NGBoost")),
        own("one member", n_members=1),
        own("preset fast", preset="fast"),
    )
}
COMPARED = "lastlayer,CatBoost,CatBoost stopped,chimeraboost"
SIZES, GROWTH = "30,100,300,1000,3000,20000,100000", "30,100,300,1000,3000,10000,30000,100000,300000,1000000"
LEAST_ROWS, WARM_UP_ROWS, TEST_ROWS = 20, 60, 2_000
TRAINING, TESTING, WARM_UP = range(3)  # seeds; those of further draws follow
MOST_SPLITS = 10  # of a table, where no number is asked for
CEILING = {100: 1.32, 300: 3.33, 1_000: 3.71, 5_000: 6.45}  # 2026-11-20, x86_64, 2 cores, torch 2.13.0
"""Processor seconds of a default fit by rows, in units of `products()`."""
SLACK, REPEATS, PRODUCTS = 1.1, 3, 150


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
    data: str
    rows: int
    splits: int
    threads: int
    machine: str
    cpu_seconds: float  # processor seconds of the fit, all threads
    seconds: float  # wall seconds of the fit
    megabytes: float  # by which the process grew up to its peak in the first fit, its data and warm-up included
    scores: Scores
    versions: dict[str, str]


@dataclass(frozen=True)
class Job(runner.Job):
    """One method on one table; scores and seconds are means over its splits."""

    name: str
    rows: int  # of training; of a given table, in its first split
    threads: int = 2
    splits: int = 1  # number of them, the first ones; of the made table, draws
    data: str = MADE
    folder: Path = Path()
    limit: float = 1800.0

    def __str__(self) -> str:
        return f"{self.data}, {self.rows:,} rows, {self.name}"

    @property
    def method(self) -> Method:
        return METHODS[self.name]

    @property
    def key(self) -> tuple[str, str, str, int, int, int, str]:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        return self.name, self.method.config, self.data, self.rows, self.splits, self.threads, machine

    def problems(self) -> Iterator[tuple[Task, ndarray, ndarray, ndarray, ndarray]]:
        """Task, rows to fit and rows to predict, split by split."""
        if self.data == MADE:
            for draw in range(self.splits):
                rows = make_rows(self.rows, WARM_UP + draw if draw else TRAINING)
                yield Task(MADE, "given", draw), *rows, *make_rows(TEST_ROWS, TESTING)
            return
        (table,) = load_folder(self.folder, [self.data])
        for split in table.splits("given", range(self.splits)):
            yield Task(self.data, "given", split, table.hidden), *table.parts("given", split)

    def run(self) -> Result:
        before, taken = memory(), list[tuple[float, float, float, Scores]]()
        torch.set_num_threads(self.threads)
        self.method.fit(*make_rows(WARM_UP_ROWS, WARM_UP), Task(MADE, "given", 0))
        for task, X, y, X_test, y_test in self.problems():
            with stopped_after(self.limit):
                predict, cpu, wall = timed(partial(self.method.fit, X, y, task))
            taken.append((cpu, wall, memory("VmHWM") - before, score(predict(X_test), y_test)))
        cpu, wall = (round(float(np.mean(each)), 3) for each in list(zip(*taken, strict=True))[:2])
        scores = zip(*(astuple(each) for *_, each in taken), strict=True)
        mean: Any = [None if None in each else float(np.mean(each)) for each in scores]
        versions = runner.versions(self.method.packages)
        return Result(*self.key, cpu, wall, max(round(taken[0][2], 1), 0.1), Scores(*mean), versions)


def unable(job: Job, taken: Sequence[Result], limit: float) -> str | None:
    if missing := job.method.missing():
        return f"needs {', '.join(missing)}; make bench-fit installs it"
    need, free = MATRICES * 8 * job.rows**2 / 1e9, memory("MemAvailable", "/proc/meminfo") / 1e3
    if job.name == EXACT and (job.rows > EXACT_ROWS or need > free):
        return f"needs about {need:,.0f} GB of memory, {free:,.0f} GB are free"
    over = [r for r in taken if (r.method, r.data) == (job.name, job.data) and r.rows < job.rows and r.seconds > limit]
    if over:
        return f"{over[-1].seconds:,.0f} s for {over[-1].rows:,} rows, above the limit of {limit:,.0f} s"
    return None


def table(outcomes: Sequence[runner.Outcome]) -> str:
    results = [o.result for o in outcomes if o.result is not None]
    trees = {(r.data, r.rows): r.cpu_seconds for r in results if r.method == TREES}
    head = f"{'cpu s':>9} {'wall s':>9} {'cpu ratio':>9} {'LPD':>10} {'CRPS':>7} {'90% in':>7} {'MB':>7}"
    lines = [describe_machine(), "", f"{'rows':>17}  {'':<17} {head}"]
    for (data, m), group in runner.grouped(outcomes, lambda outcome: (outcome.task.data, outcome.task.rows)).items():
        size = f"{'' if data == MADE else data} {m:,}"
        for outcome in group:
            r, cells = outcome.result, f"not measured: {outcome.why_not}"
            if r is not None:
                ratio = f"{r.cpu_seconds / trees[data, m]:.2f}" if (data, m) in trees else "-"
                lpd = "-" if r.scores.lpd is None else f"{r.scores.lpd:.3f}"
                cells = f"{r.cpu_seconds:9,.2f} {r.seconds:9,.2f} {ratio:>9} {lpd:>10} "
                cells += f"{r.scores.crps:7.3f} {r.scores.coverage_90:7.3f} {r.megabytes:7,.0f}"
            lines.append(f"{size:>17}  {outcome.task.name:<17} {cells}")
            size = ""
    notes = f"""cpu s, wall s: of the fit; cpu ratio: to {TREES} as it comes on the same rows; scores: means over splits
LPD (larger is better), CRPS (smaller is better): with its noise the made function has {ORACLE_LPD:.3f}
and {ORACLE_CRPS:.3f}; 90% in: share of targets in 90% intervals; MB: by which the process grew, its rows included"""
    return "\n".join([*lines, "", notes])


def picture(results: Sequence[Result]) -> Figure:
    """Seconds and memory against the rows of the made table, a line for each method."""
    figure, sizes = new_figure(10, 4), sorted({r.rows for r in results})
    costs, memories = figure.subplots(1, 2)
    for name, each in runner.grouped(sorted(results, key=lambda r: r.rows), lambda r: r.method).items():
        rows = [r.rows for r in each]
        (line,) = costs.loglog(rows, [r.cpu_seconds for r in each], "o-", ms=3.5, label=name)
        costs.loglog(rows, [r.seconds for r in each], ":", color=line.get_color())
        memories.loglog(rows, [r.megabytes for r in each], "o-", ms=3.5)
    costs.set_title("seconds of a fit: processor, and (dotted) on the wall")
    memories.set_title("memory, MB")
    for ax in (costs, memories):
        runner.sized(ax, sizes, f"training rows, {N_INPUTS} columns")
    costs.legend(fontsize=8)
    return figure


def products() -> None:
    """A fixed amount of work, a second of one core: stacked products of the shapes of a training step."""
    for dtype in (torch.float32, torch.float64):
        Z, W = torch.ones(16, 1_000, 50, dtype=dtype), torch.ones(16, 50, 50, dtype=dtype)
        layer, gram = torch.empty_like(Z), torch.empty_like(W)
        for _ in range(PRODUCTS):
            torch.bmm(Z, W, out=layer)
            torch.bmm(Z.mT, Z, out=gram)


def ceiling(*, record: bool) -> None:
    """Print today's ratios beside the recorded ones, and on request the constant that records them; one thread."""
    torch.set_num_threads(1)
    fits = [partial(BLLRegressor(random_state=0).fit, *make_rows(m, TRAINING)) for m in CEILING]
    unit, *each = time_in_turns(products, *fits, repeats=REPEATS, clock=time.process_time)
    ratios = {m: round(timing.median / unit.median, 2) for m, timing in zip(CEILING, each, strict=True)}
    print(f"{describe_machine()}; the products take {unit.median:.2f} processor seconds")
    print(f"{'rows':>8} {'cpu s':>8} {'ratio':>8} {'recorded':>8}")
    for (m, ratio), timing in zip(ratios.items(), each, strict=True):
        verdict = "within" if ratio <= SLACK * CEILING[m] else "above"
        print(f"{m:8,} {timing.median:8.2f} {ratio:8.2f} {CEILING[m]:8.2f}  {verdict} {SLACK:g} times")
    if record:
        print(f"CEILING = {ratios}  # {datetime.date.today()}")
    elif any(ratio > SLACK * CEILING[m] for m, ratio in ratios.items()):
        sys.exit("error: a default fit costs more than it may")


def main(arguments: list[str] | None = None) -> None:
    parser = runner.options_of(__doc__, out="results", again=True)
    parser.add_argument("--rows", help=f"comma-separated sizes of the made table; default {SIZES}, or none with --data")
    parser.add_argument("--data", type=Path, help="folder of tables (docs/uci.md), whose given splits are fitted")
    parser.add_argument("--sets", help="comma-separated tables of the folder; default: all")
    number = f"number of given splits, or of draws of the made table; default: {MOST_SPLITS} at most, 1"
    parser.add_argument("--splits", type=int, help=number)
    parser.add_argument("--methods", help=f"comma-separated, of {', '.join(METHODS)}; default: the first four")
    parser.add_argument("--threads", type=int, default=2, help="threads of each method")
    limit = "seconds on the wall after which a fit is stopped; its method is not run with more rows"
    parser.add_argument("--limit", type=float, default=1800, help=limit)
    parser.add_argument("--growth", action="store_true", help=f"a default fit alone; rows {GROWTH}; growth.png")
    parser.add_argument("--ceiling", action="store_true", help="exit status 1 if a ratio is above the recorded ones")
    parser.add_argument("--record", action="store_true", help="with --ceiling: print the constant to paste, status 0")
    asked = parser.parse_args(arguments)
    if asked.ceiling:
        ceiling(record=asked.record)
        return
    with runner.helpful():
        chosen = runner.named("method", asked.methods or (OWN if asked.growth else COMPARED), METHODS)
        sizes = asked.rows or (GROWTH if asked.growth else "" if asked.data else SIZES)
        rows = runner.whole_numbers("rows", sizes, LEAST_ROWS, "300,1000") if sizes else []
        places = [(m, asked.splits or 1, MADE) for m in rows]
        for one in load_folder(asked.data, asked.sets and runner.split_list(asked.sets)) if asked.data else ():
            splits = one.splits("given", range(asked.splits or MOST_SPLITS))
            places.append((len(one.X) - len(one.test_rows("given", splits[0])), len(splits), one.name))
    torch.set_num_threads(asked.threads)
    os.environ |= {f"{kind}_NUM_THREADS": str(asked.threads) for kind in ("OMP", "MKL", "OPENBLAS", "NUMBA")}
    os.environ["CHIMERABOOST_WARMUP"] = "1"  # it compiles its loops, or loads them, as it is imported
    # size by size, the smallest first, so that methods are compared under similar load
    jobs = [
        Job(method.name, m, asked.threads, splits, data, asked.data or Path(), asked.limit)
        for m, splits, data in places
        for method in chosen
    ]
    store = runner.Store(asked.out / "fit.jsonl", Result)
    name = "growth" if asked.growth else "fit"

    def write(outcomes: Sequence[runner.Outcome]) -> None:
        text = table(outcomes)
        made = [outcome.result for outcome in outcomes if outcome.result and outcome.task.data == MADE]
        print(f"\n{text}\n")
        runner.write_files(asked.out, {f"{name}.txt": text + "\n"}, {f"{name}.png": picture(made)} if made else {})

    taken = lambda: [store.results[job.key] for job in jobs if job.key in store.results]
    why_not = lambda job: unable(job, taken(), asked.limit)
    runner.complete(jobs, store, write, again=asked.again, isolated=True, unable=why_not)


if __name__ == "__main__":
    main()
