"""Several processes that train one model: statistics and gradients are summed over them, and everything else is local.

Started by torchrun, every process holds the same network and sees its own rows; since statistics are additive, one
all-reduce of (k + q)^2 numbers gives each of them the last layer of all rows. Marginal likelihoods of shards do not add
up: averaging their gradients, as plain data-parallel training would, is wrong.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from lastlayer.linalg import TINY
from lastlayer.statistics import Statistics

Value = TypeVar("Value")


@dataclass(frozen=True)
class ProcessGroup:
    """This process among all of them. Row i of a batch belongs to process i modulo `world_size`."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def current(cls) -> "ProcessGroup":
        """Of the group that torch.distributed has been initialised with; a single process without one."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return ONE
        return cls(distributed.get_rank(), distributed.get_world_size())

    def local_count(self, n: int) -> int:
        """How many of the first n rows of a batch are here."""
        return max(0, -(-(n - self.rank) // self.world_size))

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.world_size > 1:
            distributed.all_reduce(tensor)
        return tensor

    def reduce(self, statistics: Statistics) -> Statistics:
        """Statistics of the rows of all processes together: Chan's rule, around the mean of all."""
        if self.world_size == 1:
            return statistics
        c = statistics.mean.shape[-1]
        first = self.sum_(torch.cat([statistics.count[..., None], statistics.count[..., None] * statistics.mean], -1))
        count, mean = first[..., 0], first[..., 1:] / first[..., :1].clamp_min(TINY)
        step = statistics.mean - mean
        between = statistics.count[..., None, None] * step[..., :, None] * step[..., None, :]
        energy = statistics.energy + between.diagonal(dim1=-2, dim2=-1)
        rest = self.sum_(torch.cat([statistics.scatter + between, energy[..., None, :]], dim=-2))
        return replace(statistics, count=count, mean=mean, scatter=rest[..., :c, :], energy=rest[..., c, :])

    def gather(self, value: Value) -> "list[Value]":
        """The small values of all processes, in their order."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        distributed.all_gather_object(values, value)
        return values

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Every gradient becomes the sum over all processes, by one message."""
        if self.world_size == 1:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = self.sum_(torch.cat([grad.flatten() for grad in grads]))
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    def shutdown(self) -> None:
        """Wait for all processes, then end the group: one that leaves early can take others down with it."""
        if self.world_size > 1:
            distributed.barrier()
            distributed.destroy_process_group()


ONE = ProcessGroup()


def join() -> ProcessGroup:
    """Join the group that torchrun has started this process for: nccl with a GPU each, otherwise gloo."""
    if "WORLD_SIZE" not in os.environ:
        return ONE
    if not distributed.is_initialized():
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        distributed.init_process_group("nccl" if on_gpu else "gloo")
    return ProcessGroup.current()
