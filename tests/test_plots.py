"""What the pictures show: every mark, line and title against the numbers that it stands for."""

import re
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import close, refused
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy import ndarray
from scipy import stats

from lastlayer import plots
from lastlayer.calibration.alpha import AlphaCurve
from lastlayer.calibration.curve import Calibration, CalibrationPoints, Curve, Tails
from lastlayer.plots import drawing
from lastlayer.predictions.metrics import LEVELS, calibration_error, coverage, rmse
from lastlayer.predictions.mixture import MixturePrediction

pytestmark = pytest.mark.usefixtures("as_a_user")

JUDGES = (plots.parity, plots.calibration_curve, plots.sharpness, plots.extrapolation_error, plots.coverage_by_cost)


def prediction(m: int = 60, q: int = 2, c: int = 1) -> MixturePrediction:
    """Of c members, whose variances grow with the cost."""
    rng = np.random.default_rng(0)
    cost, weights = np.exp(rng.normal(-1, 1.5, m)), np.full((c, m), 1 / c)
    noise_var = rng.uniform(0.5, 2, (c, 1, q)).repeat(m, 1)
    return MixturePrediction(rng.normal(0, 3, (c, m, q)), cost[:, None] * noise_var, noise_var, cost, weights)


def targets(p: MixturePrediction) -> ndarray:
    return p.sample(1, random_state=1)[0]


def case(m: int = 60, q: int = 2, c: int = 1) -> tuple[MixturePrediction, ndarray]:
    p = prediction(m, q, c)
    return p, targets(p)


def narrower(p: MixturePrediction, factor: float) -> MixturePrediction:
    """The same prediction with standard deviations divided by `factor`."""
    scaled = {
        f"component_{part}_var": getattr(p, f"component_{part}_var") / factor**2 for part in ("epistemic", "noise")
    }
    return replace(p, **scaled)


def wrong_far_out() -> tuple[MixturePrediction, ndarray]:
    """Errors five times too large where the cost is above 2."""
    p, y = case(m=20_000, q=1)
    return p, p.mean + np.where(p.affine_cost > 2, 5, 1)[:, None] * (y - p.mean)


def panels(figure: Figure, q: int, of: int | None = None) -> list[tuple[int, Axes]]:
    """The axes of each output, of so many."""
    assert len(figure.axes) == (of or q)
    return list(enumerate(figure.axes[:q]))


def calibration(n: int = 400, q: int = 2, *, tails: bool = False, noise: bool = True) -> Calibration:
    """Held-out points whose squared errors follow a curve, with or without noise."""
    rng = np.random.default_rng(0)
    curve = Curve(rng.uniform(0.5, 2, q), rng.uniform(0.5, 2, q), 0.6)
    kind = rng.choice(["random", "blocked"], n)
    v = np.exp(rng.normal(-2, 1, n) + 2 * (kind == "blocked"))
    squares = curve.factor(v) * (rng.chisquare(1, (n, q)) if noise else 1)
    wide = Tails(0.1, 6.0) if tails else Tails()
    return Calibration({0.0: curve}, CalibrationPoints(v, squares, kind), lpd=-1.25, lpd_before=-2.5, tails=wide)


def alpha_curve(log_alpha: float = 4.0) -> AlphaCurve:
    log_alphas = np.linspace(-5, 20, 101)
    lpds = -np.square(np.minimum(log_alphas, 12) - 4) / 50
    lpd = float(np.interp(log_alpha, log_alphas, lpds))
    return AlphaCurve(log_alpha, lpd, float(np.interp(0.0, log_alphas, lpds)), log_alphas, lpds)


def line(ax: Axes, label: str) -> Line2D:
    found = [x for x in ax.lines if str(x.get_label()).startswith(label)]
    assert len(found) == 1, (label, [x.get_label() for x in ax.lines])
    return found[0]


def xy(ax: Axes, label: str) -> ndarray:
    return np.stack([np.asarray(x, float) for x in line(ax, label).get_data()], 1)


