"""Many networks of one shape, trained as one batch: every parameter has a leading dimension, one entry a member."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm


@dataclass(frozen=True)
class MembersTraining:
    """How each member ended; the parameters themselves are at each member's best epoch."""

    best_epoch: Int[Tensor, " s"]
    stop_epoch: Int[Tensor, " s"]
    loss: Float[Tensor, " s"]
    """In the epoch at which the member stopped."""


def train_members(
    parameters: list[Tensor],
    loss: Callable[[], Float[Tensor, " s"]],
    score: Callable[[], Float[Tensor, " s"]],
    *,
    learning_rate: float,
    max_epochs: int,
    patience: int,
    min_delta: float,
    every: int = 10,
    progress: bool = False,
    label: str = "members",
) -> MembersTraining:
    """Full-batch Adam on all members at once; early stopping and best state for each of them on its own score.

    Adam works entry by entry, so a member moves as if it were alone; members that are done are remembered as they were.
    """
    s = len(parameters[0])
    best = [p.detach().clone() for p in parameters]
    best_score = torch.full((s,), torch.inf, dtype=torch.float64)
    best_epoch, stop_epoch = torch.zeros(s, dtype=torch.long), torch.full((s,), max_epochs)
    final = torch.full((s,), torch.nan, dtype=torch.float64)
    running = torch.ones(s, dtype=torch.bool)
    steps = torch.optim.Adam(parameters, lr=learning_rate)
    with tqdm(total=max_epochs, disable=not progress, desc=label, unit="epoch", mininterval=0.5) as bar:
        for epoch in range(max_epochs):
            steps.zero_grad()
            losses = loss()
            losses.sum().backward()
            steps.step()
            bar.update()
            if epoch % every:
                continue
            final = torch.where(running, losses.detach(), final)
            with torch.no_grad():
                now = score()
            improved = running & (now < best_score - min_delta)
            best_score, best_epoch = torch.where(improved, now, best_score), torch.where(improved, epoch, best_epoch)
            for kept, p in zip(best, parameters, strict=True):
                kept[improved] = p.detach()[improved]
            done = running & (epoch - best_epoch >= patience)
            stop_epoch = torch.where(done, epoch, stop_epoch)
            running = running & ~done
            bar.set_postfix_str(f"{int(running.sum())} of {s} running", refresh=False)
            if not bool(running.any()):
                break
    with torch.no_grad():
        for kept, p in zip(best, parameters, strict=True):
            p.copy_(kept)
    return MembersTraining(best_epoch, stop_epoch, final)
