"""Types: what is given, priors and noise, families of members, which rows calibrate, and the settings of a fit."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float, Int, Num
from numpy import ndarray

from lastlayer._internal import checked
from lastlayer.errors import check_choice

BiasPrior: TypeAlias = Literal["flat", "shared"]
"""Prior on the bias row of the last layer: improper and flat (required by Theorem 2), or that of all other rows."""

NoiseStructure: TypeAlias = Literal["diagonal", "full"]
"""Noise covariance between the outputs of one sample."""

NoiseModel: TypeAlias = Literal["auto", "diagonal", "full", "input"]
"""Noise models of a regressor: a `NoiseStructure`; "input": one variance per output that depends on the input;
"auto": the latter where it improves held-out scores.
"""

BIAS_PRIORS: tuple[BiasPrior, ...] = ("flat", "shared")
NEEDS_EVERY_TARGET = (
    'noise="full" correlates the outputs of a row, and some targets are missing: use noise="diagonal", or drop the '
    "rows with missing targets"
)
NOISE_STRUCTURES: tuple[NoiseStructure, ...] = ("diagonal", "full")
STRUCTURES: dict[NoiseModel, NoiseStructure] = {
    "auto": "diagonal",
    "diagonal": "diagonal",
    "full": "full",
    "input": "diagonal",
}
"""Noise structure in the evidence: noise that depends on the input is a matter of calibration."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, eq=False)
class Given:
    """Validated rows, in original units."""

    X: Num[ndarray, "m ..."]
    """Inputs: a table of floats, ids, or arrays of any shape."""
    y: Float[ndarray, "m q"]
    """Targets; NaN: missing."""
    weight: Float[ndarray, " m"] | None = None
    """Sample weights; None: 1."""
    groups: Int[ndarray, " m"] | None = None
    """Index of each row's group, from 0; None: there are no groups."""
    noise_std: Float[ndarray, "m q"] | None = None
    """Known standard deviations of the noise; None: 0."""
    observations: tuple[Any, ...] = ()
    """Measured functionals, `lastlayer.observe.Observations`."""
    y_ndim: int = 2
    """Number of dimensions of the targets as given."""
    place: Int[ndarray, " n"] | None = None
    """Index of every row of the user among these, -1 if it has no weight; None: in the same order."""
    is_table: bool = True
    """Whether the inputs are columns of numbers, which can be standardised."""


@dataclass(frozen=True)
class Shape:
    """What the settings depend on of the rows, in which copies are one row, as a row of a larger weight is."""

    shape: tuple[int, ...] | None
    """Shape of X; None: a source of batches, whose rows are not counted in advance."""
    validation: bool = False
    """Whether validation data were given."""
    n_groups: int | None = None
    """Number of clearly different rows, or of those per output on average; None: all rows differ."""
    n_together: int | None = None
    """Number of groups, given by the user, that are held out together; None: rows are held out individually."""
    complete: bool = True
    """Whether all targets are known and equally noisy, and there are no functionals."""
    learned: bool = True
    """Whether the noise of all targets is learned."""
    n_beside: int = 0
    """Number of functionals observed beside the rows."""
    ids: bool = False
    """Whether the inputs are integers, which are passed to the backbone unchanged."""


@dataclass(frozen=True)
class NoisePrior:
    """Prior on the noise, inverse Wishart, expressed as a number of rows."""

    rows: float = 0.0
    """Number of rows that the prior counts as."""
    share: float = 0.0
    """Noise variance of these rows over the variance of the targets."""


NO_NOISE_PRIOR, WEAK_NOISE_PRIOR = NoisePrior(), NoisePrior(2.0, 0.05)
"""No prior, the evidence alone; and a prior that counts as two rows, against vanishing noise where there are about as
many features as rows.
"""

Encoding: TypeAlias = Literal["raw", "piecewise"]
"""Inputs of the features: raw, or their piecewise-linear encoding."""


