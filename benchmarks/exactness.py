"""Comparison of the peers' last layers with the exact posterior: standard deviations at a far point, side by side.

Features are fixed (8 tanh features of 40 rows), noise and prior are known: then the posterior of the last layer is that
of Bayesian linear regression. Needs the environment of requirements-peers.lock.
"""

from typing import Any

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from vbll.utils.distributions import DenseNormalPrec

from benchmarks.runner import aligned, options_of

ROWS, FEATURES, NOISE_STD, PRIOR_PRECISION, FAR = 40, 8, 0.3, 1.0, 3.0


def problem(q: int) -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    X = torch.linspace(-1, 1, ROWS)[:, None]
    Y = torch.cat([torch.sin(2 * X + j) for j in range(q)], 1) + NOISE_STD * torch.randn(ROWS, q)
    network = nn.Sequential(nn.Linear(1, FEATURES), nn.Tanh(), nn.Linear(FEATURES, q))
    return network, X, Y, torch.tensor([[FAR]])


def affine(network: nn.Sequential, X: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([network[:2](X), torch.ones(len(X), 1)], 1)


def exact_std(network: nn.Sequential, X: Tensor, far: Tensor) -> float:
    """By the precision of weights and bias of one output: Phi' Phi / sigma^2 + I times the prior's precision."""
    Phi, phi = affine(network, X), affine(network, far)
    precision = Phi.T @ Phi / NOISE_STD**2 + PRIOR_PRECISION * torch.eye(FEATURES + 1)
    return float((phi @ torch.linalg.solve(precision, phi.T)).sqrt())


def laplace_std(network: nn.Sequential, X: Tensor, Y: Tensor, far: Tensor, structure: str) -> list[float]:
    words = {"subset_of_weights": "last_layer", "hessian_structure": structure}
    model: Any = Laplace(network, "regression", **words, sigma_noise=NOISE_STD, prior_precision=PRIOR_PRECISION)
    model.fit(DataLoader(TensorDataset(X, Y), batch_size=ROWS))
    _, cov = model(far)
    return cov[0].diagonal().sqrt().tolist()


def vbll_std(network: nn.Sequential, X: Tensor, Y: Tensor, far: Tensor) -> list[float]:
    """Standard deviation after updating the last layer's prior by vbll's recursion, row by row."""
    q, root = Y.shape[1], PRIOR_PRECISION**0.5 * torch.eye(FEATURES + 1)
    prior = DenseNormalPrec(torch.zeros(q, FEATURES + 1), root.expand(q, -1, -1))
    cholesky, _ = prior.recursive_update(affine(network, X), Y, torch.full((q,), NOISE_STD**2))
    phi = affine(network, far)
    precision = cholesky @ cholesky.mT
    return [float((phi @ torch.linalg.solve(each, phi.T)).sqrt()) for each in precision]


def main(arguments: list[str] | None = None) -> None:
    options_of(__doc__).parse_args(arguments)
    rows = []
    for q in (1, 2):
        network, X, Y, far = problem(q)
        stds = {"exact": [exact_std(network, X, far)] * q}
        stds |= {f"laplace-torch {name}": laplace_std(network, X, Y, far, name) for name in ("full", "kron", "diag")}
        stds["vbll recursive_update"] = vbll_std(network, X, Y, far)
        rows += [[name, str(q), ", ".join(f"{std:.4f}" for std in found)] for name, found in stds.items()]
    print(aligned([["last layer", "outputs", "std of the function at the far point"], *rows]))


if __name__ == "__main__":
    main()
