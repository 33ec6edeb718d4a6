"""The report: a model evaluated on a table, as one HTML page for colleagues."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lastlayer.plots.drawing import binomial_band
from lastlayer.plots.pages import figure_html, page, side_by_side, table
from lastlayer.report import figures
from lastlayer.report.figures import Evaluation
from lastlayer.report.verdict import by_fifth, by_group, verdict
from lastlayer.tables import Scores, Table, TableRegressor, dependence, facts, importance
from lastlayer.tables.cells import NumberFormat, as_texts
from lastlayer.tables.columns import TextColumn
from lastlayer.tables.numbers import written

LISTED = 50
"""Number of rows in each of the two lists."""
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
    """The page, its scores and its verdict."""

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
    scores, m = evaluation.scores, len(evaluation.y)
    low, high = binomial_band(m, np.array([0.5, 0.95]))
    model, data, *names = map(html.escape, (model_name, data_name, *evaluation.names))
    head, *lines = scores.table()
    most_wrong = np.abs(evaluation.error).max(1)
    most_uncertain = (evaluation.std / fitted.noise_std_).max(1)
    card = "".join(f"<li><b>{html.escape(k)}</b>: {html.escape(v)}</li>" for k, v in facts(fitted).items())
    said, failing = verdict(evaluation)
    fifths_head, *fifths = by_fifth(evaluation)
    ranking = importance(fitted, table_, targets=targets)
    matter_head, *matter = ranking.table()
    varied = figures.dependence(dependence(fitted, table_), ranking)
    body = f"""<h1>{model} on {data}</h1>
