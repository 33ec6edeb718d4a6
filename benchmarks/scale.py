"""Benchmarks of scale: mini-batches against plain MSE training, memory against rows, statistics pass, two processes.

    make bench-scale                                   (with peers if their environment exists)
    python -m benchmarks.scale epochs --rows 10000000 --width 512 --batch 65536 --rate 4e-3 --device cuda

Sections, all of them by default:
    epochs     seconds per epoch and to the final test RMSE of MSE training, and test LPD: mini-batches of the
               evidence, MSE and then Bayesian linear regression, vbll, a deep-kernel Gaussian process, with one
               network, optimizer and order of batches, in turns
    memory     peak memory of a fit from a memory map, or from Parquet files, against the number of rows
    statistics speed of the exact statistics pass, relative to the machine's matrix product in the same precision
    processes  two processes against one: seconds and the difference of the trained parameters
"""

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, nn

from benchmarks.runner import aligned, in_own_process, options_of, pool_of
from benchmarks.timing import Ratio, describe_machine, now, peak_of, print_ratios, time_in_turns
from benchmarks.timing import memory as memory_in_use
from benchmarks.uci.gaussian_processes import variational_process
from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.bayes.evidence import by_evidence
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.statistics import Readings, Statistics
from lastlayer.data.distributed import join
from lastlayer.data.parquet import ParquetSource
from lastlayer.data.rows import Points
from lastlayer.training import MiniBatches, Optimizer, RunningPosterior, streamed_statistics, train

SECTIONS = ("epochs", "memory", "statistics", "processes")
SIZES = {"rows": 1_000_000, "test-rows": 50_000, "width": 256, "depth": 3, "batch": 4_096, "epochs": 4}
SIZES |= {"vbll-steps": 12, "memory-width": 64, "process-rows": 100_000}
SIZES |= {"statistics-rows": 65_536, "statistics-width": 512}
"""Options; --vbll-steps: steps of vbll, which is slow on a CPU, 0: train to the end."""
N_INPUTS, NOISE_STD = 16, 0.3
LOOKS = 8  # evaluations of the test rows per epoch, not timed

SHORTER = 0.65
"""Share of the epochs in "shorter" runs: the learning rate falls until the end of training, so a method that is ahead
of the MSE shows it only if its training ends earlier."""


def make_rows(m: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    U = 1.5 * torch.randn(N_INPUTS, 32, generator=g) / N_INPUTS**0.5
    v = torch.randn(32, 1, generator=g) / 32**0.5
    here = torch.Generator(device).manual_seed(seed)
    X = torch.randn(m, N_INPUTS, generator=here, device=device)
    f = lambda x: torch.sin(x @ U.to(device)) @ v.to(device) + 0.5 * x[:, :1] * x[:, 1:2] + torch.tanh(2 * x[:, 2:3])
    noise = NOISE_STD * torch.randn(m, 1, generator=here, device=device)
    return X, torch.cat([f(x) / 1.4 for x in X.split(2**20)]) + noise


def features(width: int, depth: int, device: str) -> nn.Sequential:
    torch.manual_seed(1)
    widths = [N_INPUTS, *[width] * depth]
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.SiLU())]
    return nn.Sequential(*layers).to(device)