def bars(ax: Axes, label: str) -> tuple[ndarray, ndarray, ndarray, ndarray]:
    """Places, heights, lower and upper ends of error bars."""
    found = [x for x in ax.containers if isinstance(x, ErrorbarContainer) and str(x.get_label()).startswith(label)]
    assert len(found) == 1, label
    points, _, (collection,) = found[0]
    ends = np.array(collection.get_segments())[..., 1]
    x, height = (np.asarray(data, float) for data in points.get_data())
    return x, height, ends[:, 0], ends[:, 1]


def headline(figure: Figure) -> str:
    return figure.get_suptitle()


def rendered(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=40)
    return buffer.getvalue()


@pytest.mark.parametrize("c", [1, 3])
@pytest.mark.parametrize("q", [1, 3])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_parity_marks_the_targets_outside_their_interval(c: int, q: int, level: float) -> None:
    p, y = case(q=q, c=c)
    lower, upper = p.interval(level)
    figure = plots.parity(p, y, level=level)
    for i, ax in panels(figure, q):
        out = (y[:, i] < lower[:, i]) | (y[:, i] > upper[:, i])
        assert out.any()
        for mask, label, bar in ((out, "outside", ax.collections[1]), (~out, "target inside", ax.collections[0])):
            close(xy(ax, label), np.stack([y[mask, i], p.mean[mask, i]], 1))
            close(np.array(bar.get_segments())[..., 1], np.stack([lower[mask, i], upper[mask, i]], 1))
        assert f"{coverage(p, y, level, per_output=True)[i]:.1%} inside" in ax.get_title()
    assert f"{100 * level:g}% of the bars" in headline(figure)


def test_parity_says_what_a_perfect_model_shows_and_how_many_points_are_beyond_its_axes() -> None:
    p, y = case(m=200, q=1)
    y[7] = 1e6
    least, most = stats.binom.ppf([0.025, 0.975], 200, 0.9) / 200
    (ax,) = plots.parity(p, y).axes
    assert ax.get_title().endswith(f"good: {100 * least:.1f} to {100 * most:.1f}%")
    assert ax.get_xlim()[1] < 100
    assert [t.get_text() for t in ax.texts] == ["1 beyond the axes"]


@pytest.mark.parametrize("c", [1, 3])
@pytest.mark.parametrize("q", [1, 2])
def test_calibration_curve_shows_coverages(c: int, q: int) -> None:
    p, y = case(q=q, c=c)
    figure = plots.calibration_curve(p, y)
    slow = np.array([coverage(p, y, float(level), per_output=True) for level in LEVELS])
    for i, ax in panels(figure, q):
        close(xy(ax, "prediction"), np.stack([LEVELS, slow[:, i]], 1))
        close(xy(ax, "share = level"), np.array([[0.0, 0.0], [1.0, 1.0]]))
    assert f"calibration error {calibration_error(p, y):.3f}" in headline(figure)


@pytest.mark.parametrize("m", [7, 150, 100_000])
def test_calibration_band_is_binomial(m: int) -> None:
    p = prediction(m, q=1)
    (ax,) = plots.calibration_curve(p, targets(p)).axes
    (band,) = ax.collections
    corners = {tuple(np.round(v, 12)) for v in band.get_paths()[0].vertices}
    for level in LEVELS:
        for bound in stats.binom.ppf([0.025, 0.975], m, level) / m:
            assert tuple(np.round([level, bound], 12)) in corners


def test_several_models_share_a_calibration_curve_and_many_are_told_apart() -> None:
    p, y = case()
    models = {"right": p, "too narrow": narrower(p, 3), "too wide": narrower(p, 1 / 3)}
    for i, ax in panels(plots.calibration_curve(models, y), 2):
        for name, model in models.items():
            shares = [coverage(model, y, float(level), per_output=True)[i] for level in LEVELS]
            close(xy(ax, f"{name}: ")[:, 1], np.array(shares))
            assert str(line(ax, f"{name}: ").get_label()).endswith(f"{calibration_error(model, y):.3f}")
        assert len({line(ax, f"{name}: ").get_color() for name in models}) == 3
    ax = plots.calibration_curve({f"model {k}": p for k in range(9)}, y).axes[0]
    assert len({(x.get_color(), x.get_linestyle()) for x in ax.lines if str(x.get_label()).startswith("model")}) == 9


