"""Pictures for people who want to see what a model knows; each function returns a matplotlib figure."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer.regressor import BLLRegressor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#1f5fa8", "#d9731a", "#8a8a8a"


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
    from matplotlib.figure import Figure

    grid = np.linspace(*span, n)[:, None]
    targets, function = model.predictive(grid), model.predictive(grid, noise=False)
    q = targets.mean.shape[1]
    figure = Figure(figsize=(8, 2.4 * q + 1.3), layout="constrained", dpi=150)
    axes = figure.subplots(q + 1, 1, sharex=True, height_ratios=[3] * q + [1.3])
    for i, ax in enumerate(axes[:-1]):
        for p, shade, label in ((targets, 0.18, "95% of targets"), (function, 0.38, "95% of the function")):
            lower, upper = p.interval(0.95)
            ax.fill_between(grid[:, 0], lower[:, i], upper[:, i], color=BLUE, alpha=shade, lw=0, label=label)
        ax.plot(grid[:, 0], targets.mean[:, i], color=BLUE, lw=1.6, label="mean")
        if truth is not None:
            ax.plot(grid[:, 0], truth(grid)[:, i], color=ORANGE, lw=1.2, ls="--", label="truth")
        ax.plot(X[:, 0], y[:, i], ".", color="black", ms=3, label="training data")
        inside = np.concatenate([y[:, i], targets.mean[:, i]])
        margin = 0.6 * (inside.max() - inside.min())
        ax.set_ylim(inside.min() - margin, inside.max() + margin)
        ax.set_ylabel(f"output {i + 1}")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=5, loc="outside upper center", fontsize=8, frameon=False)
    axes[-1].semilogy(grid[:, 0], targets.affine_cost, color=GREY, lw=1.4)
    axes[-1].set(xlabel="input", ylabel="affine cost", xlim=span)
    for ax in axes:
        ax.axvspan(float(X.min()), float(X.max()), color="black", alpha=0.04, lw=0)
        ax.spines[["top", "right"]].set_visible(False)
    return figure
