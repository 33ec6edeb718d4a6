"""`OnlineModel`: a fitted model that learns from rows as they come, in O(p^2) per row, and answers in between.

What happens to old rows is its memory: all are kept, they lose weight, or only the last ones count.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from sklearn.base import BaseEstimator
from torch import Tensor

from lastlayer import formula
from lastlayer.errors import InputError
from lastlayer.estimators.base import LastLayerRegressor
from lastlayer.inputs import as_array, check_finite, check_weight, check_X
from lastlayer.networks.mlp import grouped
from lastlayer.online.layers import FeatureRows, LayerStack
from lastlayer.ops import TorchOps
from lastlayer.prediction import Prediction
from lastlayer.predictor import revisions
from lastlayer.predictor.fitted import Fitted, as_arrays, as_fitted
from lastlayer.predictor.unseen import NOTHING
from lastlayer.statistics import Statistics, row_chunks
from lastlayer.training.data import Data

CHUNK_ROWS = 1_024
LARGE_BATCH = 0.25
"""Rows per feature above which a batch is better factored than taken in by the recursion."""
FADING = 0.02
"""Share of their weight that old rows lose at a time."""
NOTICED = 0.05
"""Change of a curve's logarithm at which predictions follow it."""


class Memory:
    """What happens to old rows."""

    def interval(self, p: int) -> int:
        """Rows between two factorisations: after p rows one costs no more than the recursion did, O(p^2) a row."""
        return p

    def kept(self, n: int) -> float:
        """Weight that the rows of before keep when n more have come."""
        return 1.0

    def remembered(self, n: int) -> float:
        """Weight that their residuals keep."""
        return self.kept(n)


@dataclass(frozen=True)
class KeepAll(Memory):
    """Every row counts for ever: what the function is does not change."""


@dataclass(frozen=True)
class ExponentialForgetting(Memory):
    """A row that `memory` rows came after has 1/e of its weight; the prior does not fade.

    Weights fall in steps of about 2%, each with a factorisation: O(p^2) a row if the memory is several times p.
    """

    memory: float | int

    def __post_init__(self) -> None:
        if not 1 <= self.memory < math.inf:
            raise InputError(
                f"memory={self.memory} must be a number of rows, 1 or more, such as ExponentialForgetting(memory=1000)"
            )

    def interval(self, p: int) -> int:
        return max(1, min(p, round(FADING * self.memory)))

    def kept(self, n: int) -> float:
        return math.exp(-n / self.memory)


@dataclass(frozen=True)
class SlidingWindow(Memory):
    """The last `rows` rows count, those before not at all."""

    rows: int

    def __post_init__(self) -> None:
        if not self.rows >= 2:
            raise InputError(f"rows={self.rows}: a window needs at least 2 rows, such as SlidingWindow(500)")

    def interval(self, p: int) -> int:
        """A factorisation goes through the whole window, so it is as rare as that costs O(p^2) a row."""
        return max(p, self.rows)

    def remembered(self, n: int) -> float:
        return max(0.0, 1 - n / self.rows)


