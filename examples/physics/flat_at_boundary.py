"""Temperature in a bar with insulated ends: `python examples/physics/flat_at_boundary.py`.

No heat crosses an insulated end, so the temperature is flat there. No sensor sits there, but the physics is an
observation: a `Derivative` of zero at both ends, with a small standard deviation. The script fits twelve sensors alone,
then with the two slopes, and scores what both say of the whole bar.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy import ndarray
from shared import Table, band, report, save, scores

from lastlayer import BLLRegressor
from lastlayer.observe import Derivative, Value

SENSOR_NOISE, SLOPE_NOISE = 0.5, 0.5
"""In K, and in K/m: small beside the slopes inside the bar, which reach 60 K/m."""


def temperature(x: ndarray) -> ndarray:
    """In degrees Celsius, of a bar of 1 m."""
    return 40 + 15 * np.cos(np.pi * x) - 6 * np.cos(2 * np.pi * x)


def main(folder: Path = Path()) -> Table:
    rng = np.random.default_rng(0)
    X, ends = np.linspace(0.25, 0.75, 12)[:, None], np.array([[0.0], [1.0]])
    y = temperature(X[:, 0]) + SENSOR_NOISE * rng.standard_normal(len(X))
    flat = Derivative(0).at(ends).observed([0.0, 0.0], noise_std=SLOPE_NOISE)

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(X, y, "k.", label="12 sensors")
    x = np.linspace(0, 1, 200)
    table = {}
    for name, observations, color in (("sensors", [], "C1"), ("sensors and flat ends", [flat], "C0")):
        model = BLLRegressor(n_members=5, hidden_prior=0.1, max_epochs=150, random_state=0)
        model.fit(X, y, noise_std=SENSOR_NOISE, observations=observations)
        value = model.predictive_of(Value(), x[:, None])
        table[f"temperature, from {name}"] = scores(value, temperature(x))
        band(axes, x, value, f"from {name}, 90% band", color)
    axes.plot(x, temperature(x), "k--", lw=1, label="truth")
    axes.set(xlabel="position, m", ylabel="temperature, °C")
    report(table)
    save(figure, folder / "flat_at_boundary.png")
    return table


if __name__ == "__main__":
    main()
