"""A fitted model as Gaussians that are linear in unknown coefficients, as torch: differentiable, batched, conditioned.

    f(x) = mean(x) + sum_o V_o h(x) e_o,        e_o ~ N(M_o, R_o R_o')

h(x) are a member's whitened features (see lastlayer.description). Before any new observation M = 0 and R = I, which are
not written down. V makes the outputs independent of each other, noise included, so that each is conditioned alone;
without calibration all have the same R, and the covariance is a Kronecker product. New observations of rows H = h(X),
noise N, in closed form:

    A = I + R'H' N^-1 H R,    R <- R A^-T/2,    M <- M + R R' H' N^-1 (residual - H M)       with the new R
"""

import copy
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from linear_operator import to_linear_operator
from linear_operator.operators import KroneckerProductLinearOperator, LinearOperator
from torch import Tensor, nn

from lastlayer.calibration import NoiseHead, anchored, precision_weights
from lastlayer.description import Description, MemberDescription
from lastlayer.errors import InputError
from lastlayer.linalg import TINY
from lastlayer.module import CurveModule, SpreadModule, keep_numbers

JITTER = 1e-10
"""Added to every covariance, as a share of its mean variance: a low rank has no Cholesky factor."""

Own = TypeVar("Own", bound="LinearGaussian")


@dataclass(frozen=True)
class Rows:
    """What the coefficients meet at n rows: points, or points times outputs."""

    mean: Float[Tensor, "*b q o"]
    H: Float[Tensor, "*b n r"]
    noise: Float[Tensor, "*b s n n"]
    """Covariance of the noise between rows, in each of the s coordinates of V, or once if all are alike."""


@dataclass(frozen=True)
class Moments:
    """The joint Gaussian of q points and o outputs, point by point: the first o numbers are of the first point."""

    mean: Float[Tensor, "*b q o"]
    cov: LinearOperator
    noise: Float[Tensor, "*b q o o"]
    """Of the noise at each point, not part of `cov`."""


class Member(nn.Module):
    """Mean, whitened features and variance of one network, in target units, at standardised inputs."""

    centre: Float[Tensor, " k"]
    weights: Float[Tensor, "k o"]
    offset: Float[Tensor, " o"]
    noise_cov: Float[Tensor, "o o"]

    def __init__(self, description: MemberDescription, widening: float) -> None:
        super().__init__()
        self.network, self.widening = description.network, widening
        keep_numbers(self, centre=description.centre, weights=description.weights, offset=description.offset)
        keep_numbers(self, noise_cov=description.noise_cov)
        self.spread, self.at_star = SpreadModule(description.spread), SpreadModule(description.spread_at_star)
        self.curve = CurveModule(description.curve)

    def features(self, Z: Float[Tensor, "*b q d"]) -> Float[Tensor, "*b q k"]:
        dtype = next((p.dtype for p in self.network.parameters()), Z.dtype)
        phi = self.network(Z.reshape(-1, Z.shape[-1]).to(dtype)).to(Z.dtype)
        return phi.reshape(*Z.shape[:-1], phi.shape[-1]) - self.centre

    def mean(self, phi: Float[Tensor, "*b q k"]) -> Float[Tensor, "*b q o"]:
        return phi @ self.weights + self.offset

    def rows(self, phi: Float[Tensor, "*b q k"]) -> Float[Tensor, "*b q r"]:
        """h, stretched to the calibrated variance: h h' noise_cov * slope is the variance of the function."""
        h = self.spread.rows(phi)
        if self.curve.straight:
            return h
        ratio = h.square().sum(-1)
        return h * (self.curve.shape(ratio) / ratio.clamp_min(TINY)).sqrt()[..., None]

    def var(self, phi: Float[Tensor, "*b q k"], factor: Tensor | float) -> Float[Tensor, "*b q o"]:
        """Calibrated, at alpha*, without tails: what says how much the member knows."""
        return self.noise_cov.diagonal() * (self.curve.noise * factor + self.curve(self.at_star(phi)))

    def function_cov(self) -> Float[Tensor, "o o"]:
        """Between the outputs; times h h' it is that of the function."""
        return self.widening * scaled(self.noise_cov, self.curve.slope)


