"""Predictions for a table beside its true values, and the pictures of them that a report shows."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer.drawing import BinnedCoverage, binomial_band, some
from lastlayer.metrics import LEVELS
from lastlayer.pages import BLUE, GREY, ORANGE, band, line, panels, points, sliding
from lastlayer.prediction import Prediction
from lastlayer.predictor.fitted import Extrapolation
from lastlayer.tables import Scores, Table, TableModel, score
from lastlayer.tables.schema import Encoded

COLORS = (BLUE, ORANGE, "#3a9a5d", "#9d6fc0", "#c0504d", "#4bacc6")
BARS, POINTS, ALPHA_ROWS, BAND_ROWS = 400, 2000, 1000, 200
N_STEPS = 41
DEEPEST = 8.0
"""How far below its top the LPD is drawn."""


@dataclass(frozen=True)
class Evaluation:
    """A model, rows, what it says of them, and what is true."""

    fitted: TableModel
    table: Table
    encoded: Encoded
    p: Prediction
    y: Float[ndarray, "m q"]
    where: Extrapolation
    scores: Scores
    error: Float[ndarray, "m q"]
    """In predicted standard deviations."""

    @classmethod
    def of(
        cls, fitted: TableModel, table: Table, *, targets: Sequence[str] | None = None, unknown: str = "error"
    ) -> "Evaluation":
        y = fitted.schema.targets_of(table, targets)
        encoded, p = fitted.predictive(table, unknown=unknown)
        p = p.with_output_axis()
        where, scores = fitted.model.extrapolation(encoded.X), score(p, y, fitted.schema.targets)
        return cls(fitted, table, encoded, p, y, where, scores, (y - p.mean) / p.std)

    @property
    def names(self) -> tuple[str, ...]:
        return self.fitted.schema.targets

    def some(self, n: int) -> Int[ndarray, " s"]:
        """At most n rows, always the same."""
        return some(len(self.y), n)[0]

    def labels(self, rows: Int[ndarray, " s"]) -> list[str]:
        return [f"row {self.table.row(k)}" for k in rows]


def _targets(evaluation: Evaluation, height: int, xtitle: str, ytitle: str) -> tuple[go.Figure, list[dict[str, int]]]:
    """One panel per target, and where each stands."""
    columns = min(2, len(evaluation.names))
    rows = -(-len(evaluation.names) // columns)
    figure = panels(rows, columns, height=height * rows + 100, titles=evaluation.names)
    below = {"orientation": "h", "yref": "container", "y": 0.0, "yanchor": "bottom"}
    figure.update_layout(legend=below, margin={"l": 60, "r": 20, "t": 70, "b": 90})
    figure.update_xaxes(title=xtitle).update_yaxes(title=ytitle)
    return figure, [{"row": i // columns + 1, "col": i % columns + 1} for i in range(len(evaluation.names))]


def parity(evaluation: Evaluation) -> go.Figure:
    figure, places = _targets(evaluation, 420, "true value", "prediction")
    lower, upper = evaluation.p.interval(0.95)
    inside, rows = (lower <= evaluation.y) & (evaluation.y <= upper), evaluation.some(BARS)
    for i, place in enumerate(places):
        y, mean = evaluation.y[:, i], evaluation.p.mean[:, i]
        ends = [float(y[rows].min()), float(y[rows].max())]
        figure.add_trace(line(ends, ends, GREY, dash="dash"), **place)
        for hit, color, word in ((inside, BLUE, "interval holds the true value"), (~inside, ORANGE, "misses")):
            r = rows[hit[rows, i]]
            ends_of_bars = {"array": upper[r, i] - mean[r], "arrayminus": mean[r] - lower[r, i]}
            bars = {"type": "data", "symmetric": False, "color": color, "width": 0, "thickness": 1, **ends_of_bars}
            dots = points(y[r], mean[r], color, word, error_y=bars, text=evaluation.labels(r), showlegend=i == 0)
            figure.add_trace(dots, **place)
    return figure


def calibration(evaluation: Evaluation) -> go.Figure:
    figure = panels(1, 1, height=460)
    levels = np.concatenate([[0.0], LEVELS, [1.0]])
    figure.add_trace(band(levels, *binomial_band(len(evaluation.y), levels), fillcolor="rgba(128,128,128,0.25)"))
    figure.add_trace(line([0, 1], [0, 1], GREY, "share = level", dash="dash"))
    distance = np.abs(2 * evaluation.p.cdf(evaluation.y) - 1)
    for i, name in enumerate(evaluation.names):
        shares = (distance[:, i, None] <= LEVELS).mean(0)
        figure.add_trace(line(LEVELS, shares, COLORS[i % len(COLORS)], name, mode="lines+markers"))
    figure.update_xaxes(title="level of the interval", range=[0, 1])
    return figure.update_yaxes(title="share of true values inside", range=[0, 1])


def residuals(evaluation: Evaluation) -> go.Figure:
    figure, places = _targets(evaluation, 340, "prediction", "error / std")
    far, rows = evaluation.where.quantile == 1, evaluation.some(POINTS)
    for i, place in enumerate(places):
        for outside, color, word in ((False, BLUE, "like the training rows"), (True, ORANGE, "farther out than all")):
            r = rows[far[rows] == outside]
            mean, error = evaluation.p.mean[r, i], evaluation.error[r, i]
            figure.add_trace(points(mean, error, color, word, text=evaluation.labels(r), showlegend=i == 0), **place)
        for edge in (-1.96, 1.96):
            figure.add_hline(edge, line={"color": GREY, "width": 1, "dash": "dash"}, **place)
    return figure


def extrapolation(evaluation: Evaluation) -> go.Figure:
    """Errors, and coverage of the 90% intervals, against the affine cost."""
    figure, rows = panels(1, 2, height=400), evaluation.some(POINTS)
    cost, error = np.maximum(evaluation.where.affine_cost, 1e-12), np.abs(evaluation.error[rows])
    lower, upper = evaluation.p.interval(0.9)
    inside = (lower <= evaluation.y) & (evaluation.y <= upper)
    binned = BinnedCoverage.of(cost, inside, 0.9)
    perfect = band(binned.edges.ravel(), *binned.band.repeat(2, 1), fillcolor="rgba(128,128,128,0.25)")
    figure.add_trace(perfect, 1, 2)
    for i, name in enumerate(evaluation.names):
        color = COLORS[i % len(COLORS)]
        dots = points(cost[rows], error[:, i], color, name, text=evaluation.labels(rows), legendgroup=name)
        figure.add_trace(dots, 1, 1)
        shares = line(binned.centre, binned.share[:, i], color, mode="lines+markers", showlegend=False)
        figure.add_trace(shares.update(legendgroup=name), 1, 2)
    figure.add_hline(0.9, line={"color": GREY, "width": 1, "dash": "dash"}, row=1, col=2)
    figure.update_layout(showlegend=True)
    figure.update_xaxes(title="affine cost (farther out to the right)", type="log")
    figure.update_yaxes(title="|error| / std", rangemode="tozero", row=1, col=1)
    return figure.update_yaxes(title="share inside 90% intervals", range=[0, 1.02], row=1, col=2)


def alpha(evaluation: Evaluation) -> str:
    """LPD against alpha, and what alpha makes of the intervals of the first target."""
    model, rows = evaluation.fitted.model, evaluation.some(ALPHA_ROWS)
    X, y = evaluation.encoded.X[rows], evaluation.y[rows]
    curve = copy.deepcopy(model).tune_alpha(X, y if y.shape[1] > 1 else y[:, 0]).alpha_curve_
    own = float(np.mean(model.log_alphas_))
    log_alphas = np.linspace(*_where_it_matters(curve.log_alphas, curve.lpds, own), N_STEPS)
    start = N_STEPS - 1
    if math.isfinite(own):  # the alpha in use is one of the steps
        start = int(np.abs(log_alphas - own).argmin())
        log_alphas[start] = own
    shown = rows[:: max(1, -(-len(rows) // BAND_ROWS))]
    shown = shown[np.argsort(evaluation.where.affine_cost[shown], kind="stable")]
    place, truth, mean = np.arange(1.0, len(shown) + 1), evaluation.y[shown, 0], evaluation.p.mean[shown, 0]
    figure, readings = panels(1, 2, height=520, column_widths=[0.4, 0.6]), []
    for step, log_alpha in enumerate(log_alphas):
        p = model.at_alpha(float(log_alpha)).predictive(evaluation.encoded.X[shown]).with_output_axis()
        lower, upper = (bound[:, 0] for bound in p.interval(0.95))
        lpd = np.interp([log_alpha], curve.log_alphas, curve.lpds)
        dot = points(log_alpha[None], lpd, ORANGE, size=11, visible=step == start)
        figure.add_trace(dot, 1, 1).add_trace(band(place, lower - mean, upper - mean, visible=step == start), 1, 2)
        readings.append(
            f"log alpha {log_alpha:.2f}{' (in use)' if log_alpha == own else ''}: LPD {lpd[0]:.3f}; of the rows shown "
            f"{((truth >= lower) & (truth <= upper)).mean():.0%} are inside, mean width {(upper - lower).mean():.4g}"
        )
    figure.add_trace(line(curve.log_alphas, curve.lpds, BLUE, "LPD of these rows"), 1, 1)
    figure.add_trace(points(place, truth - mean, GREY, "error", text=evaluation.labels(shown)), 1, 2)
    top = float(curve.lpds.max())
    lowest = max(float(curve.lpds.min()), top - DEEPEST)
    pad = 0.08 * (top - lowest) or 1.0
    reach = 1.3 * max(float(np.abs(truth - mean).max()), float(2 * evaluation.p.std[shown, 0].max()))
    figure.update_xaxes(title="log alpha", range=[log_alphas[0], log_alphas[-1]], row=1, col=1)
    figure.update_yaxes(title="LPD, standardised", range=[lowest - pad, top + pad], row=1, col=1)
    figure.update_xaxes(title="rows, farther out to the right", row=1, col=2)
    figure.update_yaxes(title="true value - prediction", range=[-reach, reach], row=1, col=2)
    return sliding(figure, log_alphas, readings, start, "alpha")


def _where_it_matters(log_alphas: ndarray, lpds: ndarray, own: float) -> tuple[float, float]:
    """The part of the curve where the LPD is not lost in depths, with the alpha in use."""
    near = np.flatnonzero(lpds >= lpds.max() - DEEPEST)
    low, high = float(log_alphas[near[0]]), float(log_alphas[near[-1]])
    if math.isfinite(own):
        low, high = min(low, own - 1), max(high, own + 1)
    return low, max(high, low + 1)
