"""Predictions along trajectories, of whole functions, whose errors add up, or of a Gaussian state, whose do not."""

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from lastlayer import formula
from lastlayer.errors import InputError
from lastlayer.formula.ops import NumPyOps
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.predictor.fitted import Fitted

Feedback: TypeAlias = Literal["process", "measurement"]
"""Where the noise of a step acts: on the state that the next step starts from, or only on the measurement."""
STEP = 1e-4  # of a central difference, in standard deviations of the data: the error is of the order of 1e-8


@dataclass(frozen=True, eq=False)
class Rollout:
    """Predicted outputs of b trajectories over h steps, as a mixture of c components with equal weights."""

    component_mean: Float[ndarray, "c b h q"]
    """Means of the components."""
    component_var: Float[ndarray, "c b h q"]
    """Variances within each component, noise included."""
    cov: Float[ndarray, "b h q q"]
    """Covariance between the outputs of a step, noise included."""
    affine_cost: Float[ndarray, "b h"]
    """Degree of extrapolation of each step: at the mean state, or averaged over the draws."""

    @property
    def mean(self) -> Float[ndarray, "b h q"]:
        """Mean of the outputs, (b, h, q)."""
        return self.component_mean.mean(0)

    @property
    def std(self) -> Float[ndarray, "b h q"]:
        """Standard deviation of the outputs, (b, h, q), noise included."""
        return np.sqrt(np.diagonal(self.cov, axis1=-2, axis2=-1))

    def interval(self, level: float = 0.9) -> tuple[Float[ndarray, "b h q"], Float[ndarray, "b h q"]]:
        """Return lower and upper bounds (b, h, q) of central intervals of every output at every step.

        Parameters
        ----------
        level : float, default 0.9
            Probability of the intervals.
        """
        lower, upper = self.prediction().interval(level)
        return lower.reshape(self.mean.shape), upper.reshape(self.mean.shape)

    def prediction(self) -> MixturePrediction:
        """Return all steps of all trajectories as the points of one `Prediction`."""
        c, q = len(self.component_mean), self.component_mean.shape[-1]
        mean, var = (x.reshape(c, -1, q) for x in (self.component_mean, self.component_var))
        weights = np.full(mean.shape[:2], 1 / c)
        return MixturePrediction(mean, np.zeros_like(var), var, self.affine_cost.reshape(-1), weights)

    def gaussian(self) -> "Rollout":
        """Return the Gaussian rollout with the same mean and covariance at every step."""
        return _gaussian(self.mean, self.cov, self.affine_cost)

    def __getitem__(self, trajectories: slice) -> "Rollout":
        """Select some of the trajectories."""
        components = self.component_mean[:, trajectories], self.component_var[:, trajectories]
        return Rollout(*components, self.cov[trajectories], self.affine_cost[trajectories])


def _gaussian(mean: Float[ndarray, "b h q"], cov: ndarray, affine_cost: Float[ndarray, "b h"]) -> Rollout:
    return Rollout(mean[None], np.diagonal(cov, axis1=-2, axis2=-1)[None].copy(), cov, affine_cost)


@runtime_checkable
class Propagation(Protocol):
    """Protocol of methods that predict many steps ahead."""

    def run(
        self, model: Any, starts: Float[ndarray, "b n"], inputs: Float[ndarray, "b h d"], noise: Feedback
    ) -> Rollout:
        """Predict trajectories from known states."""


@dataclass(frozen=True)
class Moments:
    """First two moments of the next output, before its noise, and its covariance with the present state."""

    mean: Float[ndarray, "b q"]
    cov: Float[ndarray, "b q q"]
    cross: Float[ndarray, "b n q"]
    noise_cov: Float[ndarray, "b q q"]
    affine_cost: Float[ndarray, " b"]


