"""`TableRegressor`: a `BLLRegressor` of DataFrames, which reads their columns as the command line does."""

import inspect
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy import ndarray
from torch import Tensor, nn

from lastlayer import files
from lastlayer.errors import InputError, check_choice
from lastlayer.estimators import regressor
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.observe import Observations
from lastlayer.sources import Source
from lastlayer.tables.facts import Scores, score
from lastlayer.tables.files import Table
from lastlayer.tables.frames import as_table, column_cells, is_table
from lastlayer.tables.model import TableModel
from lastlayer.tables.schema import IMPUTE, UNKNOWN, Reading, Schema


class TableRegressor(BLLRegressor):
    """A `BLLRegressor` that is fitted to a DataFrame as it is, with texts, dates, units and missing values.

    Columns become inputs as on the command line: numbers as they are, each text a 0/1 input, dates as days and
    calendar parts; what was learned of the columns is used in the same way ever after, and is saved with the model.
    Every method takes DataFrames of pandas or polars, or dictionaries of columns. A plain array is taken as inputs that
    are encoded already, in the order of `input_names_`.

    Parameters
    ----------
    hidden : as in `BLLRegressor`
    drop : sequence of str, default ()
        Columns to leave out.
    keep : sequence of str, default ()
        Columns that are inputs even if they look like labels of the rows: texts that all differ, or consecutive whole
        numbers named id, index or the like, which are left out otherwise.
    text : sequence of str, default ()
        Columns of numbers that are codes, to be taken as text.
    impute : None or "median", default None
        What missing inputs are filled by: numbers and dates by the median, texts by the most frequent. None: they are
        an error.
    decimal : "auto", "." or ",", default "auto"
        Decimal sign of numbers that are text.
    date_order : "auto", "dmy" or "mdy", default "auto"
        Of dates that are text, if the year comes last.
    unknown : "error" or "warn", default "error"
        A text that no training row had: an error, or predicted as none of the known.
    **parameters
        Those of `BLLRegressor`.

    Attributes
    ----------
    schema_ : Schema
        What was learned of the columns.
    notes_ : list of str
        What was done to columns, in words, and which were left out.
    input_names_ : list of str
        Names of the model's inputs.

    Examples
    --------
    >>> import pandas as pd
    >>> from lastlayer import TableRegressor
    >>> frame = pd.read_csv("examples/pump.csv")  # doctest: +SKIP
    >>> model = TableRegressor(random_state=0).fit(frame, target=["head_m", "power_kw"])  # doctest: +SKIP
    >>> mean, std = model.predict(frame, return_std=True)  # doctest: +SKIP
    """

    schema_: Schema
    card_: dict[str, Any]

    def __init__(
        self,
        hidden: Sequence[int] | str = "auto",
        *,
        drop: Collection[str] = (),
        keep: Collection[str] = (),
        text: Collection[str] = (),
        impute: str | None = None,
        decimal: str = "auto",
        date_order: str = "auto",
        unknown: str = "error",
        **parameters: Any,
    ) -> None:
        super().__init__(hidden, **parameters)
        self.drop = drop
        self.keep = keep
        self.text = text
        self.impute = impute
        self.decimal = decimal
        self.date_order = date_order
        self.unknown = unknown

    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        validation_data: tuple[Any, Any] | None = None,
        groups: Any = None,
        *,
        target: str | Sequence[str] | None = None,
        noise_std: Any = None,
        observations: Sequence[Observations] = (),
        progress: bool | None = None,
    ) -> "TableRegressor":
        """Learn the columns, then fit as `BLLRegressor` does.

        Parameters
        ----------
        X : DataFrame of pandas or polars, or dictionary of columns
        y : array, Series or DataFrame, optional
            The targets, if they are not columns of X. Of a single target, predictions have one dimension.
        sample_weight, noise_std, observations, progress : as in `BLLRegressor.fit`
            Observations speak of the encoded inputs.
        validation_data : (X_val, y_val), optional
            As in `BLLRegressor.fit`; y_val is None if X_val has the target columns.
        groups : str or array, optional
            Which rows belong together: the name of a column, which is no input then, or a label for each row.
        target : str or sequence of str, optional
            Names of the target columns of X.

        Returns
        -------
        TableRegressor
            Itself.

        Raises
        ------
        InputError
            If columns cannot be used; all problems of the table are in one message.
        """
        check_choice("unknown", self.unknown, UNKNOWN)
        if self.impute is not None:
            check_choice("impute", self.impute, IMPUTE)
        self._forget()
        names, table = _targets(as_table(X), y, target)
        by_column = isinstance(groups, str)
        drop = {*self.drop, groups} if by_column else {*self.drop}
        reading = Reading(drop, self.keep, self.text, self.impute is not None, self.decimal, self.date_order)
        schema = Schema.infer(table, names, reading)
        given = {"sample_weight": sample_weight, "noise_std": noise_std, "observations": observations}
        if validation_data is not None:
            given["validation_data"] = _rows(schema, *validation_data)
        if groups is not None and not by_column:
            given["groups"] = groups
        parameters = self._parameters() | ({} if progress is None else {"progress": progress})
        self._adopt(TableModel.of(schema, table, groups=groups if by_column else None, given=given, **parameters))
        return self

    def evaluate(self, X: Any, y: Any = None) -> Scores:
        """Scores of the predictions of rows that have the true values too; best of rows the model has not seen.

        Parameters
        ----------
        X : DataFrame, or dictionary of columns
        y : array, Series or DataFrame, optional
            The targets, if they are not columns of X.

        Returns
        -------
        Scores
            Of each target RMSE, R2, LPD, CRPS, coverage and width of intervals; the joint LPD and calibration error.
        """
        schema, table = self._schema(), self._with_targets(X, y)
        return score(self.predictive(table), schema.targets_of(table), schema.targets)

    def update(self, X: Any, y: Any = None, sample_weight: Any = None, *, forgetting: float = 1.0) -> "TableRegressor":
        """Add rows in closed form, see `BLLRegressor.update`; the ranges of the columns are widened by theirs."""
        super().update(X, y, sample_weight, forgetting=forgetting)
        if is_table(X):
            grown = TableModel(self.schema_, self, self.card_).grown(as_table(X))
            self.schema_, self.card_ = grown.schema, grown.card
        return self

    def fit_source(
        self, source: Source, validation_data: tuple[Any, Any] | None = None, *, progress: bool | None = None
    ) -> BLLRegressor:
        """Refused: a source gives numbers, and has no columns to learn."""
        raise InputError("a source of batches gives numbers, not a table with columns: take BLLRegressor.fit_source")

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a model file holds; the same as of a model that the command line made."""
        tensors, header = super().packed()
        table = {"table": self._schema().as_json(), "card": self.card_}
        return tensors, header | {"model": BLLRegressor.__name__} | table

    @classmethod
    def of(cls, made: TableModel) -> "TableRegressor":
        """The model of the command line as an estimator."""
        model = cls(impute=IMPUTE[0] if made.schema.impute else None, **made.model.get_params(deep=False))
        model._adopt(made)
        return model

    @property
    def notes_(self) -> list[str]:
        """What was done to columns, in words, and which were left out."""
        return self._schema().notes

    @property
    def input_names_(self) -> list[str]:
        """Names of the model's inputs."""
        return self._schema().features

    def _adopt(self, made: TableModel) -> None:
        own = {name: value for name, value in vars(made.model).items() if name not in BLLRegressor._get_param_names()}
        vars(self).update(own, schema_=made.schema, card_=made.card)

    def _schema(self) -> Schema:
        self._fitted()
        return self.schema_

    def _with_targets(self, X: Any, y: Any) -> Table:
        return as_table(X) if y is None else _targets(as_table(X), y, self._schema().targets)[1]

    def _checked(self, X: Any) -> ndarray:
        return self._schema().encode(as_table(X), unknown=self.unknown).X if is_table(X) else super()._checked(X)

    def _checked_rows(self, X: Any, y: Any, *, partly: bool = False) -> tuple[ndarray, ndarray]:
        if not is_table(X):
            return super()._checked_rows(X, y, partly=partly)
        return _rows(self._schema(), self._with_targets(X, y), None, partly=partly)


