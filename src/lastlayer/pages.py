"""Pages of HTML that need nothing from outside: plotly inside, readable in light and dark, safe with any text."""

import html
import json
from collections.abc import Sequence
from string import Template
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy import ndarray
from plotly.offline import get_plotlyjs

BLUE, ORANGE, GREY = "#3b7dd8", "#e08a2e", "#8a8a8a"
LAYOUT = {
    "template": "none",
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": "#888888", "size": 13},
    "margin": {"l": 60, "r": 20, "t": 40, "b": 50},
    "legend": {"orientation": "h", "y": 1.12},
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#888888", "activecolor": BLUE},
}
PAGE = Template(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem;
       color: light-dark(#222, #ddd); background: light-dark(#fff, #16181c); }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: .3rem .5rem; text-align: right; white-space: nowrap;
         border-bottom: 1px solid light-dark(#ddd, #333); }
th:first-child, td:first-child { text-align: left; }
input[type=search] { font: inherit; padding: .25rem .5rem; margin: .3rem 0; width: min(24rem, 100%); }
.rows table { max-height: 32rem; overflow-y: auto; }
.rows th { position: sticky; top: 0; background: light-dark(#fff, #16181c); }
.note { color: light-dark(#666, #999); font-size: 14px; }
#reading { font-variant-numeric: tabular-nums; }
</style>
<script>$plotly</script></head><body>
$body
<script>
$script
</script></body></html>
"""
)


def page(title: str, body: str, script: str = "") -> str:
    """A whole page; `body` and `script` are trusted, the title is not."""
    return PAGE.substitute(title=html.escape(title), plotly=get_plotlyjs(), body=body, script=script)


def figure_html(picture: go.Figure, name: str) -> str:
    """A figure as part of a page."""
    text: str = picture.to_html(full_html=False, include_plotlyjs=False, div_id=name, config={"displaylogo": False})
    return text


def table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    """A table of texts, whatever they contain."""
    lines = [_line("th", head), *(_line("td", row) for row in rows)]
    return f'<table id="{html.escape(name)}">{"".join(lines)}</table>'


def _line(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def script_data(value: Any) -> str:
    """A value for a script; no text in it can end the script."""
    return json.dumps(value).replace("<", "\\u003c")


def band(x: ndarray, lower: ndarray, upper: ndarray, *, visible: bool = True) -> go.Scatter:
    return go.Scatter(
        x=np.concatenate([x, x[::-1]]).round(5),
        y=np.concatenate([upper, lower[::-1]]).round(5),
        fill="toself",
        fillcolor="rgba(59,125,216,0.3)",
        line={"width": 0},
        hoverinfo="skip",
        visible=visible,
        showlegend=False,
    )


def slider(labels: Sequence[str], n_fixed: int, per_step: int, *, start: int, prefix: str) -> dict[str, Any]:
    """Shows the `per_step` traces of one step at a time; the first traces of a figure are those of the steps."""
    shown = per_step * len(labels)
    steps = [
        {
            "method": "restyle",
            "label": label,
            "args": [{"visible": [t // per_step == step for t in range(shown)] + [True] * n_fixed}],
        }
        for step, label in enumerate(labels)
    ]
    return {"active": start, "steps": steps, "currentvalue": {"prefix": prefix}, "pad": {"t": 40}}
