"""A stack on a GPU beside the processor: `python tests/on_gpu.py`, by hand, since CI has no GPU."""

import time

import numpy as np
import torch

from lastlayer.bayes.statistics import Readings
from lastlayer.data.rows import Points
from lastlayer.networks.mlp import InputSkip, StackedMLP
from lastlayer.training import Optimizer, Plateau, StackedNetworks, train

M, D, S = 400, 6, 10


def problem(device: str, kind: str, batch_size: int | None) -> StackedNetworks:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(M, D, generator=generator, dtype=torch.float64)
    T = torch.stack([X[:, 0].sin() + X[:, 1], X[:, 2] * X[:, 3]], 1)
    T = T + 0.1 * torch.randn(M, 2, generator=generator, dtype=torch.float64)
    if kind == "missing":
        T[torch.rand(M, 2, generator=generator) < 0.3] = torch.nan
    known = torch.rand(M, 2, generator=generator, dtype=torch.float64) if kind == "known" else None
    read = Readings.of(T, known).map(lambda x: x.to(device))
    parts = [np.setdiff1d(np.arange(M), np.arange(i, M, S)) for i in range(S)]
    stack = StackedMLP(D, (20, 20), generators=[torch.Generator().manual_seed(i) for i in range(S)])
    return StackedNetworks(
        InputSkip(stack).double().to(device),
        Points(X.to(device), read),
        parts,
        watched=[np.arange(i, M, S) for i in range(S)],
        prior_precision=torch.full((S,), 0.3, dtype=torch.float64),
        batch_size=batch_size,
    )


def main() -> None:
    for kind in ("complete", "missing", "known"):
        for batch_size in (None, 128):
            ends, seconds = [], []
            for device in ("cpu", "cuda"):
                own = problem(device, kind, batch_size)
                start = time.perf_counter()
                history = train(own, Optimizer(4e-2, 100), plateau=Plateau(own.watch))
                seconds.append(time.perf_counter() - start)
                ends.append(torch.tensor(history.nlml, dtype=torch.float64))
            n = min(map(len, ends))
            apart = float((ends[0][:n] - ends[1][:n]).abs().max())
            print(f"{kind}, batches of {batch_size}: NLML apart by {apart:.1e}, seconds {seconds}", flush=True)
            assert apart < 1e-6


if __name__ == "__main__":
    main()
