"""The last step of every training: the exact last layer at the maximum of the evidence of fixed features."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lastlayer.evidence import optimal_alphas
from lastlayer.posterior import Posterior
from lastlayer.statistics import Statistics, row_chunks
from lastlayer.training.engine import threads_for
from lastlayer.types import NO_NOISE_PRIOR, BiasPrior, NoisePrior, NoiseStructure

STACKED = 2**22
"""Numbers of the Gram matrices in a batch: wide models go one by one."""


@dataclass(frozen=True)
class LastLayer:
    """Posterior at alpha* with the noise that belongs to it."""

    posterior: Posterior
    nlml: float
    """Negative log marginal likelihood per sample."""
    noise_floored: bool
    """The features fit the targets without error."""
    determined: float = math.nan
    """The number of features that the data determine."""


def last_layer(
    statistics: Statistics, *, noise: NoiseStructure = "diagonal", bias_prior: BiasPrior = "flat"
) -> LastLayer:
    """alpha, noise and weights at the maximum of the evidence."""
    return last_layers([statistics], noise=noise, bias_prior=bias_prior)[0]


def last_layers(
    models: Sequence[Statistics],
    *,
    noise: NoiseStructure = "diagonal",
    bias_prior: BiasPrior = "flat",
    noise_prior: NoisePrior = NO_NOISE_PRIOR,
) -> list[LastLayer]:
    """The same for each of several models; those with as many features go in batches."""
    layers: dict[int, LastLayer] = {}
    for k in {statistics.n_linear for statistics in models}:
        same = [i for i, statistics in enumerate(models) if statistics.n_linear == k]
        for places in (same[part] for part in row_chunks(len(same), max(1, STACKED // max(1, k * k)))):
            stack = Statistics.stacked([models[i] for i in places])
            with threads_for(20 * k**3):
                found = optimal_alphas(stack, noise=noise, bias_prior=bias_prior, noise_prior=noise_prior)
            for i, best in zip(places, found, strict=True):
                # rounding reaches the variance of far points only, where its size is all that matters
                posterior = Posterior.of(models[i], best.log_alpha, best.noise_cov, noise, bias_prior, rtol=math.inf)
                layers[i] = LastLayer(posterior, best.nlml, best.noise_floored, best.determined)
    return [layers[i] for i in range(len(models))]
