"""Euclidean distances to the span, the affine hull and the convex hull of samples (Definitions 1 to 3)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer._internal.numbers import TINY
from lastlayer.errors import InputError, PrecisionError

HULL_TOL = 1e-6
"""Largest error of a distance to the convex hull, relative to the size of the data."""


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
    x, X : Tensor of shape (r, d), Tensor of shape (m, d)
        Points and samples.
    """
    return nearest_in_span(x, X).distance


def distance_to_affine_hull(x: Float[Tensor, "r d"], X: Float[Tensor, "m d"]) -> Float[Tensor, " r"]:
    """Compute the Euclidean distance to the combinations whose coefficients sum to one. def:Affine_hull.

    Parameters
    ----------
    x, X : Tensor of shape (r, d), Tensor of shape (m, d)
        Points and samples.
    """
    return nearest_in_affine_hull(x, X).distance


def distance_to_convex_hull(x: Float[Tensor, "r d"], X: Float[Tensor, "m d"]) -> Float[Tensor, " r"]:
    """Compute the Euclidean distance to those whose coefficients are not negative either. def:Convex_hull.

    Parameters
    ----------
    x, X : Tensor of shape (r, d), Tensor of shape (m, d)
        Points and samples.
    """
    return nearest_in_convex_hull(x, X).distance


def nearest_in_span(x: Float[Tensor, "r d"], X: Float[Tensor, "m d"]) -> Projection:
    """Find the nearest points of the span, with coefficients of least norm.

    Parameters
    ----------
    x, X : Tensor of shape (r, d), Tensor of shape (m, d)
        Points and samples.
    """
    return _projection(x, _least_norm_coefficients(x, X), X)


def nearest_in_affine_hull(x: Float[Tensor, "r d"], X: Float[Tensor, "m d"]) -> Projection:
    """Find the nearest points of the affine hull, the span around the mean, with coefficients of least norm.

    Parameters
    ----------
    x, X : Tensor of shape (r, d), Tensor of shape (m, d)
        Points and samples.
    """
    _check(x, X)
    centre = X.mean(0)
    # rows of X - centre sum to zero, and so do the least-norm coefficients
    nu = _least_norm_coefficients(x - centre, X - centre, scale=X.norm())
    return _projection(x, nu - nu.mean(-1, keepdim=True) + 1 / len(X), X)


def nearest_in_convex_hull(x: Float[Tensor, "r d"], X: Float[Tensor, "m d"]) -> Projection:
    """Find the nearest points of the convex hull; a PrecisionError if their error may exceed `HULL_TOL`.

    Parameters
    ----------
    x, X : Tensor of shape (r, d), Tensor of shape (m, d)
        Points and samples.
    """
    _check(x, X)
    X_, x_ = X.double().cpu(), x.double().cpu()
    centre = X_.mean(0)
    Z, z = X_ - centre, x_ - centre
    found = [_simplex_coefficients(point, Z.numpy()) for point in z.numpy()]
    nu = torch.from_numpy(np.reshape(found, (len(x), len(X))))
    away = z - nu @ Z
    distance = away.norm(dim=-1)
    # the plane across x - point proves a distance
    proven = ((away * z).sum(-1) - (away @ Z.mT).amax(-1)).clamp_min(0.0) / distance.clamp_min(TINY)
    size = Z.norm(dim=-1).max() + z.norm(dim=-1)
    if not bool((distance - proven <= HULL_TOL * size).all()):
        raise PrecisionError(
            f"distances to the convex hull are accurate only to {((distance - proven) / size).max():.0e} of the data's "
            "size: rescale the columns"
        )
    return _projection(x, nu.to(X), X)


def _simplex_coefficients(x: ndarray, X: ndarray) -> ndarray:
    """nu >= 0 of sum one that minimises |X'nu - x|.

    Over u = s nu, |(X - x)'u|^2 + (sum(u) - 1)^2 is s^2 |X'nu - x|^2 + (s - 1)^2: for any s, the same nu is the best.
    """
    from scipy.optimize import nnls  # type: ignore[attr-defined]  # slow to import: a quarter of torch's time

    apart = X - x
    size = np.abs(apart).max()
    A = np.vstack([apart.T / (size if size > 0 else 1.0), np.ones(len(X))])
    try:
        u = nnls(A, np.eye(len(A))[-1])[0]
    except RuntimeError as error:
        raise PrecisionError(f"no nearest point of the convex hull was found ({error}): rescale the columns") from error
    return u / u.sum()


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
