"""Validation of users' arrays; errors name the rows at fault."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, validate_data

from lastlayer._internal.arrays import as_array, check_finite, contiguous
from lastlayer.data.observe import check_observations
from lastlayer.data.scaling import LARGEST_TARGET
from lastlayer.errors import InputError, InputTypeError
from lastlayer.settings.types import Given

FLOATS = {"dtype": [np.float64, np.float32], "ensure_all_finite": False}
IDS = {"dtype": [np.int64], "ensure_all_finite": False}
"""Arguments of scikit-learn's validation for floats and for ids; finiteness is checked here, with the rows named."""
LARGEST_INPUT = 1e300
"""Magnitude up to which differences of inputs do not overflow in float64."""
LARGEST_WEIGHT = 2.0**53
"""Counts up to this are exact in float64."""


def random_numbers(random_state: Any) -> np.random.RandomState:
    return check_random_state(int(np.random.default_rng().integers(2**32)) if random_state is None else random_state)


def seed_of(random_state: Any) -> int:
    return int(random_numbers(random_state).randint(2**31 - 1))


def validated(
    estimator: BaseEstimator,
    X: Any,
    y: Any,
    sample_weight: Any = None,
    *,
    groups: Any = None,
    noise_std: Any = None,
    observations: Any = (),
    nd: bool = False,
    partly: bool = False,
) -> Given:
    """Validate training rows; `nd`: inputs need not be a table; `partly`: some targets may be missing."""
    X, y = check_Xy(estimator, X, y, reset=True, nd=nd, partly=partly, ids=nd)
    if len(X) < 2:
        raise InputError(f"fit needs at least 2 samples, and n_samples = {len(X)} was given")
    T = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
    return Given(
        X,
        T,
        None if sample_weight is None else check_weight(sample_weight, len(X)),
        None if groups is None else check_groups(groups, len(X)),
        None if noise_std is None else check_noise_std(noise_std, T),
        check_observations(observations) if observations else (),
        y_ndim=y.ndim,
        is_table=X.ndim == 2 and X.dtype.kind == "f",
    )


def check_X(estimator: BaseEstimator, X: Any, *, reset: bool, nd: bool, ids: bool = False) -> ndarray:
    """Return the inputs as a finite float array with the columns of `fit`: a table, or with `nd` more dimensions."""
    with _refusing():
        words = _kept(X, reset=reset) if ids else FLOATS
        checked: ndarray = validate_data(estimator, as_array(X), reset=reset, allow_nd=nd, **words)
    check_finite(checked, "X", largest=LARGEST_INPUT)
    return checked


def check_Xy(
    estimator: BaseEstimator, X: Any, y: Any, *, reset: bool, nd: bool, partly: bool = False, ids: bool = False
) -> tuple[ndarray, ndarray]:
    """Return inputs and targets of equal length, both finite; targets are 1-D or 2-D as given."""
    given = np.asarray(y := as_array(y))
    missing = None
    if given.ndim and given.dtype.kind == "f":
        if partly and given.ndim == 2 and given.shape[1] > 1 and np.isnan(given).any():
            missing = np.isnan(given)
            if (empty := np.flatnonzero(missing.all(1))).size:
                raise InputError(
                    f"all targets are missing in {len(empty)} rows (first: row {empty[0]}): drop these rows, and keep "
                    "those of which at least one target is known"
                )
            y = np.where(missing, 0.0, given)
        check_finite(np.asarray(y), "y")  # before scikit-learn, which names no rows
    words = {"multi_output": True, "y_numeric": True, **(_kept(X, reset=reset) if ids else FLOATS)}
    with _refusing():
        checked, targets = validate_data(estimator, as_array(X), y, reset=reset, allow_nd=nd, **words)
        targets = np.asarray(targets, dtype=np.float64)
    check_finite(checked, "X", largest=LARGEST_INPUT)
    check_finite(targets, "y", largest=LARGEST_TARGET)
    return contiguous(checked), contiguous(targets) if missing is None else np.where(missing, np.nan, targets)


def _kept(X: Any, *, reset: bool) -> dict[str, Any]:
    """Arguments of scikit-learn's validation for inputs that may be ids."""
    given = np.asarray(as_array(X)).dtype
    if given.kind not in "iu" and not reset:
        raise InputError(
            f"the model was fitted to integers, such as ids, and X has values of type {given}: give integers"
        )
    return IDS if given.kind in "iu" else FLOATS


def check_weight(sample_weight: Any, n_rows: int) -> ndarray:
    rows, words = np.empty((n_rows, 1)), {"dtype": np.float64, "ensure_non_negative": True}
    with _refusing():
        weight: ndarray = _check_sample_weight(as_array(sample_weight), rows, **words)
    if not weight.sum() > 0:
        raise InputError("sample_weight is zero everywhere: at least two samples need a positive weight")
    if weight.max() > LARGEST_WEIGHT:
        raise InputError(
            f"sample_weight is {weight.max():g} in row {weight.argmax()}: weights count copies of a row, up to 2**53; "
            "divide them all by the same number"
        )
    return contiguous(weight)


def check_groups(groups: Any, n_rows: int) -> Int[ndarray, " m"]:
    labels = np.asarray(as_array(groups))
    if labels.shape != (n_rows,):
        raise InputError(f"groups has shape {labels.shape}: give one label for each of the {n_rows} rows")
    if missing := int(sum(label is None or label != label for label in labels.tolist())):
        raise InputError(
            f"groups has {missing} missing labels: give every row a label, a unique one if it belongs to no group"
        )
    return np.unique(labels.astype(str) if labels.dtype == object else labels, return_inverse=True)[1]


def check_noise_std(noise_std: Any, y: ndarray) -> ndarray:
    """Return known noise standard deviations in the shape of y, from one number, one per row, or one per target."""
    with _refusing():
        std = np.asarray(as_array(noise_std), dtype=float)
    std = std[:, None] if std.ndim == 1 and len(std) == len(y) else std
    if std.ndim and std.shape not in ((len(y), 1), y.shape):
        raise InputError(
            f"noise_std has shape {std.shape}: give a number, one for each row, or the shape {y.shape} of y"
        )
    if not (np.isfinite(std) & (std >= 0)).all():
        raise InputError(f"noise_std must be finite and not negative, and the smallest given is {std.min():g}")
    if std.max() > LARGEST_TARGET:
        raise InputError(f"noise_std is {std.max():g}, beyond {LARGEST_TARGET:g}: give y and noise_std in another unit")
    return np.array(np.broadcast_to(std, y.shape))


@contextmanager
def _refusing() -> Iterator[None]:
    """Context that turns errors of scikit-learn and NumPy into `InputError`; those of types remain a TypeError too."""
    try:
        yield
    except InputError:
        raise
    except TypeError as error:
        raise InputTypeError(str(error)) from error
    except (ValueError, OverflowError) as error:
        raise InputError(str(error)) from error
