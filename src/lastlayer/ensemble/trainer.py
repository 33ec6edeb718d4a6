"""Training of the networks of a table: as one batch where possible, otherwise one after the other."""

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import nn

from lastlayer._internal.chunks import CHUNK_ROWS
from lastlayer._internal.digests import digest_of
from lastlayer._internal.progress import progress_bar
from lastlayer._internal.threads import threads_for
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.held_out import held_out_lpd
from lastlayer.data.copies import whole_groups
from lastlayer.data.observe import some_of
from lastlayer.data.rows import Points, Rows
from lastlayer.ensemble.problems import checkpoint_of, mini_batches, optimizer_of
from lastlayer.ensemble.splits import Split
from lastlayer.networks.architecture import Architecture, encoded
from lastlayer.networks.encoding import PiecewiseEncoding, bins_of
from lastlayer.networks.fourier import fourier_network
from lastlayer.networks.mlp import InputSkip, StackedMLP, finite_features
from lastlayer.settings.resolve import Settings
from lastlayer.settings.types import NETWORK, Family
from lastlayer.training import (
    Checkpoint,
    FullBatch,
    KnownNoise,
    MeanSquaredError,
    Objective,
    Problem,
    Profiled,
    SampledRows,
    StackedNetworks,
    TrainingHistory,
    Validation,
    streamed_statistics,
    train,
)
from lastlayer.training.lengths import MOST_FUNCTIONALS, MOST_ROWS, fit_lengths, refine_lengths

logger = logging.getLogger(__name__)
WORK_PER_ROW = 4_000
"""Approximate number of multiplications for the statistics of one row of one network: features squared."""
ROWS_PER_CORE = 2_000
"""Rows times networks below which a second core costs more than it gains."""


@dataclass(frozen=True)
class FitTask:
    """One network to be trained."""

    split: Split
    partition: int
    number: int
    """Index within its partition."""
    family: Family = NETWORK

    @property
    def key(self) -> tuple[str, int, int]:
        """Kind of the split, partition and number."""
        return self.split.kind, self.partition, self.number

    def generator(self, seed: int) -> torch.Generator:
        """Generator of the initialisation: the same for every family, different for every network of a family."""
        return torch.Generator().manual_seed(seed + 1000 * self.partition + self.number)


