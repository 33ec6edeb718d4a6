"""A model judged by a table, as one HTML page to show a colleague."""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from string import Template

import numpy as np

from lastlayer.pages import figure_html, page, script_data, table
from lastlayer.report import figures
from lastlayer.report.judged import Judged
from lastlayer.tables import Scores, Table, TableModel, TextColumn, explain

LISTED = 50
"""Rows in each of the two lists."""
INPUTS_SHOWN = 12
BODY = Template(
    """<h1>$model on $data</h1>
<p>Predictions of $targets for $rows rows, held against the true values. Intervals and scores say something of new rows
only if the model has not been fitted to these.</p>
<h2>Scores</h2>$scores
<p class="note">RMSE, CRPS and width are in the units of the target, smaller is better. LPD, the mean log predictive
density, judges mean and uncertainty together: larger is better. Of $rows rows, a perfect model has between $low50 and
$high50 in its 50% intervals and between $low95 and $high95 in its 95% intervals. Joint LPD $lpd, calibration error
$calibration_error.</p>
<h2>Parity</h2><p class="note">Prediction with its 95% interval against the true value. Good: 95% of the bars cross the
line.</p>$parity
<h2>Calibration</h2><p class="note">Share of true values inside central intervals against their level. Good: in the grey
band, where a perfect model stays 95% of the time; below it intervals are too narrow, above too wide.</p>$calibration
<h2>Residuals</h2><p class="note">Error over predicted standard deviation. Good: no pattern, 95% of the points between
the dashed lines.</p>$residuals
<h2>Alpha and the width of the intervals</h2><p class="note">Alpha is the prior variance of the last layer's weights
over the noise: a larger one widens intervals where the training rows leave things open. The mean does not move. Left:
what each alpha scores on $alpha_rows rows; right: errors of $first and their 95% intervals, rows in the order of their
affine cost.</p>
<p id="reading">Move the slider.</p>$alpha
<h2>Inputs that leave the training range</h2>$ranges
<p>$beyond of $rows rows cost more than every training row: there the model extrapolates in its features, whatever the
range of single inputs says.</p>$extrapolation
<h2>Rows to look at</h2>
<h3>Most wrong</h3><p class="note">By error over predicted standard deviation, the largest over the targets.</p>
<input type="search" data-for="wrong" placeholder="search these rows" aria-label="search the most wrong rows">
<div class="rows">$wrong</div>
<h3>Most uncertain</h3><p class="note">By predicted standard deviation over that of the noise.</p>
<input type="search" data-for="uncertain" placeholder="search these rows" aria-label="search the most uncertain rows">
<div class="rows">$uncertain</div>
<h2>Model card</h2>$card
<p class="note">Regression with Gaussian noise and calibrated tails. Do not use it for classes or counts. Where the
affine cost is far above that of the training rows nobody has measured how wrong the model can be: trust none.
Imputed cells count as if they had been measured.</p>"""
)
SCRIPT = Template(
    """const readings = $readings;
const say = i => { document.getElementById("reading").textContent = readings[i]; };
document.getElementById("alpha").on("plotly_sliderchange", event => say(event.slider.active));
say($start);
for (const box of document.querySelectorAll("input[type=search]")) {
  const rows = [...document.getElementById(box.dataset.for).querySelectorAll("tr")].slice(1);
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\\s+/);
    for (const row of rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
  });
}"""
)


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
    judged = Judged.of(fitted, table_, targets=targets, unknown=unknown)
    alpha = figures.alpha(judged)
    low50, high50 = judged.inside_by_chance(0.5)
    low95, high95 = judged.inside_by_chance(0.95)
    body = BODY.substitute(
        model=html.escape(model_name),
        data=html.escape(data_name),
        targets=html.escape(", ".join(judged.names)),
        rows=f"{len(judged.y):,}",
        scores=_scores(judged.scores),
        low50=f"{low50:.1%}",
        high50=f"{high50:.1%}",
        low95=f"{low95:.1%}",
        high95=f"{high95:.1%}",
        lpd=f"{judged.scores.lpd:.4f}",
        calibration_error=f"{judged.scores.calibration_error:.4f}",
        parity=figure_html(figures.parity(judged), "parity"),
        calibration=figure_html(figures.calibration(judged), "calibration"),
        residuals=figure_html(figures.residuals(judged), "residuals"),
        alpha_rows=f"{alpha.rows:,}",
        first=html.escape(judged.names[0]),
        alpha=figure_html(alpha.figure, "alpha"),
        ranges=_ranges(judged),
        beyond=f"{int((judged.where.quantile == 1).sum()):,}",
        extrapolation=figure_html(figures.extrapolation(judged), "extrapolation"),
        wrong=_rows(judged, judged.wrong(), "wrong"),
        uncertain=_rows(judged, judged.uncertain(), "uncertain"),
        card=_card(fitted),
    )
    script = SCRIPT.substitute(readings=script_data(alpha.readings), start=alpha.start)
    return Report(page(f"lastlayer: {model_name} on {data_name}", body, script), judged.scores)


