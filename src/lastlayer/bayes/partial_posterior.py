"""Posteriors for partly missing targets: each output separately, or all of them coupled by their noise."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.bayes.coupled import CoupledEquations, CoupledPrecision, PatternStatistics
from lastlayer.bayes.features import linear_features
from lastlayer.bayes.linalg import Cholesky, eigvalsh
from lastlayer.bayes.posterior import Joint, Posterior
from lastlayer.bayes.precision import Precision, noise_covariance
from lastlayer.bayes.statistics import OutputStatistics, Statistics
from lastlayer.errors import InputError


def posterior_of(statistics: Statistics, *numbers: Any, **named: Any) -> Posterior:
    """Create the posterior of the class that matches the statistics."""
    kinds: dict[type[Statistics], type[Posterior]] = {
        OutputStatistics: OutputPosterior,
        PatternStatistics: CoupledPosterior,
    }
    return kinds.get(type(statistics), Posterior)(statistics, *numbers, **named)


def by_output(posterior: Posterior) -> "OutputPosterior":
    """Convert a posterior to one with separate statistics per output, so that new rows may have missing targets."""
    if isinstance(posterior, OutputPosterior):
        return posterior
    p = posterior
    if p.noise != "diagonal":
        raise InputError(f'noise="{p.noise}" couples the outputs, which rules out separate ones: use noise="diagonal"')
    return OutputPosterior(OutputStatistics.split(p.statistics), p.log_alpha, p.Sigma_E, p.noise, p.bias_prior, p.rtol)


def by_pattern(posterior: Posterior) -> "CoupledPosterior":
    """Convert a posterior to one with statistics by pattern, so that new rows may have missing targets."""
    if isinstance(posterior, CoupledPosterior):
        return posterior
    p = posterior
    patterns = PatternStatistics.complete(p.statistics)
    return CoupledPosterior(patterns, p.log_alpha, p.Sigma_E, "full", p.bias_prior, p.rtol)


@dataclass(frozen=True)
class OutputJoint(Joint):
    """Joint prediction where outputs have different ratios: `ratio_cov` is (q, m, m), and outputs are independent."""

    ratio_cov: Float[Tensor, "q m m"]

    def function_cov(self) -> Float[Tensor, "mq mq"]:
        """Covariance of vec(Y), block by block: outputs are independent."""
        return torch.block_diag(*(self.noise_cov.diagonal()[:, None, None] * self.ratio_cov))

    def target_cov(self) -> Float[Tensor, "mq mq"]:
        """Covariance of noisy targets; noise is independent between points."""
        eye = torch.eye(self.ratio_cov.shape[-1], dtype=self.ratio_cov.dtype, device=self.ratio_cov.device)
        return torch.block_diag(*(self.noise_cov.diagonal()[:, None, None] * (self.ratio_cov + eye)))


@dataclass(frozen=True)
class OutputPosterior(Posterior):
    """The posterior where outputs are observed at different rows, or with different known noise."""

    statistics: OutputStatistics
    ratio_by_output: ClassVar[bool] = True

    @cached_property
    def precision(self) -> Precision:
        """Lambda_bar of each output at the posterior's own alpha."""
        return self.equations.spectral_at(self.log_alpha)

    @cached_property
    def Sigma_E(self) -> Float[Tensor, "q q"]:
        """The diagonal noise covariance in use."""
        if self.noise_cov is not None:
            return self.noise_cov.to(self.equations.gram)
        return torch.diag(noise_covariance(self.equations.misfit(self.precision.ridge), self.equations)[0][:, 0, 0])

    @cached_property
    def weights(self) -> Float[Tensor, "p q"]:
        """W, one column per output."""
        return self.precision.weights[..., 0].mT

    def variance_ratio(
        self, Phi: Float[Tensor, "r p"], log_alpha: float | Tensor | None = None
    ) -> Float[Tensor, "r q"]:
        """phi' Lambda_bar^-1 phi of each output."""
        precision = self.precision if log_alpha is None else self.equations.spectral_at(log_alpha)
        return precision.variance_ratio(self.equations.rows(linear_features(Phi))).mT

    def variance_ratios(self, Phi: Float[Tensor, "r p"], log_alphas: Float[Tensor, " a"]) -> Float[Tensor, "a r q"]:
        """The variance ratios for several alphas."""
        return torch.stack([self.variance_ratio(Phi, log_alpha) for log_alpha in log_alphas])

    def mean(self, Phi: Float[Tensor, "r p"]) -> Float[Tensor, "r q"]:
        """Mean of each output."""
        centre = self.equations.target_mean if self.bias_prior == "flat" else 0.0
        z = self.equations.rows(linear_features(Phi))
        return (z @ self.precision.penalised_weights)[..., 0].mT + (centre.mT if isinstance(centre, Tensor) else 0.0)

    def joint(self, Phi: Float[Tensor, "r p"], log_alpha: float | Tensor | None = None) -> OutputJoint:
        """Joint prediction of all points; outputs are independent."""
        precision = self.precision if log_alpha is None else self.equations.spectral_at(log_alpha)
        H = precision.factor.whiten(self.equations.rows(linear_features(Phi)))
        ratio = H @ H.mT + self.equations.bias_variance[:, None, None]
        return OutputJoint(self.mean(Phi), ratio, self.Sigma_E)

    def affine_map(self) -> tuple[Float[Tensor, " k"], Float[Tensor, "k q"], Float[Tensor, " q"]]:
        """(centre, W~, offset): the mean is (phi_tilde - centre) W~ + offset, with one centre for all outputs."""
        W, eq = self.precision.penalised_weights, self.equations
        if self.bias_prior == "shared":
            W = W[..., 0].mT
            return W.new_zeros(len(W) - 1), W[:-1], W[-1]
        centre = eq.feature_mean.mean(0)  # each output has its own mean
        apart = ((centre - eq.feature_mean)[:, None] @ W)[:, 0, 0]
        return centre, W[..., 0].mT, eq.target_mean[:, 0] + apart

    def sample_weights(self, n: int, *, generator: torch.Generator | None = None) -> Float[Tensor, "n p q"]:
        """Draws of W, independent between the outputs."""
        return torch.cat([self.output(j).sample_weights(n, generator=generator) for j in range(len(self.Sigma_E))], -1)

    def output(self, j: int) -> Posterior:
        """The posterior of one output."""
        noise_cov = self.Sigma_E[j : j + 1, j : j + 1]
        return Posterior(self.statistics.output(j), self.log_alpha, noise_cov, self.noise, self.bias_prior, self.rtol)


