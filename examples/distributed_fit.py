"""Fit one model by several processes, on one machine or many.

    torchrun --nproc-per-node 2 examples/distributed_fit.py --out model.lastlayer
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29500 examples/distributed_fit.py

Every process runs the same script. With GPUs, each process uses its own (nccl); without GPUs, they share the processor
(gloo). Pass --X and --y, two .npy files that all processes can read, or the script makes its own data. Every process
reads its own rows of each batch; statistics and gradients are summed over the processes, so the model equals that of a
single process up to float32 rounding. The first process saves it.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from numpy import ndarray

from lastlayer import BLLRegressor
from lastlayer.data.distributed import join
from lastlayer.data.sources import ArraySource


def example_rows(m: int, seed: int) -> tuple[ndarray, ndarray]:
    """m rows of four inputs and one target."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(m, 4)).astype(np.float32)
    return X, np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.1 * rng.normal(size=m)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--X", type=Path, help=".npy file of inputs")
    parser.add_argument("--y", type=Path, help=".npy file of targets")
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the built-in data")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=1_024, help="rows per batch, over all processes")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "model.lastlayer")
    options = parser.parse_args()

    group = join()
    if options.X is not None and options.y is not None:
        X, y = np.load(options.X, mmap_mode="r"), np.load(options.y, mmap_mode="r")
    else:
        X, y = example_rows(options.rows, seed=0)
    model = BLLRegressor(
        hidden=(64, 64), batch_size=options.batch, max_epochs=options.epochs, random_state=0, progress=True
    ).fit_source(ArraySource(X, y))
    if group.rank == 0:
        model.save(options.out)
        print(f"{group.world_size} processes, NLML {model.nlml_:.6f}, noise {model.noise_std_}, saved to {options.out}")
    group.shutdown()


if __name__ == "__main__":
    main()
