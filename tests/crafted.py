"""Model files that are whole, with a right digest, and hold what no fit would have written.

`python tests/crafted.py --runs 500 --seed 0` loads that many, of every kind of model, and says what became of them:
each must be refused with the library's own error, or predict finite numbers.
"""

import argparse
import copy
import math
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import small_process
from models import data, fitted
from torch import Tensor

import lastlayer
from lastlayer._internal import files
from lastlayer.errors import LastLayerError
from lastlayer.online import DriftMonitor, OnlineModel, SlidingWindow
from lastlayer.report import make_report
from lastlayer.tables import Table, TableRegressor, explain, facts, forecast, load_table

NUMBERS = [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e200, 1e-320, -1.0, 0.0, 1e30]
ODD = [
    None,
    True,
    -1,
    0,
    10**9,
    10**30,
    1e308,
    math.nan,
    math.inf,
    "x",
    "",
    "nan",
    "-inf",
    [],
    {},
    [[]],
    ["a", 1],
    {"a": 1},
]
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


def check_regressor(path: Path) -> None:
    """Load and use it in every way; a refusal is a LastLayerError, and after loading only of what changes the model."""
    model = lastlayer.load(path)
    p = model.predictive(X)
    numbers = [*model.predict(X, return_std=True), *p.interval(0.9), p.affine_cost, model.extrapolation(X).quantile]
    numbers += [model.sample_y(X[:3], 2), model.joint(X[:3]).mean, model.noise_std_]
    if model.fitted_.conformal_scores is not None:
        with suppress(LastLayerError):  # too few rows for the level, say
            p.interval(0.5, method="conformal")
    assert all(np.isfinite(values).all() for values in numbers), "numbers that are not finite"
    assert f"{model.settings_} {model.calibration_} {model.alpha_} {model.nlml_} {model.fitted_.family_scores}"
    y = Y if model.fitted_.y_ndim == 2 else Y[:, 0]
    with suppress(LastLayerError):
        model.update(X[:5], y[:5])
        assert np.isfinite(model.predict(X)).all(), "numbers that are not finite after an update"
    model.save(path)


def check_online(path: Path) -> None:
    online = OnlineModel.load(path)
    assert all(np.isfinite(values).all() for values in online.predict(X, return_std=True)), "not finite"
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
        assert all(np.isfinite(v).all() for v in cells.values() if v.dtype.kind == "f"), "numbers that are not finite"
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


MODELS = (
    "single",
    "shared prior, full noise",
    "mixture of families",
    "mixture, noise by input",
    "partly missing targets",
)
KINDS = {name: (save_fitted(name), check_regressor) for name in MODELS}
KINDS |= {"online": (save_online, check_online), "table": (save_table, check_table)}


def run(kinds: list[str], runs: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """How many were refused and how many loaded, and what went wrong."""
    rng, counts, wrong = np.random.default_rng(seed), Counter[str](), []
    for kind in kinds:
        save, check = KINDS[kind]
        save(folder / "good")
        content = files.read(folder / "good")
        check(folder / "good")
        for _ in range(runs // len(kinds)):
            what, crafted = changed(*content, rng)
            files.write(folder / "crafted", *crafted)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    check(folder / "crafted")
                counts["loaded"] += 1
            except LastLayerError:
                counts["refused"] += 1
            except Exception as error:
                counts["wrong"] += 1
                wrong.append(f"{kind}: {what}: {type(error).__name__}: {error}")
    return counts, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, small_process():
        counts, wrong = run(list(KINDS), asked.runs, asked.seed, Path(folder))
    print(*wrong, sep="\n")
    print(f"{dict(counts)} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
