"""Gaussian processes by GPyTorch: exact up to a number of rows, with inducing points above."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from benchmarks.uci.protocol import Gaussians, Predict, Task
from benchmarks.uci.stacks import Scaler

EXACT_ROWS = 10_000  # above this many rows: inducing points
PRETRAINING_ROWS = 3_000
"""Above this many rows: most iterations on as many random rows, the last few on all (Wang et al., 2019)."""
ITERATIONS, FULL_ITERATIONS, RATE = 200, 5, 0.1
LEAST_NOISE = 1e-6
"""Smallest noise variance of standardised targets: the default of 1e-4 exceeds the noise of some tables."""
INDUCING, SPARSE_EPOCHS, SPARSE_BATCH, SPARSE_RATE = 500, 100, 1024, 1e-2


Process = Callable[[Tensor], tuple[Tensor, Tensor]]  # mean and variance of standardised targets at standardised inputs


def gaussian_process(X: ndarray, y: ndarray, task: Task) -> Predict:
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


def _model(kind: Any, n_inputs: int, given: Callable[[Any], tuple[Any, ...]]) -> Any:
    """A model of GPyTorch of that kind, with a constant mean and the kernel; `given` makes what it starts from."""
    import gpytorch

    class Model(kind):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__(*given(self))
            kernel = gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=n_inputs)
            self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), gpytorch.kernels.ScaleKernel(kernel)

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    return Model()


class _Climb:
    """Adam with a cosine schedule on an objective."""

    def __init__(self, parameters: Any, rate: float, length: int) -> None:
        self.adam = torch.optim.Adam(parameters, lr=rate)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.adam, length, rate / 100)

    def step(self, loss: Tensor) -> None:
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()


def _exact(x: Float[Tensor, "m d"], t: Float[Tensor, " m"]) -> Process:
    import gpytorch

    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(LEAST_NOISE))
    model = _model(gpytorch.models.ExactGP, x.shape[1], lambda _: (x, t, likelihood)).to(x)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)

    def climb(rows: Tensor, iterations: int) -> None:
        model.train()
        model.set_train_data(x[rows], t[rows], strict=False)
        climbing = _Climb(model.parameters(), RATE, iterations)
        for _ in range(iterations):
            climbing.step(-objective(model(x[rows]), t[rows]))
            climbing.schedule.step()

    order = torch.randperm(len(x)).to(x.device)
    climb(order[:PRETRAINING_ROWS], ITERATIONS)
    if len(x) > PRETRAINING_ROWS:
        climb(order, FULL_ITERATIONS)
    model.eval()

    def process(x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        predictive = likelihood(model(x))
        return predictive.mean, predictive.variance

    return process


def _sparse(x: Float[Tensor, "m d"], t: Float[Tensor, " m"]) -> Process:
    """Fit by stochastic variational inference; inducing points start at random rows (Hensman et al., 2015)."""
    import gpytorch

    points = x[torch.randperm(len(x))[:INDUCING].to(x.device)].clone()
    distribution = gpytorch.variational.CholeskyVariationalDistribution(len(points))
    strategy = lambda model: (gpytorch.variational.VariationalStrategy(model, points, distribution),)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(x)
    model = _model(gpytorch.models.ApproximateGP, x.shape[1], strategy).to(x)
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    climbing = _Climb([*model.parameters(), *likelihood.parameters()], SPARSE_RATE, SPARSE_EPOCHS)
    for _ in range(SPARSE_EPOCHS):
        for rows in torch.randperm(len(x)).to(x.device).split(SPARSE_BATCH):
            climbing.step(-objective(model(x[rows]), t[rows]))
        climbing.schedule.step()
    model.eval()

    def process(x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        parts = [likelihood(model(rows)) for rows in x.split(SPARSE_BATCH)]
        return torch.cat([p.mean for p in parts]), torch.cat([p.variance for p in parts])

    return process
