"""PyTorch Lightning trains a network on batches that are dictionaries; a callback attaches the last layer.

    python examples/clients/lightning_loop.py

The network and the sentences are those of `transformer.py`. `AttachLastLayer` runs at the end of training on the
loader of the trainer: `callback.model` is a fitted model that predicts every token.
"""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from transformer import Batch, Encoder, batches, loss_of, scores, sentences

from lastlayer import BLLRegressor, attach


class Tokens(pl.LightningModule):  # type: ignore[misc]
    """The Lightning module: forward pass, loss and optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self.encoder(**inputs)
        return outputs

    def training_step(self, batch: Batch, _: int) -> Tensor:
        return loss_of(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


class AttachLastLayer(pl.Callback):  # type: ignore[misc]
    """Call `lastlayer.attach` on the trained module at the end of `trainer.fit`, with the loader of the trainer."""

    model: BLLRegressor | None = None

    def __init__(self, calibration: Iterable[Any] | None = None) -> None:
        super().__init__()
        self.calibration = calibration

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.model = attach(pl_module, trainer.train_dataloader, calibration=self.calibration)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=1_000)
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    loader, held_out = batches(sentences(options.sentences, rng)), batches(sentences(options.sentences // 5, rng))
    callback = AttachLastLayer(calibration=held_out)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Tokens(), loader)
    assert callback.model is not None
    table = scores(callback.model, sentences(200, rng))
    print(", ".join(f"{name} {value:.3f}" for name, value in table.items()))
    return table


if __name__ == "__main__":
    main()