@pytest.mark.parametrize("q", [1, 2])
def test_one_bin_of_sharpness_is_the_rmse_over_the_predicted_deviation(q: int) -> None:
    """Fewer points than two bins need are one bin."""
    p, y = case(m=20, q=q)
    figure = plots.sharpness(p, y)
    for i, ax in panels(figure, q, of=2 * q):
        x, height, _, _ = bars(ax, "RMSE")
        close(x, np.sqrt(p.var[:, i].mean(keepdims=True)))
        close(height, rmse(p, y, per_output=True)[i : i + 1])
        assert f"RMSE {height[0]:.3g}, predicted {x[0]:.3g}" in ax.get_title()
        close(xy(ax, "absolute errors"), np.stack([p.std[:, i], np.abs(y - p.mean)[:, i]], 1))
        assert sum(bar.get_height() for bar in figure.axes[q + i].patches) == 20


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_bins_of_sharpness_tell_how_much_too_narrow_deviations_are(factor: float) -> None:
    p = prediction(m=20_000, q=1)
    top, _ = plots.sharpness(narrower(p, factor), targets(p)).axes
    x, height, lower, upper = bars(top, "RMSE")
    assert len(x) >= 8
    assert ((lower < height) & (height < upper)).all()
    # bars of 2 standard errors miss one time in 20; twice as long ones hardly ever
    assert (np.abs(np.log(height / (factor * x))) < 2 * np.log(upper / height)).all()


@pytest.mark.parametrize(
    ("log_alpha", "alpha_star", "found", "star", "markers"),
    [(4.0, np.exp(0.5), 4.0, 0.5, ("o", "o")), (np.inf, 0.0, 20.0, -5.0, (">", "<"))],
)
def test_alpha_curve_marks_both_alphas_or_arrows_to_them(log_alpha, alpha_star, found, star, markers) -> None:
    curve = alpha_curve(log_alpha)
    (ax,) = plots.alpha_curve(curve, alpha_star=alpha_star).axes
    close(xy(ax, "LPD"), np.stack([curve.log_alphas, curve.lpds], 1))
    close(xy(ax, "αᵐᵃˣ"), np.array([[found, curve.lpd]]))
    close(xy(ax, "α*"), np.array([[star, np.interp(star, curve.log_alphas, curve.lpds)]]))
    close(xy(ax, "limit")[:, 1], np.full(2, curve.lpds[-1]))
    close(xy(ax, "before")[:, 1], np.full(2, curve.lpd_before))
    assert (line(ax, "αᵐᵃˣ").get_marker(), line(ax, "α*").get_marker()) == markers


def test_alpha_star_may_be_missing() -> None:
    without = plots.alpha_curve(alpha_curve())
    assert not [x for x in without.axes[0].lines if str(x.get_label()).startswith("α*")]
    assert headline(without) == str(alpha_curve())


@pytest.mark.parametrize("q", [1, 2])
def test_extrapolation_error_shows_scaled_errors_and_their_quantiles(q: int) -> None:
    p, y = case(m=25, q=q)  # one bin
    scaled = np.abs(y - p.mean) / p.std
    for i, ax in panels(plots.extrapolation_error(p, y), q):
        close(xy(ax, "targets"), np.stack([p.affine_cost, scaled[:, i]], 1))
        for level in (0.5, 0.9):
            close(xy(ax, f"{level:.0%} quantile in bins")[0, 1], np.quantile(scaled[:, i], level))
            close(xy(ax, f"{level:.0%} quantile of a Gaussian")[:, 1], np.full(2, stats.halfnorm.ppf(level)))


@pytest.mark.parametrize("level", [0.5, 0.9])
@pytest.mark.parametrize("n", [15, 40, 1000])
def test_quantile_band_holds_95_percent_of_samples(n: int, level: float) -> None:
    draws = np.quantile(np.abs(np.random.default_rng(0).standard_normal((4000, n))), level, axis=1)
    lower, upper = drawing.quantile_band(n, level)
    inside = ((draws > lower) & (draws < upper)).mean()
    assert abs(inside - 0.95) < 0.02  # interpolation between two order statistics narrows it a little


