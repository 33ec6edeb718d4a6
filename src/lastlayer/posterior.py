"""The exact posterior over the last layer's weights, and what it says of new points, in the units it was given.

Everything is a function of the statistics: new rows make a new posterior. Precision(vec W) = Sigma_E^-1 (x) Lambda_bar
(Result 3), so the outputs share one variance ratio, phi' Lambda_bar^-1 phi, and differ by their noise alone.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.errors import InputError, PrecisionError
from lastlayer.features import linear_features
from lastlayer.linalg import EPS, Cholesky
from lastlayer.precision import NormalEquations, Precision, noise_covariance
from lastlayer.statistics import OutputStatistics, Statistics
from lastlayer.types import BiasPrior, NoiseStructure

COLLINEAR = 1e9
"""How far above rounding alpha^-1 must be for Cholesky's factor to serve features of any rank."""


@dataclass(frozen=True)
class Marginals:
    """What the posterior says of each point alone."""

    mean: Float[Tensor, "m q"]
    variance_ratio: Float[Tensor, "m *q"]
    """phi' Lambda_bar^-1 phi; times `noise_cov` it is the covariance of the function. Of each output, where they were
    observed at different rows."""
    noise_cov: Float[Tensor, "q q"]

    def function_cov(self) -> Float[Tensor, "m q q"]:
        """Covariance of y between the outputs at each point. eq:NN_BLL_distribution (Lemma 1)"""
        ratio = self.variance_ratio
        return (torch.diag_embed(ratio) if ratio.dim() > 1 else ratio[:, None, None]) * self.noise_cov

    def target_cov(self) -> Float[Tensor, "m q q"]:
        """Covariance of t = y + noise. eq:NN_BLL_distribution_targets"""
        return self.function_cov() + self.noise_cov


@dataclass(frozen=True)
class Joint:
    """What the posterior says of all points together: the function's covariance is noise_cov (x) ratio_cov."""

    mean: Float[Tensor, "m q"]
    ratio_cov: Float[Tensor, "m m"]
    """Phi Lambda_bar^-1 Phi'."""
    noise_cov: Float[Tensor, "q q"]

    def function_cov(self) -> Float[Tensor, "mq mq"]:
        """Covariance of vec(Y), output by output: the first m rows are the first output at every point."""
        return _kron(self.noise_cov, self.ratio_cov)

    def target_cov(self) -> Float[Tensor, "mq mq"]:
        """The same for noisy targets: the noise is independent between points."""
        eye = torch.eye(len(self.ratio_cov), dtype=self.ratio_cov.dtype, device=self.ratio_cov.device)
        return _kron(self.noise_cov, self.ratio_cov + eye)


@dataclass(frozen=True)
class OutputJoint(Joint):
    """The same where outputs have different ratios: `ratio_cov` is (q, m, m), and the outputs are independent."""

    ratio_cov: Float[Tensor, "q m m"]

    def function_cov(self) -> Float[Tensor, "mq mq"]:
        return torch.block_diag(*(self.noise_cov.diagonal()[:, None, None] * self.ratio_cov))

    def target_cov(self) -> Float[Tensor, "mq mq"]:
        eye = torch.eye(self.ratio_cov.shape[-1], dtype=self.ratio_cov.dtype, device=self.ratio_cov.device)
        return torch.block_diag(*(self.noise_cov.diagonal()[:, None, None] * (self.ratio_cov + eye)))


