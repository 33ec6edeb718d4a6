"""A model evaluated on a table, as one HTML page to show a colleague."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lastlayer.drawing import binomial_band
from lastlayer.pages import figure_html, page, side_by_side, table
from lastlayer.report import figures
from lastlayer.report.figures import Evaluation
from lastlayer.report.verdict import by_fifth, by_group, verdict
from lastlayer.tables import Scores, Table, TableModel, dependence, facts, importance
from lastlayer.tables.cells import NumberFormat, as_texts
from lastlayer.tables.columns import TextColumn
from lastlayer.tables.numbers import written

LISTED = 50
"""Rows in each of the two lists."""
INPUTS_SHOWN = 12
SEARCH = """for (const box of document.querySelectorAll("input[type=search]")) {
  const rows = [...document.getElementById(box.dataset.for).querySelectorAll("tr")].slice(1);
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\\s+/);
    for (const row of rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
  });
}"""


@dataclass(frozen=True)
class Report:
    """The page, and what it says."""

    html: str
    scores: Scores
    verdict: str
    """Whether intervals hold, in one line."""


def make_report(
    fitted: TableModel,
    table_: Table,
    *,
    model_name: str,
    data_name: str,
    targets: Sequence[str] | None = None,
    unknown: str = "error",
    group: str | None = None,
) -> Report:
    """The page; the same model and table give the same text.

    Parameters
    ----------
    fitted : TableModel
        The model.
    table_ : Table
        Rows with the true values, best ones that the model has not seen.
    model_name, data_name : str
        What they are called in the title.
    targets : sequence of str, optional
        Columns with the true values, if they are not called as in fit.
    unknown : str, default "error"
        A text no training row had: "error", or "warn" to predict as if it were none of the known.
    group : str, optional
        Column of the table by which coverage is shown too.

    Returns
    -------
    Report
        The page, its scores, and its one-line verdict.
    """
    evaluation = Evaluation.of(fitted, table_, targets=targets, unknown=unknown)
    scores, m = evaluation.scores, len(evaluation.y)
    low, high = binomial_band(m, np.array([0.5, 0.95]))
    model, data, *names = map(html.escape, (model_name, data_name, *evaluation.names))
    head, *lines = scores.table()
    most_wrong = np.abs(evaluation.error).max(1)
    most_uncertain = (evaluation.std / fitted.model.noise_std_).max(1)
    card = "".join(f"<li><b>{html.escape(k)}</b>: {html.escape(v)}</li>" for k, v in facts(fitted).items())
    said, failing = verdict(evaluation)
    fifths_head, *fifths = by_fifth(evaluation)
    ranking = importance(fitted, table_, targets=targets)
    matter_head, *matter = ranking.table()
    varied = figures.dependence(dependence(fitted, table_), ranking)
    body = f"""<h1>{model} on {data}</h1>
