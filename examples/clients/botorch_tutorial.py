"""BoTorch's closed loop with noisy constraints, as in its tutorial, with another class of model.

    python examples/clients/botorch_tutorial.py

Batches of q points maximize Hartmann's function of six inputs subject to |x|_1 <= 3. Objective and constraint are
measured with noise of known variance. One `SingleTaskBLL` models both outputs, and qLogNEI selects the batch. The
script prints the best feasible value found next to those of `SingleTaskGP` and of Sobol points; the maximum is 3.32.
"""

import argparse
import warnings
from collections.abc import Sequence

import torch
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.acquisition.objective import GenericMCObjective
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import Hartmann
from botorch.utils.sampling import draw_sobol_samples
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from lastlayer.integrations.botorch import SingleTaskBLL

NOISE_STD, BOX = 0.1, torch.stack([torch.zeros(6), torch.ones(6)]).double()
hartmann = Hartmann(negate=True).double()


def outcomes(X: Tensor) -> Tensor:
    """The objective, and the constraint, which must not be positive."""
    return torch.stack([hartmann(X), X.sum(-1) - 3], -1)


def best_feasible(X: Tensor) -> float:
    exact = outcomes(X)
    feasible = exact[exact[:, 1] <= 0, 0]
    return float(feasible.max()) if len(feasible) else float("nan")


def optimized(model_class: type[Model] | None, batches: int, q: int, seed: int) -> float:
    """Best feasible value after so many batches; Sobol points if there is no model."""
    torch.manual_seed(seed)
    noise = torch.Generator().manual_seed(seed)
    X = draw_sobol_samples(BOX, n=10, q=1, seed=seed)[:, 0]
    if model_class is None:
        return best_feasible(draw_sobol_samples(BOX, n=10 + batches * q, q=1, seed=seed)[:, 0])
    Y = outcomes(X) + NOISE_STD * torch.randn(len(X), 2, generator=noise).double()
    for _ in range(batches):
        model = model_class(X, Y, torch.full_like(Y, NOISE_STD**2), outcome_transform=Standardize(2))
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        acquisition = qLogNoisyExpectedImprovement(
            model,
            X,
            SobolQMCNormalSampler(torch.Size([64]), seed=seed),
            objective=GenericMCObjective(lambda Z, X=None: Z[..., 0]),
            constraints=[lambda Z: Z[..., 1]],
            prune_baseline=True,
        )
        new, _ = optimize_acqf(acquisition, BOX, q=q, num_restarts=4, raw_samples=64)
        X = torch.cat([X, new.detach()])
        seen = outcomes(new.detach()) + NOISE_STD * torch.randn(q, 2, generator=noise).double()
        Y = torch.cat([Y, seen])
    return best_feasible(X)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=15)
    parser.add_argument("--q", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    table = {}
    for model_class in (SingleTaskBLL, SingleTaskGP, None):
        name = "Sobol points" if model_class is None else model_class.__name__
        with warnings.catch_warnings():  # of the search for the best batch, which starts again by itself
            warnings.simplefilter("ignore")
            table[name] = optimized(model_class, options.batches, options.q, options.seed)
        points = 10 + options.batches * options.q
        print(f"{name:16}best feasible value after {points} points: {table[name]:.3f}")
    return table


if __name__ == "__main__":
    main()
