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
from lastlayer.errors import unknown_choice
from lastlayer.likelihoods import Gaussian, Likelihood
from lastlayer.likelihoods.student import Student, gain_by_tails
from lastlayer.networks.mlp import PiecewiseEncoding
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


def chosen(asked: str, given: Given, *, plain: bool) -> Likelihood:
    """The likelihood asked for, or that which suits the rows best; `plain`: no option that Student-t noise refuses."""
    found = candidates(asked, given)
    if asked != "auto":
        found[0].read(given)  # refuses targets by their place in the table
    best = found[0] if len(found) == 1 else best_held_out(found, given)
    suspected = asked == "auto" and plain and isinstance(best, Gaussian)
    return Student() if suspected and has_outliers(given) else best


def candidates(asked: str, given: Given) -> list[Likelihood]:
    """Likelihoods to choose from: the forms of the one asked for, or of all that suit the rows."""
    kinds, y, partly_known = Likelihood.KINDS, given.y, given.noise_std is not None or bool(given.observations)
    if asked not in (*kinds, "auto"):
        raise unknown_choice("likelihood", asked, [*kinds, "auto"])
    if asked == "auto" and partly_known:
        return [Gaussian()]
    if asked != "auto":
        found = kinds[asked].candidates(y)
        if partly_known:
            found[0].check_linear("noise_std or observations")
        return found
    found = [form for kind in kinds.values() if kind.suits(y) for form in kind.candidates(y)]
    return [form for form in found if form.discrete] or [*found, Gaussian()]


def best_held_out(found: Sequence[Likelihood], given: Given) -> Likelihood:
    """The likelihood under which held-out targets are most probable, given an exact linear model of fixed features."""
    if not given.is_table or len(given.X) < FOLDS:
        return found[0]
    score = lambda one: sum(float(f.weight @ one.log_density(f.y, *f[2:])) for f in held_out(one, given))
    return found[int(np.argmax(np.nan_to_num([score(one) for one in found], nan=-np.inf)))]


def has_outliers(given: Given) -> bool:
    """Whether residuals of held-out targets have tails that a Gaussian cannot have."""
    known = given.noise_std is not None or bool(given.observations)
    if known or not given.is_table or len(given.X) < LEAST_ROWS:
        return False
    squares = [(f.y - f.mean) ** 2 / (f.epistemic_var + f.noise_var) for f in held_out(Gaussian(), given)]
    columns = [column[~np.isnan(column)] for column in np.concatenate(squares).T] if squares else []
    return bool(columns) and all(column.any() and gain_by_tails(column) > OUTLYING for column in columns)


def held_out(likelihood: Likelihood, given: Given) -> Iterator[Fold]:
    """Predictions of some rows, each by a small model of the others."""
    rng, group = np.random.default_rng(0), np.arange(len(given.X)) if given.groups is None else given.groups
    some = np.sort(rng.permutation(len(given.X))[:MOST_ROWS])
    fold, n = rng.permutation(int(group.max()) + 1)[group][some] % FOLDS, len(some)
    weight, y = np.ones(n) if given.weight is None else given.weight[some], given.y[some]
    rows = Rows.of(Given(given.X[some], y, weight), likelihood)
    assert rows.scales is not None
    main, scales, linear = rows.main, rows.scales.targets, _features(rows.main.X)
    Phi = affine_features(linear(main.X))
    parts = [part for part in (np.flatnonzero(fold == k) for k in range(FOLDS)) if 0 < len(part) < n]
    sums = [main.take(np.setdiff1d(np.arange(n), part)).statistics(linear) for part in parts]
    for part, posterior in zip(parts, by_evidence(sums), strict=True):
        found = posterior.predict(Phi[torch.from_numpy(part)])
        noise = found.noise_cov.diagonal() * scales.scale.square()
        cost = found.variance_ratio if found.variance_ratio.dim() > 1 else found.variance_ratio[:, None]
        mean = (found.mean * scales.scale + scales.mean).numpy()
        yield Fold(y[part], weight[part], mean, (cost * noise).numpy(), noise.numpy())


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
