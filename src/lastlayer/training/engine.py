"""The training engine: schedule, early stopping, setbacks, interruption and checkpoints, for any `Problem`."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lastlayer._internal.work import progress_bar, threads_for
from lastlayer.data.distributed import ONE, ProcessGroup

if TYPE_CHECKING:
    from lastlayer.training.checkpoint import Checkpoint

MAX_SETBACKS = 10
"""Setbacks per network before training gives up."""
KEEP_EVERY = 10
"""Epochs between two states that a single network can return to."""


WARM_SHARE = 0.1
"""Largest share of the epochs in which the rate rises."""
BETAS, EPS = (0.9, 0.999), 1e-8


class Adam:
    """Adam with the defaults of `torch.optim.Adam`, and `state` as there.

    `torch.optim` takes a second to import a compiler at its first use; its kernel does without.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.state: dict[Tensor, dict[str, Tensor]] = {
            p: {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
            for p in parameters
        }
        for p in parameters:
            p.grad = None  # what another loop may have left

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update all parameters that have a gradient, and reset it."""
        for dtype in {p.dtype for p in self.state}:
            gradients = {p: p.grad for p in self.state if p.grad is not None and p.dtype == dtype}
            if not gradients:
                continue
            states = {name: [self.state[p][name] for p in gradients] for name in ("step", "exp_avg", "exp_avg_sq")}
            torch._foreach_add_(states["step"], 1)
            torch._fused_adam_(
                list(gradients),
                list(gradients.values()),
                states["exp_avg"],
                states["exp_avg_sq"],
                [],
                states["step"],
                lr=rate,
                beta1=BETAS[0],
                beta2=BETAS[1],
                weight_decay=0.0,
                eps=EPS,
                amsgrad=False,
                maximize=False,
            )
            for p in gradients:
                p.grad = None


@dataclass(frozen=True)
class Optimizer:
    """Adam with a cosine schedule from `learning_rate` to 1% of it, or a constant rate.

    Parameters
    ----------
    learning_rate, max_epochs : float, int
        Initial learning rate, and maximum number of epochs.
    cosine : bool, default True
        Whether the rate falls.
    """

    learning_rate: float = 1e-2
    max_epochs: int = 1000
    cosine: bool = True

    def rate(self, epoch: float | int) -> float:
        """Learning rate at an epoch, or a fraction of one, of a fall that begins at 0 and lasts `max_epochs`.

        Parameters
        ----------
        epoch : float or int
            Number of epochs so far.
        """
        if not self.cosine:
            return self.learning_rate
        return self.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * epoch / max(self.max_epochs, 1))))


@dataclass(frozen=True)
class Plateau:
    """A rate that stays until a score has not fallen for a while, and then falls: as many steps as the data need."""

    score: Callable[[], float] | None
    """Returns the score; None: the rate stays as long as `max_epochs` allow."""
    warm: int = 10
    """Epochs over which the rate rises at the beginning."""
    least: int = 60
    """Epochs before the rate may fall."""
    every: int = 10
    """Epochs between two scores."""
    patience: int = 40
    """Epochs without improvement after which the rate falls."""
    min_delta: float = 0.003
    """Smallest improvement that counts."""
    share: float = 0.4
    """Share of the epochs in which the rate falls."""


@dataclass(frozen=True)
class Validation:
    """Early stopping once `score` (smaller is better) has not improved by `min_delta` for `patience` epochs."""

    score: Callable[[], Float[Tensor, "*s"]]
    """Returns the score of each network."""
    first: int = 0
    """First epoch to validate: with few held-out rows an untrained network can score best by chance."""
    every: int = 10
    """Epochs between two scores."""
    patience: int = 200
    """Epochs without improvement."""
    min_delta: float = 1e-5
    """Smallest improvement that counts."""


@dataclass
class TrainingHistory:
    """Training history: one entry per epoch (validation scores only where evaluated), and the reason for stopping."""

    nlml: list[float] = field(default_factory=list)
    """NLML per sample."""
    log_alpha: list[float] = field(default_factory=list)
    """log alpha."""
    learning_rate: list[float] = field(default_factory=list)
    """Learning rate."""
    validation_epoch: list[int] = field(default_factory=list)
    """Epochs with a score."""
    validation_score: list[float] = field(default_factory=list)
    """Their scores."""
    best_epoch: int = 0
    """Epoch of the state that was kept."""
    setbacks: int = 0
    """Returns to an older state."""
    gap: float | None = None
    """Difference per sample between the last bound of mini-batch training and the exact evidence."""
    stopped: str = "max_epochs"
    """One of "max_epochs", "early_stopping", "interrupted" and "diverged"."""


class Problem:
    """Training problem: the parameters of one network, or of a stack whose parameters have a leading dimension."""

    check_every = 1
    """Steps between two checks for finite values."""
    n_steps = 1
    """Steps per epoch, as far as known in advance."""
    multiplications = 0
    """Approximate number of multiplications per step: small steps are faster on one thread."""
    process_group: ProcessGroup = ONE
    log_alpha: Tensor
    """Present log alpha of each network."""

    def __init__(self, module: nn.Module, shape: torch.Size, parameters: list[Tensor] | None = None) -> None:
        """Set what is trained: `module`, with `shape` () for one network and (s,) for a stack."""
        self.module, self.shape = module, shape
        own: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self.parameters = own if parameters is None else parameters
        self.state = self.parameters if shape or parameters is not None else own + list(module.buffers())
        """State that a network returns to after a setback."""

    def steps(self, epoch: int, first: int) -> Iterator[Any]:
        """Yield the batches of an epoch, from number `first` on; full-batch training has one."""
        if not first:
            yield None

    def gradient(self, batch: Any, speed: float) -> Float[Tensor, "*s"]:
        """Add the gradient to the parameters and return the NLML of each network, or this process's share of it."""
        raise NotImplementedError

    def evaluate(self) -> Float[Tensor, "*s"]:
        """NLML in the present state; not finite where a network has failed."""
        raise NotImplementedError

    def held_out_score(self, held: Any) -> Float[Tensor, ""]:
        """Score of held-out rows for early stopping: smaller is better."""
        raise NotImplementedError

    def penalty(self) -> Float[Tensor, "*s"]:
        """Terms minimised in addition to the NLML, such as the prior of the hidden weights."""
        return torch.zeros(self.shape, dtype=torch.float64)

    def memory(self) -> dict[str, Tensor]:
        """What a checkpoint must keep beside parameters."""
        raise NotImplementedError

    def remember(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `memory` returned."""
        raise NotImplementedError


def train(
    problem: Problem,
    optimizer: Optimizer,
    *,
    validation: Validation | None = None,
    plateau: Plateau | None = None,
    checkpoint: "Checkpoint | None" = None,
    stop: Event | None = None,
    progress: bool = False,
    label: str = "fit",
) -> TrainingHistory:
    """Train the problem's networks in place; each ends in its best state, whatever happened on the way.

    Parameters
    ----------
    problem, optimizer : Problem, Optimizer
        What to train, and how.
    validation : Validation, optional
        Early stopping.
    plateau : Plateau, optional
        When the rate begins to fall; None: at once.
    checkpoint : Checkpoint, optional
        Where to save states; training resumes from one of the same training.
    stop : Event, optional
        Ends training after the present step once it is set.
    progress, label : bool, str
        Whether to show a progress bar, and its name.
    """
    engine = Engine(problem, optimizer, validation, checkpoint, plateau)
    with (
        progress_bar(total=optimizer.max_epochs, disable=not progress, desc=label, unit="epoch") as bar,
        threads_for(problem.multiplications),
    ):
        try:
            engine.run(bar, stop)
        except KeyboardInterrupt:
            if problem.process_group.world_size > 1:  # the others may be at another step
                raise
            engine.history.stopped = "interrupted"
            engine.look()
        engine.finish()
    if not problem.shape:
        warn(engine.history)
    return engine.history


class Engine:
    """State of one training run."""

    def __init__(
        self,
        problem: Problem,
        optimizer: Optimizer,
        validation: Validation | None = None,
        checkpoint: "Checkpoint | None" = None,
        plateau: Plateau | None = None,
    ) -> None:
        self.problem, self.optimizer, self.validation, self.checkpoint = problem, optimizer, validation, checkpoint
        self.plateau, self.falls, self.ends = plateau, 0.0 if plateau is None else math.inf, optimizer.max_epochs
        """Epochs at which the rate begins to fall, and at which training ends."""
        self.rate = optimizer.learning_rate
        """Learning rate at the beginning of the present epoch."""
        self.level, self.lowest, self.lowest_epoch = math.inf, math.inf, 0
        """Smoothed score of the plateau, its lowest value, and the epoch of that."""
        problem.module.train()
        self.parameters, shape = problem.parameters, problem.shape
        self.steps = Adam(self.parameters)
        self.history = TrainingHistory()
        self.epoch, self.step, self.n_steps = 0, 0, problem.n_steps
        """Completed epochs, completed steps of the present epoch, and its number of steps."""
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.loss = torch.zeros(shape, dtype=torch.float64, device=device)
        """Sum of the losses over the steps of the present epoch."""
        self.nlml: list[Tensor] = []
        self.log_alpha: list[Tensor] = []
        self.pace = torch.ones_like(self.loss)
        """Fraction of the optimizer's step that each network takes."""
        self.good = self.best = [t.detach().clone() for t in problem.state]
        self.candidate: list[Tensor] | None = None
        """State that becomes `good` once its own loss has turned out finite."""
        self.best_score = torch.full(shape, math.inf, dtype=torch.float64)
        self.best_epoch = torch.zeros(shape, dtype=torch.long)
        self.running = torch.ones(shape, dtype=torch.bool)
        """Networks that have not stopped early."""

    def run(self, bar: Any, stop: Event | None) -> None:
        """Run epochs until one of the stopping rules applies, resuming from the checkpoint if there is one."""
        if self.checkpoint is not None:
            self.checkpoint.restore(self)
            bar.update(self.epoch)
        v = self.validation
        while self.epoch < self.ends and self.history.stopped == "max_epochs":
            if not self.step:
                self._follow_plateau()
                bar.total = self.ends
            due = v is not None and self.epoch >= v.first and (self.epoch - v.first) % v.every == 0
            if v is not None and due and not self.step and self.epoch not in self.history.validation_epoch:
                self._validate(v, v.min_delta)
                if not bool(self.running.any()):
                    self.history.stopped = "early_stopping"
                    return
            if self.problem.check_every == 1 and self.epoch % KEEP_EVERY == 0:
                self.candidate = [t.detach().clone() for t in self.problem.state]
            for batch in self.problem.steps(self.epoch, self.step):
                if stop is not None and stop.is_set():
                    raise KeyboardInterrupt
                self._take(batch)
                if self.step % self.problem.check_every == 0 and self.step < self.n_steps:
                    self.look()
                if self.checkpoint is not None:
                    self.checkpoint.keep(self)
            self._end_of_epoch(bar)

    def _take(self, batch: Any) -> None:
        """Take one step."""
        most, epoch = self.optimizer.max_epochs, self.epoch + min(self.step / self.n_steps, 1.0)
        warm = 1.0 if self.plateau is None else min(1.0, (epoch + 1) / min(self.plateau.warm, most * WARM_SHARE))
        fallen = max(0.0, epoch - self.falls) / max(1.0, self.ends - self.falls) if self.falls < math.inf else 0.0
        rate = warm * self.optimizer.rate(fallen * most)
        self.rate = rate if not self.step else self.rate
        before = [p.detach().clone() for p in self.parameters] if self.history.setbacks else []
        self.loss = self.loss + self.problem.gradient(batch, rate / self.optimizer.learning_rate).detach()
        self.steps.step(rate)
        with torch.no_grad():
            for p, old in zip(self.parameters, before, strict=False):
                p.copy_(old + _over(self.pace.to(p), p) * (p - old))
        self.step += 1

    def _follow_plateau(self) -> None:
        """Decide whether the rate begins to fall, and when training ends."""
        p, epoch, most = self.plateau, self.epoch, self.optimizer.max_epochs
        if p is None or self.falls <= epoch:
            return
        if p.score is not None and epoch >= 2 * p.every and epoch % p.every == 0:
            score = p.score()
            self.level = score if math.isinf(self.level) else 0.5 * (self.level + score)
            if self.level < self.lowest - p.min_delta:
                self.lowest, self.lowest_epoch = self.level, epoch
            elif epoch - self.lowest_epoch >= p.patience and epoch >= p.least:
                self.falls = epoch
                self.ends = min(most, epoch + max(20, round(p.share / (1 - p.share) * epoch)))
                return
        if epoch >= round(most * (1 - p.share)):
            self.falls = epoch

    def look(self) -> Bool[Tensor, "*s"]:
        """Return networks that are no longer finite to their last good state, and shorten their steps."""
        with torch.no_grad():
            value = self.loss if self.problem.check_every == 1 else self.problem.evaluate()
        lost = ~(torch.isfinite(value) & finite(self.parameters, len(self.problem.shape)).to(value.device))
        n_lost = int(lost.sum())
        if n_lost:
            self._put(self.good, lost)
            self.pace = torch.where(lost, 0.3, 1.0) * self.pace
            for state in self.steps.state.values():  # reset the optimizer's moments of these networks
                state["exp_avg"][lost] = 0
                state["exp_avg_sq"][lost] = 0
            self.history.setbacks += n_lost
            if self.history.setbacks > MAX_SETBACKS * max(1, self.problem.shape.numel()):
                self.history.stopped = "diverged"
        if self.problem.check_every > 1:
            self.good = [t.detach().clone() for t in self.problem.state]
        elif self.candidate is not None and self.step and not n_lost:  # the loss is that of the state before the step
            self.good = self.candidate
        self.candidate = None
        return lost

    def _put(self, states: list[Tensor], chosen: Bool[Tensor, "*s"]) -> None:
        """Reset some networks to an earlier state."""
        with torch.no_grad():
            for t, state in zip(self.problem.state, states, strict=True):
                t.copy_(torch.where(_over(chosen, t), state, t))

    def _end_of_epoch(self, bar: Any) -> None:
        last, group = self.epoch + 1 == self.ends, self.problem.process_group
        looks = self.n_steps > 1 or last or (self.epoch + 1) % self.problem.check_every == 0
        if not looks or not bool(self.look().all()):  # an epoch in which all networks failed is not recorded
            loss = self.loss if group.world_size == 1 else group.sum_(self.loss)
            self.nlml.append((loss / max(self.step, 1)).nanmean())
            self.log_alpha.append(self.problem.log_alpha.detach().mean())
            pace = float(self.pace.mean()) if self.history.setbacks else 1.0
            self.history.learning_rate.append(pace * self.rate)
        self.epoch, self.n_steps, self.step = self.epoch + 1, max(self.step, 1), 0
        self.loss = torch.zeros_like(self.loss)
        if looks and self.nlml and not bar.disable:
            best = float(self.best_score.mean())
            held_out = f", best held out {best:.4f}" if math.isfinite(best) else ""
            bar.set_postfix_str(f"NLML {float(self.nlml[-1]):.4f}{held_out}", refresh=False)
        bar.update()

    def _validate(self, v: Validation, min_delta: float) -> None:
        """Score the present state and keep the best one; networks without improvement for long stop running."""
        score = torch.full(self.problem.shape, math.inf, dtype=torch.float64)
        self.problem.module.eval()
        with torch.no_grad(), suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            score = v.score().double().cpu()
        self.problem.module.train()
        score = torch.where(torch.isfinite(score), score, math.inf)
        self.history.validation_epoch.append(self.epoch)
        self.history.validation_score.append(float(score.mean()))
        better = self.running & (score < self.best_score - min_delta)
        chosen = better.to(self.loss.device)
        self.best = [
            torch.where(_over(chosen, t), t.detach(), kept)
            for t, kept in zip(self.problem.state, self.best, strict=True)
        ]
        self.best_score = torch.where(better, score, self.best_score)
        self.best_epoch = torch.where(better, self.epoch, self.best_epoch)
        self.running = self.running & (better | (self.epoch - self.best_epoch < v.patience))

    def finish(self) -> None:
        """Put every network into its best state, in evaluation mode, and complete the history."""
        self.problem.module.eval()
        with torch.no_grad():
            fine = torch.isfinite(self.problem.evaluate()).to(self.loss.device)
        self._put(self.good, ~(fine & finite(self.parameters, len(self.problem.shape)).to(fine.device)))
        self.history.best_epoch = self.epoch
        if self.validation is not None:
            if self.epoch not in self.history.validation_epoch:
                self._validate(self.validation, 0.0)
            self._put(self.best, torch.isfinite(self.best_score).to(self.loss.device))
            self.history.best_epoch = int(self.best_epoch.max())
            self.problem.module.eval()
        self.flush()
        if self.checkpoint is not None and self.history.stopped != "interrupted":
            self.checkpoint.keep(self, at_once=True)

    def flush(self) -> None:
        """Convert tensors of the history to numbers; until then nothing waits for the device."""
        self.history.nlml += [float(x) for x in self.nlml]
        self.history.log_alpha += [float(x) for x in self.log_alpha]
        self.nlml, self.log_alpha = [], []


def finite(parameters: list[Tensor], lead: int = 1) -> Bool[Tensor, "*s"]:
    """Mask of networks whose parameters are all finite; the first `lead` dimensions index networks."""
    if not parameters:
        return torch.ones((), dtype=torch.bool)
    fine = [torch.isfinite(p.detach()).reshape(*p.shape[:lead], -1).all(-1) for p in parameters]
    return torch.stack(fine).all(0)


def warn(history: TrainingHistory) -> None:
    """Warn about interruptions and setbacks."""
    if history.stopped == "interrupted":
        done = len(history.nlml)
        warnings.warn(f"interrupted after {done} epochs: the best state so far is kept and usable", stacklevel=4)
    if history.setbacks:
        ended = "gave up and kept the best state" if history.stopped == "diverged" else "went on"
        warnings.warn(
            f"the loss was not finite {history.setbacks} times: stepped back, made the steps smaller, and {ended}; "
            "a smaller learning_rate avoids this",
            stacklevel=4,
        )


def _over(values: Tensor, like: Tensor) -> Tensor:
    """One value per network, shaped to broadcast against a parameter."""
    return values.reshape([*values.shape, *[1] * (like.dim() - values.dim())])
