"""A model evaluated on a table, as one HTML page to show a colleague."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lastlayer.drawing import binomial_band
from lastlayer.pages import figure_html, page, table
from lastlayer.report import figures
from lastlayer.report.figures import Evaluation
from lastlayer.tables import Scores, Table, TableModel, facts
from lastlayer.tables.columns import TextColumn

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
    """The page, and the scores in it."""

    html: str
    scores: Scores


def make_report(
    fitted: TableModel,
    table_: Table,
    *,
    model_name: str,
    data_name: str,
    targets: Sequence[str] | None = None,
    unknown: str = "error",
) -> Report:
    """The page; the same model and table give the same text."""
    evaluation = Evaluation.of(fitted, table_, targets=targets, unknown=unknown)
    scores, m = evaluation.scores, len(evaluation.y)
    low, high = binomial_band(m, np.array([0.5, 0.95]))
    model, data, *names = map(html.escape, (model_name, data_name, *evaluation.names))
    head, *lines = scores.table()
    most_wrong = np.abs(evaluation.error).max(1)
    most_uncertain = (evaluation.p.std / fitted.model.noise_std_).max(1)
    card = "".join(f"<li><b>{html.escape(k)}</b>: {html.escape(v)}</li>" for k, v in facts(fitted).items())
    body = f"""<h1>{model} on {data}</h1>
<p>Predictions of {", ".join(names)} for {m:,} rows, held against the true values. Intervals and scores say something of
new rows only if the model has not been fitted to these.</p>
<h2>Scores</h2>{table(head, lines, "scores")}
<p class="note">RMSE, CRPS and width are in the units of the target, smaller is better. LPD, the mean log predictive
density, judges mean and uncertainty together: larger is better. Of {m:,} rows, a perfect model has between {low[0]:.1%}
and {high[0]:.1%} in its 50% intervals and between {low[1]:.1%} and {high[1]:.1%} in its 95% intervals. Joint LPD
{scores.lpd:.4f}, calibration error {scores.calibration_error:.4f}.</p>
<h2>Parity</h2><p class="note">Prediction with its 95% interval against the true value. Good: 95% of the bars cross the
line.</p>{figure_html(figures.parity(evaluation), "parity")}
<h2>Calibration</h2><p class="note">Share of true values inside central intervals against their level. Good: in the grey
band, where a perfect model stays 95% of the time; below it intervals are too narrow, above too wide.</p>
{figure_html(figures.calibration(evaluation), "calibration")}
<h2>Residuals</h2><p class="note">Error over predicted standard deviation. Good: no pattern, 95% of the points between
the dashed lines.</p>{figure_html(figures.residuals(evaluation), "residuals")}
<h2>Alpha and the width of the intervals</h2><p class="note">Alpha is the prior variance of the last layer's weights
over the noise: a larger one widens intervals where the training rows leave things open. The mean does not move. Left:
what each alpha scores on {min(m, figures.ALPHA_ROWS):,} rows; right: errors of {names[0]} and their 95% intervals, rows
in the order of their affine cost.</p>
{figures.alpha(evaluation)}
<h2>Inputs that leave the training range</h2>{_ranges(evaluation)}
<p>{int((evaluation.where.quantile == 1).sum()):,} of {m:,} rows cost more than every training row: there the model
extrapolates in its features, whatever the range of single inputs says.{_beyond(evaluation)}</p>
<p class="note">Left: errors against the affine cost. Right: share of true values inside their 90% intervals, in bins of
it. Good: in the grey band, where a perfect model stays 95% of the time, also far to the right.</p>
{figure_html(figures.extrapolation(evaluation), "extrapolation")}
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
Imputed cells count as if they had been measured.</p>"""
    return Report(page(f"lastlayer: {model_name} on {data_name}", body, SEARCH), scores)


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
    """The rows of largest key."""
    columns = np.array([column.name for column in evaluation.fitted.schema.columns], dtype=object)
    inputs = columns[:INPUTS_SHOWN]
    head = ["row", *inputs]
    for target in evaluation.names:
        head += [target, "predicted", "std", "error / std"]
    rows = []
    for i in np.argsort(-key, kind="stable")[:LISTED]:
        numbers = np.stack([evaluation.y[i], evaluation.p.mean[i], evaluation.p.std[i], evaluation.error[i]], 1).flat
        row = [str(evaluation.table.row(i)), *(str(evaluation.table.columns[column][i]) for column in inputs)]
        row += [f"{number:.4g}" for number in numbers] + [f"{evaluation.where.affine_cost[i]:.3g}"]
        rows.append([*row, ", ".join(columns[evaluation.encoded.outside[i]])])
    return table([*head, "affine cost", "outside range of"], rows, name)
