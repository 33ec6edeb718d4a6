"""Amount of code that a first call executes: functions, files, and switches between files.

Each line is one call, on 60 x 3 rows: `fit`, a first `predictive` and a later one, of `BLLRegressor(max_epochs=2)`, of
the same with `likelihood="gaussian"`, and of that with `preset="evidence"`. Only code of the package counts. Functions
are distinct by file and qualified name, without lambdas and comprehensions; switches are distinct
ordered pairs of files such that a function of the second was called directly after one of the first in the same thread.
Orchestration is the part of a Gaussian fit in packages that compute nothing themselves. Loose modules are those at the
top that belong to no subpackage.
"""

import argparse
import importlib
import json
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from inspect import CO_OPTIMIZED
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
from numpy import ndarray

ROWS, INPUTS, EPOCHS = 60, 3, 2
GAUSSIAN = {"likelihood": "gaussian"}
PRESETS: dict[str, dict[str, str]] = {
    "default": {},
    "gaussian": GAUSSIAN,
    "evidence": GAUSSIAN | {"preset": "evidence"},
}
ORCHESTRATION = ("estimators", "settings", "ensemble", "predictor", "data")
AT_THE_TOP = {"__init__", "__main__", "errors"}  # modules that belong at the top of the package
Counts = dict[str, tuple[int, ...]]


@dataclass
class Walk:
    """Functions of the package that were called, in the order of each thread."""

    root: str
    threads: dict[int, list[CodeType]] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        named = not code.co_name.startswith("<") and bool(code.co_flags & CO_OPTIMIZED)  # bodies of classes are not
        if event == "call" and named and code.co_filename.startswith(self.root):
            self.threads.setdefault(threading.get_ident(), []).append(code)

    @property
    def called(self) -> list[CodeType]:
        return [code for codes in self.threads.values() for code in codes]

    @property
    def functions(self) -> set[tuple[str, str]]:
        return {(code.co_filename, code.co_qualname) for code in self.called}

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.called}

    @property
    def switches(self) -> set[tuple[str, str]]:
        pairs = (pair for codes in self.threads.values() for pair in pairwise(code.co_filename for code in codes))
        return {(here, there) for here, there in pairs if here != there}


def walk(root: str, work: Callable[[], object]) -> Walk:
    """Record the functions that a call executes, including those in threads that it starts."""
    found = Walk(root)
    threading.setprofile(found)
    sys.setprofile(found)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def rows() -> tuple[ndarray, ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, INPUTS))
    return X, X[:, 0] + 0.1 * rng.normal(size=ROWS)


def within(root: str, packages: tuple[str, ...], found: Walk) -> tuple[int, int]:
    """Functions and files of some packages."""
    folders = tuple(str(Path(root, name)) + "/" for name in packages)
    files = [file for file, _ in found.functions if file.startswith(folders)]
    return len(files), len(set(files))


def loose_modules(root: str) -> list[str]:
    return sorted({path.stem for path in Path(root).glob("*.py")} - AT_THE_TOP)


def count(package: Any) -> Counts:
    """Functions, files and switches of each call, and of the orchestration in a default fit."""
    root, (X, y) = str(package.__path__[0]), rows()
    counts: Counts = {}
    for name, parameters in PRESETS.items():
        model: Any = package.BLLRegressor(max_epochs=EPOCHS, random_state=0, **parameters)
        predict = partial(model.predictive, X)
        for call, work in (("fit", partial(model.fit, X, y)), ("first predictive", predict), ("predictive", predict)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # two epochs are not enough, and say so
                seen = walk(root, work)
            counts[f"{name}, {call}"] = len(seen.functions), len(seen.files), len(seen.switches)
            if name == "gaussian" and call == "fit":
                counts["  of these, orchestration"] = within(root, ORCHESTRATION, seen)
    return counts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", help="folder that holds another lastlayer package")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.src is not None:
        sys.path.insert(0, options.src)
    package = importlib.import_module("lastlayer")
    counts, loose = count(package), loose_modules(package.__path__[0])
    if options.json:
        print(json.dumps({"counts": {name.strip(): each for name, each in counts.items()}, "loose": loose}))
        return
    print(f"{'':<26}{'functions':>10}{'files':>7}{'switches':>10}")
    for name, (functions, files, *switches) in counts.items():
        print(f"{name:<26}{functions:>10}{files:>7}{switches[0] if switches else '':>10}")
    print(f"loose modules at the top of the package: {len(loose)} ({', '.join(loose) or 'none'})")


if __name__ == "__main__":
    main()
