"""What every estimator of ours does alike: checks, scaling to standardised units and back, shapes, prediction."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from lastlayer.errors import InputError
from lastlayer.inputs import check_weight, check_X, check_Xy
from lastlayer.prediction import Prediction
from lastlayer.scaling import Standardizer
from lastlayer.statistics import CHUNK_ROWS
from lastlayer.training import Data

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Shell(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Base of the estimators; a subclass has `device`, `dtype` and `random_state`, and says how to fit and predict."""

    n_features_in_: int
    feature_names_in_: ndarray
    device: str
    dtype: str
    random_state: Any

    def predictive(self, X: Any, *, noise: bool = True) -> Prediction:
        """The predictive distribution of the targets, or with `noise=False` of the function behind them."""
        raise NotImplementedError

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Mean of the targets, shaped like y in fit, and with `return_std` their standard deviation, noise included."""
        p = self.predictive(X)
        return (self._shaped(p.mean), self._shaped(p.std)) if return_std else self._shaped(p.mean)

    def _begin(self, X: Any, y: Any, sample_weight: Any, *, nd: bool = False) -> tuple[Data, int]:
        """Checked and standardised training data on the device, and a seed."""
        X, y = check_Xy(self, X, y, reset=True, nd=nd)
        if len(X) < 2:
            raise InputError(f"fit needs at least 2 samples, and n_samples = {len(X)} was given")
        weight = check_weight(sample_weight, X)
        w = None if weight is None else torch.tensor(weight)
        self._y_ndim = y.ndim
        self._inputs = Standardizer.fit(torch.tensor(X), sample_weight=w) if X.ndim == 2 else None
        self._targets = Standardizer.fit(columns(y), sample_weight=w)
        device = self._device()
        T = self._targets.forward(columns(y)).to(device)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        return Data(self._standardised(X), T, None if w is None else w.to(device)), seed

    def _device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def _checked(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return self._standardised(check_X(self, X, reset=False, nd=self._inputs is None))

    def _standardised(self, X: ndarray) -> Tensor:
        Z = torch.tensor(X)
        Z = Z if self._inputs is None else self._inputs.forward(Z)
        return Z.to(device=self._device(), dtype=DTYPES[self.dtype])

    def _unscaled(self, mean: Tensor) -> ndarray:
        out: ndarray = mean.detach().cpu().numpy() * self._targets.scale.numpy() + self._targets.mean.numpy()
        return out

    def _shaped(self, values: Float[ndarray, "m q"]) -> ndarray:
        return values[:, 0] if self._y_ndim == 1 else values


def columns(y: ndarray) -> Float[Tensor, "m q"]:
    """Targets as a table."""
    T = torch.tensor(y, dtype=torch.float64)
    return T[:, None] if T.dim() == 1 else T


def chunks(m: int) -> list[slice]:
    """Rows in pieces that fit into memory with their features."""
    return [slice(start, start + CHUNK_ROWS) for start in range(0, m, CHUNK_ROWS)]


def as_covariance_parts(cov: Float[ndarray, "q q"]) -> tuple[Float[ndarray, " q"], Float[ndarray, "q q"]]:
    """Variances and correlation."""
    var = np.diagonal(cov)
    std = np.sqrt(var)  # a product of variances could underflow
    return var, cov / np.outer(std, std)
