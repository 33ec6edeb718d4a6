"""Training of the networks of a table: as one batch where possible, otherwise one after the other."""

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool
from numpy import ndarray
from torch import nn

from lastlayer._internal.digests import digest_of
from lastlayer._internal.threads import threads_for
from lastlayer.data.copies import whole_groups
from lastlayer.data.observe import some_of
from lastlayer.data.rows import Rows
from lastlayer.ensemble.run import Run
from lastlayer.ensemble.splits import Split
from lastlayer.networks.architecture import Architecture, encoded
from lastlayer.networks.encoding import PiecewiseEncoding, bins_of
from lastlayer.networks.fourier import fourier_network
from lastlayer.networks.mlp import InputSkip, StackedMLP, finite_features
from lastlayer.settings.types import NETWORK, Family
from lastlayer.training import FullBatch, MiniBatches, Problem, Validation, objective_for, problem_for
from lastlayer.training.lengths import MOST_FUNCTIONALS, MOST_ROWS, fit_lengths, refine_lengths

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
ROWS_PER_CORE = 2_000
"""Rows times networks below which a second core costs more than it gains."""


@dataclass(frozen=True)
class Task:
    """One network to be trained."""

    split: Split
    family: Family = NETWORK
    seed: int = 0
    """Seed of the initialisation: the same for every family, different for every network of a family."""


EncodedTask = tuple[Task, PiecewiseEncoding | None]
"""A network to be trained, and the encoding of its inputs."""


