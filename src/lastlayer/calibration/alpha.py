"""Algorithm 1: the alpha of largest held-out log predictive density."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer.bayes.held_out import LPD, HeldOut, _lpd
from lastlayer.bayes.posterior import Posterior


@dataclass(frozen=True)
class AlphaCurve:
    """Validation LPD as a function of alpha, and its maximum."""

    log_alpha: float
    """log alpha^max; inf if the LPD still grows where larger alphas make no numerical difference."""
    lpd: float
    """Mean log predictive density of the validation points at the maximum, joint over the outputs."""
    lpd_before: float
    """LPD at the posterior's own alpha."""
    log_alphas: Float[ndarray, " a"]
    """log alphas of the curve."""
    lpds: Float[ndarray, " a"]
    """LPD at each of them; the last point is the limit."""

    @property
    def at_infinity(self) -> bool:
        """Whether the maximum is at infinite alpha."""
        return math.isinf(self.log_alpha) and self.log_alpha > 0

    def __str__(self) -> str:
        where = "infinity (the limit)" if self.at_infinity else f"log alpha = {self.log_alpha:.3f}"
        return f"validation LPD {self.lpd_before:.3f} -> {self.lpd:.3f} at {where}"


def tune_alpha(
    posterior: Posterior, Phi: Float[Tensor, "r p"], T: Float[Tensor, "r q"], *, n_curve: int = 201
) -> AlphaCurve:
    """Find alpha^max on validation data. alg:BLL_and_alpha.

    Parameters
    ----------
    posterior : Posterior
        A posterior that was computed without the validation points; its alpha is kept if alpha makes no difference.
    Phi, T : Tensor of shape (r, p), Tensor of shape (r, q)
        Affine features of the validation points, and their targets.
    n_curve : int, default 201
        Number of points of the curve.
    """
    return tune_alpha_on([HeldOut(posterior, Phi, T)], float(posterior.log_alpha), n_curve=n_curve)


def tune_alpha_on(folds: Sequence[HeldOut], log_alpha: float, *, n_curve: int = 201) -> AlphaCurve:
    """Find alpha^max on the points of several folds together, each with the posterior of its other rows.

    Parameters
    ----------
    folds : sequence of HeldOut
        Posteriors and their held-out points.
    log_alpha : float
        The present log alpha, which is kept if alpha makes no difference or no other is better.
    n_curve : int, default 201
        Number of points of the curve.
    """
    with torch.no_grad():
        lpds = [_lpd(*fold) for fold in folds]
        ranges = [posterior.equations.alpha_range(2, Phi).tolist() for posterior, Phi, _ in folds]
        share = np.array([len(fold.T) for fold in folds]) / sum(len(fold.T) for fold in folds)

        lpd = lambda log_alphas: sum(w * f(log_alphas) for w, f in zip(share, lpds, strict=True))
        limits = min(first for first, _ in ranges), max(last for _, last in ranges)
        return search_alpha(lpd, limits, log_alpha, n_curve=n_curve)


def search_alpha(lpd: LPD, limits: tuple[float, float], log_alpha: float, *, n_curve: int = 201) -> AlphaCurve:
    """Maximise an LPD over log alpha: a curve, a search around its maximum, and infinity as a candidate."""
    from scipy.optimize import minimize_scalar  # slow to import: a quarter of torch's time

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
