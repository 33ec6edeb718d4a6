"""Velocity in a pipe, measured near the wall: `python examples/physics/flat_at_boundary.py`.

By symmetry the profile is flat on the axis, which the probe does not reach. This is an observation like any other: a
`Derivative` of zero, with a small standard deviation. At the wall the fluid is at rest: a `Value` of zero. The script
fits twelve velocities and the wall, then the flat axis as well, and scores both predictions over the whole radius. A
shear-thinning fluid has a broad flat core, and there the slope helps. The profile of water is curved everywhere, and
there the slope does harm: the networks make the core flat, since one slope does not determine the curvature.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy import ndarray
from shared import Table, band, report, save, scores

from lastlayer import BLLRegressor
from lastlayer.data.observe import Derivative, Value

VELOCITY_NOISE, WALL_NOISE, SLOPE_NOISE = 0.02, 0.01, 0.1
"""Standard deviations in m/s, m/s and m/s per radius; slopes at the wall are 2 and 3."""
FLUIDS = {"shear-thinning": 3, "water": 2}
"""Powers of the radius: 1 + 1/n of a power-law fluid of index n."""


def velocity(r: ndarray, power: int) -> ndarray:
    """Velocity in m/s at a distance from the axis, relative to the radius of the pipe."""
    return 1 - r**power


def main(folder: Path = Path(), seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    X = np.linspace(0.4, 0.95, 12)[:, None]
    wall = Value().at([[1.0]]).observed([0.0], noise_std=WALL_NOISE)
    flat = Derivative(0).at([[0.0]]).observed([0.0], noise_std=SLOPE_NOISE)

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    r = np.linspace(0, 1, 200)
    table = {}
    for (fluid, power), axes in zip(FLUIDS.items(), figure.subplots(1, 2), strict=True):
        y = velocity(X[:, 0], power) + VELOCITY_NOISE * rng.standard_normal(12)
        axes.plot(X, y, "k.", label="12 velocities")
        for name, observations, color in (("wall", [wall], "C1"), ("wall and flat axis", [wall, flat], "C0")):
            model = BLLRegressor(n_members=5, hidden_prior=0.03, max_epochs=100, random_state=seed)
            model.fit(X, y, noise_std=VELOCITY_NOISE, observations=observations)
            value = model.predictive_of(Value(), r[:, None])
            table[f"{fluid}, with {name}"] = scores(value, velocity(r, power))
            band(axes, r, value, f"with {name}, 90% band", color)
        axes.plot(r, velocity(r, power), "k--", lw=1, label="truth")
        axes.set(xlabel="distance from the axis / radius", ylabel="velocity, m/s", ylim=(0, 1.6), title=fluid)
    report(table)
    save(figure, folder / "flat_at_boundary.png")
    return table


if __name__ == "__main__":
    main(Path(*sys.argv[1:2]))
