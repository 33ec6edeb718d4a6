"""Clusters of atoms as graphs: energies are sums over nodes, forces are their gradients, and both are observed.

    python examples/clients/atoms.py

Nodes are atoms, edges are pairs closer than a cutoff. A node is described by a few sums over its edges, and its share
of the energy is a function of these. No calculation gives this share, but the energy of a cluster is its sum over the
nodes, and a force is a sum over nodes of its gradient along the motion of an atom. Both are linear functionals of the
function (`lastlayer.observe`), for clusters of any size. In dimers, triangles and tetrahedra all atoms are equivalent,
so there the share is known: the energy divided by the number of atoms.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from lastlayer import BLLRegressor
from lastlayer.data.observe import Functionals

ENERGY_NOISE, FORCE_NOISE = 0.005, 0.02
"""In eV and eV/A."""
CUTOFF, CENTRES, MOST = 3.5, torch.linspace(0.8, 3.2, 8, dtype=torch.float64), 6
"""Cutoff of edges in A; centres of the shells in which a node counts its neighbours; atoms in the largest cluster."""


def edges(places: Tensor) -> tuple[Tensor, Tensor]:
    """Distances of all pairs (n, n) and their weights: smoothly zero at the cutoff, and zero on the diagonal."""
    n = len(places)
    apart = places[:, None] - places + torch.eye(n, dtype=places.dtype)[..., None]
    r = apart.square().sum(-1).sqrt()
    share = torch.where(r < CUTOFF, torch.cos(torch.pi * r / (2 * CUTOFF)).square(), 0.0)
    return r, share * (1 - torch.eye(n, dtype=places.dtype))


def nodes(places: Tensor) -> Tensor:
    """Description of each atom (n, d): weighted counts of neighbours in shells."""
    r, share = edges(places)
    return (share[..., None] * torch.exp(-4 * (r[..., None] - CENTRES).square())).sum(1)


def energy(places: Tensor) -> Tensor:
    """True energy in eV (artificial): each atom repels its neighbours and is bound by the root of their density."""
    r, share = edges(places)
    repulsion = (share * 2.0 * torch.exp(-3.0 * (r - 1.2))).sum(1)
    density = (share * torch.exp(-1.5 * (r - 1.2))).sum(1)
    return (0.5 * repulsion - torch.sqrt(density + 1e-6)).sum()


def cluster(n: int, rng: np.random.Generator) -> Tensor:
    """A random cluster of atoms, none of them too close."""
    while True:
        places = rng.normal(0, 0.55 * n ** (1 / 3), (n, 3))
        r = np.linalg.norm(places[:, None] - places, axis=-1)[np.triu_indices(n, 1)]
        if r.min() > 1.0 and np.sort(r)[n - 2] < 2.5:
            return torch.tensor(places)


def regular(n: int, length: float) -> Tensor:
    """A dimer, a triangle or a tetrahedron with edges of that length."""
    corners = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=torch.float64)[:n]
    return corners * length / 8**0.5


def energies_of(clusters: Sequence[Tensor]) -> Functionals:
    """Sum over the nodes of each cluster; small clusters are padded with nodes of weight zero."""
    points, weights = np.zeros((len(clusters), MOST, len(CENTRES))), np.zeros((len(clusters), MOST))
    for i, places in enumerate(clusters):
        points[i, : len(places)], weights[i, : len(places)] = nodes(places), 1.0
    return Functionals(points, weights)


def forces_of(clusters: Sequence[Tensor]) -> Functionals:
    """Minus the slope of each cluster's energy by every coordinate: a node's gradient along how what it sees moves."""
    points, directions = [], []
    for places in clusters:
        seen = np.zeros((MOST, len(CENTRES)))
        seen[: len(places)] = nodes(places)
        slopes = torch.autograd.functional.jacobian(nodes, places).flatten(2).movedim(-1, 0)  # (3n, n, d)
        moves = np.zeros((len(slopes), MOST, len(CENTRES)))
        moves[:, : len(places)] = -slopes.numpy()
        points.append(np.broadcast_to(seen, moves.shape))
        directions.append(moves)
    every = np.concatenate(points)
    return Functionals(every, np.zeros(every.shape[:2]), np.concatenate(directions))


def true_forces(clusters: Sequence[Tensor]) -> ndarray:
    slopes = [torch.autograd.functional.jacobian(energy, places).flatten() for places in clusters]
    return -torch.cat(slopes).numpy()


def main(arguments: Sequence[str] | None = None) -> dict[str, tuple[float, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=30)
    parser.add_argument("--new", type=int, default=100, help="clusters to predict")
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=150)
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    alike = [regular(n, length) for n in (2, 3, 4) for length in np.linspace(1.0, 2.6, 8)]
    X = np.stack([nodes(places)[0].numpy() for places in alike])
    y = np.array([float(energy(places)) / len(places) for places in alike])
    some = [cluster(int(n), rng) for n in rng.integers(3, MOST + 1, options.clusters)]
    new = [cluster(int(n), rng) for n in rng.integers(3, MOST + 1, options.new)]
    total, push = np.array([float(energy(places)) for places in some]), true_forces(some)
    energies = energies_of(some).observed(total + ENERGY_NOISE * rng.standard_normal(len(total)), ENERGY_NOISE)
    forces = forces_of(some).observed(push + FORCE_NOISE * rng.standard_normal(len(push)), FORCE_NOISE)

    table: dict[str, tuple[float, float]] = {}
    truth = np.array([float(energy(places)) for places in new]), true_forces(new)
    print(f"{'from':24}{'':8}{'rmse':>8}{'inside 90%':>12}")
    for name, observations in (("energies", [energies]), ("energies and forces", [energies, forces])):
        model = BLLRegressor(
            n_members=options.members, hidden_prior=0.03, max_epochs=options.epochs, random_state=0
        ).fit(X, y, noise_std=ENERGY_NOISE, observations=observations)
        for what, functionals, true in zip(("energy", "force"), (energies_of(new), forces_of(new)), truth, strict=True):
            said = model.predictive_of(functionals)
            lower, upper = said.interval(0.9)
            rmse, inside = np.sqrt(np.mean((said.mean - true) ** 2)), np.mean((lower < true) & (true < upper))
            table[f"{what}, from {name}"] = float(rmse), float(inside)
            print(f"{name:24}{what:8}{rmse:8.3f}{inside:12.0%}")
    return table


if __name__ == "__main__":
    main()
