"""Whether two versions of the library give the same numbers: sixteen small models, compared to 1e-12 relative.

    python -m benchmarks.equal --base COMMIT                       src of that commit against that of this folder
    python -m benchmarks.equal --base COMMIT --models default,log  some of the models

Each version runs in a process of its own with one thread, and is asked by public names alone, so modules may move.
Numbers of the base are kept in the temporary folder, by commit and by this file. A deviation is relative to each
number in arrays of positive numbers, and to the largest number in others. The exit status is 1 if one is above the
limit and not among EXCEPTIONS.
"""

import argparse
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

ROOT = Path(__file__).parents[1]
LIMIT = 1e-12
DRAWS = "draws use as many random numbers as the function has coefficients: the same distribution, other draws"
ROUNDING = {"known noise": 1e-7, "functionals": 1e-7, "missing": 1e-10, "missing updated": 1e-10}
"""Limits of models whose training amplifies the rounding of sums over outputs and of log noise variances."""
WRAPPED = "a log-normal prediction holds the mixture of the logarithm, and has no components of its own"
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("*", "joint sample"): DRAWS,
    ("*", "sample_y"): DRAWS,
    ("functionals mixture", "*"): "the precision of a functional is rounded otherwise, as that of any reading",
    ("*", "nlml_"): "the evidence of all rows in the posterior; without the density of a prior of the noise",
    ("validation", "*"): "a mixture of families, as on folds, in place of networks with one prior precision",
    ("log", "predict"): "the median in place of the mean, which is astronomical outside",
    ("log", "weights"): WRAPPED,
    ("log", "component_*"): WRAPPED,
    ("online", "*"): "rows fade one by one, also those of a batch and those between two factorisations",
}
"""(model, number) to the reason why it differs on purpose; both may hold * as in file names."""
Numbers = dict[str, ndarray]


def public(name: str, *modules: str) -> Any:
    """A public name or module of the version under test, from the first of some modules that has it."""
    for module in ("lastlayer", *(f"lastlayer.{module}" for module in modules)):
        if find_spec(module) and hasattr(found := import_module(module), name):
            return getattr(found, name)
    return import_module(f"lastlayer.{name}")


