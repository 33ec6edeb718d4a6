"""`Surrogate`: a regressor for Bayesian optimisation, fitted within a step to some hundred values of little noise.

Evidence alone is not enough for a dozen points: it finds functions too smooth and too sure of themselves. So everything
that is learned has a prior, the one of BoTorch's Gaussian process: lengths that grow with the root of the number of
inputs, weights of variance one (in units of the targets), a noise that is small.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from botorch.models import ModelList
from botorch.models.model import Model
from jaxtyping import Float
from numpy import ndarray
from scipy.optimize import minimize
from torch import Tensor, nn

from lastlayer.calibration import Ensemble, Member
from lastlayer.errors import InputError
from lastlayer.evidence import LOG_2PI, nlml
from lastlayer.features import affine_features, weight_energy
from lastlayer.integrations.botorch.model import BLLModel
from lastlayer.integrations.botorch.waves import UNIT, DirectedWaves, Waves
from lastlayer.linalg import Cholesky
from lastlayer.posterior import Posterior
from lastlayer.regressor import BLLRegressor
from lastlayer.scaling import Standardizer
from lastlayer.statistics import Statistics
from lastlayer.training import Data, LastLayer

LOG_NOISE = (-6.0, 2.0)
"""Mean and standard deviation of the log noise variance before data, standardised targets."""
N_WAVES = 512
MANY_INPUTS, N_DIRECTIONS = 50, 4
"""Beyond so many inputs, waves of so many learned directions take the place of a length for each input."""


class Surrogate(BLLRegressor):
    """One network of `Waves` and its last layer, by the largest posterior density of lengths and noise; of
    `DirectedWaves` for more than 50 inputs.

    One output; `fit_model` joins several. `predictive`, `joint`, `sample_y`, `update` and so on are a `BLLRegressor`'s.

    Parameters
    ----------
    n_waves : random frequencies; twice as many features. More are closer to the Gaussian process behind them.
    max_steps : of L-BFGS.
    random_state : seed of the frequencies; keep it over the steps of a run, so that data alone change the model.
    """

    def __init__(self, n_waves: int = N_WAVES, *, max_steps: int = 40, random_state: Any = None) -> None:
        super().__init__(n_members=1, preset="fast", device="cpu", random_state=random_state)
        self.n_waves, self.max_steps = n_waves, max_steps

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        validation_data: Any = None,
        groups: Any = None,
        *,
        bounds: Any = None,
    ) -> "Surrogate":
        """Learn lengths and noise, and put the exact last layer on every row.

        `bounds` (2, d) is the box that the lengths are measured by; the range of X if left out.
        """
        if any(word is not None for word in (sample_weight, validation_data, groups)):
            raise InputError(
                "a Surrogate takes no sample_weight, validation_data or groups: use a BLLRegressor for those"
            )
        data, seed = self._begin(X, y, None)
        data = replace(data, X=self._in_box(data.X, bounds))
        if data.T.shape[1] != 1:
            raise InputError(
                f"a Surrogate has one output, and y has {data.T.shape[1]}: use fit_model(X, Y) for several"
            )
        network = self._network(data.X.shape[1], torch.Generator().manual_seed(seed))
        log_noise = torch.full((1,), LOG_NOISE[0], dtype=torch.float64, requires_grad=True)
        value = self._learn(network, log_noise, data)
        with torch.no_grad():
            statistics = Statistics.from_features(affine_features(network(data.X)), data.T)
        found = log_noise.detach()
        # rounding reaches the variance of far points only, where its size is all that matters
        posterior = Posterior(statistics, -float(found), found.exp()[None], rtol=float("inf"))
        self._take(Ensemble([Member(network.eval(), LastLayer(posterior, value, False), 1.0)], [], {}), data)
        return self

    def save(self, path: Any) -> None:
        raise InputError("a Surrogate is fitted anew in a second: keep X and y in place of it")

    def _in_box(self, Z: Float[Tensor, "m d"], bounds: Any) -> Float[Tensor, "m d"]:
        """Inputs standardised as if they filled the box: points that gather around the best change nothing."""
        assert self._inputs is not None
        X = Z * self._inputs.scale + self._inputs.mean
        box = torch.stack([X.amin(0), X.amax(0)]) if bounds is None else torch.as_tensor(np.asarray(bounds, float))
        if box.shape != (2, X.shape[1]) or not bool((box[0] <= box[1]).all()):
            raise InputError(
                f"bounds has shape {tuple(box.shape)}: it must be (2, {X.shape[1]}), lower bounds above upper ones"
            )
        width = box[1] - box[0]
        self._inputs = Standardizer(box.mean(0), UNIT * torch.where(width > 0, width, torch.ones_like(width)))
        return self._inputs.forward(X)

    def _network(self, d: int, generator: torch.Generator) -> nn.Module:
        if d <= MANY_INPUTS:
            return Waves(d, self.n_waves, generator=generator)
        return DirectedWaves(d, N_DIRECTIONS, self.n_waves // 2, generator=generator)

    def _learn(self, network: nn.Module, log_noise: Float[Tensor, "1"], data: Data) -> float:
        """To the largest posterior density; the evidence there, per sample."""
        parameters = [*network.parameters(), log_noise]
        sizes = [p.numel() for p in parameters]
        reached = 0.0

        def put(x: ndarray) -> None:
            with torch.no_grad():
                for p, part in zip(parameters, torch.from_numpy(x).split(sizes), strict=True):
                    p.copy_(part.view_as(p))

        def loss(x: ndarray) -> tuple[float, ndarray]:
            nonlocal reached
            put(x)
            evidence = few_rows_nlml(network(data.X), data.T, -log_noise[0], 0.5 * log_noise)
            prior = weight_energy(network) + 0.5 * ((log_noise[0] - LOG_NOISE[0]) / LOG_NOISE[1]) ** 2
            total = evidence + prior / len(data.X)
            reached = float(evidence.detach())
            gradients = torch.autograd.grad(total, parameters)
            return float(total.detach()), _flat(gradients)

        x0 = _flat(parameters)
        limits = {"maxiter": self.max_steps, "maxfun": 2 * self.max_steps}
        end = minimize(loss, x0, jac=True, method="L-BFGS-B", options=limits)
        put(end.x if np.isfinite(end.fun) else x0)
        return reached


def fit_model(
    X: Float[Tensor, "n d"],
    Y: Float[Tensor, "n o"],
    *,
    bounds: Float[Tensor, "2 d"] | None = None,
    random_state: int = 0,
) -> Model:
    """A BoTorch model of values Y, to be maximised or not, at points X of the box `bounds`: a `Surrogate` an output."""
    if X.dim() != 2 or Y.dim() != 2 or len(X) != len(Y):
        raise InputError(
            f"X has shape {tuple(X.shape)} and Y {tuple(Y.shape)}: they must be (n, d) and (n, o), a row a point; "
            "a single output is Y[:, None]"
        )
    points, box = X.detach().cpu().numpy(), None if bounds is None else bounds.detach().cpu().numpy()
    models = [
        BLLModel(Surrogate(random_state=random_state).fit(points, y, bounds=box), train_X=X)
        for y in Y.detach().cpu().numpy().T
    ]
    return models[0] if len(models) == 1 else ModelList(*models)


def _flat(tensors: Sequence[Tensor]) -> ndarray:
    numbers: ndarray = torch.cat([tensor.detach().flatten() for tensor in tensors]).numpy()
    return numbers


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
    one, t = C.half(torch.ones(1, m, dtype=T.dtype)), C.half(T.mT)
    weight = one.square().sum()
    misfit = (t - (t @ one.mT) / weight * one).square().sum(-1)
    q, n = T.shape[1], m - 1
    logdets = q * (n * LOG_2PI + C.logdet() + weight.log()) + 2 * n * log_sigma_e.sum()
    return (logdets + (misfit * (-2 * log_sigma_e).exp()).sum()) / (2 * m)
