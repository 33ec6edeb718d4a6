"""Resolution of an estimator's parameters: every "auto" becomes a value for the given data, one subject at a time."""

import math
import numbers
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lastlayer._internal.digests import printed
from lastlayer.errors import InputError, check_choice
from lastlayer.settings.types import (
    ADDITIVE,
    BIAS_PRIORS,
    DTYPES,
    FOURIER,
    LINEAR,
    NEEDS_EVERY_TARGET,
    NO_NOISE_PRIOR,
    STRUCTURES,
    WEAK_NOISE_PRIOR,
    EnsembleSettings,
    Family,
    LayerSettings,
    Network,
    NetworkSettings,
    Place,
    Plan,
    Settings,
    Shape,
    TrainingOptions,
    TrainingSettings,
)

N_FOLDS = 5
FOLDS_OF_FEW = {100: 20, 250: 10}
"""Folds of a mixture below each number of rows: the fewer rows, the more of them each network must see.

Large tables have `N_MEMBERS` folds.
"""
N_MEMBERS = 10
LARGE_TABLE = 5_000
"""Above this many rows, one network per fold is enough, and mini-batches cost less than full batches."""
FULL_STEPS, BATCH_STEPS, PASSES = 250, (400, 800), 10
"""Full-batch steps; limits of the number of mini-batch steps; smallest number of passes over mini-batches.

Within the limits, training on mini-batches makes twice as many passes.
"""
SLOW_STEPS, SOURCE_PASSES = 500, 60
"""Full-batch steps with early stopping or a backbone; passes over a source, or of a backbone over mini-batches."""
FEW_ROWS = 20
"""Below this many rows, no network is trained, and each row is held out alone."""
ROWS_PER_UNIT, LEAST_UNITS, MOST_UNITS = 6, 5, 50
"""Width of the hidden layers: rows per unit, and limits of the number of units."""
FREQUENCIES, FEW_FREQUENCIES = 256, 200
"""Random frequencies of a Gaussian process; half of them below so many rows and for large tables."""
LEAST_ROWS = 5
"""Below this many rows, none can be spared for calibration."""
MANY_COLUMNS = 100
"""Above this many columns, inputs are encoded only on request."""
STOPPED_ROWS = 100
"""Below this many rows, none can be spared for early stopping."""
PRIOR_PRECISIONS = (0.03, 0.3)
STRONG_NETWORK = Network(PRIOR_PRECISIONS[-1])
"""The network of a model with one member; in a mixture it uses SiLU where there are many rows: smooth functions gain,
and others lose nothing."""
FAST_PRECISIONS, FAST_SHARE = (0.3,), 0.3
"""Prior precisions of preset="fast", and its fraction of the steps."""
FAST_BLOCKS, LARGE_TABLE_BLOCKS = 3, 2
"""Number of blocks held out with preset="fast" and for large tables, whose blocks hold many rows each."""
TABLE_BATCH, SOURCE_BATCH = 1_024, 4_096
"""Rows per mini-batch of a single network, for a table in memory and for a source."""
STACK_TABLE, STACK_BATCH = 1_000, 512
"""From so many rows on, networks of a mixture train on mini-batches of so many; `TABLE_BATCH` above `LARGE_TABLE`."""


WORDS: dict[str, tuple[Collection[str], tuple[type, ...]]] = {
    "noise": (STRUCTURES, ()),
    "bias_prior": (BIAS_PRIORS, ()),
    "dtype": (DTYPES, ()),
    "preset": (("calibrated", "fast", "evidence"), ()),
    "objective": (("profiled", "mse"), ()),
    "calibration": (("auto", "alpha"), (object,)),
    "encoding": (("auto", "raw", "piecewise", "fourier"), ()),
    "hidden": (("auto",), (object,)),
    "input_skip": (("auto",), (bool,)),
    "early_stopping": (("auto",), (bool,)),
}
"""Words that a parameter may be, and types other than words that it may have."""
ROWS = "a whole number of rows, 2 or more"
NUMBERS: dict[str, tuple[str, float, bool, tuple[str | None, ...]]] = {
    "n_members": ("a whole number, 1 or more", 1, True, ("auto",)),
    "hidden_prior": ("a number, 0 or more", 0, False, ("auto",)),
    "max_epochs": ("a whole number, 0 or more", 0, True, ("auto",)),
    "batch_size": (ROWS, 2, True, ("auto", None)),
    "chunk_size": (ROWS, 2, True, (None,)),
    "learning_rate": ("a number, positive and finite", math.ulp(0.0), False, ("auto",)),
}
"""What a parameter must be, its smallest value, whether it is whole, and what it may be in place of a number."""


