"""A transformer over tokens, trained by a plain loop, gets an exact last layer for every token.

    python examples/clients/transformer.py

Batches are dictionaries as tokenizers make them: `input_ids`, `attention_mask`, and `labels`, one number per token.
Each word changes a level that decays from word to word, and the network predicts the level after each word. Sentences
differ in length; padding does not enter the statistics. Words that were not in training have a larger variance.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lastlayer

WORDS, LENGTH, DECAY, NOISE = 12, 10, 0.6, 0.05
KNOWN = (1, 9)
"""Words in training are 1 to 8; 0 is padding, and 9 to 11 are unknown."""
Batch = dict[str, Tensor]


def sentences(n: int, rng: np.random.Generator, words: tuple[int, int] = KNOWN) -> Batch:
    """n sentences of 3 to 10 words, and the level after each word, with noise."""
    ids = rng.integers(*words, (n, LENGTH))
    mask = np.arange(LENGTH) < rng.integers(3, LENGTH + 1, (n, 1))
    steps, level = np.cos(1.3 * ids), np.zeros((n, LENGTH))
    for t in range(LENGTH):
        level[:, t] = steps[:, t] + (DECAY * level[:, t - 1] if t else 0.0)
    level += NOISE * rng.standard_normal(level.shape)
    return {
        "input_ids": torch.tensor(np.where(mask, ids, 0)),
        "attention_mask": torch.tensor(mask.astype(np.int64)),
        "labels": torch.tensor(level, dtype=torch.float32),
    }


def batches(data: Batch, size: int = 64) -> DataLoader:
    """Shuffled batches, each a dictionary."""
    rows = [{name: values[i] for name, values in data.items()} for i in range(len(data["labels"]))]
    return DataLoader(rows, batch_size=size, shuffle=True)  # type: ignore[arg-type]


class Block(nn.Module):
    """Attention to earlier tokens, and a small network at each token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.to_attention, self.from_attention = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inside = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        parts = self.to_attention(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.movedim(2, 0).transpose(2, 3)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
        x = x + self.from_attention(mixed.transpose(1, 2).flatten(2))
        return x + self.inside(self.norms[1](x))


class Encoder(nn.Module):
    """Embeddings of words and positions, blocks of attention, and a linear layer at each token.

    There is no normalisation before the linear layer: it would hide that features of unknown words differ.
    """

    def __init__(self, width: int = 24, blocks: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.head = nn.Linear(width, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        earlier = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=input_ids.device).tril()
        itself = torch.eye(LENGTH, dtype=torch.bool, device=input_ids.device)  # padding must attend to something
        seen = (earlier & attention_mask[:, None].bool()) | itself
        x = self.words(input_ids) + self.places.weight
        for block in self.blocks:
            x = block(x, seen)
        return {"logits": self.head(x)[..., 0]}


def loss_of(network: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error over the tokens that are not padding."""
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    error = network(**inputs)["logits"] - batch["labels"]
    return error[batch["attention_mask"] > 0].square().mean()


def train(network: nn.Module, loader: DataLoader, epochs: int) -> None:
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(network, batch).backward()
            optimizer.step()
        schedule.step()


def scores(model: lastlayer.BLLRegressor, data: Batch) -> dict[str, float]:
    """Scores of the tokens that are not padding: error, predicted standard deviation, share inside 90% intervals."""
    inputs = {name: values for name, values in data.items() if name != "labels"}
    there, y = data["attention_mask"].numpy() > 0, data["labels"].numpy()
    mean, std = (values[there] for values in model.predict(inputs, return_std=True))
    inside = np.abs(mean - y[there]) < 1.645 * std
    rmse = np.sqrt(np.mean((mean - y[there]) ** 2))
    return {"rmse": float(rmse), "std": float(np.median(std)), "inside 90%": float(inside.mean())}


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=1_000)
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    loader, held_out = batches(sentences(options.sentences, rng)), batches(sentences(options.sentences // 5, rng))
    network = Encoder()
    train(network, loader, options.epochs)
    model = lastlayer.attach(network, loader, calibration=held_out)
    table = {
        "known words": scores(model, sentences(200, rng)),
        "unknown words": scores(model, sentences(200, rng, (KNOWN[1], WORDS))),
    }
    print(f"{'sentences of':16}{'rmse':>8}{'std':>8}{'inside 90%':>12}")
    for name, row in table.items():
        print(f"{name:16}{row['rmse']:8.3f}{row['std']:8.3f}{row['inside 90%']:12.0%}")
    return table


if __name__ == "__main__":
    main()
