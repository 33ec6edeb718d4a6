"""The affine cost of points given samples: closed form and programme (Definition 4, Theorem 2)."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Statistics, affine_features
from lastlayer.errors import InputError


def affine_cost(phi_tilde: Float[Tensor, "r k"], Phi_tilde: Float[Tensor, "m k"], gamma: float) -> Float[Tensor, " r"]:
    """Compute the affine cost of points given samples, in closed form. def:Affine_cost.

    By Theorem 2 (eq:BLL_Affine_cost), it is the variance ratio of a posterior with alpha = gamma and a flat bias prior.

    Parameters
    ----------
    phi_tilde, Phi_tilde : Tensor of shape (r, k), Tensor of shape (m, k)
        Linear features of the points, and those of the samples.
    gamma : float
        Price of leaving the affine hull; inf: the limit, see `Posterior`.
    """
    _check_gamma(gamma)
    samples = Statistics.from_linear_features(Phi_tilde, Phi_tilde.new_zeros(len(Phi_tilde), 0))
    return Posterior(samples, math.log(gamma)).variance_ratio(affine_features(phi_tilde))


class AffineCostSolution(NamedTuple):
    """Optimum of the programme of def:Affine_cost: x = nu @ X + e with nu summing to one."""

    cost: Float[Tensor, " r"]
    nu: Float[Tensor, "r m"]
    """Coefficients of the samples."""
    e: Float[Tensor, "r k"]
    """Distance vector from the affine hull."""


def affine_cost_program(x: Float[Tensor, "r k"], X: Float[Tensor, "m k"], gamma: float) -> AffineCostSolution:
    """Minimise `|nu|^2 + gamma |e|^2` subject to `X'nu + e = x` and `sum(nu) = 1`. eq:Affine_cost.

    In (nu, sqrt(gamma) e) this is the point of least norm on an affine subspace.

    Parameters
    ----------
    x, X : Tensor of shape (r, k), Tensor of shape (m, k)
        Points and samples.
    gamma : float
        Price of leaving the affine hull.
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


def _check_gamma(gamma: float) -> None:
    if not gamma > 0:
        raise InputError(f"gamma={gamma} must be positive: it is the price of leaving the affine hull")
