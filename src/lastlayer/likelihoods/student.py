"""`Student`: Student-t noise, for targets with outliers: a Gaussian whose variance is drawn anew for every target."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.special import gammaln, stdtrit
from torch import Tensor

from lastlayer._internal.numbers import TINY
from lastlayer.bayes.statistics import Readings
from lastlayer.formula.ops import NumPyOps
from lastlayer.likelihoods.base import NO_TAILS, HeldOutReadings, Likelihood, Marginal, Predicted, Slopes
from lastlayer.predictions.joint import add_noise
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.settings.types import Given

FACTORS = 4.0 ** np.arange(-1, 9)
"""Factors on the noise variance that predictions mix: outliers of up to about 250 standard deviations."""
LEAST_SHARE, FAR, FAR_SHARE = 1e-3, 7, 1e-5
"""Smaller shares are left out; but this factor has at least that share, for outliers beyond all that were seen."""
DEGREES = np.geomspace(1.0, 50.0, 18)
"""Degrees of freedom to choose from."""
PRIOR_POINTS, LEAST_POINTS, MOST_POINTS = 10.0, 20, 20_000
"""Weight of the t distribution beside held-out residuals in the shares; least residuals, and most that are used."""
MEDIAN = 0.455
"""Median of a squared standard normal number."""


def shares_of(nu: float, squares: Sequence[float] | ndarray = ()) -> tuple[float, ...]:
    """Shares of `FACTORS` for squared residuals beside the quantiles of a t distribution, by their likelihood."""
    quantiles = stdtrit(nu, (np.arange(500) + 0.5) / 500)
    z = np.concatenate([np.square(quantiles), squares])
    weight = np.concatenate([np.full(500, PRIOR_POINTS / 500), np.ones(len(squares))])
    density = np.exp(-0.5 * z / FACTORS[:, None]) / np.sqrt(FACTORS)[:, None] + TINY
    shares = np.full(len(FACTORS), 1 / len(FACTORS))
    for _ in range(300):
        shares *= (density * (weight / (shares @ density))).sum(-1) / weight.sum()
    shares[shares < LEAST_SHARE] = 0.0
    shares[FAR] = max(shares[FAR], FAR_SHARE)
    return tuple((shares / shares.sum()).tolist())


def log_evidence(nu: float, squares: ndarray) -> float:
    """Log density of squared residuals under a t distribution of the scale that suits them best."""
    scale = 1.0
    for _ in range(50):
        scale = float(((nu + 1) / (nu + squares / scale) * squares).mean())
    each = gammaln((nu + 1) / 2) - gammaln(nu / 2) - 0.5 * math.log(nu * scale)
    return float((each - (nu + 1) / 2 * np.log1p(squares / (nu * scale))).mean())


def gain_by_tails(squares: Float[ndarray, " n"]) -> float:
    """Gain in log density by the best t distribution over the best Gaussian, for squared residuals."""
    gaussian = -0.5 * (math.log(2 * float(squares.mean())) + 1)
    return max(log_evidence(nu, squares) for nu in DEGREES) - gaussian


@dataclass(frozen=True)
class Student(Likelihood):
    """Student-t noise: the variance over that of a typical target is 1/u, with u from Gamma(nu/2, nu/2).

    Readings are weighted by the mean of u. Predictions mix factors on the noise, which the outputs of a row share.
    """

    name = "student"
    described = "the targets have outliers: noise with long tails is modelled"
    linear = False
    iterated = True
    nu: float = 4.0
    """Degrees of freedom of the noise."""
    shares: tuple[float, ...] = shares_of(4.0)
    """Probabilities of `FACTORS`; after calibration those of held-out residuals."""

    def __post_init__(self) -> None:
        fine = len(self.shares) == len(FACTORS) and min(self.shares) >= 0 and abs(sum(self.shares) - 1) < 1e-6
        if not (fine and 0 < self.nu < math.inf):
            raise ValueError(f"nu={self.nu} and shares={self.shares} are no Student-t noise")

    def check_options(self, noise: Any, calibration: Any, bias_prior: str) -> None:
        asked = {"noise": (noise, "full"), "calibration": (calibration, "alpha"), "bias_prior": (bias_prior, "shared")}
        for name, (value, refused) in asked.items():
            if isinstance(value, str) and value == refused:
                self.check_fixed(f'{name}="{refused}"')

    def read(self, given: Given) -> Readings:
        """Read targets with a factor on the noise of each."""
        found = super().read(given)
        return found if found.scale is not None else replace(found, scale=torch.ones_like(found.t))

    def sites(
        self,
        r: Readings,
        mean: Float[Tensor, "*b m q"],
        var: Float[Tensor, "*#b #m #q"],
        noise_var: Float[Tensor, "*#b #m #q"],
    ) -> Readings:
        """Readings weighted by the mean of u."""
        u = (self.nu + 1) / (self.nu + ((r.t - mean).square() + var) / noise_var)
        read = torch.ones_like(r.t) if r.read is None else r.read
        return replace(r, scale=torch.where(read > 0, 1 / u, torch.inf))

    def refitted(self, r: Readings, mean: Float[Tensor, "c n q"], var: Float[Tensor, "c n q"]) -> "Student":
        """Degrees of freedom and shares of the residuals, each network's relative to its own median."""
        squares = (r.values - mean).square() / var
        if squares.shape[1] < LEAST_POINTS:
            return self
        squares = MEDIAN * squares / squares.nanmedian(1, keepdim=True).values.clamp_min(TINY)
        known = squares[~squares.isnan()].numpy(force=True)
        known = known[:: -(-len(known) // MOST_POINTS)]
        nu = float(max(DEGREES, key=lambda nu: log_evidence(nu, known)))
        return replace(self, nu=nu, shares=shares_of(nu, known[:: -(-len(known) // squares.shape[1])]))

    def log_marginal(self, r: HeldOutReadings, p: Predicted, tails: tuple[float, float] = NO_TAILS) -> Marginal:
        """Log densities of the mixture over the factors."""
        parts, found = list[Predicted](), list[Marginal]()
        for share, factor in self._mixed():
            noise = p.log_noise + math.log(factor)
            log_var = NumPyOps.logaddexp(p.log_epistemic, noise)
            weight = p.log_weight + math.log(share)
            parts.append(Predicted(p.mean, log_var, p.log_epistemic, noise, weight))
            found.append(super().log_marginal(r, parts[-1], tails))
        each = np.stack([one.log_density for one in found])
        top = each.max(0)
        log_density = top + np.log(np.exp(each - top).sum(0))

        def slopes(rho: Float[ndarray, "c n"]) -> Slopes:
            mean, epistemic, noise, of_tails = 0.0 * p.mean, 0.0 * p.mean, 0.0 * p.mean, np.zeros(2)
            for part, one in zip(parts, found, strict=True):
                by = one.slopes(rho * np.exp(one.log_density - log_density))
                fraction = np.exp(part.log_epistemic - part.log_var)
                mean += by.mean
                epistemic += by.log_epistemic + by.log_var * fraction
                noise += by.log_noise + by.log_var * (1 - fraction)
                of_tails += by.tails
            return Slopes(mean, 0.0, epistemic, noise, (float(of_tails[0]), float(of_tails[1])))

        return Marginal(log_density, slopes)

    def predict(self, working: MixturePrediction) -> MixturePrediction:
        """Mix the factors on the noise; the function, without noise, stays the same."""
        shares, factors = np.array(self._mixed()).T
        return working.split(shares, np.ones(len(shares)), factors) if working.component_noise_var.any() else working

    def draw(
        self, function: Float[ndarray, "n m q"], noise_cov: Float[ndarray, "m q q"] | None, rng: np.random.RandomState
    ) -> Float[ndarray, "n m q"]:
        """Draw targets, each row with a factor on its noise."""
        if noise_cov is None:
            return function
        factor = rng.choice(FACTORS, size=(*function.shape[:2], 1), p=self.shares)
        return function + np.sqrt(factor) * add_noise(noise_cov, rng.standard_normal(function.shape))

    def _mixed(self) -> list[tuple[float, float]]:
        """Shares above zero, with their factors."""
        return [(share, factor) for share, factor in zip(self.shares, FACTORS.tolist(), strict=True) if share]
