"""A fitted model as Gaussians, linear in random coefficients, in torch: differentiable, batched, conditioned."""

import copy
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from linear_operator import to_linear_operator
from linear_operator.operators import KroneckerProductLinearOperator, LinearOperator
from torch import Tensor, nn

from lastlayer import formula
from lastlayer.errors import InputError
from lastlayer.formula.ops import TorchOps
from lastlayer.predictor.fitted import Fitted

JITTER = 1e-10
"""Added to the diagonal of every covariance, relative to its mean variance, because low-rank matrices have no Cholesky
factor."""

Own = TypeVar("Own", bound="LinearGaussian")


@dataclass(frozen=True)
class LinearRows:
    """Mean, coefficients' design matrix and noise at n rows: points, or points times outputs."""

    mean: Float[Tensor, "*b q o"]
    H: Float[Tensor, "*b n r"]
    noise: Float[Tensor, "*b s n n"]
    point_noise: Float[Tensor, "*b q o o"]


@dataclass(frozen=True)
class JointMoments:
    """Joint Gaussian of q points and o outputs, ordered by point: the first o entries belong to the first point."""

    mean: Float[Tensor, "*b q o"]
    cov: LinearOperator
    noise: Float[Tensor, "*b q o o"]


class LinearGaussian(nn.Module):
    """A Gaussian distribution over functions; `condition` returns the one after new observations."""

    M: Float[Tensor, "*b s r"] | None
    R: Float[Tensor, "*b s r r"] | None
    """None, like M, before any new observation."""
    n_coefficients: int
    V: Float[Tensor, "o s"]
    kept: list[int]
    """Indices of the model's outputs that are kept."""

    def __init__(self, fitted: Fitted) -> None:
        super().__init__()
        self.predictor = fitted.module()
        self.kept = list(range(fitted.n_outputs))
        self.register_buffer("M", None)
        self.register_buffer("R", None)

    def rows(self, X: Float[Tensor, "*b q d"]) -> LinearRows:
        """Return mean, design matrix and noise at some points, before any new observation."""
        raise NotImplementedError

    def outputs(self: Own, kept: list[int]) -> Own:
        """Select outputs."""
        raise NotImplementedError

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of distributions: () before any batched observation."""
        return torch.Size() if self.M is None else self.M.shape[:-2]

    def moments(self, X: Float[Tensor, "*b q d"]) -> JointMoments:
        """Return the joint distribution at some points."""
        rows = self.rows(X)
        half = self._whitened(rows.H)
        between = half @ half.mT
        mean = rows.mean if self.M is None else rows.mean + self._move(rows, self.M)
        if between.shape[-3] > 1:
            o, n = self.V.shape[0], between.shape[-1]
            cov = torch.einsum("as,...sij,bs->...iajb", self.V, between, self.V)
            cov = to_linear_operator(_jittered(cov.reshape(*cov.shape[:-4], n * o, n * o)))
        elif self.V.shape[0] > 1:
            K = _jittered(between[..., 0, :, :])
            outputs = self.V @ self.V.mT
            cov = KroneckerProductLinearOperator(K, outputs.expand(*K.shape[:-2], *outputs.shape))
        else:
            cov = to_linear_operator(_jittered(self.V.square().sum() * between[..., 0, :, :]))
        batch, noise = mean.shape[:-2], rows.point_noise
        return JointMoments(mean, cov.expand(*batch, *cov.shape[-2:]), noise.expand(*batch, *noise.shape[-3:]))

    def condition(
        self: Own, X: Float[Tensor, "*c n d"], Y: Float[Tensor, "*b n o"], noise: Tensor | None = None
    ) -> Own:
        """Condition on observations, and return the new distribution."""
        rows = self.rows(X)
        residual = self._coordinates(Y - rows.mean)
        N = rows.noise if noise is None else torch.diag_embed(self._own_noise(noise))
        root = torch.linalg.cholesky(N)
        B = torch.linalg.solve_triangular(root, self._whitened(rows.H), upper=False)
        eye = torch.eye(B.shape[-1], dtype=B.dtype, device=B.device)
        factor = torch.linalg.cholesky(eye + B.mT @ B)
        R = torch.linalg.solve_triangular(factor, eye if self.R is None else self.R.mT, upper=False).mT
        surprise = residual if self.M is None else residual - self.M @ rows.H.mT
        weighed = torch.cholesky_solve(surprise[..., None], root)
        move = (R @ (R.mT @ (rows.H[..., None, :, :].mT @ weighed)))[..., 0]
        new = self.separate()
        new.M, new.R = move if self.M is None else self.M + move, R
        return new

    def repeated(self: Own, batch_shape: torch.Size) -> Own:
        """Repeat the distribution over a batch shape."""
        eye = torch.eye(self.n_coefficients, dtype=self.V.dtype, device=self.V.device)
        M = torch.zeros_like(eye[:1]) if self.M is None else self.M
        R = eye[None] if self.R is None else self.R
        new = self.separate()
        new.M = M.expand(*batch_shape, *torch.broadcast_shapes(M.shape[:-1], (self.V.shape[1],)), M.shape[-1])
        new.R = R.expand(*batch_shape, *R.shape)
        return new

    def draw(
        self, generator: torch.Generator | None = None, sample_shape: tuple[int, ...] = ()
    ) -> Float[Tensor, "*b s r"]:
        """Sample the coefficients of one function, or of many in leading dimensions."""
        shape = torch.Size([self.V.shape[1], self.n_coefficients])
        if self.M is not None and self.R is not None:
            shape = torch.broadcast_shapes(shape, self.M.shape, self.R.shape[:-1])
        e = torch.randn(*sample_shape, *shape, generator=generator, dtype=self.V.dtype).to(self.V)
        if self.M is None or self.R is None:
            return e
        return self.M + (self.R @ e[..., None])[..., 0]

    def function(self, X: Float[Tensor, "*b q d"], coefficients: Float[Tensor, "*c s r"]) -> Float[Tensor, "*d q o"]:
        """Evaluate the function with the given coefficients."""
        rows = self.rows(X)
        return rows.mean + self._move(rows, coefficients)

    def _said(self, X: Float[Tensor, "*b q d"]) -> tuple[formula.Components, list[Float[Tensor, "*b q r"]]]:
        """Components of the mixture for batches of points, (c, *b, q, ...), and the rows of each member."""
        parts, rows = self.predictor.stretched(X.reshape(-1, X.shape[-1]))
        m = X.shape[:-1].numel()
        shaped = (x.expand(len(x), m, x.shape[-1]).reshape(len(x), *X.shape[:-1], -1) for x in vars(parts).values())
        return formula.Components(*shaped), [H.reshape(*X.shape[:-1], -1) for (H,) in rows]

    def separate(self: Own) -> Own:
        """Copy the distribution; the copy shares no state with the original."""
        new = copy.copy(self)
        new._buffers = dict(self._buffers)
        new._modules = {"predictor": copy.deepcopy(self.predictor)}
        return new

    def _whitened(self, H: Float[Tensor, "*b n r"]) -> Float[Tensor, "*c s n r"]:
        """Rows whose inner products are the covariance of the function."""
        H = H[..., None, :, :]
        return H if self.R is None else H @ self.R

    def _move(self, rows: LinearRows, coefficients: Float[Tensor, "*c s r"]) -> Float[Tensor, "*d q o"]:
        move = (coefficients @ rows.H.mT).mT @ self.V.mT
        return move.reshape(*move.shape[:-2], *rows.mean.shape[-2:])

    def _coordinates(self, residual: Float[Tensor, "*b n o"]) -> Float[Tensor, "*b s n"]:
        """Residuals in the coordinates of V, row by row."""
        if self.V.shape[0] < self.V.shape[1]:
            raise InputError(
                "only some of the outputs were observed, but their noise is correlated: condition on all outputs, "
                "then select some"
            )
        return torch.linalg.solve(self.V, residual.mT)

    def _own_noise(self, noise: Float[Tensor, "*b n o"]) -> Float[Tensor, "*b s n"]:
        if not _is_diagonal(self.V):
            raise InputError("noise variances for each observation need outputs whose noise is not correlated")
        return noise.mT / self.V.diagonal().square()[:, None]


class Separable(LinearGaussian):
    """One network, whose outputs share the covariance between points."""

    ratio: Float[Tensor, " s"]
    """Noise variance over function variance in the coordinates of V; if it depends on the input, its typical value."""

    def __init__(self, fitted: Fitted) -> None:
        super().__init__(fitted)
        p = self.predictor
        noise = (p.widening * (p.curve.log_noise - p.curve.log_slope).exp())[0, 0]
        V, ratio = _output_coordinates(p.function_cov[0], noise)
        self.register_buffer("V", V)
        self.register_buffer("ratio", ratio)
        self.alike = p.head is None and bool((ratio == ratio[0]).all())
        self.n_coefficients = p.groups()[0].root.shape[-1]

    def rows(self, X: Float[Tensor, "*b q d"]) -> LinearRows:
        """Return mean, design matrix and noise at some points, before any new observation."""
        parts, (H,) = self._said(X)
        noise = self._noise(parts)
        at_points = torch.einsum("as,...s,bs->...ab", self.V, noise, self.V)
        each = torch.diag_embed((noise[..., :1] if self.alike else noise).mT)
        return LinearRows(parts.mean[0][..., self.kept], H, each, at_points)

    def outputs(self, kept: list[int]) -> "Separable":
        """Select outputs."""
        new = self.separate()
        new.kept, new.V = [self.kept[i] for i in kept], self.V[kept]
        if self.V.shape[0] == self.V.shape[1] and _is_diagonal(self.V):
            new.V, new.ratio = new.V[:, kept], self.ratio[kept]
            new.M = None if self.M is None else self.M[..., kept, :]
            new.R = self.R if self.R is None or self.alike else self.R[..., kept, :, :]
        return new

    def _noise(self, parts: formula.Components) -> Float[Tensor, "*b q s"]:
        """Noise over function variance at each point; where it varies, the coordinates of V are the outputs."""
        if self.predictor.head is None:
            return self.ratio.expand(*parts.mean.shape[1:-1], -1)
        return self.predictor.widening * parts.noise[0][..., self.kept] / self.V.diagonal().square()


class MomentMatched(LinearGaussian):
    """A mixture of members as the single Gaussian with its mean and covariance, as in `model.joint`."""

    roots: Float[Tensor, "c o o"]
    correlation: Float[Tensor, "c o o"]

    def __init__(self, fitted: Fitted) -> None:
        super().__init__(fitted)
        p, q = self.predictor, fitted.n_outputs
        std = p.noise_cov.diagonal(dim1=-2, dim2=-1).sqrt()
        self.register_buffer("V", torch.ones(1, 1, dtype=torch.float64, device=p.noise_cov.device))
        self.register_buffer("roots", torch.linalg.cholesky(p.function_cov))
        self.register_buffer("correlation", p.noise_cov / std[:, :, None] / std[:, None, :])
        widths = [layer.root.shape[-1] for layer in p.groups() for _ in layer.group.places]
        self.n_coefficients = q * sum(widths) + len(widths)

    def rows(self, X: Float[Tensor, "*b q d"]) -> LinearRows:
        """Return mean, design matrix and noise at some points, before any new observation."""
        parts, rows = self._said(X)
        mean = (parts.weights * parts.mean).sum(0)
        columns = [
            ((weight.sqrt() * H)[..., None, None, :] * root[:, :, None]).flatten(-2)
            for H, root, weight in zip(rows, self.roots, parts.weights, strict=True)
        ]
        between = (parts.weights.sqrt() * (parts.mean - mean)).movedim(0, -1)
        G = torch.cat([*columns, between], dim=-1)[..., self.kept, :]
        noise = self._noise(parts)
        return LinearRows(mean[..., self.kept], G.flatten(-3, -2), block_diagonal(noise)[..., None, :, :], noise)

    def outputs(self, kept: list[int]) -> "MomentMatched":
        """Select outputs."""
        new = self.separate()
        new.kept = [self.kept[i] for i in kept]
        return new

    def _noise(self, parts: formula.Components) -> Float[Tensor, "*b q o o"]:
        points = [1] * (parts.noise.dim() - 2)
        C = self.correlation.reshape(len(self.correlation), *points, *self.correlation.shape[-2:])
        each = formula.output_cov(TorchOps, C, torch.zeros_like(parts.noise), parts.noise)
        total = self.predictor.widening * (parts.weights[..., None] * each).sum(0)
        return total[..., self.kept, :][..., self.kept]

    def _coordinates(self, residual: Float[Tensor, "*b n o"]) -> Float[Tensor, "*b 1 no"]:
        return residual.flatten(-2)[..., None, :]

    def _own_noise(self, noise: Float[Tensor, "*b n o"]) -> Float[Tensor, "*b 1 no"]:
        return noise.flatten(-2)[..., None, :]


def block_diagonal(blocks: Float[Tensor, "*b q o o"]) -> Float[Tensor, "*b qo qo"]:
    """Build a block-diagonal matrix with one block per point."""
    q, o = blocks.shape[-3:-1]
    full = torch.zeros(*blocks.shape[:-3], q, o, q, o, dtype=blocks.dtype, device=blocks.device)
    every = torch.arange(q, device=blocks.device)
    full[..., every, :, every, :] = blocks.movedim(-3, 0)
    return full.reshape(*blocks.shape[:-3], q * o, q * o)


def _output_coordinates(
    function_cov: Float[Tensor, "o o"], ratio: Float[Tensor, " o"]
) -> tuple[Float[Tensor, "o o"], Float[Tensor, " o"]]:
    """V and ratio such that function_cov = V V' and the noise covariance is V diag(ratio) V'."""
    if _is_diagonal(function_cov):
        return torch.diag(function_cov.diagonal().sqrt()), ratio
    L = torch.linalg.cholesky(function_cov)
    if bool((ratio == ratio[0]).all()):
        return L, ratio
    root = ratio.sqrt()
    half = torch.linalg.solve_triangular(L, root[:, None] * function_cov * root, upper=False)
    values, U = torch.linalg.eigh(torch.linalg.solve_triangular(L, half.mT, upper=False))
    return L @ U, values


def _is_diagonal(A: Float[Tensor, "o s"]) -> bool:
    return A.shape[0] == A.shape[1] and bool((A == torch.diag(A.diagonal())).all())


def _jittered(cov: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    each = cov.diagonal(dim1=-2, dim2=-1)
    return cov + torch.diag_embed(JITTER * each.mean(-1, keepdim=True).expand(each.shape))
