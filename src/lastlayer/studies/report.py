"""The study's report: one HTML file that needs nothing from outside, with a slider for alpha."""

import html
from string import Template

import numpy as np
import plotly.graph_objects as go
import torch
from numpy import ndarray
from plotly.subplots import make_subplots

from lastlayer.extrapolation import affine_cost
from lastlayer.metrics import log_predictive_density
from lastlayer.pages import BLUE, GREY, LAYOUT, ORANGE, band, figure_html, page, script_data, slider, table
from lastlayer.studies.data import TEST_RANGE, TRAIN_RANGE, truth
from lastlayer.studies.figures import FEATURE_SETS
from lastlayer.studies.networks import Scalers
from lastlayer.studies.paper import COLUMNS, NOTES, Study
from lastlayer.studies.results import caption, cells
from lastlayer.studies.three_samples import X_TEST, X_TRAIN, ThreeSamples, line

N_STEPS = 41
BODY = Template(
    """<h1>A neural network with Bayesian last layer: the simulation study</h1>
<p>After Fiedler and Lucia, "Improved uncertainty quantification for neural networks with Bayesian last layer" (2023),
run anew with one definition of every score.</p>
<h2>Table 1</h2><p class="note">$caption</p>$table<ul class="note">$notes</ul>
<h2>Figure 4: alpha and the band outside the data</h2>
<p id="reading">Move the slider.</p>$figure4
<h2>Figure 5: the Bayesian neural network</h2>$figure5
<h2>Figures 2 and 3: three samples of a line</h2>$figure3
<h2>Figure 1: features and their affine cost</h2>$figure1"""
)
SCRIPT = Template(
    """const readings = $readings;
const plot = document.getElementById("figure4");
const say = i => { document.getElementById("reading").textContent = readings[i]; };
plot.on("plotly_sliderchange", event => say(event.slider.active));
say($start);"""
)


def report(studies: list[Study], three: ThreeSamples) -> str:
    """The page; the same studies give the same text."""
    study = studies[0]
    figure4, readings, start = _slider(study)
    body = BODY.substitute(
        caption=html.escape(caption(studies)),
        table=table(["", *COLUMNS.values()], cells(studies), "table1"),
        notes="".join(f"<li>{html.escape(note)}</li>" for note in NOTES),
        figure4=figure_html(figure4, "figure4"),
        figure5=figure_html(_bnn(study), "figure5"),
        figure3=figure_html(_three(three), "figure3"),
        figure1=figure_html(_features(), "figure1"),
    )
    return page("lastlayer: the paper's study", body, SCRIPT.substitute(readings=script_data(readings), start=start))


def _slider(study: Study) -> tuple[go.Figure, list[str], int]:
    """Figure 4 with one hidden band for every alpha, what each alpha scores, and where the slider starts."""
    network, X = study.bll[0], np.linspace(*TEST_RANGE, 200)[:, None]
    scale = Scalers.of(study.data.train).targets.scale.numpy()
    log_alphas = np.linspace(-2.0, 18.0, N_STEPS)
    start = int(np.abs(log_alphas - float(network.posterior.log_alpha)).argmin())
    figure = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.06)
    readings = []
    nlml = network.nlml_at(log_alphas)
    for step, log_alpha in enumerate(log_alphas):
        p = network.predict(X, float(log_alpha))
        lower, upper = p.interval(0.95)
        for i in range(2):
            figure.add_trace(band(X[:, 0], lower[:, i], upper[:, i], visible=step == start), i + 1, 1)
        train, test = (
            log_predictive_density(network.predict(s.X, float(log_alpha)), s.y, scale=scale)
            for s in (study.data.train, study.data.test)
        )
        readings.append(
            f"log alpha {log_alpha:.1f}: LPD train {train:.2f}, LPD test {test:.2f}, NLML {nlml[step]:.3f}, "
            f"band of y2 at x = 1.3: {upper[np.abs(X[:, 0] - 1.3).argmin(), 1]:.2f}"
        )
    shown = 2 * N_STEPS
    mean = network.predict(X, float(network.posterior.log_alpha)).mean
    for i in range(2):
        _lines(figure, study, X, mean, i)
    labels = [f"{log_alpha:.1f}" for log_alpha in log_alphas]
    moves = slider(labels, len(figure.data) - shown, 2, start=start, prefix="log alpha = ")
    figure.update_layout(**LAYOUT, height=640, sliders=[moves])
    figure.update_yaxes(range=[-4, 4])
    return figure, readings, start


