"""One network trained on a source of batches, with the exact last layer of all its rows."""

from dataclasses import replace

import numpy as np
import torch

from lastlayer._internal.arrays import converted
from lastlayer._internal.digests import Digest, digest_of, layout_of
from lastlayer._internal.work import CHUNK_ROWS
from lastlayer.bayes.evidence import by_evidence
from lastlayer.data.distributed import ProcessGroup
from lastlayer.data.rows import Rows
from lastlayer.data.sources import Source, StandardizedSource, common_of, scales_of
from lastlayer.ensemble.crossfit import CrossFit, Fit
from lastlayer.ensemble.run import Run
from lastlayer.ensemble.splits import Split
from lastlayer.ensemble.train import Task
from lastlayer.networks.architecture import Architecture
from lastlayer.networks.mlp import copied, finite_features
from lastlayer.predictor.member import Member
from lastlayer.settings.types import DTYPES, STRUCTURES
from lastlayer.training import batches_for, streamed_statistics


def train_on_source(source: Source, architecture: Architecture, run: Run) -> CrossFit:
    """Train one network on a source of batches, within `Architecture.seeded`; the rows of the fit are some of them."""
    s, process_group = architecture.settings, ProcessGroup.current()
    device, dtype, batch_size = torch.device(s.place.device), DTYPES[s.place.dtype], s.training.batch_size
    assert batch_size is not None
    family = s.ensemble.families[0]
    with_checkpoint = {"with checkpoint": run.checkpoint is not None}
    process_group.agree(s.identity() | {"device": device.type} | common_of(source) | with_checkpoint)
    digest = None if run.checkpoint is None else Digest()
    scales = scales_of(source, batch_size, process_group=process_group, digest=digest)
    coarse = StandardizedSource(source, scales, device, torch.float32)
    first = next(coarse.batches(batch_size, process_group=process_group))
    sample = first.take(slice(CHUNK_ROWS))
    network = architecture.build(first.X.shape[1], torch.Generator().manual_seed(s.seed))
    network = network.to(device=device, dtype=torch.float32)
    with torch.no_grad():
        finite_features(network.eval(), first.X[:2])
    process_group.agree({"backbone": layout_of(network)} if s.network.backbone is not None else {})
    process_group.broadcast_state(network)
    count, precision = torch.tensor([scales.count, family.prior_precision], dtype=torch.float64, device=device)
    is_table = first.X.dim() == 2
    problem = batches_for(
        network, coarse, s, precision, count, scales.n_rows, is_table=is_table, process_group=process_group
    )
    checkpoint = None
    if run.checkpoint is not None:
        digests = digest_of(*process_group.gather(str(digest)))
        data = {"rows": scales.n_rows, "digest": digests, "processes": process_group.world_size}
        checkpoint = run.state("training", architecture, network, family.prior_precision, data)
    history = run.train(problem, s, checkpoint=checkpoint, progress=run.progress and not process_group.rank)
    process_group.broadcast_state(network)  # buffers, such as those of batch norm, depend on the rows of each process
    network = network.to(dtype)
    exact = StandardizedSource(source, scales, device, dtype)
    parts = exact.batches(batch_size, process_group=process_group)
    statistics = streamed_statistics(network, parts, process_group=process_group)
    history.gap = float(problem.running.gap(statistics)) if problem.running.snapshot is not None else None
    (posterior,) = by_evidence([statistics], noise=STRUCTURES[s.layer.noise], bias_prior=s.layer.bias_prior)
    sample = replace(sample, X=converted(sample.X, dtype))
    none, rows = np.empty(0, int), Rows(sample, scales=scales)
    fit = Fit(Task(Split(none, none, "all", scales.n_rows), family), Member(copied(network), posterior, family))
    return CrossFit(rows, 1, [], [fit])
