"""Adam of our own, beside torch's."""

import subprocess
import sys

import torch
from helpers import close

from lastlayer.training.adam import Adam


def test_it_steps_as_torch_does(generator):
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 2), (5,), ())]
    ours, theirs = ([p.clone().requires_grad_() for p in start] for _ in range(2))
    mine, other = Adam(ours, 0.03), torch.optim.Adam(theirs, lr=0.03)
    for step in range(40):
        gradients = [torch.randn(p.shape, generator=generator, dtype=torch.float64) * 10.0**-step for p in start]
        for optimizer, parameters in ((mine, ours), (other, theirs)):
            optimizer.zero_grad()
            assert all(p.grad is None for p in parameters)
            for group in optimizer.param_groups:
                group["lr"] = 0.03 / (1 + step)
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g.clone() if step != 7 else None  # a parameter that a step leaves out
            optimizer.step()
        for a, b in zip(ours, theirs, strict=True):
            close(a, b)
    assert {name for p in ours for name in mine.state[p]} == {"step", "exp_avg", "exp_avg_sq"}


def test_a_fit_imports_no_compiler():
    """It would cost more than the training of a small table."""
    code = (
        "import sys, numpy as np; from lastlayer import BLLRegressor; x = np.linspace(0, 1, 40)[:, None]; "
        "BLLRegressor(hidden=(3,), max_epochs=2, random_state=0).fit(x, np.sin(6 * x[:, 0])); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
