"""A fitted model as a Gaussian over functions, in torch: differentiable, batched, conditioned on observations."""

import copy
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from linear_operator import to_linear_operator
from linear_operator.operators import DiagLinearOperator, KroneckerProductLinearOperator, LinearOperator
from torch import Tensor, nn

from lastlayer import formula
from lastlayer.formula.ops import TorchOps
from lastlayer.predictor.fitted import Fitted

JITTER = 1e-10
"""Added to the diagonal of every covariance, relative to the output's mean variance, because low-rank matrices have no
Cholesky factor."""

Own = TypeVar("Own", bound="LinearGaussian")


@dataclass(frozen=True)
class LinearRows:
    """Mean, design matrix of the coefficients and noise at n rows, which are points, or points times outputs."""

    mean: Float[Tensor, "*b q o"]
    H: Float[Tensor, "*b n r"]
    noise: Float[Tensor, "*b s n n"]
    """Covariance of the noise of the rows, over the squared scale."""
    point_noise: Float[Tensor, "*b q o o"]


class LinearGaussian(nn.Module):
    """mean + H e_j scale_j for column j of the function at its rows, with Gaussian coefficients e_j."""

    M: Float[Tensor, "*b s r"] | None
    """Mean of the coefficients; None: zero."""
    R: Float[Tensor, "*b s r r"] | None
    """Root of their covariance, one for all columns or one of each; None: the identity."""
    scale: Float[Tensor, " s"]
    kept: list[int]
    """Indices of the model's outputs that are kept."""

    def __init__(self, fitted: Fitted, scale: Float[Tensor, " s"]) -> None:
        super().__init__()
        self.predictor, self.n_inputs = fitted.module(), fitted.n_features_in
        self.kept = list(range(fitted.n_outputs))
        for name, value in (("M", None), ("R", None), ("scale", scale)):
            self.register_buffer(name, value)

    @property
    def n_coefficients(self) -> int:
        return self.rows(self.scale.new_zeros(1, self.n_inputs)).H.shape[-1]

    def rows(self, X: Float[Tensor, "*b q d"]) -> LinearRows:
        """Return mean, design matrix and noise at some points, before any new observation."""
        raise NotImplementedError

    def columns(self, values: Float[Tensor, "*b q o"]) -> Float[Tensor, "*b s n"]:
        """Arrange values of the outputs as those of the columns at their rows."""
        raise NotImplementedError

    def outputs(self: Own, kept: list[int]) -> Own:
        new = self.separate()
        new.kept = [self.kept[i] for i in kept]
        return new

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of distributions: () before any batched observation."""
        return torch.Size() if self.M is None else self.M.shape[:-2]

    def moments(self, X: Float[Tensor, "*b q d"]) -> tuple[Tensor, LinearOperator, Tensor]:
        """Return mean (*b, q, o), covariance of the function, ordered by point, and noise covariances (*b, q, o, o)."""
        rows = self.rows(X)
        half = self._whitened(rows.H)
        between, var = half @ half.mT, self.scale.square()
        mean = rows.mean if self.M is None else rows.mean + self._move(rows, self.M)
        n_outputs = rows.mean.shape[-1]
        if len(var) > between.shape[-3]:
            K = _jittered(between[..., 0, :, :])
            cov = KroneckerProductLinearOperator(K, DiagLinearOperator(var.expand(*K.shape[:-2], -1)))
        else:
            cov = torch.diag_embed(var * between.movedim(-3, -1)).transpose(-3, -2).flatten(-2).flatten(-3, -2)
            cov = to_linear_operator(_jittered(cov, n_outputs))
        batch, noise = mean.shape[:-2], rows.point_noise
        return mean, cov.expand(*batch, *cov.shape[-2:]), noise.expand(*batch, *noise.shape[-3:])

    def condition(
        self: Own, X: Float[Tensor, "*c n d"], Y: Float[Tensor, "*b n o"], noise: Tensor | None = None
    ) -> Own:
        rows = self.rows(X)
        residual = self.columns(Y - rows.mean) / self.scale[:, None]
        N = rows.noise if noise is None else torch.diag_embed(self.columns(noise) / self.scale.square()[:, None])
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
        eye = torch.eye(self.n_coefficients, dtype=self.scale.dtype, device=self.scale.device)
        M = torch.zeros_like(eye[:1]) if self.M is None else self.M
        R = eye[None] if self.R is None else self.R
        new = self.separate()
        new.M = M.expand(*batch_shape, *M.shape[:-2], len(self.scale), M.shape[-1])
        new.R = R.expand(*batch_shape, *R.shape)
        return new

    def draw(
        self, generator: torch.Generator | None = None, sample_shape: tuple[int, ...] = ()
    ) -> Float[Tensor, "*b s r"]:
        """Sample the coefficients of one function, or of many in leading dimensions."""
        shape = torch.Size([len(self.scale), self.n_coefficients])
        if self.M is not None and self.R is not None:
            shape = torch.broadcast_shapes(shape, self.M.shape, self.R.shape[:-1])
        e = torch.randn(*sample_shape, *shape, generator=generator, dtype=self.scale.dtype).to(self.scale)
        if self.M is None or self.R is None:
            return e
        return self.M + (self.R @ e[..., None])[..., 0]

    def function(self, X: Float[Tensor, "*b q d"], coefficients: Float[Tensor, "*c s r"]) -> Float[Tensor, "*d q o"]:
        rows = self.rows(X)
        return rows.mean + self._move(rows, coefficients)

    def functions(self, X: Float[Tensor, "*b q d"]) -> formula.Functions:
        """The function of the model for batches of points, (*b, q, ...)."""
        shape = X.shape[:-1]
        points = lambda x: x.expand(*x.shape[:-2], shape.numel(), -1).unflatten(-2, shape)
        return self.predictor.functions(X.reshape(-1, X.shape[-1])).map(points)

    def separate(self: Own) -> Own:
        """Copy the distribution; the copy shares no state with the original."""
        new = copy.copy(self)
        new._buffers = dict(self._buffers)
        new._modules = {"predictor": copy.deepcopy(self.predictor)}
        return new

    def _whitened(self, H: Float[Tensor, "*b n r"]) -> Float[Tensor, "*c s n r"]:
        """Rows whose inner products are the covariance of the function, over the squared scale."""
        H = H[..., None, :, :]
        return H if self.R is None else H @ self.R

    def _move(self, rows: LinearRows, coefficients: Float[Tensor, "*c s r"]) -> Float[Tensor, "*d q o"]:
        move = (coefficients @ rows.H.mT).mT * self.scale
        return move.reshape(*move.shape[:-2], *rows.mean.shape[-2:])


class Separable(LinearGaussian):
    """One network and independent outputs, which share the covariance between points: a column is an output."""

    ratio: Float[Tensor, " o"] | None
    """Variance of the noise over the squared scale; None if the noise depends on the input."""

    def __init__(self, fitted: Fitted) -> None:
        p = fitted.state
        super().__init__(fitted, p.roots[0].diagonal().clone())
        ratio = None if p.head is not None else (p.widening * (p.curve.log_noise - p.curve.log_slope).exp())[0, 0]
        self.register_buffer("ratio", ratio)
        self.alike = ratio is not None and bool((ratio == ratio[0]).all())

    def rows(self, X: Float[Tensor, "*b q d"]) -> LinearRows:
        function = self.functions(X)
        ((H, _),) = function.terms
        mean = function.mean[..., self.kept]
        if self.ratio is None:
            ratio = self.predictor.widening * function.parts.noise[0][..., self.kept] / self.scale.square()
        else:
            ratio = self.ratio.expand(mean.shape)
        each = torch.diag_embed((ratio[..., :1] if self.alike else ratio).mT)
        return LinearRows(mean, H, each, torch.diag_embed(ratio * self.scale.square()))

    def columns(self, values: Float[Tensor, "*b q o"]) -> Float[Tensor, "*b o q"]:
        return values.mT

    def outputs(self, kept: list[int]) -> "Separable":
        new = super().outputs(kept)
        new.scale, new.ratio = self.scale[kept], None if self.ratio is None else self.ratio[kept]
        new.M = None if self.M is None else self.M[..., kept, :]
        new.R = self.R if self.R is None or self.R.shape[-3] == 1 else self.R[..., kept, :, :]
        return new


class Dense(LinearGaussian):
    """Any other model, as the single Gaussian of `model.joint`: one column, with a row for every point and output."""

    correlation: Float[Tensor, "c o o"]

    def __init__(self, fitted: Fitted) -> None:
        noise_cov = fitted.state.noise_cov
        std = noise_cov.diagonal(dim1=-2, dim2=-1).sqrt()
        super().__init__(fitted, torch.ones_like(std[0, :1]))
        self.register_buffer("correlation", noise_cov / std[:, :, None] / std[:, None, :])

    def rows(self, X: Float[Tensor, "*b q d"]) -> LinearRows:
        function = self.functions(X)
        G = torch.stack([function.linear(j)[..., 1:] for j in self.kept], -2)
        noise = self._noise(function.parts)
        return LinearRows(
            function.mean[..., self.kept], G.flatten(-3, -2), block_diagonal(noise)[..., None, :, :], noise
        )

    def columns(self, values: Float[Tensor, "*b q o"]) -> Float[Tensor, "*b 1 qo"]:
        return values.flatten(-2)[..., None, :]

    def _noise(self, parts: formula.Components) -> Float[Tensor, "*b q o o"]:
        points = [1] * (parts.noise.dim() - 2)
        C = self.correlation.unflatten(0, (-1, *points))
        each = formula.output_cov(TorchOps, C, torch.zeros_like(parts.noise), parts.noise)
        total = self.predictor.widening * (parts.weights[..., None] * each).sum(0)
        return total[..., self.kept, :][..., self.kept]


def block_diagonal(blocks: Float[Tensor, "*b q o o"]) -> Float[Tensor, "*b qo qo"]:
    q, o = blocks.shape[-3:-1]
    full = torch.zeros(*blocks.shape[:-3], q, o, q, o, dtype=blocks.dtype, device=blocks.device)
    every = torch.arange(q, device=blocks.device)
    full[..., every, :, every, :] = blocks.movedim(-3, 0)
    return full.reshape(*blocks.shape[:-3], q * o, q * o)


def _jittered(cov: Float[Tensor, "*b n n"], n_outputs: int = 1) -> Float[Tensor, "*b n n"]:
    each = cov.diagonal(dim1=-2, dim2=-1).unflatten(-1, (-1, n_outputs))
    return cov + torch.diag_embed((JITTER * each.mean(-2, keepdim=True)).expand(each.shape).flatten(-2))
