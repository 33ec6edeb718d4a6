"""Small fitted models of every kind, for all that must say what `predictive` says: modules, graphs, expressions."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from helpers import sine, small_process
from numpy import ndarray
from scipy import stats
from sklearn.model_selection import GroupKFold

from lastlayer import BLLRegressor, TrainingOptions
from lastlayer.calibration.curve import Curve, Tails
from lastlayer.data.observe import Derivative
from lastlayer.data.validation import validated
from lastlayer.estimators.base import LastLayerRegressor
from lastlayer.predictor.member import Member
from lastlayer.settings.types import ADDITIVE, FOURIER, Given

SHARED = TrainingOptions(bias_prior="shared")
FAST = {"preset": "evidence", "max_epochs": 20, "random_state": 0}
SMALL = {"hidden": (6, 5), "max_epochs": 40, "random_state": 0, "hidden_prior": 0.3}
OF_TRAINING = {field.name for field in fields(TrainingOptions)}


def regressor(**options: Any) -> BLLRegressor:
    """What only training reads is given by its own name too."""
    own = {name: options.pop(name) for name in OF_TRAINING & options.keys()}
    return BLLRegressor(**options | ({"training": TrainingOptions(**own)} if own else {}))


def data(q=2, d=3, m=60):
    X, y = sine(m, q=q, d=d)
    return X * np.array([1.0, 30.0, 0.1])[:d] + 5, y * 100


def holes(y, share=0.4):
    """Some targets missing, but not all of a row."""
    missing = np.random.default_rng(5).random(y.shape) < share
    missing[missing.all(1), 0] = False
    return np.where(missing, np.nan, y)


def far(X, n=40):
    """Points inside and far outside the data."""
    rng = np.random.default_rng(3)
    return X.mean(0) + rng.standard_normal((n, X.shape[1])) * X.std(0) * rng.choice([1, 5], (n, 1))


@cache
def fitted(name):
    with small_process():
        return (MODELS | REVISED)[name](*data())


MODELS = {
    "single": lambda X, y: BLLRegressor(**FAST).fit(X, y),
    "shared prior, full noise": lambda X, y: BLLRegressor(**FAST, noise="full", training=SHARED).fit(X, y),
    "alpha tuned": lambda X, y: BLLRegressor(**FAST).fit(X, y).tune_alpha(far(X, 60), y),
    "no hidden layer": lambda X, y: BLLRegressor(hidden=(), **FAST).fit(X, y),
    "mixture": lambda X, y: BLLRegressor(**SMALL, n_members=3).fit(X, y),
    "mixture, full noise, alpha tuned": lambda X, y: (
        BLLRegressor(**SMALL, n_members=3, noise="full").fit(X, y).tune_alpha(far(X, 60), y)
    ),
    "mixture, noise by input": lambda X, y: BLLRegressor(**SMALL, n_members=3, noise="input").fit(X, y),
    "mixture of families": lambda X, y: BLLRegressor((4,), preset="fast", max_epochs=15, random_state=0).fit(X, y),
    "mixture, uncalibrated": lambda X, y: BLLRegressor(**SMALL, n_members=3, calibration=None).fit(X, y),
    "partly missing targets": lambda X, y: BLLRegressor((4,), preset="fast", max_epochs=15, random_state=0).fit(
        X, holes(y)
    ),
    "partly missing targets, shared prior, alpha tuned": lambda X, y: (
        BLLRegressor(**FAST, training=SHARED).fit(X, holes(y)).tune_alpha(far(X, 60), holes(y))
    ),
    "single, calibrated by groups": lambda X, y: BLLRegressor(**SMALL, n_members=1, calibration=GroupKFold(3)).fit(
        X, y, groups=np.arange(len(X)) // 10
    ),
}
REVISED = {
    "families, alpha tuned": lambda X, y: copy.deepcopy(fitted("mixture of families")).tune_alpha(far(X, 60), y),
    "infinite alpha": lambda X, y: fitted("mixture").at_alpha(np.inf),
    "another alpha": lambda X, y: fitted("mixture").at_alpha(math.log(fitted("mixture").alpha_star_) + 1.5),
    "a member alone": lambda X, y: (m := fitted("mixture of families")).with_fitted(m.fitted_.alone(0)),
    "rows added": lambda X, y: copy.deepcopy(fitted("mixture of families")).update(X + 1, y),
    "encoded inputs": lambda X, y: BLLRegressor(**SMALL, n_members=3, encoding="piecewise").fit(X, y),
    "mixture, shared prior": lambda X, y: BLLRegressor(**SMALL, n_members=3, training=SHARED).fit(X, y),
}
"""More models, most of them made from those above."""


@dataclass(frozen=True)
class Case:
    """Rows of a kind, as `fit` takes them."""

    X: ndarray
    y: ndarray
    by_row: dict[str, ndarray]
    """Arguments with one entry per row."""
    observations: tuple[Any, ...] = ()

    def take(self, rows: ndarray) -> "Case":
        of_rows = {name: values[rows] for name, values in self.by_row.items()}
        return replace(self, X=self.X[rows], y=self.y[rows], by_row=of_rows)

    def weighted(self, weight: ndarray) -> "Case":
        """With these weights, times those that the rows have."""
        weight = weight * self.by_row.get("sample_weight", 1.0)
        return replace(self, by_row=self.by_row | {"sample_weight": weight})

    def given(self) -> Given:
        words = {**self.by_row, "observations": self.observations}
        return validated(BLLRegressor(), self.X, self.y, words.pop("sample_weight", None), partly=True, **words)

    def fitted(self, **parameters: Any) -> BLLRegressor:
        return BLLRegressor(**parameters).fit(self.X, self.y, observations=self.observations, **self.by_row)


def _case(m: int, *, gaps: bool = False, observations: tuple[Any, ...] = (), **by_row: ndarray) -> Case:
    X, y = sine(m, q=2, d=2)
    return Case(X, holes(y, 0.2) if gaps else y, by_row, observations)


_SLOPES = Derivative(0).at([[0.0, 0.0], [1.0, 1.0]]).observed([1.0, 0.5], noise_std=0.1)
CASES: dict[str, Callable[[int], Case]] = {
    "complete": _case,
    "weights": lambda m: _case(m, sample_weight=1.0 + np.arange(m) % 3),
    "missing": lambda m: _case(m, gaps=True),
    "known noise": lambda m: _case(m, noise_std=np.linspace(0.05, 0.4, 2 * m).reshape(m, 2)),
    "missing and known noise": lambda m: _case(m, gaps=True, noise_std=np.linspace(0.05, 0.4, m)),
    "groups": lambda m: _case(m, groups=np.arange(m) // 3),
    "functionals": lambda m: _case(m, observations=(_SLOPES,)),
}
"""Rows of every kind, by their number."""


# the slow form of a prediction ---------------------------------------------------------------------------------------


def affine(member: Member, Z: ndarray) -> torch.Tensor:
    """Affine features of standardised inputs by one member."""
    with torch.no_grad():
        return torch.cat([member.network(torch.from_numpy(Z)), torch.ones(len(Z), 1)], 1).double()


def variance_outside(model: LastLayerRegressor, Z: ndarray) -> ndarray:
    """(m,): what the process says beyond its largest variance inside, times the factor; target units."""
    outside = None if model.calibration_ is None else model.calibration_.outside
    if outside is None:
        return np.zeros(len(Z))
    (process,) = (member for member in model.members_ if member.family == FOURIER)
    posterior, scale = process.posterior, model.fitted_.targets.scale.numpy()
    beyond = np.maximum(posterior.variance_ratio(affine(process, Z)).numpy() - outside.inside, 0.0)
    return outside.factor * beyond * stats.gmean(np.diag(posterior.Sigma_E.numpy()) * scale**2)


def widening(curve: Curve) -> float:
    """Of rows learned since: a curve is worth 50, and they must miss it by more than three standard errors."""
    unexpected = (curve.squares - curve.seen) ** 2 > 9 * 2 * curve.seen and curve.squares > curve.seen
    return (50 + curve.squares) / (50 + curve.seen) if unexpected else 1.0


def by_members(model: LastLayerRegressor, X: ndarray, *, noise: bool = True) -> tuple[ndarray, ndarray, ndarray]:
    """Weights (c, m), means (c, m, q) and covariances (c, m, q, q) of the components, one wide twin a member."""
    calibration, fitted = model.calibration_, model.fitted_
    Z = (X - fitted.inputs.mean.numpy()) / fitted.inputs.scale.numpy()
    scale, centre = fitted.targets.scale.numpy(), fitted.targets.mean.numpy()
    families, weights, means, covs = [member.family for member in model.members_], [], [], []
    far = variance_outside(model, Z)
    for member, log_alpha in zip(model.members_, model.fitted_.log_alphas, strict=True):
        curve = Curve.identity(len(scale)) if calibration is None else calibration.curves[member.family]
        wide = widening(curve)
        a, b = np.tile(wide * curve.noise, (len(X), 1)), wide * curve.slope
        if calibration is not None and calibration.head is not None:
            head = calibration.head
            inside = np.clip(Z, head.low.numpy(), head.high.numpy())
            a = a * np.exp(np.tanh(inside @ head.U.numpy() + head.u.numpy()) @ head.V.numpy())
        posterior, Phi = member.posterior, affine(member, Z)
        v = posterior.variance_ratio(Phi, log_alpha).numpy()[:, None]
        v_star = posterior.variance_ratio(Phi).numpy()[:, None]
        Sigma = posterior.Sigma_E.numpy() * np.outer(scale, scale)
        # as much as the process has outside the data, the same for every output in units of its own variance there
        more = far * (math.exp(-1.5) if member.family == FOURIER else 1.0) / stats.gmean(np.diag(Sigma) * b)
        inside = lambda v: np.where(v < curve.reach, v, curve.reach) ** curve.power * np.maximum(v / curve.reach, 1.0)
        shape = lambda v: inside(v) + more[:, None]
        # the function and the noise are independent, each as correlated between the outputs as Sigma_E
        stds = [np.sqrt(b * shape(v)), np.sqrt(noise * a)]
        covs.append(sum(std[:, :, None] * Sigma * std[:, None, :] for std in stds))
        var = np.diag(Sigma) * (a + b * shape(v_star))
        # a target known beforehand to the precision of the shrinkage, and the member's word on it, as one Gaussian
        shrinkage = 0.0 if calibration is None else calibration.shrinkage.precision
        own = 1 / (np.diag(Sigma) * (a + b * inside(v_star)))  # what the process adds left out
        before = shrinkage / scale**2
        mean = (Phi @ posterior.weights).numpy() * scale + centre
        means.append((own * mean + before * centre) / (own + before))
        trust = curve.trust / families.count(member.family)  # members of a family share it
        weights.append(trust / stats.gmean(var, axis=1) if calibration is not None else np.ones(len(X)))
    w, mean, cov = np.stack(weights), np.stack(means), np.stack(covs)
    w = w / w.sum(0)
    tails = Tails() if calibration is None else calibration.tails
    share = tails.share
    return (
        np.concatenate([(1 - share) * w, share * w]),
        np.tile(mean, (2, 1, 1)),
        np.concatenate([cov, tails.factor * cov]),
    )


def outside_the_data(model: LastLayerRegressor, X: ndarray) -> list[ndarray]:
    """Of each reference, 1 - inside / u where its members cost more than inside, on average, and zero elsewhere."""
    calibration = model.calibration_
    if calibration is None or calibration.outside is None:
        return [np.zeros(len(X))]
    Z = (X - model.fitted_.inputs.mean.numpy()) / model.fitted_.inputs.scale.numpy()
    found = []
    for family, inside in ((FOURIER, calibration.outside.inside), (ADDITIVE, calibration.additive_inside)):
        own = [member for member in model.members_ if member.family == family]
        u = sum(member.posterior.variance_ratio(affine(member, Z)).numpy() for member in own) / len(own)
        found.append(np.where(u > inside, 1 - inside / u, 0.0))
    return found


def merged(model: LastLayerRegressor, X: ndarray, *, noise: bool = True) -> tuple[ndarray, ...]:
    """`by_members`, where outside the data the spread of the means is part of the variance of every component."""
    w, mean, cov = by_members(model, X, noise=noise)
    g = np.max(outside_the_data(model, X), axis=0)[:, None]
    centre = (w[..., None] * mean).sum(0)
    spread = mean - centre
    between = np.einsum("cm,cmp,cmq->mpq", w, spread, spread)
    return w, centre + np.sqrt(1 - g) * spread, cov + g[..., None] * between
