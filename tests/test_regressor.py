"""The front door: scikit-learn's conventions, the promises of design and docstrings, and input of every kind."""

import copy
import inspect
import math
import pickle

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from helpers import refused, sine
from models import regressor
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from lastlayer import BLLRegressor
from lastlayer.calibration.alpha import search_alpha

pytestmark = pytest.mark.usefixtures("as_a_user")

floored = pytest.mark.filterwarnings("ignore::lastlayer.errors.FlooredNoiseWarning")
copied = pytest.mark.filterwarnings("ignore::lastlayer.errors.CopiesWarning")


def quick(**options) -> BLLRegressor:
    """A fast model."""
    return regressor(**{"preset": "evidence", "hidden": (8,), "max_epochs": 40, "random_state": 0} | options)


@pytest.fixture(scope="module")
def one() -> BLLRegressor:
    """Fitted to 1-D targets; tests that change it take a deep copy."""
    return quick().fit(*sine())


@pytest.fixture(scope="module")
def two() -> BLLRegressor:
    """Fitted to two outputs with correlated noise."""
    return quick(noise="full").fit(*sine(q=2))


CALIBRATED = BLLRegressor(hidden=(3,), max_epochs=3, n_members=2, hidden_prior=0.3)


@floored
@copied
@parametrize_with_checks([BLLRegressor(hidden=(3,), preset="evidence", max_epochs=10), CALIBRATED])
def test_scikit_learn_agrees(as_a_user, estimator, check):
    check(estimator)


def test_pipelines_searches_and_clones():
    X, y = sine()
    assert make_pipeline(StandardScaler(), quick()).fit(X, y).score(X, y) > 0.7
    search = GridSearchCV(quick(), {"hidden": [(3,), (8,)]}, cv=2).fit(X, y)
    assert search.best_params_["hidden"] in [(3,), (8,)]
    assert search.predict(X).shape == y.shape
    assert cross_val_score(quick(), X, y, cv=3, n_jobs=1).min() > 0.5
    copied = clone(search.best_estimator_)
    assert copied.get_params() == search.best_estimator_.get_params()
    assert not hasattr(copied, "fitted_")


def test_pickle_and_joblib_round_trips(two, tmp_path):
    X, _ = sine(7, seed=1)
    joblib.dump(two, tmp_path / "model.joblib")
    for again in (pickle.loads(pickle.dumps(two)), joblib.load(tmp_path / "model.joblib")):
        np.testing.assert_array_equal(again.predict(X, return_std=True), two.predict(X, return_std=True))


def test_numpy_pandas_and_torch_are_the_same_to_it(one):
    X, y = sine()
    expected = one.predict(X)
    frame = pd.DataFrame(X, columns=["angle"])
    named = quick().fit(frame, pd.Series(y))
    np.testing.assert_array_equal(named.predict(frame), expected)
    assert list(named.feature_names_in_) == ["angle"]
    from_torch = quick().fit(torch.tensor(X, requires_grad=True), torch.tensor(y)).predict(torch.tensor(X))
    assert isinstance(from_torch, np.ndarray)
    np.testing.assert_array_equal(from_torch, expected)
    refused(r"(?s)feature names.*torque", named.predict, frame.rename(columns={"angle": "torque"}), error=ValueError)


@pytest.mark.parametrize("q", [0, 1, 2])
def test_shapes_follow_the_targets(q):
    X, y = sine(q=q)
    m, width = 5, max(q, 1)
    model, new = quick(max_epochs=5).fit(X, y), X[:m]
    like_y = (m,) if q == 0 else (m, q)
    mean, std = model.predict(new, return_std=True)
    assert model.predict(new).shape == mean.shape == std.shape == like_y
    assert model.predict(new, return_cov=True)[1].shape == ((m, m) if q == 0 else (m, m, q))
    assert model.sample_y(new, 3).shape == (*like_y, 3)
    joint = model.joint(new)
    assert model.predictive(new).shape == joint.mean.shape == like_y
    assert joint.cov().shape == (m * width, m * width)
    far = model.extrapolation(new)
    assert far.affine_cost.shape == far.quantile.shape == (m,)
    assert isinstance(model.score(X, y), float)
    assert model.noise_std_.shape == (width,)


