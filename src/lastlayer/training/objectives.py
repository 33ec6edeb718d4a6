"""Rows, and what training minimises on them: the evidence, profiled, exact or augmented (Theorem 1)."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lastlayer.errors import check_choice
from lastlayer.evidence import known_noise_nlml, nlml, profiled_nlml, statistics_nlml
from lastlayer.extrapolation import held_out_lpd
from lastlayer.features import affine_features
from lastlayer.observe import StandardObservations
from lastlayer.posterior import Posterior
from lastlayer.statistics import CHUNK_ROWS, OutputStatistics, Statistics, row_chunks
from lastlayer.types import BiasPrior, NoiseStructure

INITIAL_LOG_ALPHA = 4.0
INITIAL_LOG_SIGMA_E = -1.0
Generators: TypeAlias = torch.Generator | Sequence[torch.Generator]
"""Of one network, or of each in a stack."""


@dataclass(frozen=True)
class Data:
    """Inputs, standardised targets and sample weights: (m,), or (s, m) for a stack of networks."""

    X: Tensor
    T: Tensor
    weight: Tensor | None = None
    present: Tensor | None = None
    """Like T: 1 where a target is known, 0 where it is missing; None: all are known."""
    noise_var: Tensor | None = None
    """Like T: known variances of their noise, beside the one that is learned; None: there are none."""
    observations: tuple[StandardObservations, ...] = ()
    """Functionals of the same function."""

    @classmethod
    def partly(
        cls, X: Tensor, T: Tensor, weight: Tensor | None = None, noise_var: Tensor | None = None, **more: Any
    ) -> "Data":
        """Targets of which some may be missing (NaN)."""
        missing = T.isnan()
        present = (~missing).to(T) if bool(missing.any()) else None
        return cls(X, T.nan_to_num(0.0), weight, present, noise_var, **more)

    @property
    def alike(self) -> bool:
        """Whether all targets of all rows are known, with the same noise, and nothing else is."""
        return self.present is None and self.noise_var is None and not self.observations

    @property
    def learned_noise(self) -> bool:
        """Whether the noise is what is learned, everywhere."""
        return self.noise_var is None and not self.observations

    def rows(self, rows: Tensor | slice) -> "Data":
        """Some of the rows."""
        rows = rows.to(self.X.device) if isinstance(rows, Tensor) else rows
        names = ("X", "T", "weight", "present", "noise_var")
        return replace(self, **{n: getattr(self, n)[rows] for n in names if getattr(self, n) is not None})

    def sampled(self, at: Int[Tensor, " n"]) -> "Data":
        """Some rows, each with the weight of all that it stands for; of a stack, those of every network."""
        m = self.X.shape[-2]
        weight = torch.ones(m, dtype=torch.float64, device=self.X.device) if self.weight is None else self.weight
        rows = {
            n: getattr(self, n)[..., at, :] for n in ("X", "T", "present", "noise_var") if getattr(self, n) is not None
        }
        return replace(self, **rows, weight=weight[..., at] * (m / len(at)))

    @property
    def varied(self) -> bool:
        """Whether every target has at least two values."""
        return all(bool(len(t[~t.isnan()].unique()) > 1) for t in self.known.T)

    @property
    def known(self) -> Tensor:
        """Targets, NaN where they are missing."""
        return self.T if self.present is None else torch.where(self.present > 0, self.T, torch.nan)

    def statistics(self, linear: Callable[[Tensor], Tensor], learned: Tensor | None = None) -> Statistics:
        """Of linear features, some rows after the others; of each output apart where these differ in their rows.

        `learned`: (q,) variances of the noise that is learned, where some of it is known.
        """
        total: Statistics | None = None
        for part in self.chunks():
            Phi = affine_features(linear(part.X)).double()
            if self.alike:
                more = Statistics.from_features(Phi, part.T, sample_weight=part.weight)
            else:
                more = OutputStatistics.from_rows(Phi, part.T, part.precision(learned), sample_weight=part.weight)
            total = more if total is None else total + more
        assert total is not None
        if not self.observations:
            return total
        assert learned is not None
        return total + self.of_observations(linear, learned)

    def precision(self, learned: Float[Tensor, "*b q"] | None) -> Float[Tensor, "*b m q"]:
        """Of each target: the variance of the noise that is learned over all that it has; 0 where it is missing."""
        whole = torch.ones_like(self.T)
        if self.noise_var is not None:
            assert learned is not None
            whole = 1 / (1 + self.noise_var / learned[..., None, :])
        return whole if self.present is None else whole * self.present

    def log_variances(self, learned: Float[Tensor, "*b q"]) -> Float[Tensor, "*b q"]:
        """Sums over the targets of each output of the log of their noise's variance."""
        v = learned[..., None, :].expand(*learned.shape[:-1], *self.T.shape[-2:])
        v = (v if self.noise_var is None else v + self.noise_var).log()
        v = v if self.present is None else v * self.present
        total = (v if self.weight is None else v * self.weight[..., None]).sum(-2)
        for seen in self.observations:
            j = seen.functionals.output
            more = seen.variances(learned[..., j]).log().sum(-1)
            total = total + more[..., None] * torch.eye(learned.shape[-1]).to(learned)[j]
        return total

    def of_observations(self, linear: Callable[[Tensor], Tensor], learned: Float[Tensor, "*b q"]) -> OutputStatistics:
        """Statistics of the functionals."""
        parts: dict[int, Statistics] = {}
        for seen in self.observations:
            j = seen.functionals.output
            Psi = seen.functionals.features(linear, self.X).double()
            precision = learned[..., j, None] / seen.variances(learned[..., j])
            more = Statistics.from_functionals(Psi, seen.t.to(Psi)[:, None], precision)
            parts[j] = parts[j] + more if j in parts else more
        nothing = next(iter(parts.values())).nothing()
        return OutputStatistics.of_outputs([parts.get(j, nothing) for j in range(learned.shape[-1])])

    def chunks(self, size: int = CHUNK_ROWS) -> "Iterator[Data]":
        """All rows, in pieces that fit into memory with their features."""
        return (self.rows(rows) for rows in row_chunks(len(self.X), size))