class OnlineModel:
    """A fitted model whose last layers follow a stream; the features, and the curve, stay as fitted.

    `memory` says what happens to old rows: `KeepAll()`, `ExponentialForgetting(memory=1000)`, `SlidingWindow(500)`.
    Rows given as `start=(X, y)` replace those of `fit`; a window needs them, the others go on from the fitted model.
    Between two factorisations a recursion carries the layers from row to row; each factorisation measures its error.
    """

    def __init__(self, model: Any, memory: Memory | None = None, *, start: tuple[Any, Any] | None = None) -> None:
        fitted, self._estimator = as_fitted(model).with_shared_rows("OnlineModel"), model
        if not all(math.isfinite(log_alpha) for log_alpha in fitted.log_alphas):
            raise InputError(
                "the variance is in use at an infinite alpha, which no recursion can follow: call "
                "model.at_alpha(math.log(model.alpha_star_)), or calibrate the model instead of tuning alpha"
            )
        self.memory = KeepAll() if memory is None else memory
        self.error = 0.0
        """Of the weights that the recursion had when they were last factored: the largest difference, relative."""
        self.n_rows = 0
        """Rows taken in since the start."""
        self._n_since = self._n_adopted = 0
        self._layers: list[LayerStack] = []
        self._groups = grouped([member.network for member in fitted.members])
        self._window: deque[list[FeatureRows]] = deque(maxlen=getattr(self.memory, "rows", None))
        if start is not None:  # nothing of the table that was fitted to is left
            fitted = replace(fitted, members=tuple(replace(member, unseen=NOTHING) for member in fitted.members))
        self._adopt(replace(fitted, conformal_scores=None))
        if start is not None:
            rows = self._rows(*start)
            self._remember(rows)
            self._factor(self._totals() if self._window else [r.statistics() for r in rows])
        elif isinstance(self.memory, SlidingWindow):
            raise InputError(
                f"{self.memory} must start from rows: give start=(X, y), such as the last ones the model was fitted to"
            )

    def predictive(self, X: Any, *, noise: bool = True) -> Prediction:
        """The predictive distribution given the rows that count now, as `BLLRegressor.predictive`."""
        fitted, Z = self._fitted, self._fitted.standardized(self._inputs(X))
        with torch.no_grad():
            features = ([group(Z[rows]).double() for group in self._groups] for rows in row_chunks(len(Z), CHUNK_ROWS))
            said = [self._said(own) for own in features]
            parts = self._components([torch.cat(each, 1) for each in zip(*said, strict=True)], Z)
        return fitted.prediction(as_arrays(parts), noise=noise)

    def _said(self, features: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, cost at the alpha in use and at alpha* of rows by all members, given their features by each group."""
        fitted, m = self._fitted, features[0].shape[1]
        mean, cost, ratio = (
            torch.empty(len(fitted.members), m, n, dtype=torch.float64) for n in (fitted.n_outputs, 1, 1)
        )
        for group, layers, own in zip(self._groups, self._layers, features, strict=True):
            own_mean, own_cost, own_ratio = layers.predict(own)
            mean[group.places] = own_mean.cpu()
            cost[group.places, :, 0], ratio[group.places, :, 0] = own_cost.cpu(), own_ratio.cpu()
        return mean * fitted.targets.scale + fitted.targets.mean, ratio, cost

    def _components(self, said: Sequence[Tensor], Z: Tensor) -> formula.Components:
        at = self._fitted.predictor.centre
        return formula.components(TorchOps, self._fitted.predictor, [x.to(at) for x in said], Z.to(at.dtype))

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Mean of the targets, shaped like y in fit; with their standard deviation, noise included."""
        p = self.predictive(X)
        shaped = (lambda values: values[:, 0]) if self._fitted.y_ndim == 1 else (lambda values: values)
        return (shaped(p.mean), shaped(p.std)) if return_std else shaped(p.mean)

    def update(self, X: Any, y: Any, sample_weight: Any = None) -> "OnlineModel":
        """Add rows, and drop or down-weight old ones as the memory prescribes."""
        data = self._data(X, y, sample_weight)
        rows = self._features(data)
        self._judge(data, rows)
        n = len(rows[0].T)
        small = n <= max(1, LARGE_BATCH * self._width)
        moved = self._moved(rows) if small else None
        layers = moved or [layers.noting(new) for layers, new in zip(self._layers, rows, strict=True)]
        self._remember(rows)
        self._layers, self.n_rows = layers, self.n_rows + n
        self._n_since, self._n_adopted = self._n_since + n, self._n_adopted + n
        if moved is None or self._n_since >= self.memory.interval(self._width):
            self._factor(self._totals(self.memory.kept(self._n_since)), carried=moved is not None)
        return self

    def remove(self, X: Any, y: Any, sample_weight: Any = None) -> "OnlineModel":
        """Take rows out that are in, with the weight they have now; rows that cannot be in are refused."""
        if isinstance(self.memory, SlidingWindow):
            raise InputError(
                "a sliding window drops its rows by itself: take KeepAll() or ExponentialForgetting() to remove rows"
            )
        self._adopt(revisions.without_rows(self.fitted_, self._data(X, y, sample_weight)))
        return self

    def reestimate(self) -> "OnlineModel":
        """alpha and noise from the rows that count now, as `BLLRegressor.reestimate`."""
        self._adopt(revisions.reestimate(self.fitted_))
        return self

    @property
    def fitted_(self) -> Fitted:
        """The model as it is now, as a value of its own."""
        faded = self.memory.kept(self._n_adopted)
        members = [replace(member, unseen=member.unseen.scaled(faded)) for member in self._fitted.members]
        for group, total in zip(self._groups, self._totals(), strict=True):
            for i, place in enumerate(group.places):
                layer = members[place].layer
                posterior = replace(layer.posterior, statistics=total[i])
                members[place] = replace(members[place], layer=replace(layer, posterior=posterior))
        return replace(self._fitted, members=tuple(members), calibration=self._calibration)

    def model(self) -> LastLayerRegressor:
        """A regressor with the last layers as they are now: to save, to plot, to ask anything else."""
        if not isinstance(self._estimator, LastLayerRegressor):
            raise InputError("this OnlineModel was made from a fitted value, not from a regressor: use `fitted_`")
        return self._estimator.with_fitted(self.fitted_)

    @property
    def _width(self) -> int:
        return max(layers.statistics.n_linear for layers in self._layers)

    def _adopt(self, fitted: Fitted) -> None:
        """Take over the last layers of a model."""
        self._fitted, self._n_since, self._n_adopted = fitted, 0, 0
        self._calibration = fitted.calibration
        self._layers = [
            LayerStack.of(
                [fitted.members[i].layer.posterior for i in group.places], [fitted.log_alphas[i] for i in group.places]
            )
            for group in self._groups
        ]

    def _remember(self, rows: list[FeatureRows]) -> None:
        """Rows enter the window, if there is one; the oldest leave it."""
        if isinstance(self.memory, SlidingWindow):
            self._window.extend([r.at(slice(i, i + 1)) for r in rows] for i in range(len(rows[0].T)))

    def _moved(self, rows: list[FeatureRows]) -> list[LayerStack] | None:
        """By the recursion; None where it would lose digits."""
        n, moved = len(rows[0].T), []
        gone = max(0, len(self._window) + n - self.memory.rows) if isinstance(self.memory, SlidingWindow) else 0
        if gone > len(self._window):
            return None
        with torch.no_grad():
            for i, (layers, new) in enumerate(zip(self._layers, rows, strict=True)):
                after = layers.with_rows(new)
                left = after.without(FeatureRows.joined([self._window[j][i] for j in range(gone)])) if gone else after
                if left is None:
                    return None
                moved.append(left)
        return moved

    def _totals(self, kept: float = 1.0) -> list[Statistics]:
        """Statistics of the rows that count now, one per group."""
        if isinstance(self.memory, SlidingWindow):
            return [FeatureRows.joined(parts).statistics() for parts in zip(*self._window, strict=True)]
        return [layers.total(kept) for layers in self._layers]

    def _factor(self, totals: list[Statistics], *, carried: bool = False) -> None:
        """Factor from statistics; where the recursion was carried on and no row lost weight, measure its error."""
        layers = [old.factored(total) for old, total in zip(self._layers, totals, strict=True)]
        if carried and self.memory.kept(self._n_since) == 1.0:
            self.error = max(old.error(new) for old, new in zip(self._layers, layers, strict=True))
        self._layers, self._n_since = layers, 0

    def _inputs(self, X: Any) -> ndarray:
        """Plain arrays without fault take the short way, all else that of scikit-learn."""
        d, is_table = self._fitted.n_features_in, self._fitted.inputs is not None
        plain = type(X) is ndarray and X.dtype == np.float64 and X.shape == (len(X), d)
        if plain and len(X) and is_table and np.isfinite(X).all():
            return X
        if isinstance(self._estimator, BaseEstimator):
            return check_X(self._estimator, X, reset=False, nd=not is_table)
        raise InputError(f"X must be a finite float64 array of shape (m, {d}), and has shape {np.shape(X)}")

    def _judge(self, data: Data, rows: list[FeatureRows]) -> None:
        """What new rows say of the calibration, before they are learned."""
        if self._calibration is None:
            return
        with torch.no_grad():
            said = self._said([own.phi for own in rows])
            squares = revisions.squared_residuals(self._fitted, self._components(said, data.X), data)
        assert self._fitted.calibration is not None
        in_use = {family: curve.widening for family, curve in self._fitted.calibration.curves.items()}
        n = float(len(data.T) if data.weight is None else data.weight.sum())
        # residuals are over the variance in use, those of the calibration over its own
        own = {f: total * in_use[f] / self._calibration.curves[f].widening for f, total in squares.items()}
        self._calibration = self._calibration.after(own, n, self.memory.remembered(len(data.T)))
        now = self._calibration.curves
        if max(abs(math.log(now[f].widening / used)) for f, used in in_use.items()) > NOTICED:
            self._fitted = replace(self._fitted, calibration=self._calibration)

    def _rows(self, X: Any, y: Any, sample_weight: Any = None) -> list[FeatureRows]:
        """Features and standardised targets, one set per group."""
        return self._features(self._data(X, y, sample_weight))

    def _features(self, data: Data) -> list[FeatureRows]:
        with torch.no_grad():
            return [FeatureRows(group(data.X).double(), data.T, data.weight) for group in self._groups]

    def _data(self, X: Any, y: Any, sample_weight: Any) -> Data:
        x, q = self._inputs(X), self._fitted.n_outputs
        targets = np.asarray(as_array(y), dtype=float)
        targets = targets[:, None] if targets.ndim == 1 else targets
        if targets.shape != (len(x), q):
            raise InputError(f"y has shape {np.shape(y)}: give ({len(x)}, {q}), one row of outputs per row of X")
        check_finite(targets, "y")
        weight = None if sample_weight is None else check_weight(sample_weight, np.empty((len(x), 1)))
        return self._fitted.data(x, targets, weight)
