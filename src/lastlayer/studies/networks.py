"""The study's networks: the paper's recipe for many initialisations and hold-out blocks, trained as one batch.

Member (seed, fold) sees every training row except block `fold` of the training range; fold 0 holds nothing back. The
last layer of each is then put at the maximum of its evidence in closed form.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from lastlayer.evidence import nlml, profile
from lastlayer.extrapolation import AlphaCurve, HeldOut, blocked_folds, tune_alpha, tune_alpha_on
from lastlayer.features import StackedMLP, affine_features
from lastlayer.posterior import Posterior
from lastlayer.prediction import Prediction
from lastlayer.scaling import Standardizer
from lastlayer.statistics import Statistics
from lastlayer.studies.data import PaperData, Samples
from lastlayer.training import (
    Data,
    LastLayer,
    Optimiser,
    last_layer,
    mean_squared_error,
    output_layer,
    train_members,
    train_stack,
)
from lastlayer.types import BiasPrior

HIDDEN = (20, 20, 20)
BIAS_PRIOR: BiasPrior = "shared"
N_BLOCKS = 5


@dataclass(frozen=True)
class Scaled:
    """Standardised inputs and targets."""

    X: Tensor
    T: Tensor


@dataclass(frozen=True)
class Scalers:
    inputs: Standardizer
    targets: Standardizer

    @classmethod
    def of(cls, samples: Samples) -> "Scalers":
        return cls(Standardizer.fit(torch.from_numpy(samples.X)), Standardizer.fit(torch.from_numpy(samples.y)))

    def __call__(self, samples: Samples) -> Scaled:
        return Scaled(
            self.inputs.forward(torch.from_numpy(samples.X)), self.targets.forward(torch.from_numpy(samples.y))
        )


@dataclass(frozen=True)
class FittedNetwork:
    """One initialisation: features, last layer, and alpha tuned honestly and with a leak."""

    features: "Features"
    posterior: Posterior
    nlml: float
    """Per sample, at the evidence's maximum over alpha and noise."""
    honest: AlphaCurve
    """alpha^max on blocks of the training range that the features never saw."""
    leak: AlphaCurve
    """alpha^max on the test set itself, as in the published notebook."""

    targets: Standardizer

    @property
    def noise_std(self) -> Float[ndarray, " q"]:
        """In target units."""
        return (self.posterior.Sigma_E.diagonal().sqrt() * self.targets.scale).numpy()

    def nlml_at(self, log_alphas: Float[ndarray, " a"]) -> Float[ndarray, " a"]:
        """NLML per sample at other alphas, the noise at its optimum for each."""
        return profile(self.posterior.statistics, torch.from_numpy(log_alphas), bias_prior=BIAS_PRIOR).nlml.numpy()

    def predict(self, X: Float[ndarray, "m 1"], log_alpha: float) -> Prediction:
        """In target units, the mean at alpha*, the variance at the alpha given."""
        Phi = self.features(X)
        ratio = self.posterior.variance_ratio(Phi, log_alpha).numpy()
        noise_var = np.square(self.noise_std)
        return Prediction.gaussian(
            (self.posterior.mean(Phi) * self.targets.scale + self.targets.mean).numpy(),
            epistemic_var=ratio[:, None] * noise_var,
            noise_var=noise_var,
            affine_cost=ratio,
        )


@dataclass(frozen=True)
class Features:
    """One member of a stack, from inputs in their own units to affine features."""

    network: StackedMLP
    member: int
    inputs: Standardizer

    def __call__(self, X: Float[ndarray, "m 1"]) -> Float[Tensor, "m p"]:
        with torch.no_grad():
            return affine_features(self.network(self.inputs.forward(torch.from_numpy(X)))[self.member])


@dataclass(frozen=True)
class Budget:
    """The paper's stopping rule."""

    max_epochs: int = 10_000
    patience: int = 1_000
    learning_rate: float = 1e-3
    min_delta: float = 1e-5


BUDGET = Budget()
STRENGTH = 0.1
"""Of the prior on hidden weights in the library's own training, chosen by the LPD of blocks left out (data seed 99)."""


