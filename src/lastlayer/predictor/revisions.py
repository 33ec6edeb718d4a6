"""Revisions of a fitted model: tuned, calibrated, with rows added or removed. Each returns a new value."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from lastlayer import formula
from lastlayer._internal.arrays import converted
from lastlayer._internal.work import row_chunks
from lastlayer.bayes.evidence import by_evidence
from lastlayer.bayes.held_out import HeldOut
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Readings
from lastlayer.calibration.alpha import AlphaCurve, search_alpha, tune_alpha_on
from lastlayer.calibration.curve import Calibration
from lastlayer.calibration.fit import SHARPNESS, fit_curves
from lastlayer.calibration.points import HeldOutPoints
from lastlayer.calibration.shape import FEWEST, ShapePoints, fit_shape
from lastlayer.data.observe import Measurements, Observations
from lastlayer.data.rows import Points
from lastlayer.errors import InputError
from lastlayer.formula import State
from lastlayer.formula.ops import TorchOps
from lastlayer.networks.mlp import features_of, finite_features
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.predictor.fitted import BlockOps, Fitted, as_arrays, curves_of
from lastlayer.predictor.member import Member
from lastlayer.settings.types import DTYPES, FOURIER, Family
from lastlayer.training.sites import sites_at

logger = logging.getLogger(__name__)


def at_alpha(fitted: Fitted, log_alpha: float) -> Fitted:
    """Set another alpha for the variance; all members shift together, and the mean does not change."""
    start, centre = _start(fitted)
    shifted = [log_alpha - centre + own for own in start] if len(start) > 1 else [log_alpha]
    return _with(fitted, (replace(m, tuned=own) for m, own in zip(fitted.members, shifted, strict=True)))


def tune_alpha(fitted: Fitted, data: Points) -> tuple[Fitted, AlphaCurve]:
    """Algorithm 1: choose the alpha of the variance by the LPD of validation data; the mean does not change."""
    start, centre = _start(fitted)
    state = fitted.state
    features = [fitted.features(i, data.X) for i in range(len(fitted.members))]
    posteriors = [member.posterior for member in fitted.members]
    scale = fitted.targets.scale.numpy()
    targets = data.readings.values.cpu().numpy() * scale + fitted.targets.mean.numpy()
    with torch.no_grad():
        z = converted(data.X, torch.float64)
        mean, *_, cost_star = formula.last_layers(BlockOps, state, z, formula.last_layer)

    def lpd(log_alphas: Float[ndarray, " a"]) -> Float[ndarray, " a"]:
        ratios = [
            q.variance_ratios(Phi, torch.from_numpy(log_alphas - centre + own).to(Phi))
            for q, Phi, own in zip(posteriors, features, start, strict=True)
        ]
        values = []
        for cost in torch.stack(ratios, 1):
            with torch.no_grad():
                cost = cost if cost.dim() > 2 else cost[..., None]
                parts = as_arrays(formula.components(TorchOps, state, [mean, cost.to(mean), cost_star], z))
            working = fitted.prediction(parts)
            likelihood, of_targets = fitted.likelihood, fitted.likelihood.linear or fitted.likelihood.iterated
            p = likelihood.predict(working) if of_targets else working  # targets are working ones
            values.append(p.log_prob(targets).mean())
        return np.array(values)

    ranges = [q.equations.alpha_range(2, Phi).tolist() for q, Phi in zip(posteriors, features, strict=True)]
    first = min(low - own for (low, _), own in zip(ranges, start, strict=True))
    last = max(high - own for (_, high), own in zip(ranges, start, strict=True))
    unit = float(np.log(scale) @ (~np.isnan(targets)).mean(0))  # an LPD of standardised targets, as everywhere
    now = float(np.mean(fitted.log_alphas[: len(fitted.best)]))
    found = search_alpha(lambda a: lpd(a) + unit, (centre + first, centre + last), now)
    return at_alpha(fitted, found.log_alpha), found


def tune_alpha_on_folds(fitted: Fitted, folds: "list[HeldOut]") -> tuple[Fitted, AlphaCurve]:
    found = tune_alpha_on(folds, float(np.mean(fitted.log_alphas)))
    return _with(fitted, (replace(member, tuned=found.log_alpha) for member in fitted.members)), found


def calibrate(fitted: Fitted, points: HeldOutPoints) -> Fitted:
    """Fit the curves from affine cost to variance, and for a mixture tails and shrinkage."""
    asked = fitted.settings.layer.noise
    input_noise = None if asked == "auto" else asked == "input"
    cost = points.cost if points.cost.dim() > 2 else points.cost[..., None]
    single = torch.from_numpy(points.single)  # errors of points held out with their neighbours are no noise
    alone = points.readings.map(lambda x: x[single.to(x.device)])
    var = points.noise_var * (1 + cost)
    likelihood = fitted.likelihood.refitted(alone, points.mean[:, single], var[:, single])
    found = fit_curves(points, mixture=len(fitted.members) > 1, input_noise=input_noise, likelihood=likelihood)
    if asked == "auto":
        layer = replace(fitted.settings.layer, noise="diagonal" if found.head is None else "input")
        fitted = replace(fitted, settings=replace(fitted.settings, layer=layer))
    if fitted.settings.layer.shape:
        found = with_shape(found, points)
    order = list(found.curves)
    members = tuple(sorted(fitted.members, key=lambda member: order.index(member.family)))
    return replace(
        fitted,
        calibration=found,
        likelihood=likelihood,
        members=tuple(replace(member, tuned=None) for member in members),
        family_scores=fitted.family_scores or found.alone,
        conformal_scores=None,
    )


def with_shape(found: Calibration, points: HeldOutPoints) -> Calibration:
    """Fit Gaussians beside the calibrated mixture, if they suit the targets of points that were held out singly."""
    points = points.usable()
    if points.mean.shape[-1] > 1 or points.readings.known is not None or points.inputs.dim() != 2:
        logger.info("the noise has the shape of the mixture: another needs one output, a table and no known noise")
        return found
    single = np.flatnonzero(points.single)
    shape = fit_shape(shape_points(found, points[single])) if len(single) >= FEWEST else None
    return found if shape is None else replace(found, shape=shape)


def shape_points(found: Calibration, points: HeldOutPoints) -> ShapePoints:
    """The calibrated mixture at points held out singly, which lie inside the data."""
    families, precision, z = list(points.families), found.shrinkage.precision, points.inputs.double()
    noise_cov = points.noise_var.mean(1)[..., None]  # its level matters outside the data alone
    state = State(
        curve=curves_of(families, replace(found, outside=None), noise_cov),
        head=None if found.head is None else State(**vars(found.head)),
        outside=None,
        shape=None,
        centre=torch.zeros(1, dtype=torch.float64),
        log_noise_var=points.noise_var.log(),
        log_precision=torch.tensor([precision]).log() if precision else None,
        sharpness=SHARPNESS if len(families) > 1 else 0.0,
    )
    cost = points.cost if points.cost.dim() > 2 else points.cost[..., None]
    parts = as_arrays(formula.components(TorchOps, state, [points.mean, cost, cost], z))
    prediction = MixturePrediction(
        component_mean=parts.mean,
        component_epistemic_var=parts.epistemic,
        component_noise_var=parts.noise,
        affine_cost=parts.cost.mean((0, 2)),
        weights=parts.weights[..., 0],
    )
    if share := found.tails.share:
        factors = np.array([1.0, found.tails.factor])
        prediction = prediction.split([1 - share, share], factors, factors)
    t = points.readings.values
    judge = FOURIER if FOURIER in families else next(iter(found.curves))
    judges = [i for i, family in enumerate(families) if family == judge]
    mean, std, log_density = map(torch.from_numpy, (prediction.mean, prediction.std, prediction.log_prob(t.numpy())))
    return ShapePoints(z, t, mean, std, log_density[:, None], points.weight.double(), cost[judges].mean((0, 2)))


def held_out_points(fitted: Fitted, data: Points) -> HeldOutPoints:
    """Predictions of the members for rows that the model has not seen."""
    by = lambda m: HeldOutPoints.by(m.posterior, m.features(data.X), data, "validation", m.family)
    return HeldOutPoints.stacked([by(member) for member in fitted.members]).beside_references()


def conformalize(fitted: Fitted, X: ndarray, y: ndarray) -> Fitted:
    residuals = fitted.predictive(X).with_output_axis().standardized_residual(y)
    return replace(fitted, conformal_scores=np.abs(residuals))


def with_rows(fitted: Fitted, data: Points, *, forgetting: float = 1.0) -> Fitted:
    """Add rows to every last layer and down-weight old ones; the curves are widened if the rows were unexpected."""
    if fitted.calibration is not None:
        squares = dict.fromkeys(fitted.calibration.curves, 0.0)
        for rows in row_chunks(len(data.X)):
            part = data.take(rows)
            with torch.no_grad():
                z = converted(part.X, torch.float64)
                outputs = formula.last_layers(BlockOps, fitted.state, z, formula.last_layer)
                parts = as_arrays(formula.components(TorchOps, fitted.state, outputs, z))
            target = (part.T.cpu() * fitted.targets.scale + fitted.targets.mean).numpy()
            weight, present = (None if x is None else x.cpu().numpy() for x in (part.weight, part.readings.read))
            residuals = squared_residuals(fitted, parts, target, weight=weight, present=present)
            for family, more in residuals.items():
                squares[family] += more
        n = float(len(data.X) if data.weight is None else data.weight.sum())
        fitted = replace(fitted, calibration=fitted.calibration.after(squares, n, forgetting))

    def changed(member: Member) -> Member:
        new, likelihood = data, fitted.likelihood
        if likelihood.iterated:
            new = sites_at(likelihood, data, member.posterior, member.features(data.X))
        rows = new.statistics(partial(finite_features, member.network))
        posterior = member.posterior.update(rows, forgetting=forgetting)
        return replace(member, posterior=posterior, unseen=member.unseen.scaled(forgetting))

    return _with(fitted, map(changed, fitted.members))


def with_observations(fitted: Fitted, observations: Sequence[Observations]) -> Fitted:
    """Add measurements of functionals to every last layer; alpha and noise stay the same."""
    inputs = fitted.needs("an observation", linear=True, table=True).inputs
    assert inputs is not None
    place = fitted.settings.place
    standard = (Measurements.of(one, inputs, fitted.targets) for one in observations)
    seen = [one.to(place.device, DTYPES[place.dtype]) for one in standard]

    def changed(member: Member) -> Member:
        linear, noise_var = partial(features_of, member.network), member.posterior.Sigma_E.diagonal()
        with torch.no_grad():
            more = reduce(add, (one.moments(linear, noise_var) for one in seen))
        return replace(member, posterior=member.posterior.update(more))

    return _with(fitted, map(changed, fitted.members))


def squared_residuals(
    fitted: Fitted,
    parts: formula.Components,
    target: Float[ndarray, "m q"],
    *,
    weight: Float[ndarray, " m"] | None = None,
    present: Float[ndarray, "m q"] | None = None,
) -> dict[Family, float]:
    """Sum over rows of squared residuals over their calibrated variance, for each family."""
    variance = fitted.tails.widening * (parts.epistemic + parts.noise)
    each = np.fmin(np.square(target - parts.mean) / variance, 1e6)  # of NaN too
    if fitted.likelihood.iterated:  # outliers widen curves as little as they change last layers
        t, mean, var, noise = map(torch.from_numpy, (np.nan_to_num(target), parts.mean, parts.epistemic, parts.noise))
        sites = fitted.likelihood.sites(Readings(t.expand_as(mean)), mean, var, noise)
        each = each / sites.scale.numpy()  # type: ignore[union-attr]
    squares = each.sum(-1) / each.shape[-1] if present is None else (present * each).sum(-1) / present.sum(-1)
    total = dict[Family, list[float]]()
    for member, own in zip(fitted.members, (squares if weight is None else squares * weight).sum(-1), strict=True):
        total.setdefault(member.family, []).append(float(own))
    return {family: sum(own) / len(own) for family, own in total.items()}


def without_rows(fitted: Fitted, data: Points) -> Fitted:
    """Remove rows from every last layer that was fitted to them."""
    fitted.likelihood.check_fixed("remove")
    keys = data.keys()

    def changed(member: Member) -> Member:
        unseen, weight = member.unseen.without(keys, data.weight)
        seen = np.flatnonzero(weight)
        if not len(seen):
            return replace(member, unseen=unseen)
        own = replace(data.take(torch.from_numpy(seen)), weight=torch.from_numpy(weight[seen]).to(data.T))
        rows = own.statistics(partial(finite_features, member.network))
        return replace(member, posterior=member.posterior.remove(rows), unseen=unseen)

    return _with(fitted, map(changed, fitted.members))


def reestimate(fitted: Fitted) -> Fitted:
    """Estimate alpha and noise from the rows in memory, at the maximum of the evidence; the features stay the same."""
    fitted.likelihood.check_fixed("reestimate")
    posteriors = [member.posterior for member in fitted.members]
    first = posteriors[0]
    if not torch.allclose(first.statistics.count, first.statistics.n):
        raise InputError(
            "the model has targets with known noise, or functionals: their weight depends on the learned noise, so "
            "alpha and noise cannot be estimated from sums; fit again with all rows"
        )
    prior = fitted.settings.layer.noise_prior
    found = by_evidence(
        [p.statistics for p in posteriors], noise=first.noise, bias_prior=first.bias_prior, noise_prior=prior
    )

    def moved(member: Member, posterior: Posterior) -> Member:
        """A tuned alpha keeps its distance from alpha*."""
        tuned = None if member.tuned is None else member.tuned + float(posterior.log_alpha) - member.log_alpha_star
        return replace(member, posterior=posterior, tuned=tuned)

    calibration = None if fitted.calibration is None else fitted.calibration.forgotten()
    return _with(replace(fitted, calibration=calibration), map(moved, fitted.members, found))


def _with(fitted: Fitted, members: Iterable[Member]) -> Fitted:
    return replace(fitted, members=tuple(members), conformal_scores=None)


def _start(fitted: Fitted) -> tuple[tuple[float, ...], float]:
    """Finite log alphas to shift, and the mean over the best members."""
    stars = tuple(member.log_alpha_star for member in fitted.members)
    own = fitted.log_alphas if np.isfinite(fitted.log_alphas).all() else stars
    return own, float(np.mean(own[: len(fitted.best)]))
