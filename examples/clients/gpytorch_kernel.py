"""The last layer as a kernel of GPyTorch: its posterior is that of the model, and it can be added to other kernels.

    python examples/clients/gpytorch_kernel.py

The prior covariance of the function is alpha sigma^2 phi(x) phi(x')', with the features phi of the network. The table
shows a sum of the kernel and an RBF kernel beside it. Exact Gaussian processes cost the cube of the number of rows,
the last layer only the cube of the number of features.
"""

import argparse
import copy
from collections.abc import Sequence

import gpytorch
import numpy as np
import torch
from torch import Tensor

from lastlayer import BLLRegressor

FLAT = 1e6
"""Variance of the bias over that of the noise: its prior is flat, as nearly as a Cholesky factor in float64 allows."""


class LastLayerKernel(gpytorch.kernels.Kernel):  # type: ignore[misc]
    """Prior covariance of a model with one network and one output, whose features are centred on the training rows."""

    def __init__(self, model: BLLRegressor, X: Tensor) -> None:
        super().__init__()
        self.network, self.inputs = copy.deepcopy(model.members_[0].network), model.fitted_.inputs
        self.noise_var, self.alpha = float(model.noise_std_[0]) ** 2, model.alpha_star_
        self.centre = self.network(self.inputs.forward(X)).mean(0)

    def train(self, mode: bool = True) -> "LastLayerKernel":
        """Keep dropout and batch statistics of the network off; other kernels of a sum may be trained."""
        return super().train(False)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **_: object) -> Tensor:
        one, two = (self.network(self.inputs.forward(x)) - self.centre for x in (x1, x2))
        between = (one * two).sum(-1) if diag else one @ two.mT
        return self.noise_var * (self.alpha * between + FLAT)


class LastLayerGP(gpytorch.models.ExactGP):  # type: ignore[misc]
    """A Gaussian process with the model's kernel and noise, and any kernel to be added, given the training rows."""

    def __init__(self, model: BLLRegressor, X: Tensor, y: Tensor, *, added: gpytorch.kernels.Kernel = None) -> None:
        likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.Positive()).double()
        likelihood.noise = float(model.noise_std_[0]) ** 2
        super().__init__(X, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean().double()
        self.mean_module.initialize(constant=y.mean())
        kernel = LastLayerKernel(model, X)
        self.covar_module = kernel if added is None else kernel + added
        self.eval()

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def main(arguments: Sequence[str] | None = None) -> dict[str, tuple[float, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=2_000)
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (options.rows, 1))
    y = np.sin(4 * X[:, 0]) + 0.1 * rng.standard_normal(options.rows)
    model = BLLRegressor(hidden=(20,), preset="evidence", max_epochs=options.epochs, random_state=0).fit(X, y)
    rbf = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
    rows, points = (torch.tensor(X), torch.tensor(y)), np.array([[0.0], [2.0]])
    table = {"lastlayer": tuple(model.predictive(points, noise=False).std.tolist())}
    for name, added in (("GPyTorch", None), ("with an RBF kernel", rbf)):
        with torch.no_grad():
            table[name] = tuple(LastLayerGP(model, *rows, added=added)(torch.tensor(points)).stddev.tolist())
    print("standard deviation of the function, inside | outside")
    for name, (inside, outside) in table.items():
        print(f"{name}, {inside:.4f} | {outside:.4f}")
    return table


if __name__ == "__main__":
    main()
