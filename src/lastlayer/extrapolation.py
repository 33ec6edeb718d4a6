"""Extrapolation of features: distances to hulls, the affine cost, and Algorithm 1. No networks are involved.

Distances are Euclidean; the paper's def:Distance_to_a_set is their square.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from lastlayer.errors import InputError, PrecisionError
from lastlayer.features import affine_features
from lastlayer.linalg import Cholesky
from lastlayer.posterior import Posterior
from lastlayer.prediction import gaussian_log_prob
from lastlayer.statistics import Statistics

LPD = Callable[[Float[ndarray, " a"]], Float[ndarray, " a"]]
"""Function that maps several log alphas to the mean log predictive density of held-out points."""


@dataclass(frozen=True)
class Projection:
    """Nearest points of a set X' nu."""

    distance: Float[Tensor, " r"]
    """Euclidean distance to the nearest point."""
    point: Float[Tensor, "r d"]
    """The nearest point."""
    coefficients: Float[Tensor, "r m"]
    """nu: point = coefficients @ X."""


def distance_to_span(x: Float[Tensor, "r d"], X: Float[Tensor, "m d"]) -> Float[Tensor, " r"]:
    """Compute the Euclidean distance to all linear combinations of the rows of X. def:Span.

    Parameters
    ----------
    x : Tensor of shape (r, d)
        Points.
    X : Tensor of shape (m, d)
        Samples.

    Returns
    -------
    Tensor of shape (r,)
        The distances.
    """
    return nearest_in_span(x, X).distance


def distance_to_affine_hull(x: Float[Tensor, "r d"], X: Float[Tensor, "m d"]) -> Float[Tensor, " r"]:
    """Compute the Euclidean distance to the combinations whose coefficients sum to one. def:Affine_hull.

    Parameters
    ----------
    x : Tensor of shape (r, d)
        Points.
    X : Tensor of shape (m, d)
        Samples.

    Returns
    -------
    Tensor of shape (r,)
        The distances.
    """
    return nearest_in_affine_hull(x, X).distance


def distance_to_convex_hull(x: Float[Tensor, "r d"], X: Float[Tensor, "m d"]) -> Float[Tensor, " r"]:
    """Compute the Euclidean distance to the convex combinations of the rows of X. def:Convex_hull.

    Their coefficients sum to one and are not negative.

    Parameters
    ----------
    x : Tensor of shape (r, d)
        Points.
    X : Tensor of shape (m, d)
        Samples.

    Returns
    -------
    Tensor of shape (r,)
        The distances.
    """
    return nearest_in_convex_hull(x, X).distance


def nearest_in_span(x: Float[Tensor, "r d"], X: Float[Tensor, "m d"]) -> Projection:
    """Find the nearest points of the span, with coefficients of least norm.

    Parameters
    ----------
    x : Tensor of shape (r, d)
        Points.
    X : Tensor of shape (m, d)
        Samples.

    Returns
    -------
    Projection
        Nearest points, distances and coefficients.
    """
    return _projection(x, _least_norm_coefficients(x, X), X)


def nearest_in_affine_hull(x: Float[Tensor, "r d"], X: Float[Tensor, "m d"]) -> Projection:
    """Find the nearest points of the affine hull, the span around the mean, with coefficients of least norm.

    Parameters
    ----------
    x : Tensor of shape (r, d)
        Points.
    X : Tensor of shape (m, d)
        Samples.

    Returns
    -------
    Projection
        Nearest points, distances and coefficients.
    """
    _check(x, X)
    centre = X.mean(0)
    # rows of X - centre sum to zero, and so do the least-norm coefficients
    nu = _least_norm_coefficients(x - centre, X - centre, scale=X.norm())
    return _projection(x, nu - nu.mean(-1, keepdim=True) + 1 / len(X), X)


