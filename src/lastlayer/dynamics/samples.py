"""Trajectories of sampled functions: one draw of the weights, and one member of a mixture, for a whole trajectory.

What a model does not know stays the same from step to step, so its effects add up: that is what epistemic means.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer.calibration import anchored
from lastlayer.description import Description, MemberDescription, describe
from lastlayer.dynamics.rollout import Feedback, Rollout
from lastlayer.errors import InputError
from lastlayer.linalg import TINY
from lastlayer.model import LastLayerModel


@dataclass(frozen=True)
class SampledWeights:
    """n draws of the function, each followed from every start.

    With `calibrated` the first step is distributed as `predictive` has it: every draw is stretched as the curve of the
    calibration says. That curve was fitted one step ahead, where noise and what the model does not know can hardly be
    told apart if the latter is small; over many steps they differ. `calibrated=False` draws from the posterior as it
    stands; `best_propagation` decides between them on held-out episodes.
    """

    n: int = 200
    calibrated: bool = True
    random_state: int = 0

    def __post_init__(self) -> None:
        if self.n < 2:
            raise InputError(f"n={self.n} draws: a distribution needs at least 2")

    def run(
        self, model: Any, starts: Float[ndarray, "b n"], inputs: Float[ndarray, "b h d"], noise: Feedback
    ) -> Rollout:
        if not isinstance(model.regressor_, LastLayerModel):
            raise InputError(
                f"weights can be drawn of Bayesian last layers alone, not of a {type(model.regressor_).__name__}: "
                "take by=Unscented() or by=Linearised()"
            )
        rng = np.random.default_rng(self.random_state)
        q, d, b = model.n_outputs_, model.n_inputs_, len(starts)
        F, G = model.lags.shift(q, d)
        s = np.broadcast_to(starts, (self.n, *starts.shape)).copy()
        rows = lambda states, u: model.lags.join(states, np.broadcast_to(u, (self.n, *u.shape)), q)
        described = describe(model.regressor_)
        if self.calibrated:
            weights = model.regressor_.predictive(model.lags.join(starts, inputs[:, 0], q)).weights
        else:
            described = described.uncalibrated()
            weights = np.full((len(described.members), b), 1 / len(described.members))
        draws = Draws.of(described, weights, self.n, rng)
        means, noises, costs = [], [], []
        for k, u in enumerate(inputs.swapaxes(0, 1)):
            if k == 0 and noise == "measurement":
                noise_cov = draws(rows(s, u))[1]
                for i in range(model.lags.outputs):
                    s[..., i * q : (i + 1) * q] += _normal(noise_cov, rng)
            X = rows(s, u)
            change, noise_cov, cost = draws(X)
            y = change + X[..., :q] if model.lags.increments else change
            means.append(y)
            noises.append(noise_cov)
            costs.append(cost.mean(0))
            s = s @ F.T + u @ G.T
            s[..., :q] = y + _normal(noise_cov, rng) if noise == "process" else y
        mean, within = np.stack(means, 2), np.stack(noises, 2)
        spread = mean - mean.mean(0)
        cov = np.einsum("cbhi,cbhj->bhij", spread, spread) / (self.n - 1) + within.mean(0)
        assert mean.shape == (self.n, b, inputs.shape[1], q)
        var = np.diagonal(within, axis1=-2, axis2=-1).copy()
        return Rollout(mean, var, cov, np.stack(costs, 1))


@dataclass(frozen=True, eq=False)
class Draws:
    """n whole functions; draw i started at point j is of member `pick[i, j]`, chosen as it counts at the start."""

    described: Description
    pick: Int[ndarray, "n b"]
    tail: Float[ndarray, "n b"]
    """What the variance of a draw is multiplied with: one, or for a share of them the factor of the tails."""
    E: Float[ndarray, "n r q"]
    """Standard normal; a member takes as many rows as it has features."""

    @classmethod
    def of(cls, described: Description, weights: Float[ndarray, "c b"], n: int, rng: np.random.Generator) -> "Draws":
        """`weights` of the components of a prediction at the starts: members, and with tails the members once more."""
        members = len(described.members)
        component = (rng.random((n, 1, 1)) > weights.cumsum(0)[:-1].T).sum(-1)
        tail = np.where(component >= members, described.tails.factor, 1.0)
        widest = max(len(member.spread.shift) for member in described.members)
        E = rng.standard_normal((n, widest, described.n_outputs))
        return cls(described, component % members, tail, E)

    def __call__(
        self, X: Float[ndarray, "n b d"]
    ) -> tuple[Float[ndarray, "n b q"], Float[ndarray, "n b q q"], Float[ndarray, "n b"]]:
        """Each draw at its own points: the function, the covariance of its noise, the affine cost."""
        Z = (X - self.described.input_mean) / self.described.input_scale
        q = self.described.n_outputs
        value, noise, cost = np.empty((*Z.shape[:2], q)), np.empty((*Z.shape[:2], q, q)), np.empty(Z.shape[:2])
        for i, member in enumerate(self.described.members):
            at = self.pick == i
            if at.any():
                draw = np.nonzero(at)[0]
                value[at], noise[at], cost[at] = self._member(member, Z[at], draw, self.tail[at])
        return value, noise, cost

    def _member(
        self,
        member: MemberDescription,
        Z: Float[ndarray, "m d"],
        draw: Int[ndarray, " m"],
        tail: Float[ndarray, " m"],
    ) -> tuple[Float[ndarray, "m q"], Float[ndarray, "m q q"], Float[ndarray, " m"]]:
        curve, head = member.curve, self.described.noise_head
        phi = member.features(Z)
        h = phi @ member.spread.root + member.spread.shift
        v = np.square(h).sum(1)
        deviation = np.einsum("mr,mrq->mq", h, self.E[draw, : h.shape[1]]) @ np.linalg.cholesky(member.noise_cov).T
        stretch = np.sqrt(tail * curve.shape(v) / np.maximum(v, TINY))[:, None] * np.sqrt(curve.slope)
        factor = curve.noise * (1.0 if head is None else head.factor(torch.from_numpy(Z)))
        root = np.sqrt(tail[:, None] * factor)
        noise = root[:, :, None] * member.noise_cov * root[:, None, :]
        mean = phi @ member.weights + member.offset
        if self.described.anchored:
            star = np.square(phi @ member.spread_at_star.root + member.spread_at_star.shift).sum(1)
            var = np.diagonal(member.noise_cov) * (factor + curve.epistemic(star))
            mean = anchored(mean, var, self.described.anchor, self.described.anchor_precision)
        return mean + stretch * deviation, noise, v


def _normal(cov: Float[ndarray, "*b q q"], rng: np.random.Generator) -> Float[ndarray, "*b q"]:
    L = np.linalg.cholesky(cov)
    draws: ndarray = (L @ rng.standard_normal((*cov.shape[:-1], 1)))[..., 0]
    return draws
