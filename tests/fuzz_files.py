"""Model files that are whole, with a right digest, and hold what no fit would have written (fuzz.py)."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from helpers import NotFinite
from models import data, fitted
from torch import Tensor

import lastlayer
from lastlayer._internal import files
from lastlayer.errors import LastLayerError
from lastlayer.online import DriftMonitor, OnlineModel, SlidingWindow
from lastlayer.report import make_report
from lastlayer.tables import Table, TableRegressor, explain, facts, forecast, load_table

NUMBERS = [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e200, 1e-320, -1.0, 0.0, 1e30]
ODD = [None, True, -1, 0, 10**9, 10**30, 1e308, math.nan, math.inf, "x", "", "nan", "-inf"]
ODD += [[], {}, [[]], ["a", 1], {"a": 1}]
DTYPES = [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool]
X, Y = data(m=60)
Content = tuple[dict[str, Tensor], dict[str, Any]]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from places(inner, (*path, key))


def changed(tensors: dict[str, Tensor], header: dict[str, Any], rng: np.random.Generator) -> tuple[str, Content]:
    """One change, of a tensor or of the header, and what it was."""
    tensors, header = dict(tensors), copy.deepcopy(header)
    if rng.random() < 0.5:
        name = sorted(tensors)[rng.integers(len(tensors))]
        value = tensors[name]
        kind = ["value", "all values", "shape", "order", "dtype", "lost", "row lost"][rng.integers(7)]
        if kind in ("value", "all values") and value.numel():
            number = NUMBERS[rng.integers(len(NUMBERS))]
            value, kind = value.clone(), f"{kind} = {number}"
            if not value.dtype.is_floating_point:
                number = int(np.clip(np.nan_to_num(number), -(2**31), 2**31))
            flat = value.reshape(-1)
            flat[slice(None) if kind.startswith("all") else int(rng.integers(len(flat)))] = number
        elif kind == "shape":
            value = value[None].contiguous() if rng.random() < 0.5 else value.flatten().clone()
        elif kind == "order" and value.dim():
            value = value.flip(0).contiguous()
        elif kind == "dtype":
            value = value.to(DTYPES[rng.integers(len(DTYPES))])
        elif kind == "row lost" and value.dim():
            value = value[..., :-1].contiguous()
        if kind == "lost":
            del tensors[name]
        else:
            tensors[name] = value
        return f"{name}: {kind}", (tensors, header)
    every = list(places(header))
    *path, last = every[rng.integers(len(every))]
    inner = header
    for key in path:
        inner = inner[key]
    if rng.random() < 0.2:
        del inner[last]
        return f"{(*path, last)}: lost", (tensors, header)
    old, new = inner[last], ODD[rng.integers(len(ODD))]
    if isinstance(old, float) and rng.random() < 0.5:
        new = NUMBERS[rng.integers(len(NUMBERS))]
    inner[last] = new
    return f"{(*path, last)}: {new!r}", (tensors, header)


def finite(*answers: Any) -> None:
    if not all(np.isfinite(values).all() for values in answers):
        raise NotFinite


def check_regressor(path: Path) -> None:
    """Load and use it in every way; a refusal is a LastLayerError, and after loading only of what changes the model."""
    model = lastlayer.load(path)
    p = model.predictive(X)
    numbers = [*model.predict(X, return_std=True), *p.interval(0.9), p.affine_cost, model.extrapolation(X).quantile]
    numbers += [model.sample_y(X[:3], 2), model.joint(X[:3]).mean, model.noise_std_]
    if model.fitted_.conformal_scores is not None:
        with suppress(LastLayerError):  # too few rows for the level, say
            p.interval(0.5, method="conformal")
    finite(*numbers)
    assert f"{model.settings_} {model.calibration_} {model.alpha_} {model.nlml_} {model.fitted_.family_scores}"
    y = Y if model.fitted_.y_ndim == 2 else Y[:, 0]
    with suppress(LastLayerError):
        model.update(X[:5], y[:5])
        finite(model.predict(X))
    model.save(path)


def check_online(path: Path) -> None:
    online = OnlineModel.load(path)
    finite(*online.predict(X, return_std=True))
    with suppress(LastLayerError):
        online.update(X[:1], Y[:1])
        online.update(X[:30], Y[:30])
    assert f"{online.drift} {online.memory}"
    online.save(path)


def rows() -> Table:
    columns = {f"x{j}": X[:, j].astype(object) for j in range(3)} | {f"y{j}": Y[:, j].astype(object) for j in range(2)}
    return Table(columns | {"color": np.array(["red", "blue"] * (len(X) // 2), dtype=object)})


def check_table(path: Path) -> None:
    model, table = load_table(path), rows()
    with suppress(LastLayerError):  # the columns may be others
        cells = forecast(model, table).cells
        finite(*(v for v in cells.values() if v.dtype.kind == "f"))
        make_report(model, table, model_name="m", data_name="d")
        model.update(table)
    assert explain(model)
    assert facts(model)


def save_online(path: Path) -> None:
    monitor = DriftMonitor(n_outputs=2, random_state=3)
    online = OnlineModel(fitted("mixture"), SlidingWindow(40), start=(X, Y), monitor=monitor)
    online.update(X[:3], Y[:3]).save(path)


def save_table(path: Path) -> None:
    options = {"preset": "evidence", "hidden": (4,), "max_epochs": 3, "random_state": 0}
    model = TableRegressor(**options).fit(rows(), target=["y0", "y1"])
    made = {"data": "d.csv", "fitted": "today", "version": "1", "seed": 0, "interrupted": False, "notes": ["a note"]}
    model.card_.update(made)
    model.save(path)


def save_fitted(name: str) -> Callable[[Path], None]:
    return lambda path: fitted(name).save(path)


MODELS = ("single", "shared prior, full noise", "mixture of families", "mixture, noise by input")
KINDS = {name: (save_fitted(name), check_regressor) for name in (*MODELS, "partly missing targets")}
KINDS |= {"online": (save_online, check_online), "table": (save_table, check_table)}


class Generator:
    """Changes of files of some kinds of models, in turn."""

    def __init__(self, folder: Path, kinds: Sequence[str] = tuple(KINDS)) -> None:
        self.folder, self.kinds = folder, kinds
        self.good: dict[str, Content] = {}
        for kind in kinds:
            save, check = KINDS[kind]
            save(folder / "good")
            self.good[kind] = files.read(folder / "good")
            check(folder / "good")

    def case(self, number: int) -> "Case":
        kind = self.kinds[number % len(self.kinds)]
        return Case(kind, *changed(*self.good[kind], np.random.default_rng([11, number])))

    def run(self, case: "Case") -> None:
        files.write(self.folder / "crafted", *case.content)
        KINDS[case.kind][1](self.folder / "crafted")


class Case(NamedTuple):
    kind: str
    what: str
    content: Content

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"
