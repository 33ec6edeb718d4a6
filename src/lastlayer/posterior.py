"""The exact posterior over the last layer's weights, and what it says of new points, in the units it was given.

Everything is a function of the statistics: new rows make a new posterior. Precision(vec W) = Sigma_E^-1 (x) Lambda_bar
(Result 3), so the outputs share one variance ratio, phi' Lambda_bar^-1 phi, and differ by their noise alone.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer.errors import InputError, PrecisionError
from lastlayer.features import linear_features
from lastlayer.linalg import EPS, Cholesky
from lastlayer.precision import ROUNDING, NormalEquations, Precision, noise_covariance
from lastlayer.statistics import Statistics
from lastlayer.types import BiasPrior, NoiseStructure

COLLINEAR = 1e9
"""How far above rounding alpha^-1 must be for Cholesky's factor to serve features of any rank."""

REMOVAL_RTOL = 1e-5
"""Of the weights: the digits that must be left when rows are taken out of the moments."""


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
    ratio_by_output: ClassVar[bool] = False
    """Whether outputs were observed at different rows, so that each has a variance ratio of its own."""

    def __post_init__(self) -> None:
        if self.statistics.count.dim() != self.ratio_by_output:
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

    def affine_map(self) -> tuple[Float[Tensor, " k"], Float[Tensor, "k q"], Float[Tensor, " q"]]:
        """(centre, W~, offset): the mean is (phi_tilde - centre) W~ + offset."""
        W = self.precision.penalised_weights
        if self.bias_prior == "flat":
            return self.equations.feature_mean, W, self.equations.target_mean
        return W.new_zeros(len(W) - 1), W[:-1], W[-1]  # the bias is the last of the features: it becomes the offset

    def whitening(
        self, centre: Float[Tensor, " k"], log_alpha: float | None = None
    ) -> tuple[Float[Tensor, "k r"], Float[Tensor, " r"]]:
        """(root, shift) such that h = (phi_tilde - centre) root + shift has h h' = phi' Lambda_bar^-1 phi.

        Where each output has a ratio of its own, their columns stand side by side.
        """
        precision = self.precision if log_alpha is None else self.equations.spectral_at(log_alpha)
        root, shift = _whitening(precision, centre)
        return (root.movedim(0, 1).flatten(1), shift.flatten()) if self.ratio_by_output else (root, shift)

    def alpha_range(self, Phi: Float[Tensor, "r p"]) -> tuple[float, float]:
        """The log alphas between which alpha matters for these points."""
        farthest = self.equations.rows(linear_features(Phi)).square().sum(-1).max()
        first, last = self.equations.alpha_range(2, farthest=float(farthest)).tolist()
        return first, last

    def eigenvalues(self) -> Float[Tensor, " k"]:
        """Of the Gram matrix, of all outputs where they differ: alpha^-1 beside them tells what the data determine."""
        return self.equations.spectrum.values.flatten()

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
        """The posterior without rows that it has seen.

        Raises
        ------
        PrecisionError
            Where the rows were so large that the moments of the others have lost their digits: the weights would differ
            from those of a refit on what is left by more than `REMOVAL_RTOL`, and by more than a refit is rounded.
        """
        rest = replace(self, statistics=self.statistics - statistics)
        error = rest.equations.at(self.log_alpha).weights_error()
        energy, scatter = rest.statistics.energy, rest.statistics.scatter.diagonal(dim1=-2, dim2=-1)
        left = (scatter - 100 * ROUNDING * energy).clamp_min(0.0)  # what is certainly no rounding
        refit = NormalEquations.of(replace(rest.statistics, energy=left), self.bias_prior).at(self.log_alpha)
        if not bool((error <= (100 * refit.weights_error()).clamp_min(REMOVAL_RTOL)).all()):
            raise PrecisionError(
                f"without these rows the weights would be right to {float(error.max()):.0e} only: the rows are so much "
                "larger than those left that float64 moments have lost the digits of these. Fit again, or start from "
                "the rows that are left"
            )
        return rest

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


def _whitening(
    precision: Precision, centre: Float[Tensor, " k"]
) -> tuple[Float[Tensor, "*q k r"], Float[Tensor, "*q r"]]:
    equations = precision.equations
    eye = torch.eye(equations.n_penalised, dtype=equations.gram.dtype, device=equations.gram.device)
    root = precision.factor.whiten(eye)
    if equations.bias_prior == "shared":
        return root[..., :-1, :], root[..., -1, :]
    # the variance of a free bias is one more column
    apart = centre - equations.feature_mean
    shift = torch.cat([(apart[..., None, :] @ root)[..., 0, :], equations.bias_variance.sqrt()[..., None]], -1)
    return torch.cat([root, torch.zeros_like(root[..., :1])], -1), shift


def _kron(A: Tensor, B: Tensor) -> Tensor:
    return torch.kron(A.contiguous(), B.contiguous())
