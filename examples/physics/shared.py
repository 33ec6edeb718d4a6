"""What the examples in this folder share: scores of a prediction, their table, and a curve with its band.

Each example writes its picture to the folder that is its argument, or to the present one.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy import ndarray

from lastlayer.prediction import FunctionalPrediction

Table = dict[str, tuple[float, float, float]]
"""Rows with their scores."""


def scores(prediction: FunctionalPrediction, truth: ndarray) -> tuple[float, float, float]:
    """Root mean square error, mean log density of the truth, and share of the truth inside 90% intervals."""
    lower, upper = prediction.interval(0.9)
    rmse = np.sqrt(np.mean((prediction.mean - truth) ** 2))
    return float(rmse), float(prediction.log_prob(truth).mean()), float(np.mean((lower <= truth) & (truth <= upper)))


def report(table: Table) -> None:
    width = max(map(len, table))
    print(f"| {'':<{width}} | RMSE  | LPD   | inside 90% |\n|{'-' * (width + 2)}|------:|------:|-----------:|")
    for name, (rmse, lpd, inside) in table.items():
        print(f"| {name:<{width}} | {rmse:5.3f} | {lpd:5.2f} | {inside:10.0%} |")


def band(axes: Axes, x: ndarray, prediction: FunctionalPrediction, label: str, color: str, sign: int = 1) -> None:
    """Mean and 90% interval; with sign=-1 of minus the prediction."""
    lower, upper = prediction.interval(0.9)
    axes.plot(x, sign * prediction.mean, color, label=label)
    axes.fill_between(x, sign * lower, sign * upper, color=color, alpha=0.2, lw=0)


def save(figure: Figure, path: Path) -> None:
    """With legends."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=110, pil_kwargs={"optimize": True})
    print(f"picture: {path}")