def rows(q: int = 0, *, seed: int = 0, m: int = 60) -> tuple[ndarray, ndarray]:
    """Rows of two inputs of unequal scale; q = 0: a 1-D target."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-3, 3, (m, 2)) * (1.0, 30.0) + (0.0, 5.0)
    clean = np.stack([np.sin(X[:, 0] + 0.5 * j) * (1 + j) + X[:, 1] / 40 + 2 for j in range(max(q, 1))], 1)
    y = clean + 0.15 * rng.standard_normal(clean.shape) @ (np.eye(max(q, 1)) + 0.5)
    return X, y if q else y[:, 0]


def ordered(q: int = 0, **more: int) -> tuple[ndarray, ndarray]:
    """Rows in the order in which `fit` takes them: the base takes incomplete rows as they come."""
    X, y = rows(q, **more)
    order = np.argsort(X[:, 0])
    return X[order], y[order]


def holes(y: ndarray) -> ndarray:
    """Some targets missing, but not all of a row."""
    missing = np.random.default_rng(5).random(y.shape) < 0.3
    missing[missing.all(1), 0] = False
    return np.where(missing, np.nan, y)


def places(m: int = 24) -> ndarray:
    """Points inside and far outside the rows."""
    X, _ = rows(seed=7, m=m)
    return X.mean(0) + (X - X.mean(0)) * np.random.default_rng(3).choice([1, 4], (m, 1))


def regressor(**parameters: Any) -> Any:
    """A regressor, also where `target_transform` has become `likelihood`."""
    kind = public("BLLRegressor")
    if parameters.get("target_transform") == "log" and "likelihood" in kind().get_params():
        parameters = parameters | {"likelihood": "lognormal"}
        del parameters["target_transform"]
    return kind(**{"max_epochs": 5, "random_state": 0, **parameters})


small = partial(regressor, hidden=(5,), preset="fast", max_epochs=20)
single = partial(regressor, hidden=(8,), preset="evidence", hidden_prior=0.3, max_epochs=60)


def slopes() -> list[Any]:
    return [public("observe").Derivative(0).at([[0.0, 0.0], [1.0, 10.0]]).observed([0.9, 0.5], noise_std=0.1)]


def from_source() -> Any:
    (X, y), held_out = rows(m=300), rows(seed=1)
    source = public("ArraySource", "sources", "data.sources", "data")(X, y)
    return regressor(hidden=(6,), batch_size=64).fit_source(source, held_out)


def network(q: int = 1) -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.Tanh(), torch.nn.Linear(6, q)).double()


def attached() -> Any:
    import torch

    (X, y), (X_held, y_held) = (map(torch.as_tensor, rows(seed=seed)) for seed in (0, 1))
    return public("attach")(network(), [(X[:40], y[:40]), (X[40:], y[40:])], calibration=[(X_held, y_held)])


def revised(model: Any, y: Callable[[ndarray], ndarray] = lambda y: y, q: int = 0) -> Any:
    """Update a model with new rows, and remove some of the old ones."""
    (X, old), (X_new, new) = ordered(q), rows(q, seed=2, m=15)
    model.fit(X, y(old)).update(X_new, y(new))
    return model.remove(X[:5], y(old)[:5])


def reloaded() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model = small(noise="full").fit(*rows(2)).tune_alpha(*rows(2, seed=1)).conformalize(*rows(2, seed=4))
        model.save(Path(folder) / "model.lastlayer")
        return public("load")(Path(folder) / "model.lastlayer")


def streamed() -> Any:
    memory, (X, y) = public("online").ExponentialForgetting(memory=100), rows(seed=2, m=40)
    online = public("online").OnlineModel(small().fit(*rows()), memory)
    for i in range(0, 40, 2):
        online.predict(X[i : i + 2])
        online.update(X[i : i + 2], y[i : i + 2])
    return online


def dynamics() -> Any:
    found, rng = public("dynamics"), np.random.default_rng(0)
    u, y = rng.uniform(-1, 1, (6, 12)), np.zeros((6, 13))
    for k in range(12):
        y[:, k + 1] = 0.8 * np.sin(y[:, k]) + 0.2 * u[:, k] + 0.01 * rng.normal(size=6)
    return found.DynamicsModel(found.Lags(), small()).fit([found.Episode.of(*one) for one in zip(y, u, strict=True)])


def mini_batches() -> Any:
    body = network(q=5)
    return regressor(backbone=body, batch_size=32, max_epochs=8).fit(*rows(m=120))


MODELS: dict[str, Callable[[], Any]] = {
    "default": lambda: regressor().fit(*rows()),
    "outputs": lambda: small().fit(*rows(2)),
    "missing": lambda: small().fit(ordered(2)[0], holes(ordered(2)[1])),
    "known noise": lambda: small().fit(*ordered(), noise_std=np.linspace(0.05, 0.4, 60)),
    "functionals": lambda: single().fit(*rows(), observations=slopes()),
    "functionals mixture": lambda: small(max_epochs=5).fit(*ordered(m=24), noise_std=0.2, observations=slopes()),
    "full noise": lambda: small(noise="full").fit(*rows(2)),
    "noise by input": lambda: small(noise="input").fit(*rows(2)),
    "weights": lambda: small().fit(*rows(), sample_weight=np.arange(60) % 4),
    "groups": lambda: small().fit(*ordered(), groups=np.arange(60) // 6),
    "source": from_source,
    "attached": attached,
    "log": lambda: small(target_transform="log").fit(rows()[0], np.exp(rows()[1])),
    "evidence": lambda: single().fit(*rows()),
    "fast": lambda: regressor(preset="fast").fit(*rows()),
    "alpha on folds": lambda: single(calibration="alpha").fit(*rows()),
    "alpha on validation": lambda: single().fit(*rows(), validation_data=rows(seed=1)),
    "validation": lambda: small().fit(*rows(), validation_data=rows(seed=1)),
    "backbone": mini_batches,
    "fourier": lambda: regressor(encoding="fourier").fit(*rows()),
    "updated": lambda: revised(small()),
    "missing updated": lambda: revised(small(), holes, q=2),
    "reloaded": reloaded,
    "online": streamed,
    "dynamics": dynamics,
}


def of_prediction(p: Any, y: ndarray) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name in ("mean", "std", "epistemic_var", "noise_var", "affine_cost", "beyond_reach"):
        yield name, partial(getattr, p, name)
    for name in ("weights", "component_mean", "component_epistemic_var", "component_noise_var"):
        yield name, partial(getattr, p, name)
    for name in ("log_prob", "cdf", "standardized_residual"):
        yield name, partial(getattr(p, name), y)
    yield "cov", p.cov
    yield "quantile", partial(p.quantile, [0.01, 0.3, 0.5, 0.95])
    for method in ("quantile", "conformal"):
        yield f"interval {method}", partial(p.interval, 0.9, method=method)
    yield "sample", partial(p.sample, 3, random_state=0)
    yield "crps", lambda: public("metrics").crps(p, y)


def of_rollout(model: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    for by in ("SampledWeights", "Unscented", "Linearized"):
        found = model.rollout([[0.1], [3.0]], np.ones((2, 6, 1)), by=getattr(public("dynamics"), by)())
        yield f"rollout {by} mean", partial(getattr, found, "mean")
        yield f"rollout {by} cov", partial(getattr, found, "cov")


def asked(model: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Everything that a fitted model is asked, by name."""
    import torch

    if hasattr(model, "rollout"):
        yield from of_rollout(model)
        model = model.regressor_
        X, y = np.linspace(-2, 2, 16).reshape(8, 2), np.zeros((8, 1))
    else:
        X, y = places(), None
    p = model.predictive(X)
    y = np.resize(rows(seed=9)[1], p.shape) if y is None else y
    yield from of_prediction(p, y)
    yield "function std", lambda: model.predictive(X, noise=False).std
    yield "predict", lambda: model.predict(X)
    yield "predict std", lambda: model.predict(X, return_std=True)[1]
    if not hasattr(model, "joint"):  # a stream: the rest is asked of the model it has become
        model = model.model()
    yield "predict cov", lambda: model.predict(X, return_cov=True)[1]
    yield "joint mean", lambda: model.joint(X).mean
    yield "joint cov", lambda: model.joint(X).cov()
    yield "joint sample", lambda: model.joint(X).sample(2, random_state=0)
    yield "sample_y", lambda: model.sample_y(X, 2, random_state=0)
    yield "extrapolation cost", lambda: model.extrapolation(X).affine_cost
    yield "extrapolation quantile", lambda: model.extrapolation(X).quantile
    derivative = lambda: model.predictive_of(public("observe").Derivative(0), X)
    yield "derivative mean", lambda: derivative().mean
    yield "derivative cov", lambda: derivative().cov()
    for name in ("mean", "var", "epistemic_var", "noise_var", "affine_cost"):
        yield f"module {name}", lambda name=name: model.module()(torch.as_tensor(X))[name].detach()
    for name in ("alpha_", "alpha_star_", "noise_std_", "nlml_"):
        yield name, partial(getattr, model, name)
    yield "history_", lambda: [v for k, v in sorted(model.history_.items()) if isinstance(v, list)]
    yield "calibration_ lpd", lambda: [model.calibration_.lpd, model.calibration_.lpd_before]
    yield "held_out_ rows", lambda: model.held_out_.rows
    held_out = lambda: model.held_out_.predictive(places(len(model.held_out_.rows)))
    yield "held_out_ mean", lambda: held_out().mean
    yield "held_out_ std", lambda: held_out().std


