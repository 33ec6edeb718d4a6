"""Cost of uncertainty in CasADi: `to_casadi` compared with a hand-written expression of the bare mean.

Both are evaluated at the same points in CasADi's own loop: one network and the default mixture, interpreted and as C
code compiled by gcc; for one network also the Jacobian. The bare mean of a mixture is the average of its members'. The
C code of `export_c` has its own matrix product: the last line of each block uses it for the bare mean, too.
"""

import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import casadi
import numpy as np
import torch
from numpy import ndarray
from torch import nn

from benchmarks.runner import options_of
from benchmarks.timing import describe_machine, time_in_turns
from lastlayer import BLLRegressor
from lastlayer.integrations import to_casadi, variances_to_casadi
from lastlayer.integrations.c_code import c_source
from lastlayer.networks.mlp import MLP, InputSkip, parts_of

POINTS, SIZES = 2_000, ((20, 20), (50, 50), (100, 100))
AT_MOST = 2.0


def bare_mean(model: BLLRegressor, blas: str = "reference", name: str = "bare") -> Any:
    """Build the mean alone, as written by hand: layers, last layer, units; members averaged."""
    times = lambda W, column: casadi.mtimes(casadi.MX(casadi.DM(W)), column, blas)
    x = casadi.MX.sym("x", model.n_features_in_)
    inputs, targets = model.fitted_.inputs, model.fitted_.targets
    assert inputs is not None
    z = (x - inputs.mean.numpy()) / inputs.scale.numpy()
    means = []
    for member in model.members_:
        phi, W = bare_features(member.network, z, times), member.posterior.weights.numpy()
        means.append(times(W[:-1].T, phi) + W[-1])
    mean = sum(means) / len(means)
    return casadi.Function(name, [x], [mean * targets.scale.numpy() + targets.mean.numpy()])


def bare_features(network: nn.Module, z: Any, times: Callable[[ndarray, Any], Any]) -> Any:
    a, (inner, encoding, _) = z, parts_of(network)
    if encoding is not None:
        passed = z[encoding.column.tolist()] * encoding.slope.numpy() + encoding.shift.numpy()
        a = casadi.fmin(casadi.fmax(passed, 0), 1)
    if isinstance(inner, MLP):
        activation = {"tanh": casadi.tanh, "sin": casadi.sin}[inner.activation]
        for linear in inner:
            if isinstance(linear, nn.Linear):
                weight, bias = linear.weight.detach().numpy(), linear.bias.detach().numpy()
                a = activation(times(weight, a) + bias)
    if not isinstance(network, InputSkip):
        return a
    return casadi.vertcat(a, z if network.scale is None else z * network.scale.numpy())


def plain_source(function: Any) -> str:
    generator = casadi.CodeGenerator(f"{function.name()}.c")
    generator.add(function)
    return str(generator.dump())


def compiled(name: str, text: str, folder: str) -> Any:
    source = Path(folder) / f"{name}.c"
    source.write_text(text)
    library = source.with_suffix(".so")
    subprocess.run(["gcc", "-O3", "-fPIC", "-shared", str(source), "-o", str(library), "-lm"], check=True)
    return casadi.external(name, str(library))


def compare(label: str, X: ndarray, ours: Any, bare: Any, *, target: float | None = None) -> None:
    columns, loops = casadi.DM(X.T), [f.map(len(X)) for f in (ours, bare)]
    timings = time_in_turns(*[partial(loop, columns) for loop in loops], repeats=25, clock=time.process_time)
    first, second = (timing.median for timing in timings)
    ratio = first / second
    verdict = "" if target is None else f"   at most {target:g}: {'PASS' if ratio <= target else 'short'}"
    micro = [1e6 * seconds / len(X) for seconds in (first, second)]
    print(f"{label:<50} {micro[0]:8.2f} {micro[1]:8.2f} {ratio:8.2f}{verdict}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    options_of(__doc__).parse_args(arguments)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 8))
    Y = np.stack([np.sin(X[:, 0]) + X[:, 1], X[:, 2] * X[:, 3]], 1) + 0.1 * rng.normal(size=(300, 2))
    points = rng.normal(size=(POINTS, 8))
    print(describe_machine())
    print(f"{'microseconds per point':<50} {'full':>8} {'bare':>8} {'ratio':>8}")
    for hidden in SIZES:
        single = BLLRegressor(hidden=hidden, max_epochs=50, preset="evidence", random_state=0).fit(X, Y)
        name = f"{len(hidden)} layers of {hidden[0]}"
        ours, bare = to_casadi(single), bare_mean(single)
        np.testing.assert_allclose(np.array(ours(points[0])[0]), np.array(bare(points[0])), rtol=1e-6)
        evaluations(name, single, points)
        slope = lambda f: f.factory(f"d{f.name()}", f.name_in(), [f"jac:{f.name_out(0)}:{f.name_in(0)}"])
        compare(f"{name}: Jacobian of the mean", points, slope(ours), slope(bare))
    mixture = BLLRegressor(max_epochs=50, random_state=0).fit(X, Y)
    evaluations(f"mixture of {len(mixture.members_)} (default)", mixture, points)


def evaluations(name: str, model: BLLRegressor, points: ndarray) -> None:
    """Compare mean and variance with the bare mean, for each kind of matrix product and as C code."""
    bare = bare_mean(model)
    compare(f"{name}: mean, covariance, cost", points, to_casadi(model), bare, target=AT_MOST)
    if casadi.has_blas("blasfeo"):
        compare(f'{name}: blas="blasfeo"', points, to_casadi(model, blas="blasfeo"), bare, target=AT_MOST)
    with tempfile.TemporaryDirectory() as folder:
        ours = compiled("ours", c_source("ours", variances_to_casadi(model, name="ours", blas="classic")), folder)
        bare_c = compiled("bare", plain_source(bare), folder)
        compare(f"{name}: C code of export_c", points, ours, bare_c, target=AT_MOST)
        same = compiled("same", c_source("same", bare_mean(model, "classic", "same")), folder)
        compare(f"{name}: the same, bare mean by its product", points, ours, same)


if __name__ == "__main__":
    main()
