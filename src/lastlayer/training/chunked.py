"""The exact evidence and its gradient in bounded memory: two forward passes over chunks of rows."""

from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.errors import InputError
from lastlayer.ranks import ONE, Ranks
from lastlayer.statistics import Statistics
from lastlayer.training.frozen import FrozenLayer
from lastlayer.training.objectives import Data, Objective, Profiled


def chunked_nlml(
    network: nn.Module, objective: Objective, data: Data, size: int, *, ranks: Ranks = ONE, backward: bool = True
) -> Float[Tensor, ""]:
    """The profiled NLML; with `backward`, its gradient is added to the parameters of network and objective.

    The first pass sums up statistics, the second sends the gradient of each sample back with the last layer frozen at
    them. Equal to one evaluation on all rows, of all processes, as long as a row's features depend on that row alone.
    """
    if not isinstance(objective, Profiled):
        name = type(objective).__name__.lower()
        raise InputError(f'chunk_size needs objective="profiled", whose gradient splits into rows, not "{name}"')
    statistics = streamed_statistics(network, pieces(data, size), ranks=ranks)
    frozen = FrozenLayer.of(
        statistics, objective.log_alpha.detach(), noise=objective.noise, bias_prior=objective.bias_prior
    )
    if backward:
        for part in pieces(data, size):
            phi = network(part.X)
            phi.backward(frozen.rows(phi.detach(), part.T, part.weight).gradient)
        ranks.sum_gradients([p for p in network.parameters() if p.requires_grad])
        slope, so_far = frozen.log_alpha_slope, objective.log_alpha.grad
        objective.log_alpha.grad = slope if so_far is None else so_far + slope
    return frozen.bound(statistics)


def streamed_statistics(network: nn.Module, parts: Iterable[Data], *, ranks: Ranks = ONE) -> Statistics:
    """Exact statistics of the network's features, one part in memory at a time; of the rows of all processes."""
    total: Statistics | None = None
    with torch.no_grad():
        for part in parts:
            more = Statistics.from_linear_features(network(part.X), part.T, sample_weight=part.weight)
            total = more if total is None else total + more
    if total is None:
        raise InputError("there are no rows to pass over: the source of data gave no batch")
    return ranks.reduce(total)


def pieces(data: Data, size: int) -> Iterator[Data]:
    """All rows, `size` at a time."""
    return (data.rows(slice(start, start + size)) for start in range(0, len(data.X), size))