class Objective(nn.Module):
    """Negative log marginal likelihood per sample of linear features; its parameters are trained with the network's.

    `shape` is () for one network, (s,) for a stack.
    """

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
        return self.of_features(affine_features(phi_tilde), T, sample_weight)

    def of_features(self, Phi: Tensor, T: Tensor, weight: Tensor | None) -> Tensor:
        """Of affine features."""
        raise NotImplementedError

    def of_data(self, linear: Callable[[Tensor], Tensor], data: Data) -> Tensor:
        """Of a network that maps rows to linear features; some targets may be missing."""
        if data.alike:
            return self(linear(data.X), data.T, data.weight)
        Phi = affine_features(linear(data.X)).double()
        statistics = OutputStatistics.from_rows(Phi, data.T, data.precision(None), sample_weight=data.weight)
        return statistics_nlml(statistics, self.log_alpha, bias_prior=self.bias_prior)

    def held_out_score(self, phi: Tensor, rest: Data, phi_held: Tensor, held: Data) -> Float[Tensor, ""]:
        """What early stopping minimises: the negative LPD of held-out rows under the posterior of the others."""
        features = affine_features(phi).double().detach()
        statistics = replace(rest, X=features).statistics(lambda Phi: Phi[..., :-1])
        posterior = Posterior.of(
            statistics, float(self.log_alpha), noise=self.noise, bias_prior=self.bias_prior, rtol=math.inf
        )
        return torch.tensor(-held_out_lpd(posterior, affine_features(phi_held).double(), held.known))


class Profiled(Objective):
    """Weights and noise at their optimum at every step; only alpha is left to learn."""

    def of_features(self, Phi: Tensor, T: Tensor, weight: Tensor | None) -> Tensor:
        return profiled_nlml(Phi, T, self.log_alpha, noise=self.noise, bias_prior=self.bias_prior, sample_weight=weight)


class KnownNoise(Objective):
    """Weights at their optimum; the noise that is learned, beside what is known of it, is a parameter."""

    def __init__(self, n_outputs: int, *, bias_prior: BiasPrior, shape: tuple[int, ...] = ()) -> None:
        super().__init__(bias_prior=bias_prior, shape=shape)
        self.log_sigma_e = nn.Parameter(torch.full((*shape, n_outputs), INITIAL_LOG_SIGMA_E, dtype=torch.float64))

    def of_data(self, linear: Callable[[Tensor], Tensor], data: Data) -> Tensor:
        learned = torch.exp(2 * self.log_sigma_e)
        Phi, precision = affine_features(linear(data.X)).double(), data.precision(learned)
        statistics: Statistics = OutputStatistics.from_rows(Phi, data.T, precision, sample_weight=data.weight)
        if data.observations:
            statistics = statistics + data.of_observations(linear, learned)
        log_variances = data.log_variances(learned)
        return known_noise_nlml(statistics, self.log_alpha, self.log_sigma_e, log_variances, bias_prior=self.bias_prior)


class Exact(Objective):
    """Weights at their optimum, noise learned (Result 3)."""

    def __init__(self, n_outputs: int, *, bias_prior: BiasPrior, W: nn.Parameter | None = None) -> None:
        shape = () if W is None else W.shape[:-2]
        super().__init__(bias_prior=bias_prior, shape=shape)
        self.log_sigma_e = nn.Parameter(torch.full((*shape, n_outputs), INITIAL_LOG_SIGMA_E, dtype=torch.float64))
        self.W = W

    def of_features(self, Phi: Tensor, T: Tensor, weight: Tensor | None) -> Tensor:
        log_alpha, log_sigma_e = self.log_alpha, self.log_sigma_e
        return nlml(Phi, T, log_alpha, log_sigma_e, W=self.W, bias_prior=self.bias_prior, sample_weight=weight)


class Augmented(Exact):
    """Weights and noise learned (Theorem 1): the paper's own objective."""

    def __init__(
        self, n_features: int, n_outputs: int, *, bias_prior: BiasPrior, generator: Generators | None = None
    ) -> None:
        super().__init__(n_outputs, bias_prior=bias_prior, W=output_layer(n_features, n_outputs, generator))


class MeanSquaredError(Objective):
    """No evidence at all: a plain output layer on the squared error, as networks are commonly trained."""

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
        error = (T - Phi.to(self.W.dtype) @ self.W).square().mean(-1)
        return error.mean(-1) if weight is None else (weight * error).sum(-1) / weight.sum(-1)

    def held_out_score(self, phi: Tensor, rest: Data, phi_held: Tensor, held: Data) -> Float[Tensor, ""]:
        return self(phi_held, held.T, held.weight)


def output_layer(n_features: int, n_outputs: int, generator: Generators | None) -> nn.Parameter:
    """Initial weights of a last layer that is trained, with a bias of zero in the last row; a stack of several."""
    if isinstance(generator, Sequence):
        return nn.Parameter(torch.stack([output_layer(n_features, n_outputs, g).detach() for g in generator]))
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
    return makers[check_choice("objective", name, makers)]()
