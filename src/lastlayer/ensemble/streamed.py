"""One network trained on a source of batches, with the exact last layer of all its rows."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lastlayer._internal.chunks import CHUNK_ROWS
from lastlayer._internal.digests import Digest, digest_of, layout_of
from lastlayer.bayes.maximum import by_evidence
from lastlayer.data.distributed import ProcessGroup
from lastlayer.data.rows import Points
from lastlayer.data.scaling import Scales
from lastlayer.data.sources import Source, StandardizedSource, common_of, scales_of
from lastlayer.ensemble.problems import checkpoint_of, mini_batches, optimizer_of
from lastlayer.networks.architecture import Architecture
from lastlayer.networks.mlp import finite_features
from lastlayer.networks.structured import converted
from lastlayer.predictor.member import Member
from lastlayer.settings.resolve import Settings
from lastlayer.training import TrainingHistory, streamed_statistics, train


@dataclass(frozen=True)
class Streamed:
    """A network trained on a source."""

    member: Member
    scales: Scales
    sample: Points
    """Some standardised training rows."""
    history: TrainingHistory


def train_on_source(
    source: Source, architecture: Architecture, *, checkpoint: Path | None = None, progress: bool = False
) -> Streamed:
    """Train one network on a source of batches."""
    s, process_group = architecture.settings, ProcessGroup.current()
    assert s.batch_size is not None
    device, family = s.torch_device, s.families[0]
    process_group.agree(_common(s) | common_of(source) | {"with checkpoint": checkpoint is not None})
    digest = None if checkpoint is None else Digest()
    scales = scales_of(source, s.batch_size, process_group=process_group, digest=digest)
    rows = StandardizedSource(source, scales, device, torch.float32)
    first = next(rows.batches(s.batch_size, process_group=process_group))
    sample = first.take(slice(CHUNK_ROWS))
    network = architecture.build(first.X.shape[1], torch.Generator().manual_seed(s.seed))
    network = network.to(device=device, dtype=torch.float32)
    with torch.no_grad():
        finite_features(network.eval(), first.X[:2])
    process_group.agree({"backbone": layout_of(network)} if s.backbone is not None else {})
    process_group.broadcast_state(network)
    count = torch.tensor(scales.count, dtype=torch.float64, device=device)
    problem = mini_batches(
        network,
        rows,
        s,
        count,
        scales.n_rows,
        family.prior_precision,
        is_table=first.X.dim() == 2,
        process_group=process_group,
    )
    kept = None
    if checkpoint is not None:
        digests = digest_of(*process_group.gather(str(digest)))
        data = {"rows": scales.n_rows, "digest": digests, "processes": process_group.world_size}
        kept = checkpoint_of(checkpoint / "training.safetensors", architecture, network, family.prior_precision, data)
    history = train(problem, optimizer_of(s), checkpoint=kept, progress=progress and process_group.rank == 0)
    process_group.broadcast_state(network)  # buffers, such as those of batch norm, depend on the rows of each process
    network = network.to(s.torch_dtype)
    exact = StandardizedSource(source, scales, device, s.torch_dtype)
    parts = exact.batches(s.batch_size, process_group=process_group)
    statistics = streamed_statistics(network, parts, process_group=process_group)
    history.gap = float(problem.running.gap(statistics)) if problem.running.snapshot is not None else None
    (posterior,) = by_evidence([statistics], noise=s.noise_structure, bias_prior=s.bias_prior)
    sample = replace(sample, X=converted(sample.X, s.torch_dtype))
    return Streamed(Member(network, posterior, family), scales, sample, history)


def _common(settings: Settings) -> dict[str, Any]:
    """Settings that all processes share: each may have its own device."""
    return settings.to_json() | {"device": settings.torch_device.type}
