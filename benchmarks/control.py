"""What uncertainty costs in CasADi: `to_casadi` beside a hand-written expression of the bare network's mean.

`python -m benchmarks.control` evaluates both at the same points in CasADi's own loop and prints their ratio; below it,
the same for functions compiled from C code, for Jacobians, and for a mixture against its members' means.
"""

import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import casadi
import numpy as np
import torch
from numpy import ndarray

from benchmarks.timing import describe_machine, time_in_turns
from lastlayer import BLLRegressor
from lastlayer.integrations import to_casadi

POINTS = 2_000
AT_MOST = 2.5


def bare_mean(model: BLLRegressor) -> Any:
    """The mean alone, as one would write it by hand: layers, last layer, units; members averaged."""
    x = casadi.MX.sym("x", model.n_features_in_)
    inputs, targets = model.fitted_.inputs, model.fitted_.targets
    assert inputs is not None
    z = (x - inputs.mean.numpy()) / inputs.scale.numpy()
    means = []
    for member in model.members_:
        a, W = z, member.layer.posterior.weights.numpy()
        for linear in list(member.network.network)[0::2]:  # type: ignore[arg-type]
            a = casadi.tanh(casadi.mtimes(linear.weight.detach().numpy(), a) + linear.bias.detach().numpy())
        phi = casadi.vertcat(a, z)
        means.append(casadi.mtimes(W[:-1].T, phi) + W[-1])
    mean = sum(means) / len(means)
    return casadi.Function("bare", [x], [mean * targets.scale.numpy() + targets.mean.numpy()])


def compiled(function: Any, folder: str) -> Any:
    """From C code, by gcc."""
    source = Path(folder) / f"{function.name()}.c"
    generator = casadi.CodeGenerator(source.name)
    generator.add(function)
    generator.generate(f"{folder}/")
    library = source.with_suffix(".so")
    subprocess.run(["gcc", "-O3", "-fPIC", "-shared", str(source), "-o", str(library), "-lm"], check=True)
    return casadi.external(function.name(), str(library))


def compare(label: str, X: ndarray, ours: Any, bare: Any, *, target: float | None = None) -> None:
    columns, loops = casadi.DM(X.T), [f.map(len(X)) for f in (ours, bare)]
    timings = time_in_turns(*[partial(loop, columns) for loop in loops], repeats=25, clock=time.process_time)
    first, second = (timing.median for timing in timings)
    ratio = first / second
    verdict = "" if target is None else f"   at most {target:g}: {'PASS' if ratio <= target else 'short'}"
    micro = [1e6 * seconds / len(X) for seconds in (first, second)]
    print(f"{label:<50} {micro[0]:8.2f} {micro[1]:8.2f} {ratio:8.2f}{verdict}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 8))
    Y = np.stack([np.sin(X[:, 0]) + X[:, 1], X[:, 2] * X[:, 3]], 1) + 0.1 * rng.normal(size=(300, 2))
    points = rng.normal(size=(POINTS, 8))
    print(describe_machine())
    print(f"{'microseconds per point':<50} {'ours':>8} {'bare':>8} {'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for hidden in ((20, 20), (50, 50), (100, 100)):
            parameters: dict[str, Any] = {"hidden": hidden, "max_epochs": 50, "random_state": 0}
            single = BLLRegressor(preset="evidence", **parameters).fit(X, Y)
            name = f"{len(hidden)} layers of {hidden[0]}"
            ours, bare = to_casadi(single), bare_mean(single)
            np.testing.assert_allclose(np.array(ours(points[0])[0]), np.array(bare(points[0])), rtol=1e-6)
            compare(f"{name}: mean, covariance, cost", points, ours, bare, target=AT_MOST)
            compare(f"{name}: the same as C code", points, compiled(ours, folder), compiled(bare, folder))
            jacobians = [
                f.factory(f"d{f.name()}", f.name_in(), [f"jac:{f.name_out(0)}:{f.name_in(0)}"]) for f in (ours, bare)
            ]
            compare(f"{name}: Jacobian of the mean", points, *jacobians)
            mixture = BLLRegressor(n_members=5, hidden_prior=0.3, **parameters).fit(X, Y)
            compare(f"{name}: mixture of 5, calibrated", points, to_casadi(mixture), bare_mean(mixture), target=AT_MOST)


if __name__ == "__main__":
    main()
