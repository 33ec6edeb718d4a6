"""Training objectives: the evidence, profiled, augmented (Theorem 1) or with known noise; and squared error."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.bayes.evidence import known_noise_nlml, nlml, profiled_nlml, statistics_nlml
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.held_out import held_out_lpd
from lastlayer.bayes.posterior import Posterior
from lastlayer.data.rows import Points, Rows
from lastlayer.settings.types import BiasPrior, NoiseStructure

INITIAL_LOG_ALPHA = 4.0
INITIAL_LOG_SIGMA_E = -1.0
Generators: TypeAlias = torch.Generator | Sequence[torch.Generator]
"""Generator of one network, or of each network in a stack."""


class Objective(nn.Module):
    """Negative log marginal likelihood per sample of linear features; its parameters are trained with the network's."""

    def __init__(
        self, *, bias_prior: BiasPrior, noise: NoiseStructure = "diagonal", shape: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.bias_prior: BiasPrior = bias_prior
        self.noise: NoiseStructure = noise
        self.log_alpha = nn.Parameter(torch.full(shape, INITIAL_LOG_ALPHA, dtype=torch.float64))

    def forward(
        self,
        phi_tilde: Float[Tensor, "*s m k"],
        T: Float[Tensor, "*s m q"],
        sample_weight: Float[Tensor, "*s m"] | None,
    ) -> Float[Tensor, "*s"]:
        """NLML of linear features."""
        return self.of_features(affine_features(phi_tilde), T, sample_weight)

    def of_features(self, Phi: Tensor, T: Tensor, weight: Tensor | None) -> Tensor:
        """NLML of affine features."""
        raise NotImplementedError

    def of_rows(self, linear: Callable[[Tensor], Tensor], rows: Rows) -> Tensor:
        """NLML of a network that maps rows to linear features; some targets may be missing."""
        main = rows.main
        if rows.complete:
            return self(linear(main.X), main.readings.t, main.weight)
        return statistics_nlml(rows.statistics(linear), self.log_alpha, bias_prior=self.bias_prior)

    @property
    def learned_noise_cov(self) -> Float[Tensor, "q q"] | None:
        """Noise covariance of one network, if it is a parameter; None if it follows in closed form."""
        return None

    def held_out_score(self, phi: Tensor, rest: Points, phi_held: Tensor, held: Points) -> Float[Tensor, ""]:
        """Score for early stopping: the negative LPD of held-out rows under the posterior given the other rows."""
        noise_cov = self.learned_noise_cov
        rows, learned = replace(rest, X=phi.double().detach()), None if noise_cov is None else noise_cov.diagonal()
        statistics = rows.statistics(lambda features: features, learned)
        posterior = Posterior(
            statistics, float(self.log_alpha), noise_cov, noise=self.noise, bias_prior=self.bias_prior, checked=False
        )
        return torch.tensor(-held_out_lpd(posterior, affine_features(phi_held).double(), held.readings.values))


class Profiled(Objective):
    """Weights and noise at their optimum at every step; only alpha is learned."""

    def of_features(self, Phi: Tensor, T: Tensor, weight: Tensor | None) -> Tensor:
        """NLML of affine features."""
        return profiled_nlml(Phi, T, self.log_alpha, noise=self.noise, bias_prior=self.bias_prior, sample_weight=weight)


class KnownNoise(Objective):
    """Weights at their optimum; the learned noise, in addition to the known noise, is a parameter."""

    def __init__(self, n_outputs: int, *, bias_prior: BiasPrior, shape: tuple[int, ...] = ()) -> None:
        super().__init__(bias_prior=bias_prior, shape=shape)
        self.log_sigma_e = nn.Parameter(torch.full((*shape, n_outputs), INITIAL_LOG_SIGMA_E, dtype=torch.float64))

    @property
    def learned_noise_cov(self) -> Float[Tensor, "q q"]:
        """Covariance of the learned noise."""
        return torch.diag(torch.exp(2 * self.log_sigma_e.detach()))

    def of_rows(self, linear: Callable[[Tensor], Tensor], rows: Rows) -> Tensor:
        """NLML of a network on rows whose noise may be known, and on observed functionals."""
        learned = torch.exp(2 * self.log_sigma_e)
        seen = rows.statistics(linear, learned)
        return known_noise_nlml(seen, self.log_alpha, self.log_sigma_e, bias_prior=self.bias_prior)


class Augmented(Objective):
    """Weights and noise learned (Theorem 1): the paper's own objective."""

    def __init__(
        self, n_features: int, n_outputs: int, *, bias_prior: BiasPrior, generator: Generators | None = None
    ) -> None:
        W = output_layer(n_features, n_outputs, generator)
        super().__init__(bias_prior=bias_prior, shape=W.shape[:-2])
        shape = (*W.shape[:-2], n_outputs)
        self.log_sigma_e = nn.Parameter(torch.full(shape, INITIAL_LOG_SIGMA_E, dtype=torch.float64))
        self.W = W

    def of_features(self, Phi: Tensor, T: Tensor, weight: Tensor | None) -> Tensor:
        """NLML of affine features."""
        log_alpha, log_sigma_e = self.log_alpha, self.log_sigma_e
        return nlml(Phi, T, log_alpha, log_sigma_e, W=self.W, bias_prior=self.bias_prior, sample_weight=weight)


class MeanSquaredError(Objective):
    """Squared error of a plain output layer, without evidence, as networks are commonly trained."""

    def __init__(
        self,
        n_features: int,
        n_outputs: int,
        *,
        bias_prior: BiasPrior,
        noise: NoiseStructure = "diagonal",
        generator: Generators | None = None,
    ) -> None:
        W = output_layer(n_features, n_outputs, generator)
        super().__init__(bias_prior=bias_prior, noise=noise, shape=W.shape[:-2])
        self.log_alpha.requires_grad_(False)
        self.W = W

    def of_features(self, Phi: Tensor, T: Tensor, weight: Tensor | None) -> Tensor:
        """Weighted mean squared error."""
        error = (T - Phi.to(self.W.dtype) @ self.W).square().mean(-1)
        return error.mean(-1) if weight is None else (weight * error).sum(-1) / weight.sum(-1)

    def held_out_score(self, phi: Tensor, rest: Points, phi_held: Tensor, held: Points) -> Float[Tensor, ""]:
        """Score for early stopping: the mean squared error on held-out rows."""
        return self(phi_held, held.T, held.weight)


def output_layer(n_features: int, n_outputs: int, generator: Generators | None) -> nn.Parameter:
    """Initial weights of a trained last layer, with a zero bias in the last row; stacked for several generators."""
    if isinstance(generator, Sequence):
        return nn.Parameter(torch.stack([output_layer(n_features, n_outputs, g).detach() for g in generator]))
    W = torch.zeros(n_features + 1, n_outputs, dtype=torch.float64)
    nn.init.xavier_uniform_(W[:-1], generator=generator)
    return nn.Parameter(W)
