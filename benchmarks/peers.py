"""lastlayer beside vbll and laplace-torch: lines of code, time and scores.

    make bench-peers    (or: python -m benchmarks.peers, in the environment of requirements-peers.lock)

Every method gets the same rows, two hidden layers of 50 and one thread, and is used as its own documentation shows. The
functions below are the code that a user has to write; their lines are counted. Each is fitted from scratch for 5, 10,
20, 50, ... up to 1,000 epochs, as long as the next fit stays within the budget; the last fit is scored. The goal is the
best test RMSE of the three, plus 5%; the time to it is that of the shortest fit that reaches it, in processor seconds.
So test rows decide where the peers, which have no stopping rule, stop: that is in their favour.
"""

import ast
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch
from numpy import ndarray

from benchmarks.runner import options_of
from benchmarks.timing import describe_machine, timed

LADDER = (5, 10, 20, 50, 100, 200, 500, 1_000)
"""Numbers of epochs; the last is the one in the documentation of all three."""

SLACK = 1.05
NOISE_STD = 0.2
N_TRAIN, N_TEST, N_INPUTS = 1_500, 500, 8

Snippet = Callable[[ndarray, ndarray, ndarray, int, int], tuple[ndarray, ndarray]]


def with_lastlayer(X: ndarray, y: ndarray, X_new: ndarray, epochs: int, seed: int) -> tuple[ndarray, ndarray]:
    from lastlayer import BLLRegressor

    model = BLLRegressor(hidden=(50, 50), max_epochs=epochs, random_state=seed).fit(X, y)
    mean, std = model.predict(X_new, return_std=True)
    return mean, std


def with_vbll(X: ndarray, y: ndarray, X_new: ndarray, epochs: int, seed: int) -> tuple[ndarray, ndarray]:
    import vbll  # type: ignore[import-not-found, unused-ignore]
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(seed)
    x_mean, x_std, y_mean, y_std = X.mean(0), X.std(0), y.mean(0), y.std(0)
    x = torch.tensor((X - x_mean) / x_std, dtype=torch.float32)
    t = torch.tensor((y - y_mean) / y_std, dtype=torch.float32)
    x_new = torch.tensor((X_new - x_mean) / x_std, dtype=torch.float32)
    features = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ELU(), nn.Linear(50, 50), nn.ELU())
    last = vbll.Regression(50, t.shape[1], 1 / len(x), prior_scale=1.0, wishart_scale=0.1)
    model = nn.Sequential(features, last)
    groups = [
        {"params": features.parameters(), "weight_decay": 1e-4},
        {"params": last.parameters(), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    loader = DataLoader(TensorDataset(x, t), batch_size=32, shuffle=True)
    for _ in range(epochs):
        for x_batch, t_batch in loader:
            optimizer.zero_grad()
            loss = model(x_batch).train_loss_fn(t_batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    model.eval()
    with torch.no_grad():
        predictive = model(x_new).predictive
    return predictive.mean.numpy() * y_std + y_mean, predictive.stddev.numpy() * y_std


def with_laplace(X: ndarray, y: ndarray, X_new: ndarray, epochs: int, seed: int) -> tuple[ndarray, ndarray]:
    from laplace import Laplace  # type: ignore[import-not-found, unused-ignore]
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(seed)
    x_mean, x_std, y_mean, y_std = X.mean(0), X.std(0), y.mean(0), y.std(0)
    x = torch.tensor((X - x_mean) / x_std, dtype=torch.float32)
    t = torch.tensor((y - y_mean) / y_std, dtype=torch.float32)
    x_new = torch.tensor((X_new - x_mean) / x_std, dtype=torch.float32)
    model = nn.Sequential(nn.Linear(x.shape[1], 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, t.shape[1]))
    loader = DataLoader(TensorDataset(x, t), batch_size=len(x))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for x_batch, t_batch in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x_batch), t_batch)
            loss.backward()
            optimizer.step()
    la = Laplace(model, "regression", subset_of_weights="last_layer", hessian_structure="full")
    la.fit(loader)
    log_prior, log_sigma = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    hyper_optimizer = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
    for _ in range(1000):
        hyper_optimizer.zero_grad()
        loss = -la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        loss.backward()
        hyper_optimizer.step()
    f_mean, f_cov = la(x_new, pred_type="glm")
    f_var = f_cov.diagonal(dim1=-2, dim2=-1)
    std = (f_var + la.sigma_noise.square()).sqrt()
    return f_mean.detach().numpy() * y_std + y_mean, std.detach().numpy() * y_std


METHODS: dict[str, Snippet] = {"lastlayer": with_lastlayer, "vbll": with_vbll, "laplace-torch": with_laplace}
"""By the name of the package."""


def count_lines(snippet: Snippet) -> int:
    """Lines of the body that are neither blank nor a comment."""
    source = inspect.getsource(snippet)
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.FunctionDef)
    lines = source.splitlines()[body.body[0].lineno - 1 :]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


