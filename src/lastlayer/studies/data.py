"""The data of the paper's simulation study, with the same random draws (Section "Simulation study")."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from sklearn.model_selection import train_test_split

NOISE_STD = np.array([0.05, 0.2])
TRAIN_RANGE = (0.0, 1.0)
TEST_RANGE = (-0.4, 1.4)
SEED = 99


@dataclass(frozen=True)
class Samples:
    X: Float[ndarray, "m 1"]
    y: Float[ndarray, "m q"]


@dataclass(frozen=True)
class PaperData:
    """Training and validation samples inside [0, 1], test samples also outside it."""

    train: Samples
    validation: Samples
    test: Samples


def truth(x: Float[ndarray, "m 1"]) -> Float[ndarray, "m 2"]:
    wave = np.sin(4 * np.pi * x)
    return np.hstack([x**2 * wave, wave])


def draw(m: int, span: tuple[float, float], seed: int) -> Samples:
    """Draw noisy samples as the authors did: legacy generator, inputs sorted and in single precision."""
    rng = np.random.RandomState(seed)
    unit = np.sort(rng.uniform(size=(m, 1)).astype(np.float32), axis=0)
    x = span[0] + (span[1] - span[0]) * unit.astype(np.float64)
    noise = np.hstack([rng.standard_normal((m, 1)) * sigma for sigma in NOISE_STD])
    return Samples(x, truth(x) + noise)


def paper_data(seed: int = SEED) -> PaperData:
    """Draw 200 samples, split 80/20 into training and validation, and 100 test samples from a new generator."""
    inside, test = draw(200, TRAIN_RANGE, seed), draw(100, TEST_RANGE, seed)
    X, X_val, y, y_val = train_test_split(inside.X, inside.y, test_size=0.2, random_state=42)
    return PaperData(Samples(X, y), Samples(X_val, y_val), test)
