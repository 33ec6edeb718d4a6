"""Adam, without the second that `torch.optim` takes to import a compiler at its first use."""

from collections.abc import Sequence

import torch
from torch import Tensor

BETAS, EPS = (0.9, 0.999), 1e-8


class Adam:
    """Adam with the defaults of `torch.optim.Adam`, and `state` as there."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.state: dict[Tensor, dict[str, Tensor]] = {
            p: {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            for p in parameters
        }
        self.scratch = [torch.empty_like(p) for p in parameters]

    def zero_grad(self) -> None:
        """Reset the gradients of all parameters to None."""
        for p in self.state:
            p.grad = None

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update all parameters that have a gradient."""
        for (p, state), scratch in zip(self.state.items(), self.scratch, strict=True):
            if p.grad is None:
                continue
            state["step"] += 1
            first, second = (1 - beta ** float(state["step"]) for beta in BETAS)
            state["exp_avg"].lerp_(p.grad, 1 - BETAS[0])
            state["exp_avg_sq"].mul_(BETAS[1]).addcmul_(p.grad, p.grad, value=1 - BETAS[1])
            torch.sqrt(state["exp_avg_sq"], out=scratch)
            p.addcdiv_(
                state["exp_avg"],
                scratch.div_(second**0.5).add_(EPS),
                value=-min(rate / first, torch.finfo(p.dtype).max),
            )
