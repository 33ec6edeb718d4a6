"""Several processes that train one model: statistics and gradients are summed over them, and everything else is local.

Started by torchrun, every process holds the same network and sees its own rows; since statistics are additive, one
all-reduce of (k + q)^2 numbers gives each of them the last layer of all rows. Marginal likelihoods of shards do not add
up: averaging their gradients, as plain data-parallel training would, is wrong.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from lastlayer.errors import InputError, MismatchError, ProcessError
from lastlayer.linalg import TINY
from lastlayer.statistics import Statistics

Value = TypeVar("Value")

TIMEOUT = 600.0
"""Seconds that a process waits for the others, unless `join` is told otherwise."""
SHOWN = 200
"""Characters of a value that an error shows."""
LOOK_EVERY = 0.5
"""Seconds of waiting after which a process looks whether another has failed."""


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
            with self._waiting():
                work = distributed.all_reduce(tensor, async_op=True)
                if tensor.is_cuda:  # no step waits for the device; torch ends a process that waits too long there
                    work.wait()
                else:
                    self._wait(work)
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
        with self._waiting():
            self._barrier()
            distributed.all_gather_object(values, value)
        return values

    def broadcast_state(self, network: nn.Module) -> None:
        """Weights and buffers of the first process's network, which is built like all others, for all of them."""
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
        """Raise on all processes if these values are not the same on all of them.

        Parameters
        ----------
        own : dict
            Names, as a user knows them, and small values of this process.

        Raises
        ------
        MismatchError
            Names the first process that differs from the process of rank 0, and in what.
        """
        first, *others = self.gather(dict(own))
        for rank, theirs in enumerate(others, 1):
            names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
            if names:
                both = [(name, _short(first.get(name)), _short(theirs.get(name))) for name in names]
                told = "; ".join(f"{name}: {mine} on rank 0, {other} on rank {rank}" for name, mine, other in both)
                raise MismatchError(
                    f"the processes do not fit the same model, rank {rank} differs from rank 0 ({told}): give all of "
                    "them the same parameters and data of the same kind"
                )

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """What fails within it on one process fails on all of them, soon, with an error that names the process.

        Afterwards the group cannot be used again: its processes are at different places.
        """
        if self.world_size == 1:
            yield
            return
        self._check_sound()
        try:
            yield
        except (MismatchError, ProcessError):  # all of them have it
            raise
        except BaseException as error:
            self._tell(error)
            raise

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Every gradient becomes the sum over all processes, by one message."""
        if self.world_size == 1:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = self.sum_(torch.cat([grad.flatten() for grad in grads]))
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    def shutdown(self) -> None:
        """Wait for all processes, then end the group: one that leaves early can take others down with it.

        After a failure nobody is waited for.
        """
        if self.world_size == 1:
            return
        with suppress(ProcessError):
            self._check_sound()
            with self._waiting():
                self._barrier()
        distributed.destroy_process_group()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Errors of the network between processes, in words."""
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
                f"printed. torch says: {error}"
            )
            self._tell(failure)
            raise failure from error

    def _tell(self, error: BaseException) -> None:
        """Note for the others that this process has failed."""
        with suppress(Exception):  # the first process, which keeps the notes, may be gone
            _notes().set(_failure(self.rank), f"{type(error).__name__}: {error}")

    def _wait(self, work: Any) -> None:
        """For all processes to come, as long as none of them has failed."""
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_EVERY))
                return
            except RuntimeError:
                if work.is_completed():  # it may have ended just after the time was over
                    work.wait()
                    return
            self._check_sound()

    def _barrier(self) -> None:
        """All processes are here. By polling: NCCL would abort the group after a wait that ends early."""
        work, looked = distributed.barrier(async_op=True), time.monotonic()
        while not work.is_completed():
            time.sleep(1e-3)
            if time.monotonic() - looked > LOOK_EVERY:
                self._check_sound()
                looked = time.monotonic()
        work.wait()

    def _check_sound(self) -> None:
        """Raise if another process has failed."""
        for rank in range(self.world_size):
            try:
                failed = _notes().check([_failure(rank)])
            except Exception as error:
                raise ProcessError("rank 0, through which the processes find each other, has ended") from error
            if failed:
                told = _notes().get(_failure(rank)).decode(errors="replace")
                raise ProcessError(
                    f"rank {rank} failed, so rank {self.rank} stops too; a new fit needs a new process group. "
                    f"Rank {rank} said: {told}"
                )


ONE = ProcessGroup()


def join(*, timeout: float | int = TIMEOUT) -> ProcessGroup:
    """Join the group that torchrun has started this process for: nccl with a GPU each, otherwise gloo.

    Parameters
    ----------
    timeout : float, default 600
        Seconds that a process waits for the others wherever they exchange numbers. A process that has ended or raised
        an error in `fit_source` or `attach` is noticed within seconds; the timeout is for one that hangs. It must
        exceed the difference in time that the processes need to pass over their rows. A group that exists already
        keeps its own.

    Returns
    -------
    ProcessGroup
        Of this process alone where torchrun has not started it.

    Raises
    ------
    InputError
        If the timeout is not positive.

    Examples
    --------
    >>> group = lastlayer.distributed.join(timeout=60)  # doctest: +SKIP
    >>> model = BLLRegressor().fit_source(source)  # doctest: +SKIP
    >>> group.shutdown()  # doctest: +SKIP
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


def _short(value: Any) -> str:
    """As much of it as an error should have."""
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _notes() -> Any:
    """The store through which the processes of the group have found each other."""
    return distributed.distributed_c10d._get_default_store()


def _failure(rank: int) -> str:
    """Where a process notes that it has failed."""
    return f"lastlayer/failure/{rank}"