class Method:
    """A method of training: `backward` is called in every step, before the optimizer's step."""

    name = ""
    share = 1.0  # share of the epochs for which it trains; the learning rate falls until their end
    most_steps = sys.maxsize  # maximum number of steps; methods too slow to train here are only timed

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.network = options, features(options.width, options.depth, options.device)
        self.head = self.make_head().to(options.device)
        self.parameters = [*self.network.parameters(), *self.head.parameters()]
        self.adam = torch.optim.Adam(self.parameters, lr=options.rate)
        self.n_steps = round(self.share * steps_per_epoch(options) * options.epochs)
        self.wall, self.cpu, self.steps = 0.0, 0.0, 0
        self.curve: list[tuple[float, float]] = []  # elapsed seconds and test RMSE

    def make_head(self) -> nn.Module:
        return nn.Linear(self.options.width, 1)

    def mean(self, X: Tensor) -> Tensor:
        return self.head(self.network(X))

    def backward(self, X: Tensor, T: Tensor, drift: float) -> None:
        raise NotImplementedError

    def predictor(self, train: Points) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Mean and variance of targets: by default by the exact last layer of all rows on its features."""
        posterior = by_evidence([streamed_statistics(self.network, train.chunks())])[0]

        def predict(X: Tensor) -> tuple[Tensor, Tensor]:
            marginals = posterior.predict(affine_features(self.network(X)).double())
            return marginals.mean[:, 0], marginals.target_cov()[:, 0, 0]

        return predict

    @torch.no_grad()
    def score(self, train: Points, test: Points) -> tuple[float, float]:
        """Mean log density and RMSE."""
        predict, (X, t) = self.predictor(train), (test.X, test.T[:, 0])
        mean, var = (torch.cat(each) for each in zip(*map(predict, X.split(2**14)), strict=True))
        lpd = torch.distributions.Normal(mean, var.sqrt()).log_prob(t.to(mean)).mean()
        return float(lpd), float((t.to(mean) - mean).square().mean().sqrt())

    @torch.no_grad()
    def look(self, test: Points) -> None:
        error = torch.cat([part.T - self.mean(part.X).reshape(-1, 1) for part in test.chunks()])
        self.curve.append((self.wall, float(error.square().mean().sqrt())))

    def advance(self, source: Points, first: int, last: int) -> None:
        step, per_epoch = first, steps_per_epoch(self.options)
        while step < last and self.goes_on:
            epoch, start = divmod(step, per_epoch)
            batches = source.batches(self.options.batch, seed=epoch, first=start)
            wall, cpu = now(self.options.device), time.process_time()
            for batch in batches:
                drift = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / self.n_steps))
                for group in self.adam.param_groups:
                    group["lr"] = drift * self.options.rate
                self.adam.zero_grad()
                self.backward(batch.X, batch.T, drift)
                self.adam.step()
                step, self.steps = step + 1, self.steps + 1
                if step == last or not self.goes_on:
                    break
            self.wall += now(self.options.device) - wall
            self.cpu += time.process_time() - cpu

    @property
    def trained(self) -> bool:
        """Whether it is trained to the end, not only timed."""
        return self.most_steps == sys.maxsize

    @property
    def goes_on(self) -> bool:
        return self.steps < min(self.most_steps, self.n_steps)

    @property
    def step_seconds(self) -> float:
        return self.wall / self.steps

    def seconds_to(self, rmse: float) -> float:
        return next((seconds for seconds, reached in self.curve if reached <= rmse), math.inf)


class MSE(Method):
    name = "MSE, then BLR"

    def backward(self, X: Tensor, T: Tensor, drift: float) -> None:
        (self.mean(X) - T).square().mean().backward()


class Evidence(Method):
    name = "lastlayer"

    def make_head(self) -> nn.Module:
        count = torch.tensor(float(self.options.rows), dtype=torch.float64, device=self.options.device)
        self.layer = RunningPosterior(count, self.options.rows)
        return nn.Identity()

    def backward(self, X: Tensor, T: Tensor, drift: float) -> None:
        phi = self.network(X)
        with torch.no_grad():
            rows = self.layer.step(phi.detach(), T, drift=drift)
        phi.backward(rows.gradient)

    def mean(self, X: Tensor) -> Tensor:
        W = self.layer.now.frozen.weights.to(X.dtype)
        return self.network(X) @ W[:-1] + W[-1]


class ShorterMSE(MSE):
    name, share = "MSE, shorter", SHORTER


class ShorterEvidence(Evidence):
    name, share = "lastlayer, shorter", SHORTER


class VBLL(Method):
    name = "vbll"

    def make_head(self) -> nn.Module:
        import vbll  # type: ignore[import-not-found, unused-ignore]

        self.most_steps = self.options.vbll_steps or sys.maxsize
        return vbll.Regression(self.options.width, 1, 1 / self.options.rows, prior_scale=1.0, wishart_scale=0.1)

    def backward(self, X: Tensor, T: Tensor, drift: float) -> None:
        self.head(self.network(X)).train_loss_fn(T).backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)

    def mean(self, X: Tensor) -> Tensor:
        return self.head(self.network(X)).predictive.mean

    def predictor(self, train: Points) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        def predict(X: Tensor) -> tuple[Tensor, Tensor]:
            predictive = self.head(self.network(X)).predictive
            return predictive.mean.reshape(-1), predictive.variance.reshape(-1)

        return predict


class DeepKernel(Method):
    """Variational Gaussian process with 128 inducing points on the network's features, as in GPyTorch's examples."""

    name = "GPyTorch deep kernel"
    most_steps = 6

    def make_head(self) -> nn.Module:
        import gpytorch  # type: ignore[import-not-found, unused-ignore]

        with torch.no_grad():
            points = self.network(make_rows(128, 11, self.options.device)[0])
        process = variational_process(points, gpytorch.kernels.RBFKernel())
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.bound = gpytorch.mlls.VariationalELBO(likelihood, process, self.options.rows)
        return nn.ModuleList([process, likelihood])

    def backward(self, X: Tensor, T: Tensor, drift: float) -> None:
        (-self.bound(self.bound.model(self.network(X)), T[:, 0])).backward()


KINDS: tuple[type[Method], ...] = (MSE, Evidence, ShorterMSE, ShorterEvidence, VBLL, DeepKernel)


def steps_per_epoch(options: argparse.Namespace) -> int:
    return -(-options.rows // options.batch)


def epochs(options: argparse.Namespace) -> list[Ratio]:
    made = (make_rows(m, seed, options.device) for m, seed in ((options.rows, 0), (options.test_rows, 1)))
    train, test = (Points(X, Readings(T)) for X, T in made)
    mean, std = train.T.mean(), train.T.std()
    train, test = (Points(data.X, Readings((data.T - mean) / std)) for data in (train, test))
    methods: list[Method] = []
    for kind in (kind for kind in KINDS if kind.name in options.methods):
        try:
            methods.append(kind(options))
        except ImportError:
            print(f"{kind.name}: not installed")
    per_epoch = steps_per_epoch(options)
    n_steps, stretch = per_epoch * options.epochs, max(1, per_epoch // LOOKS)
    network = f"{options.rows:,} x {N_INPUTS} rows, {options.depth} x {options.width} SiLU, batch {options.batch:,}"
    steps = f"{options.epochs} epochs of {per_epoch:,} steps, Adam {options.rate:g} cosine"
    print(f"{network}, {steps}; {describe_machine()}, {options.device}", flush=True)
    for first in range(0, n_steps, stretch):
        for method in (method for method in methods if method.goes_on):
            method.advance(train, first, min(first + stretch, n_steps))
            if method.trained:
                method.look(test)
    base = methods[0]
    goal, scores = base.curve[-1][1], {}
    table = [["", "s/epoch", "ratio", "cpu", "test RMSE of its head", "s to RMSE of MSE", "ratio"]]
    table[0] += ["exact LPD", "exact RMSE"]
    for method in methods:
        ratios = method.step_seconds / base.step_seconds, method.cpu / method.steps / (base.cpu / base.steps)
        line = [method.name, f"{method.step_seconds * per_epoch:.2f}", *(f"{ratio:.2f}" for ratio in ratios)]
        if method.trained:
            lpd, rmse = scores[method.name] = method.score(train, test)
            to_goal = method.seconds_to(goal)
            line += [f"{method.curve[-1][1]:.4f}", f"{to_goal:.2f}", f"{to_goal / base.seconds_to(goal):.2f}"]
            line += [f"{lpd:.4f}", f"{rmse:.4f}"]
        else:
            line += [f"from {method.steps} steps; not trained", *[""] * 4]
        table.append(line)
    print(aligned(table), flush=True)
    return epoch_ratios({method.name: method for method in methods}, goal, scores)


def epoch_ratios(methods: dict[str, Method], goal: float, scores: dict[str, tuple[float, float]]) -> list[Ratio]:
    mse, ours, early = (methods.get(kind.name) for kind in (MSE, Evidence, ShorterEvidence))
    ratios = []
    if mse is not None and ours is not None:
        ratios.append(Ratio("epoch", "MSE / lastlayer, wall", mse.step_seconds / ours.step_seconds, 1 / 1.25))
        ratios.append(Ratio("epoch", "MSE / lastlayer, cpu", mse.cpu / ours.cpu, None))
        for name in (name for name in (MSE.name, VBLL.name) if name in scores):
            gain = math.exp(scores[ours.name][0] - scores[name][0])
            ratios.append(Ratio("test density", f"lastlayer / {name}", gain, 1.0))
    if mse is not None and early is not None:
        ratios.append(Ratio("to MSE's RMSE", "MSE / lastlayer", mse.seconds_to(goal) / early.seconds_to(goal), 1.25))
    return ratios


def write_map(folder: str, m: int) -> None:
    X = np.lib.format.open_memmap(f"{folder}/X.npy", "w+", np.float32, (m, N_INPUTS))
    y = np.lib.format.open_memmap(f"{folder}/y.npy", "w+", np.float32, (m,))
    for i, rows in enumerate(np.array_split(np.arange(m), range(2**18, m, 2**18))):
        x, t = make_rows(len(rows), i)
        X[rows], y[rows] = x.numpy(), t[:, 0].numpy()
    X.flush()
    y.flush()


def write_parquet(folder: str, m: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    for i, start in enumerate(range(0, m, 2**18)):
        x, t = make_rows(min(2**18, m - start), i)
        columns = {f"x{j}": x[:, j].numpy() for j in range(N_INPUTS)} | {"y": t[:, 0].numpy()}
        parquet.write_table(pa.table(columns), f"{folder}/part-{i:04}.parquet", row_group_size=2**16)


def fit_from_disk(folder: str, options: argparse.Namespace) -> tuple[float, float, float]:
    """Seconds, anonymous memory and whole memory of a fit; mapped pages belong to the system's cache."""
    training, width = TrainingOptions(learning_rate=1e-3), (options.memory_width,)
    words: dict[str, Any] = {"activation": "silu", "preset": "evidence", "dtype": "float32", "device": options.device}
    words |= {"batch_size": options.batch, "max_epochs": 1}
    model = BLLRegressor(width, training=training, **words)
    model.fit(np.random.default_rng(0).normal(size=(options.batch, N_INPUTS)), np.arange(options.batch) % 7)  # warm
    if options.memory_from == "parquet":
        source = ParquetSource(folder, [f"x{j}" for j in range(N_INPUTS)], ["y"])
        _ = source.n_rows
        fit = partial(model.fit_source, source)
    else:
        fit = partial(model.fit, *(np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in "Xy"))
    start = time.perf_counter()
    peak = peak_of(fit, kind="RssAnon", every=0.01)
    return time.perf_counter() - start, peak, memory_in_use("VmHWM")


