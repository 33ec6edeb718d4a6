"""The last step of every training: the exact last layer at the maximum of the evidence of fixed features."""

import math
from dataclasses import dataclass

from lastlayer.evidence import optimal_alpha
from lastlayer.posterior import Posterior
from lastlayer.statistics import Statistics
from lastlayer.training.engine import threads_for
from lastlayer.types import BiasPrior, NoiseStructure


@dataclass(frozen=True)
class LastLayer:
    """Posterior at alpha* with the noise that belongs to it."""

    posterior: Posterior
    nlml: float
    """Negative log marginal likelihood per sample."""
    noise_floored: bool
    """The features fit the targets without error."""


def last_layer(
    statistics: Statistics, *, noise: NoiseStructure = "diagonal", bias_prior: BiasPrior = "flat"
) -> LastLayer:
    """alpha, noise and weights at the maximum of the evidence."""
    with threads_for(20 * statistics.n_linear**3):
        best = optimal_alpha(statistics, noise=noise, bias_prior=bias_prior)
    # rounding reaches the variance of far points only, where its size is all that matters
    posterior = Posterior(statistics, best.log_alpha, best.noise_cov, noise, bias_prior, rtol=math.inf)
    return LastLayer(posterior, best.nlml, best.noise_floored)
