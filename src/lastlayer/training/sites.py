"""Last layers under a likelihood whose readings depend on what is predicted: both in turn, until they agree."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.bayes.features import affine_features
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Statistics
from lastlayer.data.rows import Points
from lastlayer.likelihoods.base import Likelihood
from lastlayer.settings.types import BiasPrior
from lastlayer.training.bound import FrozenLayer

ROUNDS, SETTLED = 30, 0.02
"""Largest number of rounds, and the log of the mean precision, zero in the end, below which they stop."""
LEAST = 1e-12
"""Least noise variance for standardised targets: where many are fitted exactly, others would lose all weight."""


@torch.no_grad()
def stand_in(
    likelihood: Likelihood,
    data: Points,
    phi: Float[Tensor, "m k"],
    log_alpha: float,
    *,
    bias_prior: BiasPrior = "flat",
    rounds: int = ROUNDS,
) -> Points:
    """Replace readings by their sites under the last layer of linear features, whose noise and alpha follow."""
    phi, alpha = phi.double(), phi.new_tensor(log_alpha, dtype=torch.float64)
    for _ in range(rounds):
        frozen = FrozenLayer.of(Statistics.of(phi, data.readings, weight=data.weight), alpha, bias_prior=bias_prior)
        noise, W, free = frozen.noise_cov[:, 0, 0].clamp_min(LEAST), frozen.weights[..., 0].mT, bias_prior == "flat"
        z = phi - frozen.centre[:, None] if free else affine_features(phi).expand(len(noise), -1, -1)
        ratio = (z @ frozen.inverse * z).sum(-1).mT + (1 / frozen.count if free else 0.0)
        sites = likelihood.sites(data.readings, phi @ W[:-1] + W[-1], ratio * noise, noise[None])
        if not bool(torch.isfinite(W).all()):
            break
        assert sites.scale is not None
        precision, read = 1 / sites.scale, torch.isfinite(sites.scale).double()
        if data.weight is not None:
            precision, read = precision * data.weight[:, None], read * data.weight[:, None]
        # precisions have a mean of one where noise and sites agree; to have it before is faster
        average = precision.sum(0) / read.sum(0)
        sites = replace(sites, scale=sites.scale * average)
        data, alpha = replace(data, readings=sites), frozen.next_log_alpha(alpha, by_output=True)
        if float(average.log().abs().max()) < SETTLED:
            break
    return data


@torch.no_grad()
def sites_at(likelihood: Likelihood, data: Points, posterior: Posterior, Phi: Float[Tensor, "m p"]) -> Points:
    """Replace the readings of new rows by their sites under a posterior."""
    noise, ratio = posterior.Sigma_E.diagonal(), posterior.variance_ratio(Phi)
    return replace(data, readings=likelihood.sites(data.readings, posterior.mean(Phi), ratio * noise, noise[None]))
