"""The flow out of a tank over a day, from volumes, totals and rates: `python examples/physics/flow_from_rates.py`.

The function is the volume in the tank. Its level was read at eight times. A meter counted what left the tank in four
windows: each total is a `Difference` of two volumes. A portable gauge measured the flow at twelve times: minus the
`Derivative` of the volume. The script fits the readings alone, then with the totals, then with the rates too, and
scores what each says of the flow.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy import ndarray
from shared import Table, band, report, save, scores

from lastlayer import BLLRegressor
from lastlayer.observe import Derivative, Difference

LEVEL_NOISE, TOTAL_NOISE, RATE_NOISE = 3.0, 0.5, 1.0
"""In m3, m3 and m3/h."""


def flow(t: ndarray) -> ndarray:
    """In m3/h: a base flow with a peak in the morning and one in the evening."""
    return 6 + 14 * np.exp(-(((t - 8) / 2) ** 2)) + 10 * np.exp(-(((t - 19) / 2.5) ** 2))


def volume(t: ndarray) -> ndarray:
    """In m3: 400 at midnight, less what flowed since."""
    fine = np.linspace(0, 24, 2401)
    passed = np.concatenate([[0.0], np.cumsum(flow((fine[1:] + fine[:-1]) / 2)) * 0.01])
    return 400 - np.interp(t, fine, passed)


def main(folder: Path = Path()) -> Table:
    rng = np.random.default_rng(0)
    T = np.linspace(0, 24, 8)[:, None]
    y = volume(T[:, 0]) + LEVEL_NOISE * rng.standard_normal(len(T))
    ends = np.linspace(0, 24, 5)[:, None]
    passed = -np.diff(volume(ends[:, 0])) + TOTAL_NOISE * rng.standard_normal(4)
    totals = Difference(ends[:-1], ends[1:]).observed(passed, noise_std=TOTAL_NOISE)
    T_rate = np.sort(rng.uniform(0, 24, 12))[:, None]
    measured = flow(T_rate[:, 0]) + RATE_NOISE * rng.standard_normal(12)
    rates = Derivative(0).at(T_rate).observed(-measured, noise_std=RATE_NOISE)

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(T_rate, measured, "k.", label="12 rates")
    x = np.linspace(0, 24, 200)
    table = {}
    ways = (("levels", [], "C1"), ("levels and totals", [totals], "C2"), ("levels, totals, rates", [totals, rates], "C0"))
    for name, observations, color in ways:
        model = BLLRegressor(n_members=5, hidden_prior=0.1, max_epochs=150, random_state=0)
        model.fit(T, y, noise_std=LEVEL_NOISE, observations=observations)
        slope = model.predictive_of(Derivative(0), x[:, None])
        table[f"flow, from {name}"] = scores(slope, -flow(x))
        band(axes, x, slope, f"from {name}, 90% band", color, sign=-1)
    axes.plot(x, flow(x), "k--", lw=1, label="truth")
    axes.set(xlabel="hour", ylabel="flow, m³/h", ylim=(-10, 40))
    report(table)
    save(figure, folder / "flow_from_rates.png")
    return table


if __name__ == "__main__":
    main()
