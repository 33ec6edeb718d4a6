"""A saved model as a function of batches, for engines that send batches to workers, such as Ray Data and Spark."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lastlayer.errors import InputError
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.predictions.prediction import Prediction
from lastlayer.tables.columns import finite_numbers
from lastlayer.tables.files import Table
from lastlayer.tables.forecast import prediction_cells
from lastlayer.tables.frames import column_cells
from lastlayer.tables.regressor import TableRegressor, load

ADVICE = "fix or drop these rows before predicting"


@dataclass(frozen=True)
class BatchPredictor:
    """Predict batches of rows with a model that each worker process loads once, with its first batch.

    A batch is a dictionary of arrays or a pandas DataFrame with the columns that the model was fitted to, in any order,
    and others. Added are the columns NAME_mean, NAME_std, NAME_lower and NAME_upper of each target and affine_cost.
    Workers receive the path alone, and load a file again that has been replaced.
    """

    path: str | os.PathLike[str]
    """File written by `lastlayer fit`, or by `save` of a model that was fitted to a DataFrame or a `ParquetSource`."""
    level: float = 0.95
    """Probability of the intervals."""
    unknown: str = "error"
    """Whether a category that no training row had is an "error", or predicted as none of the known ones ("warn")."""

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise InputError(f"level={self.level} must lie strictly between 0 and 1, such as 0.95")

    def __call__(self, batch: Any) -> Any:
        """Return the batch with its predictions, as a dictionary or a DataFrame like the batch."""
        names, outputs = self.input_columns, self.output_columns
        if missing := [name for name in names if name not in batch]:
            raise InputError(f"the batch has no columns {missing}; it has {list(batch)}")
        if clash := [name for name in outputs if name in batch]:
            raise InputError(f"the batch has a column {clash[0]!r}, which is the name of a prediction: rename it")
        table = Table({name: column_cells(batch[name], name) for name in names})
        predicted = dict.fromkeys(outputs, np.empty(0))
        if len(table):
            p = self._predictive(self.model(), table)
            predicted = prediction_cells(p, self._targets, self.level) | {"affine_cost": p.affine_cost}
        return {**batch, **predicted} if isinstance(batch, Mapping) else batch.assign(**predicted)

    @property
    def input_columns(self) -> list[str]:
        """Names of the columns that a batch must have; this loads the model."""
        model = self.model()
        if isinstance(model, TableRegressor):
            return [column.name for column in model.schema_.columns]
        if (names := model.fitted_.feature_names) is None:
            raise InputError(f"{self.path} does not store the names of its inputs: fit the model to a DataFrame")
        return list(names)

    @property
    def output_columns(self) -> list[str]:
        """Names of the columns that are added, all of type float64; this loads the model."""
        words = (self.model().fitted_.likelihood.point_name, "std", "lower", "upper")
        return [*(f"{name}_{word}" for name in self._targets for word in words), "affine_cost"]

    def model(self) -> BLLRegressor:
        """Load the model, or return the one that this process has loaded already."""
        path = Path(self.path)
        version = (path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else None
        return load_once(str(path), version)

    @property
    def _targets(self) -> list[str]:
        model = self.model()
        if isinstance(model, TableRegressor):
            return list(model.schema_.targets)
        return ["y"] if (q := model.fitted_.n_outputs) == 1 else [f"y{i}" for i in range(q)]

    def _predictive(self, model: BLLRegressor, table: Table) -> Prediction:
        if isinstance(model, TableRegressor):
            return model.predictive(model.schema_.encode(table, unknown=self.unknown).X)
        X = np.column_stack([finite_numbers(name, table, advice=ADVICE) for name in table.columns])
        return model.fitted_.predictive(X)


@lru_cache(maxsize=4)
def load_once(path: str, version: tuple[int, int] | None) -> BLLRegressor:
    """Load a model file, unless this version of it is still in memory."""
    return load(path)