@dataclass(frozen=True)
class Posterior:
    """Posterior of the last layer's weights given statistics, alpha and noise. eq:NN_BLL_distribution (Lemma 1)

    Numbers that rounding errors of the moments reach beyond `rtol` raise a PrecisionError instead of being returned.
    An infinite alpha is the limit: directions that no sample showed get the smallest precision the moments can tell
    from zero, hence a large, finite variance, which is then a lower bound.
    """

    statistics: Statistics
    log_alpha: float | Float[Tensor, ""]
    noise_cov: Float[Tensor, "q q"] | None = None
    """Sigma_E; None: where the evidence is largest, S / n, with the structure `noise`."""
    noise: NoiseStructure = "diagonal"
    bias_prior: BiasPrior = "flat"
    rtol: float = 1e-6
    _batch_dims: ClassVar[int] = 0

    @classmethod
    def of(cls, statistics: Statistics, *numbers: Any, **named: Any) -> "Posterior":
        """Of all outputs together, or of each with statistics of its own."""
        if isinstance(statistics, OutputStatistics):
            return OutputPosterior(statistics, *numbers, **named)
        return Posterior(statistics, *numbers, **named)

    def __post_init__(self) -> None:
        if self.statistics.count.dim() != self._batch_dims:
            raise InputError("a Posterior takes the statistics of one model; make one for each of a batch")
        if math.isnan(float(self.log_alpha)):
            raise InputError("log_alpha is nan: give a number or math.inf")

    @cached_property
    def equations(self) -> NormalEquations:
        return NormalEquations.of(self.statistics, self.bias_prior)

    @cached_property
    def precision(self) -> Precision:
        """Lambda_bar at the posterior's own alpha; by its spectrum where the features are close to collinear."""
        precision = self.equations.at(self.log_alpha)
        close = precision.ridge < COLLINEAR * self.equations.resolution and precision.worst_ratio_error > 1 / COLLINEAR
        return self.equations.spectral_at(self.log_alpha) if close else precision

    @cached_property
    def Sigma_E(self) -> Float[Tensor, "q q"]:
        """The noise covariance in use."""
        if self.noise_cov is not None:
            return self.noise_cov.to(self.equations.gram)
        return noise_covariance(self.equations.misfit(self.precision.ridge), self.equations, self.noise)[0]

    @cached_property
    def weights(self) -> Float[Tensor, "p q"]:
        """W: the mean of the last layer's weights, the bias in the last row. eq:w_bar_posterior_scalar"""
        if not math.isinf(float(self.log_alpha)) and self._coarse(self.precision):
            self._demand(self.precision.weights_error().max(), "the weights", self.log_alpha)
        return self.precision.weights

    def variance_ratio(self, Phi: Float[Tensor, "r p"], log_alpha: float | Tensor | None = None) -> Float[Tensor, " r"]:
        """phi' Lambda_bar^-1 phi, the affine cost with gamma = alpha (Theorem 2). eq:BLL_Affine_cost

        Another `log_alpha` than the posterior's own, math.inf included, costs O(p) a point once the features have been
        rotated: the eigendecomposition is kept. Differentiable in Phi.
        """
        z = self.equations.rows(linear_features(Phi))
        precision = self.precision if log_alpha is None else self.equations.spectral_at(log_alpha)
        asked = self.log_alpha if log_alpha is None else log_alpha
        if not math.isinf(float(asked)) and self._coarse(precision):
            with torch.no_grad():
                self._demand(precision.ratio_error(z).max(), "the variance ratio", asked)
        return precision.variance_ratio(z)

    def variance_ratios(self, Phi: Float[Tensor, "r p"], log_alphas: Float[Tensor, " a"]) -> Float[Tensor, "a r"]:
        """The variance ratio for many alphas at once: the squared rotated features times a matrix of weights."""
        spectrum = self.equations.spectrum
        rotated = (self.equations.rows(linear_features(Phi)) @ spectrum.vectors).square()
        per_alpha = 1 / (spectrum.values + self.equations.ridge(log_alphas)[:, None])
        return per_alpha @ rotated.mT + self.equations.bias_variance

    def mean(self, Phi: Float[Tensor, "r p"]) -> Float[Tensor, "r q"]:
        """Phi W, computed around the training mean so that a large offset costs no digits."""
        W, eq = self.precision.penalised_weights, self.equations
        centre = eq.target_mean if self.bias_prior == "flat" else 0.0
        return eq.rows(linear_features(Phi)) @ W + centre

    def predict(self, Phi: Float[Tensor, "r p"]) -> Marginals:
        """Mean, variance ratio and noise at each point. eq:NN_BLL_distribution, eq:NN_BLL_distribution_targets"""
        return Marginals(self.mean(Phi), self.variance_ratio(Phi), self.Sigma_E)

    def joint(self, Phi: Float[Tensor, "r p"], log_alpha: float | Tensor | None = None) -> Joint:
        """Mean and covariance over points and outputs."""
        z = self.equations.rows(linear_features(Phi))
        precision = self.precision if log_alpha is None else self.equations.spectral_at(log_alpha)
        H = precision.factor.whiten(z)
        return Joint(self.mean(Phi), H @ H.mT + self.equations.bias_variance, self.Sigma_E)

    def sample_weights(self, n: int, *, generator: torch.Generator | None = None) -> Float[Tensor, "n p q"]:
        """Draws of W from N(W, Sigma_E (x) Lambda_bar^-1): Phi @ draw is a whole function, the same at every point."""
        W, eq = self.precision.penalised_weights, self.equations
        k, q = W.shape
        options = {"dtype": W.dtype, "device": W.device}
        root = Cholesky.of(self.Sigma_E).L.mT
        E = torch.randn(k, n * q, generator=generator, **options)  # type: ignore[call-overload]
        draws = W + self.precision.factor.unwhiten(E).reshape(k, n, q).transpose(0, 1) @ root
        if self.bias_prior == "shared":
            return draws
        free = torch.randn(n, 1, q, generator=generator, **options) @ root * eq.bias_variance.sqrt()  # type: ignore[call-overload]
        bias = eq.target_mean - eq.feature_mean @ draws
        return torch.cat([draws, bias[:, None, :] + free], dim=-2)

    def update(self, statistics: Statistics, *, forgetting: float = 1.0) -> "Posterior":
        """The posterior after more rows; with `forgetting` below one the old rows first lose that share of weight."""
        old = self.statistics if forgetting == 1.0 else self.statistics.scaled(forgetting)
        return replace(self, statistics=old + statistics)

    def remove(self, statistics: Statistics) -> "Posterior":
        """The posterior without rows that it has seen."""
        return replace(self, statistics=self.statistics - statistics)

    def by_output(self) -> "OutputPosterior":
        """The same posterior with statistics of each output: what they learn from now on may differ."""
        if self.noise != "diagonal":
            raise InputError(
                f'noise="{self.noise}" couples the outputs: they cannot learn apart; take noise="diagonal"'
            )
        apart = OutputStatistics.split(self.statistics)
        return OutputPosterior(apart, self.log_alpha, self.Sigma_E, self.noise, self.bias_prior, self.rtol)

    def _coarse(self, precision: Precision) -> bool:
        """Whether rounding might matter at some point: below it, alpha^-1 or the eigenvalues rule that out."""
        eq, allowed = self.equations, 0.1 * self.rtol
        moments = eq.resolution * eq.n_penalised / precision.ridge
        centring = 2 * EPS * eq.feature_mean.norm() * (eq.count / precision.ridge).sqrt()
        return not bool(moments + centring <= allowed) and not precision.worst_ratio_error <= allowed

    def _demand(self, error: Tensor, what: str, log_alpha: float | Tensor) -> None:
        if not bool(error <= self.rtol):
            limit = -math.log(float(self.equations.resolution) / self.rtol)
            raise PrecisionError(
                f"at log_alpha={float(log_alpha):.4g} {what} would be right to {float(error):.0e} only, and "
                f"rtol={self.rtol:g} is asked for: features this close to collinear leave float64 moments no digits. "
                f"Rescale or drop collinear features, take log_alpha below about {limit:.3g}, or allow a larger rtol"
            )