def nearest_in_convex_hull(
    x: Float[Tensor, "r d"], X: Float[Tensor, "m d"], *, tol: float = 1e-7, chunk_rows: int = 256
) -> Projection:
    """Find the nearest points of the convex hull, by one quadratic programme per point, many at a time.

    Parameters
    ----------
    x : Tensor of shape (r, d)
        Points.
    X : Tensor of shape (m, d)
        Samples.
    tol : float, default 1e-7
        Tolerance on the distances, relative to the size of the data plus the point's distance from their centre.
    chunk_rows : int, default 256
        Number of points solved at a time.

    Returns
    -------
    Projection
        Nearest points, distances and coefficients.

    Raises
    ------
    PrecisionError
        If the duality gap does not guarantee distances to within 10 `tol`.
    """
    _check(x, X)
    centre = X.mean(0)
    size = torch.maximum((X - centre).norm(dim=-1).max(), torch.finfo(X.dtype).eps * X.norm())
    size = torch.where(size > 0, size, torch.ones_like(size))
    # the tolerance is relative to each point's own distance, so that far points are as well-conditioned as near ones
    nu = torch.cat(
        [_simplex_least_squares((part - centre) / size, (X - centre) / size, tol) for part in x.split(chunk_rows)]
        or [x.new_zeros(0, len(X))]
    )
    return _projection(x, nu, X)


def _simplex_least_squares(x: Tensor, X: Tensor, tol: float, max_steps: int = 100) -> Tensor:
    """min 1/2 |X'nu - x|^2 over the simplex, batched over x, by Mehrotra's predictor-corrector method.

    Newton's matrix is X X' + diag(s / nu): a d x d solve by Woodbury, so a step costs O(m d^2) per point.
    """
    r, m = len(x), len(X)
    reach = 1 + x.norm(dim=-1, keepdim=True)
    nu, s, lam = x.new_full((r, m), 1 / m), reach.expand(r, m).clone(), x.new_zeros(r, 1)
    best, error = nu, torch.full_like(reach, torch.inf)
    for _ in range(max_steps):
        e = nu @ X - x
        gradient = e @ X.mT
        dual, primal = gradient - s - lam, nu.sum(-1, keepdim=True) - 1
        # Frank-Wolfe's gap bounds how far 1/2 |e|^2 is above its minimum, and so the error of the distance |e|
        distance = e.norm(dim=-1, keepdim=True)
        gap = ((nu * gradient).sum(-1, keepdim=True) - gradient.min(-1, keepdim=True).values).clamp_min(0)
        now = distance - (distance.square() - 2 * gap).clamp_min(0).sqrt() + primal.abs()
        best, error = torch.where(now < error, nu, best), torch.minimum(now, error)
        if bool((error <= tol * reach).all()):
            break
        newton = _Newton(nu, s, dual, primal, X)
        d_nu, d_s, _ = newton.step(torch.zeros_like(nu))
        mu = (nu * s).mean(-1, keepdim=True)
        affine = ((nu + _longest(nu, d_nu) * d_nu) * (s + _longest(s, d_s) * d_s)).mean(-1, keepdim=True)
        d_nu, d_s, d_lam = newton.step((affine / mu) ** 3 * mu - d_nu * d_s)
        step = 0.995 * torch.minimum(_longest(nu, d_nu), _longest(s, d_s))
        step = torch.where(torch.isfinite(d_nu).all(-1, keepdim=True), step, torch.zeros_like(step))
        nu, s, lam = nu + step * d_nu.nan_to_num(), s + step * d_s.nan_to_num(), lam + step * d_lam.nan_to_num()
    if not bool((error <= 10 * tol * reach).all()):
        raise PrecisionError(
            f"the quadratic programme of the convex hull stopped with distances accurate to {(error / reach).max():.0e}"
            f" of the data's size, not tol={tol:g}: allow a larger tol"
        )
    best = best.clamp_min(0)
    return best / best.sum(-1, keepdim=True)


