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
    noise: Float[Tensor, "*b q o o"]
    """Covariance of the noise at each point."""


class LinearGaussian(nn.Module):
    """mean + H e_j scale_j for column j of the function at its rows, with Gaussian coefficients e_j."""

    M: Float[Tensor, "*b s r"]
    """Mean of the coefficients; b is () before any batched observation."""
    R: Float[Tensor, "*b s r r"] | None
    """Root of their covariance, one for all columns or one of each; None: the identity."""
    scale: Float[Tensor, " s"]
    kept: list[int]
    """Indices of the model's outputs that are kept."""

    def __init__(self, fitted: Fitted, scale: Float[Tensor, " s"], **buffers: Tensor) -> None:
        super().__init__()
        self.predictor, self.kept = fitted.module(), list(range(fitted.n_outputs))
        for name, value in {"R": None, "scale": scale, **buffers}.items():
            self.register_buffer(name, value)
        H = self.rows(scale.new_zeros(1, fitted.n_features_in)).H
        self.register_buffer("M", H.new_zeros(len(scale), H.shape[-1]))

    def rows(self, X: Float[Tensor, "*b q d"]) -> LinearRows:
        """Return mean, design matrix and noise at some points, before any new observation."""
        raise NotImplementedError

    def columns(self, values: Float[Tensor, "*b q o"]) -> Float[Tensor, "*b s n"]:
        """Arrange values of the outputs as those of the columns at their rows."""
        raise NotImplementedError

    def row_noise(self, noise: Float[Tensor, "*b q o o"], *, learned: bool) -> Float[Tensor, "*b s n n"]:
        """Covariance of the noise of the rows, over the squared scale."""
        raise NotImplementedError

    def outputs(self: Own, kept: list[int]) -> Own:
        new = self.separate()
        new.kept = [self.kept[i] for i in kept]
        return new

    def moments(self, X: Float[Tensor, "*b q d"]) -> tuple[Tensor, LinearOperator, Tensor]:
        """Return mean (*b, q, o), covariance of the function, ordered by point, and noise covariances (*b, q, o, o)."""
        rows = self.rows(X)
        half = self._whitened(rows.H)
        between, var = half @ half.mT, self.scale.square()
        mean = rows.mean + self._move(rows, self.M)
        n_outputs = rows.mean.shape[-1]
        if len(var) > between.shape[-3]:
            K = _jittered(between[..., 0, :, :])
            cov = KroneckerProductLinearOperator(K, DiagLinearOperator(var.expand(*K.shape[:-2], -1)))
        else:
            cov = torch.diag_embed(var * between.movedim(-3, -1)).transpose(-3, -2).flatten(-2).flatten(-3, -2)
            cov = to_linear_operator(_jittered(cov, n_outputs))
        batch = mean.shape[:-2]
        return mean, cov.expand(*batch, *cov.shape[-2:]), rows.noise.expand(*batch, *rows.noise.shape[-3:])

    def condition(
        self: Own, X: Float[Tensor, "*c n d"], Y: Float[Tensor, "*b n o"], noise: Tensor | None = None
    ) -> Own:
        rows = self.rows(X)
        residual = self.columns(Y - rows.mean) / self.scale[:, None]
        blocks = rows.noise if noise is None else torch.diag_embed(noise)
        root = torch.linalg.cholesky(self.row_noise(blocks, learned=noise is None))
        B = torch.linalg.solve_triangular(root, self._whitened(rows.H), upper=False)
        eye = torch.eye(B.shape[-1], dtype=B.dtype, device=B.device)
        factor = torch.linalg.cholesky(eye + B.mT @ B)
        R = torch.linalg.solve_triangular(factor, eye if self.R is None else self.R.mT, upper=False).mT
        weighed = torch.cholesky_solve((residual - self.M @ rows.H.mT)[..., None], root)
        move = (R @ (R.mT @ (rows.H[..., None, :, :].mT @ weighed)))[..., 0]
        new = self.separate()
        new.M, new.R = self.M + move, R
        return new

    def repeated(self: Own, batch_shape: torch.Size) -> Own:
        R = torch.eye(self.M.shape[-1]).to(self.M)[None] if self.R is None else self.R
        new = self.separate()
        new.M = self.M.expand(*batch_shape, *self.M.shape)
        new.R = R.expand(*batch_shape, *R.shape)
        return new

    def draw(
        self, generator: torch.Generator | None = None, sample_shape: tuple[int, ...] = ()
    ) -> Float[Tensor, "*b s r"]:
        """Sample the coefficients of one function, or of many in leading dimensions."""
        shape = self.M.shape if self.R is None else torch.broadcast_shapes(self.M.shape, self.R.shape[:-1])
        e = torch.randn(*sample_shape, *shape, generator=generator, dtype=self.M.dtype).to(self.M)
        return self.M + (e if self.R is None else (self.R @ e[..., None])[..., 0])

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

    alike: bool
    """Whether the learned noise over the squared scale is the same for all outputs."""

    def __init__(self, fitted: Fitted) -> None:
        p = fitted.state
        super().__init__(fitted, p.roots[0].diagonal().clone())
        log_ratio = (p.curve.log_noise - p.curve.log_slope).flatten()
        self.alike = p.head is None and bool((log_ratio == log_ratio[0]).all())

    def rows(self, X: Float[Tensor, "*b q d"]) -> LinearRows:
        function = self.functions(X)
        ((H, _),) = function.terms
        mean = function.mean[..., self.kept]
        noise = self.predictor.widening * function.parts.noise[0][..., self.kept]
        return LinearRows(mean, H, torch.diag_embed(noise.expand(mean.shape)))

    def columns(self, values: Float[Tensor, "*b q o"]) -> Float[Tensor, "*b o q"]:
        return values.mT

    def row_noise(self, noise: Float[Tensor, "*b q o o"], *, learned: bool) -> Float[Tensor, "*b s n n"]:
        ratio = noise.diagonal(dim1=-2, dim2=-1) / self.scale.square()
        return torch.diag_embed((ratio[..., :1] if learned and self.alike else ratio).mT)

    def outputs(self, kept: list[int]) -> "Separable":
        new = super().outputs(kept)
        new.scale, new.M = self.scale[kept], self.M[..., kept, :]
        new.R = self.R if self.R is None or self.R.shape[-3] == 1 else self.R[..., kept, :, :]
        return new


class Dense(LinearGaussian):
    """Any other model, as the single Gaussian of `model.joint`: one column, with a row for every point and output."""

    correlation: Float[Tensor, "c o o"]

    def __init__(self, fitted: Fitted) -> None:
        noise_cov = fitted.state.noise_cov
        std = noise_cov.diagonal(dim1=-2, dim2=-1).sqrt()
        correlation = noise_cov / std[:, :, None] / std[:, None, :]
        super().__init__(fitted, torch.ones_like(std[0, :1]), correlation=correlation)

    def rows(self, X: Float[Tensor, "*b q d"]) -> LinearRows:
        function = self.functions(X)
        G = torch.stack([function.linear(j)[..., 1:] for j in self.kept], -2)
        return LinearRows(function.mean[..., self.kept], G.flatten(-3, -2), self._noise(function.parts))

    def columns(self, values: Float[Tensor, "*b q o"]) -> Float[Tensor, "*b 1 qo"]:
        return values.flatten(-2)[..., None, :]

    def row_noise(self, noise: Float[Tensor, "*b q o o"], *, learned: bool) -> Float[Tensor, "*b 1 n n"]:
        return block_diagonal(noise)[..., None, :, :]

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
