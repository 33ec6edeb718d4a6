"""Predictions for a table with the true values, and the figures of a report."""

import copy
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from lastlayer.explain import Dependence
from lastlayer.plots.drawing import Bins, binomial_band, padded, some
from lastlayer.predictions.metrics import LEVELS
from lastlayer.predictions.prediction import Prediction
from lastlayer.predictor.fitted import Extrapolation
from lastlayer.report.pages import BLUE, GREY, ORANGE, Sliding, band, line, panels, points, sliding
from lastlayer.tables import Ranking, Scores, Table, TableRegressor, score
from lastlayer.tables.numbers import written
from lastlayer.tables.schema import Encoded

COLORS = (BLUE, ORANGE, "#3a9a5d", "#9d6fc0", "#c0504d", "#4bacc6")
BARS, POINTS, ALPHA_ROWS, BAND_ROWS = 400, 2000, 1000, 200
N_STEPS = 41
LEVEL = 0.9
"""Level of the intervals that the page checks."""
INPUTS, VARIED = 20, 6
"""Number of inputs in the figure of importance, and of those in the figures of partial dependence."""
DEEPEST = 8.0
"""Range of the LPD that is drawn, below its maximum."""


@dataclass(frozen=True)
class Evaluation:
    """A model, a table, the predictions for its rows, and the true values."""

    fitted: TableRegressor
    table: Table
    encoded: Encoded
    p: Prediction
    y: Float[ndarray, "m q"]
    where: Extrapolation
    scores: Scores

    @classmethod
    def of(cls, fitted: TableRegressor, table: Table, *, targets: Sequence[str] | None = None) -> "Evaluation":
        y = fitted.schema_.targets_of(table, targets)
        encoded = fitted.schema_.encode(table, unknown=fitted.unknown)
        p = fitted.predictive(encoded.X).with_output_axis()
        where, scores = fitted.extrapolation(encoded.X), score(p, y, fitted.schema_.targets)
        return cls(fitted, table, encoded, p, y, where, scores)

    @property
    def names(self) -> tuple[str, ...]:
        return self.fitted.schema_.targets

    @property
    def error(self) -> Float[ndarray, "m q"]:
        """Errors in predicted standard deviations."""
        return self.p.standardized_residual(self.y)

    @property
    def outside(self) -> Bool[ndarray, " m"]:
        """Mask of rows outside the training data: an input is out of range, or they are farther out than all."""
        return self.encoded.outside.any(1) | (self.where.quantile == 1)

    def inside(self, level: float = LEVEL) -> Bool[ndarray, "m q"]:
        lower, upper = self.p.interval(level)
        return (lower <= self.y) & (self.y <= upper)

    def some(self, n: int) -> Int[ndarray, " s"]:
        return some(len(self.y), n)[0]

    def labels(self, rows: Int[ndarray, " s"]) -> list[str]:
        return [f"row {self.table.row(k)}" for k in rows]


def _panel(height: int, xtitle: str, ytitle: str, title: str = "") -> go.Figure:
    """A figure with one panel, and its legend below."""
    figure = panels(1, 1, height=height, titles=[title] if title else None)
    below = {"orientation": "h", "yref": "container", "y": 0.0, "yanchor": "bottom"}
    figure.update_layout(legend=below, margin={"l": 55, "r": 10, "t": 40 if title else 15, "b": 85})
    return figure.update_xaxes(title=xtitle).update_yaxes(title=ytitle)


def parity(evaluation: Evaluation) -> list[go.Figure]:
    """Predictions with 90% intervals against true values, one figure per target."""
    (lower, upper), inside, rows = evaluation.p.interval(LEVEL), evaluation.inside(), evaluation.some(BARS)
    figures = []
    for i, name in enumerate(evaluation.names):
        figure = _panel(420, "true value", "prediction", name)
        y, mean = evaluation.y[:, i], evaluation.p.point[:, i]
        ends = [float(y[rows].min()), float(y[rows].max())]
        figure.add_trace(line(ends, ends, GREY, dash="dash"))
        for hit, color, word in ((inside, BLUE, "interval contains the true value"), (~inside, ORANGE, "misses")):
            r = rows[hit[rows, i]]
            ends_of_bars = {"array": upper[r, i] - mean[r], "arrayminus": mean[r] - lower[r, i]}
            bars = {"type": "data", "symmetric": False, "color": color, "width": 0, "thickness": 1, **ends_of_bars}
            figure.add_trace(points(y[r], mean[r], color, word, error_y=bars, text=evaluation.labels(r)))
        figures.append(figure)
    return figures