class LinearGaussian(nn.Module):
    """A Gaussian over functions; `condition` gives the one after new observations, and never changes this one."""

    M: Float[Tensor, "*b s r"] | None
    R: Float[Tensor, "*b s r r"] | None
    """None, and M too: no new observation yet."""
    n_coefficients: int
    V: Float[Tensor, "o s"]
    input_mean: Float[Tensor, " d"]
    input_scale: Float[Tensor, " d"]
    kept: list[int]
    """Which of the model's outputs it is of."""

    def rows(self, X: Float[Tensor, "*b q d"]) -> Rows:
        """Before any new observation."""
        raise NotImplementedError

    def point_noise(self, X: Float[Tensor, "*b q d"]) -> Float[Tensor, "*b q o o"]:
        raise NotImplementedError

    def outputs(self: Own, kept: list[int]) -> Own:
        """Of some outputs alone."""
        raise NotImplementedError

    def _copy(self: Own) -> Own:
        new = copy.copy(self)
        new._buffers = dict(self._buffers)
        return new

    @property
    def batch_shape(self) -> torch.Size:
        return torch.Size() if self.M is None else self.M.shape[:-2]

    def moments(self, X: Float[Tensor, "*b q d"]) -> Moments:
        rows = self.rows(X)
        half = self._half(rows.H)
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
            cov = to_linear_operator(_jittered(self.V.square() * between[..., 0, :, :]))
        noise = self.point_noise(X)
        return Moments(
            mean, cov.expand(*mean.shape[:-2], *cov.shape[-2:]), noise.expand(*mean.shape[:-2], *noise.shape[-3:])
        )

    def condition(
        self: Own, X: Float[Tensor, "*c n d"], Y: Float[Tensor, "*b n o"], noise: Tensor | None = None
    ) -> Own:
        """After observations Y at X; `noise` are variances in the shape of Y, where they are known."""
        rows = self.rows(X)
        residual = self._coordinates(Y - rows.mean)
        N = rows.noise if noise is None else torch.diag_embed(self._own_noise(noise))
        root = torch.linalg.cholesky(N)
        B = torch.linalg.solve_triangular(root, self._half(rows.H), upper=False)
        eye = torch.eye(B.shape[-1], dtype=B.dtype, device=B.device)
        factor = torch.linalg.cholesky(eye + B.mT @ B)
        R = torch.linalg.solve_triangular(factor, eye if self.R is None else self.R.mT, upper=False).mT
        surprise = residual if self.M is None else residual - self.M @ rows.H.mT
        weighed = torch.cholesky_solve(surprise[..., None], root)
        move = (R @ (R.mT @ (rows.H[..., None, :, :].mT @ weighed)))[..., 0]
        new = self._copy()
        new.M, new.R = move if self.M is None else self.M + move, R
        return new

    def draw(
        self, generator: torch.Generator | None = None, sample_shape: tuple[int, ...] = ()
    ) -> Float[Tensor, "*b s r"]:
        """Coefficients of one function, or of many."""
        shape = torch.Size([self.V.shape[1], self.n_coefficients])
        if self.M is not None and self.R is not None:
            shape = torch.broadcast_shapes(shape, self.M.shape, self.R.shape[:-1])
        e = torch.randn(*sample_shape, *shape, generator=generator, dtype=self.V.dtype).to(self.V)
        if self.M is None or self.R is None:
            return e
        return self.M + (self.R @ e[..., None])[..., 0]

    def function(self, X: Float[Tensor, "*b q d"], coefficients: Float[Tensor, "*c s r"]) -> Float[Tensor, "*d q o"]:
        """The function that has these coefficients."""
        rows = self.rows(X)
        return rows.mean + self._move(rows, coefficients)

    def _start(self, n_coefficients: int) -> None:
        self.n_coefficients = n_coefficients
        self.register_buffer("M", None)
        self.register_buffer("R", None)

    def _half(self, H: Float[Tensor, "*b n r"]) -> Float[Tensor, "*b s n r"]:
        """Rows whose products are the covariance of the function."""
        H = H[..., None, :, :]
        return H if self.R is None else H @ self.R

    def _move(self, rows: Rows, coefficients: Float[Tensor, "*c s r"]) -> Float[Tensor, "*d q o"]:
        move = (coefficients @ rows.H.mT).mT @ self.V.mT
        return move.reshape(*move.shape[:-2], *rows.mean.shape[-2:])

    def _coordinates(self, residual: Float[Tensor, "*b n o"]) -> Float[Tensor, "*b s n"]:
        """Residuals in the coordinates of V, row by row."""
        if self.V.shape[0] < self.V.shape[1]:
            raise InputError(
                "some of several outputs were observed alone, but their noise is correlated: condition on all outputs, "
                "then pick some"
            )
        return torch.linalg.solve(self.V, residual.mT)

    def _own_noise(self, noise: Float[Tensor, "*b n o"]) -> Float[Tensor, "*b s n"]:
        if (self.V != torch.diag_embed(self.V.diagonal())).any():
            raise InputError("a noise of its own for each observation needs outputs whose noise is not correlated")
        return noise.mT / self.V.diagonal().square()[:, None]