class Family:
    """Members with the same kind of features and prior; in a mixture each family has its own calibration curve."""

    encoding: Encoding = "raw"
    prior_precision: float = 0.0
    """Precision of the prior on hidden weights."""
    activation: Literal["silu"] | None = None
    """Activation of its networks; None: that of the settings."""
    trained: ClassVar[bool] = False
    """Whether its networks are trained."""
    once: ClassVar[bool] = False
    """Whether one member, fitted to all rows, is enough."""

    @property
    def measures(self) -> bool:
        """Whether its affine costs decide which points lie outside the data."""
        return self.once

    @staticmethod
    def parse(text: str) -> "Family":
        """Inverse of `str`; ValueError if the text is not a family."""
        encoding: Encoding = "piecewise" if text.startswith("piecewise ") else "raw"
        rest = text.removeprefix("piecewise ")
        activation: Literal["silu"] | None = "silu" if rest.startswith("silu ") else None
        kind, _, number = rest.removeprefix("silu ").partition(" ")
        precision = float(number or 0.0)
        known: tuple[Family, ...] = (Network(precision, encoding, activation), Linear(encoding), Fourier())
        family = next((family for family in known if kind in str(family).split()), None)
        if family is None or not 0 <= precision < math.inf or str(family) != text:
            raise ValueError(f"{text!r} is not a family of members")
        return family


@dataclass(frozen=True)
class Network(Family):
    """Trained networks."""

    prior_precision: float = 0.0
    encoding: Encoding = "raw"
    activation: Literal["silu"] | None = None
    trained: ClassVar[bool] = True

    def __str__(self) -> str:
        encoding = "" if self.encoding == "raw" else f"{self.encoding} "
        return f"{encoding}{'' if self.activation is None else 'silu '}network {self.prior_precision!r}"


@dataclass(frozen=True)
class Linear(Family):
    """The inputs themselves; encoded, a sum of one function per input."""

    encoding: Encoding = "raw"

    @property
    def measures(self) -> bool:
        """Whether it is the additive model."""
        return self.encoding != "raw"

    def __str__(self) -> str:
        return "linear" if self.encoding == "raw" else f"{self.encoding} linear"


@dataclass(frozen=True)
class Fourier(Family):
    """Random Fourier features: a Gaussian process."""

    once: ClassVar[bool] = True

    def __str__(self) -> str:
        return "fourier"


NETWORK: Family = Network()
LINEAR: Family = Linear()
ADDITIVE: Family = Linear("piecewise")
"""A sum of one function per input."""
FOURIER: Family = Fourier()


@dataclass(frozen=True)
class Plan:
    """Which rows calibrate the variance, and what is fitted to them."""

    rows: Literal["folds", "given", "holdout", "validation"] | None = None
    """Training rows in random and blocked folds, in the folds of a splitter, or held out once; or validation data."""
    what: Literal["curve", "alpha"] | None = None
    """A curve for each family; or alpha alone (Algorithm 1); None if no rows do."""

    def __str__(self) -> str:
        return "none" if self.rows is None else f"{self.what}, {self.rows}"


@dataclass(frozen=True)
class TrainingOptions:
    """Options of training; pass them as `BLLRegressor(training=TrainingOptions(...))`.

    Parameters
    ----------
    objective : {"profiled", "mse"}, default "profiled"
        Loss. "profiled": evidence with weights and noise in closed form at every step; "mse": mean squared error.
    bias_prior : {"flat", "shared"}, default "flat"
        Prior on the bias of the last layer: "flat" (Theorem 2), or "shared", which reproduces the evidence printed
        in the paper.
    learning_rate : float or "auto", default "auto"
        Initial step size of Adam. "auto": 0.04; 0.02 with early stopping, a backbone, a source of batches or an
        objective other than "profiled".
    early_stopping : bool or "auto", default "auto"
        Whether to hold out rows, score them under the posterior of the others, and keep the best network. "auto": with
        a backbone or preset="evidence", from 100 rows on.
    validation_fraction : float, default 0.15
        Fraction of the rows held out for early stopping, or for calibration with a backbone.
    patience : int, default 200
        Epochs without improvement before stopping.
    chunk_size : int or None, default None
        Rows in memory at a time. The gradient is still that of all rows, at the price of a second forward pass.
    checkpoint : path or None, default None
        Folder in which mini-batch training saves its state every minute. A fit that was interrupted resumes from
        it; a fit that completes deletes what it saved there.

    Examples
    --------
    >>> from lastlayer import BLLRegressor, TrainingOptions
    >>> model = BLLRegressor(training=TrainingOptions(early_stopping=True, patience=50))
    """

    objective: str = "profiled"
    bias_prior: str = "flat"
    learning_rate: float | int | str = "auto"
    early_stopping: bool | str = "auto"
    validation_fraction: float = 0.15
    patience: int = 200
    chunk_size: int | None = None
    checkpoint: str | os.PathLike[str] | None = None


