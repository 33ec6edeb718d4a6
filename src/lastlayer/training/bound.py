"""A bound with a fixed last layer: one loss per sample, so that rows can be processed in any number of parts."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer._internal.numbers import LOG_2PI, TINY
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.precision import Cholesky, NormalEquations, noise_covariance
from lastlayer.bayes.statistics import Statistics
from lastlayer.settings.types import BiasPrior, NoiseStructure


@dataclass(frozen=True)
class BoundTerms:
    """Contribution of some rows to the bound."""

    loss: Float[Tensor, "*b"]
    """Their share of 1/m sum_i w_i l_i."""
    gradient: Float[Tensor, "*b r k"]
    """Gradient of that loss in the linear features: pass it to `features.backward`."""
    residual: Float[Tensor, "*b r q"]


@dataclass(frozen=True)
class FrozenLayer:
    """W, Lambda_0 and Sigma_E at the time they were computed; leading dimensions index networks of a stack."""

    weights: Float[Tensor, "*b p q"]
    """W, with the bias in its last row."""
    centre: Float[Tensor, "*b k1"]
    """Mean of the linear features under the flat prior; unused under the shared one."""
    inverse: Float[Tensor, "*b k k"]
    """A^-1: Lambda_0^-1 after elimination of the bias (see `precision`)."""
    noise_cov: Float[Tensor, "*b q q"]
    """Sigma_E."""
    noise_precision: Float[Tensor, "*b q q"]
    """Its inverse."""
    ridge: Float[Tensor, "*b"]
    """alpha^-1."""
    logdet: Float[Tensor, "*b"]
    """log det Lambda_0."""
    count: Float[Tensor, "*b"]
    """Total weight of the rows."""
    size: Float[Tensor, "*b"]
    """Size of the weights in units of the noise, tr Sigma_E^-1 W~'W~."""
    effective: Float[Tensor, "*b"]
    """Number of features that the data determine, k - alpha^-1 tr_k Lambda_0^-1."""
    bias_prior: BiasPrior
    """Prior of the bias."""

    @classmethod
    def of(
        cls,
        statistics: Statistics,
        log_alpha: float | Float[Tensor, "*b"],
        *,
        noise: NoiseStructure = "diagonal",
        bias_prior: BiasPrior = "flat",
        noise_cov: Float[Tensor, "*b q q"] | None = None,
        logdet_from: "FrozenLayer | None" = None,
        seen: float = 1.0,
    ) -> "FrozenLayer":
        """Compute the last layer at which the bound equals the evidence of these statistics.

        Parameters
        ----------
        statistics, log_alpha : Statistics, float or Tensor
            Moments of the rows, and log alpha.
        noise, bias_prior : str
            Structure of the noise, and prior of the bias.
        noise_cov : Tensor, optional
            Sigma_E. None: that of the largest evidence.
        logdet_from : FrozenLayer, optional
            Layer whose Lambda_0 is kept; W and Sigma_E alone are new: still a bound, for less work.
        seen : float, default 1
            Share of the rows that the statistics come from, although they stand for all: W is the posterior mean given
            that fraction, since the prior has more weight against fewer rows.
        """
        equations = NormalEquations.of(statistics, bias_prior)
        mean = equations.at(log_alpha + math.log(seen))
        assert isinstance(mean.factor, Cholesky)
        if (Sigma_E := noise_cov) is None:
            # moments cannot resolve residuals below about 1e-6 of the targets' standard deviation
            S = equations.targets - equations.cross.mT @ mean.penalised_weights
            Sigma_E = noise_covariance((S + S.mT) / 2, equations, noise)[0]
        failed = 0 * mean.logdet()[..., None, None]  # nan where the factorisation failed
        if logdet_from is None:
            precision = mean if seen == 1.0 else equations.at(log_alpha)
            assert isinstance(precision.factor, Cholesky)
            centre, logdet = equations.feature_mean, precision.logdet()
            inverse = precision.factor.inverse()
        else:
            centre, logdet, inverse = logdet_from.centre, logdet_from.logdet, logdet_from.inverse
        W, precision_E, ridge = mean.penalised_weights, Cholesky.of(Sigma_E).inverse(), equations.ridge(log_alpha)
        return cls(
            weights=mean.weights + failed,
            centre=centre,
            inverse=inverse,
            noise_cov=Sigma_E,
            noise_precision=precision_E,
            ridge=ridge,
            logdet=logdet,
            count=statistics.count,
            size=(W @ precision_E * W).sum((-2, -1)),
            effective=W.shape[-2] - ridge * torch.linalg.diagonal(inverse).sum(-1),
            bias_prior=bias_prior,
        )

    @property
    def offset(self) -> Float[Tensor, "*b"]:
        """The part of the bound that does not depend on the rows."""
        k, q, free = self.inverse.shape[-1], self.weights.shape[-1], int(self.bias_prior == "flat")
        n = self.count - free
        prior = q * (n * LOG_2PI - k * self.ridge.log() + self.logdet - free - self.effective) + self.ridge * self.size
        return (prior + n * self.noise_cov.logdet()) / (2 * self.count)

    @property
    def nlml(self) -> Float[Tensor, "*b"]:
        """NLML per sample of the statistics that the layer came from, unless the noise was raised to its floor."""
        k, q, n = self.inverse.shape[-1], self.weights.shape[-1], self.count - int(self.bias_prior == "flat")
        total = q * (n * (LOG_2PI + 1) - k * self.ridge.log() + self.logdet) + n * self.noise_cov.logdet()
        return total / (2 * self.count)

    @property
    def log_alpha_slope(self) -> Float[Tensor, "*b"]:
        """Derivative of the bound in log alpha."""
        return (self.weights.shape[-1] * self.effective - self.ridge * self.size) / (2 * self.count)

    def next_log_alpha(self, log_alpha: Float[Tensor, "*s"], *, by_output: bool = False) -> Float[Tensor, "*s"]:
        """Move log alpha towards MacKay's fixed point by at most one unit.

        It is the log of tr(Sigma_E^-1 W~'W~) / (q (k - alpha^-1 tr_k Lambda_0^-1)), and log alpha itself where the
        slope of the bound is zero.

        Parameters
        ----------
        log_alpha : Tensor
            The present log alpha.
        by_output : bool, default False
            Whether all models along the last dimension of the layer share it.
        """
        size, effective = self.size, self.weights.shape[-1] * self.effective
        if by_output:
            size, effective = size.sum(-1), effective.sum(-1)
        move = (size.clamp_min(TINY) / effective.clamp_min(TINY)).log() - log_alpha
        return log_alpha + torch.where(torch.isfinite(move), move.clamp(-1.0, 1.0), 0.0)

    def rows(
        self,
        phi_tilde: Float[Tensor, "*b r k1"],
        T: Float[Tensor, "*#b r q"],
        weight: Float[Tensor, "*#b r"] | None = None,
        *,
        scale: float = 1.0,
        logdet_rows: int | None = None,
        logdet_scale: float = 1.0,
    ) -> BoundTerms:
        """Loss and gradient of some rows, each of which stands for `scale` rows.

        The log-determinant term costs k^2 per row, in float64. Residuals are computed in the type of T.

        Parameters
        ----------
        phi_tilde, T, weight : Tensor of shape (r, k), (r, q), (r,)
            Linear features, targets and weights.
        scale : float, default 1
            Rows that each row stands for.
        logdet_rows, logdet_scale : int, float
            Number of rows for the log-determinant, and of rows that each of them stands for.
        """
        k, r = phi_tilde.shape[-2:][::-1]
        q = self.weights.shape[-1]
        W = self.weights.to(T.dtype)
        residual = T - phi_tilde.to(T.dtype) @ W[..., :k, :] - W[..., k:, :]
        share = (scale / self.count)[..., None]
        share = share.expand(*share.shape[:-1], r) if weight is None else share * weight
        pull = residual @ self.noise_precision.to(T.dtype) * share[..., None].to(T.dtype)
        fit = (residual * pull).sum((-2, -1)).double()
        gradient = -(pull * W[..., :k, :].mT if q == 1 else pull @ W[..., :k, :].mT).to(phi_tilde.dtype)
        n = r if logdet_rows is None else min(logdet_rows, r)
        z = phi_tilde[..., :n, :].double()
        z = z - self.centre[..., None, :] if self.bias_prior == "flat" else affine_features(z)
        H, each = z @ self.inverse, share[..., :n] * (q * logdet_scale)
        ratio = (z * H).sum(-1) + int(self.bias_prior == "flat") / self.count[..., None]
        gradient[..., :n, :] += (each[..., None] * H[..., :k]).to(gradient.dtype)
        return BoundTerms((fit + (each * ratio).sum(-1)) / 2, gradient, residual)

    def gradient_map(
        self, centre: Float[Tensor, "*b c"], columns: int, scale: float | Float[Tensor, "*b"] = 1.0
    ) -> Float[Tensor, "*b c1 h"]:
        """Compute the matrix that maps rows [phi_tilde - x, t - y, 1] to the gradient of their own loss.

        It is that of `rows` for rows of weight one, as a single product.

        Parameters
        ----------
        centre : Tensor of shape (k + q,)
            [x, y].
        columns : int
            Number of leading features in which the gradient is taken.
        scale : float or Tensor, default 1
            Rows that each row stands for.
        """
        q, share = self.weights.shape[-1], (scale / self.count)[..., None, None]
        k = centre.shape[-1] - q
        W, b = self.weights[..., :k, :], self.weights[..., k:, :]
        x, y = centre[..., None, :k], centre[..., None, k:]
        pull = share * (self.noise_precision @ W[..., :columns, :].mT)
        inverse = (q * share) * self.inverse[..., :columns]
        away = x - self.centre[..., None, :] if self.bias_prior == "flat" else affine_features(x)
        offset = (x @ W + b - y) @ pull + away @ inverse
        outer = W * pull if q == 1 else W @ pull  # much faster for a single output
        return torch.cat([outer + inverse[..., :k, :], -pull, offset], dim=-2)

    def bound(self, statistics: Statistics) -> Float[Tensor, "*b"]:
        """Bound on the NLML per sample of the rows behind `statistics`.

        It is never below the NLML, and equal to it for the statistics that the layer came from. All rows enter through
        their moments: R'R = B' scatter B + m d d' with B = [-W~; I], d the mean residual.

        Parameters
        ----------
        statistics : Statistics
            Moments of the rows.
        """
        k, q = statistics.n_linear, statistics.n_outputs
        eye = torch.eye(q, dtype=self.weights.dtype, device=self.weights.device)
        B = torch.cat([-self.weights[..., :k, :], eye.expand(*self.weights.shape[:-2], q, q)], dim=-2)
        mean = (statistics.mean[..., None, :] @ B - self.weights[..., k:, :])[..., 0, :]
        count = statistics.count[..., None, None]
        RR = B.mT @ statistics.scatter @ B + count * mean[..., :, None] * mean[..., None, :]
        gram = NormalEquations.of(statistics, self.bias_prior).gram
        if self.bias_prior == "flat":
            away = statistics.feature_mean - self.centre
            gram = gram + count * away[..., :, None] * away[..., None, :]
        ratios = (self.inverse * gram).sum((-2, -1)) + int(self.bias_prior == "flat") * statistics.count / self.count
        return self.offset + ((self.noise_precision * RR).sum((-2, -1)) + q * ratios) / (2 * self.count)