def load(path: str | os.PathLike[str], *, backbone: nn.Module | None = None) -> BLLRegressor:
    """Load a model that `save` or `lastlayer fit` wrote.

    Parameters
    ----------
    path : str or path
    backbone : torch.nn.Module, optional
        A module of the same kind, if the model had one of yours.

    Returns
    -------
    BLLRegressor
        Of a model of a table, a `TableRegressor`, which takes DataFrames.

    Raises
    ------
    ModelFileError
        If the file is damaged, or holds something else.
    """
    if "table" in files.read(path)[1]:
        return TableRegressor.of(TableModel.load(path))
    return regressor.load(path, backbone=backbone)


def _targets(table: Table, y: Any, target: str | Sequence[str] | None) -> tuple[list[str], Table]:
    """Names of the targets, and the table with them in it."""
    if y is None:
        if target is None:
            raise InputError('say which columns are to be predicted, fit(frame, target="y"), or give them, fit(X, y)')
        return [target] if isinstance(target, str) else list(target), table
    asked = None if target is None else [target] if isinstance(target, str) else list(target)
    if is_table(y):
        given = as_table(y).columns
    else:
        values = np.asarray(y)
        name = getattr(y, "name", None) or "y"
        columns = [y] if values.ndim < 2 else list(values.T)
        names = [str(name)] if len(columns) == 1 else [f"{name}{i + 1}" for i in range(len(columns))]
        given = {key: column_cells(column, key) for key, column in zip(names, columns, strict=True)}
    cells = list(given.values())
    if asked is not None and len(asked) != len(cells):
        raise InputError(f"y has {len(cells)} columns, and the targets are {', '.join(asked)}")
    names = list(given) if asked is None else asked
    if asked is None and (clash := sorted(given.keys() & table.columns.keys())):
        raise InputError(f"X has a column {clash[0]!r} as y has: take it out of X, or give target={clash[0]!r} alone")
    if len(cells[0]) != len(table):
        raise InputError(f"X has {len(table)} rows and y {len(cells[0])}: give as many")
    return names, replace(table, columns=table.columns | dict(zip(names, cells, strict=True)))


def _rows(schema: Schema, X: Any, y: Any, *, partly: bool = True) -> tuple[ndarray, ndarray]:
    """Encoded inputs and targets of a table."""
    table = as_table(X) if y is None else _targets(as_table(X), y, schema.targets)[1]
    T = schema.targets_of(table, partly=partly)
    return schema.encode(table).X, T[:, 0] if T.shape[1] == 1 else T


def _signature() -> inspect.Signature:
    """Of the constructor, with the parameters of `BLLRegressor` by name, as scikit-learn wants them."""
    own, of_all = (inspect.signature(kind.__init__).parameters for kind in (TableRegressor, BLLRegressor))
    named = [p for p in own.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    return inspect.Signature([*named, *(p for name, p in of_all.items() if name not in own)], return_annotation=None)


TableRegressor.__init__.__signature__ = _signature()  # type: ignore[attr-defined]