def memory(options: argparse.Namespace) -> list[Ratio]:
    """Run the section "memory", each size in a process of its own."""
    print(f"\n{'rows':>12} {'seconds':>9} {'own memory, MB':>15} {'with mapped pages, MB':>22}")
    own = []
    for m in options.memory_rows:
        with tempfile.TemporaryDirectory() as folder:
            (write_parquet if options.memory_from == "parquet" else write_map)(folder, m)
            seconds, peak, whole = in_own_process(fit_from_disk, folder, options)
        own.append(peak)
        print(f"{m:>12,} {seconds:>9.1f} {peak:>15.1f} {whole:>22.1f}", flush=True)
    return [Ratio("memory", f"{options.memory_rows[0]:,} rows / {options.memory_rows[-1]:,}", own[0] / own[-1], 0.8)]


def statistics(options: argparse.Namespace) -> list[Ratio]:
    k, m, device = options.statistics_width, options.statistics_rows, options.device
    g = torch.Generator(device).manual_seed(0)
    phi = torch.randn(m, k, generator=g, dtype=torch.float64, device=device)
    T = torch.randn(m, 1, generator=g, dtype=torch.float64, device=device)
    n = 2_048 if device == "cpu" else 8_192
    A = torch.randn(n, n, generator=g, dtype=torch.float64, device=device)

    narrow_phi = phi.float()
    passes = [lambda: A @ A, *(lambda phi=phi: Statistics.from_linear_features(phi, T) for phi in (phi, narrow_phi))]
    product, ours, narrow = time_in_turns(*[lambda work=work: (work(), now(device)) for work in passes], repeats=5)
    peak = 2 * n**3 / product.median
    print(f"\nmatrix product of {n:,}: {peak / 1e9:,.0f} GFLOP/s in float64; statistics of {m:,} x {k}:")
    ratios = []
    for name, timing in (("float64 features", ours), ("float32 features", narrow)):
        speed = 2 * m * (k + 1) ** 2 / timing.median
        print(f"  {name}: {timing}, {speed / 1e9:,.0f} GFLOP/s")
        ratios.append(Ratio("statistics", f"{name} / own matrix product", speed / peak, 0.6))
    return ratios


