"""Algorithm 1, second line: the alpha that serves validation data best, the mean left where it is."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer.features import linear_features
from lastlayer.posterior import Posterior
from lastlayer.prediction import gaussian_log_prob


def held_out_lpd(
    posterior: Posterior, Phi: Float[Tensor, "r p"], T: Float[Tensor, "r q"], log_alpha: float | None = None
) -> float:
    """Mean log predictive density of points the posterior has not seen, joint over the outputs.

    eq:Mean_predictive_probability. Another `log_alpha` than the posterior's own moves the variance alone.
    """
    with torch.no_grad():
        own = float(posterior.log_alpha) if log_alpha is None else log_alpha
        return float(_LPD(posterior, Phi, T)(posterior.Sigma_E.new_tensor([own]))[0])


class _LPD:
    """LPD of validation points as a function of alpha; what does not depend on it is computed once."""

    def __init__(self, posterior: Posterior, Phi: Tensor, T: Tensor) -> None:
        self.posterior, self.Phi = posterior, Phi
        self.residual = (T.to(posterior.Sigma_E) - posterior.mean(Phi)).cpu().numpy()
        noise = posterior.Sigma_E.cpu().numpy()
        self.noise_var = np.diagonal(noise)
        std = np.sqrt(self.noise_var)
        self.correlation = noise / np.outer(std, std)  # a product of variances could underflow

    def __call__(self, log_alphas: Float[Tensor, " a"]) -> Float[ndarray, " a"]:
        log_alphas = log_alphas.to(self.posterior.Sigma_E)
        total = 1 + self.posterior.variance_ratios(self.Phi, log_alphas).cpu().numpy()[..., None]
        values: ndarray = gaussian_log_prob(self.residual, total * self.noise_var, self.correlation).mean(-1)
        return values


@dataclass(frozen=True)
class AlphaCurve:
    """Validation LPD as a function of alpha, and where it is largest."""

    log_alpha: float
    """log alpha^max; inf if the LPD still grows where the features can tell no difference any more."""
    lpd: float
    """Mean log predictive density of the validation points there, joint over the outputs."""
    lpd_before: float
    """The same at the posterior's own alpha."""
    log_alphas: Float[ndarray, " a"]
    lpds: Float[ndarray, " a"]
    """The whole curve; its last point is the limit."""

    @property
    def at_infinity(self) -> bool:
        return math.isinf(self.log_alpha) and self.log_alpha > 0

    def __str__(self) -> str:
        where = "infinity (the limit)" if self.at_infinity else f"log alpha = {self.log_alpha:.3f}"
        return f"validation LPD {self.lpd_before:.3f} -> {self.lpd:.3f} at {where}"


class HeldOut(NamedTuple):
    """A posterior and points that it has not seen."""

    posterior: Posterior
    Phi: Float[Tensor, "r p"]
    T: Float[Tensor, "r q"]


def tune_alpha(
    posterior: Posterior, Phi: Float[Tensor, "r p"], T: Float[Tensor, "r q"], *, n_curve: int = 201
) -> AlphaCurve:
    """Find alpha^max on validation data. alg:BLL_and_alpha

    The curve over the whole range in which alpha matters brackets the optimum, a 1-D search refines it, and the limit
    of infinite alpha is one of the candidates. If alpha makes no difference, the posterior's own is kept.
    """
    return tune_alpha_on([HeldOut(posterior, Phi, T)], float(posterior.log_alpha), n_curve=n_curve)


def tune_alpha_on(folds: Sequence[HeldOut], log_alpha: float, *, n_curve: int = 201) -> AlphaCurve:
    """The same on several folds, each with the posterior of its other rows: their points count as one set.

    `log_alpha` is the one to beat, and to keep where alpha makes no difference.
    """
    with torch.no_grad():
        lpds = [_LPD(*fold) for fold in folds]
        ranges = [alpha_range_for(posterior, Phi) for posterior, Phi, _ in folds]
        share = np.array([len(fold.T) for fold in folds]) / sum(len(fold.T) for fold in folds)

        def lpd(log_alphas: Float[ndarray, " a"]) -> Float[ndarray, " a"]:
            values: ndarray = sum(w * f(torch.from_numpy(log_alphas)) for w, f in zip(share, lpds, strict=True))
            return values

        limits = min(first for first, _ in ranges), max(last for _, last in ranges)
        return search_alpha(lpd, limits, log_alpha, n_curve=n_curve)


def alpha_range_for(posterior: Posterior, Phi: Float[Tensor, "r p"]) -> tuple[float, float]:
    """The log alphas between which alpha matters for these points."""
    farthest = posterior.equations.rows(linear_features(Phi)).square().sum(-1).max()
    first, last = posterior.equations.alpha_range(2, farthest=float(farthest)).tolist()
    return first, last


def search_alpha(
    lpd: Callable[[Float[ndarray, " a"]], Float[ndarray, " a"]],
    limits: tuple[float, float],
    log_alpha: float,
    *,
    n_curve: int = 201,
) -> AlphaCurve:
    """Maximise an LPD over log alpha: a curve between the limits, a search around its top, infinity a candidate."""
    from scipy.optimize import minimize_scalar  # a quarter of what torch takes to import: only where it is used

    log_alphas = np.linspace(*limits, n_curve)
    curve, before = lpd(log_alphas), float(lpd(np.array([log_alpha]))[0])
    best = int(curve.argmax())
    if curve[best] <= before + 1e-10 * max(1.0, abs(before)) and curve.max() - curve.min() < 1e-9:
        chosen, value = log_alpha, before
    elif best == n_curve - 1:
        value, chosen = max((float(curve[best]), math.inf), (before, log_alpha))
    else:
        bounds = (log_alphas[max(best - 1, 0)], log_alphas[best + 1])
        found = minimize_scalar(
            lambda a: -float(lpd(np.array([a]))[0]), bounds=bounds, method="bounded", options={"xatol": 1e-8}
        )
        refined, scanned = (float(-found.fun), float(found.x)), (float(curve[best]), float(log_alphas[best]))
        value, chosen = max(refined, scanned, (before, log_alpha))
    return AlphaCurve(chosen, value, before, log_alphas, curve)
