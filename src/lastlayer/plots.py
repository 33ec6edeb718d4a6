"""Pictures for people who want to see what a model knows; each function returns a matplotlib figure.

`one_input` shows a model over its input. The others judge predictions by targets that the model has not seen, one panel
an output, and say above the panels what good looks like.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy.special import bdtrik, betaincinv, ndtri

from lastlayer.calibration import Calibration
from lastlayer.errors import InputError
from lastlayer.extrapolation import AlphaCurve
from lastlayer.inputs import as_array, check_finite
from lastlayer.metrics import LEVELS, calibration_error, rmse
from lastlayer.prediction import Prediction
from lastlayer.regressor import BLLRegressor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#1f5fa8", "#d9731a", "#8a8a8a"
GREEN, PURPLE = "#3a8a4d", "#7d4f9e"
KINDS = {"random": BLUE, "blocked": ORANGE, "given": GREEN, "validation": PURPLE}
COLUMNS = 4
SHOWN = 2000
"""Points drawn one by one; of more, so many are picked. Shares, means and quantiles are of all points."""
AT_LEAST = 15
"""Points in a bin."""
BINNED = "{} in bins ± 2 standard errors"


def one_input(
    model: BLLRegressor,
    X: Float[ndarray, "m 1"],
    y: Float[ndarray, "m q"],
    *,
    span: tuple[float, float],
    truth: Callable[[ndarray], ndarray] | None = None,
    n: int = 400,
) -> "Figure":
    """Mean and bands of every output over one input, the data, and below them the affine cost that tells where to stop.

    The dark band holds the function, the light one the targets, both with 95% probability.
    """
    grid = np.linspace(*span, n)[:, None]
    targets, function = model.predictive(grid), model.predictive(grid, noise=False)
    q = targets.mean.shape[1]
    figure = _figure(8.0, 2.4 * q + 1.3)
    axes = figure.subplots(q + 1, 1, sharex=True, height_ratios=[3] * q + [1.3])
    for i, ax in enumerate(axes[:-1]):
        for p, shade, label in ((targets, 0.18, "95% of targets"), (function, 0.38, "95% of the function")):
            lower, upper = p.interval(0.95)
            ax.fill_between(grid[:, 0], lower[:, i], upper[:, i], color=BLUE, alpha=shade, lw=0, label=label)
        ax.plot(grid[:, 0], targets.mean[:, i], color=BLUE, lw=1.6, label="mean")
        if truth is not None:
            ax.plot(grid[:, 0], truth(grid)[:, i], color=ORANGE, lw=1.2, ls="--", label="truth")
        ax.plot(X[:, 0], y[:, i], ".", color="black", ms=3, label="training data")
        ax.set_ylim(_padded(np.concatenate([y[:, i], targets.mean[:, i]]), 0.6))
        ax.set_ylabel(f"output {i + 1}")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=5, loc="outside upper center", fontsize=8, frameon=False)
    axes[-1].semilogy(grid[:, 0], targets.affine_cost, color=GREY, lw=1.4)
    axes[-1].set(xlabel="input", ylabel="affine cost", xlim=span)
    for ax in axes:
        ax.axvspan(float(X.min()), float(X.max()), color="black", alpha=0.04, lw=0)
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def parity(prediction: Prediction, y: ndarray, *, level: float = 0.9) -> "Figure":
    """Predictions with their central intervals against the targets; those that miss their target stand out.

    The shares that the titles call good are what a perfect model shows in 95% of samples of this size.
    """
    y = _targets(prediction, y)
    lower, upper = prediction.interval(level)
    inside = (lower <= y) & (y <= upper)
    rows, shown = _some(len(y), SHOWN // 4)  # bars need more room than points
    figure, axes = _panels(y.shape[1])
    for i, ax in enumerate(axes[0]):
        mean = prediction.mean[:, i]
        xlim, ylim = _padded(_central(y[rows, i])), _padded(_central(np.append(y[rows, i], mean[rows])))
        for hit, color, word in ((inside, BLUE, f"target inside its interval{shown}"), (~inside, ORANGE, "outside")):
            r = rows[hit[rows, i]]
            ax.vlines(y[r, i], lower[r, i], upper[r, i], color=color, alpha=0.25, lw=0.8)
            ax.plot(y[r, i], mean[r], ".", color=color, ms=3.5, label=word)
        ax.axline((y[0, i], y[0, i]), slope=1, color="black", ls="--", lw=1, label="prediction = target")
        ax.set(xlim=xlim, ylim=ylim)
        beyond = int((_outside(y[rows, i], xlim) | _outside(mean[rows], ylim)).sum())
        if beyond:
            ax.text(0.98, 0.02, f"{beyond} beyond the axes", ha="right", transform=ax.transAxes, fontsize=8, color=GREY)
    least, most = binomial_band(len(y), np.array([level]))
    return _finish(
        figure,
        axes,
        f"Good: {100 * level:g}% of the bars cross the diagonal, misses on both sides of it",
        xlabel="target",
        ylabels=[f"prediction with {100 * level:g}% interval"],
        titles=[f"{share:.1%} inside, good: {100 * least[0]:.1f} to {100 * most[0]:.1f}%" for share in inside.mean(0)],
    )


def calibration_curve(prediction: Prediction | Mapping[str, Prediction], y: ndarray) -> "Figure":
    """Share of targets inside central intervals against the intervals' level; several models by their names.

    The band is what a perfect model shows in 95% of samples of this size, level by level, if errors at different points
    are independent; far out neighbours err together.
    """
    models = prediction if isinstance(prediction, Mapping) else {"": prediction}
    if not models:
        raise InputError("there is no prediction in the dict: pass name -> prediction, or a prediction alone")
    for name, p in models.items():
        y = _targets(p, y, name)
    levels = np.concatenate([[0], LEVELS, [1]])
    lower, upper = binomial_band(len(y), levels)
    figure, axes = _panels(y.shape[1])
    for ax in axes[0]:
        ax.fill_between(levels, lower, upper, color="black", alpha=0.12, lw=0, label="a perfect model, 95% of the time")
        ax.plot([0, 1], [0, 1], color="black", ls="--", lw=1, label="share = level")
        ax.set(xlim=(0, 1), ylim=(0, 1))
    looks = cycle(product(("-", "--", ":"), (BLUE, ORANGE, GREEN, PURPLE)))
    good = "Good: in the band; below it intervals are too narrow, above too wide"
    for (name, p), (style, color) in zip(models.items(), looks, strict=False):
        error = f"calibration error {calibration_error(p, y):.3f}"
        distance = np.abs(2 * p.cdf(y) - 1)  # the level from which on the intervals hold the target
        for i, ax in enumerate(axes[0]):
            shares = [(distance[:, i] <= level).mean() for level in LEVELS]
            label = f"{name}: {error}" if name else "prediction"
            ax.plot(LEVELS, shares, "o", ls=style, color=color, ms=3, lw=1.3, label=label)
        if not name:
            good = f"{error}\n{good}"
    return _finish(figure, axes, good, xlabel="level of the central interval", ylabels=["share of targets inside"])


def sharpness(prediction: Prediction, y: ndarray) -> "Figure":
    """Errors against the standard deviations predicted for them, and the distribution of these below."""
    y = _targets(prediction, y)
    std, error = prediction.std, np.abs(y - prediction.mean)
    rows, shown = _some(len(y))
    figure, axes = _panels(y.shape[1], heights=(3.0, 1.2))
    for i, (top, bottom) in enumerate(axes.T):
        span = _log_padded(std[:, i])
        _faint(top, std[rows, i], error[rows, i], GREY, f"absolute errors{shown}")
        squares, label = np.square(error[:, i]), BINNED.format("RMSE")
        mean = _binned_mean(top, std[:, i], squares, ORANGE, label, exponent=2.0, root=True)
        top.plot(span, span, color="black", ls="--", lw=1, label="RMSE = predicted std")
        bottom.hist(std[:, i], np.geomspace(*span, 41), color=BLUE, alpha=0.6)
        _errors_axis(top, np.append(mean, span), error[:, i])
        for ax in (top, bottom):
            _log_axis(ax, "x", *span)
        top.tick_params(labelbottom=False)
    mean_std = np.sqrt(np.square(std).mean(0))
    return _finish(
        figure,
        axes,
        "Good: bins on the diagonal (above it: overconfident);\nof two models on it, the one farther left",
        xlabel="predicted standard deviation",
        ylabels=["absolute error", "points"],
        titles=[
            f"RMSE {e:.3g}, predicted {s:.3g}"
            for e, s in zip(rmse(prediction, y, per_output=True), mean_std, strict=True)
        ],
    )


def alpha_curve(curve: AlphaCurve, *, alpha_star: float | None = None) -> "Figure":
    """Validation LPD against log alpha, with alpha^max, the limit of infinite alpha, and alpha* (`model.alpha_star_`).

    What lies beyond the curve stands as an arrow at its end, where alpha has ceased to matter.
    """
    if alpha_star is not None and not alpha_star >= 0:
        raise InputError(f"alpha_star={alpha_star} must not be negative: pass model.alpha_star_")
    figure, axes = _panels(1)
    ax = axes[0, 0]
    ax.plot(curve.log_alphas, curve.lpds, color=BLUE, lw=1.6, label="LPD of validation points")
    ax.axhline(curve.lpds[-1], color=GREY, ls="--", lw=1, label=f"limit α → ∞: {curve.lpds[-1]:.3f}")
    ax.axhline(curve.lpd_before, color=GREEN, ls=":", lw=1.2, label=f"before tuning: {curve.lpd_before:.3f}")
    if alpha_star is not None:
        log_alpha = math.log(alpha_star) if alpha_star > 0 else -math.inf
        lpd = float(np.interp(log_alpha, curve.log_alphas, curve.lpds))
        _mark(ax, curve, log_alpha, lpd, color=GREEN, label=f"α*, log α = {log_alpha:.2f}")
    _mark(ax, curve, curve.log_alpha, curve.lpd, color=ORANGE, label=f"αᵐᵃˣ: {curve.lpd:.3f}")
    if np.ptp(curve.lpds) > 100:
        ax.set_yscale("symlog", linthresh=10)
    return _finish(figure, axes, str(curve), xlabel="log α", ylabels=["LPD (larger is better)"])


def extrapolation_error(prediction: Prediction, y: ndarray) -> "Figure":
    """Absolute errors in predicted standard deviations against the affine cost: do the error bars hold far out?

    Quantiles run over bins of the cost; the bands around their Gaussian values are what sampling noise alone allows.
    """
    y = _targets(prediction, y)
    check_finite(prediction.affine_cost, "affine_cost")
    cost = _positive(prediction.affine_cost)
    scaled = np.abs(y - prediction.mean) / prediction.std
    bins = _bins(cost)
    centres = [np.exp(np.log(cost[r]).mean()) for r in bins]
    edges = np.concatenate([[cost[r].min(), cost[r].max()] for r in bins])
    rows, shown = _some(len(y))
    figure, axes = _panels(y.shape[1])
    for i, ax in enumerate(axes[0]):
        _faint(ax, cost[rows], scaled[rows, i], GREY, f"targets{shown}")
        drawn = []
        for level, color in ((0.9, ORANGE), (0.5, BLUE)):
            lower, upper = np.transpose([_quantile_band(len(r), level) for r in bins])
            ax.fill_between(edges, lower.repeat(2), upper.repeat(2), color=color, alpha=0.18, lw=0)
            ax.axhline(_half_normal(level), color=color, ls="--", lw=1, label=f"{level:.0%} quantile of a Gaussian")
            quantiles = [np.quantile(scaled[r, i], level) for r in bins]
            ax.plot(centres, quantiles, "o-", color=color, ms=4, lw=1.5, label=f"{level:.0%} quantile in bins")
            drawn += [*quantiles, *lower, *upper]
        _log_axis(ax, "x", *_log_padded(cost))
        _errors_axis(ax, np.array(drawn), scaled[:, i])
    return _finish(
        figure,
        axes,
        "Good: lines in their bands (sampling noise) all the way;\nabove: error bars are too short there",
        xlabel="affine cost (degree of extrapolation)",
        ylabels=["absolute error / predicted std"],
    )


def cost_to_variance(calibration: Calibration | None) -> "Figure":
    """The calibrated map from affine cost to variance over noise, and the held-out errors that it was fitted to.

    With tails, a thinner line adds their variance, as the squared errors do. In a mixture of several strengths of the
    prior it is the curve and the networks of the best one; where it is wide, others speak in its place.
    """
    if calibration is None or not len(calibration.points.ratio):
        raise InputError(
            f"calibration={calibration} has no held-out points: fit the model with calibration, or call "
            "model.calibrate(X, y) with rows that it has not seen, then pass model.calibration_"
        )
    curve, points = calibration.curve, calibration.points
    cost, q = _positive(points.ratio), points.squared_error.shape[1]
    grid = np.geomspace(*_log_padded(cost), 200)
    calibrated, tails = curve.factor(grid), calibration.tails
    rows, shown = _some(len(cost))
    figure, axes = _panels(q)
    for i, ax in enumerate(axes[0]):
        drawn = [calibrated[:, i]]
        for kind in np.unique(points.kind)[::-1]:  # blocked ones last, on top: there are fewer of them far out
            color, of_kind = KINDS.get(kind, GREY), points.kind == kind
            r = rows[of_kind[rows]]
            _faint(ax, cost[r], points.squared_error[r, i], color, f"{kind} held-out{shown}")
            squares, label = points.squared_error[of_kind, i], BINNED.format(f"{kind}, mean")
            drawn.append(_binned_mean(ax, cost[of_kind], squares, color, label, exponent=curve.power))
        ax.plot(grid, calibrated[:, i], color="black", lw=1.8, label=r"calibrated, $a + b\,v^\gamma$")
        if tails.share:
            label = f"with tails, {tails.widening:.3g} times as much"
            ax.plot(grid, tails.widening * calibrated[:, i], color="black", lw=0.9, label=label)
        ax.plot(grid, 1 + grid, color="black", ls="--", lw=1.2, label="uncalibrated, $1 + v$")
        _log_axis(ax, "x", grid[0], grid[-1])
        _errors_axis(ax, np.concatenate(drawn), points.squared_error[:, i])
    return _finish(
        figure,
        axes,
        f"held-out LPD {calibration.lpd_before:.3f} uncalibrated, {calibration.lpd:.3f} calibrated\n"
        f"Good: means in bins on the {'thin' if tails.share else 'solid'} line",
        xlabel="affine cost $v$",
        ylabels=["squared error / noise variance"],
        titles=[
            rf"${a:.3g} + {b:.3g}\,v^{{{curve.power:.3g}}}$" for a, b in zip(curve.noise, curve.slope, strict=True)
        ],
    )


# --- input


def _targets(prediction: Prediction, y: ndarray, name: str = "") -> Float[ndarray, "m q"]:
    """The targets, one row a point, once they are known to fit the prediction."""
    m, q = prediction.mean.shape
    which = f"prediction {name!r}" if name else "prediction"
    y = np.asarray(as_array(y), dtype=float)
    y = y[:, None] if y.ndim == 1 and q == 1 else y
    if y.shape != (m, q) or m == 0:
        raise InputError(
            f"y has shape {y.shape}, but the {which} is of {m} points and {q} outputs: "
            f"pass the targets of the points that were predicted, shape ({m}, {q}) and at least one"
        )
    check_finite(y, "y")
    check_finite(prediction.mean, f"the mean of the {which}")
    bad = np.flatnonzero(~((prediction.std > 0) & np.isfinite(prediction.std)).all(1))
    if len(bad):
        raise InputError(
            f"the {which} has a zero or infinite standard deviation at {len(bad)} points (first: row {bad[0]}): "
            "predict targets with their noise, or leave these points out"
        )
    return y


def _positive(cost: Float[ndarray, " m"]) -> Float[ndarray, " m"]:
    """Costs fit for a logarithmic axis: none is zero, or so small that the axis would show nothing else."""
    positive = cost[cost > 0]
    return np.maximum(cost, 1e-6 * np.median(positive) if len(positive) else 1.0)


# --- statistics of what is drawn


def binomial_band(m: int, levels: Float[ndarray, " l"]) -> tuple[Float[ndarray, " l"], Float[ndarray, " l"]]:
    """Shares of m independent targets that lie inside an interval of each level, in 95% of samples."""
    within = levels.clip(1e-12, 1 - 1e-12)  # where the inverse is defined
    return np.ceil(bdtrik(0.025, m, within)) / m, np.ceil(bdtrik(0.975, m, within)) / m


def _half_normal(level: float | ndarray) -> Any:
    """The value that |z| stays below with probability `level`, z standard Gaussian."""
    return ndtri((1 + level) / 2)


def _quantile_band(n: int, level: float) -> Float[ndarray, "2"]:
    """Where the quantile of n values of |z| lies in 95% of samples: the k-th of n uniforms is Beta(k, n + 1 - k)."""
    k = 1 + level * (n - 1)  # as numpy.quantile interpolates
    return _half_normal(betaincinv(k, n + 1 - k, np.array([0.025, 0.975])))


def _some(m: int, n: int = SHOWN) -> tuple[Int[ndarray, " s"], str]:
    """At most n rows to draw one by one, always the same, and words for the label if these are not all."""
    if m <= n:
        return np.arange(m), ""
    return np.sort(np.random.default_rng(0).choice(m, n, replace=False)), f" ({n:,} of {m:,} shown)"


def _bins(x: Float[ndarray, " m"], n: int = 12) -> list[Int[ndarray, " r"]]:
    """Rows in at most n bins of equal width in log x, ascending, widened until each holds AT_LEAST points.

    An edge with fewer points beyond it moves inwards, so that the few farthest points do not drown among many others.
    """
    m, order = len(x), np.argsort(x, kind="stable")
    log_x = np.log(x[order])
    ends = np.searchsorted(log_x, np.linspace(log_x[0], log_x[-1], n + 1)[1:-1], side="right")
    ends = ends.clip(AT_LEAST, m - AT_LEAST) if m >= 2 * AT_LEAST and log_x[-1] > log_x[0] else ends[:0]
    starts = [0]
    for end in ends:
        if end - starts[-1] >= AT_LEAST:
            starts.append(int(end))
    return np.split(order, starts[1:])


def _power_mean(x: Float[ndarray, " r"], exponent: float) -> float:
    return float(x.max() * np.mean((x / x.max()) ** exponent) ** (1 / exponent))


# --- drawing


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def _panels(q: int, heights: Sequence[float] = (3.0,)) -> tuple["Figure", ndarray]:
    """A figure with a stack of panels an output: axes (len(heights), q), at most COLUMNS side by side."""
    columns, k = min(q, COLUMNS), len(heights)
    blocks = -(-q // columns)
    figure = _figure(max(6.0, 3.6 * columns), 1.3 + 1.1 * blocks * sum(heights))
    grid = figure.subplots(blocks * k, columns, squeeze=False, height_ratios=[*heights] * blocks)
    axes: ndarray = grid.reshape(blocks, k, columns).swapaxes(0, 1).reshape(k, -1)
    for ax in axes[:, q:].flat:
        ax.remove()
    return figure, axes[:, :q]


def _finish(
    figure: "Figure",
    axes: ndarray,
    headline: str,
    *,
    xlabel: str,
    ylabels: Sequence[str],
    titles: Sequence[str] | None = None,
) -> "Figure":
    """Words around the panels, and one legend for all of them."""
    q = axes.shape[1]
    for i, stack in enumerate(axes.T):
        words = [f"output {i + 1}"] * (q > 1) + ([titles[i]] if titles else [])
        stack[0].set_title(": ".join(words), fontsize=9)
        stack[-1].set_xlabel(xlabel)
        for ax, ylabel in zip(stack, ylabels, strict=True):
            ax.spines[["top", "right"]].set_visible(False)
            if i % COLUMNS == 0:
                ax.set_ylabel(ylabel)
    figure.suptitle(headline, fontsize=10)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    ncols = int(figure.get_figwidth() / (0.6 + 0.056 * max(map(len, labels))))  # so many inches wide is an entry
    legend = figure.legend(handles, labels, ncols=max(1, ncols), loc="outside lower center", fontsize=8, frameon=False)
    for line in legend.get_lines():
        if line.get_marker() == ".":  # one point alone would be too faint to be recognised
            line.set(alpha=0.8, markersize=7)
    return figure


def _faint(ax: "Axes", x: ndarray, y: ndarray, color: str, label: str) -> None:
    alpha = float(np.clip(150 / max(len(x), 1), 0.25, 0.6))
    ax.plot(x, y, ".", color=color, ms=4, alpha=alpha, mew=0, label=label, rasterized=True)


def _binned_mean(
    ax: "Axes",
    x: Float[ndarray, " m"],
    squares: Float[ndarray, " m"],
    color: str,
    label: str,
    *,
    exponent: float,
    root: bool = False,
) -> Float[ndarray, " b"]:
    """Means of squares in bins of x, or their roots, with bars of 2 standard errors; returns the heights.

    A bin stands at the power mean of its x: there a + b x^exponent equals its own mean over the bin, however wide that
    is. The errors are those of the logarithm, so that bars stay positive.
    """
    bins = [r for r in _bins(x) if squares[r].any()]
    mean = np.array([squares[r].mean() for r in bins])
    error = np.array([squares[r].std() / math.sqrt(len(r)) for r in bins]) / mean
    power = 0.5 if root else 1.0
    heights, factor = mean**power, np.exp(2 * power * error)
    bars = [heights - heights / factor, heights * factor - heights]
    centres = [_power_mean(x[r], exponent) for r in bins]
    ax.errorbar(centres, heights, bars, fmt="o", color=color, ms=4, lw=1.2, label=label)
    return heights


def _mark(ax: "Axes", curve: AlphaCurve, log_alpha: float, lpd: float, *, color: str, label: str) -> None:
    """A point of the curve; one beyond its ends stands there as an arrow."""
    first, last = curve.log_alphas[[0, -1]]
    marker = "<" if log_alpha < first else ">" if log_alpha > last else "o"
    x = float(np.clip(log_alpha, first, last))
    ax.axvline(x, color=color, ls=":", lw=1.2)
    ax.plot(x, lpd, marker, color=color, ms=7, label=label, zorder=3)


def _padded(values: Float[ndarray, " n"], margin: float = 0.06) -> tuple[float, float]:
    """Limits of an axis, with a margin as a share of the range."""
    lowest, highest = float(values.min()), float(values.max())
    pad = margin * (highest - lowest) or 0.1 * abs(highest) or 1.0
    return lowest - pad, highest + pad


def _central(values: Float[ndarray, " n"]) -> Float[ndarray, " r"]:
    """Without the few that lie so far out that the others would shrink to a dot."""
    low, high = np.quantile(values, [0.005, 0.995])
    reach = 0.5 * (high - low)
    return values[(values >= low - reach) & (values <= high + reach)]


def _outside(values: Float[ndarray, " n"], limits: tuple[float, float]) -> Bool[ndarray, " n"]:
    return (values < limits[0]) | (values > limits[1])


def _log_padded(values: Float[ndarray, " n"]) -> tuple[float, float]:
    return float(values.min()) / 1.2, float(values.max()) * 1.2


def _errors_axis(ax: "Axes", drawn: Float[ndarray, " d"], errors: Float[ndarray, " m"]) -> None:
    """A vertical axis for all that is drawn and the large errors; small ones, down to zero, are cut off."""
    _log_axis(ax, "y", 0.2 * float(drawn[drawn > 0].min()), 1.3 * float(max(drawn.max(), errors.max())))


def _log_axis(ax: "Axes", name: str, lowest: float, highest: float) -> None:
    """A logarithmic axis whose ticks can be read, however many or few decades it spans."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    ax.set(**{f"{name}scale": "log", f"{name}lim": (lowest, highest)})
    axis = getattr(ax, f"{name}axis")
    axis.set_minor_formatter(NullFormatter())
    if highest < 100 * lowest:
        axis.set_major_locator(
            LogLocator(subs=(1, 2, 5)) if highest > 10 * lowest else MaxNLocator(5, steps=(1, 2, 5, 10))
        )
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
