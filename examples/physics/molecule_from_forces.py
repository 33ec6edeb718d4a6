"""The energy of three atoms from forty geometries: `python examples/physics/molecule_from_forces.py`.

The potential is artificial: a Morse term for each pair of atoms and a repulsion of all three. Its inputs are the three
distances. A calculation of an energy often gives the forces as well. In these inputs they are minus the gradient, so
`Gradient` observes three more numbers for each geometry. The script fits the energies alone, then energies and forces,
and scores both predictions for new geometries.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy import ndarray
from shared import Table, band, report, save, scores

from lastlayer import BLLRegressor
from lastlayer.data.observe import Gradient, Value

ENERGY_NOISE, FORCE_NOISE = 0.005, 0.02
"""Standard deviations in eV and eV/A."""
DEPTH, WIDTH, LENGTH, REPULSION = 1.5, 1.8, 1.2, 0.3


def energy(r: ndarray) -> ndarray:
    """Energy in eV at distances (m, 3) in A."""
    pairs = DEPTH * (1 - np.exp(-WIDTH * (r - LENGTH))) ** 2
    return pairs.sum(1) + REPULSION * np.exp(-(r - LENGTH).sum(1))


def force(r: ndarray) -> ndarray:
    decay = np.exp(-WIDTH * (r - LENGTH))
    return -2 * DEPTH * WIDTH * decay * (1 - decay) + REPULSION * np.exp(-(r - LENGTH).sum(1, keepdims=True))


def geometries(m: int, rng: np.random.Generator) -> ndarray:
    """Distances 12, 13 and 23 of atoms in the plane, moved at random from the corners of a triangle."""
    corners = 1.3 * np.array([[0.0, 0.0], [1.0, 0.0], [0.5, np.sqrt(0.75)]])
    atoms = corners + 0.1 * rng.standard_normal((m, 3, 2))
    return np.linalg.norm(atoms[:, [0, 0, 1]] - atoms[:, [1, 2, 2]], axis=-1)


def main(folder: Path = Path(), seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    X, X_new = geometries(40, rng), geometries(300, rng)
    y = energy(X) + ENERGY_NOISE * rng.standard_normal(len(X))
    calculated = force(X) + FORCE_NOISE * rng.standard_normal(X.shape)
    forces = Gradient().at(X).observed(-calculated, noise_std=FORCE_NOISE)

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    x = np.linspace(1.0, 1.6, 100)
    table = {}
    for name, observations, color in (("energies", [], "C1"), ("energies and forces", [forces], "C0")):
        model = BLLRegressor(n_members=5, hidden_prior=0.03, max_epochs=150, random_state=seed)
        model.fit(X, y, noise_std=ENERGY_NOISE, observations=observations)
        value = model.predictive_of(Value(), X_new)
        table[f"energy, from {name}"] = scores(value, energy(X_new))
        table[f"force, from {name}"] = scores(model.predictive_of(Gradient(), X_new), -force(X_new).ravel())
        left.errorbar(
            energy(X_new), value.mean, 1.645 * value.std, fmt=".", ms=3, lw=0.5, color=color, label=f"from {name}"
        )
        band(right, x, model.predictive_of(Value(), np.tile(x[:, None], 3)), f"from {name}, 90% band", color)
    right.plot(x, energy(np.tile(x[:, None], 3)), "k--", lw=1, label="truth")
    left.axline((0, 0), slope=1, color="k", ls="--", lw=1)
    left.set(xlabel="energy of 300 new geometries, eV", ylabel="prediction and 90% interval, eV")
    right.set(xlabel="side of the equilateral triangle, Å", ylabel="energy, eV")
    report(table)
    save(figure, folder / "molecule_from_forces.png")
    return table


if __name__ == "__main__":
    main(Path(*sys.argv[1:2]))