def one_epoch(options: argparse.Namespace, dtype: str, rank: int, world: int) -> tuple[float, ndarray]:
    """Seconds, and the trained parameters, by one of several processes with one thread each."""
    if world > 1:
        both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "WORLD_SIZE": str(world)}
        os.environ |= both | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    group, rows = join(), options.process_rows
    X, T = (part.to(getattr(torch, dtype)) for part in make_rows(rows, 0))
    network = features(options.width, 3, "cpu").to(X.dtype)
    running = RunningPosterior(torch.tensor(float(rows), dtype=torch.float64), rows, process_group=group)
    problem = MiniBatches(network, Points(X, Readings(T)), running, batch_size=options.batch)
    start = time.perf_counter()
    train(problem, Optimizer(1e-3, max_epochs=1))
    seconds = time.perf_counter() - start
    group.shutdown()
    return seconds, torch.cat([p.detach().flatten() for p in network.parameters()]).numpy()


def processes(options: argparse.Namespace) -> list[Ratio]:
    """Run the section "processes", on the CPU with one thread per process."""
    print(f"\none epoch of {options.process_rows:,} rows, batch {options.batch:,}, one thread per process")
    ratios = []
    for dtype in ("float64", "float32"):
        found = []
        for world in (1, 2):
            with pool_of(world) as pool:
                ranks = [pool.submit(one_epoch, options, dtype, rank, world) for rank in range(world)]
                found.append(ranks[0].result())
        (one, end), (two, other) = found
        off = np.abs(end - other).max() / np.abs(end).max()
        print(f"  {dtype}: {one:.1f} s by one, {two:.1f} s by two; largest difference {off:.1e}")
        ratios.append(Ratio("processes", f"one / two, {dtype}", one / two))
    return ratios


def main(arguments: list[str] | None = None) -> None:
    parser = options_of(__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    rate = "Adam's learning rate for every method; the default suits the MSE best"
    parser.add_argument("--rate", type=float, default=8e-3, help=rate)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    names = [kind.name for kind in KINDS]
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    parser.add_argument("--memory-rows", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--memory-from", choices=["map", "parquet"], default="map")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    sections = {"epochs": epochs, "memory": memory, "statistics": statistics, "processes": processes}
    print_ratios([ratio for name in options.sections or SECTIONS for ratio in sections[name](options)])


if __name__ == "__main__":
    main()