def test_quantiles_rise_only_where_error_bars_are_too_short() -> None:
    (ax,) = plots.extrapolation_error(*wrong_far_out()).axes
    cost, quantile = xy(ax, "90% quantile in bins").T
    expected = stats.halfnorm.ppf(0.9) * np.where(cost > 2, 5, 1)
    clear = (cost < 1) | (cost > 4)  # away from the bin that holds the step
    assert clear.sum() >= 8
    assert (np.abs(np.log(quantile / expected))[clear] < 0.5).all()


def test_coverage_falls_only_where_intervals_are_too_narrow() -> None:
    (ax,) = plots.coverage_by_cost(*wrong_far_out()).axes
    cost, share = xy(ax, "share inside, in bins").T
    too_narrow = 2 * stats.norm.cdf(stats.norm.ppf(0.95) / 5) - 1
    for where, expected, off in ((cost < 1, 0.9, 0.1), (cost > 4, too_narrow, 0.15)):
        assert where.sum() >= 3
        assert (np.abs(share[where] - expected) < off).all()


def test_coverage_in_one_bin_is_the_share_of_all() -> None:
    p, y = case(m=25)
    for i, ax in panels(plots.coverage_by_cost(p, y, level=0.8), 2):
        close(xy(ax, "share inside, in bins")[0, 1], coverage(p, y, 0.8, per_output=True)[i])


def test_points_without_cost_stay_in_the_picture() -> None:
    p = prediction(m=50, q=1)
    free = replace(p, affine_cost=np.where(np.arange(50) < 5, 0.0, p.affine_cost))
    (ax,) = plots.extrapolation_error(free, targets(p)).axes
    assert (xy(ax, "targets")[:, 0] > 0).all()
    plots.extrapolation_error(replace(p, affine_cost=np.zeros(50)), targets(p))


@pytest.mark.parametrize("q", [1, 3])
@pytest.mark.parametrize("tails", [False, True])
def test_lines_of_cost_to_variance_are_the_formula(q: int, tails: bool) -> None:
    c = calibration(q=q, tails=tails)
    figure = plots.cost_to_variance(c)
    for i, ax in panels(figure, q):
        v, factor = xy(ax, "calibrated").T
        close(factor, c.curve.noise[i] + c.curve.slope[i] * v**c.curve.power)
        assert v[0] < c.points.cost.min() < c.points.cost.max() < v[-1]
        close(xy(ax, "uncalibrated")[:, 1], 1 + v)
        assert line(ax, "uncalibrated").get_linestyle() == "--"
        if tails:
            close(xy(ax, "with tails")[:, 1], (0.9 + 0.1 * 6.0) * factor)
        assert f"{c.curve.noise[i]:.3g} + {c.curve.slope[i]:.3g}" in ax.get_title()
    assert "-2.500 uncalibrated, -1.250 calibrated" in headline(figure)
    assert ("thin" in headline(figure)) == tails


def test_held_out_points_have_the_colour_of_their_kind() -> None:
    c = calibration()
    kinds = {"random": drawing.BLUE, "blocked": drawing.ORANGE, "given": drawing.GREEN, "other": drawing.GREY}
    c = replace(c, points=replace(c.points, kind=np.random.default_rng(1).choice([*kinds], 400)))
    for i, ax in enumerate(plots.cost_to_variance(c).axes):
        for kind, color in kinds.items():
            r = c.points.kind == kind
            close(xy(ax, f"{kind} held-out"), np.stack([c.points.cost[r], c.points.squared_error[r, i]], 1))
            assert to_hex(line(ax, f"{kind} held-out").get_color()) == color


def test_binned_means_of_errors_on_the_curve_are_on_the_curve() -> None:
    """However wide the bins are: each stands where the curve equals its own mean over the bin."""
    c = calibration(n=2000, noise=False)
    for i, ax in enumerate(plots.cost_to_variance(c).axes):
        for kind in ("random", "blocked"):
            v, mean, _, _ = bars(ax, f"{kind}, mean")
            assert len(v) >= 5
            close(mean, c.curve.factor(v)[:, i])


