"""Types that several modules share."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

BiasPrior: TypeAlias = Literal["flat", "shared"]
"""Prior on the bias row of the last layer: improper and flat (Theorem 2 needs it), or that of every other row."""

NoiseStructure: TypeAlias = Literal["diagonal", "full"]
"""Noise covariance between the outputs of one sample."""

NoiseModel: TypeAlias = Literal["auto", "diagonal", "full", "input"]
"""What a regressor offers: the same, or one noise per output that depends on the input; "auto": where that pays."""

BIAS_PRIORS: tuple[BiasPrior, ...] = ("flat", "shared")
NOISE_STRUCTURES: tuple[NoiseStructure, ...] = ("diagonal", "full")
NOISE_MODELS: tuple[NoiseModel, ...] = ("auto", "diagonal", "full", "input")


@dataclass(frozen=True)
class NoisePrior:
    """What is known of the noise before data: as much as so many rows would tell (inverse Wishart)."""

    rows: float = 0.0
    share: float = 0.0
    """Their noise variance over the variance of the targets."""


NO_NOISE_PRIOR, WEAK_NOISE_PRIOR = NoisePrior(), NoisePrior(2.0, 0.05)
"""The evidence alone; two rows' worth against a noise that vanishes where features and rows are about as many."""

FeatureKind: TypeAlias = Literal["network", "fourier", "linear"]
"""Where the features of a member come from: a trained network, random Fourier features, the inputs themselves."""
FEATURE_KINDS: tuple[FeatureKind, ...] = ("network", "fourier", "linear")

Encoding: TypeAlias = Literal["raw", "piecewise"]
"""What features are made of: the inputs, or their piecewise-linear encoding."""


@dataclass(frozen=True)
class Family:
    """Members of a mixture that have the same kind of features and, as networks, the same prior; each has its curve."""

    kind: FeatureKind = "network"
    prior_precision: float = 0.0
    """Of the hidden weights."""
    encoding: Encoding = "raw"

    def __str__(self) -> str:
        kind = f"network {self.prior_precision!r}" if self.kind == "network" else self.kind
        return kind if self.encoding == "raw" else f"{self.encoding} {kind}"

    @classmethod
    def parse(cls, text: str) -> "Family":
        """What `str` wrote; ValueError if it is something else."""
        encoding: Encoding = "piecewise" if text.startswith("piecewise ") else "raw"
        kind, _, number = text.removeprefix("piecewise ").partition(" ")
        family = next((cls(known, float(number or 0.0), encoding) for known in FEATURE_KINDS if known == kind), None)
        if family is None or not 0 <= family.prior_precision < math.inf or str(family) != text:
            raise ValueError(f"{text!r} is no family of members")
        return family


NETWORK, LINEAR, FOURIER = Family(), Family("linear"), Family("fourier")
ADDITIVE = Family("linear", encoding="piecewise")
"""A sum of one function of each input."""