class Gaussian(Propagation):
    """Base of the methods that carry a Gaussian state from step to step."""

    def moments(self, model: Any, u: ndarray, m: Float[ndarray, "b n"], P: Float[ndarray, "b n n"]) -> Moments:
        """Return the moments of the next output for states s ~ N(m, P)."""
        raise NotImplementedError

    def run(
        self, model: Any, starts: Float[ndarray, "b n"], inputs: Float[ndarray, "b h d"], noise: Feedback
    ) -> Rollout:
        (b, n), q, d = starts.shape, model.n_outputs_, model.n_inputs_
        F, G = model.lags.shift(q, d)
        m, P = starts, np.zeros((b, n, n))
        if noise == "measurement":
            noise_cov = self.moments(model, inputs[:, 0], m, P).noise_cov
            for i in range(model.lags.outputs):
                P[:, i * q : (i + 1) * q, i * q : (i + 1) * q] = noise_cov
        steps: list[tuple[ndarray, ndarray, ndarray]] = []
        for u in inputs.swapaxes(0, 1):
            moments = self.moments(model, u, m, P)
            measured = moments.cov + moments.noise_cov
            steps.append((moments.mean, measured, moments.affine_cost))
            m, P = m @ F.T + u @ G.T, F @ P @ F.T
            between = F @ moments.cross
            m[:, :q] = moments.mean
            P[:, :, :q] = between
            P[:, :q, :] = between.swapaxes(1, 2)
            P[:, :q, :q] = measured if noise == "process" else moments.cov
            P = 0.5 * (P + P.swapaxes(1, 2))  # otherwise asymmetric rounding errors would grow from step to step
        return _gaussian(*(np.stack(part, 1) for part in zip(*steps, strict=True)))


def _next_outputs(model: Any, states: Float[ndarray, "p b n"], u: Float[ndarray, "b d"]) -> tuple[ndarray, ...]:
    """Mean, covariance without noise, noise covariance and affine cost of b trajectories, each from p states."""
    shape = states.shape[:2]
    rows = model.lags.join(states, np.broadcast_to(u, (*shape, u.shape[1])), model.n_outputs_)
    prediction = model.next(rows.reshape(-1, rows.shape[2]))
    function = replace(prediction, component_noise_var=np.zeros_like(prediction.component_noise_var)).cov()
    parts = prediction.mean, function, prediction.cov() - function, prediction.affine_cost
    return tuple(part.reshape(*shape, *part.shape[1:]) for part in parts)


@dataclass(frozen=True)
class Linearized(Gaussian):
    """Linearised propagation: P+ = A P A' + epistemic covariance at the mean + noise, A by central differences."""

    def moments(self, model: Any, u: ndarray, m: Float[ndarray, "b n"], P: Float[ndarray, "b n n"]) -> Moments:
        n = m.shape[1]
        h = STEP * model.state_scale_
        moves = np.concatenate([np.zeros((1, n)), np.diag(h), -np.diag(h)])
        y, cov, noise_cov, affine_cost = _next_outputs(model, m + moves[:, None], u)
        A = (y[1 : n + 1] - y[n + 1 :]).transpose(1, 2, 0) / (2 * h)
        cross = P @ A.swapaxes(1, 2)
        return Moments(y[0], A @ cross + cov[0], cross, noise_cov[0], affine_cost[0])


@dataclass(frozen=True)
class Unscented(Gaussian):
    """Unscented propagation: 2n sigma points with the mean and covariance of the state; noise is averaged over them."""

    def moments(self, model: Any, u: ndarray, m: Float[ndarray, "b n"], P: Float[ndarray, "b n n"]) -> Moments:
        n = m.shape[1]
        values, vectors = np.linalg.eigh(P)
        root = (vectors * np.sqrt(n * values.clip(min=0))[:, None, :]).transpose(2, 0, 1)
        moves = np.concatenate([root, -root])
        y, *others = _next_outputs(model, m + moves, u)
        mean, cov, noise_cov, affine_cost = (x.mean(0) for x in (y, *others))
        off = y - mean
        between, cross = (np.einsum("pbi,pbj->bij", x, off) / (2 * n) for x in (off, moves))
        return Moments(mean, between + cov, cross, noise_cov, affine_cost)


