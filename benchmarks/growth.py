"""Growth of cost: seconds and memory of the parts of training against rows m, features p and outputs q, log-log.

Every point is the fastest of a few repeats; memory is the increase of the process's peak during one call. The slope of
the last points is printed: 1 for a cost linear in m, 2 for products of p features, 3 for their factorisation.
`python -m benchmarks.fit --growth` measures a whole fit against rows.
"""

import argparse
import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression

import torch

from benchmarks.runner import options_of, sized
from benchmarks.timing import describe_machine, now, peak_of
from lastlayer.bayes.statistics import Readings, Statistics
from lastlayer.data.rows import Points
from lastlayer.networks.mlp import MLP
from lastlayer.plots.drawing import new_figure
from lastlayer.studies.paper import check_folder
from lastlayer.training import FrozenLayer, Profiled, RunningPosterior, chunked_nlml

REPEATS = 3


@dataclass(frozen=True)
class Line:
    name: str
    size: str
    sizes: Sequence[int]
    seconds: list[float]
    megabytes: list[float]

    def slope(self, values: list[float]) -> float:
        """Slope of the last two thirds of the points, by least squares in the logarithms."""
        keep = max(2, 2 * len(self.sizes) // 3)
        return linear_regression(*(list(map(math.log, part[-keep:])) for part in (self.sizes, values))).slope


def measure(work: Callable[[], object], device: str) -> tuple[float, float]:
    """Measure seconds (fastest repeat) and megabytes (peak) of a call."""
    taken = []
    for _ in range(REPEATS):
        start = now(device)
        work()
        taken.append(now(device) - start)
    if device == "cpu":
        return min(taken), max(peak_of(work), 0.1)
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    work()
    return min(taken), (torch.cuda.max_memory_allocated() - allocated) / 2**20


def rows(m: int, k: int, q: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator(device).manual_seed(0)
    return torch.randn(m, k, generator=g, device=device), torch.randn(m, q, generator=g, device=device)


def statistics_pass(m: int, k: int, q: int, device: str) -> Callable[[], object]:
    phi, T = rows(m, k, q, device)
    return lambda: Statistics.from_linear_features(phi, T)


def layer(m: int, k: int, q: int, device: str) -> Callable[[], object]:
    statistics = Statistics.from_linear_features(*rows(max(2 * k, 64), k, q, device))
    return lambda: FrozenLayer.of(statistics, 0.0)


def batch_step(m: int, k: int, q: int, device: str) -> Callable[[], object]:
    phi, T = rows(m, k, q, device)
    running = RunningPosterior(torch.tensor(float(m), dtype=torch.float64, device=device), m)
    running.step(phi, T)
    return lambda: running.step(phi, T)


def exact_step(m: int, k: int, q: int, device: str) -> Callable[[], object]:
    """Exact gradient of m rows, 4,096 in memory at a time, for one hidden layer of k units."""
    X, T = rows(m, 16, q, device)
    network = MLP(16, (k,), dtype=torch.float32).to(device)
    objective = Profiled(bias_prior="flat", noise="diagonal").to(device)
    return lambda: chunked_nlml(network, objective, Points(X, Readings(T.double())), 4_096)


PARTS: dict[str, Callable[[int, int, int, str], Callable[[], object]]] = {
    "statistics pass": statistics_pass,
    "last layer from statistics": layer,
    "mini-batch step": batch_step,
    "exact gradient in chunks": exact_step,
}


def lines(options: argparse.Namespace) -> list[Line]:
    base = {"m": options.m, "p": options.p, "q": options.q}
    grids = {"m": options.ms, "p": options.ps, "q": options.qs}
    found = []
    for size, grid in grids.items():
        for name, make in PARTS.items():
            if (name, size) == ("last layer from statistics", "m"):
                continue
            each = [base | {size: value} for value in grid]
            points = [measure(make(at["m"], at["p"], at["q"], options.device), options.device) for at in each]
            seconds, megabytes = map(list, zip(*points, strict=True))
            line = Line(name, size, grid, seconds, megabytes)
            found.append(line)
            cells = "  ".join(f"{v:,}: {s:.4f} s, {mb:,.0f} MB" for v, (s, mb) in zip(grid, points, strict=True))
            slopes = f"slope {line.slope(seconds):.2f} (memory {line.slope(megabytes):.2f})"
            print(f"{name} against {size}, {slopes}: {cells}", flush=True)
    return found


def draw(found: list[Line], options: argparse.Namespace) -> None:
    figure = new_figure(13, 7)
    axes = figure.subplots(2, 3)
    titles = {"m": "rows m", "p": "features p", "q": "outputs q"}
    for column, size in enumerate(titles):
        fixed = ", ".join(f"{other} = {getattr(options, other):,}" for other in titles if other != size)
        for row, (what, values) in enumerate((("seconds", "seconds"), ("memory, MB", "megabytes"))):
            axis = axes[row, column]
            for line in [line for line in found if line.size == size]:
                y = getattr(line, values)
                axis.loglog(line.sizes, y, "o-", ms=3, label=f"{line.name} (slope {line.slope(y):.1f})")
            sized(axis, line.sizes, f"{titles[size]} ({fixed})")
            axis.set_ylabel(what)
            axis.legend(fontsize=7)
    figure.suptitle(f"{describe_machine()}, {options.device}", fontsize=9)
    figure.savefig(options.out, dpi=110)
    print(f"wrote {options.out}")


def main(arguments: list[str] | None = None) -> None:
    parser = options_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/scale-growth.png"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--m", type=int, default=8_192, help="rows while another size varies")
    parser.add_argument("--p", type=int, default=128, help="features while another size varies")
    parser.add_argument("--q", type=int, default=1, help="outputs while another size varies")
    parser.add_argument("--ms", type=int, nargs="+", default=[4_096, 16_384, 65_536, 262_144])
    parser.add_argument("--ps", type=int, nargs="+", default=[64, 128, 256, 512, 1_024, 2_048, 4_096])
    parser.add_argument("--qs", type=int, nargs="+", default=[1, 4, 16, 64])
    options = parser.parse_args(arguments)
    check_folder(options.out.parent)
    if options.device == "cpu":  # else a call would reuse the memory that the last one freed (M_MMAP_THRESHOLD)
        ctypes.CDLL("libc.so.6").mallopt(-3, 65_536)
    print(f"{describe_machine()}, {options.device}")
    draw(lines(options), options)


if __name__ == "__main__":
    main()
