"""Gaussian processes by GPyTorch, exact up to a number of rows and with inducing points above, or by scikit-learn."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from benchmarks.uci.protocol import Gaussians, Predict, Task
from benchmarks.uci.stacks import Standard, standardised

EXACT_ROWS = 10_000  # above this many rows: inducing points
PRETRAINING_ROWS = 3_000
"""Above this many rows: most iterations on as many random rows, the last few on all (Wang et al., 2019)."""
ITERATIONS, FULL_ITERATIONS, RATE = 200, 5, 0.1
LEAST_NOISE = 1e-6
"""Smallest noise variance of standardised targets: the default of 1e-4 exceeds the noise of some tables."""
INDUCING, SPARSE_EPOCHS, SPARSE_BATCH, SPARSE_RATE = 500, 100, 1024, 1e-2


@partial(standardised, dtype=torch.float64)
def gaussian_process(x: Tensor, t: Tensor, task: Task) -> Standard:
    from gpytorch import settings  # type: ignore[import-not-found, unused-ignore]

    with settings.max_cholesky_size(EXACT_ROWS), torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        process = (_exact if len(x) <= EXACT_ROWS else _sparse)(x, t)

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        with settings.max_cholesky_size(EXACT_ROWS), settings.fast_pred_var(), torch.no_grad():
            return process(x)

    predict(x[:1])  # the factorisation of the first prediction counts as part of the fit
    return predict


def gaussians_of(process: Any) -> Predict:
    """The prediction of a fitted process of scikit-learn."""

    def predict(X: ndarray) -> Gaussians:
        mean, std = process.predict(X, return_std=True)
        return Gaussians(mean[None], np.square(std)[None])

    return predict


def process_of(kind: Any, kernel: Any, given: Callable[[Any], tuple[Any, ...]], *, gradients: bool = False) -> Any:
    """A model of GPyTorch with a constant mean and a scaled kernel; `given` makes what it starts from."""
    from gpytorch import distributions, kernels, means

    mean = means.ConstantMeanGrad() if gradients else means.ConstantMean()
    normal = distributions.MultitaskMultivariateNormal if gradients else distributions.MultivariateNormal

    class Process(kind):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__(*given(self))
            self.mean_module, self.covar_module = mean, kernels.ScaleKernel(kernel)

        def forward(self, x: Tensor) -> Any:
            return normal(self.mean_module(x), self.covar_module(x))

    return Process()


def variational_process(points: Tensor, kernel: Any) -> Any:
    from gpytorch import models, variational

    distribution = variational.CholeskyVariationalDistribution(len(points))
    strategy = lambda model: (variational.VariationalStrategy(model, points, distribution),)
    return process_of(models.ApproximateGP, kernel, strategy)


def _kernel(x: Tensor) -> Any:
    from gpytorch.kernels import MaternKernel

    return MaternKernel(nu=2.5, ard_num_dims=x.shape[1])


def _climb(
    parameters: Any, loss: Callable[[Tensor], Tensor], batches: Callable[[], Sequence[Tensor]], rate: float, epochs: int
) -> None:
    """Adam with a cosine schedule, on batches of rows."""
    adam = torch.optim.Adam(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, epochs, rate / 100)
    for _ in range(epochs):
        for rows in batches():
            adam.zero_grad()
            loss(rows).backward()
            adam.step()
        schedule.step()


def _exact(x: Float[Tensor, "m d"], t: Float[Tensor, " m"]) -> Standard:
    import gpytorch

    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(LEAST_NOISE))
    model = process_of(gpytorch.models.ExactGP, _kernel(x), lambda _: (x, t, likelihood)).to(x)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    loss = lambda rows: -objective(model(x[rows]), t[rows])

    def climb(rows: Tensor, iterations: int) -> None:
        model.train()
        model.set_train_data(x[rows], t[rows], strict=False)
        _climb(model.parameters(), loss, lambda: [rows], RATE, iterations)

    order = torch.randperm(len(x)).to(x.device)
    climb(order[:PRETRAINING_ROWS], ITERATIONS)
    if len(x) > PRETRAINING_ROWS:
        climb(order, FULL_ITERATIONS)
    model.eval()

    def process(x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        predictive = likelihood(model(x))
        return predictive.mean, predictive.variance

    return process


def _sparse(x: Float[Tensor, "m d"], t: Float[Tensor, " m"]) -> Standard:
    """Fit by stochastic variational inference; inducing points start at random rows (Hensman et al., 2015)."""
    import gpytorch

    points = x[torch.randperm(len(x))[:INDUCING].to(x.device)].clone()
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(x)
    model = variational_process(points, _kernel(x)).to(x)
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    batches = lambda: torch.randperm(len(x)).to(x.device).split(SPARSE_BATCH)
    parameters = [*model.parameters(), *likelihood.parameters()]
    _climb(parameters, lambda rows: -objective(model(x[rows]), t[rows]), batches, SPARSE_RATE, SPARSE_EPOCHS)
    model.eval()

    def process(x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        parts = [likelihood(model(rows)) for rows in x.split(SPARSE_BATCH)]
        return torch.cat([p.mean for p in parts]), torch.cat([p.variance for p in parts])

    return process
