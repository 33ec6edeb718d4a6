"""A PyTorch module of your own as the feature extractor of a regressor with exact uncertainty.

    python examples/own_network.py

The module maps a batch to features, one row per sample, without an output layer: `BLLRegressor` adds a Bayesian last
layer and trains both by the marginal likelihood. Here, inputs are short signals and the target is their frequency, so
the module is a small convolutional network. A module gives one network; a function that returns a new module gives a
mixture of several networks.

The table compares both on new signals and on signals of higher frequencies than any in training: error, predicted
standard deviation, share of the frequencies in 90% intervals, and share of the signals farther out than every training
signal. Intervals do not hold at the higher frequencies, but `extrapolation` detects these signals.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, nn

from lastlayer import BLLRegressor

LENGTH, NOISE = 32, 0.1


def signals(n: int, rng: np.random.Generator, low: float = 1.0, high: float = 4.0) -> tuple[ndarray, ndarray]:
    """Noisy sine waves (n, 1, 32) of random phase, and their frequencies (n,)."""
    frequency, phase = rng.uniform(low, high, n), rng.uniform(0, 2 * np.pi, n)
    t = np.linspace(0, 1, LENGTH)
    waves = np.sin(2 * np.pi * frequency[:, None] * t + phase[:, None])
    return (waves + NOISE * rng.standard_normal(waves.shape))[:, None], frequency


class Features(nn.Module):
    """Two convolutions, the mean square over time, and one linear layer: features (n, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(1, 16, 5, padding=2), nn.SiLU(), nn.Conv1d(16, 16, 5, padding=2), nn.SiLU()
        )
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.convolutions(x).square().mean(2)))


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", type=int, default=400, help="signals to fit")
    parser.add_argument("--epochs", type=int, default=300, help="passes over the signals")
    parser.add_argument("--members", type=int, default=3, help="networks of the mixture")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    X, y = signals(options.signals, rng)
    like, outside = signals(200, rng), signals(200, rng, low=5.0, high=7.0)

    torch.manual_seed(0)
    models = {
        "one network": BLLRegressor(backbone=Features(), max_epochs=options.epochs, random_state=0),
        "mixture": BLLRegressor(
            backbone=Features, n_members=options.members, max_epochs=options.epochs, random_state=0
        ),
    }
    print(f"{'':34}{'RMSE':>8}{'std':>8}{'in 90% intervals':>18}{'farther out':>14}")
    table = {}
    for name, model in models.items():
        model.fit(X, y)
        for kind, (waves, frequency) in (("new signals", like), ("higher frequencies", outside)):
            prediction, where = model.predictive(waves), model.extrapolation(waves)
            lower, upper = prediction.interval(0.9)
            table[f"{name}, {kind}"] = {
                "rmse": float(np.sqrt(np.mean((prediction.mean - frequency) ** 2))),
                "std": float(np.median(prediction.std)),
                "inside": float(np.mean((lower <= frequency) & (frequency <= upper))),
                "farther out": float(np.mean(where.quantile == 1)),
            }
    for row, (rmse, std, inside, farther) in ((row, scores.values()) for row, scores in table.items()):
        print(f"{row:34}{rmse:8.3f}{std:8.3f}{inside:18.0%}{farther:14.0%}")
    return table


if __name__ == "__main__":
    main()
