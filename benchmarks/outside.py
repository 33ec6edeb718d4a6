"""Calibration outside the training range: coverage, LPD and CRPS against distance.

The default, an exact Gaussian process, NGBoost and a deep ensemble are fitted to 150 rows uniform on [-1, 1]^d with
noise 0.1, and scored on the surface of the cube of half-width r. A second run computes what is missing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from benchmarks.runner import Job, Store, aligned, complete, helpful, options_of, split_list, write_files
from benchmarks.timing import timed
from benchmarks.uci.gaussian_processes import gaussians_of
from benchmarks.uci.methods import METHODS as UCI
from benchmarks.uci.protocol import Fit, Predict, Task, score
from lastlayer.errors import check_choice
from lastlayer.plots.drawing import BLUE, GREEN, GREY, ORANGE, new_figure

ROWS, TEST_ROWS, NOISE, RADII = 150, 300, 0.1, (1.0, 1.25, 1.5, 2.0)
COUNTED = -20.0  # lower bound of a function's LPD in the mean over functions


def drawn(length: float) -> Callable[[ndarray, int], ndarray]:
    def function(X: ndarray, seed: int) -> ndarray:
        rng = np.random.default_rng(seed + 10_000)
        W, b, c = rng.normal(size=(X.shape[1], 300)), rng.uniform(0, 2 * np.pi, 300), rng.normal(size=300)
        values: ndarray = np.cos(X @ W / length + b) @ c * np.sqrt(2 / 300)
        return values

    return function


FUNCTIONS: dict[str, tuple[int, Callable[[ndarray, int], ndarray]]] = {
    "sine": (2, lambda X, _: np.sin(3 * X[:, 0]) + X[:, 1]),
    "square": (2, lambda X, _: X[:, 0] ** 2 + X[:, 1] / 2),
    "exponential": (1, lambda X, _: np.exp(1.5 * X[:, 0])),
    "linear": (2, lambda X, _: X[:, 0] - X[:, 1]),
    "saturating": (2, lambda X, _: np.tanh(3 * X[:, 0]) * (1 + X[:, 1] / 2)),
    "kink": (3, lambda X, _: np.abs(X[:, 0]) - np.maximum(X[:, 1], 0) + X[:, 2] / 3),
    "step": (2, lambda X, _: 1 / (1 + np.exp(-12 * X[:, 0])) + X[:, 1]),
    "rough draw": (2, drawn(0.7)),
    "smooth draw": (4, drawn(1.5)),
}


def exact_process(X: ndarray, y: ndarray, task: Task) -> Predict:
    kernel = ConstantKernel(1.0, (1e-2, 1e3)) * RBF(np.ones(X.shape[1]), (0.05, 50)) + WhiteKernel(0.01, (1e-6, 1))
    process = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=2, random_state=task.seed)
    return gaussians_of(process.fit(X, y))


METHODS: dict[str, Fit] = {
    "lastlayer": UCI["lastlayer, own network"].fit,
    "exact process": exact_process,
    "NGBoost": UCI["NGBoost"].fit,
    "deep ensemble": UCI["deep ensemble"].fit,
}
COLOURS = dict(zip(METHODS, (BLUE, ORANGE, GREEN, GREY), strict=True))


@dataclass(frozen=True)
class Result:
    scores: list[list[float]]
    seconds: float


@dataclass(frozen=True)
class Fitted(Job):
    function: str
    method: str
    seed: int

    def run(self) -> Result:
        torch.set_num_threads(1)
        d, f = FUNCTIONS[self.function]
        X = surface(d, ROWS, 1.0, self.seed)
        rng = np.random.default_rng(self.seed + 500)
        y = f(X, self.seed) + NOISE * rng.normal(size=ROWS)
        task = Task(self.function, "given", self.seed)
        predict, seconds, _ = timed(lambda: METHODS[self.method](X, y, task))
        found = []
        for radius in RADII:
            Z = surface(d, TEST_ROWS, radius, self.seed + 1000)
            t = f(Z, self.seed) + NOISE * rng.normal(size=TEST_ROWS)
            s = score(predict(Z), t)
            found.append([s.coverage_90, np.nan if s.lpd is None else s.lpd, s.crps])
        return Result(found, seconds)


def surface(d: int, n: int, radius: float, seed: int) -> Float[ndarray, "n d"]:
    """Draw points on the surface of the cube of half-width r, or inside it for r = 1."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-radius, radius, (n, d))
    if radius > 1:
        X[np.arange(n), rng.integers(d, size=n)] = radius * rng.choice([-1, 1], n)
    return X


