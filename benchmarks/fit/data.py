"""Rows of a function of ten columns: smooth interacting terms, a threshold, irrelevant columns, and noise."""

import math

import numpy as np
from jaxtyping import Float
from numpy import ndarray

N_INPUTS = 10
NOISE = 1.0
"""Standard deviation, the same everywhere."""
ORACLE_LPD = -0.5 * math.log(2 * math.pi * math.e * NOISE**2)
ORACLE_CRPS = NOISE / math.sqrt(math.pi)
"""Expected scores of the true function with its noise."""


def function(X: Float[ndarray, "m 10"]) -> Float[ndarray, " m"]:
    """Friedman's first function, with a step along the sixth column; the last four columns are irrelevant."""
    interaction = 10 * np.sin(np.pi * X[:, 0] * X[:, 1])
    smooth: ndarray = interaction + 20 * (X[:, 2] - 0.5) ** 2 + 10 * X[:, 3] + 5 * X[:, 4]
    return smooth + 5.0 * (X[:, 5] > 0.6)


def make_rows(m: int, seed: int) -> tuple[Float[ndarray, "m 10"], Float[ndarray, " m"]]:
    """Draw uniform inputs and noisy targets; for the same seed, smaller tables are prefixes of larger ones."""
    inputs, noise = (np.random.default_rng([seed, part]) for part in range(2))
    X = inputs.random((m, N_INPUTS))
    return X, function(X) + NOISE * noise.standard_normal(m)