@pytest.mark.parametrize("noise", ["diagonal", "full"])
@pytest.mark.parametrize("q", [1, 2])
def test_predictions_are_bayesian_linear_regression_on_the_features(q, noise):
    """By hand, in the units of the targets: an independent form, without centring, from all rows at once."""
    X, y = sine(q=q)
    model = quick(noise=noise).fit(X, y)
    new = np.linspace(-5, 5, 11)[:, None]

    def features(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            phi_tilde = model.members_[0].network(torch.tensor((x - X.mean(0)) / X.std(0))).numpy()
        return np.hstack([phi_tilde, np.ones((len(x), 1))])

    Phi, phi = features(X), features(new)
    # alpha belongs to standardised targets with one scale each: W / scale is what the prior speaks of
    T = (y - y.mean(0)) / y.std(0)
    penalty = np.eye(Phi.shape[1]) / model.alpha_star_
    penalty[-1, -1] = 0
    Lambda = Phi.T @ Phi + penalty
    W = np.linalg.solve(Lambda, Phi.T @ T)
    S = (T - Phi @ W).T @ (T - Phi @ W) + W.T @ penalty @ W
    Sigma_E = (S if noise == "full" else np.diag(np.diag(S))) / (len(X) - 1) * np.outer(y.std(0), y.std(0))
    ratio = np.einsum("ij,ji->i", phi, np.linalg.solve(Lambda, phi.T))
    p = model.predictive(new)
    np.testing.assert_allclose(p.mean, phi @ W * y.std(0) + y.mean(0), rtol=1e-7)
    np.testing.assert_allclose(p.affine_cost, ratio, rtol=1e-6)
    np.testing.assert_allclose(p.cov(), (1 + ratio)[:, None, None] * Sigma_E, rtol=1e-6)
    np.testing.assert_allclose(model.noise_std_, np.sqrt(np.diag(Sigma_E)), rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"hidden": ()}, {"n_members": 3}], ids=["network", "linear", "members"])
def test_the_rank_is_among_rows_that_the_last_layer_has_not_seen(options):
    """New points are held against what each training row costs once it is taken out, features and alpha as they are."""
    X, y = sine(25, d=2)
    model = quick(**options).fit(X, y)
    rows = [slice(i, i + 1) for i in range(25)]
    without = [copy.deepcopy(model).remove(X[row], y[row]).extrapolation(X[row]).affine_cost for row in rows]
    new = np.random.default_rng(1).uniform(-5, 5, (200, 2))
    asked = model.extrapolation(new)
    np.testing.assert_allclose(asked.quantile, (asked.affine_cost[:, None] > np.concatenate(without)).mean(1))
    seen = model.extrapolation(X).affine_cost
    assert (asked.quantile != (asked.affine_cost[:, None] > seen).mean(1)).any()  # it makes a difference


def test_with_the_inputs_passed_on_the_cost_grows_with_the_square_of_the_distance():
    X, y = sine(d=2)
    for direction in ([1.0, 0.0], [-0.6, 0.8]):
        far = np.array([[1e4], [1e5]]) * direction
        cost = quick(max_epochs=10).fit(X, y).extrapolation(far).affine_cost
        assert cost[1] / cost[0] == pytest.approx(100, rel=1e-2)
        bounded = quick(max_epochs=10, input_skip=False).fit(X, y).extrapolation(far).affine_cost
        assert bounded[1] / bounded[0] == pytest.approx(1, rel=1e-2)  # tanh saturates: what the inputs are for


def test_a_whole_number_of_epochs_may_be_a_float(as_a_user):
    assert len(quick(max_epochs=3.0).fit(*sine()).history_["nlml"]) == 3


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (np.zeros(20), "(?i)sample.weight"),
        (-np.eye(20)[0], "(?i)sample.weight"),
        (np.full(20, math.nan), "(?i)sample.weight"),
        (np.ones(19), "sample_weight|inconsistent"),
        (np.full(20, 1 / 20), "total weight of 1"),  # shares that add up to one row, of which no noise can be told
        (np.eye(20)[0], "total weight of 1"),
    ],
)
def test_useless_weights_are_refused(as_a_user, weight, said):
    refused(said, quick().fit, *sine(20), sample_weight=weight, error=ValueError)


def test_update_refuses_what_does_not_fit(as_a_user, two):
    model, (X, y) = copy.deepcopy(two), sine(5, q=2)
    refused("y has 3 outputs, but the model was fitted to 2", model.update, X, np.hstack([y, y[:, :1]]))
    refused("y has 1 outputs", model.tune_alpha, X, y[:, 0])
    refused("forgetting=0", model.update, X, y, forgetting=0.0)
    np.testing.assert_array_equal(model.predict(X), two.predict(X))


