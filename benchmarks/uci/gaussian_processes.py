"""Gaussian processes by GPyTorch: exact up to a number of rows, with inducing points above."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from benchmarks.uci.protocol import Gaussians, Predict, Task
from benchmarks.uci.stacks import Scaler

EXACT_ROWS = 10_000
"""Above this many rows: inducing points."""
PRETRAINING_ROWS = 3_000
"""Above this many rows: most iterations on as many random rows, the last few on all (Wang et al., 2019)."""
ITERATIONS, FULL_ITERATIONS, RATE = 200, 5, 0.1
LEAST_NOISE = 1e-6
"""Smallest noise variance of standardised targets: the default of 1e-4 exceeds the noise of some tables."""
INDUCING, SPARSE_EPOCHS, SPARSE_BATCH, SPARSE_RATE = 500, 100, 1024, 1e-2


Process = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Mean and variance of standardised targets at standardised inputs."""


def gaussian_process(X: ndarray, y: ndarray, task: Task) -> Predict:
    """Fit a constant mean and Matern 5/2 with one length scale per input by the marginal likelihood."""
    import gpytorch  # type: ignore[import-not-found, unused-ignore]

    dtype = torch.float64
    scaler = Scaler.fit(X, y)
    x, t = scaler.inputs(X, task.device, dtype), scaler.targets(y, task.device, dtype)
    with gpytorch.settings.max_cholesky_size(EXACT_ROWS), torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        process = (_exact if len(x) <= EXACT_ROWS else _sparse)(x, t)

    def predict(X: ndarray) -> Gaussians:
        settings = gpytorch.settings
        with settings.max_cholesky_size(EXACT_ROWS), settings.fast_pred_var(), torch.no_grad():
            mean, var = process(scaler.inputs(X, task.device, dtype))
        return Gaussians(scaler.mean(mean)[None], scaler.var(var)[None])

    predict(X[:1])  # the factorisation of the first prediction counts as part of the fit
    return predict


def _exact(x: Float[Tensor, "m d"], t: Float[Tensor, " m"]) -> Process:
    import gpytorch

    class Model(gpytorch.models.ExactGP):  # type: ignore[misc, unused-ignore]
        def __init__(self, likelihood: Any) -> None:
            super().__init__(x, t, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = _kernel(x.shape[1])

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(LEAST_NOISE))
    model = Model(likelihood).to(x)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)

    def climb(rows: Tensor, iterations: int, rate: float) -> None:
        model.train()
        model.set_train_data(x[rows], t[rows], strict=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations, rate / 100)
        for _ in range(iterations):
            optimizer.zero_grad()
            loss = -objective(model(x[rows]), t[rows])
            loss.backward()
            optimizer.step()
            schedule.step()

    order = torch.randperm(len(x)).to(x.device)
    climb(order[:PRETRAINING_ROWS], ITERATIONS, RATE)
    if len(x) > PRETRAINING_ROWS:
        climb(order, FULL_ITERATIONS, RATE)
    model.eval()

    def process(x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        predictive = likelihood(model(x))
        return predictive.mean, predictive.variance

    return process


def _sparse(x: Float[Tensor, "m d"], t: Float[Tensor, " m"]) -> Process:
    """Fit by stochastic variational inference; inducing points start at random rows (Hensman et al., 2015)."""
    import gpytorch

    class Model(gpytorch.models.ApproximateGP):  # type: ignore[misc, unused-ignore]
        def __init__(self, points: Tensor) -> None:
            distribution = gpytorch.variational.CholeskyVariationalDistribution(len(points))
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution))
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = _kernel(x.shape[1])

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(x)
    model = Model(x[torch.randperm(len(x))[:INDUCING].to(x.device)].clone()).to(x)
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=SPARSE_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SPARSE_EPOCHS, SPARSE_RATE / 100)
    for _ in range(SPARSE_EPOCHS):
        for rows in torch.randperm(len(x)).to(x.device).split(SPARSE_BATCH):
            optimizer.zero_grad()
            loss = -objective(model(x[rows]), t[rows])
            loss.backward()
            optimizer.step()
        schedule.step()
    model.eval()

    def process(x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        parts = [likelihood(model(rows)) for rows in x.split(SPARSE_BATCH)]
        return torch.cat([p.mean for p in parts]), torch.cat([p.variance for p in parts])

    return process


def _kernel(n_inputs: int) -> Any:
    import gpytorch

    return gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=n_inputs))
