"""Predictions shaped like the targets, in all of the library; nothing broadcasts into another shape."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from helpers import prediction as of_width
from helpers import refused, sine

import lastlayer
from lastlayer import BLLRegressor, errors, metrics
from lastlayer.errors import MissingPackageError
from lastlayer.formula.joint import Functions
from lastlayer.formula.ops import NumPyOps
from lastlayer.formula.predictive import Components
from lastlayer.integrations.export import to_arrays
from lastlayer.integrations.export.bundle import Bundle
from lastlayer.online import OnlineModel
from lastlayer.predictions.joint import JointPrediction
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.predictions.prediction import align
from lastlayer.studies.baselines import BayesByBackpropRegressor, BLRRegressor

M = 7
TARGETS = {0: (M,), 1: (M, 1), 2: (M, 2)}


def prediction(q: int, c: int = 2) -> MixturePrediction:
    """Of targets as `sine(q=q)` has them: 0 is one dimension."""
    width, of_each = max(q, 1), {"beyond_reach": np.arange(M) > 4, "y_ndim": 1 if q == 0 else 2}
    scores = np.random.default_rng(0).uniform(0, 2, (30, width))
    return of_width(c, M, width, correlated=False, conformal_scores=scores, **of_each)


@pytest.mark.parametrize("c", [1, 2])
@pytest.mark.parametrize("q", TARGETS)
def test_every_result_has_the_shape_of_the_targets(q, c):
    p, shape = prediction(q, c), TARGETS[q]
    y = np.full(shape, 0.3)
    assert p.shape == shape
    for name in ("mean", "std", "var", "epistemic_var", "noise_var"):
        assert getattr(p, name).shape == shape
    for result in (p.standardized_residual(y), p.cdf(y), p.log_prob(y, per_output=True), p.quantile(0.2)):
        assert result.shape == shape
    for bound in (*p.interval(0.9), *p.interval(0.9, method="conformal")):
        assert bound.shape == shape
    assert p.sample(4, random_state=0).shape == (4, *shape)
    assert p.quantile([0.1, 0.5, 0.9]).shape == (3, *shape)
    assert p.log_prob(y).shape == p.affine_cost.shape == (M,)
    assert p.cov().shape == (M, max(q, 1), max(q, 1))
    whole = p.with_output_axis()
    assert whole.mean.shape == (M, max(q, 1))
    np.testing.assert_array_equal(whole.mean.reshape(shape), p.mean)
    np.testing.assert_array_equal(whole.log_prob(y), p.log_prob(y))
    np.testing.assert_array_equal(
        whole.interval(0.9, method="conformal")[0].reshape(shape), p.interval(0.9, method="conformal")[0]
    )


@pytest.mark.parametrize("q", [0, 1])
def test_targets_of_one_output_may_have_its_axis_or_not(q):
    p, rng = prediction(q), np.random.default_rng(1)
    y = rng.normal(size=M)
    for ask in (p.log_prob, p.standardized_residual, p.cdf, lambda y: p.log_prob(y, per_output=True)):
        np.testing.assert_array_equal(ask(y), ask(y[:, None]))
    scores = (metrics.log_predictive_density, metrics.rmse, metrics.coverage, metrics.crps, metrics.interval_score)
    for score in (*scores, metrics.calibration_error):
        assert score(p, y) == score(p, y[:, None])
    for score in scores:
        assert np.shape(score(p, y, per_output=True)) == (1,)
    assert metrics.rmse(p.mean, y) == metrics.rmse(p.mean.reshape(M), y[:, None]) == metrics.rmse(p, y)


OF_ONE = [(1, M), (M, M), (M + 1,), (), (M, 1, 1)]
OF_TWO = [(M - 1, 2), (M, 3), (2, M), (M,)]


@pytest.mark.parametrize(
    ("q", "shape"), [*((q, s) for q in (0, 1) for s in OF_ONE), *((2, s) for s in OF_TWO)], ids=str
)
def test_what_would_broadcast_is_refused(q, shape):
    p, wrong = prediction(q), np.zeros(shape)
    asked = [
        p.targets,
        *(lambda y, score=score: score(p, y) for score in (metrics.crps, metrics.rmse, metrics.coverage)),
    ]
    asked += [lambda y: metrics.interval_score(p, y), lambda y: metrics.rmse(p.mean, y)]
    for ask in asked:
        refused(rf"shape .*7 points and {max(q, 1)} outputs", ask, wrong)


def test_several_outputs_have_no_targets_of_one_dimension():
    refused(r"give targets of shape \(7, 2\)$", prediction(2).log_prob, np.zeros(M))
    refused("y_ndim=1 with 2 outputs", replace, prediction(2), y_ndim=1)
    refused(r"\(m,\) or \(m, q\)", metrics.rmse, np.zeros((2, M, 1)), np.zeros(M))
    refused("differ in points or outputs", MixturePrediction.mixture, [prediction(0), prediction(1)])
    assert align([1, 2], (2, 1)).tolist() == [[1.0], [2.0]]


def test_a_gaussian_and_a_mixture_of_them_are_shaped_like_their_means():
    one = MixturePrediction.gaussian(
        np.arange(3.0), epistemic_var=np.ones(3), noise_var=np.array(0.5), affine_cost=np.ones(3)
    )
    assert one.var.tolist() == [1.5] * 3
    assert MixturePrediction.mixture([one, one]).mean.shape == (3,)


def test_joint_predictions_have_the_shape_of_the_targets():
    rng = np.random.default_rng(0)
    mean, cost = rng.normal(size=(M, 1)), np.ones((1, M, 1))
    function = Functions(NumPyOps, Components(*[cost] * 6), mean, [(np.eye(M), np.eye(1))], [])
    one, two = JointPrediction(function, np.ones((M, 1, 1)), y_ndim=1), JointPrediction(function, np.ones((M, 1, 1)))
    assert (one.mean.shape, two.mean.shape) == ((M,), (M, 1))
    assert (one.cov_of_outputs().shape, two.cov_of_outputs().shape) == ((M, M), (M, M, 1))
    assert (one.sample(3).shape, two.sample(3).shape) == ((3, M), (3, M, 1))
    assert one.cov().shape == (M, M)


@pytest.fixture(scope="module")
def model() -> BLLRegressor:
    return BLLRegressor((5,), preset="evidence", max_epochs=5, random_state=0).fit(*sine(30))


def test_every_model_of_one_dimensional_targets_says_so(model, tmp_path):
    X, y = sine(30)
    new = X[:M]
    model.save(tmp_path / "model")
    np.savez(tmp_path / "bundle.npz", **to_arrays(model))
    bundle = Bundle(tmp_path / "bundle.npz").predict(new)
    others = [BLRRegressor((5,), max_epochs=5), BayesByBackpropRegressor((5,), max_epochs=3, n_components=3)]
    models = [model, lastlayer.load(tmp_path / "model"), OnlineModel(model), model.at_alpha(1.0)]
    models += [other.set_params(random_state=0).fit(X, y) for other in others]
    for one in models:
        p = one.predictive(new)
        assert p.mean.shape == p.interval(0.9)[1].shape == one.predict(new).shape == (M,)
    assert bundle.mean.shape == bundle.std.shape == bundle.interval(0.9)[0].shape == (M,)
    np.testing.assert_allclose(bundle.quantile(0.3), model.predictive(new).quantile(0.3), rtol=1e-9)
    assert copy.deepcopy(model).conformalize(X, y).predictive(new).interval(0.5, method="conformal")[0].shape == (M,)
    assert copy.deepcopy(model).fit(X, y[:, None]).predictive(new).mean.shape == (M, 1)


def test_several_levels_are_the_levels_one_by_one():
    p = prediction(2)
    np.testing.assert_array_equal(p.quantile([0.1, 0.9]), [p.quantile(0.1), p.quantile(0.9)])
    for level in (0.0, 1.0, [0.5, 1.0], [], np.array([[0.5]]), np.nan):
        refused("strictly between 0 and 1", p.quantile, level)


@pytest.mark.parametrize("q", TARGETS)
def test_a_frame_has_a_row_per_point_and_columns_of_every_output(q):
    p = prediction(q)
    frame = p.to_frame(index=list("abcdefg"), level=0.8)
    names = ["y0_", "y1_"] if q == 2 else [""]
    words = ["mean", "std", "epistemic_std", "noise_std", "lower", "upper"]
    assert list(frame) == [*(name + word for name in names for word in words), "affine_cost", "beyond_reach"]
    assert frame.index.tolist() == list("abcdefg")
    whole, (lower, upper) = p.with_output_axis(), p.with_output_axis().interval(0.8)
    values = (whole.mean, whole.std, whole.epistemic_var**0.5, whole.noise_var**0.5, lower, upper)
    for i, name in enumerate(names):
        for word, value in zip(words, values, strict=True):
            np.testing.assert_array_equal(frame[name + word], value[:, i])
    assert frame["beyond_reach"].dtype == bool
    assert frame["affine_cost"].tolist() == p.affine_cost.tolist()


def test_outputs_of_a_frame_have_names_and_an_uncalibrated_model_knows_no_reach(model):
    frame = model.predictive(sine(30)[0][:3]).to_frame(outputs=["power"])
    assert frame.columns[0] == "power_mean"
    assert "beyond_reach" not in frame
    for names in (["a"], "ab"):
        refused("list of 2 names", prediction(2).to_frame, outputs=names)


def test_without_pandas_it_is_said_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(f"no {name}")

    monkeypatch.setattr(errors, "import_module", missing)
    refused(r"lastlayer\[pandas\]", prediction(1).to_frame, error=MissingPackageError)