<p class="verdict{" warning" if failing else ""}" id="verdict">{html.escape(said)}</p>
<p>Predictions of {", ".join(names)} for {m:,} rows, compared with the true values. Intervals and scores are
meaningful for new rows only if the model was not fitted to these rows.</p>
<h2>Scores</h2>{table(head, lines, "scores")}
<p class="note">RMSE (the typical error), CRPS and width are in the units of the target; smaller is better. R2 is the
share of the variance of the target that the predictions explain. LPD, the mean log predictive density, judges mean and
uncertainty together; larger is better. With {m:,} rows, a perfectly calibrated model has between {low[0]:.0%} and
{high[0]:.0%} of the true values in its 50% intervals and between {low[1]:.0%} and {high[1]:.0%} in its 95% intervals.
Joint LPD {scores.lpd:.4f}, calibration error {scores.calibration_error:.4f}.</p>
<h2>Predictions</h2><p class="note">Predictions with their 90% intervals against the true values. Good: nine of ten
bars cross the line.</p>{side_by_side(figures.parity(evaluation), "parity")}
<h2>Where intervals hold</h2><p class="note">Five groups of rows, from small to large predictions. The
expected range contains the share of a perfectly calibrated model in 95% of samples of this size.</p>
{table(fifths_head, fifths, "fifths")}{_groups(evaluation, group)}
<h2>Which inputs matter</h2><p>{html.escape("; ".join(ranking.sentences()))}.</p>
<p class="note">Loss of accuracy on {ranking.rows:,} of these rows when the values of one input are shuffled among them.
Correlated inputs share their importance. Error bars: two standard deviations over the shuffles.</p>
{side_by_side(figures.importance(ranking), "importance")}{table(matter_head, matter, "ranking")}
<h3>Predictions as one input varies</h3><p class="note">Over its training range, averaged over these rows. Dark: 90%
band of the function; light: 90% band of single measurements.</p>{side_by_side(varied, "dependence")}
<h2>Calibration</h2><p class="note">Share of true values inside central intervals against their level. Good: in the grey
band, where a perfectly calibrated model is 95% of the time. Below the band, intervals are too narrow; above it, too
wide.</p>
{figure_html(figures.calibration(evaluation), "calibration")}
<h2>Residuals</h2><p class="note">Error over predicted standard deviation. Good: no pattern, 95% of the points between
the dashed lines.</p>{side_by_side(figures.residuals(evaluation), "residuals")}
<h2>Inputs outside the training range</h2>{_ranges(evaluation)}
<p>{int((evaluation.where.quantile == 1).sum()):,} of {m:,} rows are farther out than every training row:
there the model extrapolates, even if each single input is within its range.{_beyond(evaluation)}</p>
<p class="note">First plot: errors against the affine cost, a measure of how far a row is from the training rows.
Second plot: share of true values inside their 90% intervals, in bins of the affine cost. Good: in the grey band, where
a perfectly calibrated model is 95% of the time, even far to the right.</p>
{side_by_side(figures.extrapolation(evaluation), "extrapolation")}
<h2>Rows to look at</h2>
<h3>Largest errors</h3><p class="note">By error over predicted standard deviation, the largest of all targets.</p>
<input type="search" data-for="wrong" placeholder="search these rows" aria-label="search rows with the largest errors">
<div class="rows">{_rows(evaluation, most_wrong, "wrong")}</div>
<h3>Most uncertain</h3><p class="note">By predicted standard deviation over noise standard deviation.</p>
<input type="search" data-for="uncertain" placeholder="search these rows" aria-label="search the most uncertain rows">
<div class="rows">{_rows(evaluation, most_uncertain, "uncertain")}</div>
<h2>Model card</h2><ul id="card">{card}</ul>
<p class="note">Regression with Gaussian noise and calibrated tails; not suitable for classes or counts. Do not rely on
predictions whose affine cost is far above that of the training rows: the error there has not been measured. Imputed
cells are treated as if they had been measured.</p>
<h2>Alpha and the width of the intervals</h2><p class="note">Alpha is the prior variance of the weights of the last
layer over the noise variance. A larger alpha widens intervals where there are few training rows; the mean does not
change. Above: score of each alpha on {min(m, figures.ALPHA_ROWS):,} rows. Below: errors of {names[0]} with their 90%
intervals, rows ordered by their affine cost.</p>
{figures.alpha(evaluation)}"""
    return Report(page(f"lastlayer: {model_name} on {data_name}", body, SEARCH), scores, said)


def _groups(evaluation: Evaluation, column: str | None) -> str:
    """Coverage for each text of a column, if one is given."""
    if column is None:
        return ""
    head, *lines = by_group(evaluation, column)
    return f"<h3>By {html.escape(column)}</h3>{table(head, lines, 'groups')}"


def _beyond(evaluation: Evaluation) -> str:
    """Number of rows farther out than every row that intervals were calibrated on, as a sentence."""
    beyond = evaluation.p.beyond_reach
    if beyond is None or not beyond.any():
        return ""
    return (
        f" {int(beyond.sum()):,} are farther out than every row that intervals were calibrated on: do not rely on them."
    )


def _ranges(evaluation: Evaluation) -> str:
    rows = []
    for column, outside in zip(evaluation.fitted.schema_.columns, evaluation.encoded.outside.T, strict=True):
        here = ""
        if not isinstance(column, TextColumn):
            here = str(column.of_rows(column.read(evaluation.table, impute=evaluation.fitted.schema_.impute)))
        rows.append([column.name, str(column), here, f"{outside.sum():,}", f"{outside.mean():.1%}"])
    return table(["input", "training rows", "these rows", "rows outside", "share"], rows, "ranges")


def _rows(evaluation: Evaluation, key: np.ndarray, name: str) -> str:
    """The rows with the largest key: name of the row, predictions, then inputs."""
    columns = np.array([column.name for column in evaluation.fitted.schema_.columns], dtype=object)
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
    """The first column that is not an input and has a different text in every row: names of the rows."""
    known = {column.name for column in evaluation.fitted.schema_.columns}
    for name, cells in evaluation.table.columns.items():
        if name not in known and NumberFormat().numbers(cells)[1].all() and len(set(as_texts(cells))) == len(cells):
            return name
    return None
