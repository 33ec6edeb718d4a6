"""The networks of the study: the paper's recipe for many initialisations and held-out blocks, trained as one batch."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor, nn

from lastlayer.bayes.evidence import by_evidence, nlml, profile
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.held_out import HeldOut, held_out_lpd
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Readings, Statistics
from lastlayer.calibration.alpha import AlphaCurve, tune_alpha, tune_alpha_on
from lastlayer.data.rows import Points, Rows
from lastlayer.data.scaling import Standardizer
from lastlayer.ensemble.splits import blocked_folds
from lastlayer.networks.mlp import StackedMLP
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.settings.types import BiasPrior
from lastlayer.studies.data import PaperData, Samples
from lastlayer.training import Augmented, FullBatch, MeanSquaredError, Optimizer, Profiled, Validation, train

HIDDEN = (20, 20, 20)
BIAS_PRIOR: BiasPrior = "shared"
N_BLOCKS = 5


@dataclass(frozen=True)
class Scalers:
    inputs: Standardizer
    targets: Standardizer

    @classmethod
    def of(cls, samples: Samples) -> "Scalers":
        return cls(Standardizer.fit(torch.from_numpy(samples.X)), Standardizer.fit(torch.from_numpy(samples.y)))

    def __call__(self, samples: Samples) -> Points:
        X, y = torch.from_numpy(samples.X), torch.from_numpy(samples.y)
        return Points(self.inputs.forward(X), Readings(self.targets.forward(y)))


@dataclass(frozen=True)
class LastLayer:
    """A network and the Bayesian last layer of its features, in standardised units."""

    network: nn.Module
    scale: Scalers
    posterior: Posterior

    @property
    def noise_std(self) -> Float[ndarray, " q"]:
        return (self.posterior.Sigma_E.diagonal().sqrt() * self.scale.targets.scale).numpy()

    def features(self, X: Float[ndarray, "m 1"]) -> Float[Tensor, "m k"]:
        with torch.no_grad():
            return self.network(self.scale.inputs.forward(torch.from_numpy(X)))

    def predict(self, X: Float[ndarray, "m 1"], log_alpha: float) -> MixturePrediction:
        """Predict in target units, with the mean at alpha* and the variance at the given alpha."""
        Phi, noise_var, unit = affine_features(self.features(X)), np.square(self.noise_std), self.scale.targets
        ratio = self.posterior.variance_ratio(Phi, log_alpha).numpy()
        mean, var = (self.posterior.mean(Phi) * unit.scale + unit.mean).numpy(), ratio[:, None] * noise_var
        return MixturePrediction.gaussian(mean, epistemic_var=var, noise_var=noise_var, affine_cost=ratio)


@dataclass(frozen=True)
class FittedNetwork(LastLayer):
    """One initialisation, with alpha tuned on held-out blocks and, as a leak, on the test set."""

    honest: AlphaCurve
    """alpha^max on blocks of the training range that the features were not trained on."""
    leak: AlphaCurve
    """alpha^max on the test set, as in the published notebook."""

    def nlml_at(self, log_alphas: Float[ndarray, " a"]) -> Float[ndarray, " a"]:
        """NLML per sample at other alphas, each with its optimal noise."""
        return profile(self.posterior.statistics, torch.from_numpy(log_alphas), bias_prior=BIAS_PRIOR).nlml.numpy()


MAX_EPOCHS = 10_000
PRIOR_PRECISION = 0.1
"""Prior precision of the hidden weights in the training of the library, chosen by the LPD of held-out blocks (data
seed 99)."""


def fit_networks(
    data: PaperData, seeds: list[int], *, loss: str, max_epochs: int = MAX_EPOCHS, progress: bool = False
) -> list[FittedNetwork]:
    """Train all networks (seed, fold), stopped by the paper's rule, then compute the last layers."""
    scale = Scalers.of(data.train)
    rows, held, test = scale(data.train), scale(data.validation), scale(data.test)
    blocks = [np.array([], dtype=int), *blocked_folds(data.train.X, N_BLOCKS)]
    s = len(seeds) * len(blocks)
    weight = torch.ones(s, len(rows.X), dtype=torch.float64)
    held_weight = torch.ones(s, len(held.X), dtype=torch.float64)
    for i, block in enumerate(blocks * len(seeds)):
        weight[i, block] = 0
        if len(block):  # validation points inside a block would leak into the stopping rule
            lo, hi = rows.X[block].min(), rows.X[block].max()
            held_weight[i, ((held.X >= lo) & (held.X <= hi))[:, 0]] = 0
    rows, held = replace(rows, weight=weight), replace(held, weight=held_weight)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds for _ in blocks]
    network = StackedMLP(1, HIDDEN, generators=generators)
    if loss == "profiled":
        objective = Profiled(bias_prior=BIAS_PRIOR, shape=(s,))
        problem = FullBatch(network, objective, Rows(rows), prior_precision=PRIOR_PRECISION)
        optimizer, validation = Optimizer(learning_rate=2e-2, max_epochs=min(500, max_epochs)), None
    else:
        make = {"evidence": Augmented, "mse": MeanSquaredError}[loss]
        trained = make(HIDDEN[-1], 2, bias_prior=BIAS_PRIOR, generator=generators)
        problem, score = FullBatch(network, trained, Rows(rows)), FullBatch(network, trained, Rows(held)).evaluate
        optimizer = Optimizer(learning_rate=1e-3, max_epochs=max_epochs, cosine=False)
        validation = Validation(score, first=1, patience=1_000, min_delta=1e-5)
    label = f"{'BLR' if loss == 'mse' else 'BLL'}, {len(seeds)} x {len(blocks)} networks"
    train(problem, optimizer, validation=validation, progress=progress, label=label)
    with torch.no_grad():
        Phi, Phi_test = affine_features(network(rows.X)), affine_features(network(test.X))
    finished = lambda Phi, T: by_evidence([Statistics.from_features(Phi, T)], bias_prior=BIAS_PRIOR)[0]
    fitted = []
    for first in range(0, s, len(blocks)):
        posterior = finished(Phi[first], rows.T)
        folds = []
        for j, block in enumerate(blocks[1:], first + 1):
            rest = weight[j] > 0
            folds.append(HeldOut(finished(Phi[j][rest], rows.T[rest]), Phi[j][block], rows.T[block]))
        honest = tune_alpha_on(folds, float(posterior.log_alpha))
        leak = tune_alpha(posterior, Phi_test[first], test.T)
        fitted.append(FittedNetwork(network.member(first), scale, posterior, honest, leak))
    return fitted


