"""Euclidean distances to the span, the affine hull and the convex hull of samples (Definitions 1 to 3)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.bayes.linalg import Cholesky
from lastlayer.errors import InputError, PrecisionError


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
    """min 1/2 |X'nu - x|^2 over the simplex, batched over x, by Mehrotra's predictor-corrector method."""
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
