"""The training loop: one optimiser, early stopping, progress, and a way back from every accident."""

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lastlayer.errors import choose
from lastlayer.features import weight_energy
from lastlayer.ranks import ONE, Ranks
from lastlayer.training.chunked import chunked_nlml
from lastlayer.training.objectives import Data, Objective
from lastlayer.training.threads import SMALL_STEP, threads_for

OPTIMISERS = ("adam", "lbfgs")
MAX_SETBACKS = 10


@dataclass(frozen=True)
class Optimiser:
    """How to descend: "adam" (a cosine from `learning_rate` to 1% of it, or constant) or "lbfgs" (line search)."""

    name: str = "adam"
    learning_rate: float = 1e-2
    max_epochs: int = 1000
    cosine: bool = True

    def __post_init__(self) -> None:
        choose("optimizer", self.name, OPTIMISERS)

    def build(self, parameters: list[nn.Parameter], scale: float) -> torch.optim.Optimizer:
        """`scale` shrinks the steps after setbacks."""
        if self.name == "lbfgs":
            return torch.optim.LBFGS(
                parameters, lr=scale, max_iter=1, max_eval=25, history_size=20, line_search_fn="strong_wolfe"
            )
        return torch.optim.Adam(parameters, lr=scale * self.learning_rate)

    def rate(self, epoch: int | float) -> float:
        if self.name == "lbfgs" or not self.cosine:
            return self.learning_rate
        return self.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * epoch / max(self.max_epochs, 1))))


@dataclass(frozen=True)
class Validation:
    """When to stop: `score` (smaller is better) has not improved by `min_delta` for `patience` epochs."""

    score: Callable[[], float]
    first: int = 0
    """First epoch that counts: with few held-out rows an untrained network can win by chance."""
    every: int = 10
    patience: int = 200
    min_delta: float = 1e-5


@dataclass
class Training:
    """What happened: a list an epoch (validation: where it was asked), and why it ended."""

    nlml: list[float] = field(default_factory=list)
    log_alpha: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    validation_epoch: list[int] = field(default_factory=list)
    validation_score: list[float] = field(default_factory=list)
    best_epoch: int = 0
    setbacks: int = 0
    gap: float | None = None
    """Of the last bound of mini-batch training above the exact evidence, per sample."""
    stopped: str = "max_epochs"
    """"max_epochs", "early_stopping", "converged", "interrupted" or "diverged"."""


def train(
    network: nn.Module,
    objective: Objective,
    data: Data,
    optimiser: Optimiser,
    *,
    validation: Validation | None = None,
    strength: float = 0.0,
    chunk_size: int | None = None,
    ranks: Ranks = ONE,
    progress: bool = False,
) -> Training:
    """Train network and objective in place; they end in their best state, whatever happened on the way.

    `strength` is that of the prior on the network's weights: -log p / m is added to the loss. `chunk_size` rows are in
    memory at a time, with the same gradient; with several `ranks`, `data` are the rows of this process.
    """
    if ranks.world > 1 and chunk_size is None:
        chunk_size = len(data.X)
    parameters = [p for p in nn.ModuleList([network, objective]).parameters() if p.requires_grad]
    # for a table every weight serves every row about three times; other inputs may reuse weights, and keep all threads
    work = 3 * len(data.X) * sum(p.numel() for p in parameters)
    with threads_for(work if data.X.dim() == 2 else SMALL_STEP):
        return _descend(
            network, objective, data, optimiser, parameters, validation, strength, chunk_size, ranks, progress
        )