@dataclass
class Trainer:
    """Trains networks on the rows of one table."""

    architecture: Architecture
    rows: Rows
    checkpoint: Path | None = None
    """Folder for checkpoints."""
    progress: bool = False
    digest: str = ""
    """Digest of the data as given, stored in the checkpoints."""
    history: TrainingHistory = field(default_factory=TrainingHistory)
    """History of the last training."""
    _stage: int = 0

    @property
    def settings(self) -> Settings:
        """Settings of the architecture."""
        return self.architecture.settings

    @contextmanager
    def stage(self, label: str) -> Iterator[None]:
        """Show and time a stage that follows training; small tables use one thread."""
        start = time.perf_counter()
        with self._shown(label), threads_for(WORK_PER_ROW * len(self.rows.main.X)):
            yield
        logger.info("%s: %.1f s", label, time.perf_counter() - start)

    def _shown(self, label: str) -> Any:
        return progress_bar(total=1, disable=not self.progress, desc=label, bar_format="{desc}: {elapsed}", leave=False)

    def networks(self, tasks: Sequence[FitTask], label: str) -> list[nn.Module]:
        """Return one network per task, trained if it has anything to train."""
        ways: dict[str, Callable[[list[FitTask]], list[nn.Module]]] = {
            "network": lambda of_kind: self._trained(of_kind, label),
            "fourier": self._fourier,
            "linear": lambda of_kind: [self._linear(task) for task in of_kind],
        }
        made: dict[int, nn.Module] = {}
        alike = lambda task: (task.family.kind, task.family.encoding, task.family.activation)
        for kind, encoding, activation in dict.fromkeys(map(alike, tasks)):
            self._stage += 1
            places = [i for i, task in enumerate(tasks) if alike(task) == (kind, encoding, activation)]
            start = time.perf_counter()
            made |= zip(places, ways[kind]([tasks[i] for i in places]), strict=True)
            seconds = time.perf_counter() - start
            logger.info("%d fits of kind %s, %s inputs: %.1f s", len(places), kind, encoding, seconds)
        return [made[i] for i in range(len(tasks))]

    def encoding(self, task: FitTask) -> PiecewiseEncoding | None:
        """Encoding fitted to the network's training rows, so that held-out rows lie outside it as new rows will."""
        if task.family.encoding == "raw":
            return None
        rows = torch.from_numpy(task.split.train).to(self.rows.main.X.device)
        return PiecewiseEncoding.of(self.rows.main.X[rows], self._n_bins).to(self.settings.torch_dtype)

    @cached_property
    def _n_bins(self) -> torch.Tensor:
        return bins_of(self.rows.main.X)

    def _linear(self, task: FitTask) -> nn.Module:
        encoding = self.encoding(task)
        return nn.Identity() if encoding is None else encoded(encoding, nn.Identity(), self.rows.main.X.shape[1])

    def _trained(self, tasks: list[FitTask], label: str) -> list[nn.Module]:
        if len(tasks) == 1 or not self.settings.stackable or self.rows.main.X.dim() > 2:
            return [self._alone(task, i) for i, task in enumerate(tasks)]
        over = self._interrupted  # networks after an interrupt keep their initial weights
        networks = self._together(tasks, lambda group, i, stop: self._stack(group, label, i, stop, over))
        if self._interrupted and not over:
            epochs = len(self.history.nlml)
            warnings.warn(f"interrupted after {epochs} epochs: the networks are kept and usable", stacklevel=8)
        return networks

    def _fourier(self, tasks: list[FitTask]) -> list[nn.Module]:
        """Random frequencies, with length scales by the evidence of at most `MOST_ROWS` rows."""
        generators = [task.generator(self.settings.seed) for task in tasks]
        some = lambda rows, g: rows[torch.randperm(len(rows), generator=g).numpy()[:MOST_ROWS]]
        known, outputs = self._lengths_by
        parts = [some(rows[known[rows]], g) for rows, g in zip((t.split.train for t in tasks), generators, strict=True)]
        data = self.rows.stacked(parts).main
        T = data.T[..., outputs]
        weight = torch.ones_like(T[..., 0]) if data.weight is None else data.weight
        places = dict(zip(map(id, tasks), range(len(tasks)), strict=True))

        def lengths(group: list[FitTask], i: int, stop: Event) -> list[nn.Module]:
            own = torch.tensor([places[id(task)] for task in group], device=weight.device)
            log_lengths, linear = (x.cpu() for x in fit_lengths(data.X[own].double(), T[own], weight[own]))
            made: list[nn.Module] = []
            for task, log_length, log_linear in zip(group, log_lengths, linear, strict=True):
                rows, g = parts[places[id(task)]], generators[places[id(task)]]
                if not self.rows.learned:
                    log_length, log_linear = self._refined(log_length, log_linear, rows, g)
                made.append(fourier_network(log_length, log_linear, generator=g))
            return made

        with self._shown(f"lengths of {len(tasks)} processes"):
            networks = self._together(tasks, lengths)
        return [network.to(self.rows.main.X.device).eval() for network in networks]

    def _refined(
        self, log_length: torch.Tensor, log_linear: torch.Tensor, rows: np.ndarray, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Length scales fitted to functionals as well, or to some of them."""
        device = self.rows.main.X.device
        main = self.rows.main.take(torch.from_numpy(rows))
        data = Rows(replace(main, X=main.X.double()), some_of(self.rows.beside, MOST_FUNCTIONALS, generator))
        numbers, prior = (log_length.to(device), log_linear.to(device)), self.settings.bias_prior
        found = refine_lengths(data, *numbers, bias_prior=prior, generator=generator)
        return found[0].cpu(), found[1].cpu()

    @cached_property
    def _lengths_by(self) -> tuple[np.ndarray, slice]:
        """Rows and targets to fit length scales to: complete rows, or if these are few, the most frequent target."""
        m, read = len(self.rows.main.X), self.rows.main.readings.read
        if read is None:
            return np.ones(m, dtype=bool), slice(None)
        known = (read > 0).cpu().numpy()
        whole = np.asarray(known.all(1))
        if whole.sum() >= max(MOST_ROWS // 4, 0.5 * known.sum(0).max()):
            return whole, slice(None)
        j = int(known.sum(0).argmax())
        return known[:, j], slice(j, j + 1)

    def _together(
        self, tasks: list[FitTask], work: Callable[[list[FitTask], int, Event], list[nn.Module]]
    ) -> list[nn.Module]:
        """Divide the tasks among processor cores: threads that never wait for each other, unlike those of a product."""
        cores = torch.get_num_threads() if self.rows.main.X.device.type == "cpu" else 1
        stop = Event()
        if cores == 1 or len(tasks) * len(self.rows.main.X) < ROWS_PER_CORE:
            return work(tasks, 0, stop)
        groups = [list(tasks[i::cores]) for i in range(min(cores, len(tasks)))]
        with threads_for(0), ThreadPoolExecutor(len(groups)) as pool:
            futures = [pool.submit(work, group, i, stop) for i, group in enumerate(groups)]
            try:
                parts = [future.result() for future in futures]
            except KeyboardInterrupt:
                stop.set()
                parts = [future.result() for future in futures]
        networks: list[nn.Module] = [nn.Identity()] * len(tasks)
        for i, part in enumerate(parts):
            networks[i :: len(groups)] = part
        return networks

    def _stack(self, tasks: Sequence[FitTask], label: str, group: int, stop: Event, over: bool) -> list[nn.Module]:
        s, device = self.settings, self.rows.main.X.device
        generators, d = [task.generator(s.seed) for task in tasks], self.rows.main.X.shape[1]
        encodings = [e for e in map(self.encoding, tasks) if e is not None]
        n_inputs = len(encodings[0].column) if encodings else d
        activation = tasks[0].family.activation or s.activation
        stack = StackedMLP(n_inputs, s.hidden, generators=generators, activation=activation)
        stack = stack.to(device=device, dtype=s.torch_dtype)
        network: nn.Module = InputSkip(stack) if s.input_skip else stack
        if encodings:
            network = encoded(PiecewiseEncoding.stacked(encodings), stack, d)
        if not over:
            self._train_stack(network, tasks, group, label=label, stop=stop)
        stack.to(s.torch_dtype)
        members = [stack.member(i) for i in range(len(tasks))]
        if encodings:
            return [encoded(e, member, d).eval() for e, member in zip(encodings, members, strict=True)]
        return [(InputSkip(member) if s.input_skip else member).eval() for member in members]

    def _train_stack(
        self, network: nn.Module, tasks: Sequence[FitTask], group: int, *, label: str, stop: Event
    ) -> None:
        s, device = self.settings, self.rows.main.X.device
        if not self.rows.complete:
            rows = self.rows.stacked([task.split.train for task in tasks])
            objective = self._objective(shape=(len(tasks),)).to(device)
            rows = replace(rows, main=replace(rows.main, X=rows.main.X.float()))
            precision = _precisions(tasks, device)
            problem = self._full_or_sampled(network.float(), objective, rows, precision)
            self._train(problem, group, label=label, stop=stop)
            return
        if s.batch_size is None:
            precision = _precisions(tasks, device)
            objective = Profiled(bias_prior=s.bias_prior, noise=s.noise_structure, shape=(len(tasks),)).to(device)
            own = self.rows.stacked([task.split.train for task in tasks]).main
            stacked = StackedNetworks(network.float(), objective, own, prior_precision=precision)
            self._train(stacked, group, label=label, stop=stop)
            return
        weight = torch.zeros(len(tasks), len(self.rows.main.X), dtype=torch.float64)
        for row, task in zip(weight, tasks, strict=True):
            row[torch.from_numpy(task.split.train)] = 1
        weight = weight.to(device) * (1 if self.rows.main.weight is None else self.rows.main.weight)
        self._in_batches(network, replace(self.rows.main, weight=weight), tasks, group, stop=stop, label=label)

    def _objective(self, shape: tuple[int, ...] = ()) -> Objective:
        """Objective for the data: with partly missing targets, partly known noise or functionals, if there are any."""
        s = self.settings
        if self.rows.learned:
            return Profiled(bias_prior=s.bias_prior, noise=s.noise_structure, shape=shape)
        return KnownNoise(self.rows.main.T.shape[-1], bias_prior=s.bias_prior, shape=shape)

    @property
    def _interrupted(self) -> bool:
        return self.history.stopped == "interrupted"

    def _train(self, problem: Problem, group: int, **options: Any) -> None:
        self.history = train(problem, optimizer_of(self.settings), progress=self.progress and group == 0, **options)
        nlml = self.history.nlml[-1] if self.history.nlml else math.nan
        logger.debug("a training ended by %s, %d epochs, NLML %.4g", self.history.stopped, len(self.history.nlml), nlml)

    def _in_batches(
        self,
        network: nn.Module,
        data: Points,
        tasks: Sequence[FitTask],
        group: int,
        *,
        held_out: Points | None = None,
        stop: Event | None = None,
        label: str = "fit",
    ) -> None:
        """Train on mini-batches in float32; the network is then converted to the type of the settings."""
        s = self.settings
        precisions = _precisions(tasks, data.X.device)
        count = data.T.new_tensor(len(data.X)) if data.weight is None else data.weight.sum(-1)
        small, network = data.float(), network.float()
        precision, is_table = precisions if count.dim() else precisions[0], data.X.dim() == 2
        problem = mini_batches(network, small, s, count, len(data.X), precision, is_table=is_table)
        validation = None
        if held_out is not None:
            held_X, held_T = held_out.float().X, held_out.T

            def score() -> torch.Tensor:
                lpd = held_out_lpd(problem.running.posterior(), affine_features(network(held_X)).double(), held_T)
                return torch.tensor(-lpd)

            validation = Validation(score, first=1, every=1, patience=s.patience)
        checkpoint = self._checkpoint(network, tasks, group)
        self._train(problem, group, validation=validation, checkpoint=checkpoint, stop=stop, label=label)
        # otherwise the running posterior belongs to another state of the network, or there is none
        if self.history.best_epoch == len(self.history.nlml) and problem.running.snapshot is not None:
            parts = small.batches(CHUNK_ROWS)
            self.history.gap = float(problem.running.gap(streamed_statistics(network, parts)).nanmean())
        network.to(s.torch_dtype)

    def _checkpoint(self, network: nn.Module, tasks: Sequence[FitTask], group: int) -> Checkpoint | None:
        if self.checkpoint is None:
            return None
        used = digest_of(*[task.split.train for task in tasks])
        data = {"rows": len(self.rows.main.T), "digest": self.digest, "digest of the rows used": used}
        precisions = [task.family.prior_precision for task in tasks]
        path = self.checkpoint / f"training-{self._stage}-{group}.safetensors"
        return checkpoint_of(path, self.architecture, network, precisions, data)

    def _alone(self, task: FitTask, number: int = 0) -> nn.Module:
        """Train one network of any kind, with any objective and optimizer, and early stopping."""
        s, X = self.settings, self.rows.main.X
        everything = len(task.split.train) == len(X)
        rows = self.rows if everything else self.rows.take(torch.from_numpy(task.split.train))
        data = rows.main
        generator = task.generator(s.seed)
        network = self.architecture.build(data.X.shape[1], generator, task.family, self.encoding(task))
        network = network.to(device=X.device, dtype=s.torch_dtype)
        with torch.no_grad():
            n_features = finite_features(network.eval(), data.X[:2]).shape[1]
        objective = self._objective()
        if s.objective == "mse":
            objective = MeanSquaredError(
                n_features, data.T.shape[1], noise=s.noise_structure, bias_prior=s.bias_prior, generator=generator
            )
        objective.to(X.device)
        m = len(data.X)
        held, rest, held_out = round(s.validation_fraction * m), data, None
        if s.early_stopping and held >= 1 and m - held >= 2:
            stopping, others = self._for_stopping(task.split.train, held, generator)
            if len(stopping) and len(others) >= 2:
                rest, held_out = data.take(others), data.take(stopping)
        if s.batch_size is not None and rows.complete:
            self._in_batches(network, rest, [task], number, held_out=held_out)
            return network
        validation = None
        if held_out is not None:
            every = max(1, min(10, s.max_epochs // 20))
            validation = Validation(
                lambda: objective.held_out_score(network(rest.X), rest, network(held_out.X), held_out),
                first=-(-min(50, s.max_epochs // 10) // every) * every,
                every=every,
                patience=s.patience,
            )
        problem = self._full_or_sampled(network, objective, replace(rows, main=rest), task.family.prior_precision)
        self._train(problem, 0, validation=validation)
        return network

    def _for_stopping(self, train: np.ndarray, n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices into the training rows: about n for early stopping (none if there is one group), and the others."""
        together = None if self.rows.labels is None else self.rows.together
        if together is None:
            order = torch.randperm(len(train), generator=generator)
            return order[:n], order[n:]
        groups = np.unique(together[train], return_inverse=True)[1]
        held = whole_groups(groups, n, torch.randperm(int(groups.max()) + 1, generator=generator).numpy())
        return torch.from_numpy(held), torch.from_numpy(np.setdiff1d(np.arange(len(train)), held))

    def _full_or_sampled(
        self, network: nn.Module, objective: Objective, rows: Rows, prior_precision: float | torch.Tensor
    ) -> FullBatch:
        s = self.settings
        if s.batch_size is None:
            return FullBatch(network, objective, rows, prior_precision=prior_precision, chunk_size=s.chunk_size)
        return SampledRows(
            network, objective, rows, batch_size=s.batch_size, seed=s.seed, prior_precision=prior_precision
        )


def _precisions(tasks: Sequence[FitTask], device: torch.device) -> torch.Tensor:
    return torch.tensor([task.family.prior_precision for task in tasks], dtype=torch.float64, device=device)