def calibration(evaluation: Evaluation) -> go.Figure:
    """Share of true values inside central intervals against the level, one line per target."""
    figure = _panel(440, "level of the interval", "share of true values inside")
    levels = np.concatenate([[0.0], LEVELS, [1.0]])
    figure.add_trace(band(levels, *binomial_band(len(evaluation.y), levels), fillcolor="rgba(128,128,128,0.25)"))
    figure.add_trace(line([0, 1], [0, 1], GREY, "share = level", dash="dash"))
    distance = np.abs(2 * evaluation.p.cdf(evaluation.y) - 1)
    for i, name in enumerate(evaluation.names):
        shares = (distance[:, i, None] <= LEVELS).mean(0)
        figure.add_trace(line(LEVELS, shares, COLORS[i % len(COLORS)], name, mode="lines+markers"))
    return figure.update_xaxes(range=[0, 1]).update_yaxes(range=[0, 1])


def residuals(evaluation: Evaluation) -> list[go.Figure]:
    """Errors in standard deviations against predictions, one figure per target."""
    figures, far, rows = [], evaluation.where.quantile == 1, evaluation.some(POINTS)
    for i, name in enumerate(evaluation.names):
        figure = _panel(360, "prediction", "error / std", name)
        for outside, color, word in ((False, BLUE, "like the training rows"), (True, ORANGE, "farther out than all")):
            r = rows[far[rows] == outside]
            mean, error = evaluation.p.point[r, i], evaluation.error[r, i]
            figure.add_trace(points(mean, error, color, word, text=evaluation.labels(r)))
        for edge in (-1.96, 1.96):
            figure.add_hline(edge, line={"color": GREY, "width": 1, "dash": "dash"})
        figures.append(figure)
    return figures


def extrapolation(evaluation: Evaluation) -> list[go.Figure]:
    """Errors, and coverage of the 90% intervals, against the affine cost."""
    xtitle, rows = "affine cost (farther out to the right)", evaluation.some(POINTS)
    errors, shares = _panel(380, xtitle, "|error| / std"), _panel(380, xtitle, "share inside 90% intervals")
    cost, error = np.maximum(evaluation.where.affine_cost, 1e-12), np.abs(evaluation.error[rows])
    bins = Bins.of(cost)
    share, *ends = bins.coverage(evaluation.inside(), LEVEL)
    shares.add_trace(band(bins.edges, *ends, fillcolor="rgba(128,128,128,0.25)"))
    for i, name in enumerate(evaluation.names):
        color = COLORS[i % len(COLORS)]
        errors.add_trace(points(cost[rows], error[:, i], color, name, text=evaluation.labels(rows)))
        shares.add_trace(line(bins.centre, share[:, i], color, name, mode="lines+markers"))
    shares.add_hline(LEVEL, line={"color": GREY, "width": 1, "dash": "dash"})
    for figure in (errors, shares):
        figure.update_layout(showlegend=True).update_xaxes(type="log")
    errors.update_yaxes(rangemode="tozero")
    shares.update_yaxes(range=[0, 1.02])
    return [errors, shares]


def importance(ranking: Ranking) -> list[go.Figure]:
    """RMSE lost without each input, one figure per target."""
    figures = []
    for j, target in enumerate(ranking.targets):
        ranked = ranking.ranked(j)[:INPUTS][::-1]
        figure = _panel(130 + 34 * len(ranked), "RMSE lost without the input", "", target)
        bars = {"array": [2 * float(one.rmse_std[j]) for one in ranked], "color": GREY, "thickness": 1.5}
        names, lost = [html.escape(one.name) for one in ranked], [float(one.rmse[j]) for one in ranked]
        figure.add_trace(go.Bar(x=lost, y=names, orientation="h", error_x=bars, marker={"color": BLUE}))
        figures.append(figure.update_layout(margin={"b": 60}).update_yaxes(automargin=True, type="category"))
    return figures


