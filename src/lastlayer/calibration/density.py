"""Log density of held-out points under the calibrated mixture of their networks, and its gradient in closed form."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer.calibration.curve import StackedCurves, log_fraction
from lastlayer.calibration.points import HeldOutPoints
from lastlayer.formula.ops import NumPyOps
from lastlayer.formula.predictive import log_shape, log_variance, member_weights, shrunk
from lastlayer.likelihoods.base import Likelihood
from lastlayer.likelihoods.marginal import HeldOutReadings, Predicted, by_output

NO_MIXTURE = np.array([-math.inf, 0.0, -math.inf, -math.inf])
"""Logit of the tails' share, log of their factor, log precision of the shrinkage, log factor of the process outside the
data, at values that switch all of them off.
"""


class Density(NamedTuple):
    """Log density of each point, and the slopes of its weighted sum."""

    log_density: Float[ndarray, " n"]
    mean: Float[ndarray, "c n q"]
    """Mean of each network, shrunk."""
    by_curves: Float[ndarray, "s p"]
    by_mixture: Float[ndarray, " 4"]
    by_log_factor: Float[ndarray, "n q"]
    """Slopes with respect to the log factor of the noise at each point."""


class MixtureDensity:
    """Density of held-out points; `curve_of` is the index of each network's curve."""

    def __init__(
        self, points: HeldOutPoints, likelihood: Likelihood, curve_of: Int[ndarray, " c"], sharpness: float
    ) -> None:
        self.likelihood, self.curve_of, self.sharpness = likelihood, curve_of, sharpness
        self.log_fraction = np.array([log_fraction(family) for family in points.families])[:, None, None]
        # the networks of a family share its trust
        self.log_share = -np.log([points.families.count(family) for family in points.families])[:, None, None]
        self.log_far = None if points.log_far is None else points.log_far.numpy()[:, None]
        log_cost = (points.cost if points.cost.dim() > 2 else points.cost[..., None]).log().expand_as(points.mean)
        self.mean, self.log_noise_var, self.log_cost = (
            by_output(x.numpy()) for x in (points.mean, points.noise_var.log(), log_cost)
        )
        correlation = None if points.correlation is None else points.correlation.numpy()
        self.readings = HeldOutReadings.of(points.readings, correlation)
        self.inputs, self.weight = points.inputs, points.weight.numpy()

    @np.errstate(all="ignore")
    def at(
        self, curves: Float[ndarray, "s p"], of_mixture: Float[ndarray, " 4"], log_factor: ndarray | float
    ) -> Density:
        """Evaluate the mixture; slopes are named after their variable."""
        ops, q = NumPyOps, self.mean.shape[-1]
        share, wider, log_precision, log_outside = of_mixture
        curve = StackedCurves.of_logs(curves[self.curve_of], q)
        per_variance = (self.log_noise_var + curve.log_slope).mean(-1, keepdims=True)
        curve = curve._replace(log_share=log_outside + self.log_fraction - per_variance)
        # variances: inside the data, and with what the process adds outside
        inside, shape = (log_shape(ops, curve, self.log_cost, far) for far in (None, self.log_far))
        log_var = self.log_noise_var + log_variance(ops, curve, shape, log_factor)
        epistemic = self.log_noise_var + curve.log_slope + shape
        noise = self.log_noise_var + curve.log_noise + log_factor
        own_var = self.log_noise_var + log_variance(ops, curve, inside, log_factor)
        # shrunk means, weights and densities
        kept = shrunk(ops, 1.0, own_var, 0.0, log_precision)  # fraction of the mean
        mean = kept * self.mean
        weights = member_weights(ops, log_var, self.sharpness, curve.log_trust + self.log_share)[..., 0]
        predicted = Predicted(mean, log_var, epistemic, noise, np.log(weights))
        marginal = self.likelihood.log_marginal(self.readings, predicted, (share, wider))
        joint = marginal.log_density
        top = joint.max(0)
        log_density = top + np.log(np.exp(joint - top).sum(0))
        # slopes, from the density of the whole back to the densities of the networks, their variances and the curves
        rho = self.weight * np.exp(joint - log_density)
        by = marginal.slopes(rho)
        by_weight = rho - self.weight * weights
        by_log_var = -(self.sharpness / q * by_weight)[..., None] + by.log_var
        part = np.exp(epistemic - log_var)  # epistemic fraction of the variance
        by_epistemic, by_noise = by.log_epistemic + by_log_var * part, by.log_noise + by_log_var * (1 - part)
        by_inside = by_epistemic * np.exp(inside - shape)
        by_far = (by_epistemic - by_inside).sum((1, 2))[:, None]
        by_shrinkage = by.mean * mean * (kept - 1)
        own_part = np.exp(self.log_noise_var + curve.log_slope + inside - own_var)
        by_own, by_noise = by_shrinkage * own_part, by_noise + by_shrinkage * (1 - own_part)
        by_slope = (by_epistemic + by_own).sum(1) - by_far / q
        each = curve.slopes(by_noise.sum(1), by_slope, by_weight.sum(1), by_inside + by_own, inside)
        by_curves = (self.curve_of == np.arange(len(curves))[:, None]) @ each
        by_mixture = np.array([*by.tails, by_shrinkage.sum(), by_far.sum()])
        return Density(log_density, mean, by_curves, by_mixture, by_noise.sum(0))
