"""Training problems, optimizers and checkpoints from settings."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lastlayer._internal.digests import digest_of, digest_of_parameters, layout_of, name_of
from lastlayer.data.distributed import ONE, ProcessGroup
from lastlayer.data.sources import Source
from lastlayer.networks.architecture import Architecture
from lastlayer.settings.resolve import Settings
from lastlayer.training import Checkpoint, MiniBatches, Optimizer, RunningPosterior, StackedBatches


def optimizer_of(settings: Settings) -> Optimizer:
    """Optimizer that the settings describe."""
    return Optimizer(settings.learning_rate, settings.max_epochs)


def mini_batches(
    network: nn.Module,
    source: Source,
    settings: Settings,
    count: torch.Tensor,
    n_rows: int,
    prior_precision: float | torch.Tensor,
    *,
    is_table: bool,
    process_group: ProcessGroup = ONE,
) -> MiniBatches:
    """Mini-batch problem that the settings describe; `count` is the total weight of all rows, per network."""
    assert settings.batch_size is not None
    structure, prior = settings.noise_structure, settings.bias_prior
    running = RunningPosterior(count, n_rows, noise=structure, bias_prior=prior, process_group=process_group)
    return (StackedBatches if count.dim() else MiniBatches)(
        network,
        source,
        running,
        batch_size=settings.batch_size,
        seed=settings.seed,
        prior_precision=prior_precision,
        is_table=is_table,
    )


def checkpoint_of(
    path: Path, architecture: Architecture, network: nn.Module, prior_precisions: Any, data: dict[str, Any]
) -> Checkpoint:
    """Checkpoint of a new training, identified by all settings but the device, the user's network, and the data."""
    backbone = architecture.backbone
    content = {name: value for name, value in architecture.settings.to_json().items() if name != "device"}
    content["backbone"] = None if backbone is None else digest_of(layout_of(network))
    if isinstance(backbone, nn.Module):
        content["backbone"] += f", weights {digest_of_parameters(network)}"
    elif backbone is not None:
        content["backbone"] += f", made by {name_of(backbone)}"
    content |= {"hidden_prior": prior_precisions, "data": data}
    return Checkpoint(path, content, draws=backbone is not None)
