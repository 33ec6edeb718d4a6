"""Choice of a likelihood by the held-out density of a small model."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from lastlayer.bayes.evidence import by_evidence
from lastlayer.bayes.features import affine_features
from lastlayer.data.rows import Rows
from lastlayer.likelihoods.base import Gaussian, Likelihood
from lastlayer.likelihoods.student import Student, gain_by_tails
from lastlayer.networks.mlp import PiecewiseEncoding
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.settings.types import Given

FOLDS, BINS, WAVES, MOST_FEATURES, MOST_ROWS = 5, 8, 64, 256, 2_000
"""Folds; bins per column and random waves of the small model, their number together, and its rows."""
LEAST_ROWS, OUTLYING = 40, 0.25
"""Fewest rows to look for outliers in; gain in log density by long tails from which on targets count as outlying."""


class Fold(NamedTuple):
    """Held-out rows, and what a small model predicts of their working targets."""

    y: Float[ndarray, "n q"]
    weight: Float[ndarray, " n"]
    mean: Float[ndarray, "n q"]
    epistemic_var: Float[ndarray, "n q"]
    noise_var: Float[ndarray, " q"]

    def score(self, likelihood: Likelihood) -> float:
        """Sum of the log densities of the targets."""
        cost = np.zeros(len(self.y))
        words = {"epistemic_var": self.epistemic_var, "noise_var": self.noise_var, "affine_cost": cost}
        working = MixturePrediction.gaussian(self.mean, **words)
        return float(self.weight @ likelihood.predict(working).log_prob(self.y))


def chosen(candidates: Sequence[Likelihood], given: Given, *, outliers: bool) -> Likelihood:
    """The best of the candidates; if `outliers`, Student-t noise in place of Gaussian noise where targets have some."""
    best = candidates[0] if len(candidates) == 1 else best_held_out(candidates, given)
    return Student() if outliers and isinstance(best, Gaussian) and has_outliers(given) else best


def best_held_out(candidates: Sequence[Likelihood], given: Given) -> Likelihood:
    """The likelihood under which held-out targets are most probable, given an exact linear model of fixed features."""
    if not given.is_table or len(given.X) < FOLDS:
        return candidates[0]
    scores = [sum(fold.score(likelihood) for fold in held_out(likelihood, given)) for likelihood in candidates]
    return candidates[int(np.argmax(np.nan_to_num(scores, nan=-np.inf)))]


def has_outliers(given: Given) -> bool:
    """Whether residuals of held-out targets have tails that a Gaussian cannot have."""
    if not given.is_table or len(given.X) < LEAST_ROWS:
        return False
    squares = [(f.y - f.mean) ** 2 / (f.epistemic_var + f.noise_var) for f in held_out(Gaussian(), given)]
    columns = [column[~np.isnan(column)] for column in np.concatenate(squares).T] if squares else []
    return bool(columns) and all(column.any() and gain_by_tails(column) > OUTLYING for column in columns)


def held_out(likelihood: Likelihood, given: Given) -> Iterator[Fold]:
    """Predictions of some rows, each by a small model of the others."""
    rng, rows = np.random.default_rng(0), Rows.of(given, likelihood)
    assert rows.scales is not None
    group = np.arange(len(given.X)) if given.groups is None else given.groups
    some = np.sort(rng.permutation(len(given.X))[:MOST_ROWS])
    fold = rng.permutation(int(group.max()) + 1)[group][some] % FOLDS
    main, scales = rows.main.take(some), rows.scales.targets
    linear, weight = _features(main.X), np.ones(len(some)) if given.weight is None else given.weight[some]
    Phi = affine_features(linear(main.X))
    parts = [np.flatnonzero(fold == k) for k in range(FOLDS)]
    parts = [part for part in parts if 0 < len(part) < len(some)]
    sums = [main.take(np.setdiff1d(np.arange(len(some)), part)).statistics(linear) for part in parts]
    for part, posterior in zip(parts, by_evidence(sums), strict=True):
        found = posterior.predict(Phi[torch.from_numpy(part)])
        noise = found.noise_cov.diagonal() * scales.scale.square()
        cost = found.variance_ratio if found.variance_ratio.dim() > 1 else found.variance_ratio[:, None]
        mean = (found.mean * scales.scale + scales.mean).numpy()
        yield Fold(given.y[some[part]], weight[part], mean, (cost * noise).numpy(), noise.numpy())


def _features(Z: Float[Tensor, "m d"]) -> "partial[Tensor]":
    """A piecewise-linear encoding of each column, beside random waves of all columns."""
    d = Z.shape[1]
    n_bins: Int[Tensor, " d"] = torch.full((d,), max(1, min(BINS, (MOST_FEATURES - WAVES) // d)))
    generator = torch.Generator().manual_seed(0)
    waves = torch.randn(d, WAVES, generator=generator, dtype=torch.float64) / d**0.5
    phase = 2 * torch.pi * torch.rand(WAVES, generator=generator, dtype=torch.float64)
    return partial(_evaluated, PiecewiseEncoding.of(Z, n_bins), waves, phase)


def _evaluated(encoding: PiecewiseEncoding, waves: Tensor, phase: Tensor, z: Tensor) -> Tensor:
    return torch.cat([encoding(z), torch.cos(z @ waves + phase)], -1)
