"""Tables of a folder and the splits of their rows: those given with the data, and the outer ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer.errors import InputError, check_choice

KINDS = {"given": "splits that come with the data", "outer": "test rows from the ends of the first principal direction"}
OUTER_SPLITS = (0, 1)
TEST_SHARE = 0.1
WIDE = {"protein": 100}  # number of hidden units for tables that use more than `HIDDEN`, as is customary for them
HIDDEN = 50


@dataclass(frozen=True)
class Table:
    """One data set: inputs, one target, and the test rows of its given splits (None: drawn by seed)."""

    name: str
    X: Float[ndarray, "m d"]
    y: Float[ndarray, " m"]
    given: dict[int, Int[ndarray, " t"]] | None = field(repr=False, default=None)

    @property
    def hidden(self) -> int:
        return WIDE.get(self.name, HIDDEN)

    def splits(self, kind: str, asked: Sequence[int]) -> list[int]:
        if kind == "outer":
            return list(OUTER_SPLITS)
        return [split for split in asked if self.given is None or split in self.given]

    def test_rows(self, kind: str, split: int) -> Int[ndarray, " t"]:
        check_choice("kind", kind, KINDS)
        if kind == "outer":
            return outer_rows(self.X, highest=bool(split))
        if self.given is None:
            order = np.random.default_rng(split).permutation(len(self.X))
            return np.sort(order[: _n_test(len(self.X))])
        if split not in self.given:
            raise InputError(f"{self.name} has no split {split}: it has {sorted(self.given)}")
        return self.given[split]

    def parts(self, kind: str, split: int) -> tuple[ndarray, ndarray, ndarray, ndarray]:
        """Inputs and targets to fit, and those to predict."""
        test = self.test_rows(kind, split)
        train = np.setdiff1d(np.arange(len(self.X)), test)
        return self.X[train], self.y[train], self.X[test], self.y[test]


def outer_rows(X: Float[ndarray, "m d"], *, highest: bool) -> Int[ndarray, " t"]:
    """Select the tenth of the rows at one end of the first principal direction of the standardised inputs.

    The sign of the direction is such that its largest entry is positive, so that low and high are reproducible.
    """
    scale = X.std(0)
    Z = (X - X.mean(0)) / np.where(scale > 0, scale, 1.0)
    direction = np.linalg.svd(Z, full_matrices=False)[2][0]
    direction = direction * np.sign(direction[np.abs(direction).argmax()])
    order = np.argsort(Z @ direction, kind="stable")
    n = _n_test(len(X))
    return np.sort(order[-n:] if highest else order[:n])


def load_folder(folder: Path, names: Sequence[str] | None = None) -> list[Table]:
    """Load every .npz and .csv file of a folder, or those named, ordered by number of rows."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give one with .npz or .csv files as --data")
    files = {path.stem: path for path in sorted(folder.iterdir()) if path.suffix in (".npz", ".csv")}
    if not files:
        raise InputError(f"{folder} holds no .npz or .csv files: see docs/uci.md for what they contain")
    chosen = list(files) if names is None else [check_choice("set", name, files) for name in names]
    tables = [_load_npz(files[name]) if files[name].suffix == ".npz" else _load_csv(files[name]) for name in chosen]
    return sorted(tables, key=lambda table: len(table.X))


def _load_npz(path: Path) -> Table:
    with np.load(path) as arrays:
        if missing := {"X", "y"} - set(arrays.files):
            raise InputError(f"{path.name} has no array {', '.join(sorted(missing))}: it has {', '.join(arrays.files)}")
        X, y = np.asarray(arrays["X"], float), np.asarray(arrays["y"], float)
        names = [name for name in arrays.files if name.startswith("test_")]
        tests = {int(name.removeprefix("test_")): np.sort(arrays[name].astype(np.int64)) for name in names}
    _check(path.name, X, y)
    y = y.reshape(len(y))
    for split, rows in tests.items():
        if len(np.unique(rows)) != len(rows) or rows.min() < 0 or rows.max() >= len(X):
            raise InputError(f"{path.name}: test_{split} must hold different row numbers from 0 to {len(X) - 1}")
    return Table(path.stem, X, y, tests or None)


def _load_csv(path: Path) -> Table:
    """Load a CSV file; the last column is the target, a non-numeric first line is a header."""
    with path.open() as file:
        first = file.readline()
    try:
        _ = [float(cell) for cell in first.split(",")]
        n_head = 0
    except ValueError:
        n_head = 1
    try:
        values = np.loadtxt(path, delimiter=",", skiprows=n_head, quotechar='"', ndmin=2)
    except ValueError as error:
        raise InputError(f"{path.name} must contain only numbers below an optional header: {error}") from error
    if values.shape[1] < 2:
        raise InputError(f"{path.name} needs rows of at least two columns, the last of them the target")
    _check(path.name, values[:, :-1], values[:, -1])
    return Table(path.stem, values[:, :-1], values[:, -1])


def _check(name: str, X: ndarray, y: ndarray) -> None:
    if X.ndim != 2 or y.size != len(X) or len(X) < 20:
        raise InputError(f"{name}: X {X.shape} and y {y.shape}; need shapes (m, d) and (m,), m of 20 or more")
    if not (np.isfinite(X).all() and np.isfinite(y).all()):
        raise InputError(f"{name} has missing or infinite values: drop or impute them")


def _n_test(m: int) -> int:
    return max(1, round(TEST_SHARE * m))
