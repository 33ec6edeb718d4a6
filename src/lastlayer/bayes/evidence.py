"""The negative log marginal likelihood (NLML) of a Bayesian last layer in every form of the paper, and its optimum."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from numpy import ndarray
from torch import Tensor
from torch.autograd.function import once_differentiable

from lastlayer._internal.numbers import LOG_2PI, TINY
from lastlayer._internal.work import row_chunks, threads_for
from lastlayer.bayes.noise_groups import StatisticsByNoise
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.precision import Cholesky, NormalEquations, noise_covariance
from lastlayer.bayes.statistics import Statistics, linear_features
from lastlayer.errors import InputError
from lastlayer.settings.types import NEEDS_EVERY_TARGET, NO_NOISE_PRIOR, BiasPrior, NoisePrior, NoiseStructure

GRADIENT_ROWS = 1_024
PLATEAU = 1e-6
"""Differences in evidence below this, in nats per sample, are ignored."""
ALPHA_TOL, MAX_STEPS = 1e-10, 200
"""Tolerance on log alpha, and the largest number of iterations."""
SCANNED = {"cpu": 2**17, "cuda": 2**25}
"""Largest number of values held in memory at once in a scan over alpha, per device type."""
STARTS, LIMITS = ((-2.0, 2.0, 6.0), (-0.5, -2.0, -4.0)), ((-25.0, 25.0), (-13.8, 5.0))
"""Starting values and limits of log alpha and the log noise standard deviation; the search begins at the best pair."""
SEARCH = {"ftol": 1e-9, "maxiter": 60}
STACKED = 2**22
"""Maximum number of entries of the Gram matrices in a batch: wide models are processed one by one."""


def general_nlml(
    Phi: Float[Tensor, "m p"], t: Float[Tensor, " m"], Sigma_E: Float[Tensor, "m m"], Sigma_W: Float[Tensor, "p p"]
) -> Float[Tensor, ""]:
    """Compute the total NLML of one output under any noise and prior covariance. eq:LogMarginalLikelihood (Lemma 2).

    Parameters
    ----------
    Phi, t : Tensor of shape (m, p), Tensor of shape (m,)
        Affine features and targets; several outputs are one with features I (x) Phi and stacked targets.
    Sigma_E, Sigma_W : Tensor of shape (m, m), Tensor of shape (p, p)
        Covariance of the noise, and prior covariance of the weights.
    """
    E, P = Cholesky.of(Sigma_E), Cholesky.of(Sigma_W)
    eye = torch.eye(Phi.shape[-1], dtype=Phi.dtype, device=Phi.device)
    Lambda = Cholesky.of(Phi.mT @ E.solve(Phi) + P.solve(eye))  # eq:Lambda_p_posterior
    w = Lambda.solve(Phi.mT @ E.solve(t[:, None]))  # eq:w_bar_posterior
    misfit = E.whiten((t[:, None] - Phi @ w).mT).square().sum() + P.whiten(w.mT).square().sum()
    return (len(t) * LOG_2PI + P.logdet() + E.logdet() + Lambda.logdet() + misfit) / 2


def nlml(
    Phi: Float[Tensor, "*b m p"],
    T: Float[Tensor, "*b m q"],
    log_alpha: Float[Tensor, "*b"],
    log_sigma_e: Float[Tensor, "*b q"],
    *,
    W: Float[Tensor, "*b p q"] | None = None,
    bias_prior: BiasPrior = "flat",
    sample_weight: Float[Tensor, "*#b m"] | None = None,
) -> Float[Tensor, "*b"]:
    """Compute the NLML per sample with one noise variance per output and one alpha, differentiably.

    eq:LMLH_multivariate_simplified, eq:LMLH_alpha_cost.

    Parameters
    ----------
    Phi, T : Tensor of shape (..., m, p), Tensor of shape (..., m, q)
        Affine features and targets.
    log_alpha, log_sigma_e : Tensor of shape (...), Tensor of shape (..., q)
        Logarithms of the signal-to-noise ratio, and of the noise standard deviation of each output.
    W : Tensor of shape (..., p, q), default None
        Weights for the augmented objective of Theorem 1, eq:LMLH_Optim_unconstrained; None: its minimum, the NLML.
    bias_prior : "flat" or "shared", default "flat"
        Prior on the bias.
    sample_weight : Tensor of shape (..., m), default None
        Weight of each row.
    """
    equations = NormalEquations.of(Statistics.from_features(Phi, T, sample_weight=sample_weight), bias_prior)
    precision = equations.at(log_alpha)
    W = precision.weights if W is None else W
    Phi = Phi.to(W.dtype)
    penalised = W[..., : equations.n_penalised, :]
    w = 1.0 if sample_weight is None else sample_weight[..., None]
    S = (w * (T - Phi @ W).square()).sum(-2) + precision.ridge[..., None] * penalised.square().sum(-2)
    misfit = (S * torch.exp(-2 * log_sigma_e)).sum(-1)
    return precision.nlml(2 * log_sigma_e.sum(-1), misfit)


def profiled_nlml(
    Phi: Float[Tensor, "*b m p"],
    T: Float[Tensor, "*b m q"],
    log_alpha: Float[Tensor, "*b"],
    *,
    noise: NoiseStructure = "diagonal",
    bias_prior: BiasPrior = "flat",
    sample_weight: Float[Tensor, "*#b m"] | None = None,
) -> Float[Tensor, "*b"]:
    """Compute eq:LMLH_multivariate_simplified, the NLML per sample, with weights and noise at their optimum.

    The gradient with respect to Phi, T and log alpha is computed in closed form (envelope theorem).

    Parameters
    ----------
    Phi, T : Tensor of shape (..., m, p), Tensor of shape (..., m, q)
        Affine features and targets.
    log_alpha : Tensor of shape (...)
        Logarithm of the signal-to-noise ratio.
    noise, bias_prior : str, default "diagonal" and "flat"
        Noise covariance between the outputs ("full": correlated), and prior on the bias ("shared": as the weights).
    sample_weight : Tensor of shape (..., m), default None
        Weight of each row; rows of weight zero have no effect, so folds can be given as weights.
    """
    J: Tensor = _ProfiledNLML.apply(Phi, T, log_alpha, noise, bias_prior, sample_weight)
    return J


class _ProfiledNLML(torch.autograd.Function):
    """J and its gradient with respect to the linear features, the targets and log alpha."""

    @staticmethod
    def forward(ctx: Any, Phi: Tensor, T: Tensor, log_alpha: Tensor, *options: Any) -> Tensor:
        phi_tilde, (noise, bias_prior, sample_weight) = linear_features(Phi), options
        statistics = Statistics.from_linear_features(phi_tilde, T, sample_weight=sample_weight)
        equations = NormalEquations.of(statistics, bias_prior)
        precision = equations.at(log_alpha)
        W, k = precision.weights, statistics.n_linear
        # from residuals, not from differences of moments, which lose digits where the fit is nearly exact
        R = (T - phi_tilde.to(W.dtype) @ W[..., :k, :]) - W[..., k:, :]
        wR = R if sample_weight is None else sample_weight[..., None] * R
        W_ = precision.penalised_weights
        S = R.mT @ wR + precision.ridge[..., None, None] * (W_.mT @ W_)
        Sigma_E = Cholesky.of(noise_covariance(S, equations, noise)[0])
        J = precision.nlml(Sigma_E.logdet(), torch.linalg.diagonal(Sigma_E.solve(S)).sum(-1))
        ctx.save_for_backward(Phi, wR, *([] if sample_weight is None else [sample_weight]))
        ctx.precision, ctx.Sigma_E, ctx.log_alpha_type = precision, Sigma_E, log_alpha.dtype
        return J

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        Phi, wR, *weight = ctx.saved_tensors
        precision, equations = ctx.precision, ctx.precision.equations
        k, q, m = Phi.shape[-1] - 1, wR.shape[-1], equations.count
        W = precision.penalised_weights
        inverse = precision.factor.solve(torch.eye(equations.n_penalised, dtype=W.dtype, device=W.device))
        scale = (grad / m)[..., None, None]
        pull = scale * ctx.Sigma_E.solve(wR.mT).mT
        d_phi = d_T = d_log_alpha = None
        if ctx.needs_input_grad[0]:
            d_phi = torch.zeros_like(Phi)
            M, N = (q * scale * inverse)[..., :k], W[..., :k, :].mT
            for rows in row_chunks(Phi.shape[-2], GRADIENT_ROWS):
                part = equations.rows(Phi[..., rows, :]) @ M
                if weight:
                    part = part * weight[0][..., rows, None]
                d_phi[..., rows, :-1] = part - pull[..., rows, :] @ N
        if ctx.needs_input_grad[1]:
            d_T = pull
        if ctx.needs_input_grad[2]:
            spread = precision.ridge * torch.linalg.diagonal(inverse).sum(-1)
            size = precision.ridge * torch.linalg.diagonal(ctx.Sigma_E.solve(W.mT @ W)).sum(-1)
            d_log_alpha = (grad * (q * (equations.n_penalised - spread) - size) / (2 * m)).to(ctx.log_alpha_type)
        return d_phi, d_T, d_log_alpha, None, None, None


def statistics_nlml(
    statistics: Statistics, log_alpha: Float[Tensor, "*b"], *, bias_prior: BiasPrior = "flat"
) -> Float[Tensor, "*b"]:
    """Compute the profiled NLML from statistics, differentiably."""
    equations = NormalEquations.of(statistics, bias_prior)
    precision = equations.at(log_alpha[..., None] if equations.by_output else log_alpha)
    W = precision.penalised_weights
    S = equations.targets - W.mT @ equations.cross
    Sigma_E = Cholesky.of(noise_covariance(S, equations)[0])
    return precision.nlml(Sigma_E.logdet(), torch.linalg.diagonal(Sigma_E.solve(S)).sum(-1))


def known_noise_nlml(
    statistics: Statistics,
    log_alpha: Float[Tensor, "*b"],
    log_sigma_e: Float[Tensor, "*b q"],
    *,
    bias_prior: BiasPrior = "flat",
) -> Float[Tensor, "*b"]:
    """Compute the NLML per sample of targets whose noise variances are partly or wholly known."""
    equations = NormalEquations.of(statistics.each_output(), bias_prior)
    precision = equations.at(log_alpha[..., None])
    S = equations.targets - precision.penalised_weights.mT @ equations.cross
    return precision.nlml(2 * log_sigma_e, S[..., 0, 0] * torch.exp(-2 * log_sigma_e))


@dataclass(frozen=True)
class Profile:
    """Profiled evidence of fixed features at one alpha."""

    nlml: Float[Tensor, "*b"]
    """Negative log marginal likelihood per sample."""
    noise_cov: Float[Tensor, "*b q q"]
    """Noise covariance that attains it."""
    floored: Bool[Tensor, "*b"]
    """Whether the noise was raised to its floor."""
    slope: Float[Tensor, "*b"]
    """dJ/dlog alpha."""
    determined: Float[Tensor, "*b"]
    """gamma: effective number of features determined by the data, sum lambda / (lambda + alpha^-1)."""
    fixed_point: Float[Tensor, "*b"]
    """log of tr(Sigma_E^-1 W~'W~) / (q sum lambda / (lambda + alpha^-1)); equals log alpha where the slope is 0."""


def profile(
    statistics: Statistics,
    log_alpha: float | Float[Tensor, "*a"],
    *,
    noise: NoiseStructure = "diagonal",
    bias_prior: BiasPrior = "flat",
) -> Profile:
    """Compute the profiled evidence from statistics alone: one eigendecomposition, then O(k^2 q) per alpha.

    Parameters
    ----------
    statistics, log_alpha : Statistics, float or Tensor
        Statistics of the rows, and one or many logarithms of the signal-to-noise ratio.
    noise, bias_prior : str, default "diagonal" and "flat"
        Noise covariance between the outputs ("full": correlated), and prior on the bias ("shared": as the weights).
    """
    return _profile(NormalEquations.of(statistics, bias_prior), torch.as_tensor(log_alpha, dtype=torch.float64), noise)


def _profile(
    equations: NormalEquations, log_alpha: Tensor, noise: NoiseStructure, prior: NoisePrior = NO_NOISE_PRIOR
) -> Profile:
    """Profile over all outputs, also where each is a separate regression at one common alpha."""
    by_output, q = equations.by_output, equations.cross.shape[-1]
    if by_output and noise != "diagonal":
        raise InputError(NEEDS_EVERY_TARGET)
    precision = equations.at(log_alpha[..., None] if by_output else log_alpha, by_spectrum=True)
    S = equations.misfit(precision.ridge)
    if prior.rows:
        S = S + torch.diag_embed(prior.rows * prior.share * equations.target_energy / equations.n_targets[..., None])
    Sigma_E, floored = noise_covariance(S, equations, noise, prior.rows)
    E, effective = Cholesky.of(Sigma_E), precision.determined
    # V'W~, which has the norm of W~
    VW = equations.rotated[0] / (equations.spectrum.values + precision.ridge[..., None])[..., None]
    size = torch.linalg.diagonal(E.solve(VW.mT @ VW)).sum(-1)
    nlml = precision.nlml(E.logdet(), torch.linalg.diagonal(E.solve(S)).sum(-1) + prior.rows * E.logdet())
    slope = equations.per_sample(q * effective - precision.ridge * size)
    if by_output:
        Sigma_E, floored = torch.diag_embed(Sigma_E[..., 0, 0]), floored.any(-1)
        size, effective, q = size.sum(-1), effective.mean(-1), effective.shape[-1]
    fixed_point = (size.clamp_min(TINY) / (q * effective).clamp_min(TINY)).log()
    return Profile(nlml, Sigma_E, floored, slope, effective, fixed_point)


@dataclass(frozen=True)
class AlphaOptimum:
    """The alpha that maximises the evidence of fixed features."""

    log_alpha: float
    """Logarithm of the optimal alpha."""
    nlml: float
    """Negative log marginal likelihood per sample at the optimum."""
    noise_cov: Float[Tensor, "q q"]
    """Noise covariance at the optimum."""
    determined: float
    """Effective number of features determined by the data."""
    noise_floored: bool
    """Whether the noise was raised to its floor: the features fit the targets without error."""
    at_bound: str
    """Empty at a stationary point; "zero" or "infinity" if the evidence still grows in that direction."""
    n_steps: int
    """Number of iterations."""


def optimal_alpha(
    statistics: Statistics, *, noise: NoiseStructure = "diagonal", bias_prior: BiasPrior = "flat"
) -> AlphaOptimum:
    """Maximise the evidence over alpha and noise for fixed features.

    Parameters
    ----------
    statistics : Statistics
        Statistics of one model.
    noise, bias_prior : str, default "diagonal" and "flat"
        Noise covariance between the outputs ("full": correlated), and prior on the bias ("shared": as the weights).
    """
    if statistics.count.dim():
        raise InputError("optimal_alpha takes the statistics of one model; optimal_alphas takes a batch of them")
    return optimal_alphas(Statistics.stacked([statistics]), noise=noise, bias_prior=bias_prior)[0]


def optimal_alphas(
    statistics: Statistics,
    *,
    noise: NoiseStructure = "diagonal",
    bias_prior: BiasPrior = "flat",
    noise_prior: NoisePrior = NO_NOISE_PRIOR,
) -> list[AlphaOptimum]:
    """Maximise the evidence over alpha and noise for each of a batch of models.

    Parameters
    ----------
    statistics : Statistics
        Statistics with a leading dimension for the models.
    noise, bias_prior : str, default "diagonal" and "flat"
        Noise covariance between the outputs ("full": correlated), and prior on the bias ("shared": as the weights).
    noise_prior : NoisePrior, default NO_NOISE_PRIOR
        Prior on the noise, whose density multiplies the evidence.
    """
    equations = NormalEquations.of(statistics, bias_prior)
    at = partial(_profile, equations, noise=noise, prior=noise_prior)
    *bracket, zero, infinity = _scan(equations, at)
    log_alpha, n_steps = _refine(*bracket, running=~(zero | infinity), at=at)
    end = at(log_alpha)
    columns = (log_alpha, end.nlml, end.determined, end.floored, infinity, zero, n_steps)
    return [
        AlphaOptimum(a, value, cov, gamma, bool(floored), "infinity" if far else "zero" if none else "", int(steps))
        for (a, value, gamma, floored, far, none, steps), cov in zip(
            torch.stack(columns, -1).tolist(), end.noise_cov, strict=True
        )
    ]


def _scan(equations: NormalEquations, at: Callable[[Tensor], Profile]) -> tuple[Shaped[Tensor, " b"], ...]:
    """The largest evidence on a grid between its neighbours; whether it is at the lower end; at the upper, or flat."""
    grid = equations.alpha_range(257)
    at_once = max(1, SCANNED.get(grid.device.type, 2**17) // max(1, equations.cross.numel()))
    nlml = torch.cat([at(part).nlml for part in grid.split(at_once)])
    place, best, last = torch.arange(len(grid), device=grid.device)[:, None], nlml.argmin(0), len(grid) - 1
    of = lambda row: grid.gather(0, row.clamp(0, last)[None])[0]
    worse = (nlml > nlml.gather(0, best[None]) + PLATEAU) & (place < best)
    near = torch.where(worse, place + 1, 0).amax(0)
    # features that fit without error: noise and alpha^-1 shrink together; numbers keep their digits at the near end
    plateau = (best > 0) & (of(best) - of(near) > 2.0)
    start = of(torch.where(plateau, near, best))
    return of(best - 1), start, of(best + 1), best == 0, plateau | (best == last)


def _refine(
    lo: Tensor, log_alpha: Tensor, hi: Tensor, *, running: Tensor, at: Callable[[Tensor], Profile]
) -> tuple[Float[Tensor, " b"], Int[Tensor, " b"]]:
    """log alpha at the maximum, and the number of steps to it: secants to MacKay's fixed point, else bisection."""
    n_steps = torch.zeros_like(running, dtype=torch.long)
    before, gap_before = log_alpha, torch.full_like(log_alpha, math.inf)
    for step in range(MAX_STEPS):
        running = running & (hi - lo > ALPHA_TOL)
        if not bool(running.any()):
            break
        here = at(log_alpha)
        lo, hi = torch.where(here.slope < 0, log_alpha, lo), torch.where(here.slope < 0, hi, log_alpha)
        gap = here.fixed_point - log_alpha
        move = gap * (before - log_alpha) / (gap - gap_before) if step else gap  # fixed point, then secants
        running = running & (move.abs() >= ALPHA_TOL)
        sound = (gap.abs() < 0.5 * gap_before.abs()) & (lo < log_alpha + move) & (log_alpha + move < hi)
        before, gap_before = log_alpha, gap
        log_alpha = torch.where(running, torch.where(sound, log_alpha + move, (lo + hi) / 2), log_alpha)
        n_steps = n_steps + running
    return log_alpha, n_steps


def by_evidence(
    sums: Iterable[Statistics | StatisticsByNoise],
    *,
    noise: NoiseStructure = "diagonal",
    bias_prior: BiasPrior = "flat",
    noise_prior: NoisePrior = NO_NOISE_PRIOR,
) -> list[Posterior]:
    """Find the posteriors of several models at the alpha and noise that maximise the evidence.

    Parameters
    ----------
    sums : iterable of Statistics or StatisticsByNoise
        Statistics of each model, or a function of the learned noise that computes them.
    noise, bias_prior : str, default "diagonal" and "flat"
        Noise covariance between the outputs ("full": correlated), and prior on the bias ("shared": as the weights).
    noise_prior : NoisePrior, default NO_NOISE_PRIOR
        Prior on the noise, whose density multiplies the evidence; not used where noise is partly known.
    """
    found: dict[int, Posterior] = {}
    models: dict[int, Statistics] = {}
    for i, each in enumerate(sums):
        if isinstance(each, StatisticsByNoise):
            found[i] = _with_known_noise(each, bias_prior)
        else:
            models[i] = each
    for c in {statistics.mean.shape[-1] for statistics in models.values()}:
        same = [i for i, statistics in models.items() if statistics.mean.shape[-1] == c]
        at_once = max(1, STACKED // (c * c))
        for places in (same[first : first + at_once] for first in range(0, len(same), at_once)):
            stack = Statistics.stacked([models[i] for i in places])
            with threads_for(20 * c**3):
                optima = optimal_alphas(stack, noise=noise, bias_prior=bias_prior, noise_prior=noise_prior)
            for i, best in zip(places, optima, strict=True):
                found[i] = Posterior(models[i], best.log_alpha, best.noise_cov, noise, bias_prior, checked=False)
    return [found[i] for i in range(len(found))]


def _with_known_noise(sums: StatisticsByNoise, bias_prior: BiasPrior) -> Posterior:
    fewer = sums.reduced()
    value = lambda x: known_noise_nlml(fewer(torch.exp(2 * x[1:])), x[0], x[1:], bias_prior=bias_prior)
    q, like = sums.n_outputs, sums.targets[0].t.new_tensor
    with torch.no_grad():
        starts = [like([a, *[e] * q], dtype=torch.float64) for a, e in product(*STARTS)]
        start = min(starts, key=lambda x: np.nan_to_num(float(value(x)), nan=np.inf))
    best = minimum(value, start, [LIMITS[0], *[LIMITS[1]] * q])
    learned = like(np.exp(2 * best.x[1:]), dtype=torch.float64)
    with torch.no_grad():
        end = sums(learned)
    return Posterior(end, float(best.x[0]), torch.diag(learned), "diagonal", bias_prior, checked=False)


def minimum(value: Callable[[Tensor], Tensor], start: Tensor, limits: list[tuple[float, float]]) -> Any:
    """Minimise a function within limits by L-BFGS, with gradients by torch."""
    from scipy.optimize import minimize  # slow to import

    def value_and_slope(x: ndarray) -> tuple[float, ndarray]:
        numbers = torch.tensor(x, device=start.device, requires_grad=True)
        J = value(numbers)
        J.backward()
        return float(J.detach()), numbers.grad.cpu().numpy()  # type: ignore[union-attr]

    x = start.cpu().numpy()
    return minimize(value_and_slope, x, jac=True, method="L-BFGS-B", bounds=limits, options=SEARCH)
