"""Scorers against the metrics, in scikit-learn's own cross-validation."""

import pickle

import numpy as np
import pytest
import scoringrules
from helpers import prediction, refused, sine
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score, cross_validate
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import MinMaxScaler

from lastlayer import BLLRegressor, metrics, scorers

pytestmark = pytest.mark.usefixtures("as_a_user")

SMALL = BLLRegressor((4,), preset="evidence", max_epochs=5, random_state=0)
SCORERS = {
    scorers.lpd_scorer: lambda p, y: metrics.log_predictive_density(p, y),
    scorers.neg_crps_scorer: lambda p, y: -metrics.crps(p, y),
    scorers.neg_interval_score_scorer: lambda p, y: -metrics.interval_score(p, y, 0.9),
    scorers.neg_coverage_error_scorer: lambda p, y: -abs(metrics.coverage(p, y, 0.9) - 0.9),
    scorers.coverage_scorer: lambda p, y: metrics.coverage(p, y, 0.9),
}


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    steps = [("scale", MinMaxScaler()), ("nothing", "passthrough"), ("none", None), ("model", clone(SMALL))]
    return Pipeline(steps).fit(*sine(60, d=2))


@pytest.mark.parametrize("q", [0, 2])
def test_scorers_are_the_metrics_of_held_out_rows(q):
    X, y = sine(40, q=q)
    model = clone(SMALL).fit(X[:30], y[:30])
    for scorer, metric in SCORERS.items():
        assert scorer(model, X[30:], y[30:]) == metric(model.predictive(X[30:]), y[30:])


def test_a_pipeline_is_asked_at_its_end(pipeline):
    X, y = sine(60, d=2)
    p = pipeline[-1].predictive(pipeline[0].transform(X))
    np.testing.assert_array_equal(scorers.predictive(pipeline, X).std, p.std)
    assert not scorers.predictive(pipeline, X, noise=False).noise_var.any()
    assert scorers.lpd_scorer(pipeline, X, y) == metrics.log_predictive_density(p, y)
    refused("Ridge has no predictive distribution", scorers.lpd_scorer, Ridge().fit(X, y), X, y)


def test_cross_validation_and_grid_search_take_them():
    (X, y), folds = sine(40), KFold(2)
    found = cross_validate(SMALL, X, y, cv=folds, scoring={"lpd": scorers.lpd_scorer, "crps": scorers.neg_crps_scorer})
    expected = [scorers.lpd_scorer(clone(SMALL).fit(X[a], y[a]), X[b], y[b]) for a, b in folds.split(X)]
    np.testing.assert_allclose(found["test_lpd"], expected)
    assert (found["test_crps"] < 0).all()
    steps = Pipeline([("scale", MinMaxScaler()), ("model", SMALL)])
    search = GridSearchCV(steps, {"model__max_epochs": [0, 30]}, cv=folds, scoring=scorers.neg_interval_score_scorer)
    search.fit(X, y)
    assert search.best_score_ == max(search.cv_results_["mean_test_score"])
    np.testing.assert_array_equal(scorers.predictive(search, X).mean, search.predict(X))
    assert cross_val_score(SMALL, X, y, cv=folds, scoring=scorers.lpd_scorer).tolist() == found["test_lpd"].tolist()


def test_scorers_can_be_sent_to_other_processes():
    for scorer in SCORERS:
        assert pickle.loads(pickle.dumps(scorer)) is not None


def test_the_interval_score_is_that_of_scoringrules():
    p = prediction(3)
    y = p.sample(1, random_state=1)[0]
    each = scoringrules.interval_score(y, *p.interval(0.8), 0.2, backend="numpy")
    np.testing.assert_allclose(metrics.interval_score(p, y, 0.8, per_output=True), each.mean(0))
    assert metrics.interval_score(p, y, 0.8) == pytest.approx(each.mean())
