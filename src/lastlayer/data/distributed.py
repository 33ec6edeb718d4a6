"""Training one model in several processes: statistics and gradients are summed over them, everything else is local."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from lastlayer._internal.numbers import TINY
from lastlayer.bayes.statistics import Statistics
from lastlayer.errors import InputError, MismatchError, ProcessError

Value = TypeVar("Value")

TIMEOUT = 600.0
FAILURE = "lastlayer/failure/{}"
"""Key under which a process of a rank records its failure."""
LOOK_EVERY = 0.5
"""Seconds of waiting between checks for failures of other processes."""


@dataclass(frozen=True)
class ProcessGroup:
    """This process within its group; row i of a batch belongs to process i modulo `world_size`."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def current(cls) -> "ProcessGroup":
        """The group that torch.distributed was initialised with, or a single process."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return ONE
        return cls(distributed.get_rank(), distributed.get_world_size())

    def local_count(self, n: int) -> int:
        """Count how many of the first n rows of a batch belong to this process."""
        return max(0, -(-(n - self.rank) // self.world_size))

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.world_size > 1:
            with self._waiting():
                work = distributed.all_reduce(tensor, async_op=True)
                if tensor.is_cuda:  # steps do not wait for the device; torch ends a process that waits too long there
                    work.wait()
                else:
                    self._wait(work)
        return tensor

    def reduce(self, statistics: Statistics) -> Statistics:
        """Combine the statistics of all processes' rows: Chan's rule, around the mean of all."""
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
        """Collect small values from all processes, in order of rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self._waiting():
            self._barrier()
            distributed.all_gather_object(values, value)
        return values

    def broadcast_state(self, network: nn.Module) -> None:
        """Copy weights and buffers of the first process's network to all others, which have the same architecture."""
        if self.world_size == 1:
            return
        held = {name: value.detach() for name, value in (*network.named_parameters(), *network.named_buffers())}
        sent: list[Any] = [{name: value.cpu() for name, value in held.items()} if not self.rank else None]
        with self._waiting():
            self._barrier()
            distributed.broadcast_object_list(sent, src=0)
        for name, value in held.items():
            value.copy_(sent[0][name])

    def agree(self, own: Mapping[str, Any]) -> None:
        """Raise an error on all processes if these values differ between them."""
        first, *others = self.gather(dict(own))
        for rank, theirs in enumerate(others, 1):
            names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
            if names:
                told = "; ".join(
                    f"{name}: {first.get(name)!s:.200} on rank 0, {theirs.get(name)!s:.200} on rank {rank}"
                    for name in names
                )
                raise MismatchError(
                    f"the processes do not fit the same model, rank {rank} differs from rank 0 ({told}): give all of "
                    "them the same parameters and data of the same kind"
                )

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Context in which a failure of one process promptly fails all, with an error that names the process."""
        if self.world_size == 1:
            yield
            return
        self._check_sound()
        try:
            yield
        except (MismatchError, ProcessError):  # raised on all processes
            raise
        except BaseException as error:
            self._tell(error)
            raise

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace every gradient by its sum over all processes, in one message."""
        if self.world_size == 1:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = self.sum_(torch.cat([grad.flatten() for grad in grads]))
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    def shutdown(self) -> None:
        """Wait for all processes, then end the group: a process that leaves early can bring down others."""
        if self.world_size == 1:
            return
        with suppress(ProcessError):
            self._check_sound()
            with self._waiting():
                self._barrier()
        distributed.destroy_process_group()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Context that turns communication errors into a `ProcessError` with an explanation."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ProcessError):
                raise
            self._check_sound()
            waited = time.monotonic() - began
            failure = ProcessError(
                f"rank {self.rank} waited {waited:.0f} s in vain for one of {self.world_size} processes: it has "
                "ended, it hangs, or it is slower than lastlayer.distributed.join(timeout=...) allows. See what it "
                f"printed. Error of torch: {error}"
            )
            self._tell(failure)
            raise failure from error

    def _tell(self, error: BaseException) -> None:
        with suppress(Exception):  # the first process, which hosts the store, may be gone
            _notes().set(FAILURE.format(self.rank), f"{type(error).__name__}: {error}")

    def _wait(self, work: Any) -> None:
        """Wait for all processes, as long as none of them has failed."""
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_EVERY))
                return
            except RuntimeError:
                if work.is_completed():  # it may have ended just after the timeout
                    work.wait()
                    return
            self._check_sound()

    def _barrier(self) -> None:
        """Wait until all processes are here, by polling: NCCL would abort the group after a wait that ends early."""
        work, looked = distributed.barrier(async_op=True), time.monotonic()
        while not work.is_completed():
            time.sleep(1e-3)
            if time.monotonic() - looked > LOOK_EVERY:
                self._check_sound()
                looked = time.monotonic()
        work.wait()

    def _check_sound(self) -> None:
        for rank in range(self.world_size):
            try:
                failed = _notes().check([FAILURE.format(rank)])
            except Exception as error:
                raise ProcessError("rank 0, through which the processes find each other, has ended") from error
            if failed:
                told = _notes().get(FAILURE.format(rank)).decode(errors="replace")
                raise ProcessError(
                    f"rank {rank} failed, so rank {self.rank} stops too; a new fit needs a new process group. "
                    f"Error of rank {rank}: {told}"
                )


ONE = ProcessGroup()


def join(*, timeout: float | int = TIMEOUT) -> ProcessGroup:
    """Join the group for which torchrun started this process, with nccl if there are GPUs, otherwise gloo.

    Parameters
    ----------
    timeout : float, default 600
        Seconds that a process waits for the others whenever they exchange numbers. A process that has ended or raised
        an error in `fit_source` or `attach` is noticed within seconds; the timeout is for one that hangs. It must
        exceed the differences between the times that the processes need for a pass over their rows. An existing group
        keeps its timeout.

    Examples
    --------
    >>> import lastlayer
    >>> group = lastlayer.distributed.join(timeout=60)
    >>> model = lastlayer.BLLRegressor().fit_source(source)  # doctest: +SKIP
    >>> group.shutdown()
    """
    if not timeout > 0:
        raise InputError(f"timeout={timeout!r} must be a positive number of seconds")
    if "WORLD_SIZE" not in os.environ:
        return ONE
    if not distributed.is_initialized():
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout))
    return ProcessGroup.current()


def _notes() -> Any:
    """The store through which the processes of the group found each other."""
    return distributed.distributed_c10d._get_default_store()