@dataclass(frozen=True)
class NetworkSettings:
    """The features."""

    hidden: tuple[int, ...]
    activation: str
    input_skip: bool
    backbone: str | None
    """Description of the user's network; None: the built-in one."""
    ids: bool
    """Whether the inputs are integers, which are passed to the backbone unchanged."""
    n_frequencies: int
    """Random frequencies of a Gaussian process."""


@dataclass(frozen=True)
class EnsembleSettings:
    """The members."""

    families: tuple[Family, ...]
    n_members: int
    """Networks of each family."""
    n_blocks: int
    """Blocks held out to calibrate extrapolation; there are two fewer shells."""


@dataclass(frozen=True)
class TrainingSettings:
    """How networks are trained."""

    objective: str
    learning_rate: float
    max_epochs: int
    batch_size: int | None
    chunk_size: int | None
    early_stopping: bool
    validation_fraction: float
    patience: int


@dataclass(frozen=True)
class LayerSettings:
    """The last layers, and the distribution of the targets."""

    noise: NoiseModel
    bias_prior: BiasPrior
    noise_prior: NoisePrior
    likelihood: str
    """Name of the likelihood (`lastlayer.likelihoods`)."""
    shape: bool = False
    """Whether calibration may give the noise a shape of its own (`calibration.shape`)."""


@dataclass(frozen=True)
class Place:
    """Device and type of the networks."""

    device: str
    dtype: str
    """One of `DTYPES`; the last layer is always float64."""


@dataclass(frozen=True)
class Settings:
    """Everything that fitting reads, with every "auto" resolved; `BLLRegressor.settings_` after `fit`.

    Parameters
    ----------
    network : NetworkSettings
        The features: `hidden`, `activation`, `input_skip`, `backbone`, `ids` and `n_frequencies`.
    ensemble : EnsembleSettings
        The members: `families`, `n_members` of each, and `n_blocks` held out.
    training : TrainingSettings
        `objective`, `learning_rate`, `max_epochs`, `batch_size`, `chunk_size`, `early_stopping` and the like.
    layer : LayerSettings
        The last layers: `noise`, `bias_prior`, `noise_prior` and `likelihood`.
    plan : Plan
        Which `rows` calibrate the variance, and `what` is fitted to them.
    place : Place
        `device` and `dtype` of the networks.
    seed : int
        Seed of initialisation and splits.
    """

    network: NetworkSettings
    ensemble: EnsembleSettings
    training: TrainingSettings
    layer: LayerSettings
    plan: Plan
    place: Place
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Convert the settings to a JSON object."""
        content = asdict(self)
        content["ensemble"]["families"] = [str(family) for family in self.ensemble.families]
        return content

    def identity(self) -> dict[str, Any]:
        """All values but the device, by name: what two trainings must have in common to be the same."""
        content = self.to_json()
        values = {"seed": content.pop("seed")}
        for subject in content.values():
            values |= subject
        return {name: value for name, value in values.items() if name != "device"}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Settings":
        """Restore settings from `to_json`; raises ValueError for any other content."""
        own = checked.typed("ensemble", content.get("ensemble"), dict)
        families = checked.typed("families", own.get("families"), tuple[str, ...])
        parsed = {**own, "families": tuple(map(Family.parse, families))}
        found = checked.instance(cls, {**content, "ensemble": parsed}, "settings")
        check_choice("dtype", found.place.dtype, DTYPES)
        if any(width < 1 for width in found.network.hidden):
            raise ValueError(f"hidden={found.network.hidden} has a layer without units")
        for name, low in {"n_members": 1, "n_blocks": 0}.items():
            checked.number(name, getattr(found.ensemble, name), low=low)
        for name in ("learning_rate", "max_epochs", "patience"):
            checked.number(name, getattr(found.training, name), low=0)
        return found

    def __str__(self) -> str:
        subjects = (self.network, self.ensemble, self.training, self.layer)
        values = {field.name: getattr(subject, field.name) for subject in subjects for field in fields(subject)}
        values["families"] = ", ".join(map(str, self.ensemble.families))
        values |= {"plan": self.plan, "device": self.place.device, "dtype": self.place.dtype, "seed": self.seed}
        return "\n".join(f"{name}: {value}" for name, value in values.items())
