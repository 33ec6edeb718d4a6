"""Resolution of an estimator's parameters: every "auto" becomes a value for the given data, one subject at a time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lastlayer._internal.digests import printed
from lastlayer.errors import InputError
from lastlayer.settings.parameters import TrainingOptions, check, check_source, options_of
from lastlayer.settings.types import (
    ADDITIVE,
    FOURIER,
    LINEAR,
    NEEDS_EVERY_TARGET,
    NO_NOISE_PRIOR,
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
"""Rows per mini-batch, for a table in memory and for a source."""


@dataclass(frozen=True)
class Asked:
    """Parameters of a `BLLRegressor`, and what they mean for the data it is fitted to."""

    p: Mapping[str, Any]
    options: TrainingOptions
    data: Shape
    n_rows: float | int
    """Number of rows; those of a source are taken to be many."""
    n_groups: float | int
    """Number of clearly different rows."""
    source: bool
    own_network: bool
    bare: bool
    """Whether the preset is the evidence alone."""
    fast: bool
    spare: bool
    """Whether rows can be held out for calibration."""
    plan: Plan
    calibrated: bool
    """Whether there are built-in networks, calibrated by curves: more than one kind of them may be worth it."""

    @classmethod
    def of(cls, p: Mapping[str, Any], data: Shape) -> "Asked":
        """Look at the parameters and at the shape of the data once."""
        source, own, bare = data.shape is None, p["backbone"] is not None, p["preset"] == "evidence"
        n_rows = math.inf if data.shape is None else data.shape[0]
        n_groups = n_rows if data.n_groups is None else data.n_groups
        spare = not bare and not source and n_groups >= (FEW_ROWS if own else LEAST_ROWS)
        plan = _plan(p, data, spare=spare)
        return cls(
            p=p,
            options=options_of(p["training"]),
            data=data,
            n_rows=n_rows,
            n_groups=n_groups,
            source=source,
            own_network=own,
            bare=bare,
            fast=p["preset"] == "fast",
            spare=spare,
            plan=plan,
            calibrated=spare and plan.curves and not own,
        )


def resolve(parameters: Mapping[str, Any], data: Shape, *, seed: int) -> Settings:
    """Check the parameters of a `BLLRegressor` against each other and the data, and resolve every "auto"."""
    check(parameters)
    asked = Asked.of(parameters, data)
    if asked.source:
        check_source(parameters, asked.options, validation=data.validation)
    place = Place(device_name(parameters["device"]), parameters["dtype"])
    training = _training(asked)
    settings = Settings(_network(asked), _ensemble(asked), training, _layer(asked), asked.plan, place, seed)
    _check_together(settings, asked)
    return settings


def device_name(device: str) -> str:
    """Resolve "auto" to a GPU if there is one, otherwise the CPU."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else str(device)


def _plan(p: Mapping[str, Any], data: Shape, *, spare: bool) -> Plan:
    """Which rows calibrate, and what; `spare`: whether training rows can be held out."""
    given, own_network = p["calibration"], p["backbone"] is not None
    if given is not None and not isinstance(given, str):
        if data.validation:
            raise InputError(
                f"calibration={given!r} and validation_data both select the rows for calibration: give one of them"
            )
        return Plan("given")
    if data.validation:
        return Plan("validation", "curve" if given == "auto" and p["preset"] != "evidence" else "alpha")
    if given == "alpha":
        return Plan("folds", "alpha")
    if given is None or not spare:
        return Plan()
    return Plan("holdout" if own_network and p["n_members"] in ("auto", 1) else "folds")


def _network(asked: Asked) -> NetworkSettings:
    p, hidden = asked.p, asked.p["hidden"]
    if hidden == "auto":  # the more distinct rows, the wider
        n = asked.n_groups + asked.data.n_beside
        hidden = (int(min(MOST_UNITS, max(LEAST_UNITS, n / ROWS_PER_UNIT))),) * 2
    return NetworkSettings(
        hidden=tuple(int(width) for width in hidden),
        activation="tanh" if p["activation"] == "auto" else p["activation"],
        input_skip=not asked.own_network if p["input_skip"] == "auto" else bool(p["input_skip"]),
        backbone=_name(p["backbone"]) if asked.own_network else None,
        ids=asked.data.ids,
    )


def _ensemble(asked: Asked) -> EnsembleSettings:
    n_members = asked.p["n_members"]
    if n_members == "auto":
        n_members = _n_folds(asked) if asked.calibrated else 1
    n_blocks = LARGE_TABLE_BLOCKS if asked.n_rows > LARGE_TABLE else FAST_BLOCKS if asked.fast else N_FOLDS
    return EnsembleSettings(_families(asked), int(n_members), n_blocks)


def _n_folds(asked: Asked) -> int:
    """Number of folds of a mixture; very few rows are held out one by one."""
    n, together = asked.n_groups, asked.data.n_together
    *_, (many, most) = FOLDS_OF_FEW.items()
    if n < FEW_ROWS:
        k = int(n)
    elif n > LARGE_TABLE and not asked.fast:
        k = N_MEMBERS
    else:
        k = N_FOLDS if asked.fast else next((k for rows, k in FOLDS_OF_FEW.items() if n < rows), N_FOLDS)
        k = k if asked.n_rows < many else min(k, most)  # copies cost as much as other rows
    return k if together is None else min(k, together)


