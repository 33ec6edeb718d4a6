"""The training problem of a network: the one place where the structure of its rows is asked about."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.data.distributed import ONE, ProcessGroup
from lastlayer.data.rows import Rows
from lastlayer.data.sources import Source
from lastlayer.settings.types import STRUCTURES, Settings
from lastlayer.training.engine import Problem
from lastlayer.training.objectives import KnownNoise, MeanSquaredError, Objective, Profiled
from lastlayer.training.problems import FullBatch, MiniBatches, SampledRows
from lastlayer.training.running_posterior import RunningPosterior


def objective_for(
    rows: Rows, settings: Settings, shape: tuple[int, ...], n_features: int, generator: torch.Generator | None = None
) -> Objective:
    """Objective of one network, or of a stack; that of the squared error draws its output layer."""
    layer, q = settings.layer, rows.main.readings.t.shape[-1]
    noise, prior = STRUCTURES[layer.noise], layer.bias_prior
    if settings.training.objective == "mse":
        made: Objective = MeanSquaredError(n_features, q, noise=noise, bias_prior=prior, generator=generator)
    elif rows.learned:
        made = Profiled(bias_prior=prior, noise=noise, shape=shape)
    else:
        made = KnownNoise(q, bias_prior=prior, shape=shape)
    return made.to(rows.main.X.device)


def problem_for(
    network: nn.Module, objective: Objective, rows: Rows, settings: Settings, precision: Float[Tensor, "*s"]
) -> Problem:
    """Problem of one network, or of a stack with functionals, on all rows or on batches."""
    s, main = settings.training, rows.main
    if s.batch_size is not None and rows.complete:
        count = main.T.new_tensor(len(main.X)) if main.weight is None else main.weight.sum(-1)
        n_rows, is_table = len(main.X), main.X.dim() == 2
        return batches_for(network.float(), main.float(), settings, precision, count, n_rows, is_table=is_table)
    if precision.dim():
        network, rows = network.float(), rows.to(main.X.device, torch.float32)
    if s.batch_size is None:
        return FullBatch(network, objective, rows, prior_precision=precision, chunk_size=s.chunk_size)
    return SampledRows(network, objective, rows, batch_size=s.batch_size, seed=settings.seed, prior_precision=precision)


def batches_for(
    network: nn.Module,
    source: Source,
    settings: Settings,
    precision: Float[Tensor, "*s"],
    count: Float[Tensor, "*s"],
    n_rows: int,
    *,
    is_table: bool,
    process_group: ProcessGroup = ONE,
) -> MiniBatches:
    """Mini-batch problem of a source; `count` is the total weight of all rows, per network."""
    layer, batch_size = settings.layer, settings.training.batch_size
    assert batch_size is not None
    running = RunningPosterior(
        count, n_rows, noise=STRUCTURES[layer.noise], bias_prior=layer.bias_prior, process_group=process_group
    )
    return MiniBatches(
        network,
        source,
        running,
        batch_size=batch_size,
        seed=settings.seed,
        prior_precision=precision,
        is_table=is_table,
    )
