"""Scorers of predictive distributions for scikit-learn's `cross_val_score`, `cross_validate` and `GridSearchCV`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lastlayer.errors import InputError
from lastlayer.predictions import metrics
from lastlayer.predictions.prediction import Prediction


def predictive(estimator: Any, X: Any, *, noise: bool = True) -> Prediction:
    """Compute the predictive distribution of an estimator, also at the end of a Pipeline.

    Parameters
    ----------
    estimator : estimator
        A fitted model with `predictive`, a Pipeline whose last step is one, or a search that kept its best estimator.
    X : array-like
        Inputs as the estimator takes them: for a Pipeline, before its first step.
    noise : bool, default True
        Whether to include the noise; False: the distribution of the function.
    """
    if hasattr(estimator, "best_estimator_"):
        return predictive(estimator.best_estimator_, X, noise=noise)
    if hasattr(estimator, "steps"):
        *before, (_, last) = estimator.steps
        for _, step in before:
            X = X if step is None or step == "passthrough" else step.transform(X)
        return predictive(last, X, noise=noise)
    if not hasattr(estimator, "predictive"):
        raise InputError(
            f"{type(estimator).__name__} has no predictive distribution: give a model of lastlayer, or a Pipeline "
            "whose last step is one"
        )
    prediction: Prediction = estimator.predictive(X, noise=noise)
    return prediction


@dataclass(frozen=True)
class PredictiveScorer:
    """Scorer that applies a metric to the predictive distribution: `scorer(estimator, X, y)`, greater is better."""

    metric: Callable[[Prediction, Any], float]
    """A function of (prediction, y) such as those of `lastlayer.metrics`."""
    greater_is_better: bool = True
    """Whether a larger metric is better; otherwise the score is the negative metric."""

    def __call__(self, estimator: Any, X: Any, y: Any) -> float:
        score = float(self.metric(predictive(estimator, X), y))
        return score if self.greater_is_better else -score


def _coverage_error(prediction: Prediction, y: Any, level: float) -> float:
    return abs(float(metrics.coverage(prediction, y, level)) - level)


lpd_scorer = PredictiveScorer(metrics.log_predictive_density)
"""Mean log predictive density of held-out targets."""
neg_crps_scorer = PredictiveScorer(metrics.crps, greater_is_better=False)
"""Minus the continuous ranked probability score."""
neg_interval_score_scorer = PredictiveScorer(partial(metrics.interval_score, level=0.9), greater_is_better=False)
"""Minus the interval score of the central 90% intervals: their width, plus a penalty for targets outside."""
neg_coverage_error_scorer = PredictiveScorer(partial(_coverage_error, level=0.9), greater_is_better=False)
"""Minus the distance between 0.9 and the share of held-out targets inside their central 90% interval."""
coverage_scorer = PredictiveScorer(partial(metrics.coverage, level=0.9))
"""Share of held-out targets inside their central 90% interval. For reporting only: 0.9 is best, not the maximum."""