# the example of Figures 2 and 3: three samples of a line, and the effect of alpha on the uncertainty between them

X_TRAIN = np.array([[0.2], [0.5], [0.8]])
X_TEST = np.linspace(0, 1, 100)[:, None]


def line(x: Float[ndarray, "m 1"]) -> Float[ndarray, "m 1"]:
    return 3 * x + 2


TRAIN = Samples(X_TRAIN, line(X_TRAIN))


@dataclass(frozen=True)
class ThreeSamples(LastLayer):
    """A network 1-3(tanh)-2(linear)-1 with its last layer at the maximum of the evidence."""

    curve: AlphaCurve

    @property
    def log_alphas(self) -> tuple[float, float]:
        """Logarithms of alpha* and of alpha^max, the latter at most 30 so that it can be drawn."""
        return float(self.posterior.log_alpha), min(self.curve.log_alpha, 30.0)

    def turned_features(self, X: Float[ndarray, "m 1"]) -> Float[ndarray, "m 2"]:
        """Features in coordinates along the line through the training features, from their mean, and off it."""
        train = self.features(X_TRAIN)
        directions = torch.linalg.svd(train - train.mean(0)).Vh
        return ((self.features(X) - train.mean(0)) @ directions.T).numpy()

    def nlml(self, log_alphas: ndarray) -> ndarray:
        """Negative log marginal likelihood per sample at the trained noise, eq:LMLH_alpha_cost."""
        Phi, T = affine_features(self.features(X_TRAIN)), self.scale(TRAIN).T
        log_sigma_e = 0.5 * self.posterior.Sigma_E.diagonal().log()
        value = lambda a: float(nlml(Phi, T, torch.tensor(a), log_sigma_e, bias_prior=BIAS_PRIOR))
        return np.array([value(a) for a in log_alphas])

    def lpd(self, X: Float[ndarray, "m 1"], log_alphas: ndarray) -> ndarray:
        Phi, T = affine_features(self.features(X)), self.scale(Samples(X, line(X))).T
        return np.array([held_out_lpd(self.posterior, Phi, T, float(a)) for a in log_alphas])


def fit_three_samples(*, max_epochs: int = 5000, progress: bool = False) -> ThreeSamples:
    """Fit the example by Adam with learning rate 5e-3 on the augmented evidence, as in the paper."""
    generator = torch.Generator().manual_seed(1)
    scale = Scalers.of(TRAIN)
    data, test = scale(TRAIN), scale(Samples(X_TEST, line(X_TEST)))
    layers = nn.Linear(1, 3), nn.Linear(3, 2)
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
    network = nn.Sequential(layers[0], nn.Tanh(), layers[1]).double()
    objective = Augmented(2, 1, bias_prior=BIAS_PRIOR, generator=generator)
    optimizer = Optimizer(learning_rate=5e-3, max_epochs=max_epochs, cosine=False)
    train(FullBatch(network, objective, Rows(data)), optimizer, progress=progress)
    with torch.no_grad():
        statistics = Statistics.from_features(affine_features(network(data.X)), data.T)
        noise_cov = (2 * objective.log_sigma_e).exp()[:, None]
        log_alpha = float(objective.log_alpha)
        posterior = Posterior(statistics, log_alpha, noise_cov, bias_prior=BIAS_PRIOR, checked=False)
        curve = tune_alpha(posterior, affine_features(network(test.X)), test.T)
    return ThreeSamples(network, scale, posterior, curve)