def test_error_bars_of_binned_means_are_two_standard_errors() -> None:
    c = calibration(n=25, q=1)
    c = replace(c, points=replace(c.points, kind=np.full(25, "random")))  # one bin
    (ax,) = plots.cost_to_variance(c).axes
    _, mean, lower, upper = bars(ax, "random, mean")
    squares = c.points.squared_error[:, 0]
    close(mean, squares.mean(keepdims=True))
    relative = squares.std() / np.sqrt(25) / squares.mean()
    close(np.log(np.append(upper / mean, mean / lower)), np.full(2, 2 * relative))


@given(
    m=st.integers(1, 300), decades=st.floats(0, 20), seed=st.integers(0, 99), tail=st.sampled_from([0, 1, 5, 20, 100])
)
def test_bins_hold_every_point_once_and_enough_of_them(m: int, decades: float, seed: int, tail: int) -> None:
    rng = np.random.default_rng(seed)
    x = 10 ** (decades * rng.uniform(size=m))
    x[:tail] *= 1e4
    bins = drawing.bins(x)
    assert sorted(np.concatenate(bins)) == list(range(m))
    assert all(x[a].max() <= x[b].min() for a, b in pairwise(bins))
    assert len(bins) == 1 or min(map(len, bins)) >= drawing.AT_LEAST


def test_a_few_far_points_do_not_drown_and_equal_ones_are_one_bin() -> None:
    x = np.append(np.geomspace(1, 2, 5000), np.geomspace(1e5, 1e6, 4))
    assert len(drawing.bins(x)[-1]) == drawing.AT_LEAST
    assert np.isin(np.arange(5000, 5004), drawing.bins(x)[-1]).all()
    assert len(drawing.bins(np.full(100, 3.0))) == 1


def pictures(m: int, q: int, c: int = 1) -> dict[str, Callable[[], Figure]]:
    p, y = case(m, q, c)
    evaluation: dict[str, Callable[[], Figure]] = {f.__name__: lambda f=f: f(p, y) for f in JUDGES}
    return evaluation | {
        "cost_to_variance": lambda: plots.cost_to_variance(calibration(m, q, tails=c > 1)),
        "alpha_curve": lambda: plots.alpha_curve(alpha_curve(), alpha_star=2.0),
    }


@pytest.mark.parametrize(("m", "q", "c"), [(1, 1, 1), (1, 2, 3), (80, 2, 3), (40, 6, 1)])
def test_every_picture_can_be_drawn_and_explains_itself(m: int, q: int, c: int) -> None:
    """In words above, at the axes and below; a row holds at most four outputs."""
    for name, draw in pictures(m, q, c).items():
        figure = draw()
        assert rendered(figure)
        assert headline(figure)
        assert figure.legends[0].get_texts()
        assert all(ax.get_ylabel() for ax in figure.axes if ax.get_subplotspec().is_first_col()), name
        assert max(ax.get_subplotspec().colspan.start for ax in figure.axes) < drawing.COLUMNS
        assert sum(bool(ax.get_xlabel()) for ax in figure.axes) == (1 if name == "alpha_curve" else q)
        if q > 1 and name != "alpha_curve":
            titles = sorted(ax.get_title() for ax in figure.axes if ax.get_title())
            assert [title[:8] for title in titles] == [f"output {i + 1}" for i in range(q)]


@pytest.mark.parametrize("name", ["parity", "sharpness", "extrapolation_error", "cost_to_variance"])
def test_of_many_points_some_are_shown_and_all_are_counted(name: str) -> None:
    m = 100_000
    shown = drawing.SHOWN // 4 if name == "parity" else drawing.SHOWN
    ax, again = (pictures(m, 1)[name]().axes[0] for _ in range(2))
    points = [x for x in ax.lines if x.get_marker() == "."]
    assert sum(len(x.get_xdata()) for x in points) == shown
    assert any(f"{shown:,} of 100,000 shown" in str(x.get_label()) for x in points)
    for a, b in zip(ax.lines, again.lines, strict=True):
        np.testing.assert_array_equal(a.get_xydata(), b.get_xydata())
    if name == "parity":
        p = prediction(m, 1)
        assert f"{coverage(p, targets(p)):.1%} inside" in ax.get_title()


