"""Mini-batch training: Adam on the bound of a running last layer, in which no step waits for the device."""

import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lastlayer.errors import InputError
from lastlayer.features import weight_energy
from lastlayer.sources import Batch, Source
from lastlayer.statistics import Statistics
from lastlayer.training.checkpoint import Checkpoint
from lastlayer.training.chunked import streamed_statistics
from lastlayer.training.loop import MAX_SETBACKS, Optimiser, Training, Validation, say
from lastlayer.training.objectives import Data
from lastlayer.training.running import RunningLayer
from lastlayer.training.stack import finite, shorten, step_back
from lastlayer.training.threads import SMALL_STEP, threads_for

CHECK_STEPS = 100
"""How often numbers are looked at: networks that failed go back to where they were, with smaller steps."""


@dataclass(frozen=True)
class Refresh:
    """A pass over all rows, in which the running layer begins anew from exact statistics."""

    steps: int = sys.maxsize
    """From one to the next, counted from the beginning of an epoch, where there always is one."""


def train_batches(
    network: nn.Module,
    source: Source,
    layer: RunningLayer,
    optimiser: Optimiser,
    *,
    batch_size: int,
    seed: int = 0,
    strength: float | Tensor = 0.0,
    refresh: Refresh | None = None,
    validation: Validation | None = None,
    checkpoint: Checkpoint | None = None,
    stop: Event | None = None,
    is_table: bool = True,
    progress: bool = False,
    label: str = "fit",
) -> Training:
    """Train a network, or a stack of them, in place; `layer` ends as the running average of the last batches.

    Rows come standardised, in the type and on the device of the network. `strength` is that of the prior on hidden
    weights. Without a `refresh` the layer knows mini-batches alone. With a checkpoint that holds a state of the same
    training, it goes on from there.
    """
    if optimiser.name != "adam":
        raise InputError(
            f'optimizer="{optimiser.name}" needs the whole gradient at every step: take chunk_size in place of '
            'batch_size, or optimizer="adam"'
        )
    loop = Loop(network, source, layer, optimiser, batch_size, seed, strength, refresh, validation, checkpoint)
    # other inputs than tables may use a weight many times: they keep all threads
    work = 3 * batch_size * sum(p.numel() for p in loop.parameters)
    with tqdm(total=optimiser.max_epochs, disable=not progress, desc=label, unit="epoch", mininterval=0.5) as bar:
        try:
            with threads_for(work if is_table else SMALL_STEP):
                loop.run(bar, stop)
        except KeyboardInterrupt:
            loop.record.stopped = "interrupted"
            loop.look()
    loop.finish()
    if not layer.count.dim():
        say(loop.record)
    return loop.record