@dataclass(frozen=True)
class Trainer:
    """Trains networks on the rows of one table."""

    architecture: Architecture
    rows: Rows
    run: Run

    def networks(self, tasks: Sequence[Task]) -> list[nn.Module]:
        """Return one network per task, trained if it has anything to train."""
        made: dict[int, nn.Module] = {}
        alike = lambda family: (type(family), family.encoding, family.activation)
        for stage, kind in enumerate(dict.fromkeys(alike(task.family) for task in tasks), 1):
            places = [i for i, task in enumerate(tasks) if alike(task.family) == kind]
            own, family, start = [tasks[i] for i in places], tasks[places[0]].family, time.perf_counter()
            encodings = self._encodings(own)
            if family.trained:
                networks = self._trained(list(zip(own, encodings, strict=True)), stage)
            elif family.once:
                with self.run.bar(f"lengths of {len(own)} processes"):
                    networks = self._together(own, self._processes)
            else:
                d, same = self.rows.main.X.shape[1], nn.Identity
                networks = [same() if e is None else encoded(e, same(), d) for e in encodings]
            made |= zip(places, networks, strict=True)
            logger.info("%d fits like %s: %.1f s", len(places), family, time.perf_counter() - start)
        return [made[i] for i in range(len(tasks))]

    def _encodings(self, tasks: Sequence[Task]) -> list[PiecewiseEncoding | None]:
        """Encodings fitted to training rows, so that held-out rows lie outside them as new rows will."""
        if tasks[0].family.encoding == "raw":
            return [None] * len(tasks)
        main, dtype = self.rows.main, self.architecture.settings.place.torch_dtype
        n_bins = bins_of(main.X)
        return [PiecewiseEncoding.of(main.take(task.split.train).X, n_bins).to(dtype) for task in tasks]

    def _trained(self, tasks: list[EncodedTask], stage: int) -> list[nn.Module]:
        s, network = self.architecture.settings.training, self.architecture.settings.network
        plain = s.objective == "profiled" and s.chunk_size is None and not s.early_stopping
        if len(tasks) == 1 or not (plain and network.hidden and network.backbone is None) or self.rows.main.X.dim() > 2:
            return [self._alone(*task, (stage, i)) for i, task in enumerate(tasks)]
        over = self.run.history.stopped == "interrupted"  # networks after an interrupt keep their initial weights
        label = f"training {len(tasks)} networks"
        work = lambda group, i, stop: self._stack(group, (stage, i), None if over else stop, label)
        networks = self._together(tasks, work)
        if self.run.history.stopped == "interrupted" and not over:
            epochs = len(self.run.history.nlml)
            warnings.warn(f"interrupted after {epochs} epochs: the networks are kept and usable", stacklevel=8)
        return networks

    def _processes(self, tasks: list[Task], i: int, stop: Event) -> list[nn.Module]:
        """Random frequencies, with length scales by the evidence of at most `MOST_ROWS` rows."""
        generators = [torch.Generator().manual_seed(task.seed) for task in tasks]
        whole, outputs, networks = None, slice(None), list[nn.Module]()
        if (read := self.rows.main.readings.read) is not None:
            whole, outputs = _most_complete((read > 0).numpy(force=True))
        parts = []
        for task, generator in zip(tasks, generators, strict=True):
            rows = task.split.train if whole is None else task.split.train[whole[task.split.train]]
            parts.append(rows[torch.randperm(len(rows), generator=generator).numpy()[:MOST_ROWS]])
        data = self.rows.stacked(parts).main
        T = data.T[..., outputs]
        weight = torch.ones_like(T[..., 0]) if data.weight is None else data.weight
        device, prior = data.X.device, self.architecture.settings.layer.bias_prior
        found = (x.cpu() for x in fit_lengths(data.X.double(), T, weight))
        for rows, generator, log_length, log_linear in zip(parts, generators, *found, strict=True):
            if not self.rows.learned:
                part = Rows(self.rows.main.take(rows), some_of(self.rows.beside, MOST_FUNCTIONALS, generator))
                part, start = part.to(device, torch.float64), (log_length.to(device), log_linear.to(device))
                log_length, log_linear = refine_lengths(part, *start, bias_prior=prior, generator=generator)
            network = fourier_network(log_length.cpu(), log_linear.cpu(), generator=generator)
            networks.append(network.to(device).eval())
        return networks

    def _together(
        self, items: list[Item], work: Callable[[list[Item], int, Event], list[nn.Module]]
    ) -> list[nn.Module]:
        """Divide the work among processor cores, by threads that do not wait for each other."""
        cores = torch.get_num_threads() if self.rows.main.X.device.type == "cpu" else 1
        stop = Event()
        if cores == 1 or len(items) * len(self.rows.main.X) < ROWS_PER_CORE:
            return work(items, 0, stop)
        groups = [list(items[i::cores]) for i in range(min(cores, len(items)))]
        with threads_for(0), ThreadPoolExecutor(len(groups)) as pool:
            futures = [pool.submit(work, group, i, stop) for i, group in enumerate(groups)]
            try:
                parts = [future.result() for future in futures]
            except KeyboardInterrupt:
                stop.set()
                parts = [future.result() for future in futures]
        networks: list[nn.Module] = [nn.Identity()] * len(items)
        for i, part in enumerate(parts):
            networks[i :: len(groups)] = part
        return networks

    def _stack(
        self, items: list[EncodedTask], place: tuple[int, int], stop: Event | None, label: str
    ) -> list[nn.Module]:
        """Train networks of one kind as a stack; without `stop`, they keep their initial weights."""
        tasks, encodings = [task for task, _ in items], [encoding for _, encoding in items if encoding is not None]
        settings, d, device = self.architecture.settings, self.rows.main.X.shape[1], self.rows.main.X.device
        s, dtype = settings.network, settings.place.torch_dtype
        generators = [torch.Generator().manual_seed(task.seed) for task in tasks]
        n_inputs = len(encodings[0].column) if encodings else d
        activation = tasks[0].family.activation or s.activation
        stack = StackedMLP(n_inputs, s.hidden, generators=generators, activation=activation)
        stack = stack.to(device=device, dtype=dtype)
        network: nn.Module = InputSkip(stack) if s.input_skip else stack
        if encodings:
            network = encoded(PiecewiseEncoding.stacked(encodings), stack, d)
        if stop is not None:
            shared, parts = settings.training.batch_size is not None, [task.split.train for task in tasks]
            rows = self._shared(parts) if shared and self.rows.complete else self.rows.stacked(parts)
            precision = torch.tensor([t.family.prior_precision for t in tasks], dtype=torch.float64, device=device)
            objective = objective_for(self.rows, settings, (len(tasks),), n_inputs)
            problem = problem_for(network, objective, rows, settings, precision)
            self._train(problem, network, tasks, place, stop=stop, label=label, progress=place[1] == 0)
        stack.to(dtype)
        members = [stack.member(i) for i in range(len(tasks))]
        if encodings:
            return [encoded(e, member, d).eval() for e, member in zip(encodings, members, strict=True)]
        return [(InputSkip(member) if s.input_skip else member).eval() for member in members]

    def _shared(self, parts: Sequence[ndarray]) -> Rows:
        """All rows, with weights that assign them to the networks of a stack: these share their mini-batches."""
        main = self.rows.main
        weight = torch.zeros(len(parts), len(main.X), dtype=torch.float64)
        for row, part in zip(weight, parts, strict=True):
            row[torch.from_numpy(part)] = 1
        return Rows(replace(main, weight=weight.to(main.X.device) * (1 if main.weight is None else main.weight)))

    def _alone(self, task: Task, encoding: PiecewiseEncoding | None, place: tuple[int, int]) -> nn.Module:
        """Train one network of any kind, with any objective, and early stopping."""
        s, main, generator = self.architecture.settings, self.rows.main, torch.Generator().manual_seed(task.seed)
        rows = self.rows if len(task.split.train) == len(main.X) else self.rows.take(task.split.train)
        network = self.architecture.build(main.X.shape[1], generator, task.family, encoding)
        network = network.to(device=main.X.device, dtype=s.place.torch_dtype)
        with torch.no_grad():
            n_features = finite_features(network.eval(), rows.main.X[:2]).shape[1]
        objective = objective_for(self.rows, s, (), n_features, generator)
        stopping, others = self._for_stopping(task.split.train, generator)
        rest = replace(rows, main=rows.main.take(others)) if len(stopping) else rows
        precision = torch.tensor(task.family.prior_precision, dtype=torch.float64, device=main.X.device)
        problem, validation = problem_for(network, objective, rest, s, precision), None
        if len(stopping):
            first = every = 1
            if isinstance(problem, FullBatch):
                every = max(1, min(10, s.training.max_epochs // 20))
                first = -(-min(50, s.training.max_epochs // 10) // every) * every
            score = partial(problem.held_out_score, rows.main.take(stopping))
            validation = Validation(score, first=first, every=every, patience=s.training.patience)
        self._train(problem, network, [task], place, validation=validation)
        return network.to(s.place.torch_dtype)

    def _for_stopping(self, train: ndarray, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices into the training rows for early stopping, none if it is off or not possible, and the others."""
        m, s = len(train), self.architecture.settings.training
        n, none = round(s.validation_fraction * m), (torch.empty(0, dtype=torch.long), torch.arange(m))
        if not s.early_stopping or n < 1 or m - n < 2:
            return none
        if self.rows.groups is None:
            order = torch.randperm(m, generator=generator)
            return order[:n], order[n:]
        groups = np.unique(self.rows.groups[train], return_inverse=True)[1]
        held = whole_groups(groups, n, torch.randperm(int(groups.max()) + 1, generator=generator).numpy())
        others = np.setdiff1d(np.arange(m), held)
        return (torch.from_numpy(held), torch.from_numpy(others)) if len(others) >= 2 else none

    def _train(
        self, problem: Problem, network: nn.Module, tasks: Sequence[Task], place: tuple[int, int], **options: Any
    ) -> None:
        checkpoint = None
        if self.run.checkpoint is not None and isinstance(problem, MiniBatches):
            used = digest_of(*[task.split.train for task in tasks])
            data = {"rows": len(self.rows.main.T), "digest": self.run.digest, "digest of the rows used": used}
            precisions = [task.family.prior_precision for task in tasks]
            name = "training-{}-{}".format(*place)
            checkpoint = self.run.state(name, self.architecture, network, precisions, data)
        history = self.run.train(problem, self.architecture.settings, checkpoint=checkpoint, **options)
        if isinstance(problem, MiniBatches):
            history.gap = problem.gap(history)


def _most_complete(known: Bool[ndarray, "m q"]) -> tuple[Bool[ndarray, " m"], slice]:
    """Rows and targets to fit length scales to: complete rows, or if these are few, the most frequent target."""
    n, whole = known.sum(0), np.asarray(known.all(1))
    if whole.sum() >= max(MOST_ROWS // 4, 0.5 * n.max()):
        return whole, slice(None)
    j = int(n.argmax())
    return known[:, j], slice(j, j + 1)
