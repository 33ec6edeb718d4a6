"""Log density of held-out points under the mixture of their networks, and its gradient in closed form."""

import math
from types import SimpleNamespace
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer.bayes.evidence import LOG_2PI
from lastlayer.calibration.curve import log_fraction
from lastlayer.calibration.points import HeldOutPoints
from lastlayer.formula.ops import NumPyOps
from lastlayer.formula.predictive import log_shape, log_variance, member_weights, output_cov, shrunk

Said: TypeAlias = tuple[ndarray, ndarray, tuple[ndarray, ndarray, ndarray]]
"""See `Likelihood.at`."""
NO_MIXTURE = np.array([-math.inf, 0.0, -math.inf, -math.inf])
"""Logit of the tails' share, log of their factor, log precision of the shrinkage, log factor of the process outside the
data, at values that switch all of them off.
"""


class Likelihood:
    """Likelihood of held-out points; `curve_of` is the index of each network's curve."""

    def __init__(self, points: HeldOutPoints, curve_of: Int[ndarray, " c"], sharpness: float) -> None:
        self.log_fraction = np.array([log_fraction(family) for family in points.families])[:, None, None]
        # the networks of a family share its trust
        self.log_share = -np.log([points.families.count(family) for family in points.families])[:, None, None]
        self.log_far = None if points.log_far is None else points.log_far.numpy()[:, None]
        log_cost = (points.cost if points.cost.dim() > 2 else points.cost[..., None]).log().expand_as(points.mean)
        # missing targets contribute neither an error nor a logarithm
        known = ~points.targets.isnan()
        self.known = None if bool(known.all()) else known.numpy().astype(float)
        self.n_known = known.sum(-1).numpy()
        self.log_known_var = None if points.known_var is None else points.known_var.log().numpy()
        # each output in one piece of memory: sums over outputs are then sums of whole arrays
        self.mean, self.targets, self.log_noise_var, self.log_cost = (
            np.moveaxis(np.ascontiguousarray(np.moveaxis(x.numpy(), -1, 0)), 0, -1)
            for x in (points.mean, points.targets.nan_to_num(0.0), points.noise_var.log(), log_cost)
        )
        self.correlation = None if points.correlation is None else points.correlation.numpy()
        self.inputs, self.weight = points.inputs, points.weight.numpy()
        self.curve_of, self.sharpness = curve_of, sharpness

    @np.errstate(all="ignore")
    def at(self, curves: Float[ndarray, "s p"], of_mixture: Float[ndarray, " 4"], log_factor: ndarray | float) -> Said:
        """Evaluate the mixture: log density of each point, mean by each network, and gradients of the weighted sum."""
        ops, q, C = NumPyOps, self.mean.shape[-1], self.correlation
        own, (share, wider, log_precision, log_outside) = curves[self.curve_of][:, None], of_mixture
        log_a, log_b, power, log_trust = own[..., :q], own[..., q:-2], np.exp(own[..., -2:-1]), own[..., -1:]
        per_variance = (self.log_noise_var + log_b).mean(-1, keepdims=True)
        curve = SimpleNamespace(
            log_noise=log_a,
            log_slope=log_b,
            power=power,
            log_reach=math.inf,
            log_share=log_outside + self.log_fraction - per_variance,
        )
        inside, shape = (log_shape(ops, curve, self.log_cost, far) for far in (None, self.log_far))
        log_var = self.log_noise_var + log_variance(ops, curve, shape, log_factor)
        epistemic, noise = self.log_noise_var + log_b + shape, self.log_noise_var + log_a + log_factor
        part = np.exp(epistemic - log_var)  # epistemic fraction of the variance
        own_var = self.log_noise_var + log_variance(ops, curve, inside, log_factor)  # without what the process adds
        own_part = np.exp(self.log_noise_var + log_b + inside - own_var)
        kept = shrunk(ops, 1.0, own_var, 0.0, log_precision)  # fraction of the mean
        mean = kept * self.mean
        residual = self.targets - mean if self.known is None else self.known * (self.targets - mean)
        of_target, of_model = log_var, np.ones(())
        if self.log_known_var is not None:
            of_target = ops.logaddexp(log_var, self.log_known_var)
            of_model = np.exp(log_var - of_target)  # fraction of the target's variance that is not known
        if C is None and self.known is not None:
            pull, logdet = residual * np.exp(-of_target), (self.known * of_target).sum(-1)
        elif C is None:
            pull, logdet = residual * np.exp(-of_target), of_target.sum(-1)
        else:
            cov = output_cov(ops, C, np.exp(epistemic), np.exp(noise))
            inverse, logdet = np.linalg.inv(cov), np.linalg.slogdet(cov)[1]
            pull = (inverse @ residual[..., None])[..., 0]
        distance = (residual * pull).sum(-1)
        less = 1 - math.exp(-wider)  # reduction of the distance in the tails
        odds = share + 0.5 * (less * distance - self.n_known * wider)
        either = ops.logaddexp(0.0, odds)
        weights = member_weights(ops, log_var, self.sharpness, log_trust + self.log_share)[..., 0]
        joint = (
            np.log(weights) - 0.5 * (distance + logdet + self.n_known * LOG_2PI) + either - ops.logaddexp(0.0, share)
        )
        top = joint.max(0)
        log_density = top + np.log(np.exp(joint - top).sum(0))
        # gradients, named after their variable; h: factor on the distance, R: rho for every output
        rho, tail = self.weight * np.exp(joint - log_density), np.exp(odds - either)
        R, h = rho[..., None], (1 - less * tail)[..., None]
        by_shrinkage = R * h * pull * mean * (kept - 1)
        by_weight = rho - self.weight * weights
        by_log_var = -(self.sharpness / q * by_weight)[..., None]
        if C is None:
            seen = 1 if self.known is None else self.known
            by_log_var = by_log_var + R * of_model * (0.5 * (h * residual * pull - seen))
            by_epistemic, by_noise = by_log_var * part, by_log_var * (1 - part)
        else:
            by_cov = 0.5 * C * (h[..., None] * ops.outer(pull, pull) - inverse)
            e, n = (root * (by_cov @ root[..., None])[..., 0] for root in (np.exp(epistemic / 2), np.exp(noise / 2)))
            by_epistemic, by_noise = R * e + by_log_var * part, R * n + by_log_var * (1 - part)
        by_inside = by_epistemic * np.exp(inside - shape)
        by_far = (by_epistemic - by_inside).sum((1, 2))[:, None]
        by_own, by_noise = by_shrinkage * own_part, by_noise + by_shrinkage * (1 - own_part)
        by_power = ((by_inside + by_own) * inside).sum((1, 2))[:, None]
        by_slope = (by_epistemic + by_own).sum(1) - by_far / q
        each = np.concatenate([by_noise.sum(1), by_slope, by_power, by_weight.sum(1)[:, None]], axis=1)
        in_tails = rho * tail
        by_share = in_tails.sum() - rho.sum() * ops.sigmoid(share)
        by_wider = 0.5 * (((1 - less) * distance - self.n_known) * in_tails).sum()
        by_mixture = np.array([by_share, by_wider, by_shrinkage.sum(), by_far.sum()])
        by_curves = (self.curve_of == np.arange(len(curves))[:, None]) @ each
        return log_density, mean, (by_curves, by_mixture, by_noise.sum(0))