def test_history_tells_what_happened():
    history = quick(max_epochs=100, early_stopping=True).fit(*sine(110)).history_
    lengths = {len(history[name]) for name in ("nlml", "log_alpha", "learning_rate")}
    assert lengths == {100}
    assert history["stopped"] == "max_epochs"
    assert history["nlml"][-1] < history["nlml"][0]
    assert len(history["validation_epoch"]) == len(history["validation_score"]) > 3
    assert min(history["validation_epoch"]) == 10  # a tenth of the epochs
    best = history["validation_epoch"].index(history["best_epoch"]) if history["best_epoch"] < 100 else -1
    assert history["validation_score"][best] <= min(history["validation_score"]) + 1e-5
    short, long = (quick(max_epochs=2, early_stopping="auto").fit(*sine(m)).history_ for m in (99, 100))
    assert not short["validation_score"]
    assert long["validation_score"]


class Trips(nn.Module):
    """Features that are not finite, or interrupt, at chosen forward passes."""

    def __init__(self, stopped: str, at: range):
        super().__init__()
        self.layers, self.stopped, self.at, self.calls = nn.Sequential(nn.Linear(1, 6), nn.Tanh()), stopped, at, 0

    def forward(self, x):
        self.calls += 1
        if self.calls not in self.at:
            return self.layers(x)
        if self.stopped == "interrupted":
            raise KeyboardInterrupt
        return self.layers(x) * math.nan


@pytest.mark.parametrize(
    ("at", "said", "stopped", "early_stopping"),
    [
        *((range(15, 16), r"interrupted after \d+ epochs", "interrupted", early) for early in (False, True)),
        *((range(16, 17), "not finite 1 times.*went on", "max_epochs", early) for early in (False, True)),
        (range(16, 27), "not finite 11 times.*gave up", "diverged", False),
    ],
)
def test_whatever_happens_in_training_the_model_is_usable(at, said, stopped, early_stopping):
    X, y = sine()
    model = quick(backbone=Trips(stopped, at), input_skip=True, early_stopping=early_stopping)
    with pytest.warns(UserWarning, match=said):
        model.fit(X, y)
    history = model.history_
    assert history["stopped"] == stopped
    if stopped == "interrupted":
        assert 0 < len(history["nlml"]) < 15
    if stopped == "max_epochs":
        assert history["setbacks"] == 1
        assert history["learning_rate"][-1] < 0.5 * 2e-2 * 0.31
    assert np.isfinite(model.predict(X)).all()
    assert model.predict(X, return_std=True)[1].min() > 0
    assert model.score(X, y) > 0.1


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 6, batch_first=True)

    def forward(self, x):
        return self.gru(x)[1][-1]


IMAGES = np.random.default_rng(0).normal(size=(50, 1, 8, 8)) + np.linspace(-1, 1, 50)[:, None, None, None]
SEQUENCES = np.random.default_rng(0).normal(size=(50, 6, 2))
BACKBONES = {
    "conv": lambda: (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), IMAGES),
    "gru": lambda: (LastState(), SEQUENCES),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_any_module_serves_as_backbone(name):
    backbone, X = BACKBONES[name]()
    y = X.mean((1, 2, 3)) + 5 if name == "conv" else X[:, -3:].sum((1, 2))
    before = copy.deepcopy(backbone.state_dict())
    model = quick(backbone=backbone, max_epochs=60, learning_rate=0.03).fit(X, y)
    assert model.score(X, y) > 0.5
    assert model.predict(X[:1]).shape == (1,)
    assert np.isfinite(model.predict(10 * X, return_std=True)[1]).all()
    assert model.sample_y(X[:3], 2).shape == (3, 2)
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype == torch.float32
        assert not torch.equal(model.members_[0].network.state_dict()[name].float(), value)
    assert backbone.training
    assert all(p.grad is None for p in backbone.parameters())


def test_training_goes_on_from_the_weights_of_a_backbone():
    backbone = nn.Sequential(nn.Linear(1, 6), nn.Tanh()).double()
    model = quick(backbone=backbone, max_epochs=0).fit(*sine())
    for name, value in backbone.state_dict().items():
        assert torch.equal(model.members_[0].network.state_dict()[name], value)


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.layer, self.what = nn.Linear(1, 6), what

    def forward(self, x):
        return self.what(self.layer(x))


