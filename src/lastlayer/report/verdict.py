"""Verdict on the intervals in plain English: on all rows, by fifth of the prediction, by group, outside the data."""

from typing import TypeAlias

import numpy as np
from numpy import ndarray

from lastlayer.plots.drawing import binomial_band
from lastlayer.report.figures import LEVEL, Evaluation
from lastlayer.tables.cells import as_texts
from lastlayer.tables.numbers import percent, written

FIFTHS, MOST_GROUPS = 5, 20
Part: TypeAlias = tuple[str, ndarray]
"""Rows, and what they are called."""
NARROW, WIDE, RIGHT = "too narrow", "wider than needed", "as expected"


def judged(share: float, m: int) -> str:
    """Judge 90% intervals by the share of m true values inside, assuming independent errors."""
    low, high = binomial_band(m, LEVEL)
    return NARROW if share < low else WIDE if share > high else RIGHT


def verdict(evaluation: Evaluation) -> tuple[str, bool]:
    """Return a line on whether intervals hold and how many rows are outside, and whether it is a warning."""
    inside, outside, m = evaluation.inside(), evaluation.outside, len(evaluation.y)
    judgements: dict[str, list[str]] = {}
    for name, share in zip(evaluation.names, inside.mean(0), strict=True):
        count = f"{round(share * m):,} of {m:,} true values of {name} ({share:.0%})"
        how = judged(share, m)
        how = RIGHT if how == WIDE and evaluation.p.discrete else how  # whole values hold more than the level
        judgements.setdefault(how, []).append(count)
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

    def fifths(mean: ndarray) -> list[Part]:
        parts = np.array_split(np.argsort(mean, kind="stable"), min(FIFTHS, len(mean)))
        return [(f"{written(mean[rows].min(), 3)} to {written(mean[rows].max(), 3)}", rows) for rows in parts]

    return _coverage(evaluation, "prediction", [fifths(mean) for mean in evaluation.p.point.T])


def by_group(evaluation: Evaluation, column: str) -> list[list[str]]:
    """Coverage for each text of a column, the most frequent one first; a header and one line each."""
    texts = as_texts(evaluation.table.cells(column, "--group")).astype(str)
    groups, counts = np.unique(texts, return_counts=True)
    largest = groups[np.argsort(-counts, kind="stable")[:MOST_GROUPS]]
    parts = [(group or "(missing)", np.flatnonzero(texts == group)) for group in largest]
    return _coverage(evaluation, column, [parts] * len(evaluation.names))


def _coverage(evaluation: Evaluation, what: str, parts: list[list[Part]]) -> list[list[str]]:
    """A line for each part of the rows of each target, which is named in the first of its lines."""
    lines, inside = [], evaluation.inside()
    for j, (target, of_target) in enumerate(zip(evaluation.names, parts, strict=True)):
        for i, (label, rows) in enumerate(of_target):
            m, share = len(rows), float(inside[rows, j].mean())
            low, high = binomial_band(m, LEVEL)
            rmse = np.sqrt(np.square(evaluation.y[rows, j] - evaluation.p.point[rows, j]).mean())
            numbers = [f"{m:,}", percent(share), f"{percent(low)} to {percent(high)}"]
            lines.append([target if i == 0 else "", label, *numbers, judged(share, m), written(rmse, 3)])
    return [["target", what, "rows", "in 90% intervals", "expected range", "intervals are", "RMSE"], *lines]