class Loop:
    """The state of one training."""

    def __init__(
        self,
        network: nn.Module,
        source: Source,
        layer: RunningLayer,
        optimiser: Optimiser,
        batch_size: int,
        seed: int,
        strength: float | Tensor,
        refresh: Refresh | None,
        validation: Validation | None,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.network, self.source, self.layer, self.optimiser = network.train(), source, layer, optimiser
        self.batch_size, self.seed, self.refresh = batch_size, seed, refresh
        self.validation, self.checkpoint = validation, checkpoint
        self.parameters: list[Tensor] = [p for p in network.parameters() if p.requires_grad]
        self.adam = torch.optim.Adam(self.parameters, lr=optimiser.learning_rate)
        self.prior = torch.as_tensor(strength, dtype=torch.float64, device=layer.count.device) / layer.count
        self.with_prior = bool((self.prior > 0).any())
        self.n_batches = max(1, -(-layer.n_rows // batch_size))
        self.record = Training()
        self.epoch = self.batch = 0
        self.sum_nlml = torch.zeros_like(layer.count)
        self.pace: Tensor | None = None
        """Share of Adam's step that each network takes; None: all of it."""
        self.good = [p.detach().clone() for p in self.parameters]
        self.best: dict[str, Tensor] | None = None
        self.best_score = math.inf

    def run(self, bar: Any, stop: Event | None) -> None:
        if self.checkpoint is not None:
            self.checkpoint.restore(self)
            bar.update(self.epoch)
        while self.epoch < self.optimiser.max_epochs:
            for X, T, weight, total in self._pass():
                if stop is not None and stop.is_set():
                    raise KeyboardInterrupt
                self._step(X, T, weight, total)
                if self.batch % CHECK_STEPS == 0:
                    self.look()
                if self.checkpoint is not None:
                    self.checkpoint.keep(self)
            self._end_of_epoch(bar)
            if self.record.stopped in ("diverged", "early_stopping"):
                return

    def _pass(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None, int]]:
        """The batches of an epoch from the present one on. A refresh is a pass of its own, and a source gives one at a
        time: it is asked anew for the batches after each."""
        seed = (self.seed + 1_000_003 * self.epoch) % 2**63
        while True:
            first, left = self.batch, sys.maxsize
            if self.refresh is not None:
                left = self.refresh.steps - first % self.refresh.steps
                if left == self.refresh.steps:
                    self.layer.refresh(self._statistics())
            for batch in islice(self._batches(seed, first), left):
                yield batch.X, batch.T, batch.weight, batch.total
            if self.batch < first + left:
                return

    def _statistics(self) -> Statistics:
        """Of all rows, at the present features."""
        self.network.eval()
        parts = (Data(batch.X, batch.T, batch.weight) for batch in self._batches(None, 0))
        total = streamed_statistics(self.network, parts, ranks=self.layer.ranks)
        self.network.train()
        return total

    def _batches(self, seed: int | None, first: int) -> Iterator[Batch]:
        return self.source.batches(self.batch_size, seed=seed, first=first, ranks=self.layer.ranks)

    def _step(self, X: Tensor, T: Tensor, weight: Tensor | None, total: int) -> None:
        rate = self.optimiser.rate(self.epoch + min(self.batch / self.n_batches, 1.0))
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.zero_grad()
        phi = self.network(X)
        with torch.no_grad():
            rows = self.layer.step(phi.detach(), T, weight, total=total, drift=rate / self.optimiser.learning_rate)
        phi.backward(rows.gradient)
        self.layer.ranks.sum_gradients(self.parameters)
        if self.with_prior:
            (self.prior * weight_energy(self.network)).sum().backward()
        before = None if self.pace is None else [p.detach().clone() for p in self.parameters]
        self.adam.step()
        if before is not None and self.pace is not None:
            shorten(self.parameters, before, self.pace)
        self.sum_nlml += self.layer.now.frozen.offset / self.layer.ranks.world + rows.loss
        self.batch += 1

    def look(self) -> None:
        """Networks that are not finite any more return to where they were when last looked at."""
        lost = ~finite(self.parameters, self.layer.count.dim())
        step_back(self.parameters, self.good, self.adam, lost)
        n_lost = int(lost.sum())
        if n_lost:
            self.pace = torch.where(lost, 0.3, 1.0) * (1.0 if self.pace is None else self.pace)
            self.record.setbacks += n_lost
            if self.record.setbacks > MAX_SETBACKS * max(1, self.layer.count.numel()):
                self.record.stopped = "diverged"

    def _end_of_epoch(self, bar: Any) -> None:
        self.look()
        done = max(self.batch, 1)
        self.record.nlml.append(float((self.layer.ranks.sum_(self.sum_nlml) / done).nanmean()))
        self.record.log_alpha.append(float(self.layer.now.log_alpha.mean()))
        self.record.learning_rate.append(self.optimiser.rate(self.epoch))
        self.epoch, self.batch, self.n_batches = self.epoch + 1, 0, done
        self.sum_nlml = torch.zeros_like(self.layer.count)
        self.record.best_epoch = self.epoch if self.validation is None else self.record.best_epoch
        held_out = f", best held out {self.best_score:.4f}" if math.isfinite(self.best_score) else ""
        bar.set_postfix_str(f"NLML <= {self.record.nlml[-1]:.4f}{held_out}", refresh=False)
        bar.update()
        last = self.epoch == self.optimiser.max_epochs
        if self.validation is not None and (self.epoch % self.validation.every == 0 or last):
            self._validate(self.validation)

    def _validate(self, validation: Validation) -> None:
        self.network.eval()
        score = math.inf
        with torch.no_grad(), suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            score = validation.score()
        self.network.train()
        self.record.validation_epoch.append(self.epoch)
        self.record.validation_score.append(score if math.isfinite(score) else math.inf)
        if score < self.best_score - validation.min_delta:
            self.best = {name: value.clone() for name, value in self.network.state_dict().items()}
            self.best_score, self.record.best_epoch = score, self.epoch
        elif self.epoch - self.record.best_epoch >= validation.patience:
            self.record.stopped = "early_stopping"

    def finish(self) -> None:
        if self.best is not None:
            self.network.load_state_dict(self.best)
        self.network.eval()
        if self.checkpoint is not None and self.record.stopped != "interrupted":
            self.checkpoint.keep(self, at_once=True)
