"""The affine cost: how hard it is to write a point as an affine combination of the samples."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.errors import InputError
from lastlayer.features import affine_features
from lastlayer.posterior import Posterior
from lastlayer.statistics import Statistics


def affine_cost(phi_tilde: Float[Tensor, "r k"], Phi_tilde: Float[Tensor, "m k"], gamma: float) -> Float[Tensor, " r"]:
    """Affine cost of points given samples, in closed form. def:Affine_cost

    Theorem 2 (eq:BLL_Affine_cost): it is the variance ratio of a Bayesian last layer with alpha = gamma and a flat
    bias prior, so that is what is computed. gamma = inf: the limit, see Posterior.
    """
    _check_gamma(gamma)
    samples = Statistics.from_linear_features(Phi_tilde, Phi_tilde.new_zeros(len(Phi_tilde), 0))
    return Posterior(samples, math.log(gamma)).variance_ratio(affine_features(phi_tilde))


class AffineCostSolution(NamedTuple):
    """Optimum of the programme of def:Affine_cost: x = nu @ X + e with nu adding up to one."""

    cost: Float[Tensor, " r"]
    nu: Float[Tensor, "r m"]
    e: Float[Tensor, "r k"]


def affine_cost_program(x: Float[Tensor, "r k"], X: Float[Tensor, "m k"], gamma: float) -> AffineCostSolution:
    """Minimise |nu|^2 + gamma |e|^2 subject to X'nu + e = x and sum(nu) = 1, as eq:Affine_cost states it.

    In (nu, sqrt(gamma) e) it is the point of least norm on an affine subspace; an orthogonal factorisation of the
    constraints finds it without squaring their condition.
    """
    _check_gamma(gamma)
    m, k = X.shape
    root = math.sqrt(gamma)
    eye = torch.eye(k, dtype=X.dtype, device=X.device)
    D = torch.cat([torch.cat([X.mT, eye / root], 1), torch.cat([X.new_ones(1, m), X.new_zeros(1, k)], 1)])
    Q, R = torch.linalg.qr(D.mT)
    p = torch.linalg.solve_triangular(R.mT, affine_features(x).mT, upper=False).mT @ Q.mT
    nu, e = p[:, :m], p[:, m:] / root
    return AffineCostSolution(nu.square().sum(-1) + gamma * e.square().sum(-1), nu, e)


def leave_one_out_cost(cost: Float[Tensor, "*b m"]) -> Float[Tensor, "*b m"]:
    """Affine cost that each sample would have if it were not among the samples: c / (1 - c).

    `cost` is that of the samples themselves. Without it, a new point would be held against samples that cost little
    only because they are there.
    """
    return cost / (1 - cost).clamp_min(torch.finfo(cost.dtype).eps)


def cost_quantile(cost: Float[Tensor, " r"], sample_cost: Float[Tensor, " m"]) -> Float[Tensor, " r"]:
    """Share of the samples whose cost is below that of each point: 1 means farther out than every sample."""
    ordered = sample_cost.sort().values
    return torch.searchsorted(ordered, cost.contiguous()).to(cost.dtype) / len(ordered)


def _check_gamma(gamma: float) -> None:
    if not gamma > 0:
        raise InputError(f"gamma={gamma} must be positive: it is the price of leaving the affine hull")
