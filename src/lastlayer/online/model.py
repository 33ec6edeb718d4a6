"""`OnlineModel`: updates the last layers of a fitted model row by row, in O(p^2) per row, and predicts in between."""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from sklearn.base import BaseEstimator
from torch import Tensor, nn

from lastlayer import formula
from lastlayer._internal import codec, files
from lastlayer._internal.arrays import as_array, check_finite
from lastlayer._internal.codec import Limits
from lastlayer._internal.work import row_chunks
from lastlayer.bayes.statistics import Statistics
from lastlayer.calibration.curve import Calibration
from lastlayer.data.scaling import LARGEST_TARGET
from lastlayer.data.validation import check_weight, check_X
from lastlayer.errors import InputError
from lastlayer.estimators.base import LastLayerRegressor
from lastlayer.estimators.regressor import BLLRegressor, unpacked
from lastlayer.online.arrays import Features, Look, ModelArrays
from lastlayer.online.drift import Drift, DriftMonitor, SavedMonitor
from lastlayer.online.layers import FeatureRows, LayerStack
from lastlayer.online.memory import ExponentialForgetting, KeepAll, Memory, SlidingWindow
from lastlayer.predictions.prediction import Prediction, like_targets
from lastlayer.predictor import revisions
from lastlayer.predictor.codec import check_predictions
from lastlayer.predictor.fitted import Fitted, as_fitted
from lastlayer.predictor.member import NOTHING

CHUNK_ROWS = 1_024
LARGE_BATCH = 0.25
"""Fraction of the rows between two factorisations above which a batch is factorised instead of added recursively."""
NOTICED = 0.05
"""Predictions adopt a new calibration curve once its logarithm has changed by this much."""


MEMORIES = (KeepAll, ExponentialForgetting, SlidingWindow)


@dataclass(frozen=True)
class Running:
    """What a model file holds of a running model beside its last layers and rows."""

    memory: KeepAll | ExponentialForgetting | SlidingWindow
    monitor: SavedMonitor | None
    curves: tuple[tuple[float, ...], ...]
    """Numbers of residuals that each curve has seen, and sums of their squares."""
    error: float
    counts: tuple[int, ...]
    """Rows since the start, since the last factorisation, and since a fitted model was adopted."""


LIMITS = {Running: {"curves": Limits(0.0), "error": Limits(0.0)}, SavedMonitor: {"log_M": Limits(infinite=True)}}


