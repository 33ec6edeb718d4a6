"""What training minimises: the evidence with weights and noise profiled out, exact, or augmented (Theorem 1)."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.errors import InputError, choose
from lastlayer.evidence import nlml, profiled_nlml
from lastlayer.extrapolation import held_out_lpd
from lastlayer.features import affine_features
from lastlayer.posterior import Posterior
from lastlayer.statistics import CHUNK_ROWS, Statistics
from lastlayer.types import BiasPrior, NoiseStructure

INITIAL_LOG_ALPHA = 4.0
INITIAL_LOG_SIGMA_E = -1.0


@dataclass(frozen=True)
class Data:
    """Inputs, standardised targets and sample weights."""

    X: Tensor
    T: Tensor
    weight: Tensor | None = None

    def rows(self, rows: Tensor | slice) -> "Data":
        """Some of the rows."""
        return Data(self.X[rows], self.T[rows], None if self.weight is None else self.weight[rows])

    def chunks(self) -> "Iterator[Data]":
        """All rows, in pieces that fit into memory with their features."""
        return (self.rows(slice(start, start + CHUNK_ROWS)) for start in range(0, len(self.X), CHUNK_ROWS))


class Objective(nn.Module):
    """Negative log marginal likelihood per sample of linear features; its parameters are trained with the network's."""

    def __init__(self, *, bias_prior: BiasPrior, noise: NoiseStructure = "diagonal") -> None:
        super().__init__()
        self.bias_prior: BiasPrior = bias_prior
        self.noise: NoiseStructure = noise
        self.log_alpha = nn.Parameter(torch.tensor(INITIAL_LOG_ALPHA, dtype=torch.float64))

    def forward(
        self, phi_tilde: Float[Tensor, "m k"], T: Float[Tensor, "m q"], sample_weight: Float[Tensor, " m"] | None
    ) -> Float[Tensor, ""]:
        raise NotImplementedError

    def held_out_score(self, phi: Tensor, rest: Data, phi_held: Tensor, held: Data) -> float:
        """What early stopping minimises: the negative LPD of held-out rows under the posterior of the others."""
        statistics = Statistics.from_features(affine_features(phi).double(), rest.T, sample_weight=rest.weight)
        posterior = Posterior(
            statistics, float(self.log_alpha), noise=self.noise, bias_prior=self.bias_prior, rtol=math.inf
        )
        return -held_out_lpd(posterior, affine_features(phi_held).double(), held.T)


class Profiled(Objective):
    """Weights and noise at their optimum at every step; only alpha is left to learn."""

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
        self.W = output_layer(n_features, n_outputs, generator)

    def weights(self) -> Tensor:
        return self.W


class MeanSquaredError(Objective):
    """No evidence at all: a plain output layer on the squared error, as networks are commonly trained."""

    def __init__(
        self,
        n_features: int,
        n_outputs: int,
        *,
        bias_prior: BiasPrior,
        noise: NoiseStructure,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(bias_prior=bias_prior, noise=noise)
        self.log_alpha.requires_grad_(False)
        self.W = output_layer(n_features, n_outputs, generator)

    def forward(
        self, phi_tilde: Float[Tensor, "m k"], T: Float[Tensor, "m q"], sample_weight: Float[Tensor, " m"] | None
    ) -> Float[Tensor, ""]:
        return mean_squared_error(phi_tilde, T, self.W, sample_weight)

    def held_out_score(self, phi: Tensor, rest: Data, phi_held: Tensor, held: Data) -> float:
        return float(self(phi_held, held.T, held.weight))


def mean_squared_error(
    phi_tilde: Float[Tensor, "*b m k"],
    T: Float[Tensor, "*#b m q"],
    W: Float[Tensor, "*b p q"],
    sample_weight: Float[Tensor, "*#b m"] | None,
) -> Float[Tensor, "*b"]:
    """Squared error of a plain last layer, averaged over outputs and weighted rows."""
    error = (T - affine_features(phi_tilde).to(W.dtype) @ W).square().mean(-1)
    return error.mean(-1) if sample_weight is None else (sample_weight * error).sum(-1) / sample_weight.sum(-1)


def output_layer(n_features: int, n_outputs: int, generator: torch.Generator | None) -> nn.Parameter:
    """Initial weights of a last layer that is trained, with a bias of zero in the last row."""
    W = torch.zeros(n_features + 1, n_outputs, dtype=torch.float64)
    nn.init.xavier_uniform_(W[:-1], generator=generator)
    return nn.Parameter(W)


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
        "mse": lambda: MeanSquaredError(n_features, n_outputs, bias_prior=bias_prior, noise=noise, generator=generator),
    }
    make = makers[choose("objective", name, makers)]
    if noise == "full" and name in ("exact", "augmented"):
        raise InputError(f'noise="full" needs objective="profiled"; objective="{name}" learns one noise an output')
    return make()
