"""Every likelihood but the Gaussian x every call: each cell is right, or one sentence says what to do instead."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from helpers import refused, reloaded

import lastlayer
from lastlayer import BLLRegressor
from lastlayer.data.observe import Derivative
from lastlayer.integrations.botorch import BLLModel
from lastlayer.integrations.casadi import to_casadi
from lastlayer.integrations.onnx import to_onnx
from lastlayer.online import OnlineModel

N = 160
FAST = {"preset": "fast", "hidden": (4,), "max_epochs": 2, "random_state": 0}
pytestmark = [
    pytest.mark.usefixtures("as_a_user", "small_process"),
    pytest.mark.filterwarnings("ignore:.* targets are missing"),
]


def inputs() -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (N, 2))


def targets(kind: str) -> np.ndarray:
    rng, X = np.random.default_rng(1), inputs()
    f = np.sin(3 * X[:, 0]) + X[:, 1]
    made = {
        "gaussian": lambda: f + 0.1 * rng.normal(size=N),
        "lognormal": lambda: np.exp(f + 0.3 * rng.normal(size=N)),
        "counts": lambda: rng.poisson(np.exp(1 + f)).astype(float),
        "levels": lambda: np.clip(np.round(1.5 * f), -2, 2),
        "student": lambda: f + 0.1 * rng.standard_t(2, size=N),
        "shape": lambda: f + 0.6 * np.sign(rng.normal(size=N)) + 0.05 * rng.normal(size=N),
    }
    return made[kind]()


def unfitted(kind: str, **words) -> BLLRegressor:
    return BLLRegressor(likelihood="auto" if kind == "shape" else kind, **(FAST | words))


@cache
def fitted(kind: str) -> BLLRegressor:
    model = unfitted(kind).fit(inputs(), targets(kind))
    assert (model.calibration_.shape is not None) == (kind == "shape")
    return model


def with_holes(kind: str) -> np.ndarray:
    y = np.column_stack([targets(kind), targets(kind)])
    y[::5, 1] = np.nan
    return y


SEEN = [Derivative(0).at(inputs()[:5]).observed(np.zeros(5))]
CALLS = {
    "weights": lambda k, m, X, y: unfitted(k).fit(X, y, sample_weight=np.arange(N) % 3 + 0.5),
    "missing targets": lambda k, m, X, y: unfitted(k).fit(X, with_holes(k)),
    "groups": lambda k, m, X, y: unfitted(k).fit(X, y, groups=np.arange(N) // 4),
    "known noise": lambda k, m, X, y: unfitted(k, preset="evidence").fit(X[:40], y[:40], noise_std=0.1),
    "functionals": lambda k, m, X, y: unfitted(k, preset="evidence").fit(X[:40], y[:40], observations=SEEN),
    "validation": lambda k, m, X, y: unfitted(k).fit(X[:150], y[:150], validation_data=(X[150:], y[150:])),
    "evidence": lambda k, m, X, y: unfitted(k, preset="evidence").fit(X, y),
    "one member": lambda k, m, X, y: unfitted(k, n_members=1).fit(X, y),
    "full noise": lambda k, m, X, y: unfitted(k, noise="full").fit(X, np.column_stack([y, y[::-1]])),
    "input noise": lambda k, m, X, y: unfitted(k, noise="input").fit(X, y),
    "calibrate": lambda k, m, X, y: m.calibrate(X[:60], y[:60]),
    "tune_alpha": lambda k, m, X, y: m.tune_alpha(X[:60], y[:60]),
    "update": lambda k, m, X, y: m.update(X[:20], y[:20]),
    "remove": lambda k, m, X, y: m.remove(X[:5], y[:5]),
    "reestimate": lambda k, m, X, y: m.reestimate(),
    "alone": lambda k, m, X, y: m.with_fitted(m.fitted_.alone(0)),
    "copy": lambda k, m, X, y: copy.deepcopy(m),
    "partial_fit": lambda k, m, X, y: unfitted(k).partial_fit(X, y).partial_fit(X[:5], y[:5]),
    "source": lambda k, m, X, y: unfitted(k).fit_source(lastlayer.sources.ArraySource(X, y)),
    "joint": lambda k, m, X, y: m.joint(X[:3]),
    "sample_y": lambda k, m, X, y: m.sample_y(X[:3], 4),
    "functional": lambda k, m, X, y: m.predictive_of(Derivative(0), X[:3]),
    "module": lambda k, m, X, y: m.module()(torch.tensor(X[:3])),
    "ONNX": lambda k, m, X, y: to_onnx(m, "model.onnx"),
    "CasADi": lambda k, m, X, y: to_casadi(m),
    "BoTorch": lambda k, m, X, y: BLLModel(m).posterior(torch.tensor(X[:3])),
    "online": lambda k, m, X, y: OnlineModel(m).update(X[:2], y[:2]),
}
GAUSSIAN, WEIGHED, SHAPE = "needs Gaussian predictions", "weighs rows by their residuals", "needs Gaussian noise, and"
EXPORTS = ("joint", "functional", "module", "ONNX", "CasADi", "BoTorch", "online")
REFUSED = {
    **{(kind, call): GAUSSIAN for kind in ("lognormal", "counts", "levels", "student") for call in EXPORTS},
    **{
        (kind, call): "noise_std or observations needs Gaussian"
        for kind in ("lognormal", "counts", "levels", "student")
        for call in ("known noise", "functionals")
    },
    **{(kind, "source"): "transform the targets" for kind in ("lognormal", "counts", "levels", "student")},
    **{(kind, "full noise"): "needs outputs with independent noise" for kind in ("counts", "levels")},
    **{("student", call): WEIGHED for call in ("full noise", "remove", "reestimate")},
    **{("shape", call): SHAPE for call in ("joint", "sample_y", "functional", "BoTorch")},
}
KINDS = ("lognormal", "counts", "levels", "student", "shape")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_is_right_or_refused(kind, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, X, y = copy.deepcopy(fitted(kind)), inputs(), targets(kind)
    if (kind, call) in REFUSED:
        refused(REFUSED[kind, call], CALLS[call], kind, model, X, y)
        return
    found = CALLS[call](kind, model, X, y)
    if isinstance(found, BLLRegressor):
        streamed = call in ("partial_fit", "source") and kind == "shape"  # "auto" is Gaussian there
        sound("gaussian" if streamed else kind, found)


def sound(kind: str, model: BLLRegressor) -> None:
    """Finite predictions in the range of the targets, also far outside."""
    for Z in (inputs()[:20], np.array([[50.0, 50.0], [1e6, -1e6]])):
        p = model.predictive(Z)
        lower, upper = p.interval(0.9)
        scores = (p.std, p.crps(p.quantile(0.5)), model.predict(Z), lower, upper)
        assert all(np.isfinite(np.asarray(each)).all() for each in scores)
        assert (lower <= upper).all()
        assert kind not in ("lognormal", "counts") or lower.min() >= 0
        draws = p.sample(20, random_state=0)
        assert kind != "levels" or set(np.unique(draws)) <= {-2, -1, 0, 1, 2}
        assert kind != "counts" or (draws == np.round(draws)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_files_conformal_intervals_scores_and_held_out_rows(kind, tmp_path):
    model, X, y = copy.deepcopy(fitted(kind)), inputs(), targets(kind)
    again = reloaded(model, tmp_path)
    np.testing.assert_array_equal(again.predictive(X).quantile(0.3), model.predictive(X).quantile(0.3))
    assert np.isfinite(fitted(kind).held_out_.predictive(X).log_prob(y)).mean() > 0.95
    assert model.score(X, y) > 0.2
    lower, upper = model.conformalize(X[:100], y[:100]).predictive(X[100:]).interval(0.8, method="conformal")
    assert ((lower <= y[100:]) & (y[100:] <= upper)).mean() > 0.7


def test_derivatives_do_not_meet_threads_of_training(monkeypatch):
    monkeypatch.setattr("lastlayer.ensemble.train.ROWS_PER_CORE", 10)
    monkeypatch.setattr("lastlayer.ensemble.train.ThreadPoolExecutor", None)
    X, threads = inputs()[:25], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = unfitted("gaussian", n_members=2).fit(X, X[:, 0], observations=SEEN)
    finally:
        torch.set_num_threads(threads)
    assert np.isfinite(model.predict(X)).all()
