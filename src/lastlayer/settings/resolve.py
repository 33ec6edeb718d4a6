"""The settings of a fit: an estimator's parameters with every "auto" resolved for the given data."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_type_hints

import torch

from lastlayer._internal import checked
from lastlayer._internal.digests import printed
from lastlayer.errors import InputError, check_choice
from lastlayer.settings.given import Shape
from lastlayer.settings.parameters import DTYPES, TrainingOptions, check, check_source, options_of
from lastlayer.settings.types import (
    ADDITIVE,
    FOURIER,
    LINEAR,
    NEEDS_EVERY_TARGET,
    NETWORK,
    NO_NOISE_PRIOR,
    WEAK_NOISE_PRIOR,
    BiasPrior,
    Family,
    NoiseModel,
    NoisePrior,
    NoiseStructure,
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
STRONG_NETWORK = Family("network", PRIOR_PRECISIONS[-1])
"""Networks of a mixture that use SiLU where there are many rows: smooth functions gain, and others lose nothing."""
FAST_PRECISIONS, FAST_SHARE = (0.3,), 0.3
"""Prior precisions of preset="fast", and its fraction of the steps."""
FAST_BLOCKS, LARGE_TABLE_BLOCKS = 3, 2
"""Number of blocks held out with preset="fast" and for large tables, whose blocks hold many rows each."""
TABLE_BATCH, SOURCE_BATCH = 1_024, 4_096
"""Rows per mini-batch, for a table in memory and for a source."""

Ensemble: TypeAlias = Literal["mixture", "selected prior"]
"""Members of every family, or networks with one prior precision, given or selected on held-out rows."""
CURVE_FOLDS = ("random and blocked folds", "given folds", "holdout")
"""Calibrations that fit curves to training rows held out from some networks."""
CURVES = (*CURVE_FOLDS, "curve on validation data")


@dataclass(frozen=True)
class Settings:
    """Everything that fitting reads, with every "auto" resolved; `BLLRegressor.settings_` after `fit`."""

    hidden: tuple[int, ...]
    activation: str
    input_skip: bool
    backbone: str | None
    """Description of the user's network; None: the built-in one."""
    ensemble: Ensemble
    n_members: int
    """Networks per family in a mixture, in total otherwise."""
    n_blocks: int
    """Blocks held out to calibrate extrapolation; there are two fewer shells."""
    families: tuple[Family, ...]
    """Kinds of members of a mixture, or candidates from which the best is selected."""
    calibration: str | None
    """How the variance is calibrated; None: not at all."""
    noise: NoiseModel
    bias_prior: BiasPrior
    objective: str
    learning_rate: float
    max_epochs: int
    batch_size: int | None
    chunk_size: int | None
    early_stopping: bool
    validation_fraction: float
    patience: int
    device: str
    dtype: str
    seed: int
    ids: bool = False
    """Whether the inputs are integers, which are passed to the backbone unchanged."""
    likelihood: str = "gaussian"
    """Name of the likelihood (`lastlayer.likelihoods`)."""

    @property
    def noise_structure(self) -> NoiseStructure:
        """Noise structure in the evidence; noise that depends on the input is a matter of calibration."""
        return "full" if self.noise == "full" else "diagonal"

    @property
    def noise_prior(self) -> NoisePrior:
        """Prior of the last layers' noise; without a calibrated mixture there is none, as in the paper."""
        return WEAK_NOISE_PRIOR if self.ensemble == "mixture" else NO_NOISE_PRIOR

    @property
    def torch_device(self) -> torch.device:
        """Device as torch has it."""
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Floating-point type of the networks; the last layer is always float64."""
        return DTYPES[self.dtype]

    @property
    def stackable(self) -> bool:
        """Whether several built-in networks can be trained as one batch."""
        plain = self.objective == "profiled" and self.chunk_size is None
        return plain and not self.early_stopping and self.backbone is None and bool(self.hidden)

    def to_json(self) -> dict[str, Any]:
        """Convert the settings to a JSON object."""
        content = asdict(self)
        content["families"] = [str(family) for family in self.families]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Settings":
        """Restore settings from `to_json`; raises ValueError for any other content."""
        families = checked.typed("families", content.get("families"), tuple[str, ...])
        plain = {name: value for name, value in content.items() if name != "families"}
        hints = get_type_hints(cls)
        wanted = {field.name for field in fields(cls)} - {"families"}
        if plain.keys() != wanted:
            raise ValueError(f"settings have other names than they should: {sorted(plain.keys() ^ wanted)}")
        values = {name: checked.typed(name, value, hints[name]) for name, value in plain.items()}
        check_choice("dtype", values["dtype"], DTYPES)
        least = {"n_members": 1, "n_blocks": 0, "max_epochs": 0, "patience": 0, "learning_rate": 0, "seed": 0}
        for name, low in least.items():
            checked.number(name, values[name], low=low)
        if any(width < 1 for width in values["hidden"]):
            raise ValueError(f"hidden={values['hidden']} has a layer without units")
        return cls(**values, families=tuple(Family.parse(text) for text in families))

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in asdict(self).items())


def resolve(parameters: Mapping[str, Any], data: Shape, *, seed: int) -> Settings:
    """Check the parameters of a `BLLRegressor` against each other and the data, and resolve every "auto"."""
    p, options = parameters, options_of(parameters["training"])
    check(p)
    source, n_rows = data.shape is None, math.inf if data.shape is None else data.shape[0]
    if source:
        check_source(p, options, validation=data.validation)
    n_groups = n_rows if data.n_groups is None else data.n_groups
    own_network, fast, bare = p["backbone"] is not None, p["preset"] == "fast", p["preset"] == "evidence"
    spare = not bare and not source and n_groups >= (FEW_ROWS if own_network else LEAST_ROWS)
    calibration = _calibration(p, data, spare)
    families: tuple[Family, ...] = (NETWORK,)
    if p["hidden_prior"] != "auto":
        families = (Family("network", float(p["hidden_prior"])),)
    elif spare and not own_network:
        precisions = FAST_PRECISIONS if fast and p["n_members"] == "auto" else PRIOR_PRECISIONS
        families = tuple(Family("network", precision) for precision in precisions)
    chosen = spare and not own_network and p["hidden_prior"] == "auto"
    mixture = chosen and p["n_members"] == "auto" and calibration in CURVE_FOLDS
    if mixture:
        skips, wide = p["input_skip"] is not False, (data.shape or (0, 0))[1] > MANY_COLUMNS
        encoding = "raw" if p["encoding"] == "auto" and (wide or not skips) else p["encoding"]
        families = _mixed(families, n_groups + data.n_beside, encoding, skip=skips)
        if p["activation"] == "auto" and n_groups > LARGE_TABLE:
            families = tuple(replace(f, activation="silu") if f == STRONG_NETWORK else f for f in families)
    elif p["encoding"] == "fourier":
        families = (FOURIER,)
    elif p["encoding"] == "piecewise":
        families = tuple(replace(family, encoding="piecewise") for family in families)
    n_members = p["n_members"]
    if n_members == "auto":
        few = _n_folds(n_groups, n_rows, fast) if mixture else N_FOLDS if n_rows > LARGE_TABLE else N_MEMBERS
        few = few if data.n_together is None or not mixture else min(few, data.n_together)
        n_members = 1 if bare or own_network or source else few
    if calibration == "random and blocked folds" and own_network and n_members == 1:
        calibration = "holdout"
    noise_can_vary = calibration in CURVES and data.shape is not None and data.is_table
    skip = not own_network if p["input_skip"] == "auto" else bool(p["input_skip"])
    batch_size, rate, epochs = p["batch_size"], options.learning_rate, p["max_epochs"]
    plain = options.objective == "profiled" and not own_network
    early = (bare or own_network) and not source and n_rows >= STOPPED_ROWS
    early = early if options.early_stopping == "auto" else bool(options.early_stopping)
    if batch_size == "auto":
        large = n_rows > LARGE_TABLE if data.complete else n_rows > TABLE_BATCH and not early
        large = large and plain and options.chunk_size is None
        batch_size = SOURCE_BATCH if source else TABLE_BATCH if large else None
    brisk = plain and not source and not early  # early stopping needs small steps
    if rate == "auto":
        rate = 4e-2 if brisk else 2e-2
    if epochs == "auto":
        share = FAST_SHARE if fast else 1.0
        epochs = round(share * (FULL_STEPS if brisk else 500))
        if batch_size is not None:
            steps_of_one = n_rows / int(batch_size)
            passes = _passes(steps_of_one, share) if data.complete else math.ceil(share * FULL_STEPS / steps_of_one)
            epochs = 60 if source or own_network else passes
    settings = Settings(
        hidden=_hidden(p["hidden"], n_groups + data.n_beside),
        activation="tanh" if p["activation"] == "auto" else p["activation"],
        input_skip=skip,
        backbone=_name(p["backbone"]) if own_network else None,
        ensemble="mixture" if mixture else "selected prior",
        n_members=int(n_members),
        n_blocks=LARGE_TABLE_BLOCKS if n_rows > LARGE_TABLE else FAST_BLOCKS if fast else N_FOLDS,
        families=families,
        calibration=calibration,
        noise="diagonal" if p["noise"] == "auto" and not noise_can_vary else p["noise"],
        bias_prior="shared" if options.bias_prior == "shared" else "flat",
        objective=options.objective,
        learning_rate=float(rate),
        max_epochs=int(epochs),
        batch_size=None if batch_size is None else int(batch_size),
        chunk_size=options.chunk_size,
        early_stopping=early,
        validation_fraction=float(options.validation_fraction),
        patience=int(options.patience),
        device=device_name(p["device"]),
        dtype=p["dtype"],
        seed=seed,
        ids=data.ids,
        likelihood="gaussian" if p["likelihood"] == "auto" else p["likelihood"],
    )
    _check_together(settings, p, options, data)
    return settings


def _mixed(networks: tuple[Family, ...], n_groups: float | int, encoding: str, *, skip: bool) -> tuple[Family, ...]:
    """The families of a mixture: too few rows cannot train a network, and very many need no Gaussian process."""
    if encoding == "fourier":
        return (FOURIER,)
    few, many = n_groups < FEW_ROWS, n_groups > LARGE_TABLE
    raw, encoded = encoding != "piecewise" or few, encoding != "raw" and not few
    own = networks if raw and not few else ()
    if encoded:
        own += tuple(replace(family, encoding="piecewise") for family in networks)
    linear = ((LINEAR,) if raw and (skip or few) else ()) + ((ADDITIVE,) if encoded else ())
    return own + linear + (() if many else (FOURIER,))


def _n_folds(n_groups: float | int, n_rows: float | int, fast: bool) -> int:
    """Number of folds of a mixture; very few rows are held out one by one."""
    if n_groups < FEW_ROWS:
        return int(n_groups)
    if n_groups > LARGE_TABLE and not fast:
        return N_MEMBERS
    wanted = N_FOLDS if fast else next((k for rows, k in FOLDS_OF_FEW.items() if n_groups < rows), N_FOLDS)
    *_, (many, k) = FOLDS_OF_FEW.items()
    return wanted if n_rows < many else min(wanted, k)  # copies cost as much as other rows


def _passes(steps_of_one: float, share: float) -> int:
    """Number of passes over the rows in mini-batches."""
    least, most = BATCH_STEPS
    steps = min(max(2 * PASSES * steps_of_one, least), most)
    return max(round(share * PASSES), math.ceil(share * steps / steps_of_one))


def _hidden(given: Any, n_groups: float | int) -> tuple[int, ...]:
    """Widths of the hidden layers, which grow with the number of distinct rows."""
    if given == "auto":
        return (int(min(MOST_UNITS, max(LEAST_UNITS, n_groups / ROWS_PER_UNIT))),) * 2
    return tuple(int(width) for width in given)


def device_name(device: str) -> str:
    """Resolve "auto" to a GPU if there is one, otherwise the CPU."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else str(device)


