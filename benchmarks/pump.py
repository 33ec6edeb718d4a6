"""Coverage outside the pump's training table, compared with a Gaussian process: `python -m benchmarks.pump`.

Training rows end at 2,900 rpm. Several tables are drawn and fitted; the coverage of 90% intervals is measured on new
rows in bins of the speed and averaged over the tables.
"""

import warnings
from itertools import pairwise

import numpy as np
from numpy import ndarray
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.runner import markdown, options_of
from examples.make_pump import COLUMNS, rows
from lastlayer.tables import Table, TableRegressor

ROWS, TARGETS = 400, ["head_m", "power_kw"]
EDGES = (1400, 2900, 3000, 3100, 3200, 3400, 3600)
GAUSSIAN = 1.6449


def table(lines: list[list[str]]) -> Table:
    columns = zip(COLUMNS, zip(*lines, strict=True), strict=True)
    return Table({name: np.array(cells, dtype=object) for name, cells in columns})


def process(X: ndarray, y: ndarray, new: ndarray) -> tuple[ndarray, ndarray]:
    """Interval bounds of exact Gaussian processes, one per target, with length scales by the evidence."""
    kernel = ConstantKernel() * RBF(np.ones(X.shape[1])) + WhiteKernel()
    model = make_pipeline(StandardScaler(), GaussianProcessRegressor(kernel, normalize_y=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # length scales at their bounds
        parts = [model.fit(X, target).predict(new, return_std=True) for target in y.T]
    means, stds = (np.stack(each, 1) for each in zip(*parts, strict=True))
    return means - GAUSSIAN * stds, means + GAUSSIAN * stds


def main(arguments: list[str] | None = None) -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 1, 2], help="draws of the tables")
    shares = []
    for seed in parser.parse_args(arguments).seeds:
        rng = np.random.default_rng(seed)
        train, new = table(rows(ROWS, rng)), table(rows(4000, rng, fastest=3600.0))
        model = TableRegressor(random_state=0).fit(train, target=TARGETS)
        X, y = model.schema_.encode(new).X, model.schema_.targets_of(new)
        ours = model.predictive(new).interval(0.9)
        theirs = process(model.schema_.encode(train).X, model.schema_.targets_of(train), X)
        inside = np.concatenate([(low <= y) & (y <= high) for low, high in (ours, theirs)], 1)
        speed = X[:, 1]
        shares.append([inside[(low <= speed) & (speed < high)].mean(0) for low, high in pairwise(EDGES)])
    names = [f"{method}, {target}" for method in ("lastlayer", "Gaussian process") for target in TARGETS]
    lines = zip(pairwise(EDGES), np.mean(shares, 0), strict=True)
    body = [[f"{low:,} to {high:,}", *(f"{share:.0%}" for share in line)] for (low, high), line in lines]
    print(markdown([["speed, rpm", *names], *body]))


if __name__ == "__main__":
    main()
