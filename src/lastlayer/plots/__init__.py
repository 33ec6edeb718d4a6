"""Plots of a model and of its predictions; each function returns a matplotlib figure."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer._internal.arrays import as_array, check_finite
from lastlayer.calibration.alpha import AlphaCurve
from lastlayer.calibration.curve import Calibration
from lastlayer.errors import InputError
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.explain import Dependence, Importance, additive_effects
from lastlayer.plots import drawing
from lastlayer.plots.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, faint, finish, log_axis, padded, panels, some
from lastlayer.predictions.metrics import LEVELS, calibration_error, rmse
from lastlayer.predictions.prediction import Prediction, align

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {"random": BLUE, "blocked": ORANGE, "shell": PURPLE, "given": GREEN, "validation": PURPLE}


def one_input(
    model: BLLRegressor,
    X: Float[ndarray, "m 1"],
    y: Float[ndarray, "m *q"],
    *,
    span: tuple[float, float],
    truth: Callable[[ndarray], ndarray] | None = None,
    n: int = 400,
) -> "Figure":
    """Plot a model over its single input: mean, bands and data of each output, and the affine cost below.

    The dark band contains the function and the light band the targets, each with 95% probability.

    Parameters
    ----------
    model : BLLRegressor
        Fitted model with one input.
    X, y : array of shape (m, 1), array of shape (m,) or (m, q)
        Training rows; the range of their inputs is shaded.
    span : tuple of two floats
        Smallest and largest input to draw.
    truth : callable, optional
        True function, from inputs of shape (n, 1) to outputs of shape (n,) or (n, q), drawn as a dashed line.
    n : int, default 400
        Number of points of the grid.
    """
    grid = np.linspace(*span, n)[:, None]
    targets, function = (model.predictive(grid, noise=noise).with_output_axis() for noise in (True, False))
    y, q = align(y, (len(X), targets.n_outputs)), targets.n_outputs
    figure = drawing.new_figure(8.0, 2.4 * q + 1.3)
    axes = figure.subplots(q + 1, 1, sharex=True, height_ratios=[3] * q + [1.3])
    for i, ax in enumerate(axes[:-1]):
        for p, shade, label in ((targets, 0.18, "95% of targets"), (function, 0.38, "95% of the function")):
            lower, upper = p.interval(0.95)
            ax.fill_between(grid[:, 0], lower[:, i], upper[:, i], color=BLUE, alpha=shade, lw=0, label=label)
        ax.plot(grid[:, 0], targets.mean[:, i], color=BLUE, lw=1.6, label="mean")
        if truth is not None:
            ax.plot(grid[:, 0], align(truth(grid), (n, q))[:, i], color=ORANGE, lw=1.2, ls="--", label="truth")
        ax.plot(X[:, 0], y[:, i], ".", color="black", ms=3, label="training data")
        ax.set_ylim(padded(np.concatenate([y[:, i], targets.mean[:, i]]), 0.6))
        ax.set_ylabel(f"output {i + 1}")
    drawing.legend_of(figure, axes, ncols=5, loc="outside upper center")
    axes[-1].semilogy(grid[:, 0], targets.affine_cost, color=GREY, lw=1.4)
    axes[-1].set(xlabel="input", ylabel="affine cost", xlim=span)
    for ax in axes:
        ax.axvspan(float(X.min()), float(X.max()), color="black", alpha=0.04, lw=0)
    return figure


def parity(prediction: Prediction, y: ndarray, *, level: float = 0.9) -> "Figure":
    """Plot predictions with their central intervals against the targets; misses are coloured.

    The range that each title calls good contains the share of a perfectly calibrated model in 95% of samples of this
    size.

    Parameters
    ----------
    prediction, y : Prediction, array of shape (m,) or (m, q)
        Predictive distribution of m points, noise included, and their targets, not used in the fit.
    level : float, default 0.9
        Probability of the intervals.
    """
    prediction, y = _aligned(prediction, y)
    lower, upper = prediction.interval(level)
    inside = (lower <= y) & (y <= upper)
    rows, shown = some(len(y), drawing.SHOWN // 4)  # bars need more space than points
    figure, axes = panels(y.shape[1])
    for i, ax in enumerate(axes[0]):
        target, mean = y[rows, i], prediction.point[rows, i]
        xlim, ylim = padded(drawing.central(target)), padded(drawing.central(np.append(target, mean)))
        for hit, color, word in ((inside, BLUE, f"target inside its interval{shown}"), (~inside, ORANGE, "outside")):
            r = rows[hit[rows, i]]
            ax.vlines(y[r, i], lower[r, i], upper[r, i], color=color, alpha=0.25, lw=0.8)
            ax.plot(y[r, i], prediction.point[r, i], ".", color=color, ms=3.5, label=word)
        ax.axline((y[0, i], y[0, i]), slope=1, color="black", ls="--", lw=1, label="prediction = target")
        ax.set(xlim=xlim, ylim=ylim)
        if beyond := int(((target != target.clip(*xlim)) | (mean != mean.clip(*ylim))).sum()):
            ax.text(0.98, 0.02, f"{beyond} beyond the axes", ha="right", transform=ax.transAxes, fontsize=8, color=GREY)
    least, most = (100 * bound for bound in drawing.binomial_band(len(y), level))
    titles = [f"{share:.1%} inside, good: {least:.1f} to {most:.1f}%" for share in inside.mean(0)]
    good = f"Good: {100 * level:g}% of the bars cross the diagonal, misses on both sides of it"
    return finish(figure, axes, good, "target", f"prediction with {100 * level:g}% interval", titles=titles)


def calibration_curve(prediction: Prediction | Mapping[str, Prediction], y: ndarray) -> "Figure":
    """Plot the share of targets inside central intervals against the level of the intervals.

    The band contains the curve of a perfectly calibrated model, level by level, in 95% of samples of this size,
    provided that errors at different points are independent; far from the data, those of neighbouring points are
    correlated.

    Parameters
    ----------
    prediction, y : Prediction or mapping of str to Prediction, array of shape (m,) or (m, q)
        Predictive distribution of m points, noise included, several models by name, and their targets.
    """
    models = prediction if isinstance(prediction, Mapping) else {"": prediction}
    if not models:
        raise InputError("the mapping has no prediction: pass {name: prediction}, or a single prediction")
    aligned = {name: _aligned(p, y, name) for name, p in models.items()}
    y = next(iter(aligned.values()))[1]
    levels = np.concatenate([[0], LEVELS, [1]])
    lower, upper = drawing.binomial_band(len(y), levels)
    figure, axes = panels(y.shape[1])
    for ax in axes[0]:
        ax.fill_between(levels, lower, upper, color="black", alpha=0.12, lw=0, label="a perfect model, 95% of the time")
        ax.plot([0, 1], [0, 1], color="black", ls="--", lw=1, label="share = level")
        ax.set(xlim=(0, 1), ylim=(0, 1))
    looks = cycle(product(("-", "--", ":"), (BLUE, ORANGE, GREEN, PURPLE)))
    good = "Good: in the band; below it intervals are too narrow, above too wide"
    for (name, (p, _)), (style, color) in zip(aligned.items(), looks, strict=False):
        error = f"calibration error {calibration_error(p, y):.3f}"
        distance = np.abs(2 * p.cdf(y) - 1)  # the smallest level whose interval contains the target
        for i, ax in enumerate(axes[0]):
            shares = (distance[:, i, None] <= LEVELS).mean(0)
            label = f"{name}: {error}" if name else "prediction"
            ax.plot(LEVELS, shares, "o", ls=style, color=color, ms=3, lw=1.3, label=label)
        if not name:
            good = f"{error}\n{good}"
    return finish(figure, axes, good, "level of the central interval", "share of targets inside")


def sharpness(prediction: Prediction, y: ndarray) -> "Figure":
    """Plot absolute errors against predicted standard deviations, and the distribution of the latter below.

    Parameters
    ----------
    prediction, y : Prediction, array of shape (m,) or (m, q)
        Predictive distribution of m points, noise included, and their targets, not used in the fit.
    """
    prediction, y = _aligned(prediction, y)
    std, error = prediction.std, np.abs(y - prediction.point)
    rows, shown = some(len(y))
    figure, axes = panels(y.shape[1], heights=(3.0, 1.2))
    for i, (top, bottom) in enumerate(axes.T):
        span = drawing.log_padded(std[:, i])
        faint(top, std[rows, i], error[rows, i], GREY, f"absolute errors{shown}")
        root = drawing.binned_mean(top, std[:, i], np.square(error[:, i]), ORANGE, "RMSE", exponent=2.0, power=0.5)
        top.plot(span, span, color="black", ls="--", lw=1, label="RMSE = predicted std")
        bottom.hist(std[:, i], np.geomspace(*span, 41), color=BLUE, alpha=0.6)
        drawing.errors_axis(top, np.append(root, span), error[:, i])
        for ax in (top, bottom):
            log_axis(ax, "x", *span)
        top.tick_params(labelbottom=False)
    pairs = zip(rmse(prediction, y, per_output=True), np.sqrt(np.square(std).mean(0)), strict=True)
    titles = [f"RMSE {e:.3g}, predicted {s:.3g}" for e, s in pairs]
    good = "Good: bins on the diagonal (above it: overconfident);\nof two models on it, the one farther left"
    return finish(figure, axes, good, "predicted standard deviation", "absolute error", "points", titles=titles)


def alpha_curve(curve: AlphaCurve, *, alpha_star: float | None = None) -> "Figure":
    """Plot the validation LPD against log alpha, with alpha^max, the limit of infinite alpha, and alpha*.

    Parameters
    ----------
    curve : AlphaCurve
        Result of tuning alpha on validation points (Algorithm 1).
    alpha_star : float, optional
        The alpha that maximises the evidence: `model.alpha_star_`.
    """
    if alpha_star is not None and not alpha_star >= 0:
        raise InputError(f"alpha_star={alpha_star} must not be negative: pass model.alpha_star_")
    figure, axes = panels(1)
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
    return finish(figure, axes, str(curve), "log α", "LPD (larger is better)")


def _mark(ax: "Axes", curve: AlphaCurve, log_alpha: float, lpd: float, *, color: str, label: str) -> None:
    """Mark a point of the curve; an alpha beyond its ends is drawn as an arrow at the end."""
    first, last = curve.log_alphas[[0, -1]]
    marker = "<" if log_alpha < first else ">" if log_alpha > last else "o"
    x = float(np.clip(log_alpha, first, last))
    ax.axvline(x, color=color, ls=":", lw=1.2)
    ax.plot(x, lpd, marker, color=color, ms=7, label=label, zorder=3)


def extrapolation_error(prediction: Prediction, y: ndarray) -> "Figure":
    """Plot absolute errors in predicted standard deviations against the affine cost.

    Quantiles in bins show whether error bars hold far from the data, and around their Gaussian values the bands that
    sampling noise alone explains.

    Parameters
    ----------
    prediction, y : Prediction, array of shape (m,) or (m, q)
        Predictive distribution of m points, noise included, and their targets, not used in the fit.
    """
    prediction, y = _aligned(prediction, y)
    check_finite(prediction.affine_cost, "affine_cost")
    cost = drawing.positive(prediction.affine_cost)
    scaled = np.abs(y - prediction.point) / prediction.std
    bins = drawing.Bins.of(cost)
    rows, shown = some(len(y))
    figure, axes = panels(y.shape[1])
    for i, ax in enumerate(axes[0]):
        faint(ax, cost[rows], scaled[rows, i], GREY, f"targets{shown}")
        drawn = []
        for level, color in ((0.9, ORANGE), (0.5, BLUE)):
            lower, upper = np.transpose([drawing.quantile_band(len(r), level) for r in bins.rows])
            ax.fill_between(bins.edges, lower.repeat(2), upper.repeat(2), color=color, alpha=0.18, lw=0)
            gaussian, label = drawing.half_normal(level), f"{level:.0%} quantile of a Gaussian"
            ax.axhline(gaussian, color=color, ls="--", lw=1, label=label)
            quantiles = [np.quantile(scaled[r, i], level) for r in bins.rows]
            ax.plot(bins.centre, quantiles, "o-", color=color, ms=4, lw=1.5, label=f"{level:.0%} quantile in bins")
            drawn += [*quantiles, *lower, *upper]
        log_axis(ax, "x", *drawing.log_padded(cost))
        drawing.errors_axis(ax, np.array(drawn), scaled[:, i])
    good = "Good: lines in their bands (sampling noise) all the way;\nabove: error bars are too short there"
    return finish(figure, axes, good, "affine cost (degree of extrapolation)", "absolute error / predicted std")


def coverage_by_cost(prediction: Prediction, y: ndarray, *, level: float = 0.9) -> "Figure":
    """Plot the share of targets inside their central intervals against the affine cost.

    The band contains the share of a perfectly calibrated model in 95% of samples of a bin's size; far from the data,
    errors of neighbouring points are correlated.

    Parameters
    ----------
    prediction, y : Prediction, array of shape (m,) or (m, q)
        Predictive distribution of m points, noise included, and their targets, not used in the fit.
    level : float, default 0.9
        Probability of the intervals.
    """
    prediction, y = _aligned(prediction, y)
    check_finite(prediction.affine_cost, "affine_cost")
    lower, upper = prediction.interval(level)
    bins = drawing.Bins.of(prediction.affine_cost)
    share, low, high = bins.coverage((lower <= y) & (y <= upper), level)
    figure, axes = panels(y.shape[1])
    for i, ax in enumerate(axes[0]):
        ax.fill_between(bins.edges, low, high, color="black", alpha=0.12, lw=0, label="a perfect model")
        ax.axhline(level, color="black", ls="--", lw=1, label=f"{level:.0%}")
        ax.plot(bins.centre, share[:, i], "o-", color=BLUE, ms=4, lw=1.5, label="share inside, in bins")
        log_axis(ax, "x", *drawing.log_padded(drawing.positive(prediction.affine_cost)))
        ax.set_ylim(0, 1.02)
    good = "Good: in the band all the way; below it intervals are too narrow there"
    return finish(figure, axes, good, "affine cost (degree of extrapolation)", "share of targets inside")


def cost_to_variance(calibration: Calibration | None) -> "Figure":
    """Plot the calibrated map from affine cost to variance over noise variance, with the held-out errors.

    With tails, a thinner line adds their variance, which the squared errors contain as well. In a mixture of several
    prior precisions, curve and points are those of the best family alone; at points where its variance is large, other
    families have more weight in the mixture.

    Parameters
    ----------
    calibration : Calibration or None
        `model.calibration_` of a fitted model.
    """
    if calibration is None or not len(calibration.points.cost):
        raise InputError(
            f"calibration={calibration} has no held-out points: fit the model with calibration, or call "
            "model.calibrate(X, y) with rows that it has not seen, then pass model.calibration_"
        )
    curve, points, tails = calibration.curve, calibration.points, calibration.tails
    cost, errors = drawing.positive(points.cost), points.squared_error
    grid = np.geomspace(*drawing.log_padded(cost), 200)
    calibrated = curve.factor(grid)
    rows, shown = some(len(cost))
    figure, axes = panels(errors.shape[1])
    for i, ax in enumerate(axes[0]):
        drawn = [calibrated[:, i]]
        for kind in np.unique(points.kind)[::-1]:  # blocked points last, on top: they are fewer far out
            color, of_kind = KINDS.get(kind, GREY), points.kind == kind
            r = rows[of_kind[rows]]
            faint(ax, cost[r], errors[r, i], color, f"{kind} held-out{shown}")
            x, squares = cost[of_kind], errors[of_kind, i]
            drawn.append(drawing.binned_mean(ax, x, squares, color, f"{kind}, mean", exponent=curve.power))
        ax.plot(grid, calibrated[:, i], color="black", lw=1.8, label=r"calibrated, $a + b\,v^\gamma$")
        if tails.share:
            label = f"with tails, {tails.widening:.3g} times as much"
            ax.plot(grid, tails.widening * calibrated[:, i], color="black", lw=0.9, label=label)
        ax.plot(grid, 1 + grid, color="black", ls="--", lw=1.2, label="uncalibrated, $1 + v$")
        log_axis(ax, "x", grid[0], grid[-1])
        drawing.errors_axis(ax, np.concatenate(drawn), errors[:, i])
    good = (
        f"held-out LPD {calibration.lpd_before:.3f} uncalibrated, {calibration.lpd:.3f} calibrated\n"
        f"Good: means in bins on the {'thin' if tails.share else 'solid'} line"
    )
    pairs = zip(curve.noise, curve.slope, strict=True)
    titles = [rf"${a:.3g} + {b:.3g}\,v^{{{curve.power:.3g}}}$" for a, b in pairs]
    return finish(figure, axes, good, "affine cost $v$", "squared error / noise variance", titles=titles)


def importance(found: Sequence[Importance], *, targets: Sequence[str] | None = None) -> "Figure":
    """Plot the permutation importance of each input: the RMSE added by shuffling it, and two standard deviations.

    Parameters
    ----------
    found, targets : sequence of Importance, sequence of str
        Result of `lastlayer.explain.permutation_importance`, and optionally the names of the targets.
    """
    if not found:
        raise InputError("there is no input to draw: pass the result of permutation_importance")
    names = targets or [f"output {j + 1}" for j in range(len(found[0].rmse))]
    figure = drawing.new_figure(max(5.0, 4.0 * len(names)), 1.2 + 0.3 * len(found))
    for j, (ax, name) in enumerate(zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True)):
        ranked = sorted(found, key=lambda one: one.rmse[j])
        lost, error = ([getattr(one, word)[j] for one in ranked] for word in ("rmse", "rmse_std"))
        ax.barh([one.name for one in ranked], lost, xerr=2 * np.array(error), color=BLUE, ecolor=GREY)
        ax.axvline(0, color="black", lw=0.8)
        ax.set(title=name, xlabel="RMSE lost without the input")
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def partial_dependence(
    found: Sequence[Dependence], *, targets: Sequence[str] | None = None, level: float = 0.9
) -> "Figure":
    """Plot how predictions depend on each input: average, band of the function, band of single measurements.

    Parameters
    ----------
    found, targets : sequence of Dependence, sequence of str
        Result of `lastlayer.explain.partial_dependence`, and optionally the names of the targets.
    level : float, default 0.9
        Probability of the bands.
    """
    if not found:
        raise InputError("there is no input to draw: pass the result of partial_dependence")
    names = targets or [f"output {j + 1}" for j in range(found[0].mean.shape[1])]
    words = (True, 0.18, f"{level:.0%} of measurements"), (False, 0.4, f"{level:.0%} of the function")
    figure, axes = panels(len(found), [2.0] * len(names))
    for j, name in enumerate(names):
        ends = np.concatenate([bound[:, j] for each in found for bound in each.band(level)])
        for i, (ax, one) in enumerate(zip(axes[j], found, strict=True)):
            for noise, shade, label in words:
                lower, upper = (bound[:, j] for bound in one.band(level, noise=noise))
                if one.labels is None:
                    ax.fill_between(one.x, lower, upper, color=BLUE, alpha=shade, lw=0, label=label)
                else:
                    ax.vlines(one.x, lower, upper, color=BLUE, alpha=shade, lw=8, label=label)
            ax.plot(one.x, one.mean[:, j], "-" if one.labels is None else "o", color=BLUE, ms=4, label="average")
            if one.labels is not None:
                shown = np.unique(np.linspace(0, len(one.x) - 1, min(len(one.x), 8)).round().astype(int))
                ax.set_xticks(one.x[shown], [one.labels[k] for k in shown], rotation=30 if len(shown) > 3 else 0)
                ax.set_xlim(-0.5, len(one.x) - 0.5)
            ax.set(ylim=padded(ends), xlabel=one.name, ylabel=name if i % drawing.COLUMNS == 0 else "")
    drawing.legend_of(figure, axes, ncols=3)
    return figure


def additive_curves(model: Any, *, names: Sequence[str] | None = None, output: int = 0) -> "Figure":
    """Plot the effect of each input, with a band that contains the function with 95% probability.

    Parameters
    ----------
    model, names : fitted regressor, sequence of str
        As for `lastlayer.explain.additive_effects`.
    output : int, default 0
        Which target, counted from 0.
    """
    effects = additive_effects(model, names=names)
    means = np.array([effect.mean[:, output] for effect in effects])
    bands = 1.96 * np.array([effect.std[:, output] for effect in effects])
    figure, axes = panels(len(effects))
    for ax, effect, mean, band in zip(axes[0], effects, means, bands, strict=True):
        ax.fill_between(effect.x, mean - band, mean + band, color=BLUE, alpha=0.25, lw=0)
        ax.plot(effect.x, mean, color=BLUE, lw=1.4)
        ax.set(xlabel=effect.name, ylim=padded(np.append(means - bands, means + bands)))
    axes[0, 0].set_ylabel("effect on the target")
    figure.suptitle("What each input adds, by the additive members; band: 95% of the function", fontsize=9)
    return figure


def _aligned(prediction: Prediction, y: ndarray, name: str = "") -> tuple[Prediction, Float[ndarray, "m q"]]:
    """Check that prediction and targets belong together, and return both with an axis for the outputs."""
    prediction = prediction.with_output_axis()
    m, q = prediction.shape
    which = f"prediction {name!r}" if name else "prediction"
    y = np.asarray(as_array(y), dtype=float)
    y = y[:, None] if y.ndim == 1 and q == 1 else y
    if y.shape != (m, q) or m == 0:
        raise InputError(
            f"y has shape {y.shape}, but the {which} has {m} points and {q} outputs: "
            f"pass the targets of the predicted points, shape ({m}, {q}), at least one"
        )
    check_finite(y, "y")
    check_finite(prediction.point, f"the mean of the {which}")
    bad = np.flatnonzero(~((prediction.std > 0) & np.isfinite(prediction.std)).all(1))
    if len(bad):
        raise InputError(
            f"the {which} has a zero or infinite standard deviation at {len(bad)} points (first: row {bad[0]}): "
            "predict targets with noise, or drop these points"
        )
    return prediction, y
