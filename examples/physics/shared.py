"""What the examples in this folder share: scores of a prediction, their table, and a curve with its band.

Each example writes its figure to the folder given as its argument, or to the current folder.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy import ndarray

from lastlayer.predictions.joint import FunctionalPrediction

Table = dict[str, tuple[float, float, float]]
"""Rows of scores by name."""


def scores(prediction: FunctionalPrediction, truth: ndarray) -> tuple[float, float, float]:
    """Root mean square error, mean log density of the truth, and share of the truth inside 90% intervals."""
    lower, upper = prediction.interval(0.9)
    rmse = np.sqrt(np.mean((prediction.mean - truth) ** 2))
    return float(rmse), float(prediction.log_prob(truth).mean()), float(np.mean((lower <= truth) & (truth <= upper)))


def report(table: Table) -> None:
    """Print the table in Markdown."""
    width = max(map(len, table))
    print(f"| {'':<{width}} | RMSE  | LPD   | inside 90% |\n|{'-' * (width + 2)}|------:|------:|-----------:|")
    for name, (rmse, lpd, inside) in table.items():
        print(f"| {name:<{width}} | {rmse:5.3f} | {lpd:5.2f} | {inside:10.0%} |")


def band(axes: Axes, x: ndarray, prediction: FunctionalPrediction, label: str, color: str, sign: int = 1) -> None:
    """Draw mean and 90% interval; with sign=-1, those of minus the prediction."""
    lower, upper = prediction.interval(0.9)
    axes.plot(x, sign * prediction.mean, color, label=label)
    axes.fill_between(x, sign * lower, sign * upper, color=color, alpha=0.2, lw=0)


def save(figure: Figure, path: Path) -> None:
    """Add legends and save the figure."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=110, pil_kwargs={"optimize": True})
    print(f"picture: {path}")
