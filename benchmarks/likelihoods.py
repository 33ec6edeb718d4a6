"""Targets that are no Gaussian numbers: the default beside boosted trees, a process and a mixture density network.

Counts, levels, outliers, skewed and capped targets, noise with two humps, and Gaussian noise for comparison. Discrete
targets are scored by the log of the probability that a method gives to the value, which for a continuous prediction is
that of the unit interval around it; all others by log density. A second run computes what is missing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from scipy.stats import poisson  # type: ignore[attr-defined]
from torch import nn

from benchmarks.outside import exact_process
from benchmarks.runner import Job, Store, aligned, complete, helpful, options_of, split_list, write_files
from benchmarks.timing import timed
from benchmarks.uci import gaussian_boosting
from benchmarks.uci.methods import METHODS as UCI
from benchmarks.uci.protocol import Gaussians, Task, hold_out
from lastlayer import BLLRegressor
from lastlayer.errors import check_choice
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.predictions.prediction import Prediction

ROWS, TEST_ROWS, N_INPUTS = 800, 2_000, 4
COMPONENTS, STEPS, PATIENCE, LOOKS = 5, 3_000, 15, 20
"""Of the mixture density network: Gaussians, largest number of steps, and looks at held-out rows without gain."""

Draw = Callable[[np.random.Generator, ndarray], ndarray]
OUTLIERS = lambda share: lambda r, f: f + np.where(r.random(len(f)) < share, 5.0, 0.2) * r.standard_normal(len(f))
TABLES: dict[str, Draw] = {
    "Poisson counts": lambda r, f: r.poisson(np.exp(1 + f)),
    "overdispersed counts": lambda r, f: r.poisson(np.exp(2 + f) * r.gamma(2.0, 0.5, len(f))),
    "grades": lambda r, f: np.clip(np.round(3 + 1.5 * f + 0.7 * r.standard_normal(len(f))), 1, 6),
    "2% outliers": OUTLIERS(0.02),
    "10% outliers": OUTLIERS(0.1),
    "skewed": lambda r, f: np.exp(f + 0.5 * r.standard_normal(len(f))),
    "gamma noise": lambda r, f: f + r.gamma(1.0, 0.3 + 0.2 * np.tanh(f), len(f)),
    "two humps": lambda r, f: f + 0.6 * np.sign(r.standard_normal(len(f))) + 0.1 * r.standard_normal(len(f)),
    "capped": lambda r, f: np.minimum(f + 0.3 * r.standard_normal(len(f)), 0.8),
    "Gaussian": lambda r, f: f + 0.3 * r.standard_normal(len(f)),
}
COUNTS = ("Poisson counts", "overdispersed counts")


def rows(table: str, n: int, seed: int) -> tuple[ndarray, ndarray]:
    rng = np.random.default_rng([sorted(TABLES).index(table), seed, n])
    X = rng.uniform(-1, 1, (n, N_INPUTS))
    return X, np.asarray(TABLES[table](rng, np.sin(3 * X[:, 0]) + X[:, 1] * X[:, 2]), float)


@dataclass(frozen=True)
class Poisson:
    """Poisson counts by their rates."""

    rate: ndarray

    def log_prob(self, y: ndarray) -> ndarray:
        return np.asarray(poisson.logpmf(y, self.rate))

    def crps(self, y: ndarray) -> ndarray:
        k = np.arange(int(poisson.ppf(1 - 1e-9, self.rate.max())) + int(y.max()) + 1)[:, None]
        return np.asarray(np.square(poisson.cdf(k, self.rate) - (k >= y)).sum(0))

    def interval(self, level: float) -> tuple[ndarray, ndarray]:
        return poisson.ppf((1 - level) / 2, self.rate), poisson.ppf((1 + level) / 2, self.rate)


def own(**parameters: Any) -> Callable[..., Any]:
    return lambda X, y, task: BLLRegressor(**parameters, random_state=task.seed).fit(X, y).predictive


def poisson_trees(X: ndarray, y: ndarray, task: Task) -> Callable[[ndarray], Poisson]:
    from catboost import CatBoostRegressor

    fit, held = hold_out(len(X), task.seed)
    words = {"random_seed": task.seed, "allow_writing_files": False, "verbose": False, "thread_count": 1}
    model = CatBoostRegressor(loss_function="Poisson", early_stopping_rounds=50, **words)
    model.fit(X[fit], y[fit], eval_set=(X[held], y[held]))
    return lambda X: Poisson(np.maximum(model.predict(X), 1e-6))


def density_network(X: ndarray, y: ndarray, task: Task) -> Callable[[ndarray], MixturePrediction]:
    """A mixture density network: two layers of 50, five Gaussians, stopped by held-out likelihood."""
    torch.manual_seed(task.seed)
    mean, std = y.mean(), y.std()
    fit, held = hold_out(len(X), task.seed)
    x, t = torch.tensor(X, dtype=torch.float32), torch.tensor((y - mean) / std, dtype=torch.float32)[:, None]
    net = nn.Sequential(nn.Linear(X.shape[1], 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 15))
    adam = torch.optim.Adam(net.parameters(), lr=3e-3, weight_decay=1e-4)

    def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, centre, log_std = net(x).split(COMPONENTS, -1)
        return logits.log_softmax(-1), centre, log_std.clamp(-5, 3)

    def loss(at: ndarray) -> torch.Tensor:
        log_w, centre, log_std = parts(x[at])
        each = log_w - 0.5 * ((t[at] - centre) / log_std.exp()).square() - log_std
        return -each.logsumexp(-1).mean()

    best, kept, waited = np.inf, None, 0
    for step in range(STEPS):
        adam.zero_grad()
        loss(fit).backward()
        adam.step()
        if step % LOOKS == 0:
            with torch.no_grad():
                now = float(loss(held))
            waited = 0 if now < best else waited + 1
            if now < best:
                best, kept = now, {name: value.clone() for name, value in net.state_dict().items()}
            if waited > PATIENCE:
                break
    assert kept is not None
    net.load_state_dict(kept)

    def predict(X: ndarray) -> MixturePrediction:
        with torch.no_grad():
            log_w, centre, log_std = (part.double().numpy().T for part in parts(torch.tensor(X, dtype=torch.float32)))
        zero = np.zeros(len(X))
        one = lambda c, s: MixturePrediction.gaussian(c, epistemic_var=zero, noise_var=s**2, affine_cost=zero)
        weights = np.exp(log_w)
        return MixturePrediction.mixture(
            [one(mean + std * c, std * np.exp(s)) for c, s in zip(centre, log_std, strict=True)],
            weights / weights.sum(0),
        )

    return predict


METHODS: dict[str, Callable[..., Any]] = {
    "lastlayer": own(),
    "gaussian": own(likelihood="gaussian"),
    "CatBoost": gaussian_boosting.stopped_catboost,
    "CatBoost Poisson": poisson_trees,
    "NGBoost": UCI["NGBoost"].fit,
    "exact process": exact_process,
    "density network": density_network,
}


@dataclass(frozen=True)
class Result:
    log_prob: float
    crps: float
    in_50: float
    in_90: float
    seconds: float


@dataclass(frozen=True)
class Fitted(Job):
    table: str
    method: str
    seed: int

    def run(self) -> Result:
        torch.set_num_threads(1)
        (X, y), (Z, t) = rows(self.table, ROWS, self.seed), rows(self.table, TEST_ROWS, 100 + self.seed)
        predict, seconds, _ = timed(lambda: METHODS[self.method](X, y, Task(self.table, "given", self.seed)))
        p = predict(Z)
        p = p.prediction() if isinstance(p, Gaussians) else p
        in_50, in_90 = (float(((low <= t) & (t <= high)).mean()) for low, high in map(p.interval, (0.5, 0.9)))
        log_prob = float(_log_prob(p, t, np.unique(np.concatenate([y, t]))).mean())
        return Result(log_prob, float(np.mean(p.crps(t))), in_50, in_90, seconds)


def _log_prob(p: Prediction | Poisson, t: ndarray, values: ndarray) -> ndarray:
    """Log density, or for discrete targets the log of the probability of the value."""
    if isinstance(p, Poisson) or p.discrete or len(values) > 0.5 * len(t) or not (values == np.round(values)).all():
        return p.log_prob(t)
    return np.asarray(np.log(np.maximum(p.cdf(t + 0.5) - p.cdf(t - 0.5), 1e-12)))


def main(arguments: list[str] | None = None) -> None:
    parser = options_of(__doc__, out="results/likelihoods", again=True)
    parser.add_argument("--seeds", type=int, default=3, help="draws of each table")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated methods")
    parser.add_argument("--tables", default=",".join(TABLES), help="comma-separated tables")
    asked = parser.parse_args(arguments)
    with helpful():
        methods = [check_choice("method", name, METHODS) for name in split_list(asked.methods)]
        tables = [check_choice("table", name, TABLES) for name in split_list(asked.tables)]
    fits = [(t, m) for t in tables for m in methods if m != "CatBoost Poisson" or t in COUNTS]
    store = Store(asked.out / "results.jsonl", Result)
    complete([Fitted(*fit, seed) for fit in fits for seed in range(asked.seeds)], store, again=asked.again)
    table = [["", "", "log p", "CRPS", "50% in", "90% in", "cpu s"]]
    for t, m in fits:
        found = [store.results[t, m, seed] for seed in range(asked.seeds)]
        mean = lambda name, found=found: float(np.mean([getattr(one, name) for one in found]))
        numbers = [f"{mean('log_prob'):.3f}", f"{mean('crps'):.3f}", f"{mean('in_50'):.2f}", f"{mean('in_90'):.2f}"]
        table.append([t if m == methods[0] else "", m, *numbers, f"{mean('seconds'):.1f}"])
    text = aligned(table)
    print(text)
    write_files(asked.out, {"likelihoods.txt": text})


if __name__ == "__main__":
    main()
