"""The exact posterior over the last layer's weights, and its predictions at new points, in the units of the data."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor

from lastlayer._internal.numbers import EPS, TINY
from lastlayer.bayes.precision import (
    NOISE_FLOOR,
    ROUNDING,
    Cholesky,
    NormalEquations,
    Precision,
    eigh,
    noise_covariance,
)
from lastlayer.bayes.statistics import Statistics
from lastlayer.errors import InputError, PrecisionError
from lastlayer.settings.types import NEEDS_EVERY_TARGET, BiasPrior, NoiseStructure

COLLINEAR = 1e9
"""Smallest ratio of alpha^-1 to rounding errors at which Cholesky's factor can be used for features of any rank."""

RTOL = 1e-6
"""Largest relative error of the results of a posterior that is checked."""
REMOVAL_RTOL = 1e-5
"""Largest relative error of the weights that is accepted after rows have been removed from the moments."""


@dataclass(frozen=True)
class Marginals:
    """Posterior predictions of each point alone."""

    mean: Float[Tensor, "m q"]
    """Mean of each output."""
    variance_ratio: Float[Tensor, "m *q"]
    """phi' Lambda_bar^-1 phi: variance of the function over that of the noise; one per output, where these differ."""
    noise_cov: Float[Tensor, "q q"]
    """Noise covariance between the outputs."""

    def function_cov(self) -> Float[Tensor, "m q q"]:
        """Compute the covariance of the function between the outputs at each point. eq:NN_BLL_distribution."""
        ratio = self.variance_ratio
        return (torch.diag_embed(ratio) if ratio.dim() > 1 else ratio[:, None, None]) * self.noise_cov

    def target_cov(self) -> Float[Tensor, "m q q"]:
        """Compute that of the targets, which includes the noise. eq:NN_BLL_distribution_targets."""
        return self.function_cov() + self.noise_cov


@dataclass(frozen=True)
class Joint:
    """Joint posterior prediction of all points: the function's covariance is noise_cov (x) ratio_cov.

    Where each output has its own ratios, outputs are independent.
    """

    mean: Float[Tensor, "m q"]
    """Mean of each output at each point."""
    ratio_cov: Float[Tensor, "*q m m"]
    """Phi Lambda_bar^-1 Phi': covariance of the function over that of the noise; one per output, where these differ."""
    noise_cov: Float[Tensor, "q q"]
    """Noise covariance between the outputs."""

    def function_cov(self) -> Float[Tensor, "mq mq"]:
        """Compute the covariance of vec(Y), ordered by output."""
        return self._times_noise(self.ratio_cov)

    def target_cov(self) -> Float[Tensor, "mq mq"]:
        """Compute the covariance of noisy targets; noise is independent between points."""
        return self._times_noise(self.ratio_cov + torch.eye(len(self.mean)).to(self.ratio_cov))

    def _times_noise(self, ratio_cov: Tensor) -> Tensor:
        if ratio_cov.dim() == 2:
            return torch.kron(self.noise_cov.contiguous(), ratio_cov.contiguous())
        return torch.block_diag(*(self.noise_cov.diagonal()[:, None, None] * ratio_cov))


