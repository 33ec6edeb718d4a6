"""Predictions of training rows by networks that were not trained on them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from lastlayer._internal.arrays import as_array
from lastlayer.calibration.points import REGIONS
from lastlayer.ensemble.crossfit import Fit
from lastlayer.errors import InputError
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.predictions.prediction import Prediction
from lastlayer.predictor.fitted import Fitted

BY_COMPONENT = ("component_mean", "component_epistemic_var", "component_noise_var", "weights")
AXES = dict.fromkeys(BY_COMPONENT, 1) | dict.fromkeys(("affine_cost", "beyond_reach", "function_var"), 0)
"""The axis of the points."""


@dataclass(frozen=True, eq=False)
class HeldOutFold:
    """Held-out rows of the training table, and a model that was not fitted to them."""

    held: Int[ndarray, " h"]
    """Indices of the held-out rows."""
    train: Int[ndarray, " t"]
    """Indices of the rows the model was fitted to."""
    model: Fitted
    """One network per family, with the calibration of the whole model."""


@dataclass(frozen=True, eq=False)
class HeldOutRows:
    """Predictions of training rows by networks that never saw them: cross-validation without a second fit.

    Each prediction comes from one network per family, while the whole model has several: scores are slightly worse than
    those of new rows would be. The curves from affine cost to variance were fitted to these rows. Predict them by
    `held_out.predictive(X[held_out.rows])`.
    """

    folds: tuple[HeldOutFold, ...]
    """Folds with their models."""
    rows: Int[ndarray, " m"]
    """Indices of the rows of the training table, as given to `fit`, that were held out."""
    fold: Int[ndarray, " m"]
    """Fold of each of these rows."""

    @classmethod
    def of(cls, fitted: Fitted, fits: Sequence[Fit], place: Int[ndarray, " n"]) -> "HeldOutRows | None":
        """Collect the held-out rows of the fold fits; None if no fold held out single rows as opposed to regions.

        Parameters
        ----------
        fitted, fits : Fitted, sequence of Fit
            The whole model, and networks with the rows they held out.
        place : ndarray of shape (n,)
            Index of each row of the table among the rows that the networks were given, -1 if it is not one of them.
        """
        order = [member.family for member in fitted.members]
        order += [] if fitted.calibration is None else list(fitted.calibration.curves)
        parts: dict[int, list[Fit]] = {}
        for fit in fits:
            if fit.task.split.kind not in REGIONS:
                parts.setdefault(id(fit.task.split), []).append(fit)
        folds, fold = list[HeldOutFold](), np.full(len(place), -1)
        for part in parts.values():
            split = part[0].task.split
            held = np.flatnonzero(np.isin(place, split.held))
            fold[held[fold[held] < 0]] = len(folds)
            train = np.flatnonzero(np.isin(place, split.train))
            members = tuple(sorted((fit.member for fit in part), key=lambda member: order.index(member.family)))
            folds.append(HeldOutFold(held, train, replace(fitted, members=members, conformal_scores=None)))
        rows = np.flatnonzero(fold >= 0)
        return cls(tuple(folds), rows, fold[rows]) if len(rows) else None

    def take(self, places: Int[ndarray, " k"]) -> "HeldOutRows":
        """Select some of the rows.

        Parameters
        ----------
        places : ndarray of shape (k,)
            Indices into `rows`.
        """
        return replace(self, rows=self.rows[places], fold=self.fold[places])

    def predictive(self, X: Any) -> Prediction:
        """Predict the held-out rows, each by networks that never saw it.

        Parameters
        ----------
        X : array of shape (m, d)
            The inputs of `rows`, in order; values may be changed, as permutation importance does.
        """
        X = np.asarray(as_array(X))
        if len(X) != len(self.rows):
            raise InputError(f"X has {len(X)} rows, but {len(self.rows)} were held out: pass X[held_out.rows]")
        used = np.unique(self.fold)
        places = [np.flatnonzero(self.fold == k) for k in used]
        parts = [self.folds[k].model.working(X[at]) for k, at in zip(used, places, strict=True)]
        working = joined(parts, np.argsort(np.concatenate(places), kind="stable"))
        return self.folds[0].model.likelihood.predict(working)


def joined(parts: Sequence[MixturePrediction], order: Int[ndarray, " m"]) -> MixturePrediction:
    """Concatenate the points of several predictions with equally many components, and reorder them."""
    changed: dict[str, Any] = {}
    for name, axis in AXES.items():
        values = [getattr(part, name) for part in parts]
        changed[name] = None if values[0] is None else np.concatenate(values, axis).take(order, axis)
    if any(part.function_correlation is not None for part in parts):
        functions = np.concatenate([part.correlation_of_function() for part in parts], 1)
        changed["function_correlation"] = functions.take(order, 1)
    correlations = [part.correlation for part in parts if part.correlation is not None]
    changed["correlation"] = np.mean(correlations, axis=0) if correlations else None
    return replace(parts[0], **changed)
