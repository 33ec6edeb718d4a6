"""Heat of single flats from the meters of whole buildings: `python examples/physics/parts_from_totals.py`.

The function is the heat that a flat uses in a day, by floor area and outside temperature. Eight flats have their
own meter. Thirty buildings have one meter each for six flats of known area: a `Sum` of six values. The script fits the
flats alone, then flats and buildings, and scores both predictions for new flats.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy import ndarray
from shared import Table, band, report, save, scores

from lastlayer import BLLRegressor
from lastlayer.data.observe import Sum, Value

FLAT_NOISE, BUILDING_NOISE = 2.0, 3.0
"""Standard deviations in kWh per day."""


def heat(X: ndarray) -> ndarray:
    """Heat in kWh per day, from area in m2 and outside temperature in degrees Celsius."""
    area, outside = X.T
    return 0.12 * area**0.9 * np.log1p(np.exp((17 - outside) / 2))


def flats(shape: tuple[int, ...], rng: np.random.Generator) -> ndarray:
    return np.stack([rng.uniform(30, 120, shape), rng.uniform(-5, 20, shape)], -1)


def main(folder: Path = Path(), seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    X, X_building = flats((8,), rng), flats((30, 6), rng)
    X_building[..., 1] = X_building[:, :1, 1]
    y = heat(X) + FLAT_NOISE * rng.standard_normal(8)
    read = heat(X_building.reshape(-1, 2)).reshape(30, 6).sum(1) + BUILDING_NOISE * rng.standard_normal(30)
    totals = Sum(X_building).observed(read, noise_std=BUILDING_NOISE)

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    x = np.linspace(-5, 20, 200)
    X_new, cut = flats((500,), rng), np.stack([np.full(200, 75.0), x], 1)
    table = {}
    for name, observations, color in (("8 flats", [], "C1"), ("8 flats and 30 buildings", [totals], "C0")):
        model = BLLRegressor(n_members=5, hidden_prior=0.03, max_epochs=150, random_state=seed)
        model.fit(X, y, noise_std=FLAT_NOISE, observations=observations)
        table[f"heat, from {name}"] = scores(model.predictive_of(Value(), X_new), heat(X_new))
        band(axes, x, model.predictive_of(Value(), cut), f"from {name}, 90% band", color)
    axes.plot(x, heat(cut), "k--", lw=1, label="truth")
    axes.set(xlabel="outside temperature, °C", ylabel="heat of a flat of 75 m², kWh per day")
    report(table)
    save(figure, folder / "parts_from_totals.png")
    return table


if __name__ == "__main__":
    main(Path(*sys.argv[1:2]))