Table = tuple[ndarray, ndarray, ndarray, ndarray]  # training inputs and targets, test inputs and targets


def make_table(n_outputs: int, seed: int) -> Table:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (N_TRAIN + N_TEST, N_INPUTS))
    first = np.sin(2 * X[:, 0]) * X[:, 1] + X[:, 2] ** 2 / 2 + np.tanh(2 * X[:, 3] - X[:, 4]) + 0.3 * X[:, 5] * X[:, 6]
    second = np.cos(2 * X[:, 1]) + X[:, 3] * X[:, 4] / 2 + np.exp(-(X[:, 0] ** 2)) * X[:, 7]
    y = np.stack([first, second], axis=1)[:, :n_outputs]
    y = y + NOISE_STD * rng.standard_normal(y.shape)
    return X[:N_TRAIN], y[:N_TRAIN], X[N_TRAIN:], y[N_TRAIN:]


@dataclass(frozen=True)
class Fit:
    epochs: int
    seconds: float  # processor seconds, which other work on the machine lengthens less than wall time
    wall: float
    rmse: float
    lpd: float  # mean log predictive density, summed over the outputs
    coverage: float  # share of the targets inside the central 90% interval


def fit(snippet: Snippet, table: Table, epochs: int, seed: int) -> Fit:
    X, y, X_test, y_test = table
    (mean, std), seconds, wall = timed(lambda: snippet(X, y, X_test, epochs, seed))
    z = (y_test - mean) / std
    lpd = (-(z**2) / 2 - np.log(std) - math.log(2 * math.pi) / 2).sum(1).mean()
    rmse = np.sqrt(((y_test - mean) ** 2).mean())
    return Fit(epochs, seconds, wall, float(rmse), float(lpd), float((np.abs(z) <= 1.6449).mean()))


def climb(snippet: Snippet, table: Table, seed: int, budget: float) -> list[Fit]:
    """Fit with more and more epochs, as long as the next fit is expected to stay within the budget."""
    fits = [fit(snippet, table, LADDER[0], seed)]
    for epochs in LADDER[1:]:
        if fits[-1].seconds * epochs / fits[-1].epochs > budget:
            break
        fits.append(fit(snippet, table, epochs, seed))
    return fits


def compare(n_outputs: int, seed: int, budget: float) -> None:
    table = make_table(n_outputs, seed)
    for snippet in METHODS.values():
        snippet(table[0][:100], table[1][:100], table[2], 1, seed)  # loads the libraries
    climbs = {name: climb(snippet, table, seed, budget) for name, snippet in METHODS.items()}
    goal = SLACK * min(fits[-1].rmse for fits in climbs.values())
    firsts = {name: next((f for f in fits if f.rmse <= goal), None) for name, fits in climbs.items()}
    lines = {name: count_lines(snippet) for name, snippet in METHODS.items()}
    oracle = n_outputs * (-0.5 - math.log(NOISE_STD) - math.log(2 * math.pi) / 2)
    print(f"{N_TRAIN:,} training and {N_TEST} test rows, {N_INPUTS} inputs, {n_outputs} output(s), seed {seed}")
    print(f"the true function has RMSE {NOISE_STD}, LPD {oracle:.3f}; goal: RMSE {goal:.4f}")
    head = f"{'':24}{'lines':>6}{'epochs':>8}{'RMSE':>9}{'LPD':>9}{'90% in':>8}{'wall s':>8}{'cpu s':>8}"
    print(f"{head}   cpu s to goal")
    ours = firsts["lastlayer"]
    for name in METHODS:
        last, first = climbs[name][-1], firsts[name]
        cut = "" if last.epochs == LADDER[-1] else ": stopped by the budget, before the epochs of its documentation"
        reached = f"not reached{cut}" if first is None else f"{first.seconds:8.2f}  ({first.epochs} epochs)"
        ratio = "" if first is None or ours is None else f"  ratio to lastlayer {first.seconds / ours.seconds:.2f}"
        scores = f"{last.rmse:>9.4f}{last.lpd:>9.3f}{last.coverage:>8.2f}{last.wall:>8.2f}{last.seconds:>8.2f}"
        print(f"{name + ' ' + version(name):<24}{lines[name]:>6}{last.epochs:>8}{scores}   {reached}{ratio}")
    for name, fits in climbs.items():
        rungs = "  ".join(f"{f.epochs}: {f.rmse:.3f} in {f.seconds:.1f}" for f in fits)
        print(f"  {name:<14} RMSE by epochs, cpu s  {rungs}")
    print(flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of data and networks")
    parser.add_argument("--budget", type=float, default=400.0, help="largest expected processor seconds of one fit")
    parser.add_argument("--outputs", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{describe_machine()}; at most {options.budget:g} cpu s per fit")
    print("laplace-torch models one noise level for all outputs; both outputs have the same here\n")
    for n_outputs in options.outputs:
        compare(n_outputs, options.seed, options.budget)


if __name__ == "__main__":
    main()
