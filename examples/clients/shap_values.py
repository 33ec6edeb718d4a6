"""SHAP values of the mean and of the standard deviation of a prediction.

    python examples/clients/shap_values.py

SHAP explains any function of the inputs: the mean of a prediction, and also its standard deviation. Here, the first
input moves the mean, the second the noise, and the third nothing; the table gives the mean absolute SHAP value of each
input for both. `lastlayer explain` and `lastlayer.explain` give a picture of single inputs without SHAP.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import shap
from numpy import ndarray

from lastlayer import BLLRegressor

INPUTS = ("moves the mean", "moves the noise", "moves nothing")


def rows(n: int, rng: np.random.Generator) -> tuple[ndarray, ndarray]:
    X = rng.uniform(-1, 1, (n, 3))
    return X, np.sin(2 * X[:, 0]) + np.exp(1.2 * X[:, 1] - 1.5) * rng.standard_normal(n)


def main(arguments: Sequence[str] | None = None) -> dict[str, ndarray]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--explained", type=int, default=100, help="rows that are explained")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    X, y = rows(options.rows, rng)
    model = BLLRegressor(
        hidden=(16,), n_members=3, hidden_prior=0.03, noise="input", max_epochs=options.epochs, random_state=0
    ).fit(X, y)
    functions = {"mean": model.predict, "standard deviation": lambda x: model.predict(x, return_std=True)[1]}
    new, table = rows(options.explained, rng)[0], {}
    print(f"{'mean |SHAP| of the input that':32}" + "".join(f"{name:>18}" for name in INPUTS))
    for name, function in functions.items():
        values = shap.KernelExplainer(function, X[:30]).shap_values(new, silent=True)
        table[name] = np.abs(values).mean(0)
        print(f"{name:32}" + "".join(f"{value:18.3f}" for value in table[name]))
    return table


if __name__ == "__main__":
    main()
