"""Methods that propose the next point: lastlayer, BoTorch's Gaussian process and VBLL, Sobol points; a run of one."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from botorch.acquisition import AcquisitionFunction, LogExpectedImprovement
from botorch.acquisition.analytic import PosteriorMean
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.deterministic import GenericDeterministicModel
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.sampling.get_sampler import get_sampler
from botorch.utils.multi_objective.scalarization import get_chebyshev_scalarization
from botorch.utils.sampling import draw_sobol_samples, sample_simplex
from gpytorch.mlls import ExactMarginalLogLikelihood
from jaxtyping import Float
from torch import Tensor

from benchmarks import runner
from benchmarks.bo.problems import PROBLEMS, Problem
from lastlayer.integrations.botorch import fit_model

RESTARTS, RAW_SAMPLES, DRAWS = 4, 256, 64
"""Restarts and raw samples for every acquisition function, and Monte Carlo draws where needed."""
VBLL_EPOCHS = {"first": 3000, "later": 300}


class Optimizer(Protocol):
    def propose(self, X: Float[Tensor, "n d"], Y: Float[Tensor, "n o"]) -> Float[Tensor, "1 d"]: ...


@dataclass(frozen=True)
class Method:
    name: str
    note: str  # description for tables.md
    make: Callable[[Problem, int], Optimizer] = field(repr=False)
    config: str = "1"  # version of the configuration; results of other versions are not reused
    packages: tuple[str, ...] = ("botorch", "gpytorch", "linear_operator")
    modules: tuple[str, ...] = ("botorch", "gpytorch")
    slow: bool = False  # whether to skip problems on which a run would take hours

    def missing(self) -> list[str]:
        return [module for module in self.modules if find_spec(module) is None]


def initial_points(problem: Problem, seed: int, n: int) -> Float[Tensor, "n d"]:
    """The first n of the seed's Sobol points."""
    return draw_sobol_samples(_box(problem), n, 1, seed=seed)[:, 0]


@dataclass
class ByModel:
    """Fits a model to standardised values, then maximises LogEI, or qLogNEHVI for several objectives."""

    problem: Problem
    fit: Callable[[Tensor, Tensor], Model]

    def propose(self, X: Tensor, Y: Tensor) -> Tensor:
        T, centre, scale = _standardised(Y)
        model = self.fit(X, T)
        if self.problem.n_outputs == 1:
            return maximised(LogExpectedImprovement(model, best_f=T.max()), self.problem, RAW_SAMPLES)
        reference = (torch.tensor(self.problem.reference, dtype=Y.dtype) - centre) / scale
        sampler = get_sampler(model.posterior(X[:1]), torch.Size([DRAWS]), seed=len(X))
        words = {"X_baseline": X, "sampler": sampler, "prune_baseline": True}
        acquisition = qLogNoisyExpectedHypervolumeImprovement(model, reference.tolist(), **words)
        return maximised(acquisition, self.problem, RAW_SAMPLES // 2)


def gaussian_process(X: Tensor, T: Tensor) -> Model:
    model = SingleTaskGP(X, T)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


@dataclass
class Vbll:
    """Thompson sampling with BoTorch's community VBLL; features are reused from step to step, as its authors advise.

    For several objectives, which its posterior lacks, a sampled network under a random Chebyshev scalarisation.
    """

    problem: Problem
    state: dict[str, Any] | None = None

    def propose(self, X: Tensor, Y: Tensor) -> Tensor:
        from botorch_community.acquisition.bll_thompson_sampling import BLLMaxPosteriorSampling
        from botorch_community.models.vblls import VBLLModel

        T = _standardised(Y)[0]
        model = VBLLModel(in_features=X.shape[1], hidden_features=64, num_layers=3, out_features=T.shape[1])
        settings = {"num_epochs": VBLL_EPOCHS["first" if self.state is None else "later"]}
        model.fit(X, T, optimization_settings=settings, initialization_params=self.state)
        self.state = {name: value.clone() for name, value in model.model.state_dict().items()}
        if T.shape[1] == 1:
            found: Tensor = BLLMaxPosteriorSampling(model, num_restarts=5)(num_samples=1).detach()
            return found
        drawn, weights = model.sample(), sample_simplex(T.shape[1], dtype=T.dtype).squeeze()
        scalarised = get_chebyshev_scalarization(weights, T)

        def value(x: Tensor) -> Tensor:
            return scalarised(drawn(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], T.shape[1]))[..., None]

        return maximised(PosteriorMean(GenericDeterministicModel(value)), self.problem, RAW_SAMPLES)


