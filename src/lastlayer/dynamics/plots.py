"""Plots of predicted trajectories; each function returns a matplotlib figure."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer.dynamics.rollout import Rollout
from lastlayer.plots.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, legend_of, new_figure, padded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = (BLUE, ORANGE, GREEN, PURPLE, GREY)


def trajectories(
    rollouts: Mapping[str, Rollout],
    outputs: Float[ndarray, "b h q"],
    *,
    trajectory: int = 0,
    level: float = 0.9,
    around_mean: bool = False,
    names: Sequence[str] | None = None,
    xlabel: str = "step",
) -> "Figure":
    """Plot one trajectory as predicted by several models (columns): outputs with measurements, and the affine cost.

    Parameters
    ----------
    rollouts, outputs : mapping of str to Rollout, ndarray of shape (b, h, q)
        Predictions by the name of their model, and the measured outputs.
    trajectory : int, default 0
        Index of the trajectory to plot.
    level : float, default 0.9
        Probability of the bands.
    around_mean : bool, default False
        Whether to subtract the predicted mean from everything, where bands are narrow compared with the trajectory.
    names, xlabel : sequence of str, str
        Names of the outputs, by default "output 1" and so on, and the label of the horizontal axis.
    """
    q = outputs.shape[-1]
    names = [f"output {i + 1}" for i in range(q)] if names is None else names
    figure = new_figure(max(6.0, 3.4 * len(rollouts)), 1.6 * (q + 1) + 0.8)
    axes = figure.subplots(q + 1, len(rollouts), sharex=True, sharey="row", squeeze=False)
    steps = np.arange(1, outputs.shape[1] + 1)
    measured = outputs[trajectory]
    for column, (name, rollout), color in zip(axes.T, rollouts.items(), COLORS, strict=False):
        one = rollout[trajectory : trajectory + 1]
        lower, upper = one.interval(level)
        inside = ((measured >= lower[0]) & (measured <= upper[0])).mean()
        column[0].set_title(f"{name}: {inside:.0%} in {level:.0%} bands", fontsize=9)
        mean = one.mean[0]
        zero = mean if around_mean else np.zeros_like(mean)
        for i, ax in enumerate(column[:-1]):
            low, high, middle, points = ((x - zero)[:, i] for x in (lower[0], upper[0], mean, measured))
            ax.fill_between(steps, low, high, color=color, alpha=0.3, lw=0, label=f"{level:.0%} band")
            ax.plot(steps, middle, color=color, lw=1.3, label="mean")
            ax.plot(steps, points, ".", color="black", ms=2.5, label="measured")
        column[-1].semilogy(steps, one.affine_cost[0], color=color, lw=1.3)
        column[-1].set_xlabel(xlabel)
    for ax, name in zip(axes[:, 0], [*names, "affine cost"], strict=True):
        ax.set_ylabel(name)
    for i, row in enumerate(axes[:-1]):
        if not around_mean:  # a diverging band must not flatten the rest
            row[0].set_ylim(padded(measured[:, i], 0.8))
    legend_of(figure, axes, ncols=3)
    return figure


def density_by_step(lpd: Mapping[str, Float[ndarray, " h"]]) -> "Figure":
    """Plot the LPD against the number of steps ahead, with one line per model.

    Parameters
    ----------
    lpd : mapping of str to ndarray of shape (h,)
        LPD at each number of steps ahead, by the name of the model.
    """
    figure = new_figure(6.0, 3.2)
    ax = figure.subplots()
    for (name, values), color in zip(lpd.items(), COLORS, strict=False):
        ax.plot(np.arange(1, len(values) + 1), values, color=color, lw=1.4, label=name)
    ax.set(xlabel="steps ahead", ylabel="LPD, summed over outputs", yscale="symlog")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False)
    return figure
