"""An `OnlineModel` with river's interface: rows are dictionaries, learned and predicted one at a time."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy import ndarray
from scipy.special import ndtri

from lastlayer.errors import InputError, need
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.online import DriftMonitor, Memory, OnlineModel, SlidingWindow

base: Any = need("river.base", extra="river")
conf: Any = need("river.conf", extra="river")
proba: Any = need("river.proba", extra="river")


class RiverRegressor(base.Regressor):  # type: ignore[misc]
    """Regression with exact Bayesian last layers, as a river regressor.

    An unfitted regressor is fitted to the first `warm_up` rows, and predicts the mean of the targets until then. Later
    rows update the last layers alone. A missing or new feature is an error: select and impute in a pipeline before.

    Parameters
    ----------
    model : BLLRegressor or OnlineModel, default BLLRegressor(preset="fast", random_state=0)
        The model to fit by `partial_fit` or to update. A fitted one is copied and updated from there.
    memory : Memory, default KeepAll()
        What happens to old rows, as in `OnlineModel`; not allowed with an `OnlineModel`, which has its own.
    warm_up : int, default 200
        Number of rows that an unfitted regressor is fitted to.
    feature_names : sequence of str, default None
        Columns that a fitted model was fitted to, in order. None: the names in the model, or those of the first row.
    confidence_level : float, default 0.95
        Probability of the interval that `predict_one(x, with_interval=True)` returns.
    monitor : DriftMonitor, default None
        Monitor of the standardised residuals once the model is fitted; `drift` is its state.
    """

    def __init__(
        self,
        model: BLLRegressor | OnlineModel | None = None,
        memory: Memory | None = None,
        warm_up: int = 200,
        feature_names: tuple[str, ...] | list[str] | None = None,
        confidence_level: float = 0.95,
        monitor: DriftMonitor | None = None,
    ) -> None:
        if not warm_up >= 2:
            raise InputError(f"warm_up={warm_up} must be a number of rows, 2 or more, such as 200")
        if not 0 < confidence_level < 1:
            raise InputError(f"confidence_level={confidence_level} must lie strictly between 0 and 1, such as 0.95")
        self.model, self.memory, self.warm_up, self.monitor = model, memory, warm_up, monitor
        self.feature_names, self.confidence_level = feature_names, confidence_level
        self.online: OnlineModel | None = None
        """The fitted online model; None before it is fitted. Use it to save, or for any other prediction."""
        self._names = None if feature_names is None else tuple(feature_names)
        self._rows: list[list[float]] = []
        self._targets: list[float] = []
        if isinstance(model, OnlineModel):
            if memory is not None or monitor is not None:
                raise InputError("an OnlineModel has its own memory and monitor: pass both when you create it")
            self._go_on(copy.deepcopy(model))
        elif model is not None and hasattr(model, "fitted_"):
            self._go_on(OnlineModel(model, memory, monitor=copy.deepcopy(monitor)))

    def learn_one(self, x: dict[Any, Any], y: float) -> None:
        """Learn from one row.

        Parameters
        ----------
        x, y : dict, float
            Features by name, and the target.
        """
        row = self._row(x)
        if self.online is not None:
            self.online.update(row, np.array([y], dtype=float))
            return
        if not math.isfinite(y):
            raise InputError(f"the target is {y}: drop rows whose target is not known")
        self._names = self._names or _ordered(x)
        self._rows.append(row[0].tolist())
        self._targets.append(float(y))
        if len(self._rows) == self.warm_up:
            self._fit()

    def predict_one(self, x: dict[Any, Any], *, with_dist: bool = False, with_interval: bool = False) -> Any:
        """Predict the target of one row.

        Parameters
        ----------
        x : dict
            Features by name.
        with_dist, with_interval : bool, default False
            Whether to return `river.proba.Gaussian`, noise included, or a `river.conf.Interval` at `confidence_level`.
        """
        if with_dist and with_interval:
            raise InputError("with_dist and with_interval cannot be combined: set one of them")
        row = self._row(x)
        if with_interval and self.online is not None:
            lower, upper = self.online.predictive(row).interval(self.confidence_level)
            return conf.Interval(lower.item(), upper.item())
        if self.online is not None:
            mean, std = (value.item() for value in self.online.predict(row, return_std=True))
        else:
            targets = self._targets or [0.0]
            mean, std = float(np.mean(targets)), float(np.std(targets))
        if with_interval:
            half = float(ndtri(0.5 + 0.5 * self.confidence_level)) * std
            return conf.Interval(mean - half, mean + half)
        return _gaussian(mean, std) if with_dist else mean

    @property
    def drift(self) -> Any:
        """State of the monitor since the model was fitted."""
        if self.online is None:
            raise InputError(f"nothing was monitored yet: {len(self._rows)} of {self.warm_up} rows to fit to so far")
        return self.online.drift

    @classmethod
    def _unit_test_params(cls) -> Iterator[dict[str, Any]]:
        yield {"model": BLLRegressor((4,), preset="evidence", max_epochs=5, random_state=0), "warm_up": 30}

    def _unit_test_skips(self) -> set[str]:
        """Checks with features that appear or disappear: these are refused, because networks have no input for them."""
        return {"check_emerging_features", "check_disappearing_features", "check_radically_disappearing_features"}

    def _fit(self) -> None:
        model = BLLRegressor(preset="fast", random_state=0) if self.model is None else copy.deepcopy(self.model)
        assert isinstance(model, BLLRegressor)  # a running model has started already
        rows = np.array(self._rows), np.array(self._targets)
        start = rows if isinstance(self.memory, SlidingWindow) else None
        self._go_on(
            OnlineModel(model.partial_fit(*rows), self.memory, start=start, monitor=copy.deepcopy(self.monitor))
        )
        self._rows, self._targets = [], []

    def _go_on(self, online: OnlineModel) -> None:
        fitted = online.fitted_
        if fitted.n_outputs != 1:
            raise InputError(
                f"the model has {fitted.n_outputs} outputs, and a river regressor has one: fit one for each"
            )
        self._names = self._names or fitted.feature_names
        if self._names is None:
            raise InputError(
                "the model was fitted to unnamed columns: give feature_names=[...] in the order of its columns"
            )
        if len(self._names) != fitted.n_features_in:
            raise InputError(f"{len(self._names)} feature_names for a model of {fitted.n_features_in} columns")
        self.online = online

    def _row(self, x: dict[Any, Any]) -> ndarray:
        names = self._names or _ordered(x)
        try:
            row = np.array([[x[name] for name in names]], dtype=float)
        except KeyError:
            missing = [name for name in names if name not in x]
            raise InputError(
                f"features {missing} are missing: every row needs {list(names)}; impute them before this model"
            ) from None
        if len(x) != len(names):
            more = [name for name in x if name not in names]
            raise InputError(f"features {more} are new: the model knows {list(names)}; select these before this model")
        if not np.isfinite(row).all():
            bad = [name for name, value in zip(names, row[0], strict=True) if not math.isfinite(value)]
            raise InputError(f"features {bad} are not finite: impute them before this model")
        return row


def _ordered(x: dict[Any, Any]) -> tuple[Any, ...]:
    """Names of the columns, in an order that does not depend on that of the first row."""
    return tuple(sorted(x, key=str))


def _gaussian(mean: float, std: float) -> Any:
    """A `river.proba.Gaussian` with this mean and standard deviation, made by updating it with two samples."""
    gaussian, apart = proba.Gaussian(), std * 0.5**0.5
    for sample in (mean - apart, mean + apart):
        gaussian.update(sample)
    return gaussian
