"""The report: a model evaluated on a table, as one HTML page for colleagues."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from lastlayer.plots.drawing import binomial_band
from lastlayer.report import figures
from lastlayer.report.figures import Evaluation
from lastlayer.report.pages import rendered
from lastlayer.report.verdict import by_fifth, by_group, verdict
from lastlayer.tables import Scores, Table, TableRegressor, dependence, facts, importance
from lastlayer.tables.cells import NumberFormat, as_texts
from lastlayer.tables.columns import TextColumn
from lastlayer.tables.numbers import written

LISTED = 50
"""Number of rows in each of the two lists."""
INPUTS_SHOWN = 12


@dataclass(frozen=True)
class Report:
    html: str
    scores: Scores
    verdict: str
    """Whether the intervals hold, in one line."""


def make_report(
    fitted: TableRegressor,
    table_: Table,
    *,
    model_name: str,
    data_name: str,
    targets: Sequence[str] | None = None,
    group: str | None = None,
) -> Report:
    """Make the page; the same model and table give the same text."""
    evaluation = Evaluation.of(fitted, table_, targets=targets)
    m, beyond = len(evaluation.y), evaluation.p.beyond_reach
    low, high = binomial_band(m, np.array([0.5, 0.95]))
    sentence, failing = verdict(evaluation)
    ranking = importance(fitted, table_, targets=targets)
    page = rendered(
        "report.html",
        model=model_name,
        data=data_name,
        names=evaluation.names,
        m=m,
        verdict=sentence,
        failing=failing,
        scores=evaluation.scores,
        low=low,
        high=high,
        parity=figures.parity(evaluation),
        fifths=by_fifth(evaluation),
        group=group,
        groups=None if group is None else by_group(evaluation, group),
        ranking=ranking,
        importance=figures.importance(ranking),
        varied=figures.dependence(dependence(fitted, table_), ranking),
        calibration=figures.calibration(evaluation),
        residuals=figures.residuals(evaluation),
        ranges=_ranges(evaluation),
        far=int((evaluation.where.quantile == 1).sum()),
        beyond=0 if beyond is None else int(beyond.sum()),
        extrapolation=figures.extrapolation(evaluation),
        wrong=_rows(evaluation, np.abs(evaluation.error).max(1)),
        uncertain=_rows(evaluation, (evaluation.p.std / fitted.noise_std_).max(1)),
        card=facts(fitted),
        alpha_rows=min(m, figures.ALPHA_ROWS),
        alpha=figures.alpha(evaluation),
    )
    return Report(page, evaluation.scores, sentence)


def _ranges(evaluation: Evaluation) -> list[list[str]]:
    lines, schema = [["input", "training rows", "these rows", "rows outside", "share"]], evaluation.fitted.schema_
    for column, outside in zip(schema.columns, evaluation.encoded.outside.T, strict=True):
        here = ""
        if not isinstance(column, TextColumn):
            here = str(column.of_rows(column.read(evaluation.table, schema.impute)))
        lines.append([column.name, str(column), here, f"{outside.sum():,}", f"{outside.mean():.1%}"])
    return lines


def _rows(evaluation: Evaluation, key: np.ndarray) -> list[list[str]]:
    """The rows with the largest key: name of the row, predictions, then inputs."""
    columns, cells = [column.name for column in evaluation.fitted.schema_.columns], evaluation.table.columns
    labels = [name for name in cells if name not in columns and _names_rows(cells[name])][:1]
    head = ["row", *labels]
    for target in evaluation.names:
        head += [target, "predicted", "error", "error / std"]
    lines = [[*head, "affine cost", "outside range of", *columns[:INPUTS_SHOWN]]]
    for i in np.argsort(-key, kind="stable")[:LISTED]:
        line = [str(evaluation.table.row(i)), *(str(cells[name][i]) for name in labels)]
        for y, mean, error in zip(evaluation.y[i], evaluation.p.point[i], evaluation.error[i], strict=True):
            line += [written(y), written(mean), written(y - mean, 3), f"{error:.1f}"]
        outside = ", ".join(compress(columns, evaluation.encoded.outside[i]))
        line += [written(evaluation.where.affine_cost[i], 3), outside]
        lines.append([*line, *(str(cells[name][i]) for name in columns[:INPUTS_SHOWN])])
    return lines


def _names_rows(cells: np.ndarray) -> bool:
    """Whether a column has a different text in every row."""
    return bool(NumberFormat().numbers(cells)[1].all()) and len(set(as_texts(cells))) == len(cells)