def _scores(scores: Scores) -> str:
    head = ["target", "RMSE", "R2", "LPD", "CRPS", "in 50% interval", "in 95% interval", "width of 95% interval"]
    rows = [
        [
            s.target,
            *(f"{value:.4g}" for value in (s.rmse, s.r2, s.lpd, s.crps)),
            *(f"{share:.1%}" for share in (s.coverage_50, s.coverage_95)),
            f"{s.width_95:.4g}",
        ]
        for s in scores.targets
    ]
    return table(head, rows, "scores")


def _ranges(judged: Judged) -> str:
    rows = []
    for i, column in enumerate(judged.fitted.schema.columns):
        outside = judged.encoded.outside[:, i]
        here = "" if isinstance(column, TextColumn) else "{:g} to {:g}".format(*judged.range_of(column))
        rows.append([column.name, str(column), here, f"{outside.sum():,}", f"{outside.mean():.1%}"])
    return table(["input", "training rows", "these rows", "rows outside", "share"], rows, "ranges")


def _rows(judged: Judged, order: np.ndarray, name: str) -> str:
    columns = [column.name for column in judged.fitted.schema.columns][:INPUTS_SHOWN]
    head = ["row", *columns]
    for target in judged.names:
        head += [target, "predicted", "std", "error / std"]
    head += ["affine cost", "outside range of"]
    rows = []
    for i in order[:LISTED]:
        row = [str(judged.table.row(i)), *(str(judged.table.columns[column][i]) for column in columns)]
        for j in range(len(judged.names)):
            numbers = judged.y[i, j], judged.p.mean[i, j], judged.p.std[i, j], judged.error[i, j]
            row += [f"{number:.4g}" for number in numbers]
        row += [f"{judged.where.affine_cost[i]:.3g}", judged.outside_names(int(i))]
        rows.append(row)
    return table(head, rows, name)


def _card(fitted: TableModel) -> str:
    found, card = explain(fitted), fitted.card
    network, features = found["network"], found["features"]
    calibration = found["calibration"]
    facts = {
        "targets": ", ".join(f"{row['target']} (noise std {row['noise_std']:.4g})" for row in found["targets"]),
        "inputs": ", ".join(fitted.schema.features),
        "missing values": "filled by median or most frequent" if found["impute"] else "refused",
        "training rows": str(card.get("rows", "unknown")),
        "fitted": "{}, to {}, by lastlayer {}".format(*(card.get(k, "unknown") for k in ("fitted", "data", "version"))),
        "training": "interrupted before its end" if card.get("interrupted") else "ran to its end",
        "networks": f"{found['members']} of {json.dumps(network['hidden'])}, {network['activation']}",
        "noise": network["noise"],
        "features": f"{features['count']}, the data determine {features['determined']:.1f}; "
        f"condition {features['condition']:.1e}",
        "log alpha": f"{_log(found['alpha_star']):.3f} by the evidence, {_log(found['alpha']):.3f} in use",
        "calibration": "none" if calibration is None else calibration["words"],
        "notes": "; ".join(card.get("notes", [])) or "none",
    }
    items = "".join(f"<li><b>{html.escape(k)}</b>: {html.escape(str(v))}</li>" for k, v in facts.items())
    return f'<ul id="card">{items}</ul>'


def _log(alpha: float) -> float:
    return math.log(alpha) if alpha > 0 else -math.inf