def numbers(model: Any) -> Numbers:
    """All numbers of a model; the name of the error where it has none."""
    found: Numbers = {}
    for name, ask in asked(model):
        try:
            value = ask()
            parts = value if isinstance(value, (list, tuple)) else [value]
            found[name] = np.concatenate([np.ravel(np.asarray(part, float)) for part in parts])
        except Exception as error:  # refusals are part of what is compared
            found[name] = np.array(type(error).__name__)
    return found


def write(folder: Path, names: list[str]) -> None:
    """Fit models of the version on the path, and write their numbers, one file a model."""
    warnings.simplefilter("ignore")  # a few epochs are not enough, and say so
    for name in names:
        try:
            found = numbers(MODELS[name]())
        except Exception:
            traceback.print_exc()
            found = {}
        part = folder / f"{name}.{os.getpid()}.npz"  # several runs may share the folder
        np.savez(part, **found)
        part.replace(folder / f"{name}.npz")


def deviation(old: ndarray, new: ndarray | None) -> float:
    """Largest relative deviation; inf where shape or kind differ."""
    if new is None or old.shape != new.shape or old.dtype.kind != new.dtype.kind:
        return np.inf
    if old.dtype.kind == "U" or np.array_equal(old, new, equal_nan=True):
        return 0.0 if np.array_equal(old, new, equal_nan=old.dtype.kind != "U") else np.inf
    if not np.array_equal(np.isfinite(old), np.isfinite(new)):
        return np.inf
    known = np.isfinite(old) & (old != new)
    scale = np.abs(old[known]) if (old > 0).all() else np.abs(old[np.isfinite(old)]).max()
    return float((np.abs(new[known] - old[known]) / scale).max())


