"""From the words of an estimator to trained networks: architecture and trainer."""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import nn

from lastlayer.calibration import Job
from lastlayer.errors import InputError
from lastlayer.extrapolation import held_out_lpd
from lastlayer.features import MLP, StackedMLP, WithInputs, affine_features
from lastlayer.model import check_features
from lastlayer.sources import TensorSource
from lastlayer.statistics import CHUNK_ROWS
from lastlayer.training import (
    Checkpoint,
    Data,
    Optimiser,
    Refresh,
    RunningLayer,
    Training,
    Validation,
    make_objective,
    streamed_statistics,
    threads_for,
    train,
    train_batches,
    train_stack,
)
from lastlayer.types import BiasPrior, NoiseStructure

ROWS_PER_CORE = 2_000
"""Rows times networks below which a second core costs more than it gains."""


@dataclass(frozen=True)
class Architecture:
    """What the networks look like."""

    hidden: Sequence[int]
    activation: str
    input_skip: bool | str
    backbone: nn.Module | Callable[[], nn.Module] | None

    @property
    def skips(self) -> bool:
        return self.backbone is None if self.input_skip == "auto" else bool(self.input_skip)

    def build(
        self, shape: tuple[int, ...], generator: torch.Generator | None = None, strength: float = 0.0
    ) -> nn.Module:
        """One network for inputs of that shape; under an infinitely strong prior, the inputs alone."""
        if strength == math.inf:
            return nn.Identity()
        if self.backbone is None:
            network: nn.Module = MLP(shape[1], self.hidden, activation=self.activation, generator=generator)
        elif isinstance(self.backbone, nn.Module):
            network = copy.deepcopy(self.backbone)
        else:
            network = self.backbone()
            if not isinstance(network, nn.Module):
                raise InputError(f"backbone() returned a {type(network).__name__}, not a torch.nn.Module")
        if self.skips and len(shape) != 2:
            raise InputError(f"input_skip=True needs a table, but X has shape {shape}: leave it at 'auto' or False")
        return WithInputs(network) if self.skips else network


def training_words(
    architecture: Architecture,
    noise: NoiseStructure,
    bias_prior: BiasPrior,
    optimiser: Optimiser,
    batch_size: int | None,
    refresh: Refresh | None,
    strength: Any,
    seed: int,
    data: list[Any],
) -> dict[str, Any]:
    """What a checkpoint belongs to."""
    return {
        "hidden": [int(width) for width in architecture.hidden],
        "activation": architecture.activation,
        "input_skip": architecture.skips,
        "backbone": "none" if architecture.backbone is None else str(architecture.backbone),
        "noise": noise,
        "bias_prior": bias_prior,
        "learning_rate": optimiser.learning_rate,
        "max_epochs": optimiser.max_epochs,
        "batch_size": batch_size,
        "refresh": None if refresh is None else refresh.steps,
        "hidden_prior": strength,
        "random_state": seed,
        "data": data,
    }


