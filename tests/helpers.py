"""What several test files need: tolerances by dtype, data, and slow, obvious forms of the formulas."""

import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import textwrap
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import lastlayer
from lastlayer.bayes.evidence import optimal_alpha
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Statistics
from lastlayer.data.rows import Points
from lastlayer.data.scaling import Standardizer
from lastlayer.ensemble.splits import SHELLS, Split, blocked_folds, centres, leave_out, outer_folds
from lastlayer.errors import InputError
from lastlayer.estimators.base import LastLayerRegressor
from lastlayer.networks.fourier import fourier_network
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.predictor.member import Member
from lastlayer.tables import Table
from lastlayer.training import Problem


class NotFinite(Exception):
    """An answer that is not a number."""


def refused(words: str, call: Any, *given: Any, error: type[Exception] = InputError, **options: Any) -> None:
    """The call ends with this error, in these words."""
    with pytest.raises(error, match=words):
        call(*given, **options)


def table(**columns: Any) -> Table:
    """A table whose cells are objects, as those of files are."""
    return Table({name: np.array(cells, dtype=object) for name, cells in columns.items()})


EVIL = "</script><img src=x onerror=alert(1)>"


def evil_table(m: int, seed: int) -> Table:
    """Texts and names that would be code in a careless page; those of column id name the rows."""
    rng = np.random.default_rng(seed)
    x, kind = rng.uniform(-2, 2, m) * (1 + seed), rng.choice([EVIL, "plain"], m)
    y = np.sin(x) + (kind == EVIL) + 0.1 * rng.normal(size=m)
    names = [f"{EVIL}{i}" for i in range(m)]
    return table(**{f"x{EVIL}": x, f"kind{EVIL}": kind, f"id{EVIL}": names, f"y{EVIL}": y, "z": x * y})


def reloaded(model: Any, folder: Path, **words: Any) -> Any:
    """The model as its file has it."""
    model.save(folder / "reloaded")
    return lastlayer.load(str(folder / "reloaded"), **words)


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}


def close(a: Tensor, b: Tensor, *, loose: float = 1.0) -> None:
    """Equal to the tolerance of the coarser dtype, relative to the largest entry; `loose` widens it, with a reason."""
    a, b = torch.as_tensor(a).detach(), torch.as_tensor(b).detach()
    rtol = loose * max(TOLERANCE[a.dtype], TOLERANCE[b.dtype])
    scale = max(float(b.abs().max()) if b.numel() else 0.0, 1e-300)
    assert a.shape == b.shape, (a.shape, b.shape)
    worst = float((a.double() - b.double()).abs().max()) / scale if b.numel() else 0.0
    assert worst <= rtol, f"off by {worst:.2e} of the largest entry, tolerance {rtol:.0e}"


