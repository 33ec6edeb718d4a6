"""The report of the study: one self-contained HTML file with a slider for alpha."""

from base64 import b64encode
from pathlib import Path

import numpy as np

from lastlayer.predictions.metrics import log_predictive_density
from lastlayer.report.pages import BLUE, GREY, ORANGE, Sliding, band, line, panels, points, rendered, sliding
from lastlayer.studies.data import TEST_RANGE, TRAIN_RANGE, truth
from lastlayer.studies.networks import Scalers
from lastlayer.studies.paper import COLUMNS, NOTES, Study, caption, cells

N_STEPS = 41


def report(studies: list[Study], folder: Path) -> str:
    """Make the page with the figures that `draw_all` wrote to the folder; the same studies give the same text."""
    pictures = {i: b64encode((folder / f"figure{i}.png").read_bytes()).decode() for i in (1, 2, 3, 5)}
    lines = [["", *COLUMNS.values()], *cells(studies)]
    words = {"caption": caption(studies), "lines": lines, "notes": NOTES}
    return rendered("study.html", pictures=pictures, figure4=_figure4(studies[0]), **words)


def _figure4(study: Study) -> Sliding:
    """Figure 4 with one hidden band per alpha, and the scores of each alpha."""
    network, X = study.bll[0], np.linspace(*TEST_RANGE, 200)[:, None]
    scale = Scalers.of(study.data.train).targets.scale.numpy()
    log_alphas = np.linspace(-2.0, 18.0, N_STEPS)
    own = float(network.posterior.log_alpha)
    start = int(np.abs(log_alphas - own).argmin())
    figure, readings = panels(2, 1, height=640, shared_xaxes=True, vertical_spacing=0.06), []
    for step, (log_alpha, nlml) in enumerate(zip(log_alphas, network.nlml_at(log_alphas), strict=True)):
        lower, upper = network.predict(X, float(log_alpha)).interval(0.95)
        for i in range(2):
            figure.add_trace(band(X[:, 0], lower[:, i], upper[:, i], visible=step == start), i + 1, 1)
        train, test = (
            log_predictive_density(network.predict(s.X, float(log_alpha)), s.y, scale=scale)
            for s in (study.data.train, study.data.test)
        )
        readings.append(
            f"log alpha {log_alpha:.1f}: LPD train {train:.2f}, LPD test {test:.2f}, NLML {nlml:.3f}, "
            f"band of y2 at x = 1.3: {upper[np.abs(X[:, 0] - 1.3).argmin(), 1]:.2f}"
        )
    mean = network.predict(X, own).mean
    for i in range(2):
        for values, name, color, dash in ((mean, "mean", BLUE, "solid"), (truth(X), "truth", ORANGE, "dash")):
            x, y = X[:, 0].round(5), values[:, i].round(5)
            figure.add_trace(line(x, y, color, name, dash=dash, showlegend=i == 0), i + 1, 1)
        for part, name, symbol in ((study.data.train, "train", "circle"), (study.data.test, "test", "x")):
            dots = points(part.X[:, 0], part.y[:, i], GREY, name, size=4, symbol=symbol, showlegend=i == 0)
            figure.add_trace(dots, i + 1, 1)
        figure.add_vrect(*TRAIN_RANGE, fillcolor=GREY, opacity=0.08, line_width=0, row=i + 1, col=1)
    figure.update_yaxes(range=[-4, 4])
    return sliding(figure, log_alphas, readings, start)
