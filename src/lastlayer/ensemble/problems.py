"""From settings to what the training engine takes."""

from typing import Any

import torch
from torch import nn

from lastlayer.distributed import ONE, ProcessGroup
from lastlayer.settings import Settings
from lastlayer.sources import Source
from lastlayer.training import MiniBatches, Optimizer, RunningPosterior, StackedBatches


def optimizer_of(settings: Settings) -> Optimizer:
    return Optimizer(settings.optimizer, settings.learning_rate, settings.max_epochs)


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
    """Mini-batch training as the settings have it; `count` is the total weight of all rows, by each network."""
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
        refresh=settings.statistics_refresh,
        is_table=is_table,
    )


def identity(settings: Settings, prior_precisions: Any, data: list[Any]) -> dict[str, Any]:
    """What a checkpoint belongs to."""
    content = {name: value for name, value in settings.to_json().items() if name != "device"}
    return content | {"hidden_prior": prior_precisions, "data": data}
