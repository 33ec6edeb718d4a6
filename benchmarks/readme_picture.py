"""Figure and scores of the README: fit built-in data, score inside and outside the range, tune alpha, score again."""

from pathlib import Path

import numpy as np

from benchmarks.runner import options_of, write_files
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.plots import one_input
from lastlayer.predictions.metrics import coverage, crps, log_predictive_density, rmse
from lastlayer.studies.data import NOISE_STD, TEST_RANGE, TRAIN_RANGE, Samples, draw, paper_data, truth


def run(folder: Path, *, progress: bool = True) -> str:

    train, validation, test = paper_data().train, draw(40, TEST_RANGE, 2), draw(400, TEST_RANGE, 1)
    model = BLLRegressor(hidden=(20, 20, 20), random_state=0, progress=progress).fit(train.X, train.y)
    inside = ((test.X >= TRAIN_RANGE[0]) & (test.X <= TRAIN_RANGE[1]))[:, 0]
    parts = {
        "training": train,
        "test, inside": Samples(test.X[inside], test.y[inside]),
        "test, outside": Samples(test.X[~inside], test.y[~inside]),
    }
    lines = [f"{'':24} {'points':>7} {'LPD':>8} {'RMSE':>8} {'CRPS':>8} {'in 90%':>8} {'affine cost':>12}"]
    figure = one_input(model, train.X, train.y, span=TEST_RANGE, truth=truth)
    for state in ("default", "alpha^max"):
        if state == "alpha^max":
            model.tune_alpha(validation.X, validation.y)
        for name, samples in parts.items():
            p = model.predictive(samples.X)
            scores = [f(p, samples.y) for f in (log_predictive_density, rmse, crps, coverage)]
            row = "".join(f" {x:8.3f}" for x in scores)
            lines.append(f"{state:9} {name:14} {len(samples.X):7d}{row} {np.median(p.affine_cost):12.3g}")
    noise = ", ".join(f"{a:.3f} (true {b})" for a, b in zip(model.noise_std_, NOISE_STD, strict=True))
    lines += [
        f"noise: {noise}",
        f"default: {model.calibration_}",
        f"Algorithm 1 on {len(validation.X)} validation points inside and outside: {model.alpha_curve_}",
        "LPD is joint over the two outputs, in target units; affine cost: median of the points",
    ]
    table = "\n".join(lines)
    write_files(folder, {"scores.txt": table + "\n"}, {"prediction.png": figure})
    return table


def main(arguments: list[str] | None = None) -> None:
    print(run(options_of(__doc__, out="results").parse_args(arguments).out))


if __name__ == "__main__":
    main()
