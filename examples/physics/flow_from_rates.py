"""The flow out of a tank over a day, from volumes, totals and rates: `python examples/physics/flow_from_rates.py`.

The function is the volume in the tank, read from its level at eight times. A meter counted what flowed out in each of
eight windows: a `Difference` of two volumes. A gauge measured the flow at twenty times: minus the `Derivative` of the
volume. The script fits the levels alone, then levels and totals, then all three, and scores the flow that each fit
predicts on a grid.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy import ndarray
from shared import Table, band, report, save, scores

from lastlayer import BLLRegressor
from lastlayer.data.observe import Derivative, Difference

LEVEL_NOISE, TOTAL_NOISE, RATE_NOISE = 1.0, 0.5, 0.5
"""Standard deviations in m3, m3 and m3/h."""


def flow(t: ndarray) -> ndarray:
    """Flow in m3/h: a base flow with a peak in the morning and one in the evening."""
    return 6 + 10 * np.exp(-(((t - 8) / 3) ** 2)) + 8 * np.exp(-(((t - 19) / 3) ** 2))


def volume(t: ndarray) -> ndarray:
    """Volume in m3: 400 at midnight, minus what has flowed out since."""
    fine = np.linspace(0, 24, 2401)
    out = np.concatenate([[0.0], np.cumsum(flow((fine[1:] + fine[:-1]) / 2)) * 0.01])
    return 400 - np.interp(t, fine, out)


def main(folder: Path = Path(), seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    T, T_rate = np.linspace(0, 24, 8)[:, None], rng.uniform(0, 24, (20, 1))
    y = volume(T[:, 0]) + LEVEL_NOISE * rng.standard_normal(8)
    ends = np.linspace(0, 24, 9)[:, None]
    counted = -np.diff(volume(ends[:, 0])) + TOTAL_NOISE * rng.standard_normal(8)
    totals = Difference(ends[:-1], ends[1:]).observed(counted, noise_std=TOTAL_NOISE)
    measured = flow(T_rate[:, 0]) + RATE_NOISE * rng.standard_normal(20)
    rates = Derivative(0).at(T_rate).observed(-measured, noise_std=RATE_NOISE)

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.stairs(counted / 3, ends[:, 0], baseline=None, color="0.6", label="8 totals over their 3 hours")
    axes.plot(T_rate, measured, "k.", label="20 rates")
    t = np.linspace(0, 24, 200)
    ways = {"levels": [], "levels and totals": [totals], "levels, totals and rates": [totals, rates]}
    table = {}
    for (name, observations), color in zip(ways.items(), ("C1", "C2", "C0"), strict=True):
        model = BLLRegressor(n_members=5, hidden_prior=0.01, max_epochs=150, random_state=seed)
        model.fit(T, y, noise_std=LEVEL_NOISE, observations=observations)
        slope = model.predictive_of(Derivative(0), t[:, None])
        table[f"flow, from {name}"] = scores(slope, -flow(t))
        band(axes, t, slope, f"from {name}, 90% band", color, sign=-1)
    axes.plot(t, flow(t), "k--", lw=1, label="truth")
    axes.set(xlabel="hour", ylabel="flow, m³/h", ylim=(0, 25))
    report(table)
    save(figure, folder / "flow_from_rates.png")
    return table


if __name__ == "__main__":
    main(Path(*sys.argv[1:2]))
