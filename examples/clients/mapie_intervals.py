"""Conformal intervals by MAPIE around a lastlayer model, compared with those of the model itself.

    python examples/clients/mapie_intervals.py

The noise grows with the first input. A model is fitted to some rows; MAPIE and `model.conformalize` use the same
other rows for calibration. MAPIE's absolute residuals give all rows intervals of the same width; those of the model are
proportional to its predicted standard deviation. Both cover 90% of all new rows, as conformal intervals must. The table
shows how they cover the third of the rows with the least and with the most noise, and the interval score (width plus 20
times the distance of a target outside its interval), which rewards narrow intervals that cover.
"""

import argparse
from collections.abc import Sequence

import numpy as np
from mapie.regression import SplitConformalRegressor
from numpy import ndarray

from lastlayer import BLLRegressor

LEVEL = 0.9


def rows(n: int, rng: np.random.Generator) -> tuple[ndarray, ndarray]:
    """Two inputs; the standard deviation of the noise grows from 0.05 to 0.6 with the first."""
    X = rng.uniform(0, 1, (n, 2))
    return X, np.sin(4 * X[:, 0]) + X[:, 1] ** 2 + (0.05 + 0.55 * X[:, 0]) * rng.standard_normal(n)


def scores(lower: ndarray, upper: ndarray, X: ndarray, y: ndarray) -> dict[str, float]:
    """Shares of the targets inside their intervals, widths, and the interval score."""
    inside = (lower <= y) & (y <= upper)
    outside = np.maximum(lower - y, 0) + np.maximum(y - upper, 0)
    return {
        "inside": float(inside.mean()),
        "quiet": float(inside[X[:, 0] < 1 / 3].mean()),
        "noisy": float(inside[X[:, 0] > 2 / 3].mean()),
        "width": float((upper - lower).mean()),
        "score": float((upper - lower + 2 / (1 - LEVEL) * outside).mean()),
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=100)
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    (X, y), (fresh, fresh_y), (new, new_y) = (rows(n, rng) for n in (options.rows, options.rows // 2, 3_000))
    model = BLLRegressor(
        hidden=(16,), n_members=3, hidden_prior=0.03, noise="input", max_epochs=options.epochs, random_state=0
    ).fit(X, y)

    wrapped = SplitConformalRegressor(model, confidence_level=LEVEL, prefit=True).conformalize(fresh, fresh_y)
    lower, upper = wrapped.predict_interval(new)[1][:, :, 0].T
    table = {"MAPIE, absolute residuals": scores(lower, upper, new, new_y)}
    p = model.conformalize(fresh, fresh_y).predictive(new)
    for name, method in (("lastlayer, conformal", "conformal"), ("lastlayer, quantiles", "quantile")):
        lower, upper = p.interval(LEVEL, method=method)
        table[name] = scores(lower, upper, new, new_y)
    names = next(iter(table.values()))
    print(f"{'':28}" + "".join(f"{name:>8}" for name in names))
    for name, row in table.items():
        print(f"{name:28}" + "".join(f"{value:8.3f}" for value in row.values()))
    return table


if __name__ == "__main__":
    main()
