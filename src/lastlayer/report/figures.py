"""The pictures of a report."""

import copy
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from numpy import ndarray
from plotly.subplots import make_subplots

from lastlayer.metrics import LEVELS
from lastlayer.pages import BLUE, GREY, LAYOUT, ORANGE, band, slider
from lastlayer.plots import binomial_band
from lastlayer.report.judged import Judged

COLORS = (BLUE, ORANGE, "#3a9a5d", "#9d6fc0", "#c0504d", "#4bacc6")
BARS, POINTS, ALPHA_ROWS, BAND_ROWS = 400, 2000, 1000, 200
N_STEPS = 41
DEEPEST = 8.0
"""How far below its top the LPD is drawn."""


def _panels(names: Sequence[str], height: int, columns: int = 2) -> tuple[go.Figure, list[tuple[int, int]]]:
    """One panel a target."""
    columns = min(columns, len(names))
    rows = -(-len(names) // columns)
    figure = make_subplots(rows, columns, subplot_titles=[html.escape(name) for name in names])
    below = {"orientation": "h", "yref": "container", "y": 0.0, "yanchor": "bottom"}
    margin = {"l": 60, "r": 20, "t": 70, "b": 90}
    figure.update_layout(**{**LAYOUT, "legend": below, "margin": margin}, height=height * rows + 100)
    _grid(figure)
    return figure, [(i // columns + 1, i % columns + 1) for i in range(len(names))]


def _grid(figure: go.Figure) -> None:
    figure.update_xaxes(gridcolor="rgba(128,128,128,0.2)", zerolinecolor="rgba(128,128,128,0.4)")
    figure.update_yaxes(gridcolor="rgba(128,128,128,0.2)", zerolinecolor="rgba(128,128,128,0.4)")


def parity(judged: Judged) -> go.Figure:
    figure, places = _panels(judged.names, 420)
    lower, upper = judged.interval
    inside, rows = (lower <= judged.y) & (judged.y <= upper), judged.some(BARS)
    for i, (row, column) in enumerate(places):
        y, mean = judged.y[:, i], judged.p.mean[:, i]
        ends = [float(y[rows].min()), float(y[rows].max())]
        line = go.Scatter(x=ends, y=ends, mode="lines", line={"color": GREY, "dash": "dash"}, showlegend=False)
        figure.add_trace(line, row, column)
        for hit, color, word in (
            (inside[:, i], BLUE, "interval holds the true value"),
            (~inside[:, i], ORANGE, "misses"),
        ):
            r = rows[hit[rows]]
            bars = {"array": upper[r, i] - mean[r], "arrayminus": mean[r] - lower[r, i], "width": 0, "thickness": 1}
            trace = go.Scatter(
                x=y[r],
                y=mean[r],
                error_y={"type": "data", "symmetric": False, "color": color, **bars},
                mode="markers",
                marker={"color": color, "size": 5},
                name=word,
                text=[f"row {judged.table.row(k)}" for k in r],
                showlegend=i == 0,
            )
            figure.add_trace(trace, row, column)
        figure.update_xaxes(title="true value", row=row, col=column)
        figure.update_yaxes(title="prediction", row=row, col=column)
    return figure


def calibration(judged: Judged) -> go.Figure:
    figure = go.Figure()
    levels = np.concatenate([[0.0], LEVELS, [1.0]])
    figure.add_trace(band(levels, *binomial_band(len(judged.y), levels)).update(fillcolor="rgba(128,128,128,0.25)"))
    figure.add_trace(go.Scatter(x=[0, 1], y=[0, 1], line={"color": GREY, "dash": "dash"}, name="share = level"))
    distance = np.abs(2 * judged.p.cdf(judged.y) - 1)
    for i, name in enumerate(judged.names):
        shares = [(distance[:, i] <= level).mean() for level in LEVELS]
        style = {"color": COLORS[i % len(COLORS)]}
        figure.add_trace(go.Scatter(x=LEVELS, y=shares, mode="lines+markers", line=style, name=html.escape(name)))
    figure.update_layout(**LAYOUT, height=460)
    figure.update_xaxes(title="level of the interval", range=[0, 1])
    figure.update_yaxes(title="share of true values inside", range=[0, 1])
    _grid(figure)
    return figure


def residuals(judged: Judged) -> go.Figure:
    figure, places = _panels(judged.names, 340)
    far, rows = judged.where.quantile == 1, judged.some(POINTS)
    for i, (row, column) in enumerate(places):
        for outside, color, word in ((False, BLUE, "like the training rows"), (True, ORANGE, "farther out than all")):
            r = rows[far[rows] == outside]
            trace = go.Scatter(
                x=judged.p.mean[r, i],
                y=judged.error[r, i],
                mode="markers",
                marker={"color": color, "size": 5},
                name=word,
                text=[f"row {judged.table.row(k)}" for k in r],
                showlegend=i == 0,
            )
            figure.add_trace(trace, row, column)
        for edge in (-1.96, 1.96):
            figure.add_hline(edge, line={"color": GREY, "dash": "dash", "width": 1}, row=row, col=column)
        figure.update_xaxes(title="prediction", row=row, col=column)
        figure.update_yaxes(title="error / std", row=row, col=column)
    return figure


def extrapolation(judged: Judged) -> go.Figure:
    """Errors against the affine cost."""
    rows = judged.some(POINTS)
    figure = go.Figure()
    cost = np.maximum(judged.where.affine_cost, 1e-12)
    for i, name in enumerate(judged.names):
        figure.add_trace(
            go.Scatter(
                x=cost[rows],
                y=np.abs(judged.error[rows, i]),
                mode="markers",
                marker={"color": COLORS[i % len(COLORS)], "size": 5},
                text=[f"row {judged.table.row(k)}" for k in rows],
                name=html.escape(name),
            )
        )
    figure.update_layout(**LAYOUT, height=380, showlegend=True)
    figure.update_xaxes(title="affine cost (farther out to the right)", type="log")
    figure.update_yaxes(title="|error| / std", rangemode="tozero")
    _grid(figure)
    return figure


@dataclass(frozen=True)
class AlphaFigure:
    """The picture with the slider, a sentence for every step, and where it starts."""

    figure: go.Figure
    readings: list[str]
    start: int
    rows: int


def alpha(judged: Judged) -> AlphaFigure:
    """LPD against alpha, and what alpha makes of the intervals of the first target."""
    model, rows = judged.fitted.model, judged.some(ALPHA_ROWS)
    X, y = judged.encoded.X[rows], judged.y[rows]
    curve = copy.deepcopy(model).tune_alpha(X, y if y.shape[1] > 1 else y[:, 0]).alpha_curve_
    own = float(np.mean(model.log_alphas_))
    log_alphas = np.linspace(*_where_it_matters(curve.log_alphas, curve.lpds, own), N_STEPS)
    if math.isfinite(own):  # the alpha in use is one of the steps
        log_alphas[np.abs(log_alphas - own).argmin()] = own
    start = int(np.abs(log_alphas - own).argmin()) if math.isfinite(own) else N_STEPS - 1
    shown = rows if len(rows) <= BAND_ROWS else rows[:: -(-len(rows) // BAND_ROWS)]
    shown = shown[np.argsort(judged.where.affine_cost[shown], kind="stable")]
    place, mean = np.arange(1.0, len(shown) + 1), judged.p.mean[shown, :1]
    figure = make_subplots(1, 2, column_widths=[0.4, 0.6])
    readings = []
    for step, log_alpha in enumerate(log_alphas):
        p = model.at_alpha(float(log_alpha)).predictive(judged.encoded.X[shown])
        lower, upper = p.interval(0.95)
        lpd = float(np.interp(log_alpha, curve.log_alphas, curve.lpds))
        dot = {"color": ORANGE, "size": 11}
        figure.add_trace(
            go.Scatter(x=[log_alpha], y=[lpd], mode="markers", marker=dot, visible=step == start, showlegend=False),
            1,
            1,
        )
        figure.add_trace(
            band(place, (lower[:, :1] - mean)[:, 0], (upper[:, :1] - mean)[:, 0], visible=step == start), 1, 2
        )
        inside = ((judged.y[shown] >= lower) & (judged.y[shown] <= upper))[:, 0].mean()
        readings.append(
            f"log alpha {log_alpha:.2f}{' (in use)' if log_alpha == own else ''}: LPD {lpd:.3f}; of the rows shown "
            f"{inside:.0%} are inside, mean width {(upper - lower)[:, 0].mean():.4g}"
        )
    n_steps = len(figure.data)
    line = go.Scatter(x=curve.log_alphas, y=curve.lpds, mode="lines", line={"color": BLUE}, name="LPD of these rows")
    figure.add_trace(line, 1, 1)
    text = [f"row {judged.table.row(k)}" for k in shown]
    error, marker = judged.y[shown, 0] - mean[:, 0], {"color": GREY, "size": 5}
    figure.add_trace(go.Scatter(x=place, y=error, mode="markers", marker=marker, name="error", text=text), 1, 2)
    labels = [f"{log_alpha:.1f}" for log_alpha in log_alphas]
    moves = slider(labels, len(figure.data) - n_steps, 2, start=start, prefix="log alpha = ")
    figure.update_layout(**LAYOUT, height=520, sliders=[moves])
    top = float(curve.lpds.max())
    lowest = max(float(curve.lpds.min()), top - DEEPEST)
    pad = 0.08 * (top - lowest) or 1.0
    figure.update_xaxes(title="log alpha", range=[log_alphas[0], log_alphas[-1]], row=1, col=1)
    figure.update_yaxes(title="LPD, standardised", range=[lowest - pad, top + pad], row=1, col=1)
    reach = 1.3 * max(float(np.abs(error).max()), float(2 * judged.p.std[shown, 0].max()))
    figure.update_xaxes(title="rows, farther out to the right", row=1, col=2)
    figure.update_yaxes(title="true value - prediction", range=[-reach, reach], row=1, col=2)
    _grid(figure)
    return AlphaFigure(figure, readings, start, len(rows))


def _where_it_matters(log_alphas: ndarray, lpds: ndarray, own: float) -> tuple[float, float]:
    """The part of the curve where the LPD is not lost in depths, with the alpha in use."""
    near = np.flatnonzero(lpds >= lpds.max() - DEEPEST)
    low, high = float(log_alphas[near[0]]), float(log_alphas[near[-1]])
    if math.isfinite(own):
        low, high = min(low, own - 1), max(high, own + 1)
    return low, max(high, low + 1)
