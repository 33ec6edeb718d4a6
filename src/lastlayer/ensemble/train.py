"""Training of the networks of a table: as one batch where possible, otherwise one after the other."""

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from numpy import ndarray
from torch import nn

from lastlayer._internal.digests import digest_of
from lastlayer._internal.work import threads
from lastlayer.calibration.points import REGIONS
from lastlayer.data.copies import whole_groups
from lastlayer.data.observe import some_of
from lastlayer.data.rows import Rows
from lastlayer.ensemble.run import Run
from lastlayer.ensemble.splits import Split
from lastlayer.networks.architecture import Architecture
from lastlayer.networks.fourier import fourier_network
from lastlayer.networks.mlp import InputSkip, PiecewiseEncoding, StackedMLP, bins_of, encoded, finite_features
from lastlayer.settings.types import DTYPES, NETWORK, STRUCTURES, Family
from lastlayer.training import (
    FullBatch,
    MiniBatches,
    Plateau,
    Problem,
    StackedNetworks,
    TrainingHistory,
    Validation,
    objective_for,
    problem_for,
)
from lastlayer.training.lengths import MOST_FUNCTIONALS, MOST_ROWS, fit_lengths, refine_lengths

logger = logging.getLogger(__name__)
ROWS_PER_CORE = 200
"""Rows below which a second core costs more than it gains."""
OUTLYING = 6.0
"""Distance of a target from the median, in median distances, beyond which it counts as an outlier in length scales."""
REGION_STEPS = 0.6
"""Steps of networks that leave out a region, over those of the others."""


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
        alike = lambda family: (type(family), family.encoding, family.activation)
        kinds: dict[Any, list[int]] = {}
        for place, task in enumerate(tasks):
            kinds.setdefault(alike(task.family), []).append(place)
        stop = Event()
        jobs = [partial(self._of_kind, [tasks[i] for i in kind], i, stop) for i, kind in enumerate(kinds.values(), 1)]
        made: list[nn.Module] = [nn.Identity()] * len(tasks)
        for kind, networks in zip(kinds.values(), self._together(jobs, stop), strict=True):
            for place, network in zip(kind, networks, strict=True):
                made[place] = network
        if stop.is_set():
            epochs = len(self.run.history.nlml)
            warnings.warn(f"interrupted after {epochs} epochs: the networks are kept and usable", stacklevel=7)
        return made

    def _of_kind(self, tasks: list[Task], stage: int, stop: Event) -> list[nn.Module]:
        """Networks of families that differ by their prior alone."""
        family, start = tasks[0].family, time.perf_counter()
        encodings = self._encodings(tasks)
        if family.trained:
            networks = self._trained(list(zip(tasks, encodings, strict=True)), stage, stop)
        elif family.once:
            with self.run.stage(f"lengths of {len(tasks)} processes"):
                networks = self._processes(tasks)
        else:
            d, same = self.rows.main.X.shape[1], nn.Identity
            networks = [same() if e is None else encoded(e, same(), d) for e in encodings]
        logger.info("%d fits like %s: %.1f s", len(tasks), family, time.perf_counter() - start)
        return networks

    def _together(self, jobs: Sequence[Callable[[], list[nn.Module]]], stop: Event) -> list[list[nn.Module]]:
        """Run jobs, on a processor side by side: threads that wait for none gain more than those of torch."""
        if self.rows.main.X.device.type != "cpu" or self.rows.beside:  # forward derivatives belong to one thread
            return [job() for job in jobs]
        cores = torch.get_num_threads()
        with threads(max(1, cores // len(jobs))):
            if cores == 1 or len(jobs) == 1 or len(self.rows.main.X) < ROWS_PER_CORE:
                return [job() for job in jobs]
            with ThreadPoolExecutor(cores) as pool:
                futures = [pool.submit(job) for job in jobs]
                try:
                    return [future.result() for future in futures]
                except KeyboardInterrupt:
                    stop.set()
                    return [future.result() for future in futures]

    def _encodings(self, tasks: Sequence[Task]) -> list[PiecewiseEncoding | None]:
        """Encodings fitted to training rows, so that held-out rows lie outside them as new rows will."""
        if tasks[0].family.encoding == "raw":
            return [None] * len(tasks)
        main, dtype = self.rows.main, DTYPES[self.architecture.settings.place.dtype]
        n_bins = bins_of(main.X)
        return [PiecewiseEncoding.of(main.X[task.split.train], n_bins).to(dtype) for task in tasks]

    def _trained(self, tasks: list[EncodedTask], stage: int, stop: Event) -> list[nn.Module]:
        """Train networks as stacks: as many steps as held-out rows ask for, and the others by their example."""
        s, network = self.architecture.settings.training, self.architecture.settings.network
        plain = s.objective == "profiled" and s.chunk_size is None and not s.early_stopping
        if len(tasks) == 1 or not (plain and network.hidden and network.backbone is None) or self.rows.main.X.dim() > 2:
            return [self._alone(*task, (stage, i)) for i, task in enumerate(tasks)]
        regions = [i for i, (task, _) in enumerate(tasks) if task.split.kind in REGIONS]
        watched = [i for i, (task, _) in enumerate(tasks) if len(task.split.held) and i not in regions]
        others = [i for i in range(len(tasks)) if i not in regions and i not in watched]
        made: list[nn.Module] = [nn.Identity()] * len(tasks)
        steps: int | None = None
        for share, places in ((1.0, watched), (1.0, others), (REGION_STEPS, regions)):
            if places:
                most, first = None if steps is None else max(1, round(share * steps)), (stage, places[0])
                own, taken = self._stack([tasks[i] for i in places], first, stop, most, watched=places is watched)
                steps = taken if steps is None else steps
                for i, network_of in zip(places, own, strict=True):
                    made[i] = network_of
        return made

    def _processes(self, tasks: list[Task]) -> list[nn.Module]:
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
        T = data.readings.t[..., outputs]
        if self.rows.likelihood.iterated:  # a length scale of the function, not of outliers
            middle = T.median(1, keepdim=True).values
            reach = OUTLYING * (T - middle).abs().median(1, keepdim=True).values
            T = T.clamp(middle - reach, middle + reach)
        weight = torch.ones_like(T[..., 0]) if data.weight is None else data.weight
        device, prior = data.X.device, self.architecture.settings.layer.bias_prior
        n_frequencies = self.architecture.settings.network.n_frequencies
        lengths = [x.cpu() for x in fit_lengths(data.X.double(), T, weight)]
        for rows, generator, log_length, log_linear in zip(parts, generators, *lengths, strict=True):
            if not self.rows.learned:
                part = Rows(self.rows.main.take(rows), some_of(self.rows.beside, MOST_FUNCTIONALS, generator))
                part, start = part.to(device, torch.float64), (log_length.to(device), log_linear.to(device))
                log_length, log_linear = refine_lengths(part, *start, bias_prior=prior, generator=generator)
            network = fourier_network(log_length.cpu(), log_linear.cpu(), n_frequencies, generator=generator)
            networks.append(network.to(device).eval())
        return networks

    def _stack(
        self, items: list[EncodedTask], place: tuple[int, int], stop: Event, most: int | None, *, watched: bool
    ) -> tuple[list[nn.Module], int]:
        """Train networks of one kind as a stack, for at most `most` steps; return them and the number of steps.

        After an interrupt they keep their initial weights.
        """
        tasks, encodings = [task for task, _ in items], [encoding for _, encoding in items if encoding is not None]
        settings, main = self.architecture.settings, self.rows.main
        s, layer, d, device = settings.network, settings.layer, main.X.shape[1], main.X.device
        n_inputs, dtype = len(encodings[0].column) if encodings else d, DTYPES[settings.place.dtype]
        generators = [torch.Generator().manual_seed(task.seed) for task in tasks]
        activation = tasks[0].family.activation or s.activation
        stack = StackedMLP(n_inputs, s.hidden, generators=generators, activation=activation).to(device)
        network: nn.Module = InputSkip(stack) if s.input_skip else stack
        if encodings:
            network = encoded(PiecewiseEncoding.stacked(encodings), stack, d)
        network, steps = network.float(), 0
        if not stop.is_set():
            precision = torch.tensor([t.family.prior_precision for t in tasks], dtype=torch.float64, device=device)
            parts = [task.split.train for task in tasks]
            options: dict[str, Any] = {"stop": stop, "label": f"training {len(tasks)} networks"}
            if self.rows.beside or not (self.rows.learned or layer.bias_prior == "flat"):
                objective = objective_for(self.rows, settings, (len(tasks),), n_inputs)
                problem = problem_for(network, objective, self.rows.stacked(parts), settings, precision)
            else:
                problem = StackedNetworks(
                    network,
                    main,
                    parts,
                    watched=[task.split.held for task in tasks] if watched else (),
                    prior_precision=precision,
                    noise=STRUCTURES[layer.noise],
                    bias_prior=layer.bias_prior,
                    batch_size=settings.training.batch_size,
                    seed=settings.seed,
                    likelihood=self.rows.likelihood if self.rows.likelihood.iterated else None,
                )
                # two passes over the rows, between one and two times the usual number of steps
                patience = min(max(Plateau.patience, 2 * problem.n_batches), 2 * Plateau.patience)
                options["plateau"] = Plateau(problem.watch if watched else None, patience=patience)
                most = settings.training.max_epochs * problem.n_batches if most is None else most
            history = self._train(problem, network, tasks, place, most=most, **options)
            steps = history.best_epoch
            if history.stopped == "interrupted":
                stop.set()
        stack.to(dtype)
        members = [stack.member(i) for i in range(len(tasks))]
        if encodings:
            return [encoded(e, member, d).eval() for e, member in zip(encodings, members, strict=True)], steps
        return [(InputSkip(member) if s.input_skip else member).eval() for member in members], steps

    def _alone(self, task: Task, encoding: PiecewiseEncoding | None, place: tuple[int, int]) -> nn.Module:
        """Train one network of any kind, with any objective, and early stopping."""
        s, main, generator = self.architecture.settings, self.rows.main, torch.Generator().manual_seed(task.seed)
        rows = self.rows if len(task.split.train) == len(main.X) else self.rows.take(task.split.train)
        network = self.architecture.build(main.X.shape[1], generator, task.family, encoding)
        network = network.to(device=main.X.device, dtype=DTYPES[s.place.dtype])
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
        return network.to(DTYPES[s.place.dtype])

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
    ) -> TrainingHistory:
        checkpoint = None
        if self.run.checkpoint is not None and isinstance(problem, MiniBatches | StackedNetworks):
            used = digest_of(*[task.split.train for task in tasks])
            data = {"rows": len(self.rows.main.X), "digest": self.run.digest, "digest of the rows used": used}
            precisions = [task.family.prior_precision for task in tasks]
            name = "training-{}-{}".format(*place)
            checkpoint = self.run.state(name, self.architecture, network, precisions, data)
        history = self.run.train(problem, self.architecture.settings, place=place, checkpoint=checkpoint, **options)
        if isinstance(problem, MiniBatches):
            history.gap = problem.gap(history)
        return history


def _most_complete(known: Bool[ndarray, "m q"]) -> tuple[Bool[ndarray, " m"], slice]:
    """Rows and targets to fit length scales to: complete rows, or if these are few, the most frequent target."""
    n, whole = known.sum(0), np.asarray(known.all(1))
    if whole.sum() >= max(MOST_ROWS // 4, 0.5 * n.max()):
        return whole, slice(None)
    j = int(n.argmax())
    return known[:, j], slice(j, j + 1)