@dataclass(frozen=True)
class CoupledPosterior(Posterior):
    """The posterior where the noise is correlated and some targets are missing (`lastlayer.patterns`)."""

    statistics: PatternStatistics
    ratio_by_output: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_cov is None:
            raise InputError(
                "correlated noise of targets that are partly missing has no closed form: give noise_cov, as "
                "lastlayer.training.coupled_layer finds it"
            )

    @cached_property
    def coupled(self) -> CoupledEquations:
        """Moments of the rows by pattern."""
        return CoupledEquations.of(self.statistics, self.bias_prior)

    @cached_property
    def coupled_precision(self) -> CoupledPrecision:
        """Lambda at the posterior's own alpha."""
        return self._at(self.log_alpha)

    @cached_property
    def nlml(self) -> float:
        """Negative log marginal likelihood, per target of the output with most targets."""
        return float(self.coupled_precision.nlml())

    @cached_property
    def noise_floored(self) -> bool:
        """Whether the noise of an output is at its floor."""
        return bool(self.Sigma_E.diagonal().min() <= 2e-12)

    @cached_property
    def determined(self) -> float:
        """Number of features that the data determine."""
        seen = self.eigenvalues()
        return float((seen / (seen + math.exp(-float(self.log_alpha)))).sum()) / len(self.Sigma_E)

    def _at(self, log_alpha: float | Tensor) -> CoupledPrecision:
        return self.coupled.at(log_alpha, Cholesky.of(self.Sigma_E).L)

    @cached_property
    def Sigma_E(self) -> Float[Tensor, "q q"]:
        """The noise covariance in use."""
        assert self.noise_cov is not None
        return self.noise_cov.to(self.coupled.gram)

    @cached_property
    def weights(self) -> Float[Tensor, "p q"]:
        """W: mean of the weights, with the bias in the last row."""
        return self._affine(self.coupled_precision.weights)

    def _affine(self, W: Float[Tensor, "*n p q"]) -> Float[Tensor, "*n p q"]:
        """Weights of the original features from those of centred features."""
        bias = W[..., -1, :] + self.coupled.target_mean - self.coupled.feature_mean @ W[..., :-1, :]
        return torch.cat([W[..., :-1, :], bias[..., None, :]], -2)

    def mean(self, Phi: Float[Tensor, "r p"]) -> Float[Tensor, "r q"]:
        """Mean of each output."""
        return self.coupled.rows(Phi) @ self.coupled_precision.weights + self.coupled.target_mean

    def variance_ratio(
        self, Phi: Float[Tensor, "r p"], log_alpha: float | Tensor | None = None
    ) -> Float[Tensor, "r q"]:
        """Variance of the function over that of the noise, for each output."""
        H = self._rows(Phi, self.coupled_precision if log_alpha is None else self._at(log_alpha))
        return (H.square().sum(-1) / self.Sigma_E.diagonal()[:, None]).mT

    def variance_ratios(self, Phi: Float[Tensor, "r p"], log_alphas: Float[Tensor, " a"]) -> Float[Tensor, "a r q"]:
        """The variance ratios for several alphas."""
        return torch.stack([self.variance_ratio(Phi, log_alpha) for log_alpha in log_alphas])

    def function_cov(self, Phi: Float[Tensor, "r p"]) -> Float[Tensor, "r q q"]:
        """Covariance of y between the outputs at each point, which is not proportional to that of the noise here."""
        H = self._rows(Phi, self.coupled_precision)
        return torch.einsum("jrc,lrc->rjl", H, H)

    def joint(self, Phi: Float[Tensor, "r p"], log_alpha: float | Tensor | None = None) -> "CoupledJoint":
        """Joint prediction of all points and outputs."""
        H = self._rows(Phi, self.coupled_precision if log_alpha is None else self._at(log_alpha)).flatten(0, 1)
        return CoupledJoint(self.mean(Phi), H @ H.mT, self.Sigma_E)

    def affine_map(self) -> tuple[Float[Tensor, " k"], Float[Tensor, "k q"], Float[Tensor, " q"]]:
        """(centre, W~, offset): the mean is (phi_tilde - centre) W~ + offset."""
        W = self.coupled_precision.weights
        return self.coupled.feature_mean, W[:-1], W[-1] + self.coupled.target_mean

    def whitening(
        self, centre: Float[Tensor, " k"], log_alpha: float | None = None
    ) -> tuple[Float[Tensor, "k r"], Float[Tensor, " r"]]:
        """(root, shift) such that h = (phi_tilde - centre) root + shift; columns of all outputs are concatenated."""
        precision = self.coupled_precision if log_alpha is None else self._at(log_alpha)
        R = precision.roots / self.Sigma_E.diagonal().sqrt()[:, None, None]
        shift = R[:, -1] + (centre - self.coupled.feature_mean) @ R[:, :-1]
        return R[:, :-1].movedim(0, 1).flatten(1), shift.flatten()

    def alpha_range(self, Phi: Float[Tensor, "r p"]) -> tuple[float, float]:
        """Range of log alpha in which it affects these points."""
        largest = torch.maximum(self.eigenvalues().max(), self.coupled.rows(Phi).square().sum(-1).max())
        return float(-largest.log() - 12.0), float(-self.coupled.resolution.log())

    def eigenvalues(self) -> Float[Tensor, " k"]:
        """Eigenvalues of the data's part of Lambda, over all outputs."""
        L = self.coupled_precision.factor.L
        return (eigvalsh(L @ L.mT) - self.coupled_precision.ridge).clamp_min(0.0)

    def sample_weights(self, n: int, *, generator: torch.Generator | None = None) -> Float[Tensor, "n p q"]:
        """Draws of W, joint over the outputs."""
        R, W = self.coupled_precision.roots, self.coupled_precision.weights
        e = torch.randn(R.shape[-1], n, generator=generator, dtype=R.dtype, device=R.device)
        return self._affine(W + (R @ e).permute(2, 1, 0))

    def _rows(self, Phi: Float[Tensor, "r p"], precision: CoupledPrecision) -> Float[Tensor, "q r c"]:
        """Rows H such that the function at the points is mean + H e, with the same normal e for all outputs."""
        return self.coupled.rows(Phi) @ precision.roots


@dataclass(frozen=True)
class CoupledJoint(Joint):
    """Joint prediction where the function's covariance is no Kronecker product: `ratio_cov` is that of vec(Y)."""

    ratio_cov: Float[Tensor, "mq mq"]

    def function_cov(self) -> Float[Tensor, "mq mq"]:
        """Covariance of vec(Y), ordered by output."""
        return self.ratio_cov

    def target_cov(self) -> Float[Tensor, "mq mq"]:
        """Covariance of noisy targets; noise is independent between points."""
        eye = torch.eye(len(self.mean), dtype=self.ratio_cov.dtype, device=self.ratio_cov.device)
        return self.ratio_cov + torch.kron(self.noise_cov.contiguous(), eye)
