"""Gaussian states from step to step: by linearisation, or by the unscented transform.

Both match the first two moments of [y+, s] for s ~ N(m, P). What the model does not know is drawn anew at every step:
its errors average out over a trajectory, which `SampledWeights` does not let them do.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from lastlayer.dynamics.rollout import Feedback, Rollout
from lastlayer.errors import InputError
from lastlayer.prediction import Prediction

STEP = 1e-4
"""Of a central difference, as a share of the standard deviation in the data: its error is of the order of 1e-8."""


@dataclass(frozen=True)
class Moments:
    """Of the next output before its noise, and with the state it came from."""

    mean: Float[ndarray, "b q"]
    cov: Float[ndarray, "b q q"]
    cross: Float[ndarray, "b n q"]
    """Covariance with the state."""
    noise_cov: Float[ndarray, "b q q"]
    affine_cost: Float[ndarray, " b"]


@dataclass(frozen=True)
class OneStep:
    """The next output as a function of the state, the input being given."""

    model: Any
    u: Float[ndarray, "b d"]

    def __call__(self, states: Float[ndarray, "p b n"]) -> "tuple[Prediction, tuple[int, int]]":
        """Of p states a trajectory, flattened."""
        p, b, _ = states.shape
        u = np.broadcast_to(self.u, (p, *self.u.shape))
        rows = self.model.lags.join(states, u, self.model.n_outputs_)
        return self.model.next(rows.reshape(p * b, -1)), (p, b)


class Gaussian:
    """What both have in common: the loop."""

    def moments(self, step: OneStep, m: Float[ndarray, "b n"], P: Float[ndarray, "b n n"]) -> Moments:
        raise NotImplementedError

    def run(
        self, model: Any, starts: Float[ndarray, "b n"], inputs: Float[ndarray, "b h d"], noise: Feedback
    ) -> Rollout:
        """From known starts; with noise on the measurement alone, the measured outputs of the start carry it too."""
        (b, n), q, d = starts.shape, model.n_outputs_, model.n_inputs_
        F, G = model.lags.shift(q, d)
        m, P = starts, np.zeros((b, n, n))
        means: list[ndarray] = []
        covs: list[ndarray] = []
        costs: list[ndarray] = []
        for u in inputs.swapaxes(0, 1):
            moments = self.moments(OneStep(model, u), m, P)
            if noise == "measurement" and not means:
                for i in range(model.lags.outputs):
                    P[:, i * q : (i + 1) * q, i * q : (i + 1) * q] = moments.noise_cov
                moments = self.moments(OneStep(model, u), m, P)
            measured = moments.cov + moments.noise_cov
            means.append(moments.mean)
            covs.append(measured)
            costs.append(moments.affine_cost)
            m, P = m @ F.T + u @ G.T, F @ P @ F.T
            between = F @ moments.cross
            m[:, :q] = moments.mean
            P[:, :, :q] = between
            P[:, :q, :] = between.swapaxes(1, 2)
            P[:, :q, :q] = measured if noise == "process" else moments.cov
            P = 0.5 * (P + P.swapaxes(1, 2))  # rounding errors of one side would grow from step to step
        mean, cov = np.stack(means, 1), np.stack(covs, 1)
        var = np.diagonal(cov, axis1=-2, axis2=-1)
        return Rollout(mean[None], var[None].copy(), cov, np.stack(costs, 1))


@dataclass(frozen=True)
class Linearised(Gaussian):
    """P+ = A P A' + what the model does not know at the mean + noise; A by central differences of the mean."""

    def moments(self, step: OneStep, m: Float[ndarray, "b n"], P: Float[ndarray, "b n n"]) -> Moments:
        n = m.shape[1]
        h = np.broadcast_to(STEP * step.model.state_scale_, m.shape)
        moves = np.concatenate([np.zeros((1, n)), np.eye(n), -np.eye(n)])
        prediction, (p, b) = step(m + moves[:, None] * h)
        values = prediction.mean.reshape(p, b, -1)
        A = (values[1 : n + 1] - values[n + 1 :]).transpose(1, 2, 0) / (2 * h[:, None, :])
        function, noise = _covariances(prediction, (p, b))
        cross = P @ A.swapaxes(1, 2)
        cost = prediction.affine_cost.reshape(p, b)[0]
        return Moments(values[0], A @ cross + function[0], cross, noise[0], cost)


@dataclass(frozen=True)
class Unscented(Gaussian):
    """Through 2 n + 1 points of the same mean and covariance: right for quadratic maps, and what the model does not
    know is averaged over them.

    `kappa` >= 0 is the weight of the point in the middle, as that of `kappa` dimensions; 0 leaves it out.
    """

    kappa: float = 0.0

    def __post_init__(self) -> None:
        if not self.kappa >= 0:
            raise InputError(f"kappa={self.kappa} must not be negative: covariances would not stay positive")

    def moments(self, step: OneStep, m: Float[ndarray, "b n"], P: Float[ndarray, "b n n"]) -> Moments:
        n = m.shape[1]
        values, vectors = np.linalg.eigh(P)
        root = vectors * np.sqrt((n + self.kappa) * values.clip(min=0))[:, None, :]
        moves = np.concatenate([np.zeros((1, *m.shape)), *(sign * root.transpose(2, 0, 1) for sign in (1, -1))])
        w = np.full(2 * n + 1, 0.5 / (n + self.kappa))
        w[0] = self.kappa / (n + self.kappa)
        prediction, (p, b) = step(m + moves)
        y = prediction.mean.reshape(p, b, -1)
        mean = np.einsum("p,pbq->bq", w, y)
        function, noise = _covariances(prediction, (p, b))
        spread = np.einsum("p,pbi,pbj->bij", w, y - mean, y - mean)
        return Moments(
            mean,
            spread + np.einsum("p,pbij->bij", w, function),
            np.einsum("p,pbn,pbq->bnq", w, moves, y - mean),
            np.einsum("p,pbij->bij", w, noise),
            w @ prediction.affine_cost.reshape(p, b),
        )


def _covariances(prediction: Prediction, shape: tuple[int, int]) -> tuple[ndarray, ndarray]:
    """Of the function and of the noise at each point."""
    noiseless = replace(prediction, component_noise_var=np.zeros_like(prediction.component_noise_var))
    function, total = noiseless.cov(), prediction.cov()
    return tuple(x.reshape(*shape, *x.shape[1:]) for x in (function, total - function))  # type: ignore[return-value]
