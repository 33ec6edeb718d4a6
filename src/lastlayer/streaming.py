"""From a source of batches to a trained network with its exact last layer; memory does not grow with the rows."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lastlayer.fitting import Architecture, training_words
from lastlayer.model import check_features
from lastlayer.ranks import Ranks
from lastlayer.sources import Scales, Source, StandardizedSource, scales_of
from lastlayer.statistics import CHUNK_ROWS
from lastlayer.training import (
    Checkpoint,
    Data,
    LastLayer,
    Optimiser,
    Refresh,
    RunningLayer,
    Training,
    last_layer,
    streamed_statistics,
    train_batches,
)
from lastlayer.types import BiasPrior, NoiseStructure

BATCH_SIZE = 4_096


@dataclass(frozen=True)
class Streamed:
    """What came out."""

    network: nn.Module
    layer: LastLayer
    scales: Scales
    sample: Data
    """Some standardised training rows."""
    training: Training


@dataclass(frozen=True)
class Streamer:
    """How to train one network on batches, on one process or several."""

    architecture: Architecture
    noise: NoiseStructure
    bias_prior: BiasPrior
    optimiser: Optimiser
    batch_size: int
    refresh: Refresh | None
    strength: float
    device: torch.device
    dtype: torch.dtype
    seed: int
    checkpoint: Path | None = None
    progress: bool = False

    def __call__(self, source: Source) -> Streamed:
        """One pass for the scales, `max_epochs` for the network, one for the exact last layer."""
        ranks = Ranks.started()
        scales = scales_of(source, self.batch_size, ranks=ranks)
        rows = StandardizedSource(source, scales, self.device, torch.float32)
        first = next(rows.batches(self.batch_size, ranks=ranks))
        sample = Data(first.X[:CHUNK_ROWS], first.T[:CHUNK_ROWS].double())
        network = self.architecture.build(tuple(first.X.shape), torch.Generator().manual_seed(self.seed))
        network = network.to(device=self.device, dtype=torch.float32)
        with torch.no_grad():
            check_features(network.eval()(first.X[:2]), first.X[:2])
        count = torch.tensor(scales.count, dtype=torch.float64, device=self.device)
        layer = RunningLayer(count, scales.n_rows, noise=self.noise, bias_prior=self.bias_prior, ranks=ranks)
        record = train_batches(
            network,
            rows,
            layer,
            self.optimiser,
            batch_size=self.batch_size,
            seed=self.seed,
            strength=self.strength,
            refresh=self.refresh,
            checkpoint=self._checkpoint(scales),
            is_table=first.X.dim() == 2,
            progress=self.progress and ranks.rank == 0,
        )
        network = network.to(self.dtype)
        exact = StandardizedSource(source, scales, self.device, self.dtype)
        parts = (Data(b.X, b.T.double(), b.weight) for b in exact.batches(self.batch_size, ranks=ranks))
        statistics = streamed_statistics(network, parts, ranks=ranks)
        record.gap = float(layer.gap(statistics))
        final = last_layer(statistics, noise=self.noise, bias_prior=self.bias_prior)
        return Streamed(network, final, scales, Data(sample.X.to(self.dtype), sample.T), record)

    def _checkpoint(self, scales: Scales) -> Checkpoint | None:
        if self.checkpoint is None:
            return None
        inputs = [] if scales.inputs is None else scales.inputs.mean.tolist()
        data = [scales.n_rows, inputs, scales.targets.mean.tolist(), scales.targets.scale.tolist()]
        words = training_words(
            self.architecture,
            self.noise,
            self.bias_prior,
            self.optimiser,
            self.batch_size,
            self.refresh,
            self.strength,
            self.seed,
            data,
        )
        return Checkpoint(self.checkpoint / "training.safetensors", words)