def _descend(
    network: nn.Module,
    objective: Objective,
    data: Data,
    optimiser: Optimiser,
    parameters: list[nn.Parameter],
    validation: Validation | None,
    strength: float,
    chunk_size: int | None,
    ranks: Ranks,
    progress: bool,
) -> Training:
    own = data.T.new_tensor(len(data.X)) if data.weight is None else data.weight.sum()
    count = float(ranks.sum_(own.double()))
    modules = nn.ModuleList([network, objective]).train()
    scale, record = 1.0, Training()
    steps = optimiser.build(parameters, scale)
    best, best_score = copy.deepcopy(modules.state_dict()), math.inf
    good, reached = best, 0

    seen: tuple[Tensor, float] | None = None

    def closure() -> float:
        nonlocal seen
        if optimiser.name == "lbfgs":
            # a step begins where the line search of the last one ended: value and gradient are still there
            here = torch.cat([p.detach().flatten() for p in parameters])
            if seen is not None and torch.equal(here, seen[0]):
                return seen[1]
        steps.zero_grad()
        if chunk_size is None:
            loss = objective(network(data.X), data.T, data.weight)
            loss.backward()
        else:
            loss = chunked_nlml(network, objective, data, chunk_size, ranks=ranks)
        if strength:
            prior = strength / count * weight_energy(network)
            if prior.requires_grad:  # a network may have no weights at all
                prior.backward()
            loss = loss + prior
        value = float(loss.detach())
        if optimiser.name == "lbfgs":
            seen = here, value
        return value

    bar = tqdm(range(optimiser.max_epochs), disable=not progress, desc="fit", unit="epoch", mininterval=0.5)
    try:
        for epoch in bar:
            if epoch % (validation.every if validation else 10) == 0:
                good = copy.deepcopy(modules.state_dict())
                if validation and epoch >= validation.first:
                    score = _score(modules, validation)
                    record.validation_epoch.append(epoch)
                    record.validation_score.append(score)
                    if score < best_score - validation.min_delta:
                        best, best_score, record.best_epoch = good, score, epoch
                    elif epoch - record.best_epoch >= validation.patience:
                        record.stopped = "early_stopping"
                        break
            for group in steps.param_groups:
                group["lr"] = scale * (optimiser.rate(epoch) if optimiser.name == "adam" else 1.0)
            loss = float(steps.step(closure))
            if not (math.isfinite(loss) and all(bool(torch.isfinite(p).all()) for p in parameters)):
                record.setbacks += 1
                if record.setbacks > MAX_SETBACKS:
                    record.stopped = "diverged"
                    break
                modules.load_state_dict(good)
                scale *= 0.3
                steps = optimiser.build(parameters, scale)
                continue
            flat = optimiser.name == "lbfgs" and bool(record.nlml) and abs(loss - record.nlml[-1]) < 1e-12
            reached = epoch + 1
            record.nlml.append(loss)
            record.log_alpha.append(float(objective.log_alpha.detach()))
            record.learning_rate.append(scale * optimiser.rate(epoch))
            if epoch % 10 == 0:
                held_out = f", best held out {best_score:.4f}" if math.isfinite(best_score) else ""
                bar.set_postfix_str(f"NLML {loss:.4f}{held_out}", refresh=False)
            if flat:
                record.stopped = "converged"
                break
    except KeyboardInterrupt:
        record.stopped = "interrupted"
    finally:
        bar.close()
    modules.eval()
    with torch.no_grad():  # the last loss was of the state before the last step
        if chunk_size is None:
            end = objective(network(data.X), data.T, data.weight)
        else:
            end = chunked_nlml(network, objective, data, chunk_size, ranks=ranks, backward=False)
        finite = math.isfinite(float(end))
    if validation:
        score = _score(modules, validation) if finite else math.inf
        if reached not in record.validation_epoch:
            record.validation_epoch.append(reached)
            record.validation_score.append(score)
        if score < best_score:
            record.best_epoch = reached
        else:
            modules.load_state_dict(best)
    else:
        record.best_epoch = reached
        if not finite:
            modules.load_state_dict(good)
    modules.eval()
    say(record)
    return record


def _score(modules: nn.Module, validation: Validation) -> float:
    modules.eval()
    try:
        with torch.no_grad():
            score = validation.score()
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # features too large to be squared
        score = math.inf
    modules.train()
    return score if math.isfinite(score) else math.inf


def say(record: Training) -> None:
    """Warn of what a user should know."""
    done = len(record.nlml)
    if record.stopped == "interrupted":
        warnings.warn(f"interrupted after {done} epochs: the best state so far is kept and usable", stacklevel=6)
    if record.setbacks:
        ended = "gave up and kept the best state" if record.stopped == "diverged" else "went on"
        warnings.warn(
            f"the loss was not finite {record.setbacks} times: stepped back, made the steps smaller, and {ended}; "
            "a smaller learning_rate avoids this",
            stacklevel=6,
        )
