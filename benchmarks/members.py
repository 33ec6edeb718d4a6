"""Cost of members and calibration: processor seconds of fits in one run, as ratios.

`python -m benchmarks.members` compares ten members with one, for a small network (three layers of 20, 160 rows) and for
the default on a table of 1,000 rows by 10 columns, and prints the cost that calibration adds to a single plain fit.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy import ndarray

from benchmarks.runner import options_of
from benchmarks.timing import timed
from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.studies.data import paper_data

ROWS = 1_000
PLAIN: dict[str, Any] = {"calibration": None, "hidden_prior": 0.0, "training": TrainingOptions(early_stopping=False)}


def table(m: int, d: int) -> tuple[ndarray, ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(m, d))
    return X, np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.3 * rng.normal(size=m)


def main(arguments: list[str] | None = None) -> None:
    options_of(__doc__).parse_args(arguments)
    data = paper_data().train
    X, y = table(ROWS, 10)
    print(f"threads {torch.get_num_threads()}; processor seconds (wall seconds)")
    small, cases = (20, 20, 20), {}
    for name, (inputs, targets, parameters) in {
        "small, one member, evidence alone": (data.X, data.y, {**PLAIN, "hidden": small, "n_members": 1}),
        "small, ten members, evidence alone": (data.X, data.y, {**PLAIN, "hidden": small, "n_members": 10}),
        "small, one member, default": (data.X, data.y, {"hidden": small, "n_members": 1}),
        "small, ten members, default": (data.X, data.y, {"hidden": small, "n_members": 10}),
        "1,000 x 10, preset fast": (X, y, {"preset": "fast"}),
        "1,000 x 10, one member, default": (X, y, {"n_members": 1}),
        "1,000 x 10, default": (X, y, {}),
    }.items():
        fit = BLLRegressor(random_state=0, **parameters).fit
        _, *cases[name] = timed(partial(fit, inputs, targets))
        print(f"{name:36} {cases[name][0]:7.1f} ({cases[name][1]:.1f})", flush=True)
    print("\nratio of processor seconds")
    for many, one in (
        ("small, ten members, evidence alone", "small, one member, evidence alone"),
        ("small, ten members, default", "small, one member, default"),
        ("1,000 x 10, default", "1,000 x 10, one member, default"),
        ("1,000 x 10, default", "1,000 x 10, preset fast"),
    ):
        print(f"{many} / {one}: {cases[many][0] / cases[one][0]:.2f}")


if __name__ == "__main__":
    main()
