"""Predictions of an exported lastlayer model with Python and NumPy alone."""

import csv
import json
import math
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy import ndarray

# the code of the library:
from lastlayer.formula.ops import NumPyOps
from lastlayer.formula.predictive import State, extrapolation, merged, mixture_quantile, outside_fraction, predict
from lastlayer.tables.cells import NumberFormat, as_texts, calendar, dates, days

# the reader:
FORMAT = 12
ROWS = 4096


@dataclass(frozen=True)
class BundlePrediction:
    """The predictive distribution of the targets at each row: a mixture of Gaussians, in the units of the targets."""

    mean: ndarray
    std: ndarray
    affine_cost: ndarray
    """(m,) degree of extrapolation: epistemic variance over noise variance, before calibration."""
    extrapolation: ndarray
    """(m,) share of the training rows with a smaller affine cost; 1: farther out than all of them."""
    component_mean: ndarray
    """(c, m, q), like the variances."""
    component_var: ndarray
    weights: ndarray
    """(c, m, 1)"""
    y_ndim: int

    def interval(self, level: float = 0.95) -> tuple[ndarray, ndarray]:
        """Lower and upper bound of the central interval with probability `level`."""
        if not 0 < level < 1:
            raise ValueError(f"level={level} must lie strictly between 0 and 1, such as 0.95")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def quantile(self, level: float) -> ndarray:
        """The value below which each target lies with probability `level`."""
        ndtr = lambda z: 0.5 * (1 + NumPyOps.erf(z / math.sqrt(2)))
        std = np.sqrt(self.component_var)
        found = mixture_quantile(np, ndtr, NormalDist().inv_cdf, level, self.component_mean, std, self.weights)
        return found[:, 0] if self.y_ndim == 1 else found


class Bundle:
    """An exported model, read from its .npz file."""

    def __init__(self, path: str | Path) -> None:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        self.about: dict[str, Any] = json.loads(str(arrays["about"]))
        if self.about["format"] != FORMAT:
            raise ValueError(f"{path} has format {self.about['format']}: use the predict.py that was written with it")
        self.targets: list[str] = self.about["targets"]
        self._model = State.unflat(arrays, self.about["state"]).model

    def inputs(self, columns: Mapping[str, Sequence[Any]]) -> ndarray:
        """Convert raw columns, named as in the training table, to the array that `predict` takes."""
        if self.about["columns"] is None:
            raise ValueError("this model was exported without the columns of its table: pass an array to predict")
        parts = []
        for column in self.about["columns"]:
            if column["name"] not in columns:
                raise ValueError(f"column {column['name']!r} is missing; the given columns are {sorted(columns)}")
            cells = np.empty(len(columns[column["name"]]), dtype=object)
            cells[:] = list(columns[column["name"]])
            parts.append(self._inputs(column, cells))
        return np.hstack(parts)

    def _inputs(self, column: dict[str, Any], cells: ndarray) -> ndarray:
        if column["kind"] == "text":
            texts, known = as_texts(cells), column["categories"]
            texts = self._filled(texts, texts == "", column)
            self._check(column, cells, ~np.isin(texts.astype(str), known), f"the known values are {known}")
            return np.eye(len(known))[[known.index(text) for text in texts]].reshape(len(texts), -1)
        if column["kind"] == "date":
            times, wrong = dates(cells, column["order"])
            self._check(column, cells, wrong, "it must be a date or time")
            return calendar(days(self._filled(times, np.isnat(times), column)), column["parts"])
        values, wrong = NumberFormat(**column["format"]).numbers(cells)
        self._check(column, cells, wrong, "it must be a number, written as in the training table")
        return self._filled(values, np.isnan(values), column)[:, None]

    def _check(self, column: dict[str, Any], cells: ndarray, wrong: ndarray, advice: str) -> None:
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(f"column {column['name']!r} has {cells[i]!r} in row {i + 1}: {advice}")

    def _filled(self, values: ndarray, missing: ndarray, column: dict[str, Any]) -> ndarray:
        if missing.any() and not self.about["impute"]:
            raise ValueError(f"column {column['name']!r} has no value in row {int(missing.argmax()) + 1}")
        if missing.any():
            values = values.copy()
            values[missing] = column["fill"]
        return values

    def predict(self, X: Any) -> BundlePrediction:
        """Return the predictive distribution at each row of an array of shape (m, d)."""
        X, model = np.asarray(X, dtype=float), self._model
        if X.ndim != 2 or X.shape[1] != len(model.input_mean):
            raise ValueError(f"X has shape {X.shape}, but the model takes (m, {len(model.input_mean)})")
        if not np.isfinite(X).all():
            raise ValueError("X has values that are not finite")
        parts = predict(NumPyOps, model, X)
        mean, weights = parts.mean, parts.weights
        var = np.broadcast_to(parts.epistemic + parts.noise, mean.shape)
        share, factor = model.tails
        if share:
            mean, var = np.concatenate([mean, mean]), np.concatenate([var, factor * var])
            weights = np.concatenate([(1 - share) * weights, share * weights])
        if references := self.about["references"]:
            mean, between = merged(np, mean, weights, outside_fraction(np, references, parts.cost_star))
            var = var + between
        if parts.shape is not None:
            share, own, wide = np.split(parts.shape, 3, -1)
            mean, var = np.concatenate([mean, own[1:]]), np.concatenate([var, wide[1:]])
            weights = np.concatenate([share[0] * weights, share[1:]])
        average = (weights * mean).sum(0)
        std = np.sqrt((weights * (var + np.square(mean - average))).sum(0))
        quantile = extrapolation(np, self.about["references"], model.sample_cost, parts.cost_star)
        y_ndim = self.about["y_ndim"]
        average, std = (values[:, 0] if y_ndim == 1 else values for values in (average, std))
        return BundlePrediction(average, std, parts.cost.mean(-1).mean(0), quantile, mean, var, weights, y_ndim)


def _blocks(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, list[Any]]]:
    while block := list(islice(rows, ROWS)):
        yield {name: [row[name] for row in block] for name in block[0] if name is not None}


def main(arguments: list[str]) -> int:
    """Print the predictions for a CSV file as CSV; return the exit status."""
    if not 1 <= len(arguments) <= 2:
        print("usage: python predict.py ROWS.csv [MODEL.npz]   (default: model.npz next to this file)", file=sys.stderr)
        return 2
    try:
        _predict(arguments[0], arguments[1] if len(arguments) == 2 else Path(__file__).with_name("model.npz"))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has closed it, as in `predict.py rows.csv | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush
    except (ValueError, KeyError, OSError, csv.Error, zipfile.BadZipFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _predict(path: str, model: str | Path) -> None:
    bundle, out = Bundle(model), csv.writer(sys.stdout, lineterminator="\n")
    parts = ("mean", "std", "lower", "upper")
    with open(path, encoding="utf-8-sig", newline="") as file:
        out.writerow([f"{name}_{part}" for name in bundle.targets for part in parts] + ["affine_cost", "extrapolation"])
        for columns in _blocks(csv.DictReader(file)):
            p = bundle.predict(bundle.inputs(columns))
            numbers = np.stack([p.mean, p.std, *p.interval(0.95)], -1).reshape(len(p.mean), -1)
            out.writerows(np.column_stack([numbers, p.affine_cost, p.extrapolation]).tolist())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
