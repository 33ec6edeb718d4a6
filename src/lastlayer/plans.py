"""Which network sees which rows: what "auto" means for given data."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lastlayer.calibration import CrossFit, Ensemble, Split, blocked_splits, given_splits, random_splits
from lastlayer.training import Data

N_FOLDS = 5
N_MEMBERS = 10
LARGE_TABLE = 5_000
"""Rows from which on one network a fold is enough."""
FEW_ROWS = 20
"""Below, no row can be spared for calibration."""
STRENGTHS = (0.03, 0.3, 3.0, 30.0)


@dataclass(frozen=True)
class Mixed:
    """Members of every strength of the prior; each network leaves one of the splits out."""

    calibration: Any
    strengths: tuple[float, ...]
    splits: list[Split]

    def carry_out(self, crossfit: CrossFit) -> Ensemble:
        return crossfit.mix(self.splits, self.strengths, n_each=N_FOLDS)


@dataclass(frozen=True)
class Chosen:
    """So many members of one strength, given or chosen; networks leave out the splits of a partition."""

    calibration: Any
    n_members: int
    strengths: tuple[float, ...]
    partitions: list[list[Split]]
    trials: list[Split]
    """Where the strength of the hidden prior is chosen."""

    def carry_out(self, crossfit: CrossFit) -> Ensemble:
        return crossfit.run(self.partitions, n_members=self.n_members, strengths=self.strengths, trials=self.trials)


def make_plan(
    data: Data,
    *,
    calibration: Any,
    n_members: int | str,
    hidden_prior: float | str,
    fast: bool,
    own_network: bool,
    skips: bool,
    validation_fraction: float,
    groups: Any,
    seed: int,
) -> Mixed | Chosen:
    """What "auto" means for these data. Every network leaves rows out, unless nothing is to be calibrated on them."""
    m, rng = len(data.X), np.random.default_rng(seed)
    by_name = isinstance(calibration, str)
    spare = not fast and m >= FEW_ROWS
    if by_name and calibration == "auto" and not spare:
        calibration = None
    if hidden_prior == "auto":
        strengths = STRENGTHS if spare and not own_network else (0.0,)
    else:
        strengths = (float(hidden_prior),)
    mixed = n_members == "auto" and len(strengths) > 1 and calibration is not None and calibration != "alpha"
    if n_members == "auto":
        n_members = 1 if fast or own_network else N_MEMBERS if m <= LARGE_TABLE else N_FOLDS
    n_partitions = -(-int(n_members) // N_FOLDS)
    X, y = data.X.cpu().numpy(), data.T.cpu().numpy()
    trials: list[Split] = []
    partitions: list[list[Split]] = []
    if calibration is not None and not by_name:
        trials = given_splits(calibration, X, y, groups)
        partitions = [trials] * n_partitions
    elif calibration == "auto" and own_network and n_members == 1:
        order, held = rng.permutation(m), max(2, round(validation_fraction * m))
        trials = [Split(np.sort(order[held:]), np.sort(order[:held]), "random")]
        partitions = [trials]
    elif len(strengths) > 1 or calibration is not None:
        random = [random_splits(m, min(N_FOLDS, m // 2), rng) for _ in range(n_partitions)]
        blocked = blocked_splits(X.astype(float), min(N_FOLDS, m // 2)) if X.ndim == 2 else []
        trials = random[0]
        if calibration == "alpha":
            partitions = [blocked or trials]
        elif calibration == "auto":
            partitions = [splits + blocked for splits in random]
    if mixed:
        return Mixed(calibration, strengths + ((math.inf,) if skips else ()), partitions[0])
    return Chosen(calibration, int(n_members), strengths, partitions, trials)
