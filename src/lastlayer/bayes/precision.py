"""The precision matrix of the last layer, factored, and what follows in closed form: weights, misfit, noise."""

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lastlayer._internal.numbers import EPS, LOG_2PI, TINY
from lastlayer.bayes.statistics import Statistics, linear_features
from lastlayer.errors import InputError, PrecisionError, unknown_choice
from lastlayer.settings.types import BIAS_PRIORS, NOISE_STRUCTURES, BiasPrior, NoiseStructure

ROUNDING = 8 * EPS
"""Rounding error of an accumulated moment, relative to the energy that was added to it."""

NOISE_FLOOR = 1e-12
"""Smallest noise variance, as a share of the target variance."""


@dataclass(frozen=True)
class Cholesky:
    """A = L L'. Accurate whatever the scales of the columns."""

    L: Float[Tensor, "*b k k"]

    @classmethod
    def of(cls, A: Float[Tensor, "*b k k"]) -> "Cholesky":
        """Factor a matrix; the result is NaN if it is not positive definite."""
        # cholesky_ex does not synchronise with the device; callers add a ridge above rounding errors
        return cls(torch.linalg.cholesky_ex(A).L)

    def whiten(self, Z: Float[Tensor, "... r k"]) -> Float[Tensor, "... r k"]:
        """Rows h with h h' = z A^-1 z'."""
        return torch.linalg.solve_triangular(self.L, Z.mT, upper=False).mT

    def unwhiten(self, E: Float[Tensor, "... k c"]) -> Float[Tensor, "... k c"]:
        """L'^-1 E: columns with covariance A^-1 if those of E are standard normal."""
        return torch.linalg.solve_triangular(self.L.mT, E, upper=True)

    def solve(self, B: Float[Tensor, "... k c"]) -> Float[Tensor, "... k c"]:
        """A^-1 B."""
        if self.L.is_cuda:  # cholesky_solve synchronises, so no CUDA graph can capture it
            return self.unwhiten(torch.linalg.solve_triangular(self.L, B, upper=False))
        return torch.cholesky_solve(B, self.L)

    def inverse(self) -> Float[Tensor, "*b k k"]:
        """A^-1."""
        if not self.L.is_cuda:
            try:
                return torch.cholesky_inverse(self.L)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                pass  # a pivot of zero: below, only the inverse of that matrix of the batch is not finite
        H = self.whiten(torch.eye(self.L.shape[-1], dtype=self.L.dtype, device=self.L.device))
        return H @ H.mT

    def logdet(self) -> Float[Tensor, "*b"]:
        """log det A."""
        return 2 * self.L.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @staticmethod
    def perturbation(u: Float[Tensor, "*b r k"], energy: Float[Tensor, "*b k"]) -> Float[Tensor, "*b r"]:
        """Bound on u'Eu for rounding errors |E_ij| <= sqrt(energy_i energy_j): each column has its own scale."""
        return (energy.sqrt()[..., None, :] * u.abs()).sum(-1).square()


@dataclass(frozen=True)
class Spectrum:
    """A = V diag(values) V', positive semidefinite."""

    values: Float[Tensor, "*a k"]
    vectors: Float[Tensor, "*#a k k"]

    def whiten(self, Z: Float[Tensor, "... r k"]) -> Float[Tensor, "... r k"]:
        """Rows h with h h' = z A^-1 z'."""
        return Z @ self.vectors / self.values.sqrt()[..., None, :]

    def unwhiten(self, E: Float[Tensor, "... k c"]) -> Float[Tensor, "... k c"]:
        """V values^-1/2 E: columns with covariance A^-1 if those of E are standard normal."""
        return self.vectors @ (E / self.values.sqrt()[..., None])

    def solve(self, B: Float[Tensor, "... k c"]) -> Float[Tensor, "... k c"]:
        """A^-1 B."""
        return self.vectors @ ((self.vectors.mT @ B) / self.values[..., None])

    def logdet(self) -> Float[Tensor, "*b"]:
        """log det A."""
        return self.values.log().sum(-1)

    @staticmethod
    def perturbation(u: Float[Tensor, "*b r k"], energy: Float[Tensor, "*b k"]) -> Float[Tensor, "*b r"]:
        """Bound on u'Eu for rounding errors |E| <= sum(energy): the largest column determines the scale of all."""
        return energy.sum(-1)[..., None] * u.square().sum(-1)


Factor: TypeAlias = Cholesky | Spectrum


def eigh(A: Float[Tensor, "*b k k"]) -> tuple[Float[Tensor, "*b k"], Float[Tensor, "*b k k"]]:
    """Eigenvalues and eigenvectors; on the processor if the GPU's solver does not converge."""
    for here in (lambda: A, A.cpu):
        with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            values, vectors = torch.linalg.eigh(here())
            return values.to(A.device), vectors.to(A.device)
    raise PrecisionError(
        "the eigenvalues of a matrix of moments could not be computed in float64: the features or targets are not "
        "finite, or their sizes differ too much; rescale them, or drop outlying rows"
    )


