"""Adam of our own, beside torch's."""

import torch
from helpers import close

from lastlayer.training.engine import Adam


def test_it_steps_as_torch_does(generator):
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 2), (5,), ())]
    ours, theirs = ([p.clone().requires_grad_() for p in start] for _ in range(2))
    ours[0].grad = torch.ones_like(start[0])  # what another loop has left
    mine, other = Adam(ours), torch.optim.Adam(theirs, lr=0.03)
    for step in range(40):
        gradients = [torch.randn(p.shape, generator=generator, dtype=torch.float64) * 10.0**-step for p in start]
        other.param_groups[0]["lr"] = rate = 0.03 / (1 + step)
        for optimizer, parameters, take in ((mine, ours, lambda: mine.step(rate)), (other, theirs, other.step)):
            assert optimizer is mine or other.zero_grad() is None
            assert all(p.grad is None for p in parameters)
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g.clone() if step != 7 else None  # a parameter that a step leaves out
            take()
        for a, b in zip(ours, theirs, strict=True):
            close(a, b)
    assert {name for p in ours for name in mine.state[p]} == {"step", "exp_avg", "exp_avg_sq"}
