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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.runner import options_of
from benchmarks.timing import Ratio, describe_machine, print_ratios, time_in_turns
from lastlayer.bayes.evidence import by_evidence
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.statistics import Readings, Statistics
from lastlayer.data.rows import Points
from lastlayer.training import RunningPosterior, streamed_statistics

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
    return X, torch.cat([f(x) / 1.4 for x in X.split(2**20)]) + NOISE_STD * torch.randn(
        m, 1, generator=here, device=device
    )


def features(width: int, depth: int, device: str) -> nn.Sequential:
    torch.manual_seed(1)
    widths = [N_INPUTS, *[width] * depth]
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.SiLU())]
    return nn.Sequential(*layers).to(device)


class Method:
    """A training method: `backward` is called in every step, before the optimizer's step."""

    name = ""
    share = 1.0  # share of the epochs for which it trains; the learning rate falls until their end
    most_steps = sys.maxsize  # maximum number of steps; methods too slow to train here are only timed

    def __init__(self, options: argparse.Namespace, n_rows: int) -> None:
        self.options, self.n_rows = options, n_rows
        self.network = features(options.width, options.depth, options.device)
        self.head: nn.Module = nn.Identity()

    def parameters(self) -> list[nn.Parameter]:
        return [*self.network.parameters(), *self.head.parameters()]

    def backward(self, X: Tensor, T: Tensor, drift: float) -> None:
        raise NotImplementedError

    def mean(self, X: Tensor) -> Tensor:
        raise NotImplementedError

    def score(self, train: Points, test: Points) -> tuple[float, float]:
        predict, lpds, errors = self.predictor(train), [], []
        for part in test.chunks():
            with torch.no_grad():
                mean, var = predict(part.X)
            lpds.append(torch.distributions.Normal(mean, var.sqrt()).log_prob(part.T[:, 0].to(mean)))
            errors.append(part.T[:, 0].to(mean) - mean)
        return float(torch.cat(lpds).mean()), float(torch.cat(errors).square().mean().sqrt())

    def predictor(self, train: Points) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Mean and variance of targets: by default by the exact last layer of all rows on its features."""
        posterior = by_evidence([streamed_statistics(self.network, train.chunks())])[0]

        def predict(X: Tensor) -> tuple[Tensor, Tensor]:
            marginals = posterior.predict(affine_features(self.network(X)).double())
            return marginals.mean[:, 0], marginals.target_cov()[:, 0, 0]

        return predict


class MSE(Method):
    name = "MSE, then BLR"

    def __init__(self, options: argparse.Namespace, n_rows: int) -> None:
        super().__init__(options, n_rows)
        self.head = nn.Linear(options.width, 1).to(options.device)

    def backward(self, X: Tensor, T: Tensor, drift: float) -> None:
        (self.head(self.network(X)) - T).square().mean().backward()

    def mean(self, X: Tensor) -> Tensor:
        return self.head(self.network(X))


class Evidence(Method):
    name = "lastlayer"

    def __init__(self, options: argparse.Namespace, n_rows: int) -> None:
        super().__init__(options, n_rows)
        self.layer = RunningPosterior(torch.tensor(float(n_rows), dtype=torch.float64, device=options.device), n_rows)

    def backward(self, X: Tensor, T: Tensor, drift: float) -> None:
        phi = self.network(X)
        with torch.no_grad():
            rows = self.layer.step(phi.detach(), T, drift=drift)
        phi.backward(rows.gradient)

    def mean(self, X: Tensor) -> Tensor:
        W = self.layer.now.frozen.weights.to(X.dtype)
        return self.network(X) @ W[:-1] + W[-1]


def shorter(kind: type[Method]) -> type[Method]:
    return type(kind.__name__, (kind,), {"name": f"{kind.name.split(',')[0]}, shorter", "share": SHORTER})


ShorterMSE, ShorterEvidence = shorter(MSE), shorter(Evidence)


class VBLL(Method):
    name = "vbll"

    def __init__(self, options: argparse.Namespace, n_rows: int) -> None:
        super().__init__(options, n_rows)
        import vbll  # type: ignore[import-not-found, unused-ignore]

        self.most_steps = options.vbll_steps or sys.maxsize
        self.head = vbll.Regression(options.width, 1, 1 / n_rows, prior_scale=1.0, wishart_scale=0.1).to(options.device)

    def backward(self, X: Tensor, T: Tensor, drift: float) -> None:
        self.head(self.network(X)).train_loss_fn(T).backward()
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)

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

    def __init__(self, options: argparse.Namespace, n_rows: int) -> None:
        super().__init__(options, n_rows)
        import gpytorch  # type: ignore[import-not-found, unused-ignore]

        class Process(gpytorch.models.ApproximateGP):  # type: ignore[misc, unused-ignore]
            def __init__(self, points: Tensor) -> None:
                variational = gpytorch.variational.CholeskyVariationalDistribution(len(points))
                super().__init__(gpytorch.variational.VariationalStrategy(self, points, variational))
                self.mean_module = gpytorch.means.ConstantMean()
                self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

            def forward(self, x: Tensor) -> Any:
                return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

        with torch.no_grad():
            points = self.network(make_rows(128, 11, options.device)[0])
        process, likelihood = Process(points), gpytorch.likelihoods.GaussianLikelihood()
        self.head = nn.ModuleList([process, likelihood]).to(options.device)
        self.process, self.likelihood = process, likelihood
        self.bound = gpytorch.mlls.VariationalELBO(likelihood, process, n_rows)

    def backward(self, X: Tensor, T: Tensor, drift: float) -> None:
        (-self.bound(self.process(self.network(X)), T[:, 0])).backward()


KINDS: tuple[type[Method], ...] = (MSE, Evidence, ShorterMSE, ShorterEvidence, VBLL, DeepKernel)


@dataclass
class Run:
    method: Method
    adam: torch.optim.Optimizer
    n_steps: int  # number of steps of the whole training
    wall: float = 0.0
    cpu: float = 0.0
    steps: int = 0
    curve: list[tuple[float, float]] = field(default_factory=list)  # elapsed seconds and test RMSE

    @property
    def trained(self) -> bool:
        """Whether the method is trained to the end, not only timed."""
        return self.method.most_steps == sys.maxsize

    @property
    def goes_on(self) -> bool:
        return self.steps < min(self.method.most_steps, self.n_steps)

    @property
    def step_seconds(self) -> float:
        return self.wall / self.steps

    def seconds_to(self, rmse: float) -> float:
        return next((seconds for seconds, reached in self.curve if reached <= rmse), math.inf)


def epochs(options: argparse.Namespace) -> list[Ratio]:
    made = (make_rows(m, seed, options.device) for m, seed in ((options.rows, 0), (options.test_rows, 1)))
    train, test = (Points(X, Readings(T)) for X, T in made)
    mean, std = train.T.mean(), train.T.std()
    train, test = (Points(data.X, Readings((data.T - mean) / std)) for data in (train, test))
    per_epoch = -(-options.rows // options.batch)
    n_steps = per_epoch * options.epochs
    runs = []
    for kind in KINDS:
        if kind.name in options.methods:
            try:
                method = kind(options, options.rows)
            except ImportError:
                print(f"{kind.name}: not installed")
                continue
            adam = torch.optim.Adam(method.parameters(), lr=options.rate)
            runs.append(Run(method, adam, round(method.share * n_steps)))
    stretch = max(1, per_epoch // LOOKS)
    network = f"{options.rows:,} x {N_INPUTS} rows, {options.depth} x {options.width} SiLU, batch {options.batch:,}"
    steps = f"{options.epochs} epochs of {per_epoch:,} steps, Adam {options.rate:g} cosine"
    print(f"{network}, {steps}; {describe_machine()}, {options.device}", flush=True)
    for first in range(0, n_steps, stretch):
        for run in (run for run in runs if run.goes_on):
            _advance(run, train, first, min(first + stretch, n_steps), per_epoch, options)
            if run.trained:
                error = torch.cat([part.T - _mean(run.method, part.X) for part in test.chunks()])
                run.curve.append((run.wall, float(error.square().mean().sqrt())))
    goal = runs[0].curve[-1][1]
    print(f"\n{'':22} {'s/epoch':>9} {'ratio':>6} {'cpu':>6} {'test RMSE of its head':>22}", end="")
    print(f" {'s to RMSE of MSE':>17} {'ratio':>6} {'exact LPD':>10} {'exact RMSE':>11}")
    scores = {}
    for run in runs:
        cpu = run.cpu / run.steps / (runs[0].cpu / runs[0].steps)
        speed = f"{run.step_seconds * per_epoch:9.2f} {run.step_seconds / runs[0].step_seconds:6.2f} {cpu:6.2f}"
        if not run.trained:
            print(f"{run.method.name:22} {speed} (from {run.steps} steps; not trained)")
            continue
        lpd, rmse = scores[run.method.name] = run.method.score(train, test)
        to_goal, own = run.seconds_to(goal), runs[0].seconds_to(goal)
        reached = f"{run.curve[-1][1]:22.4f} {to_goal:17.2f} {to_goal / own:6.2f}"
        print(f"{run.method.name:22} {speed} {reached} {lpd:10.4f} {rmse:11.4f}", flush=True)
    by_name = {run.method.name: run for run in runs}
    mse, ours, early = (by_name.get(kind.name) for kind in (MSE, Evidence, ShorterEvidence))
    ratios = []
    if mse is not None and ours is not None:
        ratios.append(Ratio("epoch", "MSE / lastlayer, wall", mse.step_seconds / ours.step_seconds, 1 / 1.25))
        ratios.append(Ratio("epoch", "MSE / lastlayer, cpu", mse.cpu / ours.cpu, None))
        for name in (name for name in (MSE.name, VBLL.name) if name in scores):
            gain = math.exp(scores[ours.method.name][0] - scores[name][0])
            ratios.append(Ratio("test density", f"lastlayer / {name}", gain, 1.0))
    if mse is not None and early is not None:
        ratios.append(Ratio("to MSE's RMSE", "MSE / lastlayer", mse.seconds_to(goal) / early.seconds_to(goal), 1.25))
    return ratios


def _advance(run: Run, source: Points, first: int, last: int, per_epoch: int, options: argparse.Namespace) -> None:
    step = first
    while step < last and run.goes_on:
        epoch, start = divmod(step, per_epoch)
        batches = source.batches(options.batch, seed=epoch, first=start)
        wall, cpu = _now(options), time.process_time()
        for batch in batches:
            drift = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / run.n_steps))
            for group in run.adam.param_groups:
                group["lr"] = drift * options.rate
            run.adam.zero_grad()
            run.method.backward(batch.X, batch.T, drift)
            run.adam.step()
            step, run.steps = step + 1, run.steps + 1
            if step == last or not run.goes_on:
                break
        run.wall += _now(options) - wall
        run.cpu += time.process_time() - cpu


def _mean(method: Method, X: Tensor) -> Tensor:
    with torch.no_grad():
        return method.mean(X).reshape(-1, 1)


def _now(options: argparse.Namespace) -> float:
    if options.device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


MEMORY_SCRIPT = """
import resource, sys, time
import numpy as np, torch
from benchmarks.timing import peak_of
from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.data.parquet import ParquetSource
folder, width, batch, device, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
training = TrainingOptions(learning_rate=1e-3)
parameters = dict(
    hidden=(width,), activation="silu", preset="evidence", dtype="float32", device=device, training=training,
    batch_size=batch, max_epochs=1,
)
BLLRegressor(**parameters).fit(np.random.randn(batch, 16), np.random.randn(batch))  # warm
if kind == "parquet":
    source = ParquetSource(folder, [f"x{j}" for j in range(16)], ["y"])
    source.n_rows
    fit = lambda: BLLRegressor(**parameters).fit_source(source)