@pytest.mark.parametrize(
    ("backbone", "said"),
    [
        (Returns(lambda f: f.reshape(-1, 2, 3)), r"\(2, 1\) into \(2, 2, 3\)"),
        (Returns(lambda f: f[:, 0]), r"into \(2,\)"),
        (Returns(lambda f: f.mean(0, keepdim=True)), r"into \(1, 6\)"),
        (Returns(lambda f: (f, f)), "into tuple"),
        (lambda: "network", "backbone\\(\\) returned a str"),
    ],
)
def test_backbones_that_do_not_make_features_are_refused(as_a_user, backbone, said):
    refused(said, quick(backbone=backbone).fit, *sine())


def test_inputs_that_are_no_table_cannot_be_passed_on():
    passed = quick(backbone=nn.Flatten(), input_skip=True)
    refused(r"input_skip=True needs a table.*\(50, 1, 8, 8\)", passed.fit, IMAGES, IMAGES.mean((1, 2, 3)))


ODD = {
    "constant column": lambda X, y: (np.c_[X, np.full(40, 7.3)], y),
    "all columns constant": lambda X, y: (np.full((40, 2), 0.1), y),
    "constant targets": lambda X, y: (X, np.full(40, 0.1)),
    "zero targets": lambda X, y: (X, np.zeros(40)),
    "one constant output": lambda X, y: (X, np.c_[y, np.full(40, 0.1)]),
    "two equal outputs": lambda X, y: (X, np.c_[y, y]),
    "duplicated rows": lambda X, y: (np.tile(X[:5], (8, 1)), np.tile(y[:5], 8)),
    "fewer samples than features": lambda X, y: (np.random.default_rng(3).normal(size=(6, 30)), y[:6]),
    "collinear columns": lambda X, y: (np.c_[X, X @ np.arange(12).reshape(3, 4)], y),
    "tiny targets": lambda X, y: (X, y * 1e-12),
    "huge targets": lambda X, y: (X, y * 1e12),
    "targets far from zero": lambda X, y: (X, y + 1e9),
    "huge inputs": lambda X, y: (X * 1e150, y),
    "integer inputs": lambda X, y: ((10 * X).astype(int), (10 * y).astype(int)),
    "float32": lambda X, y: (X.astype(np.float32), y.astype(np.float32)),
    "columns backwards": lambda X, y: (X[:, ::-1], y),
    "lists": lambda X, y: (X.tolist(), y.tolist()),
    "two samples": lambda X, y: (X[:2], y[:2]),
    "two equal samples": lambda X, y: (X[[0, 0]], y[[0, 0]]),
}
LAYOUTS = ("integer inputs", "float32", "lists")


@floored
@copied
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"noise": "diagonal"},
        {"noise": "full"},
        {"noise": "full", "preset": "calibrated", "n_members": 2, "hidden_prior": 0.3, "max_epochs": 3},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("name", ODD)
def test_it_simply_works(name, options, request, monkeypatch):
    monkeypatch.setitem(inspect.unwrap(search_alpha).__kwdefaults__, "n_curve", 21)  # a tenth of the usual scan
    if "preset" in options:
        request.getfixturevalue("as_a_user")  # shapes were checked by the others: ten networks take their time
        if name in LAYOUTS:
            pytest.skip("how an array lies in memory ends at the door, which is the same for both presets")
    X, y = ODD[name](*sine(40, d=3))
    model = quick(**({"max_epochs": 6, "likelihood": "gaussian"} | options)).fit(X, y)
    X = np.array(X, dtype=float)
    away = X.mean(0) + 1e6 * np.where(X.std(0) > 0, X.std(0), 1)
    for new in (X, X[:1], away[None]):
        p = model.predictive(new)
        numbers = p.mean, p.std, p.cov(), p.affine_cost, model.joint(new).cov(), model.sample_y(new, 2)
        assert all(np.isfinite(each).all() for each in numbers)
        assert (p.epistemic_var >= 0).all()
    assert model.extrapolation(away[None]).affine_cost >= model.extrapolation(X).affine_cost.max() * (1 - 1e-9)
    tuned = model.tune_alpha(X, y).predictive(away[None])
    assert np.isfinite(tuned.std).all()
    assert np.isfinite(model.update(X, y).predict(X)).all()
    assert np.abs(model.predict(X) - np.array(y)).max() <= 10 * np.abs(y).max()


