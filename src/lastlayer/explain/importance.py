"""Permutation importance: the loss of accuracy when the values of one input are shuffled among the rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer._internal.arrays import as_array
from lastlayer.errors import InputError
from lastlayer.explain.inputs import Input, inputs_of, predictor_of, table_of
from lastlayer.predictions.prediction import Prediction


@dataclass(frozen=True)
class Importance:
    """Loss of accuracy for each target without one input.

    Parameters
    ----------
    name : str
        Name of the input.
    rmse, rmse_std : array of shape (q,)
        RMSE after shuffling minus RMSE before, in the units of the target: mean and standard deviation over shuffles.
    lpd : array of shape (q,)
        Mean log predictive density before shuffling minus after, in nats; it judges mean and uncertainty together.
    """

    name: str
    rmse: Float[ndarray, " q"]
    rmse_std: Float[ndarray, " q"]
    lpd: Float[ndarray, " q"]


def permutation_importance(
    model: Any, X: Any, y: Any, *, inputs: Sequence[Input] | None = None, n_repeats: int = 5, random_state: int = 0
) -> list[Importance]:
    """Measure how much worse predictions become when the values of one input are shuffled among the rows.

    Use rows that the model has not seen, or the held-out rows of its fit: pass `model.held_out_` as the model and the
    rows `model.held_out_.rows` of the training table. Correlated inputs share their importance: each of them may look
    unimportant, since the others carry the same information.

    Parameters
    ----------
    model : fitted regressor, or its `held_out_`
        Anything with a method `predictive`.
    X, y : array of shape (m, d), array of shape (m,) or (m, q)
        Inputs, in the format of the training inputs, and true values; NaN where a value is missing.
    inputs : sequence of Input, optional
        Which columns of X belong together; by default, each column is an input.
    n_repeats : int, default 5
        Number of shuffles of each input; the result is their mean.
    random_state : int, default 0
        Seed of the shuffles.

    Examples
    --------
    >>> import numpy as np
    >>> from lastlayer import BLLRegressor
    >>> X = np.random.default_rng(0).uniform(-1, 1, (80, 2))
    >>> model = BLLRegressor(preset="fast", max_epochs=20, random_state=0).fit(X, X[:, 0])
    >>> first, second = permutation_importance(model.held_out_, X, X[:, 0])
    >>> bool(first.rmse > 10 * abs(second.rmse))
    True
    """
    table, targets = table_of(X), np.asarray(as_array(y), dtype=float)
    if len(targets) != len(table) or len(table) < 2 or n_repeats < 1:
        raise InputError(
            f"X has {len(table)} rows, y has {len(targets)}, and n_repeats={n_repeats}: importance needs the true "
            "value of every row, at least two rows, and at least one repeat"
        )
    targets = targets.reshape(len(targets), -1)
    predictive, rng = predictor_of(model), np.random.default_rng(random_state)
    rmse, lpd = _scores(predictive(table), targets)
    found = []
    for one in inputs_of(model, X, inputs):
        worse = []
        for _ in range(n_repeats):
            shuffled = table.copy()
            shuffled[:, one.columns] = table[rng.permutation(len(table))][:, one.columns]
            worse.append(_scores(predictive(shuffled), targets))
        rmses, lpds = (np.stack(each) for each in zip(*worse, strict=True))
        found.append(Importance(one.name, rmses.mean(0) - rmse, rmses.std(0), lpd - lpds.mean(0)))
    return found


def _scores(p: Prediction, y: Float[ndarray, "m q"]) -> tuple[Float[ndarray, " q"], Float[ndarray, " q"]]:
    """RMSE and LPD of each target, over the rows where it is known."""
    point = p.point.reshape(y.shape)
    density = p.log_prob(np.where(np.isnan(y), point, y), per_output=True).reshape(y.shape)
    return np.sqrt(np.nanmean(np.square(y - point), 0)), np.nanmean(np.where(np.isnan(y), np.nan, density), 0)
