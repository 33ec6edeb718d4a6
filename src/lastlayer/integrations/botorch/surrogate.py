"""`Surrogate`: a regressor for Bayesian optimisation, fitted within a step to some hundred values of little noise.

Evidence alone is not enough for a dozen points: it finds functions too smooth and too sure of themselves. So everything
that is learned has a prior, the one of BoTorch's Gaussian process: lengths that grow with the root of the number of
inputs, weights of variance one (in units of the targets), a noise that is small.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from botorch.models import ModelList
from botorch.models.model import Model
from jaxtyping import Float
from numpy import ndarray
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from lastlayer.errors import InputError
from lastlayer.estimators.base import LastLayerRegressor
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.evidence import LOG_2PI, nlml
from lastlayer.features import affine_features
from lastlayer.integrations.botorch.model import BLLModel
from lastlayer.linalg import Cholesky
from lastlayer.networks.mlp import neg_log_hidden_prior
from lastlayer.networks.random_features import UNIT, ProjectedFourierFeatures, RandomFourierFeatures
from lastlayer.parameters import TrainingOptions
from lastlayer.posterior import Posterior
from lastlayer.predictor.fitted import Fitted
from lastlayer.predictor.module import Member
from lastlayer.scaling import Standardizer
from lastlayer.settings import DataShape, resolve
from lastlayer.statistics import Statistics
from lastlayer.training import Data, LastLayer

LOG_NOISE = (-6.0, 2.0)
"""Mean and standard deviation of the log noise variance before data, standardised targets."""
N_FREQUENCIES = 512
MANY_INPUTS, N_DIRECTIONS = 50, 4
"""Above this many inputs, features of so many learned directions replace one length per input."""


class Surrogate(LastLayerRegressor):
    """One network of `RandomFourierFeatures` and its last layer, by the largest posterior density of lengths and noise;
    of `ProjectedFourierFeatures` for more than 50 inputs.

    One output; `fit_model` joins several. `predictive`, `joint`, `sample_y`, `update` and so on are a `BLLRegressor`'s.
    There is no `save`: a Surrogate is fitted in a second, so keep X and y in place of it.

    Parameters
    ----------
    n_frequencies : random frequencies; twice as many features. More are closer to the Gaussian process behind them.
    max_steps : of L-BFGS.
    random_state : seed of the frequencies; keep it over the steps of a run, so that data alone change the model.
    """

    def __init__(self, n_frequencies: int = N_FREQUENCIES, *, max_steps: int = 40, random_state: Any = None) -> None:
        self.n_frequencies, self.max_steps, self.random_state = n_frequencies, max_steps, random_state

    def fit(self, X: Any, y: Any, *, bounds: Any = None) -> "Surrogate":
        """Learn lengths and noise, and put the exact last layer on every row.

        `bounds` (2, d) is the box that the lengths are measured by; the range of X if left out.
        """
        vars(self).pop("fitted_", None)
        seed, rows = self._seed(), self._validate_and_scale(X, y, None)
        if rows.y.shape[1] != 1:
            raise InputError(
                f"a Surrogate has one output, and y has {rows.y.shape[1]}: use fit_model(X, Y) for several"
            )
        rows.inputs = box_scaler(rows.X.double(), bounds)
        data = rows.to(torch.device("cpu"), torch.float64)
        network = self._network(data.X.shape[1], torch.Generator().manual_seed(seed))
        log_noise = torch.full((1,), LOG_NOISE[0], dtype=torch.float64, requires_grad=True)
        value = self._learn(network, log_noise, data)
        with torch.no_grad():
            statistics = Statistics.from_features(affine_features(network(data.X)), data.T)
        found = log_noise.detach()
        # rounding reaches the variance of far points only, where its size is all that matters
        posterior = Posterior(statistics, -float(found), found.exp()[None], rtol=float("inf"))
        defaults = BLLRegressor(
            backbone=network,
            preset="evidence",
            n_members=1,
            hidden_prior=1.0,
            max_epochs=self.max_steps,
            training=TrainingOptions(optimizer="lbfgs", early_stopping=False),
            device="cpu",
        )
        self.fitted_ = Fitted.of(
            [Member(network, LastLayer(posterior, value, False))],
            data,
            inputs=rows.inputs,
            targets=rows.targets,
            settings=resolve(defaults.get_params(deep=False), DataShape(tuple(data.X.shape)), seed=seed),
            n_features_in=self.n_features_in_,
            y_ndim=self._y_ndim,
        )
        return self

    def _network(self, d: int, generator: torch.Generator) -> nn.Module:
        if d <= MANY_INPUTS:
            return RandomFourierFeatures(d, self.n_frequencies, generator=generator)
        return ProjectedFourierFeatures(d, N_DIRECTIONS, self.n_frequencies // 2, generator=generator)

    def _learn(self, network: nn.Module, log_noise: Float[Tensor, "1"], data: Data) -> float:
        """To the largest posterior density; the evidence there, per sample."""
        parameters = [*network.parameters(), log_noise]
        reached = 0.0

        def loss(x: ndarray) -> tuple[float, ndarray]:
            nonlocal reached
            vector_to_parameters(torch.tensor(x), parameters)
            evidence = few_rows_nlml(network(data.X), data.T, -log_noise[0], 0.5 * log_noise)
            prior = neg_log_hidden_prior(network) + 0.5 * ((log_noise[0] - LOG_NOISE[0]) / LOG_NOISE[1]) ** 2
            total = evidence + prior / len(data.X)
            reached = float(evidence.detach())
            return float(total.detach()), _flat(torch.autograd.grad(total, parameters))

        x0 = _flat(parameters)
        limits = {"maxiter": self.max_steps, "maxfun": 2 * self.max_steps}
        end = minimize(loss, x0, jac=True, method="L-BFGS-B", options=limits)
        vector_to_parameters(torch.tensor(end.x if np.isfinite(end.fun) else x0), parameters)
        return reached


def box_scaler(X: Float[Tensor, "m d"], bounds: Any) -> Standardizer:
    """Inputs standardised as if they filled the box: points that gather around the best change nothing."""
    d = X.shape[1]
    box = torch.stack([X.amin(0), X.amax(0)]) if bounds is None else torch.as_tensor(np.asarray(bounds, float))
    if box.shape != (2, d):
        raise InputError(f"bounds has shape {tuple(box.shape)}: it must be (2, {d}), lower bounds above upper ones")
    if not bool((box[0] <= box[1]).all()):
        i = int((~(box[0] <= box[1])).nonzero()[0])
        raise InputError(
            f"bounds of input {i} are reversed or not numbers, from {box[0, i]:g} to {box[1, i]:g}: the first row "
            "holds the lower bounds, the second the upper ones"
        )
    width = box[1] - box[0]
    return Standardizer(box.mean(0), UNIT * torch.where(width > 0, width, torch.ones_like(width)))


def fit_model(
    X: Float[Tensor, "n d"],
    Y: Float[Tensor, "n o"],
    *,
    bounds: Float[Tensor, "2 d"] | None = None,
    random_state: int = 0,
) -> Model:
    """A BoTorch model of values Y at points X of the box `bounds`: one `Surrogate` per output."""
    if X.dim() != 2 or Y.dim() != 2 or len(X) != len(Y):
        raise InputError(
            f"X has shape {tuple(X.shape)} and Y {tuple(Y.shape)}: they must be (n, d) and (n, o), one row per point; "
            "a single output is Y[:, None]"
        )
    points, box = X.detach().cpu().numpy(), None if bounds is None else bounds.detach().cpu().numpy()
    models = [
        BLLModel(Surrogate(random_state=random_state).fit(points, y, bounds=box), train_X=X)
        for y in Y.detach().cpu().numpy().T
    ]
    return models[0] if len(models) == 1 else ModelList(*models)


def _flat(tensors: Sequence[Tensor]) -> ndarray:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).numpy()


def few_rows_nlml(
    phi_tilde: Float[Tensor, "m k"],
    T: Float[Tensor, "m q"],
    log_alpha: Float[Tensor, ""],
    log_sigma_e: Float[Tensor, " q"],
) -> Float[Tensor, ""]:
    """`lastlayer.evidence.nlml` under the flat bias prior, by the covariance of the rows where these are fewer.

    Each output is N(b, sigma_e^2 C) with C = I + alpha phi_tilde phi_tilde'; integrating over any b leaves the misfit
    around its best value and costs log(1'C^-1 1). O(m^2 k) in place of O(m k^2 + k^3).
    """
    m, k = phi_tilde.shape
    if m > k:
        return nlml(affine_features(phi_tilde), T, log_alpha, log_sigma_e)
    C = Cholesky.of(torch.eye(m, dtype=T.dtype) + log_alpha.exp() * (phi_tilde @ phi_tilde.mT))
    one, t = C.whiten(torch.ones(1, m, dtype=T.dtype)), C.whiten(T.mT)
    weight = one.square().sum()
    misfit = (t - (t @ one.mT) / weight * one).square().sum(-1)
    q, n = T.shape[1], m - 1
    logdets = q * (n * LOG_2PI + C.logdet() + weight.log()) + 2 * n * log_sigma_e.sum()
    return (logdets + (misfit * (-2 * log_sigma_e).exp()).sum()) / (2 * m)