@dataclass(frozen=True)
class Posterior:
    """Posterior of the last layer's weights given statistics, alpha and noise. eq:NN_BLL_distribution (Lemma 1).

    Results raise a PrecisionError if the rounding of the moments may change them by more than `RTOL`, unless outputs
    have statistics of their own. At infinite alpha, directions that no sample covers get the smallest precision that
    the moments can tell from zero: their variance is a lower bound.

    Examples
    --------
    >>> Phi = torch.tensor([[-1.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    >>> posterior = Posterior(Statistics.from_features(Phi, torch.tensor([[-1.0], [0.1], [1.0]])), log_alpha=5.0)
    >>> posterior.variance_ratio(torch.tensor([[0.0, 1.0], [5.0, 1.0]])).round(decimals=1).tolist()
    [0.3, 12.8]
    """

    statistics: Statistics
    """Statistics of the rows."""
    log_alpha: float | Float[Tensor, ""]
    """Logarithm of the signal-to-noise ratio; math.inf: the limit."""
    noise_cov: Float[Tensor, "q q"] | None = None
    """Sigma_E; None: the maximum of the evidence, S / n, with the structure `noise`."""
    noise: NoiseStructure = "diagonal"
    """Structure of the noise covariance between the outputs."""
    bias_prior: BiasPrior = "flat"
    """Prior on the bias."""
    checked: bool = True
    """Whether rounding errors are checked; not in models, where only the magnitude of a far point's variance counts."""

    def __post_init__(self) -> None:
        if self.statistics.count.dim() != self.statistics.by_output:
            raise InputError("a Posterior takes the statistics of one model: create one Posterior per model of a batch")
        if math.isnan(float(self.log_alpha)):
            raise InputError("log_alpha is nan: give a number or math.inf")
        if self.statistics.by_output and self.noise == "full":
            raise InputError(NEEDS_EVERY_TARGET)

    @cached_property
    def equations(self) -> NormalEquations:
        """Normal equations of the statistics."""
        return NormalEquations.of(self.statistics, self.bias_prior)

    @cached_property
    def precision(self) -> Precision:
        """Lambda_bar at the posterior's own alpha; from the spectrum where the features are close to collinear."""
        if self.statistics.by_output:
            return self.equations.at(self.log_alpha, by_spectrum=True)
        precision = self.equations.at(self.log_alpha)
        close = precision.ridge < COLLINEAR * self.equations.resolution and precision.worst_ratio_error > 1 / COLLINEAR
        return self.equations.at(self.log_alpha, by_spectrum=True) if close else precision

    @cached_property
    def Sigma_E(self) -> Float[Tensor, "q q"]:
        """The noise covariance in use."""
        if self.noise_cov is not None:
            return self.noise_cov.to(self.equations.gram)
        cov = noise_covariance(self.equations.misfit(self.precision.ridge), self.equations, self.noise)[0]
        return torch.diag(cov[:, 0, 0]) if self.statistics.by_output else cov

    @cached_property
    def weights(self) -> Float[Tensor, "p q"]:
        """W: mean of the last layer's weights, with the bias in the last row. eq:w_bar_posterior_scalar."""
        if self.checked:
            self._check(self.precision, self.precision.weights_error, "the weights")
        return self._columns(self.precision.weights)

    @cached_property
    def nlml(self) -> float:
        """Negative log marginal likelihood per sample of the rows behind the statistics, at this alpha and noise."""
        eq, noise = self.equations, self.Sigma_E
        precision = eq.at(self.log_alpha, by_spectrum=True)
        E = Cholesky.of(noise.diagonal()[:, None, None] if eq.by_output else noise)
        return float(precision.nlml(E.logdet(), torch.linalg.diagonal(E.solve(eq.misfit(precision.ridge))).sum(-1)))

    @cached_property
    def noise_floored(self) -> bool:
        """Whether the features fit the targets without error, so that the noise is at its floor."""
        eq = self.equations
        scale = (eq.target_energy / eq.count[..., None]).clamp_min(TINY).sqrt().flatten()
        return bool(eigh(self.Sigma_E / scale / scale[:, None])[0].min() <= 2 * NOISE_FLOOR)

    @cached_property
    def determined(self) -> float:
        """Number of features that the data determine."""
        return float(self.equations.at(self.log_alpha, by_spectrum=True).determined.mean())

    def variance_ratio(
        self, Phi: Float[Tensor, "r p"], log_alpha: float | Tensor | None = None
    ) -> Float[Tensor, "r *q"]:
        """Compute phi' Lambda_bar^-1 phi, the affine cost with gamma = alpha (Theorem 2). eq:BLL_Affine_cost.

        Parameters
        ----------
        Phi : Tensor of shape (r, p)
            Affine features; the result is differentiable in them.
        log_alpha : float or Tensor, default None
            Another log alpha, possibly math.inf; None: the posterior's own.
        """
        z, precision = self.equations.rows(Phi), self._precision_at(log_alpha)
        if self.checked:
            self._check(precision, lambda: precision.ratio_error(z), "the variance ratio")
        return precision.variance_ratio(z).mT if self.statistics.by_output else precision.variance_ratio(z)

    def variance_ratios(self, Phi: Float[Tensor, "r p"], log_alphas: Float[Tensor, " a"]) -> Float[Tensor, "a r *q"]:
        """The variance ratio for many alphas at once, from squared rotated features."""
        eq, spectrum = self.equations, self.equations.spectrum
        rotated = (eq.rows(Phi) @ spectrum.vectors).square()
        ridge = eq.ridge(log_alphas[:, None] if self.statistics.by_output else log_alphas)
        per_alpha = 1 / (spectrum.values + ridge[..., None])
        ratios = per_alpha.movedim(0, -2) @ rotated.mT + eq.bias_variance[..., None, None]
        return ratios.permute(1, 2, 0) if self.statistics.by_output else ratios

    def mean(self, Phi: Float[Tensor, "r p"]) -> Float[Tensor, "r q"]:
        """Compute the mean Phi W, around the training mean so that a large offset costs no digits.

        Parameters
        ----------
        Phi : Tensor of shape (r, p)
            Affine features.
        """
        eq, z = self.equations, self.equations.rows(Phi)
        centre = eq.target_mean if self.bias_prior == "flat" else torch.zeros_like(eq.target_mean)
        return self._columns(z @ self.precision.penalised_weights + centre[..., None, :])

    def predict(self, Phi: Float[Tensor, "r p"]) -> Marginals:
        """Predict each point: mean, variance ratio and noise. eq:NN_BLL_distribution_targets.

        Parameters
        ----------
        Phi : Tensor of shape (r, p)
            Affine features.
        """
        return Marginals(self.mean(Phi), self.variance_ratio(Phi), self.Sigma_E)

    def joint(self, Phi: Float[Tensor, "r p"], log_alpha: float | Tensor | None = None) -> Joint:
        """Predict all points and outputs jointly.

        Parameters
        ----------
        Phi : Tensor of shape (r, p)
            Affine features.
        log_alpha : float or Tensor, default None
            Another log alpha for the covariance; None: the posterior's own.
        """
        H = self._precision_at(log_alpha).factor.whiten(self.equations.rows(Phi))
        return Joint(self.mean(Phi), H @ H.mT + self.equations.bias_variance[..., None, None], self.Sigma_E)

    def affine(self, log_alpha: float | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(centre, W~, offset, root, shift): with z = phi_tilde - centre, the mean is z W~ + offset.

        h = z root + shift has h h' = phi' Lambda_bar^-1 phi, with the columns ordered by output.
        """
        W, eq, by_output = self._columns(self.precision.penalised_weights), self.equations, self.statistics.by_output
        root = self._precision_at(log_alpha).factor.whiten(torch.eye(eq.gram.shape[-1]).to(eq.gram))
        if self.bias_prior == "shared":  # the bias, the last feature, becomes the offset
            centre, W, offset = W.new_zeros(len(W) - 1), W[:-1], W[-1]
            root, shift = root[..., :-1, :], root[..., -1, :]
        else:
            centre = eq.feature_mean.mean(0) if by_output else eq.feature_mean  # each output has its own mean
            apart = centre - eq.feature_mean
            offset = eq.target_mean[:, 0] + (apart * W.mT).sum(-1) if by_output else eq.target_mean
            # the variance of a free bias adds one column
            shift = torch.cat([(apart[..., None, :] @ root)[..., 0, :], eq.bias_variance.sqrt()[..., None]], -1)
            root = torch.cat([root, torch.zeros_like(root[..., :1])], -1)
        if by_output:
            root, shift = root.movedim(0, 1).flatten(1), shift.flatten()
        return centre, W, offset, root, shift

    def eigenvalues(self) -> Float[Tensor, " k"]:
        """Eigenvalues of the Gram matrix, of all outputs: beside alpha^-1 they show what the data determine."""
        return self.equations.spectrum.values.flatten()

    def sample_weights(self, n: int, *, generator: torch.Generator | None = None) -> Float[Tensor, "n p q"]:
        """Draw W from N(W, Sigma_E (x) Lambda_bar^-1); Phi @ draw is a whole function.

        Parameters
        ----------
        n : int
            Number of draws.
        generator : torch.Generator, default None
            Source of random numbers.
        """
        if self.statistics.by_output:
            each = [self.output(j).sample_weights(n, generator=generator) for j in range(len(self.Sigma_E))]
            return torch.cat(each, -1)
        W, eq = self.precision.penalised_weights, self.equations
        k, q = W.shape
        normal = partial(torch.randn, generator=generator, dtype=W.dtype, device=W.device)
        root = Cholesky.of(self.Sigma_E).L.mT
        draws = W + self.precision.factor.unwhiten(normal(k, n * q)).reshape(k, n, q).transpose(0, 1) @ root
        if self.bias_prior == "shared":
            return draws
        free = normal(n, 1, q) @ root * eq.bias_variance.sqrt()
        bias = eq.target_mean - eq.feature_mean @ draws
        return torch.cat([draws, bias[:, None, :] + free], dim=-2)

    def update(self, statistics: Statistics, *, forgetting: float = 1.0) -> "Posterior":
        """Return the posterior after more rows, of which some targets may be missing unless noise is correlated.

        Parameters
        ----------
        statistics : Statistics
            Statistics of the new rows.
        forgetting : float, default 1.0
            Factor by which old rows are down-weighted first.
        """
        old = self.statistics if forgetting == 1.0 else self.statistics.scaled(forgetting)
        return replace(self, statistics=old + statistics)

    def remove(self, statistics: Statistics) -> "Posterior":
        """Return the posterior without rows that it was computed from.

        Parameters
        ----------
        statistics : Statistics
            Statistics of the rows; a PrecisionError if they are so large that the others have lost their digits.
        """
        rest = replace(self, statistics=self.statistics - statistics)
        error = rest.equations.at(self.log_alpha).weights_error()
        energy, scatter = rest.statistics.energy, torch.linalg.diagonal(rest.statistics.scatter)
        left = (scatter - 100 * ROUNDING * energy).clamp_min(0.0)  # a lower bound that excludes rounding errors
        refit = NormalEquations.of(replace(rest.statistics, energy=left), self.bias_prior).at(self.log_alpha)
        if not bool((error <= (100 * refit.weights_error()).clamp_min(REMOVAL_RTOL)).all()):
            raise PrecisionError(
                f"without these rows the weights would be accurate only to {float(error.max()):.0e}: the rows are so "
                "much larger than the remaining ones that float64 moments have lost the digits of the latter. Fit "
                "again on the remaining rows"
            )
        return rest

    def output(self, j: int) -> "Posterior":
        """The posterior of one output."""
        return replace(self, statistics=self.statistics.output(j), noise_cov=self.Sigma_E[j : j + 1, j : j + 1])

    def _precision_at(self, log_alpha: float | Tensor | None) -> Precision:
        return self.precision if log_alpha is None else self.equations.at(log_alpha, by_spectrum=True)

    def _columns(self, x: Float[Tensor, "*q k r"]) -> Float[Tensor, "k q"]:
        """One column per output, also where they are a batch."""
        return x[..., 0].mT if self.statistics.by_output else x

    def _check(self, precision: Precision, error: Callable[[], Tensor], what: str) -> None:
        """Raise an error if rounding matters; a large alpha^-1 or large eigenvalues rule that out for every point."""
        if self.statistics.by_output or math.isinf(float(precision.log_alpha)):
            return
        eq, allowed = self.equations, 0.1 * RTOL
        moments = eq.resolution * eq.n_penalised / precision.ridge
        centring = 2 * EPS * eq.feature_mean.norm() * (eq.count / precision.ridge).sqrt()
        if bool(moments + centring <= allowed) or precision.worst_ratio_error <= allowed:
            return
        with torch.no_grad():
            worst = float(error().max())
        if not worst <= RTOL:
            limit = -math.log(float(eq.resolution) / RTOL)
            raise PrecisionError(
                f"at log_alpha={float(precision.log_alpha):.4g} {what} would be accurate only to {worst:.0e}, and "
                f"{RTOL:g} is required: the features are too close to collinear for float64 moments. "
                f"Rescale or drop collinear features, or take log_alpha below about {limit:.3g}"
            )


def leave_one_out_cost(cost: Float[Tensor, "*b m"]) -> Float[Tensor, "*b m"]:
    """Compute the affine cost of each sample if it were not among the samples, c / (1 - c), to compare others with.

    Parameters
    ----------
    cost : Tensor of shape (..., m)
        Affine cost of the samples themselves.
    """
    return cost / (1 - cost).clamp_min(torch.finfo(cost.dtype).eps)