@dataclass(frozen=True)
class Asked:
    """Parameters of a `BLLRegressor`, and what they mean for the data it is fitted to."""

    p: Mapping[str, Any]
    """All parameters, with the options of training."""
    data: Shape
    n_rows: float | int
    """Number of rows; those of a source are taken to be many."""
    n_groups: float | int
    """Number of clearly different rows."""
    plan: Plan
    is_table: bool
    """Whether the inputs are columns of numbers, as far as known."""
    mixture: bool
    """Whether there are built-in networks, calibrated by curves: more than one kind of them may be worth it."""


def resolve(parameters: Mapping[str, Any], data: Shape, *, seed: int) -> Settings:
    """Check the parameters of a `BLLRegressor` against each other and the data, and resolve every "auto"."""
    p, n_rows = check(parameters), math.inf if data.shape is None else data.shape[0]
    if data.shape is None:
        _check_source(p, validation=data.validation)
    n_groups, own_network = n_rows if data.n_groups is None else data.n_groups, p["backbone"] is not None
    spare = p["preset"] != "evidence" and data.shape is not None
    spare = spare and n_groups >= (FEW_ROWS if own_network else LEAST_ROWS)
    plan = _plan(p, data, spare=spare)
    is_table = not data.ids and len(data.shape or (0, 0)) == 2
    asked = Asked(p, data, n_rows, n_groups, plan, is_table, spare and plan.what == "curve" and not own_network)
    device = str(p["device"]) if p["device"] != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    place, training = Place(device, p["dtype"]), _training(asked)
    settings = Settings(_network(asked), _ensemble(asked), training, _layer(asked), plan, place, seed)
    _check_together(settings, asked)
    return settings


def options_of(training: Any) -> TrainingOptions:
    """Options of training that were given, or the defaults."""
    if training is not None and not isinstance(training, TrainingOptions):
        raise InputError(f"training={training!r} must be None or a lastlayer.TrainingOptions")
    return training or TrainingOptions()