class Separable(LinearGaussian):
    """One network: its outputs share the covariance between points."""

    ratio: Float[Tensor, " s"]
    """Noise over function, in the coordinates of V."""

    def __init__(self, described: Description, member: MemberDescription) -> None:
        super().__init__()
        self.member = Member(member, described.tails.widening)
        self.head = described.noise_head
        self.register_buffer("input_mean", torch.tensor(described.input_mean))
        self.register_buffer("input_scale", torch.tensor(described.input_scale))
        V, ratio = _coordinates(self.member.function_cov(), self.member.curve.slope, self.member.curve.noise)
        self.register_buffer("V", V)
        self.register_buffer("ratio", ratio)
        self.kept = list(range(len(V)))
        self.alike = self.head is None and bool((ratio == ratio[0]).all())
        self._start(self.member.spread.root.shape[1])

    def rows(self, X: Float[Tensor, "*b q d"]) -> Rows:
        Z = (X - self.input_mean) / self.input_scale
        phi = self.member.features(Z)
        ratio = self.ratio[:1] if self.alike else self.ratio
        noise = ratio[:, None] * self._factor(Z).mT[..., : len(ratio), :]
        return Rows(self.member.mean(phi)[..., self.kept], self.member.rows(phi), torch.diag_embed(noise))

    def point_noise(self, X: Float[Tensor, "*b q d"]) -> Float[Tensor, "*b q o o"]:
        each = self.ratio * self._factor((X - self.input_mean) / self.input_scale)
        return torch.einsum("as,...s,bs->...ab", self.V, each, self.V)

    def outputs(self, kept: list[int]) -> "Separable":
        new = self._copy()
        new.kept, new.V = [self.kept[i] for i in kept], self.V[kept]
        if self.V.shape[0] == self.V.shape[1] and bool((self.V == torch.diag(self.V.diagonal())).all()):
            new.V, new.ratio = new.V[:, kept], self.ratio[kept]
            new.M = None if self.M is None else self.M[..., kept, :]
            new.R = self.R if self.R is None or self.alike else self.R[..., kept, :, :]
        return new

    def _factor(self, Z: Float[Tensor, "*b q d"]) -> Float[Tensor, "*b q s"]:
        """What multiplies the noise at each input, coordinate by coordinate: with a head, these are the outputs."""
        if self.head is None:
            return torch.ones(*Z.shape[:-1], self.V.shape[1], dtype=Z.dtype, device=Z.device)
        return _factor(self.head, Z, self.member.offset.numel())[..., self.kept]


