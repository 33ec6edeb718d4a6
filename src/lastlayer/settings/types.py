"""Types shared by several modules."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

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
NOISE_MODELS: tuple[NoiseModel, ...] = ("auto", "diagonal", "full", "input")


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

FeatureKind: TypeAlias = Literal["network", "fourier", "linear"]
"""Source of a member's features: a trained network, random Fourier features, or the inputs themselves."""
FEATURE_KINDS: tuple[FeatureKind, ...] = ("network", "fourier", "linear")

Encoding: TypeAlias = Literal["raw", "piecewise"]
"""Inputs of the features: raw, or their piecewise-linear encoding."""


@dataclass(frozen=True)
class Family:
    """Members of a mixture with the same kind of features and prior; each family has its own calibration curve."""

    kind: FeatureKind = "network"
    prior_precision: float = 0.0
    """Precision of the prior on hidden weights."""
    encoding: Encoding = "raw"
    activation: Literal["silu"] | None = None
    """Activation of its networks; None: that of the settings."""

    def __str__(self) -> str:
        kind = f"network {self.prior_precision!r}" if self.kind == "network" else self.kind
        kind = kind if self.activation is None else f"{self.activation} {kind}"
        return kind if self.encoding == "raw" else f"{self.encoding} {kind}"

    @classmethod
    def parse(cls, text: str) -> "Family":
        """Inverse of `str`; ValueError if the text is not a family."""
        encoding: Encoding = "piecewise" if text.startswith("piecewise ") else "raw"
        rest = text.removeprefix("piecewise ")
        activation: Literal["silu"] | None = "silu" if rest.startswith("silu ") else None
        kind, _, number = rest.removeprefix("silu ").partition(" ")
        parts = float(number or 0.0), encoding, activation
        family = next((cls(known, *parts) for known in FEATURE_KINDS if known == kind), None)
        plain = family is not None and (family.kind == "network" or activation is None)
        if family is None or not plain or not 0 <= family.prior_precision < math.inf or str(family) != text:
            raise ValueError(f"{text!r} is not a family of members")
        return family


NETWORK, LINEAR, FOURIER = Family(), Family("linear"), Family("fourier")
ADDITIVE = Family("linear", encoding="piecewise")
"""A sum of one function per input."""