def fit_networks(
    data: PaperData, seeds: list[int], *, loss: str, budget: Budget = BUDGET, progress: bool = False
) -> list[FittedNetwork]:
    """Train every (seed, fold), then finish the last layers.

    "evidence" (BLL) and "mse" (BLR with NN features) are the paper's recipe; "profiled" is the library's own training:
    the profiled evidence with a prior on the hidden weights, no validation rows.
    """
    scale = Scalers.of(data.train)
    train, held, test = scale(data.train), scale(data.validation), scale(data.test)
    blocks = [np.array([], dtype=int), *blocked_folds(data.train.X, N_BLOCKS)]
    s = len(seeds) * len(blocks)
    weight = torch.ones(s, len(train.X), dtype=torch.float64)
    held_weight = torch.ones(s, len(held.X), dtype=torch.float64)
    for i, block in enumerate(blocks * len(seeds)):
        weight[i, block] = 0
        if len(block):  # validation points inside a block would tell the stopping rule about it
            lo, hi = train.X[block].min(), train.X[block].max()
            held_weight[i, ((held.X >= lo) & (held.X <= hi))[:, 0]] = 0
    generators = [torch.Generator().manual_seed(seed) for seed in seeds for _ in blocks]
    network = StackedMLP(1, HIDDEN, generators=generators)
    W = torch.stack([output_layer(HIDDEN[-1], 2, g).detach() for g in generators]).requires_grad_()
    log_alpha = torch.full((s,), 4.0, dtype=torch.float64, requires_grad=True)
    log_sigma_e = torch.full((s, 2), -1.0, dtype=torch.float64, requires_grad=True)

    def evidence(rows: Scaled, w: Tensor) -> Tensor:
        T = rows.T.expand(s, *rows.T.shape)
        Phi = affine_features(network(rows.X))
        return nlml(Phi, T, log_alpha, log_sigma_e, W=W, bias_prior=BIAS_PRIOR, sample_weight=w)

    def mse(rows: Scaled, w: Tensor) -> Tensor:
        return mean_squared_error(network(rows.X), rows.T, W, w)

    label = f"{'BLR' if loss == 'mse' else 'BLL'}, {len(seeds)} x {len(blocks)} networks"
    if loss == "profiled":
        train_stack(
            network,
            Data(train.X, train.T),
            weight,
            strength=torch.full((s,), STRENGTH, dtype=torch.float64),
            noise="diagonal",
            bias_prior=BIAS_PRIOR,
            optimiser=Optimiser(learning_rate=2e-2, max_epochs=min(500, budget.max_epochs)),
            progress=progress,
            label=label,
        )
    else:
        objective = {"evidence": evidence, "mse": mse}[loss]
        parameters = [*network.parameters(), W, *([log_alpha, log_sigma_e] if loss == "evidence" else [])]
        train_members(
            parameters,
            lambda: objective(train, weight),
            lambda: objective(held, held_weight),
            learning_rate=budget.learning_rate,
            max_epochs=budget.max_epochs,
            patience=budget.patience,
            min_delta=budget.min_delta,
            progress=progress,
            label=label,
        )
    with torch.no_grad():
        Phi = affine_features(network(train.X))
    fitted = []
    for i in range(len(seeds)):
        first = i * len(blocks)
        whole = _last_layer(Phi[first], train.T)
        folds = []
        for j, block in enumerate(blocks[1:], first + 1):
            rest = weight[j] > 0
            folds.append(HeldOut(_last_layer(Phi[j][rest], train.T[rest]).posterior, Phi[j][block], train.T[block]))
        own = float(whole.posterior.log_alpha)
        features = Features(network, first, scale.inputs)
        fitted.append(
            FittedNetwork(
                features=features,
                posterior=whole.posterior,
                nlml=whole.nlml,
                honest=tune_alpha_on(folds, own),
                leak=tune_alpha(whole.posterior, features(data.test.X), test.T),
                targets=scale.targets,
            )
        )
    return fitted


def _last_layer(Phi: Tensor, T: Tensor) -> LastLayer:
    return last_layer(Statistics.from_features(Phi, T), bias_prior=BIAS_PRIOR)