@pytest.mark.parametrize("value", [0.1, 1 / 3, 7.0, 1e9])
def test_constant_targets_are_predicted_without_a_warning(value):
    X, _ = sine(37)
    model = quick(max_epochs=5).fit(X, np.full(37, value))
    np.testing.assert_allclose(model.predict(X), value, rtol=1e-12)
    assert model.predict(X, return_std=True)[1].max() <= 1e-5 * max(value, 1)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::-1],
        np.asfortranarray,
        lambda a: np.repeat(a, 2, 0)[::2],
        lambda a: a.astype(">f8"),
        lambda a: np.frombuffer(a.tobytes()).reshape(a.shape),
    ],
    ids=["backwards", "Fortran order", "every second row", "big-endian", "read-only"],
)
def test_the_layout_of_an_array_is_nobodys_business(view):
    X, y = sine(q=2)
    weight = np.random.default_rng(0).uniform(1, 2, len(X))
    views = [view(a) for a in (X, y, weight)]
    plain = [np.array(a, dtype=float, order="C") for a in views]
    answers = []
    for given in (views, plain):
        model = quick(max_epochs=5).fit(*given).update(*given).tune_alpha(*given[:2])
        answers.append(np.stack(model.predict(given[0], return_std=True)))
    np.testing.assert_allclose(*answers, rtol=1e-6)  # sums run in another order


def _with(values: np.ndarray, *entries: tuple) -> np.ndarray:
    values = values.copy()
    for *at, value in entries:
        values[tuple(at)] = value
    return values


nan, inf, (X0, Y0) = math.nan, math.inf, sine(20, d=2)
BAD = {
    "nan in X": (_with(X0, (3, 0, nan), (3, 1, nan), (7, 0, nan)), Y0, r"X has 3 NaN .* in 2 rows \(first: row 3\)"),
    "inf in X": (_with(X0, (5, 0, -inf)), Y0, r"X has 1 infinite .* in 1 rows \(first: row 5\)"),
    "both in X": (_with(X0, (5, 0, inf), (2, 0, nan)), Y0, r"X has 1 NaN .* and 1 inf.* in 2 rows \(first: row 2\)"),
    "nan in y": (X0, _with(Y0, (4, nan), (9, nan)), r"y has 2 NaN .* in 2 rows \(first: row 4\)"),
    "inf in y": (X0, _with(Y0, (6, inf)), r"y has 1 infinite .* in 1 rows \(first: row 6\)"),
    "nan in 2-D y": (X0, _with(np.c_[Y0, Y0], (6, 0, nan), (6, 1, nan)), r"all targets are .* 1 rows \(first: row 6\)"),
    "1-D X": (X0[:, 0], Y0, "2D array"),
    "3-D X": (X0[:, :, None], Y0, "dim 3"),
    "3-D y": (X0, Y0[:, None, None], r"dim|\(20, 1, 1\)"),
    "other lengths": (X0, Y0[:-1], r"inconsistent.*\[20, 19\]"),
    "one sample": (X0[:1], Y0[:1], "at least 2 samples, and n_samples = 1"),
    "no samples": (X0[:0], Y0[:0], "0 sample"),
    "no columns": (X0[:, :0], Y0, r"0 feature\(s\)"),
    "no outputs": (X0, np.empty((20, 0)), "y"),
    "text in X": (X0.astype(str).astype(object) + "a", Y0, "could not convert string to float"),
    "text in y": (X0, np.full(20, "a"), "string|dtype"),
    "no y": (X0, None, "y"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_what_is_wrong(as_a_user, name):
    X, y, said = BAD[name]
    refused(said, quick().fit, X, y, error=ValueError)


def test_bad_questions_are_told_what_is_wrong(as_a_user, one):
    refused("return_std and return_cov", one.predict, X0[:, :1], return_std=True, return_cov=True)
    for X, said in [
        (np.zeros((3, 2)), "2 features, but BLLRegressor is expecting 1"),
        (np.array([[0.0], [np.nan]]), r"X has 1 NaN values in 1 rows \(first: row 1\)"),
        (np.zeros(3), "2D array"),
        (np.zeros((0, 1)), "0 sample"),
        (np.array([["far"]]), "could not convert|string"),
    ]:
        for ask in (one.predict, one.predictive, one.joint, one.sample_y, one.extrapolation):
            refused(said, ask, X, error=ValueError)
