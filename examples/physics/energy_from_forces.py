"""A double well from eight energies and forty noisy forces: `python examples/physics/energy_from_forces.py`.

A force is minus the derivative of the energy, so `Derivative` observes it with the opposite sign. The script fits the
energies alone, then energies and forces, and scores both predictions of energy and force on a grid.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy import ndarray
from shared import Table, band, report, save, scores

from lastlayer import BLLRegressor
from lastlayer.data.observe import Derivative, Value

ENERGY_NOISE, FORCE_NOISE = 0.02, 0.3


def energy(x: ndarray) -> ndarray:
    return (x**2 - 1) ** 2


def force(x: ndarray) -> ndarray:
    return -4 * x * (x**2 - 1)


def main(folder: Path = Path(), seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    X, X_force = np.linspace(-1.6, 1.6, 8)[:, None], rng.uniform(-1.6, 1.6, (40, 1))
    y = energy(X[:, 0]) + ENERGY_NOISE * rng.standard_normal(8)
    measured = force(X_force[:, 0]) + FORCE_NOISE * rng.standard_normal(40)
    forces = Derivative(0).at(X_force).observed(-measured, noise_std=FORCE_NOISE)

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(X, y, "ko", ms=5, label="8 energies")
    right.plot(X_force, measured, "k.", ms=4, label="40 forces")
    x = np.linspace(-1.6, 1.6, 200)
    table = {}
    for name, observations, color in (("energies", [], "C1"), ("energies and forces", [forces], "C0")):
        model = BLLRegressor(n_members=5, hidden_prior=0.03, max_epochs=150, random_state=seed)
        model.fit(X, y, noise_std=ENERGY_NOISE, observations=observations)
        value, slope = (model.predictive_of(functional, x[:, None]) for functional in (Value(), Derivative(0)))
        table[f"energy, from {name}"] = scores(value, energy(x))
        table[f"force, from {name}"] = scores(slope, -force(x))
        band(left, x, value, f"from {name}, 90% band", color)
        band(right, x, slope, f"from {name}, 90% band", color, sign=-1)
    left.plot(x, energy(x), "k--", lw=1, label="truth")
    right.plot(x, force(x), "k--", lw=1, label="truth")
    left.set(xlabel="position", ylabel="energy", ylim=(-1.5, 4))
    right.set(xlabel="position", ylabel="force", ylim=(-12, 12))
    report(table)
    save(figure, folder / "energy_from_forces.png")
    return table


if __name__ == "__main__":
    main(Path(*sys.argv[1:2]))