def main(arguments: list[str] | None = None) -> dict[str, Float[ndarray, "f r 3"]]:
    parser = options_of(__doc__, out="results/outside", again=True)
    parser.add_argument("--seeds", type=int, default=10, help="seeds per method and function")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated methods")
    parser.add_argument("--functions", default=",".join(FUNCTIONS), help="comma-separated functions")
    parser.add_argument("--processes", type=int, default=1, help="fits that run in parallel")
    asked = parser.parse_args(arguments)
    with helpful():
        methods = [check_choice("method", name, METHODS) for name in split_list(asked.methods)]
        functions = [check_choice("function", name, FUNCTIONS) for name in split_list(asked.functions)]
    seeds = range(asked.seeds)
    jobs = [Fitted(f, m, seed) for f in functions for m in methods for seed in seeds]
    store = Store(asked.out / "results.jsonl", Result)
    complete(jobs, store, again=asked.again, processes=asked.processes)
    seconds = {
        (f, m): float(np.mean([store.results[f, m, s].seconds for s in seeds])) for f in functions for m in methods
    }
    of = lambda f, m: np.mean([store.results[f, m, s].scores for s in seeds], 0)
    found = {m: np.array([of(f, m) for f in functions]) for m in methods}
    table = [["", "", "cpu s", *(part for r in RADII for part in (f"r = {r:g}: 90%", "LPD", "CRPS"))]]
    for i, f in enumerate(functions):
        table += [[f, m, f"{seconds[f, m]:.0f}", *cells(found[m][i])] for m in methods]
    for m in methods:
        table.append(
            ["mean of all", m, f"{np.mean([seconds[f, m] for f in functions]):.0f}", *cells(clipped_mean(found[m]))]
        )
    print(aligned(table))
    print(f"(mean LPD: the LPD of each function is clipped at {COUNTED:g})")
    write_files(asked.out, {}, {"outside.png": picture(found)})
    return found


def clipped_mean(scores: Float[ndarray, "f r 3"]) -> Float[ndarray, "r 3"]:
    return np.maximum(scores, [-np.inf, COUNTED, -np.inf]).mean(0)


def cells(scores: Float[ndarray, "r 3"]) -> list[str]:
    return [f"{value:.2f}" for value in scores.flat]


def picture(found: dict[str, Float[ndarray, "f r 3"]]) -> Figure:
    figure = new_figure(9.0, 3.0)
    axes = figure.subplots(1, 3)
    for method, scores in found.items():
        mean = clipped_mean(scores)
        for i, ax in enumerate(axes):
            ax.plot(RADII, mean[:, i], "o-", ms=3.5, color=COLOURS[method], label=method)
        if method == "lastlayer":
            axes[0].plot(RADII, scores[..., 0].T, color=COLOURS[method], lw=0.6, alpha=0.35)
    axes[0].axhline(0.9, color="black", lw=0.8, ls=":")
    axes[0].set_ylim(0, 1.02)
    for ax, name in zip(axes, ("coverage of 90% intervals", "LPD", "CRPS"), strict=True):
        ax.set_xlabel("half-width r (1: edge of the data)", fontsize=8)
        ax.set_title(name, fontsize=9)
    axes[2].set_yscale("log")
    axes[1].legend(fontsize=7)
    return figure


if __name__ == "__main__":
    main()
