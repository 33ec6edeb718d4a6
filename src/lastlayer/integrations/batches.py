"""A saved model as a function of batches, for engines that send batches to workers, such as Ray Data and Spark."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lastlayer._internal import files
from lastlayer.errors import InputError
from lastlayer.estimators.regressor import BLLRegressor, load
from lastlayer.predictions.prediction import Prediction
from lastlayer.tables.columns import finite_numbers
from lastlayer.tables.files import Table
from lastlayer.tables.frames import column_cells
from lastlayer.tables.model import TableModel, prediction_cells

ADVICE = "fix or drop these rows before predicting"


@dataclass(frozen=True)
class BatchPredictor:
    """Predict batches of rows with a model that each worker process loads once, with its first batch.

    A batch is a dictionary of arrays or a pandas DataFrame. The result is of the same kind, with the rows in the same
    order and, for a DataFrame, with the same index. Its columns are those of `id_columns`, then NAME_mean, NAME_std,
    NAME_lower and NAME_upper for each target, then affine_cost. Only the path is sent to workers, not the model; a file
    that has been replaced is loaded again.

    Parameters
    ----------
    path : str or path
        File written by `model.save` or `lastlayer fit`; every worker must be able to read it at this path.
    columns : sequence of str, default None
        Input columns, in the order in which the model was fitted to them. None: the names stored in the model, if it
        was fitted to a table or a DataFrame.
    id_columns : sequence of str, default ()
        Columns to pass on unchanged.
    targets : sequence of str, default None
        Names of the targets; None: as in the model's table, or if it has none, "y", or "y0", "y1" and so on.
    level : float, default 0.95
        Probability of the intervals.
    unknown : {"error", "warn"}, default "error"
        For models of tables: whether a category that no training row had is an error, or is predicted, with a warning,
        as none of the known ones.

    Examples
    --------
    >>> predict = BatchPredictor("model.lastlayer", columns=["flow", "speed"], id_columns=["id"])
    >>> rows.map_batches(predict)  # a Ray dataset  # doctest: +SKIP
    >>> rows.mapInPandas(lambda frames: map(predict, frames), schema)  # a Spark DataFrame  # doctest: +SKIP
    """

    path: str | os.PathLike[str]
    columns: Sequence[str] | None = None
    id_columns: Sequence[str] = ()
    targets: Sequence[str] | None = None
    level: float = 0.95
    unknown: str = "error"

    def __post_init__(self) -> None:
        for name in ("columns", "id_columns", "targets"):
            if isinstance(given := getattr(self, name), str):
                raise InputError(f"{name}={given!r} must be a list of column names: {name}=[{given!r}]")
        if not 0 < self.level < 1:
            raise InputError(f"level={self.level} must lie strictly between 0 and 1, such as 0.95")

    def __call__(self, batch: Any) -> Any:
        """Return the id columns and the predictions of a batch, as a dictionary or a DataFrame like the batch."""
        model = self.model()
        names, targets = self._inputs(model), self._targets(model)
        outputs = _output_columns(targets)
        if missing := [name for name in (*names, *self.id_columns) if name not in batch]:
            raise InputError(f"the batch has no columns {missing}; it has {list(batch)}")
        if clash := sorted({*self.id_columns} & {*outputs}):
            raise InputError(f"id_columns has {clash[0]!r}, which is the name of a prediction: rename that column")
        table = Table({name: column_cells(batch[name], name) for name in names})
        predicted = dict.fromkeys(outputs, np.empty(0))
        if len(table):
            p = self._predictive(model, table)
            predicted = prediction_cells(p, targets, self.level) | {"affine_cost": p.affine_cost}
        if isinstance(batch, Mapping):
            return {name: batch[name] for name in self.id_columns} | predicted
        return batch[list(self.id_columns)].assign(**predicted)

    @property
    def output_columns(self) -> list[str]:
        """Names of the columns that follow those of `id_columns`, all of type float64; this loads the model."""
        return _output_columns(self._targets(self.model()))

    def model(self) -> TableModel | BLLRegressor:
        """Load the model, or return the one that this process has loaded already."""
        path = Path(self.path)
        version = (path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else None
        return load_once(str(path), version)

    def _inputs(self, model: TableModel | BLLRegressor) -> list[str]:
        if isinstance(model, TableModel):
            if self.columns is not None:
                raise InputError(
                    f"columns={list(self.columns)} was given, but {self.path} is the model of a table, which knows its "
                    "columns: omit columns=..."
                )
            return [column.name for column in model.schema.columns]
        names = getattr(model, "feature_names_in_", None) if self.columns is None else self.columns
        if names is None:
            raise InputError(f"{self.path} does not store the names of its inputs: give columns=[...]")
        if len(names) != model.n_features_in_:
            raise InputError(f"columns={list(names)} are {len(names)}, but the model has {model.n_features_in_} inputs")
        return list(names)

    def _targets(self, model: TableModel | BLLRegressor) -> list[str]:
        regressor = model.model if isinstance(model, TableModel) else model
        q = regressor.fitted_.n_outputs
        known = (
            model.schema.targets if isinstance(model, TableModel) else [f"y{i}" for i in range(q)] if q > 1 else ["y"]
        )
        targets = list(known if self.targets is None else self.targets)
        if len(targets) != q:
            raise InputError(f"targets={targets} are {len(targets)}, but the model has {q}")
        return targets

    def _predictive(self, model: TableModel | BLLRegressor, table: Table) -> Prediction:
        if isinstance(model, TableModel):
            return model.predictive(table, unknown=self.unknown)[1]
        X = np.column_stack([finite_numbers(name, table, advice=ADVICE) for name in table.columns])
        return model.fitted_.predictive(X)


@lru_cache(maxsize=4)
def load_once(path: str, version: tuple[int, int] | None) -> TableModel | BLLRegressor:
    """Load a model file, unless this version of it is still in memory."""
    return TableModel.load(path) if "table" in files.read(path)[1] else load(path)


def _output_columns(targets: Sequence[str]) -> list[str]:
    return [*(f"{name}_{word}" for name in targets for word in ("mean", "std", "lower", "upper")), "affine_cost"]
