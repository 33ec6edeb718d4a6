"""Types that several modules share."""

from typing import Literal, TypeAlias

BiasPrior: TypeAlias = Literal["flat", "shared"]
"""Prior on the bias row of the last layer: improper and flat (Theorem 2 needs it), or that of every other row."""

NoiseStructure: TypeAlias = Literal["diagonal", "full"]
"""Noise covariance between the outputs of one sample."""

NoiseModel: TypeAlias = Literal["diagonal", "full", "input"]
"""What a regressor offers: the same, or one noise per output that depends on the input."""

BIAS_PRIORS: tuple[BiasPrior, ...] = ("flat", "shared")
NOISE_STRUCTURES: tuple[NoiseStructure, ...] = ("diagonal", "full")
NOISE_MODELS: tuple[NoiseModel, ...] = ("diagonal", "full", "input")
