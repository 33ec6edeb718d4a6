"""Self-contained HTML pages: plotly included, readable in light and dark mode, safe with any text."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy import ndarray
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from lastlayer._internal.files import GENERATOR
from lastlayer.tables.numbers import percent

BLUE, ORANGE, GREY = "#3b7dd8", "#e08a2e", "#8a8a8a"
GRID = {"gridcolor": "rgba(128,128,128,0.2)", "zerolinecolor": "rgba(128,128,128,0.4)"}
TEMPLATE = go.layout.Template(
    layout={
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "#888888", "size": 13},
        "margin": {"l": 60, "r": 20, "t": 40, "b": 50},
        "legend": {"orientation": "h", "y": 1.12},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#888888", "activecolor": BLUE},
        "xaxis": GRID,
        "yaxis": GRID,
    }
)


@dataclass(frozen=True)
class Sliding:
    """A figure with a slider, and a sentence for each of its steps."""

    figure: go.Figure
    readings: Sequence[str]
    start: int


def rendered(template: str, **content: Any) -> str:
    """A page of one of the templates; all texts are escaped."""
    loader = PackageLoader("lastlayer.report")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    pages.filters |= {"figure": _figure, "column_classes": _column_classes, "percent": percent, "count": "{:,}".format}
    constants = {"generator": Markup(GENERATOR), "plotly": Markup(get_plotlyjs())}
    return pages.get_template(template).render(constants | content)


def _figure(figure: go.Figure, name: str) -> Markup:
    config = {"displaylogo": False, "responsive": True}
    return Markup(figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config))


def _column_classes(lines: Sequence[Sequence[str]]) -> list[Markup]:
    """Attributes of the columns of a table below its header: those of numbers are right-aligned."""
    head, *rows = lines
    numbers = [all(row[i][:1] in "-0123456789" for row in rows) for i in range(len(head))]
    return [Markup("" if number else ' class="text"') for number in numbers]


def panels(rows: int, columns: int, *, height: int, titles: Sequence[str] | None = None, **words: Any) -> go.Figure:
    """A figure with a grid of panels, in the colours of the page."""
    shown = None if titles is None else [html.escape(title) for title in titles]
    return make_subplots(rows, columns, subplot_titles=shown, **words).update_layout(template=TEMPLATE, height=height)


def points(x: ndarray, y: ndarray, color: str, name: str = "", *, size: int = 5, **words: Any) -> go.Scatter:
    marker = {"color": color, "size": size, "symbol": words.pop("symbol", "circle")}
    words = {"showlegend": bool(name)} | words
    return go.Scatter(x=x, y=y, mode="markers", marker=marker, name=html.escape(name), **words)


def line(x: Any, y: Any, color: str, name: str = "", *, dash: str = "solid", **words: Any) -> go.Scatter:
    words = {"showlegend": bool(name), "mode": "lines"} | words
    return go.Scatter(x=x, y=y, line={"color": color, "dash": dash}, name=html.escape(name), **words)


def band(x: ndarray, lower: ndarray, upper: ndarray, **words: Any) -> go.Scatter:
    """A trace of a filled band, numbers rounded to six digits."""
    words = {"fillcolor": "rgba(59,125,216,0.3)", "showlegend": False} | words
    rounded = lambda *parts: [float(f"{v:.6g}") for v in np.concatenate(parts)]
    x_round, y_round = rounded(x, x[::-1]), rounded(upper, lower[::-1])
    return go.Scatter(x=x_round, y=y_round, fill="toself", line={"width": 0}, hoverinfo="skip", **words)


def sliding(figure: go.Figure, log_alphas: ndarray, readings: Sequence[str], start: int) -> Sliding:
    """A figure with a slider over alpha: its first traces, two per alpha, are visible for one alpha at a time."""
    n = 2 * len(log_alphas)
    shows = lambda step: [t // 2 == step for t in range(n)] + [True] * (len(figure.data) - n)
    steps = [
        {"method": "restyle", "label": f"{log_alpha:.1f}", "args": [{"visible": shows(step)}]}
        for step, log_alpha in enumerate(log_alphas)
    ]
    slider = {"active": start, "steps": steps, "currentvalue": {"visible": False}, "pad": {"t": 60}}
    return Sliding(figure.update_layout(sliders=[slider]), readings, start)
