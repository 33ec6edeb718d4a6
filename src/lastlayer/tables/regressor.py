"""`TableRegressor`: a `BLLRegressor` for DataFrames, which reads their columns as the command line does."""

import inspect
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy import ndarray
from sklearn.model_selection import GroupKFold
from torch import Tensor, nn

from lastlayer._internal import checked, files
from lastlayer._internal.arrays import check_finite
from lastlayer._internal.files import ModelFileError
from lastlayer.data.observe import Observations
from lastlayer.data.sources import Source
from lastlayer.errors import InputError, check_choice
from lastlayer.estimators import regressor
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.predictor.fitted import Fitted
from lastlayer.tables.cells import as_texts
from lastlayer.tables.files import Table
from lastlayer.tables.frames import as_table, column_cells, is_table
from lastlayer.tables.schema import IMPUTE, UNKNOWN, Schema
from lastlayer.tables.scores import Scores, score

GROUP_FOLDS = 5
CARD: dict[str, Any] = dict.fromkeys(("data", "fitted", "version"), str)
CARD |= {"rows": int, "seed": int, "interrupted": bool, "notes": list[str]}
"""Types of the entries of a card."""


class TableRegressor(BLLRegressor):
    """A `BLLRegressor` that is fitted directly to a DataFrame with text, dates, units and missing values.

    Columns are encoded as on the command line: numbers unchanged, text as one 0/1 input per distinct value, dates as
    days and calendar parts. The encoding that was learned in `fit` is used for all later tables, and is saved with the
    model. Every method takes DataFrames of pandas or polars, or dictionaries of columns. A plain array is taken as
    encoded inputs, in the order of `input_names_`.

    Parameters
    ----------
    hidden : sequence of int or "auto", default "auto"
        As in `BLLRegressor`.
    drop, keep, text : sequence of str, default ()
        Columns to ignore; columns to use even if they look like row labels (text whose values are all distinct, or
        consecutive integers named id, index or the like); and columns of codes, to be read as text.
    impute : None or "median", default None
        How to fill missing inputs. "median": numbers and dates by the median, text by the most frequent value. None:
        missing inputs are an error.
    decimal : "auto", "." or ",", default "auto"
        Decimal separator of numbers given as text.
    date_order : "auto", "dmy" or "mdy", default "auto"
        Order of day and month in dates given as text with the year last.
    unknown : "error" or "warn", default "error"
        Text that did not occur in training: "error" raises an error, "warn" predicts with all 0/1 inputs of the
        column set to 0.
    activation, input_skip, encoding, backbone, preset, n_members, calibration, hidden_prior, noise : object
        As in `BLLRegressor`.
    likelihood, max_epochs, batch_size, training, device, dtype, random_state, progress, n_jobs, verbose : object
        As in `BLLRegressor`.

    Attributes
    ----------
    schema_ : Schema
        The learned encoding of the columns.

    Examples
    --------
    >>> import numpy as np
    >>> from lastlayer import TableRegressor
    >>> rng = np.random.default_rng(0)
    >>> frame = {"fluid": ["oil", "water"] * 30, "speed": rng.uniform(1, 5, 60)}  # or a DataFrame
    >>> frame["power"] = 2 * frame["speed"] + (np.array(frame["fluid"]) == "oil") + 0.1 * rng.normal(size=60)

    >>> model = TableRegressor(preset="fast", n_members=2, max_epochs=30, random_state=0)
    >>> model = model.fit(frame, target="power")
    >>> model.input_names_
    ['fluid=oil', 'fluid=water', 'speed']
    >>> mean, std = model.predict({"fluid": ["oil", "water"], "speed": [2.0, 3.0]}, return_std=True)
    >>> mean.shape
    (2,)
    """

    schema_: Schema
    card_: dict[str, Any]
    """Facts about the fit, as plain JSON; saved with the model."""

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
        self.drop, self.keep, self.text = drop, keep, text
        self.impute, self.decimal, self.date_order, self.unknown = impute, decimal, date_order, unknown

    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        validation_data: tuple[Any, Any] | None = None,
        groups: Any = None,
        *,
        target: str | Sequence[str] | None = None,
        schema: Schema | None = None,
        noise_std: Any = None,
        observations: Sequence[Observations] = (),
    ) -> "TableRegressor":
        """Learn the encoding of the columns, then fit as `BLLRegressor` does.

        Parameters
        ----------
        X : DataFrame of pandas or polars, or dictionary of columns
            The table.
        y : array, Series or DataFrame, default None
            The targets, if they are not columns of X. For a single target, predictions have one dimension.
        sample_weight : array-like of shape (m,), default None
            As in `BLLRegressor.fit`.
        validation_data : tuple (X_val, y_val), default None
            As in `BLLRegressor.fit`; y_val is None if X_val contains the target columns.
        groups : str or array, default None
            Rows to hold out together: the name of a column, which is then not used as an input, or a label per row.
        target : str or sequence of str, default None
            Names of the target columns of X.
        schema : Schema, default None
            An encoding to use, such as `schema_` of another model, instead of one that is learned from X.
        noise_std, observations : object, optional
            As in `BLLRegressor.fit`; observations are in terms of the encoded inputs.
        """
        check_choice("unknown", self.unknown, UNKNOWN)
        self._forget()
        names, table = _targets(as_table(X), y, target if schema is None else schema.targets)
        schema = schema or Schema.infer(table, names, **self.reading(groups))
        given = {"sample_weight": sample_weight, "noise_std": noise_std, "observations": observations}
        if validation_data is not None:
            given["validation_data"] = _rows(schema, *validation_data)
        parameters = self._parameters()
        if isinstance(groups, str):
            column, groups = groups, as_texts(table.cells(groups, "--groups"))
            if (n := len(set(groups))) < 2:
                raise InputError(f"--groups {column}: all rows are in one group, but at least two groups are needed")
            parameters |= {"calibration": GroupKFold(min(GROUP_FOLDS, n))}
        inputs, targets = schema.arrays(table)
        model = BLLRegressor(**parameters).fit(inputs, targets, groups=groups, **given)
        return self._adopt(model, schema, {"rows": len(table)})

    def reading(self, groups: Any = None) -> dict[str, Any]:
        """Options of `Schema.infer`; a column of groups is not an input."""
        if self.impute is not None:
            check_choice("impute", self.impute, IMPUTE)
        drop = {*self.drop, groups} if isinstance(groups, str) else self.drop
        own = {name: getattr(self, name) for name in ("keep", "text", "decimal", "date_order")}
        return own | {"drop": drop, "impute": self.impute is not None}

    def evaluate(self, X: Any, y: Any = None, *, target: str | Sequence[str] | None = None) -> Scores:
        """Score the predictions of rows whose targets are known, preferably rows that were not used in training.

        Parameters
        ----------
        X, y, target : object
            As in `fit`; by default, the targets have the names of those in `fit`.
        """
        schema = self._schema()
        names, table = _targets(as_table(X), y, target or schema.targets)
        true = schema.targets_of(table, names)
        return score(self.predictive(table), true, schema.targets)

    def update(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        target: str | Sequence[str] | None = None,
        forgetting: float = 1.0,
    ) -> "TableRegressor":
        """Add rows in closed form, see `BLLRegressor.update`, and extend the ranges of the columns.

        Parameters
        ----------
        X, y, sample_weight, target : object
            As in `fit`; by default, the targets have the names of those in `fit`.
        forgetting : float, default 1.0
            Factor by which old rows are down-weighted first.
        """
        if not is_table(X):
            super().update(X, y, sample_weight, forgetting=forgetting)
            return self
        schema = self._schema()
        names, table = _targets(as_table(X), y, target or schema.targets)
        super().update(*schema.arrays(table, names), sample_weight, forgetting=forgetting)
        self.schema_ = schema.widened(table)
        self.card_ = self.card_ | {"rows": int(self.card_.get("rows", 0)) + len(table)}
        return self

    def fit_source(self, source: Source, validation_data: tuple[Any, Any] | None = None) -> BLLRegressor:
        """Raise an error: a source yields numbers and has no columns to encode.

        Parameters
        ----------
        source, validation_data : object
            Ignored.
        """
        raise InputError("a source of batches yields numbers, not a table with columns: use BLLRegressor.fit_source")

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, header = super().packed()
        table = {"table": self._schema().as_json(), "card": self.card_}
        return tensors, header | {"model": BLLRegressor.__name__} | table

    @property
    def notes_(self) -> list[str]:
        """How columns were encoded, and which were ignored."""
        return self._schema().notes

    @property
    def input_names_(self) -> list[str]:
        """Names of the model's inputs."""
        return self._schema().features

    def _adopt(self, model: BLLRegressor, schema: Schema, card: dict[str, Any]) -> "TableRegressor":
        own = {name: value for name, value in vars(model).items() if name not in BLLRegressor._get_param_names()}
        vars(self).update(own, schema_=schema, card_=card)
        return self

    def _schema(self) -> Schema:
        self._fitted()
        return self.schema_

    def _checked(self, X: Any) -> tuple[Fitted, ndarray]:
        return super()._checked(self._schema().encode(as_table(X), unknown=self.unknown).X if is_table(X) else X)

    def _checked_rows(
        self, X: Any, y: Any, sample_weight: Any = None, *, partly: bool = False
    ) -> tuple[ndarray, ndarray, ndarray | None]:
        X, y = _rows(self._schema(), X, y, partly=partly) if is_table(X) else (X, y)
        return super()._checked_rows(X, y, sample_weight, partly=partly)