<p class="verdict{" warning" if failing else ""}" id="verdict">{html.escape(said)}</p>
<p>Predictions of {", ".join(names)} for {m:,} rows, held against the true values. Intervals and scores say something of
new rows only if the model has not been fitted to these.</p>
<h2>Scores</h2>{table(head, lines, "scores")}
<p class="note">RMSE, the typical error, CRPS and width are in the units of the target, smaller is better. R2 is the
share of the target's variance that predictions explain. LPD, the mean log predictive density, judges mean and
uncertainty together: larger is better. Of {m:,} rows, a perfect model has between {low[0]:.0%} and {high[0]:.0%} in its
50% intervals and between {low[1]:.0%} and {high[1]:.0%} in its 95% intervals. Joint LPD {scores.lpd:.4f}, calibration
error {scores.calibration_error:.4f}.</p>
<h2>Predictions</h2><p class="note">Prediction with its 90% interval against the true value. Good: nine of ten bars
cross the line.</p>{side_by_side(figures.parity(evaluation), "parity")}
<h2>Where intervals hold</h2><p class="note">Rows in fifths, from small to large predictions. Shares that chance allows
are those of a perfect model in 95% of samples of this size.</p>
{table(fifths_head, fifths, "fifths")}{_groups(evaluation, group)}
<h2>Which inputs matter</h2><p>{html.escape("; ".join(ranking.sentences()))}.</p>
<p class="note">What predictions of {ranking.rows:,} of these rows lose when the values of one input are shuffled among
them. Inputs that vary together share their importance. Bars: two standard deviations over the shuffles.</p>
{side_by_side(figures.importance(ranking), "importance")}{table(matter_head, matter, "ranking")}
<h3>Predictions as one input varies</h3><p class="note">Over its training range, averaged over these rows. Dark: 90% of
the function; light: 90% of single measurements.</p>{side_by_side(varied, "dependence")}
<h2>Calibration</h2><p class="note">Share of true values inside central intervals against their level. Good: in the grey
band, where a perfect model stays 95% of the time; below it intervals are too narrow, above too wide.</p>
{figure_html(figures.calibration(evaluation), "calibration")}
<h2>Residuals</h2><p class="note">Error over predicted standard deviation. Good: no pattern, 95% of the points between
the dashed lines.</p>{side_by_side(figures.residuals(evaluation), "residuals")}
<h2>Inputs that leave the training range</h2>{_ranges(evaluation)}
<p>{int((evaluation.where.quantile == 1).sum()):,} of {m:,} rows cost more than every training row: there the model
extrapolates in its features, whatever the range of single inputs says.{_beyond(evaluation)}</p>
<p class="note">First: errors against the affine cost. Second: share of true values inside their 90% intervals, in bins
of it. Good: in the grey band, where a perfect model stays 95% of the time, also far to the right.</p>
{side_by_side(figures.extrapolation(evaluation), "extrapolation")}
<h2>Rows to look at</h2>
<h3>Most wrong</h3><p class="note">By error over predicted standard deviation, the largest over the targets.</p>
<input type="search" data-for="wrong" placeholder="search these rows" aria-label="search the most wrong rows">
<div class="rows">{_rows(evaluation, most_wrong, "wrong")}</div>
<h3>Most uncertain</h3><p class="note">By predicted standard deviation over that of the noise.</p>
<input type="search" data-for="uncertain" placeholder="search these rows" aria-label="search the most uncertain rows">
<div class="rows">{_rows(evaluation, most_uncertain, "uncertain")}</div>
<h2>Model card</h2><ul id="card">{card}</ul>
<p class="note">Regression with Gaussian noise and calibrated tails. Do not use it for classes or counts. Where the
affine cost is far above that of the training rows nobody has measured how wrong the model can be: trust none.
Imputed cells count as if they had been measured.</p>
<h2>Alpha and the width of the intervals</h2><p class="note">Alpha is the prior variance of the last layer's weights
over the noise: a larger one widens intervals where the training rows leave things open. The mean does not move. Above:
what each alpha scores on {min(m, figures.ALPHA_ROWS):,} rows; below: errors of {names[0]} and their 90% intervals, rows
in the order of their affine cost.</p>
{figures.alpha(evaluation)}"""
    return Report(page(f"lastlayer: {model_name} on {data_name}", body, SEARCH), scores, said)


def _groups(evaluation: Evaluation, column: str | None) -> str:
    """Coverage by the texts of a column, if one was asked for."""
    if column is None:
        return ""
    head, *lines = by_group(evaluation, column)
    return f"<h3>By {html.escape(column)}</h3>{table(head, lines, 'groups')}"


def _beyond(evaluation: Evaluation) -> str:
    """How many rows lie farther out than any by which intervals were calibrated."""
    beyond = evaluation.p.beyond_reach
    if beyond is None or not beyond.any():
        return ""
    return f" {int(beyond.sum()):,} lie farther out than every row that intervals were calibrated on: trust none there."


def _ranges(evaluation: Evaluation) -> str:
    rows = []
    for column, outside in zip(evaluation.fitted.schema.columns, evaluation.encoded.outside.T, strict=True):
        here = ""
        if not isinstance(column, TextColumn):
            here = str(column.of_rows(column.read(evaluation.table, impute=evaluation.fitted.schema.impute)))
        rows.append([column.name, str(column), here, f"{outside.sum():,}", f"{outside.mean():.1%}"])
    return table(["input", "training rows", "these rows", "rows outside", "share"], rows, "ranges")


def _rows(evaluation: Evaluation, key: np.ndarray, name: str) -> str:
    """The rows of largest key: what was predicted beside the row's name, then its inputs."""
    columns = np.array([column.name for column in evaluation.fitted.schema.columns], dtype=object)
    inputs, named = columns[:INPUTS_SHOWN], _named(evaluation)
    head = ["row", *([] if named is None else [named])]
    for target in evaluation.names:
        head += [target, "predicted", "error", "error / std"]
    rows = []
    for i in np.argsort(-key, kind="stable")[:LISTED]:
        row = [str(evaluation.table.row(i))]
        row += [] if named is None else [str(evaluation.table.columns[named][i])]
        for y, mean, error in zip(evaluation.y[i], evaluation.mean[i], evaluation.error[i], strict=True):
            row += [written(y), written(mean), written(y - mean, 3), f"{error:.1f}"]
        row += [written(evaluation.where.affine_cost[i], 3), ", ".join(columns[evaluation.encoded.outside[i]])]
        rows.append([*row, *(str(evaluation.table.columns[column][i]) for column in inputs)])
    return table([*head, "affine cost", "outside range of", *inputs], rows, name)


def _named(evaluation: Evaluation) -> str | None:
    """The first column that is no input and has a text of its own for every row: their names."""
    known = {column.name for column in evaluation.fitted.schema.columns}
    for name, cells in evaluation.table.columns.items():
        if name not in known and NumberFormat().numbers(cells)[1].all() and len(set(as_texts(cells))) == len(cells):
            return name
    return None
