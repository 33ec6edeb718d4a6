"""What training minimises: the evidence with weights and noise profiled out, exact, or augmented (Theorem 1)."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.errors import InputError, choose
from lastlayer.evidence import nlml, profiled_nlml
from lastlayer.features import affine_features
from lastlayer.types import BiasPrior, NoiseStructure

INITIAL_LOG_ALPHA = 4.0
INITIAL_LOG_SIGMA_E = -1.0


class Objective(nn.Module):
    """Negative log marginal likelihood per sample of linear features; its parameters are trained with the network's."""

    def __init__(self, *, bias_prior: BiasPrior) -> None:
        super().__init__()
        self.bias_prior = bias_prior
        self.log_alpha = nn.Parameter(torch.tensor(INITIAL_LOG_ALPHA, dtype=torch.float64))

    def forward(
        self, phi_tilde: Float[Tensor, "m k"], T: Float[Tensor, "m q"], sample_weight: Float[Tensor, " m"] | None
    ) -> Float[Tensor, ""]:
        raise NotImplementedError


class Profiled(Objective):
    """Weights and noise at their optimum at every step; only alpha is left to learn."""

    def __init__(self, *, bias_prior: BiasPrior, noise: NoiseStructure) -> None:
        super().__init__(bias_prior=bias_prior)
        self.noise = noise

    def forward(
        self, phi_tilde: Float[Tensor, "m k"], T: Float[Tensor, "m q"], sample_weight: Float[Tensor, " m"] | None
    ) -> Float[Tensor, ""]:
        return profiled_nlml(
            affine_features(phi_tilde),
            T,
            self.log_alpha,
            noise=self.noise,
            bias_prior=self.bias_prior,
            sample_weight=sample_weight,
        )


class Exact(Objective):
    """Weights at their optimum, noise learned (Result 3)."""

    def __init__(self, n_outputs: int, *, bias_prior: BiasPrior) -> None:
        super().__init__(bias_prior=bias_prior)
        self.log_sigma_e = nn.Parameter(torch.full((n_outputs,), INITIAL_LOG_SIGMA_E, dtype=torch.float64))

    def weights(self) -> Tensor | None:
        return None

    def forward(
        self, phi_tilde: Float[Tensor, "m k"], T: Float[Tensor, "m q"], sample_weight: Float[Tensor, " m"] | None
    ) -> Float[Tensor, ""]:
        return nlml(
            affine_features(phi_tilde),
            T,
            self.log_alpha,
            self.log_sigma_e,
            W=self.weights(),
            bias_prior=self.bias_prior,
            sample_weight=sample_weight,
        )


class Augmented(Exact):
    """Weights and noise learned (Theorem 1): the paper's own objective."""

    def __init__(
        self, n_features: int, n_outputs: int, *, bias_prior: BiasPrior, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(n_outputs, bias_prior=bias_prior)
        W = torch.zeros(n_features + 1, n_outputs, dtype=torch.float64)
        nn.init.xavier_uniform_(W[:-1], generator=generator)
        self.W = nn.Parameter(W)

    def weights(self) -> Tensor:
        return self.W


def make_objective(
    name: str,
    *,
    n_features: int,
    n_outputs: int,
    noise: NoiseStructure,
    bias_prior: BiasPrior,
    generator: torch.Generator | None = None,
) -> Objective:
    """The objective of that name."""
    makers: dict[str, Callable[[], Objective]] = {
        "profiled": lambda: Profiled(bias_prior=bias_prior, noise=noise),
        "exact": lambda: Exact(n_outputs, bias_prior=bias_prior),
        "augmented": lambda: Augmented(n_features, n_outputs, bias_prior=bias_prior, generator=generator),
    }
    make = makers[choose("objective", name, makers)]
    if noise == "full" and name != "profiled":
        raise InputError(f'noise="full" needs objective="profiled"; objective="{name}" learns one noise an output')
    return make()