def reason(model: str, number: str) -> str | None:
    return next((why for (m, n), why in EXCEPTIONS.items() if fnmatch(model, m) and fnmatch(number, n)), None)


def compared(name: str, old: Numbers, new: Numbers) -> bool:
    """Print the largest deviation of a model, and all that are above the limit; whether each has its reason."""
    if not old or not new:
        print(f"{name:<24}{'':>9}  not fitted by the {'old' if not old else 'new'} version", flush=True)
        return False
    found = {number: deviation(value, new.get(number)) for number, value in old.items()}
    worst = max(found, key=lambda number: found[number])
    print(f"{name:<24}{found[worst]:9.1e}  {worst if found[worst] else ''}".rstrip(), flush=True)
    above = {number: size for number, size in found.items() if size > ROUNDING.get(name, LIMIT)}
    for number, size in above.items():
        print(f"    {number:<22}{size:9.1e}  {reason(name, number) or 'ABOVE THE LIMIT'}", flush=True)
    return all(reason(name, number) for number in above)


def read(tree: Path, folder: Path, names: list[str]) -> dict[str, Numbers]:
    """Numbers of the models of a source tree; those already in the folder are not asked for again."""
    missing = [name for name in names if not (folder / f"{name}.npz").exists()]
    folder.mkdir(exist_ok=True)
    if missing:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        command = [sys.executable, "-m", "benchmarks.equal", "--write", str(folder), "--models", ",".join(missing)]
        environment = os.environ | threads | {"PYTHONPATH": str(tree / "src")}
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return {name: dict(np.load(folder / f"{name}.npz")) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD")
    parser.add_argument("--models", default=",".join(MODELS), help="names with commas between them")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.models.split(",")
    if options.write:
        write(options.write, names)
        return 0
    commit = subprocess.check_output(["git", "rev-parse", options.base], cwd=ROOT, text=True).strip()
    text = Path(__file__).read_bytes().split(b"def deviation")[0]
    before, exceptions, after = text.partition(b"str] = {")  # these do not change what is asked
    asks = hashlib.sha256(before + exceptions + b'}\n"""' + after.partition(b'}\n"""')[2]).hexdigest()[:8]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = io.BytesIO(subprocess.check_output(["git", "archive", commit, "src"], cwd=ROOT))
        with tarfile.open(fileobj=archive) as files:
            files.extractall(folder, filter="data")
        old = read(folder, folder.parent / f"lastlayer-equal-{commit[:12]}-{asks}", names)
        new = read(ROOT, folder / "new", names)
    equal = [compared(name, old[name], new[name]) for name in names]
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