def load(path: str | os.PathLike[str], *, backbone: nn.Module | None = None) -> BLLRegressor:
    """Load a model that `save` or `lastlayer fit` wrote.

    Parameters
    ----------
    path : str or path
        The model file.
    backbone : torch.nn.Module, default None
        A module of the same architecture, if the model was fitted with a backbone.

    Raises
    ------
    ModelFileError
        If the file is damaged or does not hold such a model.
    """
    tensors, header = files.read(path)
    if "online" in header:
        raise ModelFileError(f"{path} holds an OnlineModel: use OnlineModel.load(path)")
    model = regressor.unpacked(path, tensors, header, backbone)
    if "table" not in header:
        return model
    try:
        schema = Schema.from_json(header["table"])
        found, wanted = (len(schema.features), len(schema.targets)), (model.n_features_in_, model.fitted_.n_outputs)
        if found != wanted:
            raise ValueError(f"they give {found[0]} inputs and {found[1]} targets, but the model has {wanted}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelFileError(
            f"{path} is not compatible with this version of lastlayer: {error!r} in its columns"
        ) from error
    empty = TableRegressor(impute=IMPUTE[0] if schema.impute else None, **model.get_params(deep=False))
    made = empty._adopt(model, schema, _card(header.get("card")))
    try:
        row = schema.typical()
        p, where = made.predictive(row), made.extrapolation(row)
        for numbers in (p.mean, p.std, *p.interval(0.95), p.affine_cost, where.affine_cost, where.quantile):
            check_finite(numbers, "its prediction")
    except Exception as error:  # a file may be complete and still contain anything
        raise ModelFileError(f"{path} is damaged or not a model of a table: it cannot predict ({error!r})") from error
    return made


