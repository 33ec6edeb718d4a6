"""river's own checks of the wrapper, and what it says against the model inside."""

import copy
import runpy
from pathlib import Path

import numpy as np
import pytest
from helpers import refused, sine

from lastlayer import BLLRegressor
from lastlayer.errors import InputError
from lastlayer.online import DriftMonitor, ExponentialForgetting, OnlineModel, SlidingWindow

river = pytest.importorskip("river")
from river.checks import yield_checks  # noqa: E402

from lastlayer.integrations.river import RiverRegressor  # noqa: E402

pytestmark = pytest.mark.usefixtures("as_a_user")

X, Y = sine(120, seed=1, d=2)
ROWS = [{"a": float(a), "b": float(b)} for a, b in X]
TINY = {"hidden": (4,), "preset": "evidence", "max_epochs": 10, "random_state": 0}


def tiny(**more) -> BLLRegressor:
    return BLLRegressor(**TINY, **more)


@pytest.fixture(scope="module")
def fitted() -> BLLRegressor:
    return tiny().fit(X[:40], Y[:40])


def for_checks() -> RiverRegressor:
    return RiverRegressor(tiny(), warm_up=30)


@pytest.mark.parametrize("check", list(yield_checks(for_checks())), ids=lambda check: check.__name__)
def test_river_agrees(check):
    """Networks have no place for a feature they were not fitted to, and zero is no value of one that is missing."""
    if check.__name__ in for_checks()._unit_test_skips():
        refused(r"features .* are (missing|new)", check, for_checks())
    else:
        check(for_checks())


@pytest.mark.parametrize("memory", [None, ExponentialForgetting(20), SlidingWindow(25)], ids=str)
def test_it_fits_to_the_first_rows_and_then_learns_as_an_online_model(memory):
    model = RiverRegressor(tiny(), memory, warm_up=40)
    assert model.predict_one(ROWS[0]) == 0.0
    for x, y in zip(ROWS[:39], Y[:39], strict=True):
        model.learn_one(x, y)
        assert model.online is None
    assert model.predict_one(ROWS[50]) == pytest.approx(Y[:39].mean())
    early = model.predict_one(ROWS[50], with_interval=True)
    assert (early.center, early.width) == pytest.approx((Y[:39].mean(), 2 * 1.959964 * Y[:39].std()))
    start = (X[:40], Y[:40]) if isinstance(memory, SlidingWindow) else None
    online = OnlineModel(tiny().fit(X[:40], Y[:40]), memory, start=start)
    for i in range(39, 60):
        model.learn_one(ROWS[i], Y[i])
        if i > 39:
            online.update(X[i : i + 1], Y[i : i + 1])
    for i in range(60, 70):
        backwards = dict(reversed(ROWS[i].items()))
        mean, std = online.predict(X[i : i + 1], return_std=True)
        assert model.predict_one(backwards) == mean.item()
        gaussian = model.predict_one(backwards, with_dist=True)
        assert (gaussian.mu, gaussian.sigma) == pytest.approx((mean.item(), std.item()))
        lower, upper = online.predictive(X[i : i + 1]).interval(0.95)
        interval = model.predict_one(backwards, with_interval=True)
        assert (interval.lower, interval.upper) == (lower.item(), upper.item())


def test_a_fitted_model_and_a_running_one_go_on_in_a_copy(fitted):
    before = fitted.predict(X)
    running = OnlineModel(fitted, monitor=DriftMonitor()).update(X[40:50], Y[40:50])
    from_fitted = RiverRegressor(fitted, feature_names=["a", "b"], monitor=DriftMonitor())
    from_running = RiverRegressor(running, feature_names=("a", "b"))
    for i in range(40, 60):
        from_fitted.learn_one(ROWS[i], Y[i])
    for i in range(50, 60):
        from_running.learn_one(ROWS[i], Y[i])
    assert from_fitted.predict_one(ROWS[80]) == pytest.approx(from_running.predict_one(ROWS[80]), rel=1e-9)
    assert (from_fitted.drift.n_rows, from_running.drift.n_rows) == (20, 20)
    np.testing.assert_array_equal(fitted.predict(X), before)
    assert running.n_rows == 10
    assert from_fitted.clone().online.n_rows == 0


def test_names_come_from_the_table_that_was_fitted_to():
    pandas = pytest.importorskip("pandas")
    model = RiverRegressor(tiny().fit(pandas.DataFrame(ROWS[:40])[["b", "a"]], Y[:40]))
    turned = tiny().fit(X[:40, ::-1], Y[:40])
    assert model.predict_one(ROWS[50]) == pytest.approx(turned.predict(X[50:51, ::-1]).item(), rel=1e-9)


def test_mistakes_are_told_and_change_nothing(fitted):
    model = RiverRegressor(fitted, feature_names=["a", "b"])
    before = copy.deepcopy(model.online).predict(X)
    for words, x in {
        r"features \['b'\] are missing: every row needs \['a', 'b'\]": {"a": 1.0},
        r"features \['c'\] are new: the model knows \['a', 'b'\]": {"a": 1.0, "b": 2.0, "c": 3.0},
        r"features \['a'\] are not finite": {"a": np.nan, "b": 0.0},
    }.items():
        refused(words, model.predict_one, x)
        refused(words, model.learn_one, x, 0.0)
    refused("y has 1 NaN", model.learn_one, ROWS[0], np.nan)
    np.testing.assert_array_equal(model.online.predict(X), before)
    refused("target is nan", RiverRegressor(tiny()).learn_one, ROWS[0], np.nan)
    refused("cannot be combined", model.predict_one, ROWS[0], with_dist=True, with_interval=True)
    with pytest.raises(InputError, match=r"0 of 200 rows"):
        _ = RiverRegressor(tiny()).drift


def test_what_cannot_be_made_is_refused(fitted):
    names = {"feature_names": ["a", "b"]}
    two = tiny().fit(X[:40], np.stack([Y[:40], Y[:40]], 1))
    for words, model, *given, more in (
        (r"give feature_names=\[\.\.\.\]", fitted, {}),
        ("3 feature_names for a model of 2 columns", fitted, {"feature_names": ["a", "b", "c"]}),
        ("warm_up=1", fitted, {"warm_up": 1}),
        ("confidence_level=95", fitted, {"confidence_level": 95}),
        ("2 outputs", two, names),
        ("its own memory", OnlineModel(fitted), ExponentialForgetting(9), names),
    ):
        refused(words, RiverRegressor, model, *given, **more)


def test_the_stream_of_the_example_runs(capsys):
    path = Path(__file__).parents[1] / "examples" / "clients" / "river_stream.py"
    main = runpy.run_path(str(path))["main"]
    options = {"rows": 400, "warm-up": 80, "memory": 60, "preset": "evidence", "epochs": 30}
    scores = main([word for name, value in options.items() for word in (f"--{name}", str(value))])
    table = capsys.readouterr().out
    assert all(name in table for name in scores)
    assert "rows seen" in table
    (steady, fouling), (linear, linear_fouling) = scores.values()
    assert steady.errors[0].get() < linear.errors[0].get()
    assert fouling.errors[0].get() < linear_fouling.errors[0].get()