def check(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Check every parameter, and combinations that no data allow; return them with the options of training."""
    p = {**parameters, **vars(options_of(parameters["training"]))}
    for name, (words, kinds) in WORDS.items():
        if not (p[name] in words if isinstance(p[name], str) else isinstance(p[name], kinds)):
            check_choice(name, p[name], words)
    for name, (wanted, least, whole, free) in NUMBERS.items():
        value = p[name]
        number = not isinstance(value, bool) and isinstance(value, numbers.Real) and least <= float(value) < math.inf
        left_to_us = any(value is word or (isinstance(value, str) and value == word) for word in free)
        if not left_to_us and not (number and not (whole and float(value) % 1)):
            raise InputError(f"{name}={value!r} must be {' or '.join(map(repr, free))} or {wanted}")
    if not 0 < p["validation_fraction"] < 1:
        raise InputError(f"validation_fraction={p['validation_fraction']} must lie strictly between 0 and 1")
    if p["n_members"] not in ("auto", 1) and isinstance(p["backbone"], torch.nn.Module):
        raise InputError(
            f"n_members={p['n_members']} needs networks with different initial weights: give backbone a callable "
            "that returns a new module, such as backbone=lambda: MyNetwork(), in place of a module"
        )
    if p["encoding"] in ("piecewise", "fourier") and (p["backbone"] is not None or p["input_skip"] is False):
        other = "backbone=..." if p["backbone"] is not None else "input_skip=False"
        raise InputError(
            f'encoding="{p["encoding"]}" cannot be combined with {other}: its features are the library\'s own, and '
            "bounded outside the data, where the inputs passed on let the variance grow"
        )
    profiled, by_rows = p["objective"] == "profiled", isinstance(p["batch_size"], numbers.Integral)
    if by_rows and not (profiled and p["chunk_size"] is None):
        raise InputError(
            f'batch_size={p["batch_size"]} needs objective="profiled" and no chunk_size, but they are '
            f"{p['objective']!r} and {p['chunk_size']!r}"
        )
    if p["chunk_size"] is not None and not profiled:
        raise InputError(
            f'chunk_size needs objective="profiled", whose gradient splits into rows, not "{p["objective"]}"'
        )
    return p


def _check_source(p: Mapping[str, Any], *, validation: bool) -> None:
    """Check the parameters for a source of batches: one network, trained in mini-batches, without held-out rows."""
    whole = "needs rows held out of training, and a source of batches is passed over as a whole"
    for name, allowed, advice in (
        ("n_members", ("auto", 1), "cannot be combined with a source of batches: leave it at 'auto'"),
        ("objective", ("profiled",), "cannot be combined with a source of batches"),
        ("chunk_size", (None,), "cannot be combined with a source of batches: give batch_size"),
        ("early_stopping", ("auto", False), f"{whole}: choose max_epochs"),
        ("encoding", ("auto", "raw"), "needs a table, not a source of batches"),
        ("likelihood", ("auto", "gaussian"), "needs arrays: pass some to fit, or transform the targets of the source"),
    ):
        if p[name] not in allowed:
            raise InputError(f"{name}={p[name]!r} {advice}")
    if p["batch_size"] is None:
        raise InputError(
            "batch_size=None means all rows in every step, which a source of batches cannot give: leave it at 'auto' "
            "or give a number of rows"
        )
    calibration = p["calibration"]
    if not (calibration is None or calibration == "auto" or (validation and calibration == "alpha")):
        raise InputError(
            f"calibration={calibration!r} {whole}: give validation_data, with calibration 'auto' for a curve or "
            "'alpha' for Algorithm 1"
        )


def _plan(p: Mapping[str, Any], data: Shape, *, spare: bool) -> Plan:
    """Which rows calibrate, and what; `spare`: whether training rows can be held out."""
    given, own_network = p["calibration"], p["backbone"] is not None
    if given is not None and not isinstance(given, str):
        if data.validation:
            raise InputError(
                f"calibration={given!r} and validation_data both select the rows for calibration: give one of them"
            )
        return Plan("given", "curve")
    if data.validation:
        return Plan("validation", "curve" if given == "auto" and p["preset"] != "evidence" else "alpha")
    if given == "alpha":
        return Plan("folds", "alpha")
    if given is None or not spare:
        return Plan()
    return Plan("holdout" if own_network and p["n_members"] in ("auto", 1) else "folds", "curve")


def _network(asked: Asked) -> NetworkSettings:
    p, hidden = asked.p, asked.p["hidden"]
    if hidden == "auto":  # the more distinct rows, the wider
        n = asked.n_groups + asked.data.n_beside
        hidden = (int(min(MOST_UNITS, max(LEAST_UNITS, n / ROWS_PER_UNIT))),) * 2
    return NetworkSettings(
        hidden=tuple(int(width) for width in hidden),
        activation="tanh" if p["activation"] == "auto" else p["activation"],
        input_skip=p["backbone"] is None if p["input_skip"] == "auto" else bool(p["input_skip"]),
        backbone=None if p["backbone"] is None else _name(p["backbone"]),
        ids=asked.data.ids,
        n_frequencies=FREQUENCIES if FEW_FREQUENCIES <= asked.n_rows <= LARGE_TABLE else FREQUENCIES // 2,
    )


def _ensemble(asked: Asked) -> EnsembleSettings:
    n, k, fast = asked.n_groups, asked.p["n_members"], asked.p["preset"] == "fast"
    *_, (many, most) = FOLDS_OF_FEW.items()
    if k == "auto" and not asked.mixture:
        k = 1
    elif k == "auto":  # one network per fold; very few rows are held out one by one
        k = next((k for rows, k in FOLDS_OF_FEW.items() if n < rows and not fast), N_FOLDS)
        k = k if asked.n_rows < many else min(k, most)  # copies cost as much as other rows
        k = int(n) if n < FEW_ROWS else N_MEMBERS if n > LARGE_TABLE and not fast else k
        k = k if asked.data.n_together is None else min(k, asked.data.n_together)
    n_blocks = LARGE_TABLE_BLOCKS if asked.n_rows > LARGE_TABLE else FAST_BLOCKS if fast else N_FOLDS
    return EnsembleSettings(_families(asked), int(k), n_blocks)


def _families(asked: Asked) -> tuple[Family, ...]:
    """A mixture of families where curves weigh them, unless one network or one prior was asked for."""
    p, encoding = asked.p, asked.p["encoding"]
    if encoding == "fourier":
        return (FOURIER,)
    if not asked.mixture or p["n_members"] == 1 or p["hidden_prior"] != "auto":
        precision = STRONG_NETWORK.prior_precision if asked.mixture else 0.0
        precision = precision if p["hidden_prior"] == "auto" else float(p["hidden_prior"])
        return (Network(precision, "piecewise" if encoding == "piecewise" else "raw"),)
    n, n_columns = asked.n_groups + asked.data.n_beside, (asked.data.shape or (0, 0))[1]
    few, skips = n < FEW_ROWS, p["input_skip"] is not False
    if encoding == "auto" and (n_columns > MANY_COLUMNS or not skips):
        encoding = "raw"
    raw, encoded = encoding != "piecewise" or few, encoding != "raw" and not few
    networks = () if few else tuple(map(Network, FAST_PRECISIONS if p["preset"] == "fast" else PRIOR_PRECISIONS))
    families: tuple[Family, ...] = networks if raw else ()
    if p["activation"] == "auto" and asked.n_groups > LARGE_TABLE:
        families = tuple(replace(f, activation="silu") if f == STRONG_NETWORK else f for f in families)
    families += tuple(replace(network, encoding="piecewise") for network in networks) if encoded else ()
    families += ((LINEAR,) if raw and (skips or few) else ()) + ((ADDITIVE,) if encoded else ())
    return (*families, FOURIER)


def _training(asked: Asked) -> TrainingSettings:
    p, n_rows, own_network = asked.p, asked.n_rows, asked.p["backbone"] is not None
    source, complete, early = asked.data.shape is None, asked.data.complete, p["early_stopping"]
    if early == "auto":
        early = (p["preset"] == "evidence" or own_network) and not source and n_rows >= STOPPED_ROWS
    plain = p["objective"] == "profiled" and not own_network
    brisk = plain and not source and not early  # early stopping needs small steps
    batch_size, epochs, share = p["batch_size"], p["max_epochs"], FAST_SHARE if p["preset"] == "fast" else 1.0
    stack, plain = asked.mixture and brisk, plain and p["chunk_size"] is None
    if batch_size == "auto" and stack and not asked.data.n_beside:
        batch_size = STACK_BATCH if n_rows >= STACK_TABLE else None
        batch_size = TABLE_BATCH if n_rows > LARGE_TABLE else batch_size
    elif batch_size == "auto":
        large = plain and (n_rows > LARGE_TABLE if complete else n_rows > TABLE_BATCH and not early)
        batch_size = SOURCE_BATCH if source else TABLE_BATCH if large else None
    if epochs == "auto" and batch_size is None:
        epochs = round(share * (FULL_STEPS if brisk else SLOW_STEPS))
    elif epochs == "auto":
        one, (least, most) = n_rows / int(batch_size), BATCH_STEPS  # steps of one pass
        least = FULL_STEPS if stack else least
        steps = min(max(2 * PASSES * one, least), most) if complete or stack else FULL_STEPS
        passes = max(round(share * PASSES) if complete and not stack else 1, math.ceil(share * steps / one))
        epochs = SOURCE_PASSES if source or own_network else passes
    rate = (4e-2 if brisk else 2e-2) if p["learning_rate"] == "auto" else p["learning_rate"]
    return TrainingSettings(
        objective=p["objective"],
        learning_rate=float(rate),
        max_epochs=int(epochs),
        batch_size=None if batch_size is None else int(batch_size),
        chunk_size=p["chunk_size"],
        early_stopping=bool(early),
        validation_fraction=float(p["validation_fraction"]),
        patience=int(p["patience"]),
    )


def _layer(asked: Asked) -> LayerSettings:
    p, can_vary = asked.p, asked.plan.what == "curve" and asked.data.shape is not None and asked.is_table
    return LayerSettings(
        noise="diagonal" if p["noise"] == "auto" and not can_vary else p["noise"],
        bias_prior=p["bias_prior"],
        noise_prior=WEAK_NOISE_PRIOR if asked.mixture else NO_NOISE_PRIOR,
        likelihood="gaussian" if p["likelihood"] == "auto" else p["likelihood"],  # where targets were not looked at
        shape=p.get("shape", False),
    )


def _check_together(settings: Settings, asked: Asked) -> None:
    """Raise an error for settings that are incompatible with the data or with each other."""
    p, data, training, checkpoint = asked.p, asked.data, settings.training, asked.p["checkpoint"]
    if settings.network.input_skip and not asked.is_table:
        given = "integers" if data.ids else f"shape {data.shape}"
        raise InputError(f"input_skip=True needs a table, but X has {given}: leave it at 'auto' or False")
    if training.batch_size is None and checkpoint is not None:
        raise InputError("checkpoint stores the state of mini-batch training: give a batch_size with it")
    if not data.complete and (training.chunk_size is not None or checkpoint is not None):
        raise InputError(
            f"chunk_size={training.chunk_size} and checkpoint={checkpoint} need targets that are all known and "
            "equally noisy, and no observations: use None for both, and batch_size for many rows"
        )
    if not data.complete and training.objective != "profiled":
        raise InputError(
            f'objective="{training.objective}" needs targets that are all known and equally noisy, and no '
            'observations: use objective="profiled"'
        )
    if not data.learned and settings.layer.noise == "full":
        raise InputError(
            'noise="full" cannot be combined with noise_std or observations, whose noise is independent between the '
            'outputs: use noise="diagonal"'
        )
    if not data.complete and settings.layer.noise == "full":
        raise InputError(NEEDS_EVERY_TARGET)
    if settings.layer.noise == "input" and not (settings.plan.what == "curve" and asked.is_table):
        rows = "a source without validation_data" if data.shape is None else f"X of shape {data.shape}"
        raise InputError(
            'noise="input" is fitted to held-out rows of a table: it cannot be combined with '
            f"calibration={p['calibration']!r}, preset={p['preset']!r} and {rows}"
        )


def _name(backbone: Any) -> str:
    if isinstance(backbone, torch.nn.Module):
        return printed(backbone)
    return getattr(backbone, "__qualname__", None) or type(backbone).__qualname__