def load_table(path: str | os.PathLike[str], *, unknown: str = "error") -> TableRegressor:
    """Load a model of a table, with a rule for unknown texts; raise ModelFileError if it has no columns."""
    model = load(path)
    if not isinstance(model, TableRegressor):
        raise ModelFileError(
            f"{path} was saved without the columns of its table: use it in Python with lastlayer.load, "
            "or fit a model with `lastlayer fit`"
        )
    return model.set_params(unknown=unknown)


def _card(saved: Any) -> dict[str, Any]:
    """Entries of a card that have the types that `lastlayer fit` writes; no prediction depends on them."""
    found = dict(saved) if isinstance(saved, dict) else {}
    for name, kind in CARD.items():
        try:
            found[name] = checked.typed(name, found[name], kind)
        except (KeyError, ValueError):
            found.pop(name, None)
    return found


def _targets(table: Table, y: Any, target: str | Sequence[str] | None) -> tuple[list[str], Table]:
    """Names of the targets, and the table with them in it."""
    asked = None if target is None else [target] if isinstance(target, str) else list(target)
    if y is None:
        if asked is None:
            raise InputError('no target was given: name the target columns, fit(frame, target="y"), or call fit(X, y)')
        return asked, table
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
        raise InputError(f"y has {len(cells)} columns, but the targets are {', '.join(asked)}: give one column each")
    names = list(given) if asked is None else asked
    if asked is None and (clash := sorted(given.keys() & table.columns.keys())):
        raise InputError(f"X and y both have a column {clash[0]!r}: drop it from X, or give target={clash[0]!r} alone")
    if len(cells[0]) != len(table):
        raise InputError(f"X has {len(table)} rows and y has {len(cells[0])}: give equally many")
    return names, replace(table, columns=table.columns | dict(zip(names, cells, strict=True)))


def _rows(schema: Schema, X: Any, y: Any, *, partly: bool = True) -> tuple[ndarray, ndarray]:
    table = as_table(X) if y is None else _targets(as_table(X), y, schema.targets)[1]
    return schema.arrays(table, partly=partly)


def _signature() -> inspect.Signature:
    """Signature of the constructor with the parameters of `BLLRegressor` by name, as scikit-learn expects."""
    own, of_all = (inspect.signature(kind.__init__).parameters for kind in (TableRegressor, BLLRegressor))
    named = [p for p in own.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    return inspect.Signature([*named, *(p for name, p in of_all.items() if name not in own)], return_annotation=None)


TableRegressor.__init__.__signature__ = _signature()  # type: ignore[attr-defined]