def problem(m: int = 40, k: int = 5, q: int = 2, seed: int = 0, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Linear features (of a lower rank on request, with an offset) and correlated targets."""
    g = torch.Generator().manual_seed(seed)
    rank = k if rank is None else rank
    P = torch.randn(m, rank, generator=g, dtype=torch.float64) @ torch.randn(rank, k, generator=g, dtype=torch.float64)
    P = P + torch.randn(k, generator=g, dtype=torch.float64)
    noise = torch.randn(m, q, generator=g, dtype=torch.float64) @ (
        torch.eye(q, dtype=torch.float64) + 0.4 * torch.ones(q, q, dtype=torch.float64)
    )
    T = P @ torch.randn(k, q, generator=g, dtype=torch.float64) + 0.3 * noise + 1.5
    return P, T


def precision_matrix(P: Tensor, log_alpha: float, bias_prior: str) -> Tensor:
    """Lambda_bar written down entry by entry."""
    Phi = affine_features(P)
    penalty = torch.eye(Phi.shape[1], dtype=torch.float64)
    if bias_prior == "flat":
        penalty[-1, -1] = 0
    return Phi.T @ Phi + torch.exp(torch.tensor(-log_alpha, dtype=torch.float64)) * penalty


def sine(m: int = 60, q: int = 0, seed: int = 0, d: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Noisy sines of the first input; q = 0: 1-D targets."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-3, 3, (m, d))
    clean = np.stack([np.sin(X[:, 0] + 0.5 * j) * (1 + j) + 2 for j in range(max(q, 1))], 1)
    y = clean + 0.15 * rng.standard_normal(clean.shape) @ (np.eye(max(q, 1)) + 0.5)
    return X, y if q else y[:, 0]


def prediction(
    c: int = 1, m: int = 30, q: int = 2, seed: int = 0, *, correlated: bool = True, **more: Any
) -> MixturePrediction:
    """Of c components at m points, with weights of each point."""
    rng = np.random.default_rng(seed)
    return MixturePrediction(
        component_mean=rng.normal(0, 2, (c, m, q)),
        component_epistemic_var=rng.uniform(0.2, 2, (c, m, q)),
        component_noise_var=rng.uniform(0.2, 2, (c, m, q)),
        affine_cost=rng.uniform(0, 3, m),
        weights=rng.dirichlet(np.ones(c), m).T,
        correlation=np.stack([np.corrcoef(rng.normal(size=(q, 4 * q))).reshape(q, q)] * c) if correlated else None,
        **more,
    )


def small_process() -> AbstractContextManager:
    """While mixtures are fitted and loaded: 32 frequencies, an eighth of the usual number."""
    return mock.patch.object(inspect.unwrap(fourier_network), "__defaults__", (32,))


def last_layer_rows(model: LastLayerRegressor, X: Any, y: Any, *, member: int = 0) -> tuple[Tensor, Tensor]:
    """Affine features and standardised targets: what the last layer of a member is fitted to."""
    data = model.fitted_.data(np.asarray(X), np.asarray(y))
    return model.fitted_.features(member, data.X), data.T


def held_from(member: Member, data: Points) -> np.ndarray:
    """Mask of the rows that were held out from a member."""
    return np.isin(data.keys(), member.unseen.keys)


def exact_layer(
    Phi: Tensor,
    T: Tensor,
    at: Tensor,
    weight: Tensor | None = None,
    *,
    noise: Any = "diagonal",
    bias_prior: Any = "flat",
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and covariance of targets, and affine cost, by the posterior at the maximum of the evidence."""
    scaler = Standardizer.fit(T.double(), sample_weight=weight)
    statistics = Statistics.from_features(Phi, scaler.forward(T), sample_weight=weight)
    best = optimal_alpha(statistics, noise=noise, bias_prior=bias_prior)
    p = Posterior(statistics, best.log_alpha, best.noise_cov, noise, bias_prior).predict(at)
    unit = torch.outer(scaler.scale, scaler.scale)
    return p.mean * scaler.scale + scaler.mean, p.target_cov() * unit, p.variance_ratio


def free_port() -> int:
    """For processes that are to find each other."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Losses(Problem):
    """Any differentiable loss of a stack of networks, one value per network."""

    check_every = 25

    def __init__(self, parameters, loss):
        super().__init__(torch.nn.Module(), parameters[0].shape[:1], parameters)
        self.evaluate = loss

    def gradient(self, batch, speed):
        losses = self.evaluate()
        losses.sum().backward()
        return losses

    @property
    def log_alpha(self):
        return torch.tensor(torch.nan)


RANKS_OF_SCENARIOS = """
import json, os, runpy, signal, sys, time, traceback
import torch._dynamo, torch.distributed.nn

script, folder, *ports = sys.argv[1:]
scenarios = runpy.run_path(script)["SCENARIOS"]  # what it imports is imported once for all processes

def rank(number, name, port):
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.makedirs(f"{folder}/{name}-{number}")
    os.chdir(f"{folder}/{name}-{number}")
    try:
        said = scenarios[name](number)
    except BaseException:
        said = traceback.format_exc()
    with open(f"{folder}/{name}-{number}.json", "w") as file:
        json.dump(said, file)
    os._exit(0)

for name, port in zip(scenarios, ports):
    started = [os.fork() or rank(number, name, port) for number in (0, 1)]
    deadline = time.monotonic() + 60
    while started and time.monotonic() < deadline:
        started = [process for process in started if not os.waitpid(process, os.WNOHANG)[0]]
        time.sleep(0.01)
    for process in started:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
"""


def by_two_processes(code: str, folder: Path) -> dict[str, list[Any]]:
    """What the functions SCENARIOS of a script return, each called by two processes of rank 0 and 1.

    None for a process that has ended before, or that had to be ended after a minute.
    """
    script = folder / "scenarios.py"
    script.write_text(textwrap.dedent(code))
    names = runpy.run_path(str(script))["SCENARIOS"]
    ports = [str(free_port()) for _ in names]
    command = [sys.executable, "-c", RANKS_OF_SCENARIOS, str(script), str(folder), *ports]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=300)
    files = {name: [folder / f"{name}-{rank}.json" for rank in (0, 1)] for name in names}
    return {
        name: [json.loads(file.read_text()) if file.exists() else None for file in both] for name, both in files.items()
    }


def alone_and_by_two(code: str, folder: Path) -> list[dict[str, Tensor]]:
    """What a script saves as {world}-{rank}.pt in the folder it is given: alone, then by each of two processes."""
    script, scenario = (
        folder / "ranks.py",
        """
        import runpy, sys, lastlayer
        [getattr(lastlayer, name) for name in lastlayer.__all__]

        def both(rank):
            sys.argv = ["", {folder!r}]
            runpy.run_path({script!r})

        SCENARIOS = {{"both": both}}
    """,
    )
    script.write_text(textwrap.dedent(code))
    told = by_two_processes(scenario.format(folder=str(folder), script=str(script)), folder)
    assert told == {"both": [None, None]}, told
    with mock.patch.object(sys, "argv", [str(script), str(folder)]):
        runpy.run_path(str(script))
    return [torch.load(folder / name, weights_only=True) for name in ("1-0.pt", "2-0.pt", "2-1.pt")]


def random_splits(groups, k: int, rng: np.random.Generator) -> list[Split]:
    """Splits that hold out each group once, together with others picked at random."""
    return leave_out(groups, np.array_split(rng.permutation(groups.max() + 1), k), "random")


def blocked_splits(X, groups, k: int) -> list[Split]:
    """Splits that hold out each group once, together with its neighbours."""
    return leave_out(groups, blocked_folds(centres(X, groups), k), "blocked")


def shell_splits(X, groups, inner=SHELLS) -> list[Split]:
    """Splits that hold out the groups farthest from the centre; `inner` are the fractions that remain."""
    return leave_out(groups, outer_folds(centres(X, groups), inner), "shell")
