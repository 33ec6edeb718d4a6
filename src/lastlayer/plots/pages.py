"""Self-contained HTML pages: plotly included, readable in light and dark mode, safe with any text."""

import html
import json
from collections.abc import Sequence
from string import Template
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy import ndarray
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from lastlayer._internal.files import GENERATOR

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
PAGE = Template(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8">$generator<title>$title</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem;
       color: light-dark(#222, #ddd); background: light-dark(#fff, #16181c); overflow-wrap: anywhere; }
h1 { line-height: 1.2; }
.verdict { font-size: 1.15rem; padding: .8rem 1rem; border-left: 4px solid #3b7dd8;
           background: light-dark(#f2f6fc, #1d232c); }
.verdict.warning { border-color: #e08a2e; background: light-dark(#fdf5ec, #2a231b); }
.panels { display: grid; gap: .5rem 1rem; }
.panels.many { grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); }
.panels > div { min-width: 0; }
@media (hover: none) { .modebar { display: none; } }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; margin: .5rem 0 1rem; }
th, td { padding: .3rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid light-dark(#ddd,#333); }
img { max-width: 100%; }
th:first-child, td:first-child, .text { text-align: left; }
input[type=search] { font: inherit; padding: .25rem .5rem; margin: .3rem 0; width: min(24rem, 100%); }
.rows table { max-height: 32rem; overflow-y: auto; }
.rows th { position: sticky; top: 0; background: light-dark(#fff, #16181c); }
.rows td:first-child, .rows th:first-child { position: sticky; left: 0; background: light-dark(#fff, #16181c); }
.note { color: light-dark(#666, #999); font-size: 14px; }
#reading { font-variant-numeric: tabular-nums; }
</style>
<script>$plotly</script></head><body>
$body
<script>$script
if (matchMedia("(hover: none)").matches)  // a finger on a figure scrolls the page
  for (const figure of document.querySelectorAll(".js-plotly-plot")) Plotly.relayout(figure, {dragmode: false});
</script></body></html>
"""
)
SLIDING = Template(
    """<p id="reading"></p>$picture<script>
const readings = $readings;
const say = i => { document.getElementById("reading").textContent = readings[i]; };
document.getElementById("$name").on("plotly_sliderchange", event => say(event.slider.active));
say($start);
</script>"""
)


def page(title: str, body: str, script: str = "") -> str:
    """A complete page; `body` and `script` are trusted, the title is escaped."""
    return PAGE.substitute(
        generator=GENERATOR, title=html.escape(title), plotly=get_plotlyjs(), body=body, script=script
    )


def figure_html(picture: go.Figure, name: str) -> str:
    """A figure as part of a page."""
    config = {"displaylogo": False, "responsive": True}
    return picture.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)


def side_by_side(pictures: Sequence[go.Figure], name: str) -> str:
    """Figures next to each other on wide screens, below each other on a phone."""
    parts = [f"<div>{figure_html(picture, f'{name}-{i}')}</div>" for i, picture in enumerate(pictures)]
    many = " many" if len(parts) > 1 else ""
    return f'<div class="panels{many}" id="{html.escape(name)}">{"".join(parts)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    """A table of texts, which are escaped; columns of numbers are right-aligned."""
    numbers = [all(row[i][:1] in "-0123456789" for row in rows) for i in range(len(head))]
    styles = ["" if number else ' class="text"' for number in numbers]
    line = lambda tag, cells: "".join(
        f"<{tag}{style}>{html.escape(cell)}</{tag}>" for cell, style in zip(cells, styles, strict=True)
    )
    lines = [f"<tr>{line('th', head)}</tr>", *(f"<tr>{line('td', row)}</tr>" for row in rows)]
    return f'<table id="{html.escape(name)}">{"".join(lines)}</table>'


def panels(rows: int, columns: int, *, height: int, titles: Sequence[str] | None = None, **words: Any) -> go.Figure:
    """A figure with a grid of panels, in the colours of the page."""
    shown = None if titles is None else [html.escape(title) for title in titles]
    return make_subplots(rows, columns, subplot_titles=shown, **words).update_layout(template=TEMPLATE, height=height)


def points(x: ndarray, y: ndarray, color: str, name: str = "", *, size: int = 5, **words: Any) -> go.Scatter:
    """A trace of points."""
    marker = {"color": color, "size": size, "symbol": words.pop("symbol", "circle")}
    words = {"showlegend": bool(name)} | words
    return go.Scatter(x=x, y=y, mode="markers", marker=marker, name=html.escape(name), **words)


def line(x: Any, y: Any, color: str, name: str = "", *, dash: str = "solid", **words: Any) -> go.Scatter:
    """A trace of a line."""
    words = {"showlegend": bool(name), "mode": "lines"} | words
    return go.Scatter(x=x, y=y, line={"color": color, "dash": dash}, name=html.escape(name), **words)


def band(x: ndarray, lower: ndarray, upper: ndarray, **words: Any) -> go.Scatter:
    """A trace of a filled band, numbers rounded to six digits."""
    words = {"fillcolor": "rgba(59,125,216,0.3)", "showlegend": False} | words
    rounded = lambda *parts: [float(f"{v:.6g}") for v in np.concatenate(parts)]
    x_round, y_round = rounded(x, x[::-1]), rounded(upper, lower[::-1])
    return go.Scatter(x=x_round, y=y_round, fill="toself", line={"width": 0}, hoverinfo="skip", **words)


def sliding(figure: go.Figure, log_alphas: ndarray, readings: Sequence[str], start: int, name: str) -> str:
    """A figure with a slider over alpha: its first traces, two per alpha, are visible for one alpha at a time."""
    n = 2 * len(log_alphas)
    shows = lambda step: [t // 2 == step for t in range(n)] + [True] * (len(figure.data) - n)
    steps = [
        {"method": "restyle", "label": f"{log_alpha:.1f}", "args": [{"visible": shows(step)}]}
        for step, log_alpha in enumerate(log_alphas)
    ]
    slider = {"active": start, "steps": steps, "currentvalue": {"visible": False}, "pad": {"t": 60}}
    picture = figure_html(figure.update_layout(sliders=[slider]), name)
    sentences = json.dumps(readings).replace("<", "\\u003c")  # no text can end the script
    return SLIDING.substitute(name=name, start=start, readings=sentences, picture=picture)