@dataclass(frozen=True)
class SampledWeights(Propagation):
    """Propagation by sampling: each draw of the function is followed from every start."""

    n: int = 200
    """Number of draws, 2 or more."""
    calibrated: bool = True
    """Whether the first step is distributed as `predictive` says, or by the posterior without its calibration curve,
    which is fitted one step ahead; `best_propagation` chooses between the two on held-out episodes."""
    random_state: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        if self.n < 2:
            raise InputError(f"n={self.n} draws: a distribution needs at least 2")

    def run(
        self, model: Any, starts: Float[ndarray, "b n"], inputs: Float[ndarray, "b h d"], noise: Feedback
    ) -> Rollout:
        fitted = getattr(model.regressor_, "fitted_", None)
        if not isinstance(fitted, Fitted):
            raise InputError(
                f"weights can be drawn only from Bayesian last layers, not from a {type(model.regressor_).__name__}: "
                "use by=Unscented() or by=Linearized()"
            )
        rng = np.random.default_rng(self.random_state)
        q, d, b = model.n_outputs_, model.n_inputs_, len(starts)
        F, G = model.lags.shift(q, d)
        s = np.broadcast_to(starts, (self.n, *starts.shape)).copy()
        rows = lambda states, u: model.lags.join(states, np.broadcast_to(u, (self.n, *u.shape)), q)
        if self.calibrated:
            weights = fitted.working(model.lags.join(starts, inputs[:, 0], q)).weights
        else:
            fitted = replace(fitted, calibration=None)
            weights = np.full((len(fitted.members), b), 1 / len(fitted.members))
        draws = Draws.of(fitted, weights, self.n, rng)
        if noise == "measurement":
            noise_cov = draws(rows(s, inputs[:, 0]))[1]
            for i in range(model.lags.outputs):
                s[..., i * q : (i + 1) * q] += _normal(noise_cov, rng)
        steps: list[tuple[ndarray, ndarray, ndarray]] = []
        for u in inputs.swapaxes(0, 1):
            X = rows(s, u)
            change, noise_cov, cost = draws(X)
            y = change + X[..., :q] if model.lags.increments else change
            steps.append((y, noise_cov, cost))
            s = s @ F.T + u @ G.T
            s[..., :q] = y + _normal(noise_cov, rng) if noise == "process" else y
        mean, within, costs = (np.stack(part, 2) for part in zip(*steps, strict=True))
        spread = mean - mean.mean(0)
        cov = np.einsum("cbhi,cbhj->bhij", spread, spread) / (self.n - 1) + within.mean(0)
        return Rollout(mean, np.diagonal(within, axis1=-2, axis2=-1).copy(), cov, costs.mean(0))


@dataclass(frozen=True, eq=False)
class Draws:
    """Draws of n functions, each started at b points."""

    members: list[Fitted]
    pick: Int[ndarray, "n b"]
    """Member of each draw and start."""
    tail: Float[ndarray, "n b"]
    """Factor on the variance of each draw: 1, or that of the tails."""
    E: Float[ndarray, "n r q"]
    """Standard normal numbers; a member uses as many rows as it has features."""

    @classmethod
    def of(cls, fitted: Fitted, weights: Float[ndarray, "c b"], n: int, rng: np.random.Generator) -> "Draws":
        alone = [fitted.alone(i) for i in range(len(fitted.needs("a rollout by draws", bell=True).members))]
        component = (rng.random((n, 1, 1)) > weights.cumsum(0)[:-1].T).sum(-1)
        tail = np.where(component >= len(alone), fitted.tails.factor, 1.0)
        widest = max(layer.root.shape[-1] for layer in fitted.state.layers)
        return cls(alone, component % len(alone), tail, rng.standard_normal((n, widest, fitted.n_outputs)))

    def __call__(
        self, X: Float[ndarray, "n b d"]
    ) -> tuple[Float[ndarray, "n b q"], Float[ndarray, "n b q q"], Float[ndarray, "n b"]]:
        """Evaluate each draw at its points: value of the function, noise covariance, affine cost."""
        q = self.E.shape[-1]
        value, noise, cost = np.empty((*X.shape[:2], q)), np.empty((*X.shape[:2], q, q)), np.empty(X.shape[:2])
        for i, member in enumerate(self.members):
            at = self.pick == i
            if not at.any():
                continue
            tail = self.tail[at][:, None]
            functions = member.functions(X[at])
            parts = functions.parts
            deviation = functions.at_points(self.E[np.nonzero(at)[0]]) - functions.mean
            wider = np.sqrt(tail / member.tails.widening)  # each draw is from the tails or not
            C = np.eye(q) if member.correlation is None else member.correlation[0]
            value[at], cost[at] = parts.mean[0] + wider * deviation, parts.cost[0].mean(-1)
            noise[at] = formula.output_cov(NumPyOps, C, np.zeros_like(parts.noise[0]), tail * parts.noise[0])
        return value, noise, cost


def _normal(cov: Float[ndarray, "*b q q"], rng: np.random.Generator) -> Float[ndarray, "*b q"]:
    return (np.linalg.cholesky(cov) @ rng.standard_normal((*cov.shape[:-1], 1)))[..., 0]
