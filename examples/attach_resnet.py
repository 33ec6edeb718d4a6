"""A small ResNet, trained by a plain loop, gets an exact last layer that recognises pictures unlike those of training.

    python examples/attach_resnet.py

The pictures, made here, show a bright disc, and the target is its radius. The network is trained on the mean squared
error; `lastlayer.attach` then needs one pass over the pictures. For new discs, for discs larger than any in training,
and for pictures of something else, the script prints the error, the predicted standard deviation, and the mean share of
training pictures with a smaller affine cost.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lastlayer

SIZE = 16


def discs(n: int, rng: np.random.Generator, *, radius: tuple[float, float] = (2.0, 4.0)) -> tuple[Tensor, Tensor]:
    """Noisy pictures (n, 1, 16, 16) of a disc at a random place, with a soft edge, and its radius."""
    r, place = rng.uniform(*radius, n), rng.uniform(6, SIZE - 7, (n, 2))
    rows, columns = np.mgrid[0:SIZE, 0:SIZE]
    distance = np.hypot(rows - place[:, :1, None], columns - place[:, 1:, None])
    return _picture(1 / (1 + np.exp(3 * (distance - r[:, None, None]))), rng), torch.tensor(r, dtype=torch.float32)


def bars(n: int, rng: np.random.Generator) -> Tensor:
    """Pictures of a bar in a random direction: they have no radius."""
    angle, rows = rng.uniform(0, np.pi, n), np.mgrid[0:SIZE, 0:SIZE] - (SIZE - 1) / 2
    across = rows[0] * np.cos(angle)[:, None, None] + rows[1] * np.sin(angle)[:, None, None]
    return _picture(np.abs(across) < 1.5, rng)


def inverted(pictures: Tensor) -> Tensor:
    """Dark discs on a bright background."""
    return 1 - pictures


def _picture(clean: ndarray, rng: np.random.Generator) -> Tensor:
    noisy = clean + 0.05 * rng.standard_normal(clean.shape)
    return torch.tensor(noisy, dtype=torch.float32)[:, None]


class Block(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)]
        self.inside = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inside(x))


class ResNet(nn.Module):
    """A stem, two blocks, the mean over the picture, and a linear layer."""

    def __init__(self, width: int = 12, n_outputs: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3))).squeeze(-1)


def train(network: nn.Module, loader: DataLoader, epochs: int) -> None:
    """A plain training loop on the squared error."""
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    for _ in range(epochs):
        for x, y in loader:
            optimiser.zero_grad()
            nn.functional.mse_loss(network(x), y).backward()
            optimiser.step()
        schedule.step()


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=1_000)
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*discs(options.pictures, rng)), batch_size=64, shuffle=True)
    held_out = DataLoader(TensorDataset(*discs(options.pictures // 5, rng)), batch_size=64)
    network = ResNet()
    train(network, loader, options.epochs)
    model = lastlayer.attach(network, loader, calibration=held_out)
    print(f"{model.calibration_}\n{'pictures of':32}{'rmse':>8}{'std':>8}{'cost above training':>22}")
    like, radius = discs(200, rng)
    large, large_radius = discs(200, rng, radius=(5.0, 7.0))
    stds = {}
    for name, pictures, truth in (
        ("new discs", like, radius),
        ("larger discs", large, large_radius),
        ("dark discs on a bright ground", inverted(like), None),
        ("bars", bars(200, rng), None),
    ):
        p, where = model.predictive(pictures), model.extrapolation(pictures)
        rmse = "" if truth is None else f"{np.sqrt(np.mean((p.mean - truth.numpy()) ** 2)):.3f}"
        stds[name] = float(np.median(p.std))
        print(f"{name:32}{rmse:>8}{stds[name]:8.3f}{where.quantile.mean():22.1%}")
    return stds


if __name__ == "__main__":
    main()