def _calibration(p: Mapping[str, Any], data: Shape, spare: bool) -> str | None:
    given = p["calibration"]
    if given is not None and not isinstance(given, str):
        if data.validation:
            raise InputError(
                f"calibration={given!r} and validation_data both select the rows for calibration: give one of them"
            )
        return "given folds"
    if data.validation:
        curve = given == "auto" and p["preset"] != "evidence"
        return "curve on validation data" if curve else "alpha on validation data"
    if given == "alpha":
        return "alpha on blocked folds"
    return "random and blocked folds" if given == "auto" and spare else None


def _check_together(settings: Settings, p: Mapping[str, Any], options: TrainingOptions, data: Shape) -> None:
    """Raise an error for settings that are incompatible with the data or with each other."""
    if settings.input_skip and not data.is_table:
        given = "integers" if data.ids else f"shape {data.shape}"
        raise InputError(f"input_skip=True needs a table, but X has {given}: leave it at 'auto' or False")
    if settings.batch_size is None and options.checkpoint is not None:
        raise InputError("checkpoint stores the state of mini-batch training: give a batch_size with it")
    if not data.complete and (settings.chunk_size is not None or options.checkpoint is not None):
        raise InputError(
            f"chunk_size={settings.chunk_size} and checkpoint={options.checkpoint} need targets that are all known and "
            "equally noisy, and no observations: use None for both, and batch_size for many rows"
        )
    if not data.complete and settings.objective != "profiled":
        raise InputError(
            f'objective="{settings.objective}" needs targets that are all known and equally noisy, and no '
            'observations: use objective="profiled"'
        )
    if not data.learned and settings.noise == "full":
        raise InputError(
            'noise="full" cannot be combined with noise_std or observations, whose noise is independent between the '
            'outputs: use noise="diagonal"'
        )
    if not data.complete and settings.noise == "full":
        raise InputError(NEEDS_EVERY_TARGET)
    if settings.noise == "input" and not (settings.calibration in CURVES and data.is_table):
        rows = "a source without validation_data" if data.shape is None else f"X of shape {data.shape}"
        raise InputError(
            'noise="input" is fitted to held-out rows of a table: it cannot be combined with '
            f"calibration={p['calibration']!r}, preset={p['preset']!r} and {rows}"
        )


def _name(backbone: Any) -> str:
    if isinstance(backbone, torch.nn.Module):
        return printed(backbone)
    return getattr(backbone, "__qualname__", None) or type(backbone).__qualname__