@pytest.mark.parametrize("judge", JUDGES)
def test_perfect_and_constant_targets_can_be_drawn(judge: Any) -> None:
    one = np.ones((40, 1))
    p = MixturePrediction.gaussian(2 * one, epistemic_var=one, noise_var=np.ones(1), affine_cost=np.ones(40))
    assert rendered(judge(p, 2.5 * one))
    assert rendered(judge(p, p.mean))


@pytest.mark.parametrize("judge", JUDGES)
def test_one_output_takes_targets_without_a_second_axis(judge: Any) -> None:
    p, y = case(q=1)
    for a, b in zip(judge(p, y).axes[0].lines, judge(p, y[:, 0]).axes[0].lines, strict=True):
        np.testing.assert_array_equal(a.get_xydata(), b.get_xydata())


@pytest.mark.parametrize("judge", JUDGES)
def test_what_cannot_be_drawn_is_refused(judge: Any) -> None:
    p, y = case()
    y[17, 1] = np.nan
    refused(r"y has 1 NaN values in 1 rows \(first: row 17\)", judge, p, y)
    var = p.component_noise_var.copy()
    var[0, 3:5] = -p.component_epistemic_var[0, 3:5]
    without_noise = replace(p, component_noise_var=var)
    refused(r"zero or infinite standard deviation at 2 points \(first: row 3\)", judge, without_noise, targets(p))
    refused("0 points", judge, prediction(m=0), np.empty((0, 2)))
    for shape in ((59, 2), (60, 1), (60,), (2, 60)):
        words = rf"y has shape {re.escape(str(shape))}, .* 60 points and 2 outputs: .* shape \(60, 2\)"
        refused(words, judge, p, np.zeros(shape))


def test_misuse_is_refused_with_advice() -> None:
    p, y = case(m=3)
    for alpha_star in (-1.0, np.nan):
        refused(f"alpha_star={alpha_star}", plots.alpha_curve, alpha_curve(), alpha_star=alpha_star)
    unreachable = replace(p, affine_cost=np.array([1.0, np.inf, 2.0]))
    refused("affine_cost has 1 infinite .* row 1", plots.extrapolation_error, unreachable, y)
    for calibrated in (None, calibration(n=0)):
        refused(r"no held-out points: .* model\.calibrate\(X, y\)", plots.cost_to_variance, calibrated)
    refused("'other' has 59 points", plots.calibration_curve, {"one": p, "other": prediction(59)}, y)
    refused("the mapping has no prediction", plots.calibration_curve, {}, y)
    for level in (0.0, 1.0, 90.0):
        refused(f"level={level}", plots.parity, p, y, level=level)


def test_one_input_draws_mean_data_and_cost() -> None:
    def predictive(X: ndarray, *, noise: bool = True) -> MixturePrediction:
        mean = np.hstack([np.sin(X), 10 * X])
        return MixturePrediction.gaussian(
            mean,
            epistemic_var=np.hstack([X**2, X**2]) + 0.1,
            noise_var=np.array([0.3, 2.0]) * float(noise),
            affine_cost=X[:, 0] ** 2 + 0.1,
        )

    model: Any = SimpleNamespace(predictive=predictive)
    X = np.linspace(-1, 1, 9)[:, None]
    y = predictive(X).mean
    figure = plots.one_input(model, X, y, span=(-3, 3), truth=lambda x: np.hstack([x, x]), n=50)
    *outputs, cost = figure.axes
    grid = np.linspace(-3, 3, 50)
    for i, ax in enumerate(outputs):
        close(xy(ax, "mean"), np.stack([grid, predictive(grid[:, None]).mean[:, i]], 1))
        close(xy(ax, "truth"), np.stack([grid, grid], 1))
        close(xy(ax, "training data"), np.stack([X[:, 0], y[:, i]], 1))
    close(cost.lines[0].get_ydata(), grid**2 + 0.1)
    assert rendered(figure)