@dataclass(frozen=True)
class OutputPosterior(Posterior):
    """The posterior where outputs are observed at different rows, or with different known noise.

    The noise is independent between the outputs, so vec W has one block for each of them, with a Lambda_bar of its own:
    variance ratios are (r, q). alpha is common to all.
    """

    statistics: OutputStatistics
    _batch_dims: ClassVar[int] = 1

    @cached_property
    def precision(self) -> Precision:
        return self.equations.spectral_at(self.log_alpha)

    @cached_property
    def Sigma_E(self) -> Float[Tensor, "q q"]:
        if self.noise_cov is not None:
            return self.noise_cov.to(self.equations.gram)
        return torch.diag(noise_covariance(self.equations.misfit(self.precision.ridge), self.equations)[0][:, 0, 0])

    @cached_property
    def weights(self) -> Float[Tensor, "p q"]:
        return self.precision.weights[..., 0].mT

    def variance_ratio(
        self, Phi: Float[Tensor, "r p"], log_alpha: float | Tensor | None = None
    ) -> Float[Tensor, "r q"]:
        precision = self.precision if log_alpha is None else self.equations.spectral_at(log_alpha)
        return precision.variance_ratio(self.equations.rows(linear_features(Phi))).mT

    def variance_ratios(self, Phi: Float[Tensor, "r p"], log_alphas: Float[Tensor, " a"]) -> Float[Tensor, "a r q"]:
        return torch.stack([self.variance_ratio(Phi, log_alpha) for log_alpha in log_alphas])

    def mean(self, Phi: Float[Tensor, "r p"]) -> Float[Tensor, "r q"]:
        centre = self.equations.target_mean if self.bias_prior == "flat" else 0.0
        z = self.equations.rows(linear_features(Phi))
        return (z @ self.precision.penalised_weights)[..., 0].mT + (centre.mT if isinstance(centre, Tensor) else 0.0)

    def joint(self, Phi: Float[Tensor, "r p"], log_alpha: float | Tensor | None = None) -> OutputJoint:
        precision = self.precision if log_alpha is None else self.equations.spectral_at(log_alpha)
        H = precision.factor.whiten(self.equations.rows(linear_features(Phi)))
        ratio = H @ H.mT + self.equations.bias_variance[:, None, None]
        return OutputJoint(self.mean(Phi), ratio, self.Sigma_E)

    def sample_weights(self, n: int, *, generator: torch.Generator | None = None) -> Float[Tensor, "n p q"]:
        return torch.cat([self.output(j).sample_weights(n, generator=generator) for j in range(len(self.Sigma_E))], -1)

    def output(self, j: int) -> Posterior:
        """That of one output alone."""
        noise_cov = self.Sigma_E[j : j + 1, j : j + 1]
        return Posterior(self.statistics.output(j), self.log_alpha, noise_cov, self.noise, self.bias_prior, self.rtol)

    def by_output(self) -> "OutputPosterior":
        return self


def _kron(A: Tensor, B: Tensor) -> Tensor:
    return torch.kron(A.contiguous(), B.contiguous())
