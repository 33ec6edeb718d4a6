"""`OnlineModel`: a fitted model that learns from rows as they come, in O(p^2) per row, and answers in between."""

import math
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from sklearn.base import BaseEstimator
from torch import Tensor, nn

from lastlayer import checked, files, formula
from lastlayer.calibration import Calibration
from lastlayer.errors import InputError
from lastlayer.estimators.base import LastLayerRegressor
from lastlayer.estimators.regressor import BLLRegressor, unpacked
from lastlayer.inputs import LARGEST_TARGET, as_array, check_finite, check_weight, check_X
from lastlayer.networks.mlp import grouped
from lastlayer.online.arrays import Look, ModelArrays, networks_of
from lastlayer.online.drift import Drift, DriftMonitor
from lastlayer.online.layers import FeatureRows, LayerStack, within
from lastlayer.online.memory import KeepAll, Memory, SlidingWindow, pack_memory, unpack_memory
from lastlayer.prediction import Prediction
from lastlayer.predictor import revisions
from lastlayer.predictor.fitted import Fitted, as_fitted
from lastlayer.predictor.serialization import check_predictions
from lastlayer.predictor.unseen import NOTHING
from lastlayer.shapes import like_targets
from lastlayer.statistics import Statistics, row_chunks

CHUNK_ROWS = 1_024
LARGE_BATCH = 0.25
"""Of the rows between two factorisations: above it, a batch is better factored than taken in by the recursion."""
NOTICED = 0.05
"""Change of a curve's logarithm at which predictions follow it."""