def dependence(found: Sequence[Dependence], ranking: Ranking) -> list[go.Figure]:
    """Partial dependence on the most important inputs of each target, one figure each."""
    figures, by_name = [], {one.name: one for one in found}
    for j, target in enumerate(ranking.targets):
        for name in [one.name for one in ranking.ranked(j) if one.name in by_name][:VARIED]:
            one = by_name[name]
            figure = _panel(330, html.escape(name), html.escape(target), f"{target} by {name}")
            mean = one.mean[:, j]
            for noise, shade in ((True, 0.2), (False, 0.45)):
                (lower, upper), color = one.band(LEVEL, noise=noise), f"rgba(59,125,216,{shade})"
                if one.labels is None:
                    figure.add_trace(band(one.x, lower[:, j], upper[:, j], fillcolor=color))
                else:
                    bars = {"type": "data", "symmetric": False, "color": color, "width": 0, "thickness": 9}
                    bars |= {"array": upper[:, j] - mean, "arrayminus": mean - lower[:, j]}
                    figure.add_trace(points(one.x, mean, BLUE, error_y=bars))
            if one.labels is None:
                figure.add_trace(line(one.x, mean, BLUE))
            else:
                texts = [html.escape(label) for label in one.labels]
                figure.update_xaxes(tickvals=one.x, ticktext=texts, range=[-0.5, len(texts) - 0.5], automargin=True)
            ends = np.concatenate([bound[:, j] for each in found for bound in each.band(LEVEL)])
            figure.update_yaxes(range=padded(ends))
            figures.append(figure.update_layout(margin={"b": 50}, showlegend=False))
    return figures


def alpha(evaluation: Evaluation) -> Sliding:
    """LPD against alpha, and the intervals of the first target, with a slider over alpha."""
    model, rows = evaluation.fitted, evaluation.some(ALPHA_ROWS)
    X, y = evaluation.encoded.X[rows], evaluation.y[rows]
    curve = copy.deepcopy(model).tune_alpha(X, y if y.shape[1] > 1 else y[:, 0]).alpha_curve_
    own = math.log(model.alpha_) if 0 < model.alpha_ < math.inf else math.inf
    top = float(curve.lpds.max())
    near = curve.log_alphas[curve.lpds >= top - DEEPEST]
    low, high, start = float(near[0]), float(near[-1]), N_STEPS - 1
    if math.isfinite(own):  # the alpha in use is one of the steps
        low, high = min(low, own - 1), max(high, own + 1)
    log_alphas = np.linspace(low, max(high, low + 1), N_STEPS)
    if math.isfinite(own):
        start = int(np.abs(log_alphas - own).argmin())
        log_alphas[start] = own
    shown = rows[:: max(1, -(-len(rows) // BAND_ROWS))]
    shown = shown[np.argsort(evaluation.where.affine_cost[shown], kind="stable")]
    place, truth, mean = np.arange(1.0, len(shown) + 1), evaluation.y[shown, 0], evaluation.p.point[shown, 0]
    figure, readings = panels(2, 1, height=760, row_heights=[0.4, 0.6], vertical_spacing=0.12), []
    figure.update_layout(legend={"y": 1.08}, margin={"l": 55, "r": 10})
    for step, log_alpha in enumerate(log_alphas):
        p = model.at_alpha(float(log_alpha)).predictive(evaluation.encoded.X[shown]).with_output_axis()
        lower, upper = (bound[:, 0] for bound in p.interval(LEVEL))
        lpd = np.interp([log_alpha], curve.log_alphas, curve.lpds)
        dot = points(log_alpha[None], lpd, ORANGE, size=11, visible=step == start)
        figure.add_trace(dot, 1, 1).add_trace(band(place, lower - mean, upper - mean, visible=step == start), 2, 1)
        share, width = ((truth >= lower) & (truth <= upper)).mean(), written((upper - lower).mean())
        readings.append(
            f"log alpha {log_alpha:.2f}{' (in use)' if log_alpha == own else ''}: LPD {lpd[0]:.3f}; of the rows shown, "
            f"{share:.0%} are inside, mean width {width}"
        )
    figure.add_trace(line(curve.log_alphas, curve.lpds, BLUE, "LPD of these rows"), 1, 1)
    figure.add_trace(points(place, truth - mean, GREY, "error", text=evaluation.labels(shown)), 2, 1)
    lowest = max(float(curve.lpds.min()), top - DEEPEST)
    pad = 0.08 * (top - lowest) or 1.0
    reach = 1.3 * max(float(np.abs(truth - mean).max()), float(2 * evaluation.p.std[shown, 0].max()))
    figure.update_xaxes(title="log alpha", range=[log_alphas[0], log_alphas[-1]], row=1, col=1)
    figure.update_yaxes(title="LPD, standardised", range=[lowest - pad, top + pad], row=1, col=1)
    figure.update_xaxes(title="rows, farther out to the right", row=2, col=1)
    figure.update_yaxes(title="true value - prediction", range=[-reach, reach], row=2, col=1)
    return sliding(figure, log_alphas, readings, start)
