"""Predictions of an exported lastlayer model with Python and NumPy alone.

Copy this file and the model.npz beside it to wherever it is needed:

    from predict import Bundle

    bundle = Bundle("model.npz")
    X = bundle.inputs({"flow": [12.5, 30.0], "fluid": ["water", "oil"]})  # columns as in the training table
    p = bundle.predict(X)
    p.mean, p.std, p.affine_cost, p.extrapolation, p.interval(0.95)

or `python predict.py rows.csv > predictions.csv`. Loading model.npz cannot run code: it holds numbers and a JSON text.
"""

import csv
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy import ndarray

FORMAT = 3
ROWS = 4096
TINY = math.sqrt(np.finfo(np.float64).tiny)
_erfc, _erf = np.frompyfunc(math.erfc, 1, 1), np.frompyfunc(math.erf, 1, 1)


def _normal_cdf(x: ndarray) -> ndarray:
    below: ndarray = 0.5 * np.asarray(_erfc(-x / math.sqrt(2)), dtype=float)
    return below


def _sigmoid(x: ndarray) -> ndarray:
    value: ndarray = np.exp(-np.logaddexp(0, -x))
    return value


_SELU = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
ACTIVATIONS: dict[str, Callable[[ndarray], ndarray]] = {
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "gelu": lambda x: 0.5 * x * (1 + np.asarray(_erf(x / math.sqrt(2)), dtype=float)),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "relu": lambda x: np.maximum(x, 0),
    "selu": lambda x: _SELU[0] * np.where(x > 0, x, _SELU[1] * np.expm1(np.minimum(x, 0))),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "softplus": lambda x: np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20)))),
    "tanh": np.tanh,
}


@dataclass(frozen=True)
class Prediction:
    """What is known of the targets at each row: a mixture of Gaussians. (m, q) arrays, in the units of the targets."""

    mean: ndarray
    std: ndarray
    affine_cost: ndarray
    """(m,) degree of extrapolation: the variance of the function over that of the noise."""
    extrapolation: ndarray
    """(m,) share of the training rows that would cost less; 1: farther out than all of them."""
    component_mean: ndarray
    component_var: ndarray
    weights: ndarray
    """(c, m)"""

    def interval(self, level: float = 0.95) -> tuple[ndarray, ndarray]:
        """Lower and upper bound, `level` of the probability between them."""
        if not 0 < level < 1:
            raise ValueError(f"level={level} must lie strictly between 0 and 1, such as 0.95")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def quantile(self, level: float) -> ndarray:
        """The value that each target stays below with probability `level`: Newton's steps, halving where they fail."""
        std = np.sqrt(self.component_var)
        each = self.component_mean + NormalDist().inv_cdf(level) * std
        lo, hi = each.min(0), each.max(0)
        x, move, narrowest = 0.5 * (lo + hi), hi - lo, std.min(0)
        found = np.zeros(x.shape, dtype=bool)
        for _ in range(200):
            z = (x - self.component_mean) / std
            excess = (self.weights[..., None] * _normal_cdf(z)).sum(0) - level
            density = (self.weights[..., None] * np.exp(-0.5 * np.square(z)) / std).sum(0) / math.sqrt(2 * math.pi)
            lo, hi = np.where(excess < 0, x, lo), np.where(excess < 0, hi, x)
            step = x - excess / np.maximum(density, TINY)
            fine = (step >= lo) & (step <= hi) & (2 * np.abs(step - x) <= move)
            new = np.where(found, x, np.where(fine, step, 0.5 * (lo + hi)))
            x, move = new, np.abs(new - x)
            found = found | (move <= np.maximum(np.where(fine, 1e-8 * narrowest, 0.0), 1e-15 * np.abs(x)))
            if found.all():
                break
        return x