class MomentMatched(LinearGaussian):
    """A mixture of members as the one Gaussian that has its mean and covariance: that of `model.joint`.

    The coefficients are those of every member for every output, and one for how far each mean lies from the mixture's.
    """

    anchor: Float[Tensor, " o"]
    anchor_precision: Float[Tensor, " o"]

    def __init__(self, described: Description) -> None:
        super().__init__()
        self.parts = [Member(member, described.tails.widening) for member in described.members]
        self._modules_of_members = nn.ModuleList(self.parts)  # so that they move with the model
        self.head, self.sharpness = described.noise_head, described.sharpness
        self.register_buffer("input_mean", torch.tensor(described.input_mean))
        self.register_buffer("input_scale", torch.tensor(described.input_scale))
        keep_numbers(self, anchor=described.anchor, anchor_precision=described.anchor_precision)
        self.register_buffer("V", torch.ones(1, 1, dtype=torch.float64))
        self.roots = [torch.linalg.cholesky(member.function_cov()) for member in self.parts]
        self.kept = list(range(described.n_outputs))
        sizes = [member.spread.root.shape[1] * described.n_outputs for member in self.parts]
        self._start(sum(sizes) + len(sizes))

    def rows(self, X: Float[Tensor, "*b q d"]) -> Rows:
        Z, weights, means, features = self._weighed(X)
        mean = (weights[..., None] * means).sum(0)
        parts = []
        for member, phi, root, weight in zip(self.parts, features, self.roots, weights, strict=True):
            own = weight.sqrt()[..., None] * member.rows(phi)
            parts.append((own[..., None, None, :] * root[:, :, None]).flatten(-2))
        between = (weights.sqrt()[..., None] * (means - mean)).movedim(0, -1)
        G = torch.cat([*parts, between], dim=-1)[..., self.kept, :]
        noise = self._noise(Z, weights)
        blocks = torch.zeros(*G.shape[:-3], *G.shape[-3:-1], *G.shape[-3:-1], dtype=G.dtype, device=G.device)
        every = torch.arange(G.shape[-3])
        blocks[..., every, :, every, :] = noise.movedim(-3, 0)
        n = G.shape[-3] * G.shape[-2]
        return Rows(mean[..., self.kept], G.flatten(-3, -2), blocks.reshape(*G.shape[:-3], 1, n, n))

    def point_noise(self, X: Float[Tensor, "*b q d"]) -> Float[Tensor, "*b q o o"]:
        Z, weights, _, _ = self._weighed(X)
        return self._noise(Z, weights)

    def outputs(self, kept: list[int]) -> "MomentMatched":
        new = self._copy()
        new.kept = [self.kept[i] for i in kept]
        return new

    def _weighed(self, X: Tensor) -> tuple[Tensor, Float[Tensor, "c *b q"], Float[Tensor, "c *b q o"], list[Tensor]]:
        """Standardised inputs; what each member counts, its mean and its features."""
        Z = (X - self.input_mean) / self.input_scale
        features = [member.features(Z) for member in self.parts]
        means = torch.stack([member.mean(phi) for member, phi in zip(self.parts, features, strict=True)])
        if not self.sharpness:
            return Z, torch.full((len(features), *Z.shape[:-1]), 1 / len(features), dtype=Z.dtype), means, features
        o = self.parts[0].offset.numel()
        factor = _factor(self.head, Z, o)
        var = torch.stack([member.var(phi, factor) for member, phi in zip(self.parts, features, strict=True)])
        weights = precision_weights(var.log().reshape(len(features), -1, o)).reshape(len(features), *Z.shape[:-1])
        return Z, weights, anchored(means, var, self.anchor, self.anchor_precision), features

    def _noise(self, Z: Tensor, weights: Tensor) -> Float[Tensor, "*b q o o"]:
        factor = _factor(self.head, Z, self.parts[0].offset.numel())
        total = torch.zeros((), dtype=Z.dtype)
        for member, weight in zip(self.parts, weights, strict=True):
            root = (member.widening * member.curve.noise * factor).sqrt()
            total = total + weight[..., None, None] * root[..., :, None] * member.noise_cov * root[..., None, :]
        return total[..., self.kept, :][..., self.kept]

    def _coordinates(self, residual: Float[Tensor, "*b n o"]) -> Float[Tensor, "*b 1 no"]:
        return residual.flatten(-2)[..., None, :]

    def _own_noise(self, noise: Float[Tensor, "*b n o"]) -> Float[Tensor, "*b 1 no"]:
        return noise.flatten(-2)[..., None, :]


def gaussian(described: Description) -> LinearGaussian:
    """Of one network, or of all with their moments matched."""
    if len(described.members) == 1:
        return Separable(described, described.members[0])
    return MomentMatched(described)


def scaled(cov: Float[Tensor, "o o"], factor: Float[Tensor, " o"]) -> Float[Tensor, "o o"]:
    """A variance times `factor` for each output, the correlation kept."""
    root = factor.sqrt()
    return root[:, None] * cov * root


def _factor(head: NoiseHead | None, Z: Float[Tensor, "*b q d"], n_outputs: int) -> Float[Tensor, "*b q o"]:
    """What multiplies the noise at each input."""
    if head is None:
        return torch.ones(*Z.shape[:-1], n_outputs, dtype=Z.dtype, device=Z.device)
    log_factor = head.log_factor(Z.reshape(-1, Z.shape[-1]))
    return log_factor.exp().reshape(*Z.shape[:-1], n_outputs)


def _coordinates(
    function_cov: Float[Tensor, "o o"], slope: Float[Tensor, " o"], noise: Float[Tensor, " o"]
) -> tuple[Float[Tensor, "o o"], Float[Tensor, " o"]]:
    """V and ratio: function_cov = V V', and the covariance of the noise is V diag(ratio) V'."""
    ratio = noise / slope
    if bool((function_cov == torch.diag(function_cov.diagonal())).all()):
        return torch.diag(function_cov.diagonal().sqrt()), ratio
    L = torch.linalg.cholesky(function_cov)
    if bool((ratio == ratio[0]).all()):
        return L, ratio
    half = torch.linalg.solve_triangular(L, scaled(function_cov, ratio), upper=False)
    values, U = torch.linalg.eigh(torch.linalg.solve_triangular(L, half.mT, upper=False))
    return L @ U, values


def _jittered(cov: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    each = cov.diagonal(dim1=-2, dim2=-1)
    return cov + torch.diag_embed(JITTER * each.mean(-1, keepdim=True).expand(each.shape))
