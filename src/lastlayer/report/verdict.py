"""Verdict on the intervals in plain English: on all rows, by fifth of the prediction, by group, outside the data."""

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from lastlayer.plots.drawing import binomial_band
from lastlayer.report.figures import LEVEL, Evaluation
from lastlayer.tables.cells import as_texts
from lastlayer.tables.numbers import percent, written

FIFTHS, MOST_GROUPS = 5, 20
NARROW, WIDE, RIGHT = "too narrow", "wider than needed", "as expected"


def judged(share: float, m: int) -> str:
    """Judge 90% intervals by the share of m true values inside, assuming independent errors."""
    low, high = _allowed(m)
    return NARROW if share < low else WIDE if share > high else RIGHT


def verdict(evaluation: Evaluation) -> tuple[str, bool]:
    """Return a line on whether intervals hold and how many rows are outside, and whether it is a warning."""
    inside, outside, m = evaluation.inside(), evaluation.outside, len(evaluation.y)
    judgements: dict[str, list[str]] = {}
    for name, share in zip(evaluation.names, inside.mean(0), strict=True):
        count = f"{round(share * m):,} of {m:,} true values of {name} ({share:.0%})"
        judgements.setdefault(judged(share, m), []).append(count)
    hold = {RIGHT: "hold", NARROW: f"are {NARROW} on these rows", WIDE: f"are {WIDE} on these rows"}
    words = [f"The 90% intervals {hold[how]}: {' and '.join(counts)} lie inside." for how, counts in judgements.items()]
    if not (n := int(outside.sum())):
        return " ".join([*words, "No row lies outside the training data."]), NARROW in judgements
    there = dict(zip(evaluation.names, inside[outside].mean(0), strict=True))
    shares = " and ".join(f"{percent(share)} of the true values of {name}" for name, share in there.items())
    count = "1 row lies" if n == 1 else f"{n:,} rows lie"
    words.append(f"{count} outside the training data: there the intervals contain {shares}.")
    return " ".join(words), NARROW in judgements or any(judged(share, n) == NARROW for share in there.values())


def by_fifth(evaluation: Evaluation) -> list[list[str]]:
    """Coverage in fifths of the rows, from small to large predictions; a header and one line each."""
    lines, inside = [], evaluation.inside()
    for j, name in enumerate(evaluation.names):
        mean = evaluation.p.point[:, j]
        for i, rows in enumerate(np.array_split(np.argsort(mean, kind="stable"), min(FIFTHS, len(mean)))):
            ends = f"{written(mean[rows].min(), 3)} to {written(mean[rows].max(), 3)}"
            lines.append([name if i == 0 else "", ends, *_cells(evaluation, inside, rows, j)])
    return [["target", "prediction", "rows", "in 90% intervals", "expected range", "intervals are", "RMSE"], *lines]


def by_group(evaluation: Evaluation, column: str) -> list[list[str]]:
    """Coverage for each text of a column, the most frequent one first; a header and one line each."""
    texts, inside = as_texts(evaluation.table.cells(column, "--group")).astype(str), evaluation.inside()
    groups, counts = np.unique(texts, return_counts=True)
    lines = []
    for j, name in enumerate(evaluation.names):
        for i, k in enumerate(np.argsort(-counts, kind="stable")[:MOST_GROUPS]):
            rows = np.flatnonzero(texts == groups[k])
            lines.append([name if i == 0 else "", groups[k] or "(missing)", *_cells(evaluation, inside, rows, j)])
    return [["target", column, "rows", "in 90% intervals", "expected range", "intervals are", "RMSE"], *lines]


def _cells(evaluation: Evaluation, inside: ndarray, rows: Int[ndarray, " r"], j: int) -> list[str]:
    share, (low, high) = float(inside[rows, j].mean()), _allowed(len(rows))
    rmse = np.sqrt(np.square(evaluation.y[rows, j] - evaluation.p.point[rows, j]).mean())
    allowed = f"{percent(low)} to {percent(high)}"
    return [f"{len(rows):,}", percent(share), allowed, judged(share, len(rows)), written(rmse, 3)]


def _allowed(m: int) -> tuple[float, float]:
    """Range of the share inside for a perfectly calibrated model, in 95% of samples of m rows."""
    low, high = binomial_band(m, np.array([LEVEL]))
    return float(low[0]), float(high[0])