else:
    X, y = (np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in "Xy")
    fit = lambda: BLLRegressor(**parameters).fit(X, y)
start = time.perf_counter()
peak = peak_of(fit, kind="RssAnon", every=0.01)
print(time.perf_counter() - start, peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


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


def memory(options: argparse.Namespace) -> list[Ratio]:
    """Run the section "memory": anonymous memory of a fit from disk; mapped pages belong to the system's cache."""
    print(f"\n{'rows':>12} {'seconds':>9} {'own memory, MB':>15} {'with mapped pages, MB':>22}")
    own = []
    for m in options.memory_rows:
        with tempfile.TemporaryDirectory() as folder:
            (write_parquet if options.memory_from == "parquet" else write_map)(folder, m)
            arguments = [folder, str(options.memory_width), str(options.batch), options.device, options.memory_from]
            command = [sys.executable, "-c", MEMORY_SCRIPT, *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds, peak, whole = map(float, done.stdout.split())
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
    product, ours, narrow = time_in_turns(*[lambda work=work: (work(), _now(options)) for work in passes], repeats=5)
    peak = 2 * n**3 / product.median
    print(f"\nmatrix product of {n:,}: {peak / 1e9:,.0f} GFLOP/s in float64; statistics of {m:,} x {k}:")
    ratios = []
    for name, timing in (("float64 features", ours), ("float32 features", narrow)):
        speed = 2 * m * (k + 1) ** 2 / timing.median
        print(f"  {name}: {timing}, {speed / 1e9:,.0f} GFLOP/s")
        ratios.append(Ratio("statistics", f"{name} / own matrix product", speed / peak, 0.6))
    return ratios


PROCESS_SCRIPT = """
import sys, time
import torch
from benchmarks.scale import features, make_rows
from lastlayer.data.distributed import join
from lastlayer.bayes.statistics import Readings
from lastlayer.data.rows import Points
from lastlayer.training import MiniBatches, Optimizer, RunningPosterior, train
torch.set_num_threads(1)
group = join()
rows, width, batch, dtype = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), getattr(torch, sys.argv[4])
X, T = (part.to(dtype) for part in make_rows(rows, 0))
network = features(width, 3, "cpu").to(dtype)
running = RunningPosterior(torch.tensor(float(rows), dtype=torch.float64), rows, process_group=group)
problem = MiniBatches(network, Points(X, Readings(T)), running, batch_size=batch)
start = time.perf_counter()
train(problem, Optimizer(1e-3, max_epochs=1))
if group.rank == 0:
    end = torch.cat([p.detach().flatten() for p in network.parameters()])
    torch.save({"seconds": time.perf_counter() - start, "end": end}, sys.argv[5])
group.shutdown()
"""


def processes(options: argparse.Namespace) -> list[Ratio]:
    """Run the section "processes", on the CPU with one thread per process."""
    print(f"\none epoch of {options.process_rows:,} rows, batch {options.batch:,}, one thread per process")
    ratios = []
    for dtype in ("float64", "float32"):
        found = []
        with tempfile.TemporaryDirectory() as folder:
            for world in (1, 2):
                out = f"{folder}/{world}.pt"
                sizes = [str(options.process_rows), str(options.width), str(options.batch), dtype, out]
                command, environment = (
                    [sys.executable, "-c", PROCESS_SCRIPT, *sizes],
                    os.environ | {"OMP_NUM_THREADS": "1"},
                )
                both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "WORLD_SIZE": str(world)}
                own = [both | {"RANK": str(i), "LOCAL_RANK": str(i)} if world > 1 else {} for i in range(world)]
                started = [subprocess.Popen(command, env=environment | variables) for variables in own]
                if any(process.wait() for process in started):
                    raise SystemExit("a process failed")
                found.append(torch.load(out, weights_only=True))
        one, two = found
        off = float((one["end"] - two["end"]).abs().max() / one["end"].abs().max())
        print(f"  {dtype}: {one['seconds']:.1f} s by one, {two['seconds']:.1f} s by two; largest difference {off:.1e}")
        ratios.append(Ratio("processes", f"one / two, {dtype}", one["seconds"] / two["seconds"]))
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
