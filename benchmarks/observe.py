"""Observations other than values: partly missing targets, and an energy learned from its gradients.

The first part fits a table with four outputs, half of whose targets are missing, beside dropping rows, filling in means
and one model per output. The second learns an energy of three distances from a few energies and gradients, beside a
Gaussian process with derivatives (GPyTorch; skipped if not installed). A second run computes what is missing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from benchmarks import runner
from benchmarks.runner import Job, Rows
from benchmarks.timing import describe_machine, timed
from benchmarks.uci.gaussian_processes import process_of
from lastlayer import BLLRegressor, metrics
from lastlayer.data.observe import Gradient, Value

TEST_ROWS, LEVEL = 1_000, 0.9


@dataclass(frozen=True)
class Run:
    method: str
    size: int  # rows with targets, or points with gradients
    seed: int
    wall: float
    cpu: float
    scores: dict[str, float]


ROWS, INPUTS, NOISE, MISSING = 400, 5, 0.1, 0.5
INCOMPLETE, COMPLETE = "lastlayer, incomplete table", "lastlayer, complete table"


def outputs(X: Float[ndarray, "m 5"]) -> Float[ndarray, "m 4"]:
    a, b, c = np.sin(2 * X[:, 0] + X[:, 1]), X[:, 2] * X[:, 3], np.tanh(2 * X[:, 4] - X[:, 1])
    return np.stack([a + b / 2, b + c / 2, c - a / 2, (a + b + c) / 2], 1)


def draw_known(shape: tuple[int, int], rng: np.random.Generator) -> Bool[ndarray, "m q"]:
    """Draw the mask of known targets, with at least one in every row."""
    known = rng.random(shape) >= MISSING
    empty = np.flatnonzero(~known.any(1))
    known[empty, rng.integers(shape[1], size=len(empty))] = True
    return known


Tables = list[tuple[ndarray, ndarray]]
WAYS: dict[str, Callable[[ndarray, ndarray, ndarray], Tables]] = {
    INCOMPLETE: lambda X, Y, known: [(X, Y)],
    "rows without gaps alone": lambda X, Y, known: [(X[known.all(1)], Y[known.all(1)])],
    "gaps filled with means": lambda X, Y, known: [(X, np.where(known, Y, np.nanmean(Y, 0)))],
    "one model for each output": lambda X, Y, known: [(X[k], y[k]) for y, k in zip(Y.T, known.T, strict=True)],
    COMPLETE: lambda X, Y, known: [(X, Y)],
}
"""The tables that models are fitted to, from rows whose unknown targets are NaN."""


def score_targets(models: Sequence[BLLRegressor], X: ndarray, Y: ndarray) -> dict[str, float]:
    """Score predictions; the LPD is summed over outputs scored separately, so that models per output compare."""
    predictions = [model.predictive(X) for model in models]
    columns = np.split(Y, np.cumsum([p.n_outputs for p in predictions])[:-1], axis=1)

    def each(metric: Callable[..., Any]) -> ndarray:
        parts = zip(predictions, columns, strict=True)
        return np.concatenate([np.atleast_1d(metric(p, y, per_output=True)) for p, y in parts])

    inside = each(partial(metrics.coverage, level=LEVEL)).mean()
    lpd, crps = each(metrics.log_predictive_density).sum(), each(metrics.crps).mean()
    return {"lpd": float(lpd), "crps": float(crps), "coverage": float(inside)}


@dataclass(frozen=True)
class Missing(Job):
    way: str
    seed: int
    preset: str

    def run(self) -> Run:
        rng = np.random.default_rng(self.seed)
        X = rng.uniform(-1.5, 1.5, (ROWS + TEST_ROWS, INPUTS))
        Y = outputs(X)
        Y += NOISE * rng.normal(size=Y.shape)
        X, new, Y, Y_new = X[:ROWS], X[ROWS:], Y[:ROWS], Y[ROWS:]
        seen = Y if self.way == COMPLETE else np.where(draw_known(Y.shape, rng), Y, np.nan)
        warm_up()
        fit = lambda X, Y: BLLRegressor(preset=self.preset, random_state=self.seed).fit(X, Y)
        tables = WAYS[self.way](X, seen, ~np.isnan(seen))
        models, cpu, wall = timed(lambda: [fit(*table) for table in tables])
        return Run(self.way, len(seen), self.seed, wall, cpu, score_targets(models, new, Y_new))


def missing_table(runs: Sequence[Run]) -> Rows:
    title = f"{ROWS} rows, 4 outputs, {MISSING:.0%} of the targets missing, {TEST_ROWS:,} new rows"
    rows = [[title, "LPD", "CRPS", f"{LEVEL:.0%} coverage", "wall s", "cpu s", "cpu / complete"]]
    groups = runner.grouped(runs, lambda run: run.method)
    cpu = {method: float(np.mean([run.cpu for run in own])) for method, own in groups.items()}
    for method, own in groups.items():
        scores = scores_of(own, {"lpd": 2, "crps": 4, "coverage": 3})
        rows.append([method, *scores, *seconds_of(own), f"{cpu[method] / cpu[COMPLETE]:.2f}"])
    return rows


ENERGIES, GRADIENTS, TIMES = 30, 50, 10
NOISES = np.array([0.01, 0.05, 0.05, 0.05])
"""Noise of an energy and of the three components of a gradient; known to all methods."""
DEPTH, STIFFNESS, REST = np.array([1.0, 0.8, 0.6]), np.array([1.2, 1.5, 1.3]), np.array([1.0, 1.1, 1.6])
HIDDEN, STEPS, STEP_SIZE = (50, 50), 200, 0.05
ALONE, EVIDENCE, FAST = (f"lastlayer, {seen}" for seen in ("energies alone", "both", "both, preset fast"))
WAVES, PROCESS = "lastlayer, both, Fourier features", "exact process, both"
Predict = Callable[[ndarray], tuple[Float[ndarray, "m 4"], Float[ndarray, "m 4"]]]
"""Mean and variance of energies and gradients, without noise."""


def surface(X: Float[ndarray, "m 3"]) -> Float[ndarray, "m 4"]:
    """Energy and gradient of three atoms from their distances: a Morse term for each pair, and one of all three."""
    decay, triple = np.exp(-STIFFNESS * (X - REST)), 0.5 / X.prod(1)
    energy = (DEPTH * np.square(1 - decay)).sum(1) + triple
    gradient = 2 * DEPTH * STIFFNESS * (1 - decay) * decay - triple[:, None] / X
    return np.column_stack([energy, gradient])


class Measured(NamedTuple):
    X: ndarray
    energies: ndarray
    X_gradients: ndarray
    gradients: ndarray

    @classmethod
    def draw(cls, n: int, k: int, rng: np.random.Generator) -> "Measured":
        X, Y = draw_points(n + k, rng)
        return cls(X[:n], Y[:n, 0], X[n:], Y[n:, 1:])


def draw_points(m: int, rng: np.random.Generator) -> tuple[Float[ndarray, "m 3"], Float[ndarray, "m 4"]]:
    X = rng.uniform(0.8, 2.2, (m, 3))
    return X, surface(X) + NOISES * rng.normal(size=(m, 4))


def network(data: Measured, seed: int, *, gradients: bool = True, hidden: Any = HIDDEN, **options: Any) -> Predict:
    noise_std = np.broadcast_to(NOISES[1:], data.gradients.shape)
    seen = [Gradient().at(data.X_gradients).observed(data.gradients, noise_std=noise_std)] if gradients else []
    model = BLLRegressor(hidden, **{"preset": "evidence", "random_state": seed, **options})
    model.fit(data.X, data.energies, noise_std=NOISES[0], observations=seen)

    def predict(X: ndarray) -> tuple[ndarray, ndarray]:
        values, slopes = model.predictive_of(Value(), X), model.predictive_of(Gradient(), X)
        both = lambda name: np.column_stack([getattr(values, name), getattr(slopes, name).reshape(X.shape)])
        return both("mean"), both("var")

    return predict


def process(data: Measured, seed: int, steps: int | None = None) -> Predict:
    """Fit GPyTorch's kernel of values and derivatives with one length scale per input and known noise."""
    X = torch.tensor(np.vstack([data.X, data.X_gradients]))
    at, unit = X.mean(0), X.std(0)
    mean, scale = data.energies.mean(), data.energies.std()
    units = torch.cat([torch.ones(1).double(), 1 / unit]) * scale  # of a standardised energy and its gradient
    Y = torch.full((len(X), 4), torch.nan).double()  # a point has either an energy or a gradient
    Y[: len(data.X), 0] = torch.tensor(data.energies - mean)
    Y[len(data.X) :, 1:] = torch.tensor(data.gradients)
    trained = trained_process((X - at) / unit, Y / units, (torch.tensor(NOISES) / units).square(), steps or STEPS)

    def predict(X: ndarray) -> tuple[ndarray, ndarray]:
        found, var = trained((torch.tensor(X) - at) / unit)
        return (found * units).numpy() + mean * np.eye(4)[0], (var * units.square()).numpy()

    return predict