@dataclass
class Trainer:
    """Trains networks, as one batch where they allow it, otherwise one after the other."""

    architecture: Architecture
    data: Data
    objective: str
    noise: NoiseStructure
    bias_prior: BiasPrior
    optimiser: Optimiser
    stop_early: bool
    validation_fraction: float
    patience: int
    dtype: torch.dtype
    seed: int
    progress: bool
    batch_size: int | None = None
    """Rows of a mini-batch; None: all rows in every step."""
    refresh: Refresh | None = None
    """Of the statistics of mini-batches."""
    chunk_size: int | None = None
    checkpoint: Path | None = None
    """A folder for the state of trainings that have not ended."""
    record: Training = field(default_factory=Training)
    """Of the last training."""
    _stage: int = 0

    def __call__(self, jobs: Sequence[Job], label: str) -> list[nn.Module]:
        """Under an infinitely strong prior there is nothing to train."""
        trained = iter(self._train([job for job in jobs if job.strength < math.inf], label))
        shape = tuple(self.data.X.shape)
        return [
            next(trained) if job.strength < math.inf else self.architecture.build(shape, strength=job.strength)
            for job in jobs
        ]

    def _train(self, jobs: Sequence[Job], label: str) -> list[nn.Module]:
        self._stage += 1
        look = self.architecture
        alike = look.backbone is None and len(look.hidden) > 0 and self.data.X.dim() == 2
        plain = self.objective == "profiled" and self.optimiser.name == "adam" and not self.stop_early
        plain &= self.chunk_size is None
        if len(jobs) > 1 and alike and plain:
            networks = self._together(jobs, label)
            if self.record.stopped == "interrupted":
                epochs = len(self.record.nlml)
                warnings.warn(f"interrupted after {epochs} epochs: the networks are kept and usable", stacklevel=6)
            return networks
        return [self._alone(job, i) for i, job in enumerate(jobs)]

    def _together(self, jobs: Sequence[Job], label: str) -> list[nn.Module]:
        """A batch for every processor core: threads that never wait for each other, unlike those within a product."""
        cores = torch.get_num_threads() if self.data.X.device.type == "cpu" else 1
        work = len(jobs) * len(self.data.X)
        if cores == 1 or work < ROWS_PER_CORE:
            return self._batch(jobs, label, 0, Event())
        groups, stop = [list(jobs[i::cores]) for i in range(min(cores, len(jobs)))], Event()
        with threads_for(0), ThreadPoolExecutor(len(groups)) as pool:
            futures = [pool.submit(self._batch, group, label, i, stop) for i, group in enumerate(groups)]
            try:
                parts = [future.result() for future in futures]
            except KeyboardInterrupt:
                stop.set()
                parts = [future.result() for future in futures]
        networks: list[nn.Module] = [nn.Identity()] * len(jobs)
        for i, part in enumerate(parts):
            networks[i :: len(groups)] = part
        return networks

    def _batch(self, jobs: Sequence[Job], label: str, group: int, stop: Event) -> list[nn.Module]:
        look, device, m = self.architecture, self.data.X.device, len(self.data.X)
        progress = self.progress and group == 0
        stack = StackedMLP(
            self.data.X.shape[1],
            look.hidden,
            generators=[self._generator(job) for job in jobs],
            activation=look.activation,
        ).to(device=device, dtype=self.dtype)
        weight = torch.zeros(len(jobs), m, dtype=torch.float64)
        for row, job in zip(weight, jobs, strict=True):
            row[torch.from_numpy(job.split.train)] = 1
        weight = weight.to(device) * (1 if self.data.weight is None else self.data.weight)
        strength = torch.tensor([job.strength for job in jobs], dtype=torch.float64, device=device)
        network = WithInputs(stack) if look.skips else stack
        if self.batch_size is None:
            record = train_stack(
                network,
                self.data,
                weight,
                strength=strength,
                noise=self.noise,
                bias_prior=self.bias_prior,
                optimiser=self.optimiser,
                stop=stop,
                progress=progress,
                label=label,
            )
        else:
            record = self._in_batches(
                network, Data(self.data.X, self.data.T, weight), jobs, group, stop=stop, label=label
            )
        self.record = record
        members = [stack.member(i) for i in range(len(jobs))]
        return [(WithInputs(network) if look.skips else network).eval() for network in members]

    def _in_batches(
        self,
        network: nn.Module,
        data: Data,
        jobs: Sequence[Job],
        group: int,
        *,
        held_out: Data | None = None,
        stop: Event | None = None,
        label: str = "fit",
    ) -> Training:
        """Mini-batches train in float32; everything afterwards has the type that was asked for."""
        strengths = torch.tensor([job.strength for job in jobs], dtype=torch.float64, device=data.X.device)
        count = data.T.new_tensor(len(data.X)) if data.weight is None else data.weight.sum(-1)
        layer = RunningLayer(count, len(data.X), noise=self.noise, bias_prior=self.bias_prior)
        source = TensorSource(data.X.float(), data.T.float(), None if data.weight is None else data.weight.float())
        network.float()
        validation = None
        if held_out is not None:
            held_X = held_out.X.float()
            validation = Validation(
                lambda: -held_out_lpd(layer.posterior(), affine_features(network(held_X)).double(), held_out.T),
                patience=self.patience,
                every=1,
            )
        assert self.batch_size is not None
        record = train_batches(
            network,
            source,
            layer,
            self.optimiser,
            batch_size=self.batch_size,
            seed=self.seed,
            strength=strengths if count.dim() else strengths[0],
            refresh=self.refresh,
            validation=validation,
            checkpoint=self._checkpoint(jobs, group),
            stop=stop,
            is_table=data.X.dim() == 2,
            progress=self.progress and group == 0,
            label=label,
        )
        if record.best_epoch == len(record.nlml):  # otherwise the running layer is that of another network
            parts = source.batches(CHUNK_ROWS)
            statistics = streamed_statistics(network, (Data(part.X, part.T, part.weight) for part in parts))
            record.gap = float(layer.gap(statistics).nanmean())
        network.to(self.dtype)
        return record

    def _checkpoint(self, jobs: Sequence[Job], group: int) -> Checkpoint | None:
        if self.checkpoint is None:
            return None
        # sums of standardised rows in the order of their numbers: other data, or the same in another order, differ
        number = torch.arange(len(self.data.T), device=self.data.T.device, dtype=torch.float64)
        data = [len(number), float(self.data.X.double().square().sum()), (number @ self.data.T).tolist()]
        look, strengths = self.architecture, [job.strength for job in jobs]
        words = training_words(
            look,
            self.noise,
            self.bias_prior,
            self.optimiser,
            self.batch_size,
            self.refresh,
            strengths,
            self.seed,
            data,
        )
        return Checkpoint(self.checkpoint / f"training-{self._stage}-{group}.safetensors", words)

    def _alone(self, job: Job, number: int = 0) -> nn.Module:
        """By the general loop: any network, objective and optimiser, with early stopping."""
        everything = len(job.split.train) == len(self.data.X)
        data = self.data if everything else self.data.rows(torch.from_numpy(job.split.train).to(self.data.X.device))
        generator = self._generator(job)
        network = self.architecture.build(tuple(data.X.shape), generator).to(device=data.X.device, dtype=self.dtype)
        with torch.no_grad():
            n_features = check_features(network.eval()(data.X[:2]), data.X[:2]).shape[1]
        objective = make_objective(
            self.objective,
            n_features=n_features,
            n_outputs=data.T.shape[1],
            noise=self.noise,
            bias_prior=self.bias_prior,
            generator=generator,
        ).to(data.X.device)
        m, strength = len(data.X), job.strength
        held = round(self.validation_fraction * m)
        if not self.stop_early or held < 1 or m - held < 2:
            if self.batch_size is not None:
                self.record = self._in_batches(network, data, [job], number)
                return network
            self.record = train(
                network,
                objective,
                data,
                self.optimiser,
                strength=strength,
                chunk_size=self.chunk_size,
                progress=self.progress,
            )
            return network
        order = torch.randperm(m, generator=generator).to(data.X.device)
        rest, held_out = data.rows(order[held:]), data.rows(order[:held])
        if self.batch_size is not None:
            self.record = self._in_batches(network, rest, [job], number, held_out=held_out)
            return network
        validation = Validation(
            lambda: objective.held_out_score(network(rest.X), rest, network(held_out.X), held_out),
            first=min(50, self.optimiser.max_epochs // 10),
            every=max(1, min(10, self.optimiser.max_epochs // 20)),
            patience=self.patience,
        )
        self.record = train(
            network,
            objective,
            rest,
            self.optimiser,
            validation=validation,
            strength=strength,
            chunk_size=self.chunk_size,
            progress=self.progress,
        )
        return network

    def _generator(self, job: Job) -> torch.Generator:
        return torch.Generator().manual_seed(job.seed(self.seed))
