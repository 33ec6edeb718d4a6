"""What the figures of `plots` and `dynamics.plots` share: colours, panels, axes, bins, and bands of sampling noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy.special import bdtrik, betaincinv, ndtri

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#1f5fa8", "#d9731a", "#8a8a8a"
GREEN, PURPLE = "#3a8a4d", "#7d4f9e"
COLUMNS = 4
SHOWN = 2000
"""Most points that are drawn one by one; of more, a random subset. Statistics are always those of all points."""
N_BINS, AT_LEAST = 12, 15
"""Most bins, and fewest points in one."""
IN_95_PERCENT = np.array([0.025, 0.975])


def new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def panels(q: int, heights: Sequence[float] = (3.0,)) -> tuple["Figure", ndarray]:
    """A figure with one stack of panels per output: axes (len(heights), q), at most COLUMNS side by side."""
    columns, k = min(q, COLUMNS), len(heights)
    blocks = -(-q // columns)
    figure = new_figure(max(6.0, 3.6 * columns), 1.3 + 1.1 * blocks * sum(heights))
    grid = figure.subplots(blocks * k, columns, squeeze=False, height_ratios=[*heights] * blocks)
    axes: ndarray = grid.reshape(blocks, k, columns).swapaxes(0, 1).reshape(k, -1)
    for ax in axes[:, q:].flat:
        ax.remove()
    return figure, axes[:, :q]


def finish(
    figure: "Figure", axes: ndarray, headline: str, xlabel: str, *ylabels: str, titles: Sequence[str] = ()
) -> "Figure":
    for i, stack in enumerate(axes.T):
        stack[0].set_title(": ".join([f"output {i + 1}"] * (len(axes.T) > 1) + [*titles[i : i + 1]]), fontsize=9)
        stack[-1].set_xlabel(xlabel)
        for ax, ylabel in zip(stack, ylabels, strict=True):
            if i % COLUMNS == 0:
                ax.set_ylabel(ylabel)
    figure.suptitle(headline, fontsize=10)
    widest = max(map(len, axes[0, 0].get_legend_handles_labels()[1]))
    legend_of(figure, axes, ncols=max(1, int(figure.get_figwidth() / (0.6 + 0.056 * widest))))
    for line in figure.legends[0].get_lines():
        if line.get_marker() == ".":  # a single point in the legend would be too faint
            line.set(alpha=0.8, markersize=7)
    return figure


def legend_of(figure: "Figure", axes: ndarray, ncols: int, loc: Any = "outside lower center") -> None:
    """Add the legend of the first panel outside all panels; remove the top and right spines."""
    words = axes.flat[0].get_legend_handles_labels()
    figure.legend(*words, ncols=ncols, loc=loc, fontsize=8, frameon=False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)


def faint(ax: "Axes", x: ndarray, y: ndarray, color: str, label: str) -> None:
    """Draw many points, more transparent the more there are."""
    alpha = float(np.clip(150 / max(len(x), 1), 0.25, 0.6))
    ax.plot(x, y, ".", color=color, ms=4, alpha=alpha, mew=0, label=label, rasterized=True)


def padded(values: Float[ndarray, " n"], margin: float = 0.06) -> tuple[float, float]:
    """Limits of an axis, with a margin as a share of the range."""
    lowest, highest = float(values.min()), float(values.max())
    pad = margin * (highest - lowest) or 0.1 * abs(highest) or 1.0
    return lowest - pad, highest + pad


def log_padded(values: Float[ndarray, " n"]) -> tuple[float, float]:
    return float(values.min()) / 1.2, float(values.max()) * 1.2


def central(values: Float[ndarray, " n"]) -> Float[ndarray, " r"]:
    """Values without extreme outliers, for the limits of an axis."""
    low, high = np.quantile(values, [0.005, 0.995])
    reach = 0.5 * (high - low)
    return values[(values >= low - reach) & (values <= high + reach)]


def errors_axis(ax: "Axes", drawn: Float[ndarray, " d"], errors: Float[ndarray, " m"]) -> None:
    """Logarithmic vertical axis for what is drawn and the large errors; the smallest errors are cut off."""
    log_axis(ax, "y", 0.2 * float(drawn[drawn > 0].min()), 1.3 * float(max(drawn.max(), errors.max())))


def log_axis(ax: "Axes", name: str, lowest: float, highest: float) -> None:
    """Make an axis logarithmic, with readable ticks for any number of decades."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    ax.set(**{f"{name}scale": "log", f"{name}lim": (lowest, highest)})
    axis = getattr(ax, f"{name}axis")
    axis.set_minor_formatter(NullFormatter())
    if highest < 100 * lowest:
        decades = highest > 10 * lowest
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if decades else MaxNLocator(5, steps=(1, 2, 5, 10)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def positive(cost: Float[ndarray, " m"]) -> Float[ndarray, " m"]:
    """Costs for a logarithmic axis: zeros and tiny values are raised to a millionth of the median."""
    above = cost[cost > 0]
    return np.maximum(cost, 1e-6 * np.median(above) if len(above) else 1.0)


def binomial_band(m: int, levels: float | ndarray) -> tuple[Any, Any]:
    """Range of the share of m independent targets inside an interval of each level, in 95% of samples."""
    within = np.clip(levels, 1e-12, 1 - 1e-12)  # the inverse is defined there
    lower, upper = (np.ceil(bdtrik(share, m, within)) / m for share in IN_95_PERCENT)
    return lower, upper


def half_normal(level: float | ndarray) -> Any:
    """Quantile of |z| at `level`, z standard Gaussian."""
    return ndtri((1 + level) / 2)


def quantile_band(n: int, level: float) -> Float[ndarray, "2"]:
    """Range of the quantile of n values of |z| in 95% of samples: the k-th of n uniforms is Beta(k, n + 1 - k)."""
    k = 1 + level * (n - 1)  # as numpy.quantile interpolates
    return half_normal(betaincinv(k, n + 1 - k, IN_95_PERCENT))


def some(m: int, n: int = SHOWN) -> tuple[Int[ndarray, " s"], str]:
    """At most n of m rows to draw, the same in every call, and a remark for the label if these are not all."""
    if m <= n:
        return np.arange(m), ""
    return np.sort(np.random.default_rng(0).choice(m, n, replace=False)), f" ({n:,} of {m:,} shown)"


def bins(x: Float[ndarray, " m"]) -> list[Int[ndarray, " r"]]:
    """Rows in at most N_BINS bins of equal width in log x, ascending, widened to AT_LEAST points each."""
    m, order = len(x), np.argsort(x, kind="stable")
    log_x = np.log(x[order])
    ends = np.searchsorted(log_x, np.linspace(log_x[0], log_x[-1], N_BINS + 1)[1:-1], side="right")
    ends = ends.clip(AT_LEAST, m - AT_LEAST) if m >= 2 * AT_LEAST and log_x[-1] > log_x[0] else ends[:0]
    starts = [0]
    for end in ends:
        if end - starts[-1] >= AT_LEAST:
            starts.append(int(end))
    return np.split(order, starts[1:])


@dataclass(frozen=True)
class Bins:
    """Bins of the affine cost, for a logarithmic axis."""

    rows: list[ndarray]
    centre: Float[ndarray, " b"]
    edges: Float[ndarray, " e"]
    """Smallest and largest cost of each bin, one after the other."""

    @classmethod
    def of(cls, cost: Float[ndarray, " m"]) -> "Bins":
        cost = positive(cost)
        rows = bins(cost)
        centre = np.exp([np.log(cost[r]).mean() for r in rows])
        return cls(rows, centre, np.ravel([[cost[r].min(), cost[r].max()] for r in rows]))

    def coverage(self, inside: Bool[ndarray, "m q"], level: float) -> tuple[ndarray, ndarray, ndarray]:
        """The share inside (b, q), and over the edges the ends of the range of a perfect model in 95% of samples."""
        low, high = np.transpose([binomial_band(len(r), level) for r in self.rows]).repeat(2, 1)
        return np.array([inside[r].mean(0) for r in self.rows]), low, high


def binned_mean(
    ax: "Axes", x: ndarray, squares: ndarray, color: str, word: str, *, exponent: float, power: float = 1.0
) -> Float[ndarray, " b"]:
    """Draw means of squares in bins of x, to a power, with bars of 2 standard errors; return the heights."""
    kept = [r for r in bins(x) if squares[r].any()]
    mean = np.array([squares[r].mean() for r in kept])
    error = np.array([squares[r].std() / math.sqrt(len(r)) for r in kept]) / mean
    heights, factor = mean**power, np.exp(2 * power * error)
    largest = [x[r].max() for r in kept]  # powers are those of x over it, so that none overflows
    centres = [top * np.mean((x[r] / top) ** exponent) ** (1 / exponent) for r, top in zip(kept, largest, strict=True)]
    label, bars = f"{word} in bins ± 2 standard errors", [heights - heights / factor, heights * factor - heights]
    ax.errorbar(centres, heights, bars, fmt="o", color=color, ms=4, lw=1.2, label=label)
    return heights