class OnlineModel:
    """A fitted model whose last layers follow a stream; the features, and the curve, stay as fitted.

    Between two factorisations a recursion carries the layers from row to row; each factorisation measures its error.
    A row that is predicted and then learned passes the networks once.

    Parameters
    ----------
    model : fitted regressor, or `Fitted`
        It is copied, and stays as it is.
    memory : Memory, default KeepAll()
        What happens to old rows: `KeepAll()`, `ExponentialForgetting(memory=1000)` or `SlidingWindow(500)`.
    start : (X, y), default None
        Rows that replace those of `fit`; a window needs them, the others go on from the fitted model.
    monitor : DriftMonitor, default None
        It is shown the standardised residuals of rows before they are learned; `drift` is what it has seen.

    Examples
    --------
    >>> import numpy as np
    >>> from lastlayer import BLLRegressor
    >>> from lastlayer.online import ExponentialForgetting, OnlineModel
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(size=(50, 1))
    >>> y = np.sin(5 * X[:, 0]) + 0.1 * rng.normal(size=50)
    >>> model = BLLRegressor(preset="evidence", hidden=(5,), max_epochs=20, random_state=0).fit(X, y)
    >>> online = OnlineModel(model, ExponentialForgetting(memory=1000))
    >>> mean, std = online.predict([[0.5]], return_std=True)
    >>> _ = online.update([[0.5]], [0.6])
    """

    _fitted: Fitted
    """As adopted, with the curves that are in use."""
    _calibration: Calibration | None
    """The curves as they are now."""
    _arrays: ModelArrays
    _layers: list[LayerStack]
    _last: tuple[bytes, Look] | None
    """The row that was asked about last."""
    _n_since: int
    _n_adopted: int

    def __init__(
        self,
        model: Any,
        memory: Memory | None = None,
        *,
        start: tuple[Any, Any] | None = None,
        monitor: DriftMonitor | None = None,
    ) -> None:
        fitted = self._begin(model, KeepAll() if memory is None else memory, monitor)
        if start is not None:  # nothing of the table that was fitted to is left
            fitted = replace(fitted, members=tuple(replace(member, unseen=NOTHING) for member in fitted.members))
        self._adopt(replace(fitted, conformal_scores=None))
        if start is not None:
            X, y, weight = self._rows(*start)
            rows = self._seen(Look(self._arrays, self._layers, X), y, weight)
            self._remember(rows)
            self._factor(self._totals() if self._window else [r.statistics() for r in rows])
        elif isinstance(self.memory, SlidingWindow):
            raise InputError(
                f"{self.memory} must start from rows: give start=(X, y), such as the last ones the model was fitted to"
            )

    def _begin(self, model: Any, memory: Memory, monitor: DriftMonitor | None) -> Fitted:
        """All but the last layers and their rows; what the model holds, if it can follow a stream."""
        fitted, self._estimator = as_fitted(model).with_shared_rows("OnlineModel"), model
        if not all(math.isfinite(log_alpha) for log_alpha in fitted.log_alphas):
            raise InputError(
                "the variance is in use at an infinite alpha, which no recursion can follow: call "
                "model.at_alpha(math.log(model.alpha_star_)), or calibrate the model instead of tuning alpha"
            )
        if fitted.predictor.process is not None:
            raise InputError(
                "this is a member of a mixture taken alone, whose variance outside the data is that of another member: "
                "give the whole mixture"
            )
        self.memory, self.monitor = memory, monitor
        self.error = 0.0
        """Of the weights that the recursion had when they were last factored: the largest difference, relative."""
        self.n_rows = 0
        """Rows taken in since the start."""
        self._groups = grouped([member.network for member in fitted.members])
        self._networks = networks_of(self._groups, fitted)
        width = max(member.layer.posterior.statistics.n_linear for member in fitted.members)
        self._interval, self._largest = self.memory.interval(width), LARGE_BATCH * Memory().interval(width)
        self._window: deque[list[FeatureRows]] = deque(maxlen=getattr(self.memory, "rows", None))
        return fitted

    def predictive(self, X: Any, *, noise: bool = True) -> Prediction:
        """The predictive distribution given the rows that count now, as `BLLRegressor.predictive`."""
        each = [vars(look.components).values() for look in self._looks(self._inputs(X))]
        parts = each[0] if len(each) == 1 else (np.concatenate(part, axis=1) for part in zip(*each, strict=True))
        return self._fitted.prediction(formula.Components(*parts), noise=noise)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Mean of the targets, shaped like y in fit; with their standard deviation, noise included."""
        each = [look.moments for look in self._looks(self._inputs(X))]
        mean, var = each[0] if len(each) == 1 else (np.concatenate(part) for part in zip(*each, strict=True))
        y_ndim = self._fitted.y_ndim
        mean = like_targets(mean, y_ndim).copy()  # what is kept of a row for its update must not change
        return (mean, np.sqrt(like_targets(var, y_ndim))) if return_std else mean

    def update(self, X: Any, y: Any, sample_weight: Any = None) -> "OnlineModel":
        """Add rows, and drop or down-weight old ones as the memory prescribes."""
        X, y, weight = self._rows(X, y, sample_weight)
        look, n = self._look(X), len(X)
        rows = self._seen(look, y, weight)
        self._judge(look, y, weight)
        carried = n <= self._largest and self._carry(rows, look)
        for layers, new in zip(self._layers, rows, strict=True):
            layers.since.append(new)
        self._remember(rows)
        self._last = None
        self.n_rows += n
        self._n_since, self._n_adopted = self._n_since + n, self._n_adopted + n
        if not carried or self._n_since >= self._interval:
            self._factor(self._totals(self.memory.kept(self._n_since)), carried=carried)
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> "OnlineModel":
        """`update`, by scikit-learn's name for it: the model was fitted before it came here, so that every call adds
        rows. `BLLRegressor.partial_fit` fits at its first call."""
        return self.update(X, y, sample_weight)

    def remove(self, X: Any, y: Any, sample_weight: Any = None) -> "OnlineModel":
        """Take rows out that are in, with the weight they have now; rows that cannot be in are refused.

        So are rows so large that the moments have lost the digits of the others (`PrecisionError`): the model stays as
        it was. A sliding window has no such rows, since it is factored anew from those it holds.
        """
        if isinstance(self.memory, SlidingWindow):
            raise InputError(
                "a sliding window drops its rows by itself: take KeepAll() or ExponentialForgetting() to remove rows"
            )
        X, y, weight = self._rows(X, y, sample_weight)
        self._adopt(revisions.without_rows(self.fitted_, self._fitted.data(X, y, weight)))
        return self

    def reestimate(self) -> "OnlineModel":
        """alpha and noise from the rows that count now, as `BLLRegressor.reestimate`."""
        self._adopt(revisions.reestimate(self.fitted_))
        return self

    @property
    def drift(self) -> Drift:
        """What the monitor has seen."""
        if self.monitor is None:
            raise InputError("this OnlineModel has no monitor: give OnlineModel(model, monitor=DriftMonitor())")
        return self.monitor.drift

    @property
    def fitted_(self) -> Fitted:
        """The model as it is now, as a value of its own."""
        faded, device = self.memory.kept(self._n_adopted), self._fitted.settings.torch_device
        members = [replace(member, unseen=member.unseen.scaled(faded)) for member in self._fitted.members]
        for group, total in zip(self._groups, self._totals(), strict=True):
            for i, place in enumerate(group.places):
                layer = members[place].layer
                posterior = replace(layer.posterior, statistics=total[i].to(device))
                members[place] = replace(members[place], layer=replace(layer, posterior=posterior))
        return replace(self._fitted, members=tuple(members), calibration=self._calibration)

    def model(self) -> LastLayerRegressor:
        """A regressor with the last layers as they are now: to save, to plot, to ask anything else."""
        if not isinstance(self._estimator, LastLayerRegressor):
            raise InputError("this OnlineModel was made from a fitted value, not from a regressor: use `fitted_`")
        return self._estimator.with_fitted(self.fitted_)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the running model to one file (safetensors): last layers, the rows that count, the monitor.

        `OnlineModel.load` goes on where this one is, to the last bit.
        """
        if not isinstance(self._estimator, BLLRegressor):
            raise InputError("only an OnlineModel of a BLLRegressor can be saved: it was made from another model")
        tensors, header = self._estimator.with_fitted(self._fitted).packed()
        online: dict[str, Any] = {"memory": pack_memory(self.memory), "error": self.error, "n_rows": self.n_rows}
        online |= {"n_since": self._n_since, "n_adopted": self._n_adopted, "monitor": None, "curves": None}
        for i, layers in enumerate(self._layers):
            tensors |= {f"online.{i}.{name}": tensor for name, tensor in layers.pack().items()}
        for i, parts in enumerate(zip(*self._window, strict=True)):
            tensors |= {f"online.{i}.window.{name}": x for name, x in FeatureRows.joined(parts).pack().items()}
        if self.monitor is not None:
            more, online["monitor"] = self.monitor.pack()
            tensors |= {f"online.monitor.{name}": tensor for name, tensor in more.items()}
        if self._calibration is not None:
            online["curves"] = [[curve.seen, curve.squares] for curve in self._calibration.curves.values()]
        files.write(path, tensors, header | {"online": online})

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, backbone: nn.Module | None = None) -> "OnlineModel":
        """Go on with a model that `save` wrote; give the `backbone` module if the model had one of yours."""
        tensors, header = files.read(path)
        if "online" not in header:
            raise files.ModelFileError(
                f"{path} holds a model that was not saved while it ran: OnlineModel(lastlayer.load(path)) starts it"
            )
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith("online.")}
        model = unpacked(path, own, header, backbone)
        try:
            return cls._restored(model, within(tensors, "online."), header["online"])
        except Exception as error:  # a file may be whole and still hold anything
            raise files.ModelFileError(f"{path} does not fit this version of lastlayer: {error!r}") from error

    @classmethod
    def _restored(cls, model: BLLRegressor, tensors: dict[str, Tensor], header: dict[str, Any]) -> "OnlineModel":
        monitor, curves = header["monitor"], header["curves"]
        online = object.__new__(cls)
        fitted = online._begin(
            model,
            unpack_memory(header["memory"]),
            None if monitor is None else DriftMonitor.unpack(within(tensors, "monitor."), monitor),
        )
        online._adopt(fitted, [within(tensors, f"{i}.") for i in range(len(online._groups))])
        online.error = checked.number("error", header["error"], low=0.0)
        counts = [checked.typed(name, header[name], int) for name in ("n_rows", "n_since", "n_adopted")]
        if min(counts) < 0:
            raise ValueError(f"n_rows, n_since and n_adopted are {counts}")
        online.n_rows, online._n_since, online._n_adopted = counts
        if isinstance(online.memory, SlidingWindow):
            online._remember(
                [
                    FeatureRows.unpack(within(tensors, f"{i}.window."), layers.statistics)
                    for i, layers in enumerate(online._layers)
                ]
            )
        if fitted.calibration is not None:
            numbers = zip(fitted.calibration.curves.items(), curves, strict=True)
            number = partial(checked.number, low=0.0)
            now = {
                f: replace(c, seen=number("seen", seen), squares=number("squares", squares))
                for (f, c), (seen, squares) in numbers
            }
            online._calibration = replace(fitted.calibration, curves=now)
        for predictive in (online.predictive, online.fitted_.predictive):
            check_predictions(fitted, predictive)
        return online

    def _adopt(self, fitted: Fitted, packed: Sequence[dict[str, Tensor]] | None = None) -> None:
        """Take over the last layers of a model, or those that were packed."""
        self._fitted, self._n_since, self._n_adopted, self._last = fitted, 0, 0, None
        self._calibration, self._arrays = fitted.calibration, ModelArrays.of(fitted, self._networks)
        tuned = fitted.log_alphas != fitted.stars
        parts = [
            (
                [fitted.members[i].layer.posterior for i in group.places],
                [fitted.log_alphas[i] for i in group.places] if tuned else None,
            )
            for group in self._groups
        ]
        if packed is None:
            self._layers = [LayerStack.of(*own) for own in parts]
        else:
            self._layers = [LayerStack.unpack(tensors, *own) for tensors, own in zip(packed, parts, strict=True)]

    def _look(self, X: ndarray) -> Look:
        """A row that was asked about last is not computed again when it is learned."""
        if len(X) != 1:
            return Look(self._arrays, self._layers, X)
        key = X.tobytes()
        if self._last is None or self._last[0] != key:
            self._last = key, Look(self._arrays, self._layers, X)
        return self._last[1]

    def _looks(self, X: ndarray) -> list[Look]:
        return [self._look(X[rows]) for rows in row_chunks(len(X), CHUNK_ROWS)] if len(X) > 1 else [self._look(X)]

    def _seen(self, look: Look, y: Float[ndarray, "m q"], weight: Float[ndarray, " m"] | None) -> list[FeatureRows]:
        """Features and standardised targets, one set per group."""
        T, weight = self._arrays.standardized_targets(y), np.ones(len(y)) if weight is None else weight
        return [FeatureRows(phi, T, weight) for phi in look.features]

    def _remember(self, rows: list[FeatureRows]) -> None:
        """Rows enter the window, if there is one; the oldest leave it."""
        n = len(rows[0].T)
        if isinstance(self.memory, SlidingWindow) and n == 1:
            self._window.append(rows)
        elif isinstance(self.memory, SlidingWindow):
            self._window.extend([r.at(slice(i, i + 1)) for r in rows] for i in range(max(0, n - self.memory.rows), n))

    def _carry(self, rows: list[FeatureRows], look: Look) -> bool:
        """By the recursion; False where it would lose digits, and is of no use until the layers are factored."""
        gone = len(self._window) + len(rows[0].T) - self.memory.rows if isinstance(self.memory, SlidingWindow) else 0
        if gone > len(self._window):
            return False
        for i, (layers, new, whitened) in enumerate(zip(self._layers, rows, look.whitened, strict=True)):
            if not layers.add(new, whitened) or not all(layers.drop(self._window[j][i]) for j in range(gone)):
                return False
        return True

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
        self._layers, self._n_since, self._last = layers, 0, None

    def _judge(self, look: Look, y: Float[ndarray, "m q"], weight: Float[ndarray, " m"] | None) -> None:
        """What new rows say of the calibration and of drift, before they are learned."""
        if self.monitor is not None:
            mean, var = look.moments
            self.monitor.update((y - mean) / np.sqrt(var))
        if self._calibration is None:
            return
        squares = revisions.squared_residuals(self._fitted, look.components, y, weight=weight)
        assert self._fitted.calibration is not None
        in_use = {family: curve.widening for family, curve in self._fitted.calibration.curves.items()}
        # residuals are over the variance in use, those of the calibration over its own
        own = {f: total * in_use[f] / self._calibration.curves[f].widening for f, total in squares.items()}
        n = float(len(y) if weight is None else weight.sum())
        self._calibration = self._calibration.after(own, n, self.memory.remembered(len(y)))
        now = self._calibration.curves
        if max(abs(math.log(now[f].widening / used)) for f, used in in_use.items()) > NOTICED:
            self._fitted = replace(self._fitted, calibration=self._calibration)
            self._arrays = self._arrays.calibrated(self._fitted, self._calibration)

    def _inputs(self, X: Any) -> ndarray:
        """Plain arrays without fault take the short way, all else that of scikit-learn."""
        d, is_table = self._fitted.n_features_in, self._fitted.inputs is not None
        plain = type(X) is ndarray and X.dtype == np.float64 and X.shape == (len(X), d)
        if plain and len(X) and is_table and self._arrays.near(X):
            return X
        if isinstance(self._estimator, BaseEstimator):
            checked = check_X(self._estimator, X, reset=False, nd=not is_table)
            self._fitted.check_reach(checked)
            return checked
        if plain:
            check_finite(X, "X")
            self._fitted.check_reach(X)
        raise InputError(f"X must be a finite float64 array of shape (m, {d}), and has shape {np.shape(X)}")

    def _rows(
        self, X: Any, y: Any, sample_weight: Any = None
    ) -> tuple[ndarray, Float[ndarray, "m q"], Float[ndarray, " m"] | None]:
        """Checked rows in original units."""
        x, q = self._inputs(X), self._fitted.n_outputs
        targets = np.asarray(as_array(y), dtype=float)
        targets = targets[:, None] if targets.ndim == 1 else targets
        if targets.shape != (len(x), q):
            raise InputError(f"y has shape {np.shape(y)}: give ({len(x)}, {q}), one row of outputs per row of X")
        if not self._arrays.near_targets(targets):
            check_finite(targets, "y", largest=LARGEST_TARGET)
            self._fitted.check_reach(x, targets)
        weight = check_weight(sample_weight, np.empty((len(x), 1)))
        return x, targets, None if weight is None else weight.copy()
