"""Choice of a likelihood by the held-out density of a small model."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer.bayes.evidence import by_evidence
from lastlayer.bayes.features import affine_features
from lastlayer.data.rows import Rows
from lastlayer.likelihoods.base import Likelihood
from lastlayer.networks.mlp import PiecewiseEncoding
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.settings.types import Given

FOLDS, BINS, WAVES, MOST_FEATURES, MOST_ROWS = 5, 8, 64, 256, 2_000
"""Folds; bins per column and random waves of the small model, their number together, and its rows."""


def best_held_out(candidates: Sequence[Likelihood], given: Given) -> Likelihood:
    """The likelihood under which held-out targets are most probable, given an exact linear model of fixed features."""
    if not given.is_table:
        return candidates[0]
    rng, fold = np.random.default_rng(0), np.arange(len(given.X)) if given.groups is None else given.groups
    some = np.sort(rng.permutation(len(given.X))[:MOST_ROWS])
    fold = rng.permutation(int(fold.max()) + 1)[fold][some] % FOLDS
    scores = [_held_out_score(likelihood, given, some, fold) for likelihood in candidates]
    return candidates[int(np.nanargmax([np.nan_to_num(score, nan=-np.inf) for score in scores]))]


def _held_out_score(likelihood: Likelihood, given: Given, some: ndarray, fold: ndarray) -> float:
    rows = Rows.of(given, likelihood)
    assert rows.scales is not None
    main, scales = rows.main.take(some), rows.scales.targets
    linear = _features(main.X)
    Phi, total = affine_features(linear(main.X)), 0.0
    parts = [np.flatnonzero(fold == k) for k in range(FOLDS)]
    parts = [part for part in parts if 0 < len(part) < len(some)]
    sums = [main.take(np.setdiff1d(np.arange(len(some)), part)).statistics(linear) for part in parts]
    for part, posterior in zip(parts, by_evidence(sums), strict=True):
        found = posterior.predict(Phi[torch.from_numpy(part)])
        noise = found.noise_cov.diagonal() * scales.scale.square()
        cost = found.variance_ratio if found.variance_ratio.dim() > 1 else found.variance_ratio[:, None]
        working = MixturePrediction.gaussian(
            (found.mean * scales.scale + scales.mean).numpy(),
            epistemic_var=(cost * noise).numpy(),
            noise_var=noise.numpy(),
            affine_cost=cost[:, 0].numpy(),
        )
        density = likelihood.predict(working).log_prob(given.y[some[part]])
        weight = np.ones(len(part)) if given.weight is None else given.weight[some[part]]
        total += float(weight @ density)
    return total


def _features(Z: Float[Tensor, "m d"]) -> "partial[Tensor]":
    """A piecewise-linear encoding of each column, beside random waves of all columns."""
    d = Z.shape[1]
    n_bins = torch.full((d,), max(1, min(BINS, (MOST_FEATURES - WAVES) // d)))
    generator = torch.Generator().manual_seed(0)
    waves = torch.randn(d, WAVES, generator=generator, dtype=torch.float64) / d**0.5
    phase = 2 * torch.pi * torch.rand(WAVES, generator=generator, dtype=torch.float64)
    return partial(_evaluated, PiecewiseEncoding.of(Z, n_bins), waves, phase)


def _evaluated(encoding: PiecewiseEncoding, waves: Tensor, phase: Tensor, z: Tensor) -> Tensor:
    return torch.cat([encoding(z), torch.cos(z @ waves + phase)], -1)
