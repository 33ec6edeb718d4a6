"""Posteriors for partly missing targets or partly known noise: each output separately."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.bayes.features import linear_features
from lastlayer.bayes.posterior import Joint, Posterior
from lastlayer.bayes.precision import Precision, noise_covariance
from lastlayer.bayes.statistics import OutputStatistics, Statistics
from lastlayer.errors import InputError
from lastlayer.settings.types import NEEDS_EVERY_TARGET


def posterior_of(statistics: Statistics, *numbers: Any, **named: Any) -> Posterior:
    """Create the posterior of the class that matches the statistics."""
    kind = OutputPosterior if isinstance(statistics, OutputStatistics) else Posterior
    return kind(statistics, *numbers, **named)  # type: ignore[arg-type]


def by_output(posterior: Posterior) -> "OutputPosterior":
    """Convert a posterior to one with separate statistics per output, so that new rows may have missing targets."""
    if isinstance(posterior, OutputPosterior):
        return posterior
    p = posterior
    if p.noise != "diagonal":
        raise InputError(NEEDS_EVERY_TARGET)
    return OutputPosterior(OutputStatistics.split(p.statistics), p.log_alpha, p.Sigma_E, p.noise, p.bias_prior, p.rtol)


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