class OnlineModel:
    """A fitted model whose last layers follow a stream of rows; features and calibration curve stay as fitted.

    Residuals of new rows that are larger than the calibration expects widen the predicted variance.

    Parameters
    ----------
    model : fitted regressor, or `Fitted`
        The model to start from; it is copied and not changed.
    memory : Memory, default KeepAll()
        What happens to old rows: `KeepAll()`, `ExponentialForgetting(memory=1000)` or `SlidingWindow(500)`.
    start : (X, y), default None
        Rows that replace those of `fit`, which a sliding window requires.
    monitor : DriftMonitor, default None
        Monitor that receives the standardised residuals of new rows before they are learned; `drift` returns its state.
    """

    _calibration: Calibration | None
    """The curves as updated by the rows seen so far; predictions use those of `_fitted`."""
    _last: tuple[bytes, Look] | None
    """The row predicted last, so that learning it does not compute its features again."""
    _layers: list[LayerStack]
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
        if start is not None:  # no row of the training table remains
            fitted = replace(fitted, members=tuple(replace(member, unseen=NOTHING) for member in fitted.members))
        self._adopt(replace(fitted, conformal_scores=None))
        if start is not None:
            X, y, weight = self._rows(*start)
            rows = self._seen(Look(self._arrays, self._layers, X), y, weight)
            self._remember(rows)
            self._factor(self._totals() if self._window else [r.statistics() for r in rows])
        elif isinstance(self.memory, SlidingWindow):
            raise InputError(
                f"{self.memory} needs initial rows: give start=(X, y), such as the last rows of the training data"
            )

    def _begin(self, model: Any, memory: Memory, monitor: DriftMonitor | None) -> Fitted:
        """Set up all but the last layers and their rows; return the fitted value if it can be updated online."""
        fitted, self._estimator = as_fitted(model, "OnlineModel", shared=True), model
        if not all(math.isfinite(log_alpha) for log_alpha in fitted.log_alphas):
            raise InputError(
                "the variance is in use at an infinite alpha, which no recursion can follow: call "
                "model.at_alpha(math.log(model.alpha_star_)), or calibrate the model instead of tuning alpha"
            )
        if fitted.process is not None:
            raise InputError(
                "this is a member of a mixture taken alone, whose variance outside the data is that of another member: "
                "give the whole mixture"
            )
        self.memory, self.monitor = memory, monitor
        self.error = 0.0
        """Error of the recursion at the last factorisation: the largest relative difference of the weights."""
        self.n_rows = 0
        """Rows learned since the start."""
        self._groups = fitted.state.layers
        self._networks = [Features.of(layer, fitted) for layer in self._groups]
        width = max(member.posterior.statistics.n_linear for member in fitted.members)
        self._interval, self._largest = self.memory.interval(width), LARGE_BATCH * Memory().interval(width)
        self._window: deque[list[FeatureRows]] = deque(
            maxlen=memory.rows if isinstance(memory, SlidingWindow) else None
        )
        return fitted

    def predictive(self, X: Any, *, noise: bool = True) -> Prediction:
        """Predictive distribution given the rows in memory, as in `BLLRegressor.predictive`.

        Parameters
        ----------
        X, noise : array-like of shape (m, d), bool
            Inputs, and whether to include the noise; False gives the distribution of the function.
        """
        parts = self._together(X, lambda look: [x for x in look.components if x is not None])
        return self._fitted.prediction(formula.Components(*parts), noise=noise)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predict the mean of the targets, and optionally their standard deviation.

        Parameters
        ----------
        X, return_std : array-like of shape (m, d), bool
            Inputs, and whether to return the standard deviation, noise included, as well.
        """
        (mean, var), y_ndim = self._together(X, lambda look: look.moments), self._fitted.y_ndim
        mean = like_targets(mean, y_ndim).copy()  # the cached values of a row must not change before its update
        return (mean, np.sqrt(like_targets(var, y_ndim))) if return_std else mean

    def update(self, X: Any, y: Any, sample_weight: Any = None) -> "OnlineModel":
        """Add rows, and drop or down-weight old ones as the memory prescribes; `partial_fit` is the same.

        Parameters
        ----------
        X, y, sample_weight : array-like of shape (m, d), (m,) or (m, q), (m,)
            Inputs, targets, and weights of the rows, by default 1.
        """
        X, y, weight = self._rows(X, y, sample_weight)
        look, n, weight = self._look(X), len(X), weight * self.memory.weights(len(X))
        self._judge(look, y, weight)
        self.n_rows += n
        self._n_since, self._n_adopted = self._n_since + n, self._n_adopted + n
        kept, due = self.memory.kept(self._n_since), self._n_since >= self._interval
        rows = self._seen(look, y, weight / kept)  # old rows fade at the next factorisation, all together
        # where they fade now, the recursion would be of no use
        carried = n <= self._largest and not (due and kept < 1) and self._carry(rows, look)
        for layers, new in zip(self._layers, rows, strict=True):
            layers.since.append(new)
        self._remember(rows)
        self._last = None
        if not carried or due:
            self._factor(self._totals(kept), carried=carried)
        return self

    partial_fit = update

    def remove(self, X: Any, y: Any, sample_weight: Any = None) -> "OnlineModel":
        """Remove rows that were learned before, at the weight they have now.

        The model is unchanged if the rows are refused, as by PrecisionError if they are too large beside the others.

        Parameters
        ----------
        X, y, sample_weight : array-like
            As in `update`.
        """
        if isinstance(self.memory, SlidingWindow):
            raise InputError(
                "a sliding window drops rows itself: use KeepAll() or ExponentialForgetting() to remove rows"
            )
        X, y, weight = self._rows(X, y, sample_weight)
        self._adopt(revisions.without_rows(self._current(faded=True), self._fitted.data(X, y, weight)))
        return self

    def reestimate(self) -> "OnlineModel":
        """Estimate alpha and the noise from the rows in memory, as in `BLLRegressor.reestimate`."""
        self._adopt(revisions.reestimate(self._current(faded=True)))
        return self

    @property
    def drift(self) -> Drift:
        """State of the drift monitor."""
        if self.monitor is None:
            raise InputError("this OnlineModel has no monitor: give OnlineModel(model, monitor=DriftMonitor())")
        return self.monitor.drift

    @property
    def fitted_(self) -> Fitted:
        """The current model as a frozen value."""
        return self._current()

    def _current(self, *, faded: bool = False) -> Fitted:
        """The current model; faded: with its rows at the weights they have now, which `_adopt` starts from."""
        totals = self._totals(self.memory.kept(self._n_since) if faded else 1.0)
        kept, device = self.memory.kept(self._n_adopted), self._fitted.settings.place.device
        members = [replace(member, unseen=member.unseen.scaled(kept)) for member in self._fitted.members]
        for group, total in zip(self._groups, totals, strict=True):
            for i, place in enumerate(group.places):
                posterior = replace(members[place].posterior, statistics=total[i].to(device))
                members[place] = replace(members[place], posterior=posterior)
        return replace(self._fitted, members=tuple(members), calibration=self._calibration)

    def model(self) -> LastLayerRegressor:
        """Return a regressor with the current last layers, to save, plot or use like any fitted regressor."""
        if not isinstance(self._estimator, LastLayerRegressor):
            raise InputError("this OnlineModel was made from a fitted value, not from a regressor: use `fitted_`")
        return self._estimator.with_fitted(self.fitted_)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the running model to one safetensors file, from which `load` resumes with bitwise equal predictions.

        Parameters
        ----------
        path : str or path-like
            File to write.
        """
        if not isinstance(self._estimator, BLLRegressor):
            raise InputError("only an OnlineModel of a BLLRegressor can be saved: it was made from another model")
        if type(self.memory) not in MEMORIES:
            kinds = ", ".join(kind.__name__ for kind in MEMORIES)
            raise InputError(
                f"a {type(self.memory).__name__} cannot be saved: use one of {kinds}, or save online.model()"
            )
        curves = {} if self._calibration is None else self._calibration.curves
        running = Running(
            memory=self.memory,  # type: ignore[arg-type]
            monitor=None if self.monitor is None else SavedMonitor.of(self.monitor),
            curves=tuple((curve.seen, curve.squares) for curve in curves.values()),
            error=self.error,
            counts=(self.n_rows, self._n_since, self._n_adopted),
        )
        window = [FeatureRows.joined(parts) for parts in zip(*self._window, strict=True)]
        tensors, header = self._estimator.with_fitted(self._fitted).packed()
        for name, value in (
            ("online", running),
            ("online.layers", [layers.saved() for layers in self._layers]),
            ("online.window", window),
        ):
            more, header[name] = codec.pack(value, name)
            tensors |= more
        files.write(path, tensors, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, backbone: nn.Module | None = None) -> "OnlineModel":
        """Resume a running model that `save` wrote.

        Parameters
        ----------
        path, backbone : str or path-like, torch.nn.Module
            File to read, and a module with the architecture of the model's backbone, if it was fitted with one.
        """
        tensors, header = files.read(path)
        if "online" not in header:
            raise files.ModelFileError(
                f"{path} was not written by OnlineModel.save: start one with OnlineModel(lastlayer.load(path))"
            )
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith("online.")}
        model = unpacked(path, own, header, backbone)
        try:
            return cls._restored(model, tensors, header)
        except Exception as error:  # an intact file may still hold anything
            raise files.ModelFileError(f"{path} does not fit this version of lastlayer: {error!r}") from error

    @classmethod
    def _restored(cls, model: BLLRegressor, tensors: dict[str, Tensor], header: dict[str, Any]) -> "OnlineModel":
        running: Running = codec.Reader(tensors, {}, LIMITS).unpack(Running, header["online"], "online")
        online = object.__new__(cls)
        monitor = None if running.monitor is None else running.monitor.restored()
        online._adopt(online._begin(model, running.memory, monitor))
        stacks = enumerate(zip(online._layers, header["online.layers"], strict=True))
        online._layers = [layers.restored(own, f"online.layers.{i}", tensors) for i, (layers, own) in stacks]
        if isinstance(running.memory, SlidingWindow):
            parts = enumerate(zip(online._layers, header["online.window"], strict=True))
            online._remember(
                [layers.reader(tensors).unpack(FeatureRows, own, f"online.window.{i}") for i, (layers, own) in parts]
            )
        online.error, (online.n_rows, online._n_since, online._n_adopted) = running.error, running.counts
        if min(running.counts) < 0:
            raise ValueError(f"n_rows, n_since and n_adopted are {running.counts}")
        calibration = online._calibration
        if calibration is not None:
            pairs = zip(calibration.curves.items(), running.curves, strict=True)
            curves = {f: replace(curve, seen=seen, squares=squares) for (f, curve), (seen, squares) in pairs}
            online._calibration = replace(calibration, curves=curves)
        for predictive in (online.predictive, online.fitted_.predictive):
            check_predictions(online._fitted, predictive)
        return online

    def _adopt(self, fitted: Fitted) -> None:
        self._fitted, self._n_since, self._n_adopted, self._last = fitted, 0, 0, None
        self._calibration, self._arrays = fitted.calibration, ModelArrays.of(fitted, self._networks)
        tuned = any(member.log_alpha != member.log_alpha_star for member in fitted.members)
        self._layers = [LayerStack.of([fitted.members[i] for i in g.places], tuned=tuned) for g in self._groups]

    def _look(self, X: ndarray) -> Look:
        """Evaluate rows; the row evaluated last is reused, so that predicting and learning it costs one evaluation."""
        if len(X) != 1:
            return Look(self._arrays, self._layers, X)
        key = X.tobytes()
        if self._last is None or self._last[0] != key:
            self._last = key, Look(self._arrays, self._layers, X)
        return self._last[1]

    def _together(self, X: Any, of: Callable[[Look], Iterable[ndarray]]) -> list[ndarray]:
        """Evaluate rows in chunks; rows are the last axis but one of what is evaluated."""
        X = self._inputs(X)
        chunks = [X] if len(X) <= CHUNK_ROWS else [X[rows] for rows in row_chunks(len(X), CHUNK_ROWS)]
        each = [of(self._look(chunk)) for chunk in chunks]
        return list(each[0]) if len(each) == 1 else [np.concatenate(part, -2) for part in zip(*each, strict=True)]

    def _seen(self, look: Look, y: Float[ndarray, "m q"], weight: Float[ndarray, " m"]) -> list[FeatureRows]:
        """Features and standardised targets of the rows, one set per group of networks."""
        T = self._arrays.targets.forward(y)
        return [FeatureRows(phi, T, weight) for phi in look.features]

    def _remember(self, rows: list[FeatureRows]) -> None:
        """Append rows to the sliding window, if there is one; the oldest rows leave it."""
        if isinstance(self.memory, SlidingWindow):
            n = len(rows[0].T)
            each = ([r.at(slice(i, i + 1)) for r in rows] for i in range(max(0, n - self.memory.rows), n))
            self._window.extend([rows] if n == 1 else each)

    def _carry(self, rows: list[FeatureRows], look: Look) -> bool:
        """Update by the recursion; False where it would lose digits and the layers must be factorised."""
        gone = len(self._window) + len(rows[0].T) - self.memory.rows if isinstance(self.memory, SlidingWindow) else 0
        if gone > len(self._window):
            return False
        for i, (layers, new, whitened) in enumerate(zip(self._layers, rows, look.whitened, strict=True)):
            if not layers.add(new, whitened) or not all(layers.drop(self._window[j][i]) for j in range(gone)):
                return False
        return True

    def _totals(self, kept: float = 1.0) -> list[Statistics]:
        """Statistics of the rows in memory, one per group of networks."""
        if isinstance(self.memory, SlidingWindow):
            return [FeatureRows.joined(parts).statistics() for parts in zip(*self._window, strict=True)]
        return [layers.total(kept) for layers in self._layers]

    def _factor(self, totals: list[Statistics], *, carried: bool = False) -> None:
        """Factorise from statistics; if the recursion was applied, measure its error."""
        layers = [old.factored(total) for old, total in zip(self._layers, totals, strict=True)]
        if carried:
            self.error = max(old.error(new) for old, new in zip(self._layers, layers, strict=True))
        self._layers, self._n_since, self._last = layers, 0, None

    def _judge(self, look: Look, y: Float[ndarray, "m q"], weight: Float[ndarray, " m"]) -> None:
        """Update the calibration and the drift monitor with new rows before they are learned."""
        if self.monitor is not None:
            mean, var = look.moments
            self.monitor.update((y - mean) / np.sqrt(var))
        if self._calibration is None:
            return
        squares = revisions.squared_residuals(self._fitted, look.components, y, weight=weight)
        assert self._fitted.calibration is not None
        in_use = {family: curve.widening for family, curve in self._fitted.calibration.curves.items()}
        # residuals are relative to the variance in use, those of the calibration relative to its own
        own = {f: total * in_use[f] / self._calibration.curves[f].widening for f, total in squares.items()}
        self._calibration = self._calibration.after(own, float(weight.sum()), self.memory.remembered(len(y)))
        now = self._calibration.curves
        if max(abs(math.log(now[f].widening / used)) for f, used in in_use.items()) > NOTICED:
            self._fitted = replace(self._fitted, calibration=self._calibration)
            self._arrays = self._arrays.calibrated(self._fitted, self._calibration)

    def _inputs(self, X: Any) -> ndarray:
        """Check inputs: valid float64 arrays take a short path, everything else scikit-learn's validation."""
        d, is_table = self._fitted.n_features_in, self._fitted.inputs is not None
        plain = type(X) is ndarray and X.dtype == np.float64 and X.shape == (len(X), d)
        if plain and len(X) and is_table and self._arrays.inputs.near(X):
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
    ) -> tuple[ndarray, Float[ndarray, "m q"], Float[ndarray, " m"]]:
        """Check rows, in original units."""
        x, q = self._inputs(X), self._fitted.n_outputs
        targets = np.asarray(as_array(y), dtype=float)
        targets = targets[:, None] if targets.ndim == 1 else targets
        if targets.shape != (len(x), q):
            raise InputError(f"y has shape {np.shape(y)}: give ({len(x)}, {q}), one row of outputs per row of X")
        if not self._arrays.targets.near(targets):
            check_finite(targets, "y", largest=LARGEST_TARGET)
            self._fitted.check_reach(x, targets)
        if sample_weight is None:
            return x, targets, np.ones(len(x))
        return x, targets, check_weight(sample_weight, len(x)).copy()