def trained_process(
    Z: Float[Tensor, "n 3"], T: Float[Tensor, "n 4"], noise_var: Float[Tensor, " 4"], steps: int
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Maximise the exact marginal likelihood by Adam, for standardised points and targets (NaN: missing)."""
    import gpytorch  # type: ignore[import-not-found, unused-ignore]

    least = gpytorch.constraints.GreaterThan(1e-9)
    kind = gpytorch.likelihoods.MultitaskGaussianLikelihood
    likelihood = kind(len(noise_var), noise_constraint=least, has_global_noise=False).double()
    likelihood.task_noises = noise_var
    likelihood.raw_task_noises.requires_grad_(False)
    kernel, given = gpytorch.kernels.RBFKernelGrad(ard_num_dims=Z.shape[1]), lambda _: (Z, T, likelihood)
    model = process_of(gpytorch.models.ExactGP, kernel, given, gradients=True).double()
    bound = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    adam = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=STEP_SIZE)
    with gpytorch.settings.observation_nan_policy("mask"), gpytorch.settings.max_cholesky_size(100_000):
        for _ in range(steps):
            adam.zero_grad()
            (-bound(model(Z), T)).backward()
            adam.step()
    return conditioned(model.mean_module, model.covar_module, Z, T, noise_var)


@torch.no_grad()
def conditioned(
    mean: Any, kernel: Any, Z: Tensor, T: Tensor, noise_var: Tensor
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Condition on the targets that are not NaN; return a function for mean and variance at new points.

    GPyTorch is not used for this, since its predictive covariance counts missing targets as observed.
    """
    seen = ~T.isnan().flatten()
    cov = kernel(Z).to_dense() + torch.diag(noise_var.repeat(len(Z)))
    L = torch.linalg.cholesky(cov[seen][:, seen])
    weights = torch.cholesky_solve((T - mean(Z)).flatten()[seen, None], L)

    @torch.no_grad()
    def predict(Z_new: Tensor) -> tuple[Tensor, Tensor]:
        cross = kernel(Z_new, Z).to_dense()[:, seen]
        known = torch.linalg.solve_triangular(L, cross.mT, upper=False).square().sum(0)
        found = mean(Z_new) + (cross @ weights).reshape(-1, T.shape[1])
        return found, (kernel(Z_new, diag=True) - known).reshape(found.shape)

    return predict


METHODS: dict[str, Callable[[Measured, int], Predict]] = {
    ALONE: partial(network, gradients=False),
    EVIDENCE: network,
    WAVES: partial(network, encoding="fourier"),
    FAST: partial(network, preset="fast", hidden="auto"),
    PROCESS: process,
}


def score_surface(predict: Predict, X: Float[ndarray, "m 3"], Y: Float[ndarray, "m 4"]) -> dict[str, float]:
    """RMSE of the function and LPD of measurements, summed over the components of a gradient."""
    mean, var = predict(X)
    square, var = np.square(mean - surface(X)).mean(0), var + np.square(NOISES)
    density = -0.5 * (np.square(Y - mean) / var + np.log(2 * np.pi * var)).mean(0)
    gradient = {"gradient_rmse": float(np.sqrt(square[1:].mean())), "gradient_lpd": float(density[1:].sum())}
    return gradient | {"energy_rmse": float(np.sqrt(square[0])), "energy_lpd": float(density[0])}


def asked_of(points: int, seed: int, quick: bool) -> list[str]:
    """Methods to run: with many points only single models, and for the first seed the exact process."""
    absent = find_spec("gpytorch") is None
    large = [EVIDENCE, WAVES] if quick or seed else [EVIDENCE, WAVES, PROCESS]
    return [name for name in (METHODS if points == GRADIENTS else large) if not (absent and name == PROCESS)]


@dataclass(frozen=True)
class Gradients(Job):
    method: str
    points: int
    seed: int

    def run(self) -> Run:
        rng = np.random.default_rng(self.seed)
        new = draw_points(TEST_ROWS, rng)
        data = Measured.draw(ENERGIES, self.points, rng)
        warm_up()
        predict, cpu, wall = timed(partial(METHODS[self.method], data, self.seed))
        size = 0 if self.method == ALONE else self.points
        return Run(self.method, size, self.seed, wall, cpu, score_surface(predict, *new))


def gradient_table(runs: Sequence[Run]) -> Rows:
    title = f"{ENERGIES} energies and n gradients, 3 inputs, {TEST_ROWS:,} new rows"
    rows = [[title, "n", "gradient RMSE", "gradient LPD", "energy RMSE", "energy LPD", "wall s", "cpu s"]]
    digits = {"gradient_rmse": 4, "gradient_lpd": 2, "energy_rmse": 4, "energy_lpd": 2}
    for (method, size), own in runner.grouped(runs, lambda run: (run.method, run.size)).items():
        rows.append([method, f"{size:,}", *scores_of(own, digits), *seconds_of(own)])
    return rows


def rows_in_the_same_time(runs: Sequence[Run]) -> str:
    """Number of gradients that Fourier features handle in the time that the process needs for the fewest."""
    groups = runner.grouped(runs, lambda run: (run.method, run.size))
    times = {key: float(np.mean([run.cpu for run in own])) for key, own in groups.items()}
    limit, large = times.get((PROCESS, GRADIENTS)), TIMES * GRADIENTS
    if limit is None:
        return "skipped: the exact process needs gpytorch; make bench-observe installs it"
    few, many = times[WAVES, GRADIENTS], times[WAVES, large]
    slope = math.log(TIMES) / math.log(max(many / few, 1.01))
    count = f"about {GRADIENTS * (limit / few) ** slope:,.0f}" if limit < many else f"more than {large:,}"
    process = f"in the {limit:.1f} cpu s that the exact process takes for {GRADIENTS} gradients"
    return f"{process}, Fourier features handle {count} ({GRADIENTS}: {few:.1f} s, {large}: {many:.1f} s)"


def scores_of(runs: Sequence[Run], digits: dict[str, int]) -> list[str]:
    return [runner.with_error([run.scores[name] for run in runs], places) for name, places in digits.items()]


def seconds_of(runs: Sequence[Run]) -> list[str]:
    return [f"{np.mean([getattr(run, clock) for run in runs]):.1f}" for clock in ("wall", "cpu")]


def titled(rows: Rows) -> str:
    (title, *head), *body = rows
    return f"{title}:\n\n{runner.markdown([['', *head], *body])}"


@cache
def warm_up() -> None:
    data = Measured.draw(12, 4, np.random.default_rng(0))
    BLLRegressor((5,), preset="fast", max_epochs=2).fit(data.X, data.energies)
    network(data, 0, hidden=(5,))(data.X)
    network(data, 0, encoding="fourier")(data.X)
    if find_spec("gpytorch") is not None:
        process(data, 0, steps=1)(data.X)


def main(arguments: list[str] | None = None) -> None:
    parser = runner.options_of(__doc__, out="results/observe", again=True)
    parser.add_argument("--seeds", type=int, default=3, help="draws of the data, averaged")
    quick = "smaller mixtures, no exact process at many points"
    parser.add_argument("--quick", action="store_true", help=quick)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    machine, preset = describe_machine(), "fast" if asked.quick else "calibrated"
    print(machine)
    seeds, sizes = range(asked.seeds), (GRADIENTS, TIMES * GRADIENTS)
    missing = [Missing(way, seed, preset) for seed in seeds for way in WAYS]
    gradients = [Gradients(m, n, seed) for seed in seeds for n in sizes for m in asked_of(n, seed, asked.quick)]
    store = runner.Store(asked.out / "results.jsonl", Run)
    done = runner.complete([*missing, *gradients], store, again=asked.again)
    surfaces = done[len(missing) :]
    tables = [missing_table(done[: len(missing)]), gradient_table(surfaces)]
    last = rows_in_the_same_time(surfaces)
    print(*map(runner.aligned, tables), last, sep="\n\n")
    runner.write_files(asked.out, {"tables.md": "\n\n".join([machine, *map(titled, tables), last]) + "\n"})


if __name__ == "__main__":
    main()