def _families(asked: Asked) -> tuple[Family, ...]:
    """A mixture of families where curves weigh them, unless one network or one prior was asked for."""
    p, encoding = asked.p, asked.p["encoding"]
    if not asked.calibrated or p["n_members"] == 1 or p["hidden_prior"] != "auto":
        if encoding == "fourier":
            return (FOURIER,)
        precision = STRONG_NETWORK.prior_precision if asked.calibrated else 0.0
        precision = precision if p["hidden_prior"] == "auto" else float(p["hidden_prior"])
        return (Network(precision, "piecewise" if encoding == "piecewise" else "raw"),)
    if encoding == "fourier":
        return (FOURIER,)
    n, n_columns = asked.n_groups + asked.data.n_beside, (asked.data.shape or (0, 0))[1]
    few, many, skips = n < FEW_ROWS, n > LARGE_TABLE, p["input_skip"] is not False
    if encoding == "auto" and (n_columns > MANY_COLUMNS or not skips):
        encoding = "raw"
    raw, encoded = encoding != "piecewise" or few, encoding != "raw" and not few
    networks = () if few else tuple(map(Network, FAST_PRECISIONS if asked.fast else PRIOR_PRECISIONS))
    families: tuple[Family, ...] = networks if raw else ()
    if p["activation"] == "auto" and asked.n_groups > LARGE_TABLE:
        families = tuple(replace(f, activation="silu") if f == STRONG_NETWORK else f for f in families)
    families += tuple(replace(network, encoding="piecewise") for network in networks) if encoded else ()
    families += ((LINEAR,) if raw and (skips or few) else ()) + ((ADDITIVE,) if encoded else ())
    return families if many else (*families, FOURIER)  # very many rows need no process


def _training(asked: Asked) -> TrainingSettings:
    p, options, alike = asked.p, asked.options, asked.data.complete
    early = (asked.bare or asked.own_network) and not asked.source and asked.n_rows >= STOPPED_ROWS
    early = early if options.early_stopping == "auto" else bool(options.early_stopping)
    plain = options.objective == "profiled" and not asked.own_network
    brisk = plain and not asked.source and not early  # early stopping needs small steps
    batch_size = p["batch_size"]
    if batch_size == "auto":
        large = asked.n_rows > LARGE_TABLE if alike else asked.n_rows > TABLE_BATCH and not early
        large = large and plain and options.chunk_size is None
        batch_size = SOURCE_BATCH if asked.source else TABLE_BATCH if large else None
    epochs, share = p["max_epochs"], FAST_SHARE if asked.fast else 1.0
    if epochs == "auto" and batch_size is None:
        epochs = round(share * (FULL_STEPS if brisk else SLOW_STEPS))
    elif epochs == "auto":
        one = asked.n_rows / int(batch_size)
        passes = _passes(one, share) if alike else math.ceil(share * FULL_STEPS / one)
        epochs = SOURCE_PASSES if asked.source or asked.own_network else passes
    rate = (4e-2 if brisk else 2e-2) if options.learning_rate == "auto" else options.learning_rate
    return TrainingSettings(
        objective=options.objective,
        learning_rate=float(rate),
        max_epochs=int(epochs),
        batch_size=None if batch_size is None else int(batch_size),
        chunk_size=options.chunk_size,
        early_stopping=early,
        validation_fraction=float(options.validation_fraction),
        patience=int(options.patience),
    )


def _passes(steps_of_one: float, share: float) -> int:
    """Number of passes over the rows in mini-batches."""
    least, most = BATCH_STEPS
    steps = min(max(2 * PASSES * steps_of_one, least), most)
    return max(round(share * PASSES), math.ceil(share * steps / steps_of_one))


def _layer(asked: Asked) -> LayerSettings:
    p, can_vary = asked.p, asked.plan.curves and asked.data.shape is not None and asked.data.is_table
    return LayerSettings(
        noise="diagonal" if p["noise"] == "auto" and not can_vary else p["noise"],
        bias_prior="shared" if asked.options.bias_prior == "shared" else "flat",
        noise_prior=WEAK_NOISE_PRIOR if asked.calibrated else NO_NOISE_PRIOR,
        likelihood=p["likelihood"],
    )


def _check_together(settings: Settings, asked: Asked) -> None:
    """Raise an error for settings that are incompatible with the data or with each other."""
    p, data, training, checkpoint = asked.p, asked.data, settings.training, asked.options.checkpoint
    if settings.network.input_skip and not data.is_table:
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
    if settings.layer.noise == "input" and not (settings.plan.curves and data.is_table):
        rows = "a source without validation_data" if data.shape is None else f"X of shape {data.shape}"
        raise InputError(
            'noise="input" is fitted to held-out rows of a table: it cannot be combined with '
            f"calibration={p['calibration']!r}, preset={p['preset']!r} and {rows}"
        )


def _name(backbone: Any) -> str:
    if isinstance(backbone, torch.nn.Module):
        return printed(backbone)
    return getattr(backbone, "__qualname__", None) or type(backbone).__qualname__
