"""Fits to hostile tables: whatever the numbers, every answer is finite, or an error of the library says what to do."""

import contextlib
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import NotFinite, reloaded
from torch import nn

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.errors import LastLayerError
from lastlayer.online import DriftMonitor, ExponentialForgetting, KeepAll, OnlineModel, SlidingWindow

Change = Callable[[np.ndarray, np.random.Generator], Any]


def cell(value: float) -> Change:
    """One entry, somewhere."""

    def change(a: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        a = a.astype(float)
        a.reshape(-1)[rng.integers(a.size)] = value
        return a

    return change


def column(value: Callable[[np.ndarray, np.random.Generator], Any]) -> Change:
    """One column, as a function of what it was."""

    def change(a: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        a = a.astype(float)
        own = a if a.ndim == 1 else a[:, rng.integers(a.shape[1])]
        own[...] = value(own, rng)
        return a

    return change


def text(a: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    a = a.astype(object)
    a.reshape(-1)[0] = rng.choice(np.array(["a", "1.5", None, b"2"], dtype=object))
    return a


def frozen(a: np.ndarray, _: np.random.Generator) -> np.ndarray:
    a = a.copy()
    a.flags.writeable = False
    return a


NUMBERS: dict[str, Change] = {
    **{
        f"times {size}": lambda a, _, size=float(size): a * size
        for size in ["1e155", "1e300", "1e90", "1e-90", "1e-155"]
    },
    "denormals": lambda a, _: a * 1e-310,
    "a denormal column": column(lambda c, _: c * 1e-310),
    "one column times 1e160": column(lambda c, _: c * 1e160),
    **{f"a cell of {value}": cell(float(value)) for value in ["1e15", "1e160", "1e308", "-1e308", "inf", "NaN"]},
    "a constant column": column(lambda _, rng: rng.choice([0.0, 0.1, 1e9, 1e200, 5e-324])),
    "constant": lambda a, rng: np.full(a.shape, rng.choice([0.0, 0.1, 1e9, 1e160, 5e-324])),
    "constant but for one row": lambda a, rng: np.where(np.arange(len(a)) == 0, a.T, 0.3).T,
    **{f"the {n}th digit": column(lambda c, _, n=n: 1.0 + float(f"1e-{n}") * np.sign(c)) for n in (15, 12)},
    **{f"an offset of {size}": lambda a, _, size=float(size): a + size for size in ("1e12", "1e100")},
    "each row thrice": lambda a, _: np.repeat(a, 3, 0)[: len(a)],
    "all rows equal": lambda a, _: np.repeat(a[:1], len(a), 0),
    "columns of all sizes": lambda a, rng: a * 10.0 ** rng.integers(-200, 200, a.shape[-1] if a.ndim > 1 else ()),
    "integers": lambda a, _: (10 * a).astype(int),
    "huge integers": lambda a, _: (2**60 * np.tanh(a)).astype(np.int64),
    "booleans": lambda a, _: a > 0,
    "objects": lambda a, _: a.astype(object),
    "text": text,
    "complex": lambda a, _: a + 0j,
    **{kind: lambda a, _, kind=kind: a.astype(kind) for kind in ("float16", "float32", "longdouble")},
    "bfloat16 tensor": lambda a, _: torch.tensor(a).bfloat16(),
    "float16 tensor": lambda a, _: torch.tensor(a).half(),
    "boolean tensor": lambda a, _: torch.tensor(a) > 0,
    "tensor with gradient": lambda a, _: torch.tensor(np.array(a, dtype=float), requires_grad=True),
    "backwards": lambda a, _: a[::-1],
    "columns backwards": lambda a, _: a[..., ::-1],
    "Fortran order": lambda a, _: np.asfortranarray(a),
    "read-only": frozen,
    "lists": lambda a, _: a.tolist(),
}
REFUSED = {"times 1e155", "times 1e300", "one column times 1e160", "times 1e-155", "a cell of 1e160", "a cell of inf"}
REFUSED |= {"a cell of 1e308", "a cell of -1e308", "a cell of NaN", "text", "complex", "denormals"}
"""Mostly: enough of each is soon seen."""


def one_of(value: float, others: float = 1.0) -> Callable[[int, np.random.Generator], np.ndarray]:
    return lambda m, _: np.where(np.arange(m) == 0, value, others)


WEIGHTS: dict[str, Callable[[int, np.random.Generator], Any]] = {
    "none": lambda m, _: None,
    "ones": lambda m, _: np.ones(m),
    "integers": lambda m, rng: rng.integers(0, 3, m),
    "zero": lambda m, _: np.zeros(m),
    "zero but for one": lambda m, _: np.eye(m)[0],
    "zero but for two": lambda m, _: (np.arange(m) < 2).astype(float),
    "1e300": lambda m, _: np.full(m, 1e300),
    "one of 1e300": one_of(1e300),
    "one of 1e14": one_of(1e14),
    "1e-300": lambda m, _: np.full(m, 1e-300),
    "one of 1e-300": one_of(1e-300),
    "one of 1e-12": one_of(1e-12),
    "negative": one_of(-1.0),
    "NaN": one_of(np.nan),
    "bfloat16 tensor": lambda m, _: torch.ones(m).bfloat16(),
    "a column": lambda m, _: np.ones((m, 1)),
}
NOISE_STD: dict[str, Callable[[int, np.random.Generator], Any]] = {
    **{size: lambda m, _, size=float(size): size for size in ("0", "0.1", "1e-200", "1e200")},
    "of each row": lambda m, rng: rng.uniform(0, 1, m),
    "one of 1e60": one_of(1e60, 0.1),
}


class Answer(nn.Module):
    """A network that answers as it is told, beside a layer that can be trained."""

    def __init__(self, d: int, answer: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.answer = nn.Linear(d, 3, dtype=torch.float64), answer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(self.layer.to(x.dtype)(x) if x.is_floating_point() else self.layer(x))


BACKBONES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "log": torch.log,
    "exp of exp": lambda h: torch.exp(torch.exp(10 * h)),
    "reciprocal": lambda h: 1 / (h - h),
    "constant": lambda h: 0 * h + 1,
    "times 1e160": lambda h: 1e160 * h,
    "times 1e-160": lambda h: 1e-160 * h,
    "NaN in one row": lambda h: torch.where(h == h.amax(), torch.nan, h),
    "equal columns": lambda h: h[:, :1].expand(-1, 3),
    "bfloat16": lambda h: torch.tanh(h).bfloat16(),
    "one dimension": lambda h: h[:, 0],
}
CONTEXTS = {"plain": contextlib.nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@dataclass
class Case:
    """A table, a model for it, and what is done with it afterwards."""

    number: int
    words: list[str]
    X: Any
    y: Any
    weight: Any
    noise_std: Any
    options: dict[str, Any]
    context: str
    clean: np.ndarray  # inputs before they were made hostile: what is asked about
    clean_y: np.ndarray
    after: list[str]

    def __str__(self) -> str:
        return ", ".join(self.words)


def changed(a: np.ndarray, name: str, rng: np.random.Generator, words: list[str]) -> Any:
    """One or two changes, or none; those that do not go with what was done before are left out."""
    likely = np.array([0.15 if change in REFUSED else 1.0 for change in NUMBERS])
    for change in rng.choice(list(NUMBERS), rng.integers(0, 3), replace=False, p=likely / likely.sum()):
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            a = NUMBERS[change](a, rng)
            words.append(f"{name} {change}")
    return a


def generated(seed: int, number: int) -> Case:
    """The case of that number."""
    rng = np.random.default_rng([seed, number])
    pick = lambda names, p=None: str(rng.choice(list(names), p=p))
    m = int(rng.choice([1, 2, 3, 5, 8, 15, 25, 40], p=[0.02, 0.08, 0.1, 0.1, 0.15, 0.15, 0.2, 0.2]))
    d = int(rng.choice([1, 2, 3, 12, 30], p=[0.3, 0.3, 0.2, 0.1, 0.1]))
    q = int(rng.choice([0, 1, 2, 3]))
    clean = rng.standard_normal((m, d))
    clean_y = np.sin(clean[:, :1] + np.arange(max(q, 1))) + 0.1 * rng.standard_normal((m, max(q, 1)))
    clean_y = clean_y if q else clean_y[:, 0]
    words = [f"{m} x {d} -> {q}"]
    X, y = (changed(a, name, rng, words) for a, name in ((clean, "X"), (clean_y, "y")))
    if q > 1 and rng.random() < 0.3 and isinstance(y, np.ndarray) and y.dtype.kind == "f":
        y = np.where(rng.random(y.shape) < rng.choice([0.1, 0.5]), np.nan, y)
        y[:, 0] = np.nan if rng.random() < 0.1 else y[:, 0]
        words.append("y missing")
    weight, noise_std = None, None
    if rng.random() < 0.3:
        name = pick(WEIGHTS)
        weight, _ = WEIGHTS[name](m, rng), words.append(f"weight {name}")
    if rng.random() < 0.1:
        name = pick(NOISE_STD)
        noise_std, _ = NOISE_STD[name](m, rng), words.append(f"noise_std {name}")
    preset = pick(["evidence", "fast", "calibrated"], [0.6, 0.3, 0.1])
    options: dict[str, Any] = {"preset": preset, "hidden": (int(rng.integers(2, 6)),) * int(rng.integers(1, 3))}
    options["max_epochs"] = int(rng.integers(0, 6)) if preset != "calibrated" else 2
    options["activation"] = pick(["tanh", "relu", "silu"])
    options["noise"] = pick(["auto", "diagonal", "full", "input"], [0.4, 0.3, 0.25, 0.05])
    options |= {"dtype": pick(["float64", "float32"], [0.7, 0.3]), "random_state": number}
    rare = {
        "n_members": (0.2, lambda: int(rng.integers(1, 4))),
        "hidden_prior": (0.2, lambda: float(rng.choice([0.0, 0.3, 1e200]))),
        "encoding": (0.2, lambda: pick(["raw", "piecewise", "fourier"])),
        "calibration": (0.15, lambda: rng.choice(np.array([None, "alpha"], dtype=object))),
    }
    options |= {name: value() for name, (share, value) in rare.items() if rng.random() < share}
    if rng.random() < 0.15:
        options["batch_size"] = int(rng.choice([2, 7]))
    elif rng.random() < 0.25:
        objective = pick(["profiled", "mse"])
        chunk = int(rng.choice([2, 7])) if objective == "profiled" and rng.random() < 0.5 else None
        options["training"] = TrainingOptions(objective, bias_prior=pick(["flat", "shared"]), chunk_size=chunk)
    if rng.random() < 0.15:
        name = pick(BACKBONES)
        options["backbone"] = lambda: Answer(d, BACKBONES[name])
        options.pop("encoding", None)
        words.append(f"backbone {name}")
    context = pick(CONTEXTS, [0.8, 0.1, 0.1])
    steps = ["far", "update", "remove", "save", "online", "window", "fade", "hostile update", "forget", "reestimate"]
    after = list(rng.permutation(steps)[: rng.integers(1, 5)])
    words += [f"{name}={value}" for name, value in options.items() if name not in ("random_state", "backbone")]
    return Case(number, [*words, context, *after], X, y, weight, noise_std, options, context, clean, clean_y, after)


def asked(model: Any, X: Any, y: Any = None) -> None:
    """Everything that can be asked at these points is finite."""
    p = model.predictive(X)
    low, high = p.interval(0.9)
    answers = {"mean": p.mean, "std": p.std, "epistemic_var": p.epistemic_var, "noise_var": p.noise_var}
    answers |= {"affine_cost": p.affine_cost, "low": low, "high": high, "quantile": p.quantile(0.01)}
    answers["predict"], answers["std of predict"] = model.predict(X, return_std=True)
    if y is not None:
        answers["log_prob"], answers["cdf"] = p.log_prob(y), p.cdf(y)
    if isinstance(model, BLLRegressor):
        answers["sample_y"] = model.sample_y(X, 2)
        answers["joint"] = model.joint(X[:3]).cov()
        answers["quantile of the cost"] = model.extrapolation(X).quantile
    for name, values in answers.items():
        if not np.isfinite(values).all():
            raise NotFinite(name)
    if not (np.asarray(p.std) > 0).all():
        raise NotFinite("a standard deviation of zero")


def stepped(model: BLLRegressor, step: str, case: Case, X: np.ndarray, y: np.ndarray) -> None:
    """One of the things that are done with a fitted model."""
    rng = np.random.default_rng(case.number)
    some = slice(0, max(1, len(X) // 3))
    changes = {"update": model.update, "remove": model.remove, "forget": partial(model.update, forgetting=0.1)}
    if step in changes:
        changes[step](X[some], y[some])
    elif step == "reestimate":
        model.reestimate()
    elif step == "far":
        for distance in (1e3, 1e8, 1e30, 1e160, 1e300):
            with contextlib.suppress(LastLayerError):
                asked(model, X[:2] + distance * rng.choice([-1.0, 1.0], X[:2].shape))
    elif step == "hostile update":
        X, y = X.copy(), np.where(np.isnan(y), 0.0, y)
        X.reshape(-1)[0] += rng.choice([1.0, 1e8, 1e60, 1e200])
        y.reshape(-1)[-1] += rng.choice([1.0, 1e15, 1e60, 1e200])
        model.update(X[some], y[some])
        asked(model, case.clean)
        model.remove(X[some], y[some])
    elif step == "save":
        backbone = case.options.get("backbone", lambda: None)
        with tempfile.TemporaryDirectory() as folder:
            asked(reloaded(model, Path(folder), backbone=backbone()), X)
    else:
        memory = {"online": KeepAll(), "window": SlidingWindow(8), "fade": ExponentialForgetting(10)}[step]
        start = (X, y) if step == "window" else None
        online = OnlineModel(model, memory, start=start, monitor=DriftMonitor(n_outputs=model.fitted_.n_outputs))
        for i in range(12):
            x, t = X[[i % len(X)]].copy(), y[[i % len(X)]].copy()
            if i % 5 == 4:
                x.reshape(-1)[0] += rng.choice([0.0, 1e8, 1e60, 1e160])
                t.reshape(-1)[0] += rng.choice([0.0, 1e15, 1e60, 1e160])
            with contextlib.suppress(LastLayerError):
                online.update(x, t)
            asked(online, X)
        with contextlib.suppress(LastLayerError):
            online.remove(X[:1], y[:1])
        asked(online, X)


def plain(a: Any) -> np.ndarray:
    """A float64 array of what was fitted to."""
    return a.detach().double().numpy() if isinstance(a, torch.Tensor) else np.array(a, dtype=float)


class Generator:
    """Tables, settings, and what is done with the fitted model."""

    def __init__(self, folder: Path) -> None: ...

    def case(self, number: int) -> Case:
        return generated(20, number)

    def run(self, case: Case) -> None:
        model = BLLRegressor(**case.options)
        with CONTEXTS[case.context]():
            model.fit(case.X, case.y, case.weight, noise_std=case.noise_std)
            X, y = plain(case.X), plain(case.y)
            asked(model, X, None if np.isnan(y).any() else y)
            with contextlib.suppress(LastLayerError):
                asked(model, case.clean)
        for step in case.after:
            try:
                stepped(model, step, case, X, y)
            except LastLayerError:
                pass
            except Exception as error:
                error.add_note(f"in {step}")
                raise
            asked(model, X)