@dataclass
class Sobol:
    problem: Problem
    seed: int

    def propose(self, X: Tensor, Y: Tensor) -> Tensor:
        return initial_points(self.problem, self.seed, len(X) + 1)[-1:]


def maximised(acquisition: AcquisitionFunction, problem: Problem, raw_samples: int) -> Float[Tensor, "1 d"]:
    options = {"batch_limit": RESTARTS, "maxiter": 100, "sample_around_best": True}
    found, _ = optimize_acqf(
        acquisition, _box(problem), q=1, num_restarts=RESTARTS, raw_samples=raw_samples, options=options
    )
    return found.detach()


def _box(problem: Problem) -> Float[Tensor, "2 d"]:
    return torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, problem.n_inputs)


def _standardised(Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    centre, scale = Y.mean(0), Y.std(0).clamp_min(1e-12)
    return (Y - centre) / scale, centre, scale


def _lastlayer(problem: Problem, seed: int) -> Optimizer:
    return ByModel(problem, lambda X, T: fit_model(X, T, bounds=_box(problem), random_state=seed))


_OURS = "`lastlayer.integrations.botorch.fit_model`, fitted at every step; LogEI or qLogNEHVI"
_THEIRS = "BoTorch's Gaussian process and its fit at their defaults, fitted anew at every step; LogEI or qLogNEHVI"
_VBLL = (
    "BoTorch community's VBLLModel as in its tutorial (3 + 1 layers of 64, AdamW at 1e-3), but at most "
    f"{VBLL_EPOCHS['first']:,} epochs in the first step and {VBLL_EPOCHS['later']} in each later one, which begins at "
    "the last weights; Thompson sampling by BLLMaxPosteriorSampling, for two objectives under random Chebyshev weights"
)
METHODS = {
    method.name: method
    for method in (
        Method("lastlayer", _OURS, _lastlayer, config="2"),
        Method("SingleTaskGP", _THEIRS, lambda problem, _: ByModel(problem, gaussian_process)),
        Method("VBLL", _VBLL, lambda problem, _: Vbll(problem), modules=("botorch_community",), slow=True),
        Method("random", "Sobol points", Sobol),
    )
}


@dataclass(frozen=True)
class Result:
    problem: str
    method: str
    seed: int
    config: str
    regret: list[float]  # regret after every evaluation, including the initial ones
    seconds: list[float]  # processor seconds of each step: fit and search for the next point
    versions: dict[str, str]


@dataclass(frozen=True)
class Job(runner.Job):
    """One run, identified by names only so that any process can execute it."""

    problem: str
    method: str
    seed: int
    n_steps: int

    def __str__(self) -> str:
        return f"{self.method} on {self.problem}, seed {self.seed}"

    @property
    def key(self) -> tuple[str, str, int, str]:
        config = f"{PROBLEMS[self.problem].n_initial} + {self.n_steps}, {METHODS[self.method].config}"
        return self.problem, self.method, self.seed, config

    def run(self) -> Result:
        torch.set_num_threads(1)
        problem, method = PROBLEMS[self.problem], METHODS[self.method]
        function, optimiser = problem.make(self.seed), method.make(problem, self.seed)
        torch.manual_seed(self.seed)
        X = initial_points(problem, self.seed, problem.n_initial)
        Y, seconds = function(X), []
        for _ in range(self.n_steps):
            start = time.process_time()
            x = optimiser.propose(X, Y)
            seconds.append(round(time.process_time() - start, 4))
            X, Y = torch.cat([X, x]), torch.cat([Y, function(x)])
        return Result(*self.key, problem.regret(Y), seconds, runner.versions(method.packages))
