"""`OnlineModel`: a fitted model that learns from rows as they come, in O(p^2) a row, and answers in between."""

import copy
import math
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from lastlayer.errors import InputError
from lastlayer.estimator import columns
from lastlayer.inputs import check_weight
from lastlayer.model import LastLayerModel, Marginals
from lastlayer.online.layers import Layers, Rows
from lastlayer.online.networks import grouped
from lastlayer.online.past import Everything, Past, Window
from lastlayer.prediction import Prediction
from lastlayer.statistics import Statistics

CHUNK_ROWS = 1_024
LARGE_BATCH = 0.25
"""Rows for each feature above which a batch is better factored than taken in by the recursion."""


class OnlineModel:
    """A copy of a fitted model whose last layers follow a stream; the features, and the curve, stay as fitted.

    `past` says what becomes of old rows: `Everything()`, `Fading(memory=1000)`, `Window(500)`. Rows given as
    `start=(X, y)` take the place of those of `fit`; a window needs them, the others go on from the fitted model.
    Between two factorisations a recursion carries the layers from row to row; each factorisation measures its error.
    """

    def __init__(
        self, model: LastLayerModel, past: Past | None = None, *, start: tuple[Any, Any] | None = None
    ) -> None:
        if not all(math.isfinite(log_alpha) for log_alpha in model.log_alphas_):
            raise InputError(
                "the variance is in use at an infinite alpha, which no recursion can follow: call "
                "model.at_alpha(math.log(model.alpha_star_)), or calibrate the model instead of tuning alpha"
            )
        self.past: Past = Everything() if past is None else past
        self.error = 0.0
        """Of the weights that the recursion had when they were last factored: the largest difference, relative."""
        self.n_rows = 0
        """Rows taken in since the start."""
        self._model = copy.copy(model)
        self._model.conformal_scores_ = None
        self._groups = grouped([member.network for member in model.members_])
        self._window: deque[list[Rows]] = deque()
        self._layers: list[Layers] = []
        self._n_since = 0
        self._adopt()
        if start is not None:
            self._begin(self._rows(*start))
        elif isinstance(self.past, Window):
            raise InputError(
                f"{self.past} must start from rows: give start=(X, y), such as the last ones the model was fitted to"
            )

    def predictive(self, X: Any, *, noise: bool = True) -> Prediction:
        """The predictive distribution given the rows that count now, as `BLLRegressor.predictive`."""
        Z = self._inputs(X)
        c, m, q = len(self._model.members_), len(Z), len(self._model._targets.mean)
        mean, cost, ratio = (torch.empty(shape, dtype=torch.float64) for shape in ((c, m, q), (c, m), (c, m)))
        with torch.no_grad():
            for group, layers in zip(self._groups, self._layers, strict=True):
                for start in range(0, m, CHUNK_ROWS):
                    rows = slice(start, start + CHUNK_ROWS)
                    for whole, part in zip((mean, cost, ratio), layers.predict(group(Z[rows])), strict=True):
                        whole[group.places, rows] = part.cpu()
        marginals = Marginals(self._model._unscaled(mean), cost.numpy(), ratio.numpy(), self._model._noise_factor(Z))
        return self._model._mixture(marginals, noise)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Mean of the targets, shaped like y in fit; with their standard deviation, noise included."""
        p = self.predictive(X)
        shaped = self._model._shaped
        return (shaped(p.mean), shaped(p.std)) if return_std else shaped(p.mean)

    def update(self, X: Any, y: Any, sample_weight: Any = None) -> "OnlineModel":
        """Take in rows; those that the past lets go, go."""
        rows = self._rows(X, y, sample_weight)
        n = len(rows[0].T)
        small = n <= max(1, LARGE_BATCH * self._width)
        moved = self._moved(rows) if small else None
        layers = moved or [layers.noting(new) for layers, new in zip(self._layers, rows, strict=True)]
        if isinstance(self.past, Window):
            self._window.extend([r.at(slice(i, i + 1)) for r in rows] for i in range(n))
            while len(self._window) > self.past.rows:
                self._window.popleft()
        self._layers, self._n_since, self.n_rows = layers, self._n_since + n, self.n_rows + n
        if moved is None or self._n_since >= self.past.interval(self._width):
            self._factor(self._totals(self._kept()), carried=moved is not None)
        return self

    def remove(self, X: Any, y: Any, sample_weight: Any = None) -> "OnlineModel":
        """Take rows out that are in, with the weight they have now; rows that cannot be in are refused."""
        if isinstance(self.past, Window):
            raise InputError(
                "a window lets its rows go by itself: take Everything() or Fading() to remove some by hand"
            )
        rows = self._rows(X, y, sample_weight)
        self._factor([now - r.statistics() for now, r in zip(self._totals(), rows, strict=True)])
        return self

    def reestimate(self) -> "OnlineModel":
        """alpha and noise anew from the rows that count now, as `BLLRegressor.reestimate`."""
        self._model = self.model().reestimate()
        self._adopt()
        return self

    def model(self) -> LastLayerModel:
        """A model of its own with the last layers as they are now: to save, to plot, to ask anything else."""
        now = copy.copy(self._model)
        now.members_ = list(now.members_)
        for group, total in zip(self._groups, self._totals(), strict=True):
            for i, place in enumerate(group.places):
                member = now.members_[place]
                posterior = replace(member.layer.posterior, statistics=total[i])
                now.members_[place] = replace(member, layer=replace(member.layer, posterior=posterior))
        return now

    # inside -----------------------------------------------------------------------------------------------------

    @property
    def _width(self) -> int:
        return max(layers.statistics.n_linear for layers in self._layers)

    def _adopt(self) -> None:
        """Take the last layers of the model in hand."""
        members, log_alphas = self._model.members_, self._model.log_alphas_
        self._layers = [
            Layers.of([members[i].layer.posterior for i in g.places], [log_alphas[i] for i in g.places])
            for g in self._groups
        ]
        self._n_since = 0

    def _begin(self, rows: list[Rows]) -> None:
        """These rows in place of those of fit."""
        if isinstance(self.past, Window):
            rows = [r.at(slice(-self.past.rows, None)) for r in rows]
            self._window.extend([r.at(slice(i, i + 1)) for r in rows] for i in range(len(rows[0].T)))
        self._layers = [layers.factored(r.statistics()) for layers, r in zip(self._layers, rows, strict=True)]

    def _moved(self, rows: list[Rows]) -> list[Layers] | None:
        """By the recursion; None where it would lose digits."""
        n, moved = len(rows[0].T), []
        gone = max(0, len(self._window) + n - self.past.rows) if isinstance(self.past, Window) else 0
        if gone > len(self._window):
            return None
        with torch.no_grad():
            for i, (layers, new) in enumerate(zip(self._layers, rows, strict=True)):
                after: Layers | None = layers.with_rows(new)
                if gone and after is not None:
                    after = after.without(Rows.joined([self._window[j][i] for j in range(gone)]))
                if after is None:
                    return None
                moved.append(after)
        return moved

    def _kept(self) -> float:
        """Weight that the rows of before the last factorisation keep."""
        return 1.0 if isinstance(self.past, Window) else self.past.kept(self._n_since)

    def _totals(self, kept: float = 1.0) -> list[Statistics]:
        """Statistics of the rows that count now, a group each."""
        if isinstance(self.past, Window):
            return [Rows.joined(parts).statistics() for parts in zip(*self._window, strict=True)]
        return [layers.total(kept) for layers in self._layers]

    def _factor(self, totals: list[Statistics], *, carried: bool = False) -> None:
        """Anew from statistics; where the recursion was carried this far and nothing fades, its error is measured."""
        layers = [old.factored(total) for old, total in zip(self._layers, totals, strict=True)]
        if carried and self._kept() == 1.0:
            self.error = max(old.error(new) for old, new in zip(self._layers, layers, strict=True))
        self._layers, self._n_since = layers, 0

    def _inputs(self, X: Any) -> Tensor:
        """Standardised; plain arrays without fault take the short way, all else that of scikit-learn."""
        plain = type(X) is ndarray and X.dtype == np.float64 and X.shape == (len(X), self._model.n_features_in_)
        if plain and len(X) and self._model._inputs is not None and np.isfinite(X).all():
            return self._model._standardised(X)
        return self._model._checked(X)

    def _rows(self, X: Any, y: Any, sample_weight: Any = None) -> list[Rows]:
        """Features and standardised targets, a group each."""
        q = len(self._model._targets.mean)
        plain = type(y) is ndarray and y.dtype == np.float64 and y.shape in ((len(X), q), (len(X),) if q == 1 else ())
        if plain and type(X) is ndarray and np.isfinite(y).all():
            Z, T = self._inputs(X), self._model._targets.forward(columns(y)).to(self._model._device())
        else:
            data = self._model._validation(X, y)
            Z, T = data.X, data.T
        weight = None if sample_weight is None else check_weight(sample_weight, np.empty((len(T), 1)))
        w = None if weight is None else torch.tensor(weight, device=T.device)
        with torch.no_grad():
            return [Rows(group(Z), T, w) for group in self._groups]