class Bundle:
    """An exported model."""

    def __init__(self, path: str | Path) -> None:
        with np.load(path, allow_pickle=False) as file:
            self._a = {name: file[name] for name in file.files}
        self.about: dict[str, Any] = json.loads(str(self._a["about"]))
        if self.about["format"] > FORMAT:
            raise ValueError(f"{path} has format {self.about['format']}: take the predict.py that was written with it")
        self.targets: list[str] = self.about["targets"]

    def inputs(self, columns: Mapping[str, Sequence[Any]]) -> ndarray:
        """Raw columns, by the names of the training table, as the numbers that `predict` takes."""
        if self.about["columns"] is None:
            raise ValueError("this model was exported without the columns of its table: give predict an array")
        parts = []
        for column in self.about["columns"]:
            name = column["name"]
            if name not in columns:
                raise ValueError(f"column {name!r} is not there: {sorted(columns)}")
            cells = [self._filled(cell, column, i) for i, cell in enumerate(columns[name])]
            if column["kind"] == "number":
                parts.append(np.array(cells, dtype=float)[:, None])
            else:
                places = [column["categories"].index(cell) for cell in cells]
                parts.append(np.eye(len(column["categories"]))[places].reshape(len(cells), -1))
        return np.hstack(parts)

    def _filled(self, cell: Any, column: dict[str, Any], i: int) -> Any:
        text = "" if cell is None or cell != cell else str(cell).strip()
        missing = text == "" or (column["kind"] == "number" and text.lower() in self.about["missing"])
        if missing and not self.about["impute"]:
            raise ValueError(f"column {column['name']!r} has no value in row {i + 1}")
        if missing:
            return column["fill"]
        if column["kind"] == "text":
            if text not in column["categories"]:
                raise ValueError(
                    f"column {column['name']!r} has {text!r} in row {i + 1}: known are {column['categories']}"
                )
            return text
        return float(text)

    def predict(self, X: Any) -> Prediction:
        """The predictive distribution of rows of numbers, (m, d)."""
        X = np.asarray(X, dtype=float)
        if X.ndim != 2 or X.shape[1] != len(self._a["input_mean"]):
            raise ValueError(f"X has shape {X.shape}, and the model takes (m, {len(self._a['input_mean'])})")
        if not np.isfinite(X).all():
            raise ValueError("X has values that are not finite")
        a, Z = self._a, (X - self._a["input_mean"]) / self._a["input_scale"]
        members = range(len(self.about["members"]))
        rows = [self._rows(Z, i) for i in members]
        mean = np.stack([rows[i] @ a[f"{i}_weights"] + a[f"{i}_offset"] for i in members])
        cost = np.stack([self._cost(rows[i], i, "_star") for i in members])
        tuned = "0_root" in a
        ratio = np.stack([self._cost(rows[i], i, "") for i in members]) if tuned else cost
        noise = np.stack([a[f"{i}_noise_var"] * a[f"{i}_noise"] * self._head(Z) for i in members])
        var_star = noise + self._epistemic(cost)
        log_var = np.log(var_star).mean(-1)
        weights = np.exp(self.about["sharpness"] * (log_var.min(0) - log_var))
        weights = weights / weights.sum(0)
        mean = a["anchor"] + (mean - a["anchor"]) / (1 + a["anchor_precision"] * var_star)
        var = noise + self._epistemic(ratio)
        share, factor = a["tails"]
        if share:
            mean, var = np.concatenate([mean, mean]), np.concatenate([var, factor * var])
            weights = np.concatenate([(1 - share) * weights, share * weights])
        w = weights[..., None]
        average = (w * mean).sum(0)
        std = np.sqrt((w * (var + np.square(mean - average))).sum(0))
        quantile = np.searchsorted(a["sample_cost"], cost.mean(0)) / len(a["sample_cost"])
        return Prediction(average, std, ratio.mean(0), quantile, mean, var, weights)

    def _rows(self, Z: ndarray, i: int) -> ndarray:
        """Features of member i, as its last layer takes them."""
        about, phi = self.about["members"][i], Z
        for layer in range(about["layers"]):
            phi = ACTIVATIONS[self.about["activation"]](phi @ self._a[f"{i}_W{layer}"] + self._a[f"{i}_b{layer}"])
        phi = np.hstack([phi, Z]) if about["input_skip"] else phi
        centred: ndarray = phi - self._a[f"{i}_centre"]
        return centred

    def _cost(self, rows: ndarray, i: int, which: str) -> ndarray:
        """phi' Lambda^-1 phi of member i."""
        cost: ndarray = np.square(rows @ self._a[f"{i}_root{which}"] + self._a[f"{i}_shift{which}"]).sum(-1)
        return cost

    def _epistemic(self, ratio: ndarray) -> ndarray:
        """sigma^2 b v^gamma of every member, and beyond its calibrated reach the value there times v over the reach."""
        parts = []
        for i, v in enumerate(ratio):
            power, reach = self._a[f"{i}_shape"]
            known = np.minimum(v, reach)
            shape = np.power(known, power) * (v / np.maximum(known, TINY))
            parts.append(shape[:, None] * self._a[f"{i}_slope"] * self._a[f"{i}_noise_var"])
        return np.stack(parts)

    def _head(self, Z: ndarray) -> ndarray:
        """What multiplies the noise at each input, if it depends on it."""
        a = self._a
        if "head_U" not in a:
            return np.ones((len(Z), 1))
        x = np.clip(Z, a["head_low"], a["head_high"])
        return np.exp(np.tanh(x @ a["head_U"] + a["head_u"]) @ a["head_V"])


def _blocks(rows: Iterable[dict[str, Any]]) -> Iterable[dict[str, list[Any]]]:
    block: list[dict[str, Any]] = []
    for row in rows:
        block.append(row)
        if len(block) == ROWS:
            yield {name: [r[name] for r in block] for name in block[0]}
            block = []
    if block:
        yield {name: [r[name] for r in block] for name in block[0]}


def main(words: list[str]) -> int:
    if not 1 <= len(words) <= 2:
        print(
            "usage: python predict.py ROWS.csv [MODEL.npz]   (model.npz beside this file if left out)", file=sys.stderr
        )
        return 2
    bundle = Bundle(words[1] if len(words) == 2 else Path(__file__).with_name("model.npz"))
    out = csv.writer(sys.stdout, lineterminator="\n")
    parts = ("mean", "std", "lower", "upper")
    out.writerow([f"{name}_{part}" for name in bundle.targets for part in parts] + ["affine_cost", "extrapolation"])
    with open(words[0], encoding="utf-8-sig", newline="") as file:
        try:
            for columns in _blocks(csv.DictReader(file)):
                p = bundle.predict(bundle.inputs(columns))
                numbers = np.stack([p.mean, p.std, *p.interval(0.95)], -1).reshape(len(p.mean), -1)
                out.writerows(np.column_stack([numbers, p.affine_cost, p.extrapolation]).tolist())
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