def _lines(figure: go.Figure, study: Study, X: ndarray, mean: ndarray, i: int) -> None:
    """Mean, truth and samples of one output."""
    first = i == 0
    lines = ((mean, "mean", {"color": BLUE}), (truth(X), "truth", {"color": ORANGE, "dash": "dash"}))
    for values, name, style in lines:
        trace = go.Scatter(x=X[:, 0].round(5), y=values[:, i].round(5), name=name, line=style, showlegend=first)
        figure.add_trace(trace, i + 1, 1)
    for part, name, symbol in ((study.data.train, "train", "circle"), (study.data.test, "test", "x")):
        marker = {"color": GREY, "size": 4, "symbol": symbol}
        trace = go.Scatter(x=part.X[:, 0], y=part.y[:, i], mode="markers", name=name, marker=marker, showlegend=first)
        figure.add_trace(trace, i + 1, 1)
    figure.add_vrect(*TRAIN_RANGE, fillcolor=GREY, opacity=0.08, line_width=0, row=i + 1, col=1)


def _bnn(study: Study) -> go.Figure:
    model, X = study.bnn[0], np.linspace(*TEST_RANGE, 200)[:, None]
    p, draws = model.predictive(X), model.draw_functions(X)
    lower, upper = p.interval(0.95)
    figure = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.06)
    for i in range(2):
        figure.add_trace(band(X[:, 0], lower[:, i], upper[:, i]), i + 1, 1)
        for draw in draws[:15]:
            style = {"color": BLUE, "width": 0.5}
            figure.add_trace(
                go.Scatter(x=X[:, 0].round(5), y=draw[:, i].round(5), line=style, hoverinfo="skip", showlegend=False),
                i + 1,
                1,
            )
        _lines(figure, study, X, p.mean, i)
    figure.update_layout(**LAYOUT, height=560)
    figure.update_yaxes(range=[-4, 4])
    return figure


def _three(three: ThreeSamples) -> go.Figure:
    own, best = float(three.posterior.log_alpha), min(three.curve.log_alpha, 30.0)
    log_alphas = np.linspace(own - 6, max(own, best) + 8, 80)
    figure = make_subplots(1, 2, subplot_titles=["mean and 3 standard deviations", "against log alpha"])
    for name, log_alpha, shade in (("alpha^max", best, 0.15), ("alpha*", own, 0.4)):
        mean, std = three.predict(X_TEST, log_alpha)
        shape = band(X_TEST[:, 0], mean - 3 * std, mean + 3 * std)
        figure.add_trace(shape.update(name=name, fillcolor=f"rgba(59,125,216,{shade})", showlegend=True), 1, 1)
    marker = {"color": GREY, "size": 8}
    figure.add_trace(
        go.Scatter(x=X_TRAIN[:, 0], y=line(X_TRAIN)[:, 0], mode="markers", marker=marker, name="samples"), 1, 1
    )
    for values, name, color in (
        (three.lpd(X_TEST, log_alphas), "LPD test", BLUE),
        (three.lpd(X_TRAIN, log_alphas), "LPD train", GREY),
        (three.nlml(log_alphas), "NLML", ORANGE),
    ):
        figure.add_trace(go.Scatter(x=log_alphas.round(4), y=values.round(4), name=name, line={"color": color}), 1, 2)
    figure.update_layout(**{**LAYOUT, "legend": {"orientation": "h", "y": -0.12}}, height=460)
    figure.update_yaxes(range=[-15, 8], row=1, col=2)
    return figure


def _features() -> go.Figure:
    grid = np.linspace(-1.8, 1.8, 61)
    points = torch.from_numpy(np.stack(np.meshgrid(grid, grid), -1).reshape(-1, 2))
    figure = make_subplots(1, 2, subplot_titles=list(FEATURE_SETS))
    for i, samples in enumerate(FEATURE_SETS.values(), 1):
        cost = np.log10(affine_cost(points, torch.from_numpy(samples), 10.0).numpy()).reshape(61, 61).round(4)
        figure.add_trace(
            go.Contour(
                x=grid.round(4), y=grid.round(4), z=cost, colorscale="Blues", showscale=i == 2, name="log10 cost"
            ),
            1,
            i,
        )
        marker = {"color": ORANGE, "size": 9}
        figure.add_trace(
            go.Scatter(x=samples[:, 0], y=samples[:, 1], mode="markers", marker=marker, showlegend=False), 1, i
        )
    figure.update_layout(**LAYOUT, height=420)
    return figure
