"""Networks with one hidden layer, trained in parallel as one batched product: ensembles and configurations at once."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor, nn

from benchmarks.uci.protocol import Fit, Gaussians, Predict, Task, hold_out, most_epochs
from lastlayer.data.scaling import Standardizer

Loss = Callable[[Tensor, Tensor], Tensor]  # (e m o) outputs and (m or e m) targets to one loss per member: (e)


Standard = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Standardised inputs to means and variances of standardised targets: (m), or (c m) for a mixture."""


def standardised(method: Callable[[Tensor, Tensor, Task], Standard], dtype: torch.dtype = torch.float32) -> Fit:
    """A method for arrays in their own units, from one for inputs and targets standardised with the training rows."""

    def fit(X: Float[ndarray, "m d"], y: Float[ndarray, " m"], task: Task) -> Predict:
        inputs, targets = Standardizer.fit(torch.from_numpy(X)), Standardizer.fit(torch.from_numpy(y)[:, None])
        of = lambda scaler, values: scaler.forward(torch.from_numpy(values)).to(task.device, dtype)
        known = method(of(inputs, X), of(targets, y[:, None])[:, 0], task)

        def predict(X: Float[ndarray, "m d"]) -> Gaussians:
            with torch.no_grad():
                mean, var = (torch.atleast_2d(each).cpu().double() for each in known(of(inputs, X)))
            return Gaussians((mean * targets.scale + targets.mean).numpy(), (var * targets.scale.square()).numpy())

        return predict

    return fit


class Stack(nn.Module):
    """`size` networks d -> hidden -> outputs, initialised as nn.Linear does; dropout at inputs and hidden units."""

    dropout: Tensor | None

    def __init__(
        self, size: int, widths: tuple[int, int, int], activation: Callable[[Tensor], Tensor], dropout: Any, seed: int
    ) -> None:
        super().__init__()
        (n_inputs, hidden, n_outputs), generator = widths, torch.Generator().manual_seed(seed)

        def uniform(fan_in: int, *shape: int) -> nn.Parameter:
            return nn.Parameter((2 * torch.rand(size, *shape, generator=generator) - 1) / math.sqrt(fan_in))

        self.first, self.first_bias = uniform(n_inputs, n_inputs, hidden), uniform(n_inputs, 1, hidden)
        self.last, self.last_bias = uniform(hidden, hidden, n_outputs), uniform(hidden, 1, n_outputs)
        self.activation = activation
        self.register_buffer("dropout", dropout)

    def features(self, x: Float[Tensor, "e b d"]) -> Float[Tensor, "e b h"]:
        return self.activation(torch.baddbmm(self.first_bias, self._drop(x), self.first))

    def forward(self, x: Float[Tensor, "e b d"]) -> Float[Tensor, "e b o"]:
        return torch.baddbmm(self.last_bias, self._drop(self.features(x)), self.last)

    def spread(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "e m d"]:
        return x.expand(len(self.first), *x.shape)

    def squared_norm(self) -> Float[Tensor, " e"]:
        return torch.stack([p.square().sum((1, 2)) for p in self.parameters()]).sum(0)

    def _drop(self, x: Tensor) -> Tensor:
        """Apply dropout with one rate per member, in training and prediction."""
        if self.dropout is None:
            return x
        keep = 1 - self.dropout[:, None, None]
        return x * torch.bernoulli(keep.expand_as(x)) / keep


@dataclass(frozen=True)
class Recipe:
    """Training of stacks by Adam: the budget, and the configurations to choose from on held-out rows."""

    learning_rate: float
    batch_size: int
    max_epochs: int
    decays: tuple[float, ...] = (0.0,)
    """Weight decay of each configuration: factor of the squared norm, added to the mean loss per row."""
    members: int = 1  # networks of each configuration
    dropout: tuple[float, ...] | None = None  # dropout rate of each configuration
    n_outputs: int = 1
    activation: Callable[[Tensor], Tensor] = torch.relu
    checks: int = 40  # number of evaluations of the held-out rows

    def stack(self, configurations: Sequence[int], n_inputs: int, task: Task) -> Stack:
        rates = self.dropout and torch.tensor([self.dropout[i] for i in configurations for _ in range(self.members)])
        widths, size = (n_inputs, task.hidden, self.n_outputs), len(configurations) * self.members
        return Stack(size, widths, self.activation, rates, task.seed).to(task.device)