class _Newton:
    """Newton steps on the optimality conditions gradient - s - lam = 0, sum(nu) = 1, nu s = tau, factored once."""

    def __init__(self, nu: Tensor, s: Tensor, dual: Tensor, primal: Tensor, X: Tensor) -> None:
        self.nu, self.s, self.dual, self.primal, self.X = nu, s, dual, primal, X
        self.D = nu / s
        eye = torch.eye(X.shape[1], dtype=X.dtype, device=X.device)
        self.inner = Cholesky.of(eye + X.mT @ (self.D[..., None] * X))
        self.ones = self._solve(torch.ones_like(nu))

    def _solve(self, v: Tensor) -> Tensor:
        """(diag(s / nu) + X X')^-1 v."""
        Dv = self.D * v
        return Dv - self.D * (self.inner.solve((Dv @ self.X)[..., None])[..., 0] @ self.X.mT)

    def step(self, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b = self._solve(tau / self.nu - self.s - self.dual)
        d_lam = -(self.primal + b.sum(-1, keepdim=True)) / self.ones.sum(-1, keepdim=True)
        d_nu = b + d_lam * self.ones
        return d_nu, tau / self.nu - self.s - d_nu / self.D, d_lam


def _longest(x: Tensor, d: Tensor) -> Tensor:
    """The largest step up to one that keeps x + step d non-negative."""
    ratio = torch.where(d < 0, -x / d, torch.full_like(x, torch.inf))
    return ratio.min(-1, keepdim=True).values.clamp_max(1.0)


def _least_norm_coefficients(x: Tensor, X: Tensor, *, scale: float | Tensor = 0.0) -> Tensor:
    _check(x, X)
    U, s, Vh = torch.linalg.svd(X, full_matrices=False)
    # rounding errors are relative to `scale`, the norm of the samples before centring
    seen = s > torch.finfo(X.dtype).eps * max(X.shape) * s.max().clamp_min(scale)
    return (x @ Vh.mT) * torch.where(seen, 1 / torch.where(seen, s, 1.0), 0.0) @ U.mT


def _projection(x: Tensor, nu: Tensor, X: Tensor) -> Projection:
    point = nu @ X
    return Projection((x - point).norm(dim=-1), point, nu)


def _check(x: Tensor, X: Tensor) -> None:
    if x.dim() != 2 or X.dim() != 2 or x.shape[1] != X.shape[1] or len(X) == 0:
        raise InputError(
            f"points of shape {tuple(x.shape)} and samples of shape {tuple(X.shape)}: both must be tables with the "
            "same number of columns, and at least one sample"
        )


def affine_cost(phi_tilde: Float[Tensor, "r k"], Phi_tilde: Float[Tensor, "m k"], gamma: float) -> Float[Tensor, " r"]:
    """Compute the affine cost of points given samples, in closed form. def:Affine_cost.

    By Theorem 2 (eq:BLL_Affine_cost), it is computed as the variance ratio of a Bayesian last layer with alpha = gamma
    and a flat bias prior.

    Parameters
    ----------
    phi_tilde : Tensor of shape (r, k)
        Linear features of the points.
    Phi_tilde : Tensor of shape (m, k)
        Linear features of the samples.
    gamma : float
        Price of leaving the affine hull; inf: the limit, see `Posterior`.

    Returns
    -------
    Tensor of shape (r,)
        The affine costs.

    Raises
    ------
    InputError
        If gamma is not positive.

    Examples
    --------
    >>> import torch
    >>> samples = torch.linspace(-1, 1, 10, dtype=torch.float64)[:, None]
    >>> inside, outside = affine_cost(torch.tensor([[0.0], [3.0]], dtype=torch.float64), samples, gamma=100.0)
    >>> bool(inside < outside)
    True
    """
    _check_gamma(gamma)
    samples = Statistics.from_linear_features(Phi_tilde, Phi_tilde.new_zeros(len(Phi_tilde), 0))
    return Posterior(samples, math.log(gamma)).variance_ratio(affine_features(phi_tilde))


class AffineCostSolution(NamedTuple):
    """Optimum of the programme of def:Affine_cost: x = nu @ X + e with nu summing to one."""

    cost: Float[Tensor, " r"]
    """The affine cost."""
    nu: Float[Tensor, "r m"]
    """Coefficients of the samples."""
    e: Float[Tensor, "r k"]
    """Distance vector from the affine hull."""


def affine_cost_program(x: Float[Tensor, "r k"], X: Float[Tensor, "m k"], gamma: float) -> AffineCostSolution:
    """Minimise `|nu|^2 + gamma |e|^2` subject to `X'nu + e = x` and `sum(nu) = 1`. eq:Affine_cost.

    In (nu, sqrt(gamma) e) the solution is the point of least norm on an affine subspace; an orthogonal factorisation
    of the constraints finds it without squaring their condition number.

    Parameters
    ----------
    x : Tensor of shape (r, k)
        Points.
    X : Tensor of shape (m, k)
        Samples.
    gamma : float
        Price of leaving the affine hull.

    Returns
    -------
    AffineCostSolution
        The optimum.
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
    """Compute the affine cost that each sample would have if it were not among the samples: c / (1 - c).

    The cost of new points should be compared with these values: samples have low costs only because they are part of
    the data.

    Parameters
    ----------
    cost : Tensor of shape (..., m)
        Affine cost of the samples themselves.

    Returns
    -------
    Tensor of shape (..., m)
        The leave-one-out costs.
    """
    return cost / (1 - cost).clamp_min(torch.finfo(cost.dtype).eps)


def _check_gamma(gamma: float) -> None:
    if not gamma > 0:
        raise InputError(f"gamma={gamma} must be positive: it is the price of leaving the affine hull")


def blocked_folds(X: Float[ndarray, "m d"], k: int) -> list[Int[ndarray, " r"]]:
    """Split the rows of a table into k contiguous blocks of equal size, in standardised inputs.

    The set is cut across its longest principal direction, and each part is cut again. In one dimension the blocks are
    intervals, in more dimensions cells; the outermost ones lie outside the convex hull of the rest.

    Parameters
    ----------
    X : ndarray of shape (m, d)
        The table.
    k : int
        Number of blocks.

    Returns
    -------
    list of ndarray
        Row indices of each block.

    Raises
    ------
    InputError
        If k does not lie between 2 and the number of rows.
    """
    m = len(X)
    if not 2 <= k <= m:
        raise InputError(f"k={k} blocks of {m} rows: k must lie between 2 and the number of rows")
    return _cut(_standardised(X), np.arange(m), k)


def outer_folds(X: Float[ndarray, "m d"], inner: Sequence[float]) -> list[Int[ndarray, " r"]]:
    """Select the rows farthest from the centre of a table, in standardised inputs.

    Parameters
    ----------
    X : ndarray of shape (m, d)
        The table.
    inner : sequence of float
        For each fold, the share of rows that are not selected.

    Returns
    -------
    list of ndarray
        Row indices of each fold.
    """
    order = np.argsort((_standardised(X) ** 2).sum(1), kind="stable")
    return [order[max(2, round(share * len(order))) :] for share in inner]


def _standardised(X: Float[ndarray, "m d"]) -> Float[ndarray, "m d"]:
    scale = X.std(0)
    Z: ndarray = (X - X.mean(0)) / np.where(scale > 0, scale, 1.0)
    return Z


def _cut(Z: ndarray, rows: ndarray, k: int) -> list[ndarray]:
    if k == 1:
        return [np.sort(rows)]
    part = Z[rows] - Z[rows].mean(0)
    direction = np.linalg.svd(part, full_matrices=False)[2][0]
    order = rows[np.argsort(part @ direction, kind="stable")]
    if direction[np.abs(direction).argmax()] < 0:  # the sign of a singular vector is arbitrary
        order = order[::-1]
    left = k // 2
    cut = round(len(rows) * left / k)
    return _cut(Z, order[:cut], left) + _cut(Z, order[cut:], k - left)


def held_out_lpd(
    posterior: Posterior, Phi: Float[Tensor, "r p"], T: Float[Tensor, "r q"], log_alpha: float | None = None
) -> float:
    """Compute the mean log predictive density of held-out points, joint over the outputs.

    eq:Mean_predictive_probability.

    Parameters
    ----------
    posterior : Posterior
        A posterior that was computed without these points.
    Phi : Tensor of shape (r, p)
        Affine features of the points.
    T : Tensor of shape (r, q)
        Their targets; NaN where missing.
    log_alpha : float, default None
        Another log alpha for the variance; the mean does not depend on it. None: the posterior's own.

    Returns
    -------
    float
        The LPD.
    """
    with torch.no_grad():
        own = float(posterior.log_alpha) if log_alpha is None else log_alpha
        return float(_lpd(posterior, Phi, T)(np.array([own]))[0])


def _lpd(posterior: Posterior, Phi: Tensor, T: Tensor) -> LPD:
    """LPD of validation points as a function of log alpha; terms that do not depend on it are computed once."""
    residual = (T.to(posterior.Sigma_E) - posterior.mean(Phi)).cpu().numpy()
    noise = posterior.Sigma_E.cpu().numpy()
    noise_var = np.diagonal(noise)
    std = np.sqrt(noise_var)
    correlation = noise / np.outer(std, std)  # a product of variances could underflow

    known = None if not np.isnan(residual).any() else ~np.isnan(residual)

    def lpd(log_alphas: Float[ndarray, " a"]) -> Float[ndarray, " a"]:
        ratios = posterior.variance_ratios(Phi, torch.from_numpy(log_alphas).to(posterior.Sigma_E)).cpu().numpy()
        var = (1 + (ratios if ratios.ndim > 2 else ratios[..., None])) * noise_var
        if known is None:
            return gaussian_log_prob(residual, var, correlation).mean(-1)
        # where targets are missing, outputs are independent
        each = -0.5 * (residual**2 / var + np.log(2 * np.pi * var))
        mean: ndarray = np.where(known, each, 0.0).sum(-1).mean(-1)
        return mean

    return lpd


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


class HeldOut(NamedTuple):
    """A posterior, and points that it was computed without."""

    posterior: Posterior
    """The posterior."""
    Phi: Float[Tensor, "r p"]
    """Affine features of the points."""
    T: Float[Tensor, "r q"]
    """Targets of the points."""


def tune_alpha(
    posterior: Posterior, Phi: Float[Tensor, "r p"], T: Float[Tensor, "r q"], *, n_curve: int = 201
) -> AlphaCurve:
    """Find alpha^max on validation data. alg:BLL_and_alpha.

    A curve over the whole range in which alpha matters brackets the optimum, a 1-D search refines it, and the limit
    of infinite alpha is one of the candidates. If alpha makes no difference, the posterior's own is kept.

    Parameters
    ----------
    posterior : Posterior
        A posterior that was computed without the validation points.
    Phi : Tensor of shape (r, p)
        Affine features of the validation points.
    T : Tensor of shape (r, q)
        Their targets.
    n_curve : int, default 201
        Number of points of the curve.

    Returns
    -------
    AlphaCurve
        The curve and its maximum.
    """
    return tune_alpha_on([HeldOut(posterior, Phi, T)], float(posterior.log_alpha), n_curve=n_curve)


def tune_alpha_on(folds: Sequence[HeldOut], log_alpha: float, *, n_curve: int = 201) -> AlphaCurve:
    """Find alpha^max on several folds, each with the posterior of its other rows.

    The points of all folds count as one set.

    Parameters
    ----------
    folds : sequence of HeldOut
        Posteriors and their held-out points.
    log_alpha : float
        The present log alpha, which is kept if alpha makes no difference or no other is better.
    n_curve : int, default 201
        Number of points of the curve.

    Returns
    -------
    AlphaCurve
        The curve and its maximum.
    """
    with torch.no_grad():
        lpds = [_lpd(*fold) for fold in folds]
        ranges = [posterior.alpha_range(Phi) for posterior, Phi, _ in folds]
        share = np.array([len(fold.T) for fold in folds]) / sum(len(fold.T) for fold in folds)

        lpd = lambda log_alphas: sum(w * f(log_alphas) for w, f in zip(share, lpds, strict=True))
        limits = min(first for first, _ in ranges), max(last for _, last in ranges)
        return search_alpha(lpd, limits, log_alpha, n_curve=n_curve)


def search_alpha(lpd: LPD, limits: tuple[float, float], log_alpha: float, *, n_curve: int = 201) -> AlphaCurve:
    """Maximise an LPD over log alpha: a curve, a search around its maximum, and infinity as a candidate.

    Parameters
    ----------
    lpd : callable
        Maps an array of log alphas to LPDs.
    limits : tuple of float
        First and last log alpha of the curve.
    log_alpha : float
        The present log alpha, which is kept if alpha makes no difference or no other is better.
    n_curve : int, default 201
        Number of points of the curve.

    Returns
    -------
    AlphaCurve
        The curve and its maximum.
    """
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