@dataclass(frozen=True)
class NormalEquations:
    """The ridge regression that remains after the bias prior has been accounted for."""

    gram: Float[Tensor, "*b k k"]
    cross: Float[Tensor, "*b k q"]
    targets: Float[Tensor, "*b q q"]
    energy: Float[Tensor, "*b k"]
    """All that was ever added to the diagonal of `gram`; its rounding errors are relative to this."""
    target_energy: Float[Tensor, "*b q"]
    count: Float[Tensor, "*b"]
    """Precision of the bias in units of the noise: m, if every row is a value without known noise."""
    n_targets: Float[Tensor, "*b"]
    """m: the number of targets."""
    dof: Float[Tensor, "*b"]
    """n = m - 1 under the flat prior, m under the shared one: the divisor of the misfit."""
    bias_variance: Float[Tensor, "*b"]
    """Contribution of the free bias to the variance ratio of every point."""
    resolution: Float[Tensor, "*b"]
    """Smallest eigenvalue, alpha^-1 included, that is meaningful given the rounding errors of the moments."""
    n_penalised: int
    """k: number of weights per output that the prior shrinks towards zero."""
    feature_mean: Float[Tensor, "*b k1"]
    target_mean: Float[Tensor, "*b q"]
    bias_prior: BiasPrior
    log_scale: Float[Tensor, "*b"] | None = None
    """Sum of the log noise variances of the targets over the learned one; None: no noise is known."""
    by_output: bool = False
    """Whether the last axis of a batch indexes outputs, which share one alpha."""

    @classmethod
    def of(cls, statistics: Statistics, bias_prior: BiasPrior = "flat") -> "NormalEquations":
        """Set up the normal equations of statistics under a bias prior."""
        if bias_prior not in BIAS_PRIORS:
            raise unknown_choice("bias_prior", bias_prior, BIAS_PRIORS)
        m, n, mean = statistics.count, statistics.n, statistics.mean
        scatter, energy, k = statistics.scatter, statistics.energy, mean.shape[-1] - statistics.n_outputs
        feature_mean, target_mean = mean[..., :k], mean[..., k:]
        dof, bias_variance = n - 1, 1 / m
        if bias_prior == "shared":  # raw moments of [phi_tilde, 1, t] instead of centred ones
            eye = torch.eye(mean.shape[-1] + 1, dtype=mean.dtype, device=mean.device)
            one, rest = eye[k], torch.cat([eye[:k], eye[k + 1 :]])
            raw = mean @ rest + one
            scatter = rest.mT @ scatter @ rest + m[..., None, None] * raw[..., :, None] * raw[..., None, :]
            energy = energy @ rest + m[..., None] * raw.detach().square()
            k, dof, bias_variance = k + 1, n, torch.zeros_like(m)
        return cls(
            gram=scatter[..., :k, :k],
            cross=scatter[..., :k, k:],
            targets=scatter[..., k:, k:],
            energy=energy[..., :k],
            target_energy=energy[..., k:],
            count=m,
            n_targets=n,
            dof=dof,
            bias_variance=bias_variance,
            resolution=(ROUNDING * energy[..., :k].sum(-1)).clamp_min(TINY),
            n_penalised=k,
            feature_mean=feature_mean,
            target_mean=target_mean,
            bias_prior=bias_prior,
            log_scale=statistics.log_scale,
            by_output=statistics.by_output,
        )

    def per_sample(self, total: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Half a sum over the targets, per sample; those of outputs with moments of their own are added."""
        if not self.by_output:
            return total / (2 * self.n_targets)
        return total.sum(-1) / (2 * self.n_targets.amax(-1))

    def rows(self, Phi: Float[Tensor, "... r p"]) -> Float[Tensor, "... r k"]:
        """z for affine features."""
        phi_tilde, Phi = linear_features(Phi).to(self.gram.dtype), Phi.to(self.gram.dtype)
        return phi_tilde - self.feature_mean[..., None, :] if self.bias_prior == "flat" else Phi

    def ridge(self, log_alpha: float | Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """alpha^-1, but at least the resolution: an infinite alpha becomes the largest that the moments can resolve."""
        log_alpha = torch.as_tensor(log_alpha, dtype=self.gram.dtype, device=self.gram.device)
        return torch.maximum((-log_alpha).exp(), self.resolution)

    @cached_property
    def spectrum(self) -> Spectrum:
        """Eigenvalues and eigenvectors of the Gram matrix, for any alpha at O(k) per point."""
        values, vectors = eigh(self.gram)  # eigenvalues up to the resolution are rounding errors
        return Spectrum(torch.where(values > self.resolution[..., None], values, 0.0), vectors)

    @cached_property
    def rotated(self) -> tuple[Float[Tensor, "*b k q"], Float[Tensor, "*b q q"]]:
        """V' Phi'T, which is zero wherever the eigenvalue is, and S as alpha^-1 goes to zero.

        Entries of S that cannot be distinguished from rounding errors are zero.
        """
        values = self.spectrum.values[..., None]
        B = torch.where(values > 0, self.spectrum.vectors.mT @ self.cross, 0.0)
        S = self.targets - (B / values.clamp_min(TINY)).mT @ B
        scale = self.target_energy.sqrt()
        noise = ROUNDING * (1 + self.n_penalised) * scale[..., :, None] * scale[..., None, :]
        seen = torch.linalg.diagonal(noise < S)
        return B, S * (seen[..., :, None] & seen[..., None, :])

    def misfit(self, ridge: Float[Tensor, "..."]) -> Float[Tensor, "... q q"]:
        """S = (T - Phi W)'(T - Phi W) + alpha^-1 W~'W~ at the optimal W, from the moments alone."""
        values, ridge, (B, S) = self.spectrum.values[..., None], ridge[..., None, None], self.rotated
        return S + (B * (ridge / (values.clamp_min(TINY) * (values + ridge)))).mT @ B

    def alpha_range(self, n: int, Phi: Float[Tensor, "r p"] | None = None) -> Float[Tensor, "n *b"]:
        """Grid over the range of log alpha that matters to these points: from weights of zero to weights not shrunk."""
        largest = torch.maximum(self.spectrum.values.amax(-1), self.resolution)
        if Phi is not None:
            largest = largest.clamp_min(float(self.rows(Phi).square().sum(-1).max()))
        first, last = -largest.log() - 12.0, -self.resolution.log()
        if self.by_output:
            first, last = first.amin(-1), last.amax(-1)
        share = torch.linspace(0.0, 1.0, n, dtype=first.dtype, device=first.device)
        return torch.lerp(first, last, share.reshape(-1, *[1] * first.dim()))

    def at(self, log_alpha: float | Float[Tensor, "..."], *, by_spectrum: bool = False) -> "Precision":
        """Factor the precision matrix for one alpha, from scratch or by the spectrum, which serves all alphas."""
        ridge = self.ridge(log_alpha)
        if by_spectrum:
            factor: Factor = Spectrum(self.spectrum.values + ridge[..., None], self.spectrum.vectors)
        else:
            eye = torch.eye(self.n_penalised, dtype=self.gram.dtype, device=self.gram.device)
            factor = Cholesky.of(self.gram + ridge[..., None, None] * eye)
        return Precision(self, log_alpha, ridge, factor)


@dataclass(frozen=True)
class Precision:
    """Lambda_bar = Phi'Phi + alpha^-1 I~ at one alpha, factored. eq:Lambda_p_bar_alpha."""

    equations: NormalEquations
    log_alpha: float | Float[Tensor, "..."]
    ridge: Float[Tensor, "..."]
    """alpha^-1 in use, at least the resolution."""
    factor: Factor

    def logdet(self) -> Float[Tensor, "..."]:
        """log det Lambda_bar."""
        bias = self.equations.count.log() if self.equations.bias_prior == "flat" else 0.0
        return self.factor.logdet() + bias

    def nlml(self, logdet_noise: Float[Tensor, "..."], misfit: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Terms of eq:LMLH_multivariate_simplified per sample, with k and n according to the bias prior."""
        eq, n, log_alpha = self.equations, self.equations.dof, -self.ridge.log()
        k, q = eq.n_penalised, eq.cross.shape[-1]
        total = q * (n * LOG_2PI + k * log_alpha + self.logdet()) + n * logdet_noise + misfit
        return eq.per_sample(total if eq.log_scale is None else total + eq.log_scale)

    @cached_property
    def penalised_weights(self) -> Float[Tensor, "... k q"]:
        """W~: the rows of W that the prior shrinks towards zero."""
        if isinstance(self.factor, Spectrum):
            return self.factor.vectors @ (self.equations.rotated[0] / self.factor.values[..., None])
        return self.factor.solve(self.equations.cross)

    @cached_property
    def weights(self) -> Float[Tensor, "... p q"]:
        """W = Lambda_bar^-1 Phi'T, with the bias in its last row. eq:w_bar_posterior_scalar."""
        W, eq = self.penalised_weights, self.equations
        if eq.bias_prior == "shared":
            return W
        bias = eq.target_mean[..., None, :] - eq.feature_mean[..., None, :] @ W
        return torch.cat([W, bias], dim=-2)

    def variance_ratio(self, z: Float[Tensor, "... r k"]) -> Float[Tensor, "... r"]:
        """phi' Lambda_bar^-1 phi: variance of the function over that of the noise. eq:NN_BLL_distribution_c."""
        return self.equations.bias_variance[..., None] + self.factor.whiten(z).square().sum(-1)

    @property
    def determined(self) -> Float[Tensor, "..."]:
        """gamma: effective number of features determined by the data, sum lambda / (lambda + alpha^-1)."""
        values = self.equations.spectrum.values
        return (values / (values + self.ridge[..., None])).sum(-1)

    @property
    def _lift(self) -> Float[Tensor, "..."]:
        """The ridge in use minus alpha^-1."""
        return self.ridge - (-torch.as_tensor(self.log_alpha).to(self.ridge)).exp()

    @cached_property
    def worst_ratio_error(self) -> float:
        """Largest `ratio_error` over all z, for one model."""
        eq, k = self.equations, self.equations.n_penalised
        if isinstance(self.factor, Cholesky):
            if not bool(torch.isfinite(self.factor.L).all()):  # not positive definite: no correct digits
                return math.inf
            d, terms = (eq.energy + self.ridge).rsqrt(), k
            values, _ = eigh(d[:, None] * (self.factor.L @ self.factor.L.mT) * d)
        else:
            d, terms = eq.energy.sum().rsqrt().expand(k), 1
            values = self.factor.values * d[0] ** 2
        lo, hi = values.min().clamp_min(TINY), values.max()
        centre = (eq.feature_mean * d).norm() * (eq.count / lo).sqrt() if eq.bias_prior == "flat" else 0.0
        lifted = self._lift * d.max() ** 2 / lo
        return float(ROUNDING * terms / lo + 2 * EPS * ((hi / lo).sqrt() + centre) + lifted)

    def ratio_error(self, z: Float[Tensor, "... r k"]) -> Float[Tensor, "... r"]:
        """First-order bound on the relative error of `variance_ratio`: rounding of the moments, of z, and the ridge."""
        u = self.factor.solve(z.mT).mT
        moments = ROUNDING * self.factor.perturbation(u, self.equations.energy)
        centre = self.equations.feature_mean.abs()[..., None, :] if self.equations.bias_prior == "flat" else 0.0
        centring = 2 * EPS * ((z.abs() + 2 * centre) * u.abs()).sum(-1)
        lifted = self._lift[..., None] * u.square().sum(-1)
        return (moments + centring + lifted) / self.variance_ratio(z)

    def weights_error(self) -> Float[Tensor, "... q"]:
        """The same bound for the weights of each output, relative to their norm: A^-1 (E W + the error of Phi'T)."""
        eq, W = self.equations, self.penalised_weights
        eye = torch.eye(eq.n_penalised, dtype=W.dtype, device=W.device)
        scale = eq.energy.sqrt()[..., None]
        inverse = self.factor.solve(eye)
        reach = (inverse.abs() @ scale).square().sum(-2).sqrt()
        drive = (scale * W.abs()).sum(-2) + eq.target_energy.sqrt()
        lifted = self._lift * inverse.square().sum((-2, -1)).sqrt()
        return ROUNDING * reach * drive / W.square().sum(-2).sqrt().clamp_min(TINY) + lifted[..., None]


def noise_covariance(
    S: Float[Tensor, "... q q"], equations: NormalEquations, noise: NoiseStructure = "diagonal", prior_rows: float = 0.0
) -> tuple[Float[Tensor, "... q q"], Bool[Tensor, "..."]]:
    """Noise covariance at the maximum of the evidence, S / n, and whether it was raised to its floor."""
    if noise not in NOISE_STRUCTURES:
        raise unknown_choice("noise", noise, NOISE_STRUCTURES)
    if equations.dof.device.type == "cpu" and not bool((equations.dof > 0).all()):
        raise InputError(
            f"the samples have a total weight of {equations.n_targets.min().item():g}, which leaves no degree of "
            f'freedom for the noise under bias_prior="{equations.bias_prior}": give more samples or larger weights'
        )
    scale = (equations.target_energy / equations.n_targets[..., None]).clamp_min(TINY).sqrt()
    relative = S / ((equations.dof[..., None, None] + prior_rows) * scale[..., :, None] * scale[..., None, :])
    if noise == "diagonal":
        values, vectors = torch.linalg.diagonal(relative), torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    else:
        fine = torch.isfinite(relative).all(-1).all(-1)[..., None]  # one NaN would raise an error for the whole batch
        values, vectors = eigh(torch.where(fine[..., None], relative, 0.0))
        values = torch.where(fine, values, torch.nan)
    root = scale[..., :, None] * vectors * values.clamp_min(NOISE_FLOOR).sqrt()[..., None, :]
    return root @ root.mT, (values < NOISE_FLOOR).any(-1)
