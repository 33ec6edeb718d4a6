"""Figures 1 to 5 of the paper from new runs, in print quality."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from lastlayer.bayes.affine_cost import affine_cost
from lastlayer.bayes.hulls import distance_to_affine_hull, distance_to_convex_hull, distance_to_span
from lastlayer.plots.drawing import BLUE, GREEN, GREY, ORANGE
from lastlayer.predictions.prediction import Prediction
from lastlayer.studies.data import TEST_RANGE, TRAIN_RANGE, truth
from lastlayer.studies.networks import X_TEST, X_TRAIN, ThreeSamples, line
from lastlayer.studies.paper import Study

STYLE: dict[Any, Any] = (
    {"font.size": 8, "axes.titlesize": 8, "legend.fontsize": 7, "legend.frameon": False, "lines.linewidth": 1.3}
    | {"axes.spines.top": False, "axes.spines.right": False}
    | {"figure.dpi": 150, "savefig.dpi": 200, "pdf.fonttype": 42}
)
GAMMA = 10.0
FEATURE_SETS = {
    "three samples on a line": np.array([[-1.0, -0.5], [0.0, 0.0], [1.0, 0.5]]),
    "three samples in general position": np.array([[-1.0, -0.6], [0.2, 0.9], [1.0, -0.4]]),
}
TEST_POINTS = np.array([[0.4, 0.3], [1.2, -1.1]])
GRID = np.linspace(-1.8, 1.8, 61)
GRID_POINTS = torch.from_numpy(np.stack(np.meshgrid(GRID, GRID), -1).reshape(-1, 2))
X = np.linspace(*TEST_RANGE, 300)[:, None]


def draw_all(study: Study, three: ThreeSamples, folder: Path) -> None:
    """Write all figures as PNG and PDF; the same study gives the same bytes."""
    with mpl.rc_context(STYLE):
        figures = hulls(), alpha_and_features(three), alpha_curves(three), two_outputs(study), bnn(study)
        for i, figure in enumerate(figures, 1):
            figure.savefig(folder / f"figure{i}.png", metadata={"Software": None})
            figure.savefig(folder / f"figure{i}.pdf", metadata={"CreationDate": None, "Producer": None})


def hulls() -> Figure:
    """Figure 1: convex hull, span, affine hull and affine cost for two sets of features."""
    figure = Figure(figsize=(7.2, 3.9), layout="constrained")
    axes = figure.subplots(2, 4, sharex=True, sharey=True)
    panels = {
        "convex hull": distance_to_convex_hull,
        "span": distance_to_span,
        "affine hull": distance_to_affine_hull,
        f"affine cost, gamma = {GAMMA:g}": lambda x, X: affine_cost(x, X, GAMMA),
    }
    halo = [withStroke(linewidth=2, foreground="white")]
    for i, (label, samples) in enumerate(FEATURE_SETS.items()):
        for ax, (title, measure) in zip(axes[i], panels.items(), strict=True):
            values = measure(GRID_POINTS, torch.from_numpy(samples)).reshape(len(GRID), -1).numpy()
            distance = "cost" not in title
            levels = [0.25, 0.5, 1.0, 1.5] if distance else [0.4, 0.6, 1, 2, 4, 8, 16, 32]
            if distance:
                ax.contourf(GRID, GRID, values, levels=[-1, 0.03], colors=[BLUE], alpha=0.45)
            ax.contour(GRID, GRID, values, levels=levels, colors=GREY, linewidths=0.7)
            ax.plot(*samples.T, "o", color="black", ms=4)
            at_points = measure(torch.from_numpy(TEST_POINTS), torch.from_numpy(samples)).tolist()
            for point, value in zip(TEST_POINTS, at_points, strict=True):
                ax.plot(*point, "x", color=ORANGE, ms=5, mew=1.5)
                text = "0" if value < 1e-6 else f"{value:.2g}"
                words = {"ha": "right", "va": "center", "color": ORANGE, "fontsize": 7, "path_effects": halo}
                ax.annotate(text, point, xytext=(-5, 3), textcoords="offset points", **words)
            ax.set(aspect="equal", title=title if i == 0 else "")
        axes[i, 0].set_ylabel(label, fontsize=7)
    return figure


def alpha_and_features(three: ThreeSamples) -> Figure:
    """Figure 2: mean, band and feature space of three samples for three values of alpha."""
    own, best = three.log_alphas
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots(2, 3, sharex="row", sharey="row")
    test, train = three.turned_features(X_TEST), three.turned_features(X_TRAIN)
    alphas = {"alpha*": own, "between": (own + best) / 2, "alpha^max": best}
    functions = [three.predict(X_TEST, log_alpha) for log_alpha in alphas.values()]
    predictions = [(p.mean[:, 0], np.sqrt(p.epistemic_var[:, 0])) for p in functions]
    shades = np.log10(np.concatenate([std for _, std in predictions]))
    for i, ((name, log_alpha), (mean, std)) in enumerate(zip(alphas.items(), predictions, strict=True)):
        top, bottom = axes[0, i], axes[1, i]
        top.fill_between(X_TEST[:, 0], mean - 3 * std, mean + 3 * std, color=BLUE, alpha=0.25, lw=0, label="3 std")
        top.plot(X_TEST[:, 0], mean, color=BLUE, label="mean")
        top.plot(X_TEST[:, 0], line(X_TEST)[:, 0], color=ORANGE, ls="--", label="truth")
        top.plot(X_TRAIN[:, 0], line(X_TRAIN)[:, 0], "o", color="black", ms=4, label="samples")
        top.set(title=f"{name}: log alpha = {log_alpha:.1f}", xlabel="x")
        bottom.axhline(0, color=GREY, lw=0.7, label="affine hull")
        points = bottom.scatter(*test.T, c=np.log10(std), s=6, vmin=shades.min(), vmax=shades.max(), label="test")
        bottom.plot(*train.T, "o", color="black", ms=4, label="samples")
        bottom.set_xlabel("along the affine hull")
    figure.colorbar(points, ax=axes[1, :], label="log10 std")
    axes[0, 0].set_ylabel("y")
    axes[1, 0].set_ylabel("off the affine hull")
    axes[0, 0].legend()
    axes[1, 0].legend(loc="lower left")
    return figure


def alpha_curves(three: ThreeSamples) -> Figure:
    """Figure 3: log predictive density and NLML against log alpha."""
    own, best = three.log_alphas
    log_alphas = np.linspace(own - 6, max(own, best) + 8, 120)
    figure = Figure(figsize=(3.6, 3.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.plot(log_alphas, three.lpd(X_TRAIN, log_alphas), color=GREY, label="training samples")
    top.plot(log_alphas, three.lpd(X_TEST, log_alphas), color=BLUE, label="test points")
    top.set_ylabel("log predictive density")
    top.set_yscale("asinh", linear_width=1.0)
    top.set_yticks([1, 0, -1, -10, -100, -1000], ["1", "0", "-1", "-10", "-100", "-1000"])
    top.minorticks_off()
    bottom.plot(log_alphas, three.nlml(log_alphas), color=BLUE)
    bottom.set(xlabel="log alpha", ylabel="NLML per sample")
    for ax in (top, bottom):
        ax.axvline(own, color=GREEN, ls=":", label="alpha*")
        if np.isfinite(three.curve.log_alpha):
            ax.axvline(three.curve.log_alpha, color=ORANGE, ls=":", label="alpha^max")
    top.legend(loc="lower right", frameon=True, framealpha=1, edgecolor="none")
    return figure


def two_outputs(study: Study) -> Figure:
    """Figure 4: both outputs with bands at alpha* and at the honest alpha^max, first initialisation."""
    network = study.bll[0]
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey="row")
    alphas = {"alpha*": float(network.posterior.log_alpha), "honest alpha^max": network.honest.log_alpha}
    for j, (name, log_alpha) in enumerate(alphas.items()):
        p = network.predict(X, log_alpha)
        for i in range(2):
            _panel(axes[i, j], study, p, i)
        axes[0, j].set_title(f"{name}: log alpha = {log_alpha:.1f}")
        axes[1, j].set_xlabel("x")
    axes[0, 0].legend(ncols=2)
    return figure


def bnn(study: Study) -> Figure:
    """Figure 5: draws of the Bayesian neural network and its mixture, first initialisation."""
    draws, p = study.bnn[0].draw_functions(X), study.bnn[0].predictive(X)
    figure = Figure(figsize=(3.6, 3.8), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for i, ax in enumerate(axes):
        ax.plot(X[:, 0], draws[:30, :, i].T, color=BLUE, alpha=0.25, lw=0.5)
        _panel(ax, study, p, i)
    axes[0].legend(ncols=2)
    axes[1].set_xlabel("x")
    return figure


def _panel(ax: Axes, study: Study, p: Prediction, i: int) -> None:
    """One output: truth, training and test samples, the training range, mean and band."""
    ax.plot(X[:, 0], truth(X)[:, i], color=ORANGE, ls="--", label="truth")
    for part, marker, label in ((study.data.train, ".", "train"), (study.data.test, "x", "test")):
        ax.plot(part.X[:, 0], part.y[:, i], marker, color="black", ms=2.5, mew=0.5, alpha=0.6, label=label)
    ax.axvspan(*TRAIN_RANGE, color="black", alpha=0.04, lw=0)
    lower, upper = p.interval(0.997)
    ax.fill_between(X[:, 0], lower[:, i], upper[:, i], color=BLUE, alpha=0.25, lw=0, label="99.7%")
    ax.plot(X[:, 0], p.mean[:, i], color=BLUE, label="mean")
    spread = study.data.test.y[:, i]
    ax.set(ylim=(spread.min() - 1.5, spread.max() + 1.5), ylabel=f"y{i + 1}")