@dataclass(frozen=True)
class Found:
    score: float  # score on the held-out rows; smaller is better
    note: float  # note returned with the score
    epoch: int
    weights: dict[str, Tensor]  # parameters of the configuration's members


HeldOut = Callable[[Stack, Tensor, Tensor], list[tuple[float, float]]]
"""(stack, x, t) of held-out rows to a score and a note for each configuration."""


def search(
    x: Float[Tensor, "m d"], t: Float[Tensor, " m"], loss: Loss, recipe: Recipe, held_out: HeldOut, task: Task
) -> list[Found]:
    """Train all configurations on a part of the rows; find the best epoch of each on the held-out rows."""
    recipe = replace(recipe, max_epochs=most_epochs(recipe.max_epochs, len(x)))
    fit, held = hold_out(len(x), task.seed)
    every = range(len(recipe.decays))
    stack = recipe.stack(every, x.shape[1], task)
    best = [Found(math.inf, math.nan, 1, {}) for _ in every]

    def look(epoch: int) -> None:
        for i, (score, note) in enumerate(held_out(stack, x[held], t[held])):
            if score < best[i].score:
                own = slice(i * recipe.members, (i + 1) * recipe.members)
                weights = {name: p[own].detach().clone() for name, p in stack.named_parameters()}
                best[i] = Found(score, note, epoch, weights)

    train(stack, x[fit], t[fit], loss, recipe, every, seed=task.seed, look=look)
    return best


def refit(
    x: Float[Tensor, "m d"], t: Float[Tensor, " m"], loss: Loss, recipe: Recipe, chosen: int, epochs: int, task: Task
) -> Stack:
    """Train one configuration from scratch on all rows, for the best number of epochs."""
    recipe = replace(recipe, max_epochs=most_epochs(recipe.max_epochs, len(x)))
    stack = recipe.stack([chosen], x.shape[1], task)
    return train(stack, x, t, loss, recipe, [chosen], seed=task.seed, epochs=epochs)


def train(
    stack: Stack,
    x: Float[Tensor, "m d"],
    t: Float[Tensor, " m"],
    loss: Loss,
    recipe: Recipe,
    configurations: Sequence[int],
    *,
    seed: int,
    epochs: int | None = None,
    look: Callable[[int], None] | None = None,
) -> Stack:
    """Train with separate mini-batches for each network; `look(epoch)` is called `checks` times in the full budget.

    The cosine schedule spans all of max_epochs, so that a shorter training repeats the beginning of a full run.
    """
    decay = torch.tensor([recipe.decays[i] for i in configurations for _ in range(recipe.members)], device=x.device)
    optimizer = torch.optim.Adam(stack.parameters(), lr=recipe.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.max_epochs, recipe.learning_rate / 100)
    every, generator, m = max(1, recipe.max_epochs // recipe.checks), torch.Generator().manual_seed(seed), len(x)
    n_batches = max(1, round(m / recipe.batch_size))
    for epoch in range(1, (recipe.max_epochs if epochs is None else epochs) + 1):
        order = torch.rand(len(decay), m, generator=generator).argsort(1).to(x.device)
        for rows in order.chunk(n_batches, 1):
            optimizer.zero_grad()
            value = (loss(stack(x[rows]), t[rows]) + decay * stack.squared_norm()).sum()
            value.backward()
            optimizer.step()
        schedule.step()
        if look is not None and epoch % every == 0:
            with torch.no_grad():
                look(epoch)
    return stack


def squared_error(output: Float[Tensor, "e b o"], t: Float[Tensor, "*e b"]) -> Float[Tensor, " e"]:
    return (output[..., 0] - t).square().mean(-1)


def gaussian_nll(output: Float[Tensor, "e b two"], t: Float[Tensor, "*e b"]) -> Float[Tensor, " e"]:
    """Gaussian negative log likelihood; the variance is the softplus of the second output (Lakshminarayanan et al.)."""
    mean, var = mean_and_variance(output)
    return 0.5 * (var.log() + (t - mean).square() / var).mean(-1)


def mean_and_variance(output: Float[Tensor, "e b two"]) -> tuple[Float[Tensor, "e b"], Float[Tensor, "e b"]]:
    return output[..., 0], nn.functional.softplus(output[..., 1]) + 1e-6
