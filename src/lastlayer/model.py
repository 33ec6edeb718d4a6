"""Fitted Bayesian last layers, one or a mixture of them: everything that can be asked of them, in target units."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from lastlayer.calibration import (
    Anchor,
    Calibration,
    Curve,
    HeldOutPoints,
    Member,
    Tails,
    anchored,
    fit_curves,
    precision_weights,
)
from lastlayer.calibration.crossfit import predict_held_out
from lastlayer.errors import InputError
from lastlayer.estimator import Shell, as_covariance_parts, chunks, columns
from lastlayer.extrapolation import AlphaCurve, alpha_range_for, cost_quantile, search_alpha
from lastlayer.features import affine_features
from lastlayer.inputs import check_weight, check_Xy
from lastlayer.linalg import TINY
from lastlayer.posterior import Posterior
from lastlayer.prediction import JointPrediction, Prediction, add_noise
from lastlayer.statistics import Statistics
from lastlayer.training import Data, last_layer

Model = TypeVar("Model", bound="LastLayerModel")


@dataclass(frozen=True)
class Extrapolation:
    """How far points lie outside what the features were trained on."""

    affine_cost: Float[ndarray, " m"]
    """At alpha_star_: the variance of the function over that of the noise (Theorem 2); the mean over the members."""
    quantile: Float[ndarray, " m"]
    """Share of the training points that would cost less if they were new; 1: farther out than all of them."""


@dataclass(frozen=True)
class Marginals:
    """What every member says of each point: mean in target units, affine cost at alpha* and at the alpha in use.

    Means are those of the posterior: where they are anchored, `LastLayerModel._means` says where they come to lie.
    """

    mean: Float[ndarray, "c m q"]
    cost: Float[ndarray, "c m"]
    ratio: Float[ndarray, "c m"]
    noise: Float[ndarray, "c m q"]
    """Calibrated noise variance at each point over that of the evidence."""


class LastLayerModel(Shell):
    """Members, each features and a last layer; the alphas of their variance; the curve from affine cost to variance."""

    noise: str
    members_: list[Member]
    calibration_: Calibration | None
    conformal_scores_: Float[ndarray, "n q"] | None
    alpha_curve_: AlphaCurve
    hidden_prior_scores_: dict[float, float]
    _log_alphas: list[float]
    _sample_cost: Tensor

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        """Mean of the targets, shaped like y in fit; with their standard deviation, or covariance over the points.

        The covariance is (m, m), or (m, m, q) for several outputs; noise included, as in the standard deviation.
        """
        if return_std and return_cov:
            raise InputError("return_std and return_cov together: ask for one of them, the diagonal is std squared")
        if return_cov:
            joint = self.joint(X)
            cov = joint.cov_of_outputs()
            return self._shaped(joint.mean), cov[..., 0] if self._y_ndim == 1 else cov
        return super().predict(X, return_std)

    def predictive(self, X: Any, *, noise: bool = True) -> Prediction:
        """The predictive distribution of the targets, or with `noise=False` of the function behind them."""
        return self._mixture(self._marginals(self._checked(X)), noise)

    def joint(self, X: Any, *, noise: bool = True) -> JointPrediction:
        """The Gaussian over all points and outputs together; O(m^2) numbers a member."""
        Z = self._checked(X)
        marginals = self._marginals(Z)
        weights, mean = self._weights(marginals), self._mixture(marginals, noise).mean
        means, points, outputs = self._means(marginals), [], []
        for i, member in enumerate(self.members_):
            K = member.layer.posterior.joint(self._features(member.network, Z), self._log_alphas[i]).ratio_cov
            root = np.sqrt(weights[i]) * self._stretch(i, marginals.ratio[i])
            points.append(root[:, None] * K.cpu().numpy() * root)
            outputs.append(self._noise_cov(i, self._curve(i).slope))
        spread = np.sqrt(weights)[..., None] * (means - mean)
        spread = spread[: 0 if len(spread) == 1 else None]
        own_noise = self._point_noise(marginals, weights) * float(noise)
        return JointPrediction(mean, np.stack(points), np.stack(outputs), spread, own_noise)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0, *, noise: bool = True) -> ndarray:
        """Draws of whole functions, plus noise: (m, n_samples), or (m, q, n_samples) for 2-D targets.

        They are draws of `joint`: each takes one set of weights a member, so it costs O(p) a point.
        """
        Z = self._checked(X)
        rng = check_random_state(random_state)
        marginals = self._marginals(Z)
        weights, mean = self._weights(marginals), self._mixture(marginals, noise).mean
        means = self._means(marginals)
        draws = np.broadcast_to(mean, (n_samples, *mean.shape))
        for i in range(len(self.members_)):
            root, scale = np.sqrt(weights[i])[:, None], self._targets.scale.numpy()
            stretch = self._stretch(i, marginals.ratio[i])[:, None] * np.sqrt(self._curve(i).slope)
            draws = draws + root * stretch * scale * self._deviations(i, Z, n_samples, rng)
            if len(self.members_) > 1:
                draws = draws + rng.standard_normal((n_samples, 1, 1)) * root * (means[i] - mean)
        if noise:
            draws = draws + add_noise(self._point_noise(marginals, weights), rng.standard_normal(draws.shape))
        draws = np.moveaxis(draws, 0, -1)
        return draws[:, 0] if self._y_ndim == 1 else draws

    def extrapolation(self, X: Any) -> Extrapolation:
        """The affine cost of points and its rank among the training points."""
        cost = torch.from_numpy(self._marginals(self._checked(X)).cost.mean(0)).to(self._sample_cost)
        return Extrapolation(cost.cpu().numpy(), cost_quantile(cost, self._sample_cost).cpu().numpy())

    @property
    def network_(self) -> nn.Module:
        """Features of the first member."""
        return self.members_[0].network

    @property
    def posterior_(self) -> Posterior:
        """Last layer of the first member, in standardised units."""
        return self.members_[0].layer.posterior

    @property
    def hidden_prior_(self) -> float:
        """Strength of the prior on the hidden weights: the one whose members alone do best, if there are several."""
        return self.members_[0].strength

    @property
    def nlml_(self) -> float:
        """Negative log marginal likelihood per sample, standardised targets; the mean over the best members."""
        return float(np.mean([member.layer.nlml for member in self._best()]))

    @property
    def alpha_star_(self) -> float:
        return _exp(float(np.mean(self._stars()[: len(self._best())])))

    @property
    def alpha_(self) -> float:
        return _exp(float(np.mean(self._log_alphas[: len(self._best())])))

    @property
    def log_alphas_(self) -> list[float]:
        """log of the alpha that each member's variance uses."""
        return list(self._log_alphas)

    def at_alpha(self: Model, log_alpha: float) -> Model:
        """A view of the model with another alpha for the variance; members shift together, the mean does not move."""
        view = copy.copy(self)
        own = self._log_alphas if np.isfinite(self._log_alphas).all() else self._stars()
        view._log_alphas = [log_alpha + each - float(np.mean(own)) for each in own]
        return view

    @property
    def noise_std_(self) -> Float[ndarray, " q"]:
        each = [np.sqrt(np.diagonal(self._noise_cov(i))) for i in range(len(self._best()))]
        mean: ndarray = np.mean(each, axis=0)
        return mean

    @property
    def curve_(self) -> Curve:
        """From affine cost to variance, of the first member; without calibration, the posterior as it stands."""
        return self._curve(0)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "members_")

    def tune_alpha(self: Model, X: Any, y: Any) -> Model:
        """Algorithm 1: choose the alpha of the variance by the LPD of validation data; the mean does not move.

        Members shift their log alphas together. A curve stays in force: it maps the new affine costs.
        """
        data = self._validation(X, y)
        start = self._log_alphas if np.isfinite(self._log_alphas).all() else self._stars()
        features = [self._features(member.network, data.X) for member in self.members_]
        targets = self._unscaled(data.T)
        before = self._marginals(data.X)

        def lpd(log_alphas: Float[ndarray, " a"]) -> Float[ndarray, " a"]:
            ratios = [
                member.layer.posterior.variance_ratios(Phi, torch.from_numpy(log_alphas - centre + own).to(Phi))
                for member, Phi, own in zip(self.members_, features, start, strict=True)
            ]
            each = torch.stack(ratios, 1).cpu().numpy()
            return np.array([self._mixture(replace(before, ratio=r), True).log_prob(targets).mean() for r in each])

        centre = float(np.mean(start))
        ranges = [
            alpha_range_for(member.layer.posterior, Phi) for member, Phi in zip(self.members_, features, strict=True)
        ]
        limits = [min(first - own for (first, _), own in zip(ranges, start, strict=True))]
        limits += [max(last - own for (_, last), own in zip(ranges, start, strict=True))]
        unit = float(np.log(self._targets.scale.numpy()).sum())  # an LPD of standardised targets, as everywhere
        found = search_alpha(
            lambda a: lpd(a) + unit, (centre + limits[0], centre + limits[1]), float(np.mean(self._log_alphas))
        )
        self.alpha_curve_, self.conformal_scores_ = found, None
        self._log_alphas = [found.log_alpha - centre + own for own in start] if len(start) > 1 else [found.log_alpha]
        return self

    def calibrate(self: Model, X: Any, y: Any) -> Model:
        """Fit the curve from affine cost to variance to rows that the model has not seen; of a mixture, its tails and
        how far means return to that of the targets too.

        It maps the costs at alpha*: an alpha that `tune_alpha` chose is given up.
        """
        data = self._validation(X, y)
        parts = [
            predict_held_out(member.layer, self._features(member.network, data.X), data, "validation", member.strength)
            for member in self.members_
        ]
        self._calibrate(HeldOutPoints.stacked(parts))
        return self

    def conformalize(self: Model, X: Any, y: Any) -> Model:
        """Take fresh rows for `interval(level, method="conformal")`: they must not have been used in any other way.

        The guarantee is for rows exchangeable with these. What changes the model afterwards discards them.
        """
        prediction = self.predictive(X)
        targets = self._unscaled(self._validation(X, y).T)
        self.conformal_scores_ = np.abs(prediction.standardised_residual(targets))
        return self

    def update(self: Model, X: Any, y: Any, sample_weight: Any = None, *, forgetting: float = 1.0) -> Model:
        """Take in more rows in closed form: features, alpha, noise and curve stay; old rows lose weight by
        `forgetting`, the prior does not.

        For rows that come one by one, `lastlayer.online.OnlineModel` does the same much faster.
        """
        if not 0 < forgetting <= 1:
            raise InputError(f"forgetting={forgetting} must be above 0 and at most 1: the weight that old rows keep")
        return self._with_posteriors(X, y, sample_weight, lambda p, rows: p.update(rows, forgetting=forgetting))

    def remove(self: Model, X: Any, y: Any, sample_weight: Any = None) -> Model:
        """Take rows out again that `fit` or `update` put in, with the weight they have now; all else stays.

        Rows that cannot have been in are refused, and the model is left as it was.
        """
        return self._with_posteriors(X, y, sample_weight, lambda p, rows: p.remove(rows))

    def reestimate(self: Model) -> Model:
        """alpha and noise anew from the rows that count now, at the maximum of the evidence; the features stay.

        The curve stays too, in units of the new noise. A tuned alpha keeps its distance from alpha*.
        """
        check_is_fitted(self)
        layers = [
            last_layer(p.statistics, noise=p.noise, bias_prior=p.bias_prior)
            for p in (member.layer.posterior for member in self.members_)
        ]
        stars = [float(layer.posterior.log_alpha) for layer in layers]
        self._log_alphas = [
            new if own == old else own + (new - old)
            for own, old, new in zip(self._log_alphas, self._stars(), stars, strict=True)
        ]
        self.members_ = [replace(member, layer=layer) for member, layer in zip(self.members_, layers, strict=True)]
        self.conformal_scores_ = None
        return self

    # inside -----------------------------------------------------------------------------------------------------

    def _with_posteriors(
        self: Model, X: Any, y: Any, sample_weight: Any, new: Callable[[Posterior, Statistics], Posterior]
    ) -> Model:
        """Every last layer changed by the statistics of some rows; all of them or none."""
        data = self._validation(X, y)
        weight = check_weight(sample_weight, np.empty((len(data.T), 1)))
        w = None if weight is None else torch.tensor(weight, device=data.T.device)

        def changed(member: Member) -> Member:
            statistics = Statistics.from_features(self._features(member.network, data.X), data.T, sample_weight=w)
            return replace(member, layer=replace(member.layer, posterior=new(member.layer.posterior, statistics)))

        self.members_ = [changed(member) for member in self.members_]
        self.conformal_scores_ = None
        return self

    def _calibrate(self, points: HeldOutPoints) -> None:
        """A single network stays Gaussian around its own mean; a mixture has tails and an anchor."""
        self.calibration_ = fit_curves(points, mixture=len(self.members_) > 1, input_noise=self.noise == "input")
        self._log_alphas, self.conformal_scores_ = self._stars(), None

    def _best(self) -> list[Member]:
        """The members of the first strength."""
        return [member for member in self.members_ if member.strength == self.members_[0].strength]

    def _curve(self, i: int) -> Curve:
        """Of member i."""
        if self.calibration_ is None:
            return Curve.identity(len(self._targets.mean))
        return self.calibration_.curves[self.members_[i].strength]

    def _tails(self) -> Tails:
        return Tails() if self.calibration_ is None else self.calibration_.tails

    def _anchor(self) -> Anchor:
        return Anchor() if self.calibration_ is None else self.calibration_.anchor

    def _epistemic(self, ratio: Float[ndarray, "c m"]) -> Float[ndarray, "c m q"]:
        """Calibrated variance of the function over that of the noise."""
        strengths = np.array([member.strength for member in self.members_])
        var = np.empty((*ratio.shape, len(self._targets.mean)))
        for strength in dict.fromkeys(strengths):
            same = strengths == strength
            var[same] = self._curve(int(same.argmax())).epistemic(ratio[same])
        return var

    def _stars(self) -> list[float]:
        return [float(member.layer.posterior.log_alpha) for member in self.members_]

    def _features(self, network: nn.Module, Z: Tensor) -> Tensor:
        with torch.no_grad():
            return affine_features(check_features(network(Z), Z)).double()

    def _validation(self, X: Any, y: Any) -> Data:
        check_is_fitted(self)
        X, y = check_Xy(self, X, y, reset=False, nd=self._inputs is None)
        T = columns(y)
        if T.shape[1] != len(self._targets.mean):
            raise InputError(f"y has {T.shape[1]} outputs, but the model was fitted to {len(self._targets.mean)}")
        return Data(self._standardised(X), self._targets.forward(T).to(self._device()))

    def _marginals(self, Z: Tensor) -> Marginals:
        parts: list[Sequence[ndarray]] = []
        for rows in chunks(len(Z)):
            means, costs, ratios = [], [], []
            for member, log_alpha in zip(self.members_, self._log_alphas, strict=True):
                posterior, Phi = member.layer.posterior, self._features(member.network, Z[rows])
                with torch.no_grad():
                    at_star = posterior.variance_ratio(Phi)
                    own = log_alpha == posterior.log_alpha
                    in_use = at_star if own else posterior.variance_ratio(Phi, log_alpha)
                means.append(self._unscaled(posterior.mean(Phi)))
                costs.append(at_star.cpu().numpy())
                ratios.append(in_use.cpu().numpy())
            parts.append([np.stack(x) for x in (means, costs, ratios)])
        mean, cost, ratio = [np.concatenate(x, axis=1) for x in zip(*parts, strict=True)]
        return Marginals(mean, cost, ratio, self._noise_factor(Z))

    def _noise_factor(self, Z: Tensor) -> Float[ndarray, "c m q"]:
        """Calibrated noise variance at each point over that of the evidence."""
        a = np.stack([self._curve(i).noise for i in range(len(self.members_))])
        noise = np.broadcast_to(a[:, None], (len(a), len(Z), a.shape[1]))
        if self.calibration_ is not None and self.calibration_.head is not None:
            noise = noise * self.calibration_.head.factor(Z)
        return noise

    def _weights(self, marginals: Marginals) -> Float[ndarray, "c m"]:
        """What each member counts at each point: its precision where that is calibrated, at alpha*; else all alike."""
        c, m = marginals.cost.shape
        if self.calibration_ is None or c == 1:
            return np.full((c, m), 1 / c)
        weights: ndarray = precision_weights(torch.from_numpy(np.log(self._var_at_star(marginals)))).numpy()
        return weights

    def _means(self, marginals: Marginals) -> Float[ndarray, "c m q"]:
        """Of every member, anchored at the mean of the targets."""
        centre, scale = self._targets.mean.numpy(), self._targets.scale.numpy()
        precision = self._anchor().precision / np.square(scale)
        means: ndarray = anchored(marginals.mean, self._var_at_star(marginals), centre, precision)
        return means

    def _var_at_star(self, marginals: Marginals) -> Float[ndarray, "c m q"]:
        """Calibrated variance of a target under each member, at alpha*: what says how much it knows."""
        return self._noise_vars() * (marginals.noise + self._epistemic(marginals.cost))

    def _mixture(self, marginals: Marginals, noise: bool) -> Prediction:
        tails, noise_var = self._tails(), self._noise_vars()
        mean, weights = self._means(marginals), self._weights(marginals)
        epistemic = noise_var * self._epistemic(marginals.ratio)
        own_noise = noise_var * marginals.noise * float(noise)
        correlation = None
        if self.noise == "full":
            correlation = np.stack([as_covariance_parts(self._noise_cov(i))[1] for i in range(len(self.members_))])
        if tails.share:
            mean, epistemic, own_noise, weights = (
                np.concatenate([rest * x, tail * x])
                for x, rest, tail in (
                    (mean, 1.0, 1.0),
                    (epistemic, 1.0, tails.factor),
                    (own_noise, 1.0, tails.factor),
                    (weights, 1 - tails.share, tails.share),
                )
            )
            correlation = None if correlation is None else np.concatenate([correlation] * 2)
        return Prediction(
            component_mean=mean,
            component_epistemic_var=epistemic,
            component_noise_var=own_noise,
            affine_cost=marginals.ratio.mean(0),
            weights=weights,
            correlation=correlation,
            conformal_scores=self.conformal_scores_ if noise else None,
        )

    def _point_noise(self, marginals: Marginals, weights: Float[ndarray, "c m"]) -> Float[ndarray, "m q q"]:
        """Noise covariance of the mixture at each point."""
        root = np.sqrt(self._tails().widening * marginals.noise)
        between = np.stack([self._noise_cov(i) for i in range(len(self.members_))])
        covariance: ndarray = np.einsum("cm,cpq,cmp,cmq->mpq", weights, between, root, root)
        return covariance

    def _stretch(self, i: int, ratio: Float[ndarray, " m"]) -> Float[ndarray, " m"]:
        """How much wider than its posterior member i's function is at each point, before the factor b of its curve."""
        shape, widening = self._curve(i).shape(ratio), self._tails().widening
        stretch: ndarray = np.sqrt(widening * shape / np.maximum(ratio, TINY))
        return stretch

    def _deviations(self, i: int, Z: Tensor, n: int, rng: np.random.RandomState) -> Float[ndarray, "n m q"]:
        """Draws of member i's function around its mean, standardised units."""
        Phi = self._features(self.members_[i].network, Z)
        generator = torch.Generator(Phi.device).manual_seed(int(rng.randint(2**31 - 1)))
        at_alpha = replace(self.members_[i].layer.posterior, log_alpha=self._log_alphas[i])
        deviation = at_alpha.sample_weights(n, generator=generator) - at_alpha.precision.weights
        with torch.no_grad():
            draws: ndarray = (Phi.to(deviation.dtype) @ deviation).cpu().numpy()
        return draws

    def _noise_vars(self) -> Float[ndarray, "c 1 q"]:
        """Of each member, before calibration."""
        own = torch.stack([member.layer.posterior.Sigma_E.diagonal() for member in self.members_])
        return own.cpu().numpy()[:, None] * np.square(self._targets.scale.numpy())

    def _noise_cov(self, i: int, factor: Float[ndarray, " q"] | float = 1.0) -> Float[ndarray, "q q"]:
        """Of member i in target units, times a factor for each output."""
        scale = self._targets.scale.numpy() * np.sqrt(factor)
        cov: ndarray = self.members_[i].layer.posterior.Sigma_E.cpu().numpy() * np.outer(scale, scale)
        return cov


def check_features(phi_tilde: Any, Z: Tensor) -> Tensor:
    if not isinstance(phi_tilde, Tensor) or phi_tilde.dim() != 2 or len(phi_tilde) != len(Z):
        shape = tuple(phi_tilde.shape) if isinstance(phi_tilde, Tensor) else type(phi_tilde).__name__
        raise InputError(
            f"the backbone turned a batch of shape {tuple(Z.shape)} into {shape}: it must return features of shape "
            f"({len(Z)}, k), one row a sample; flatten or pool the other dimensions"
        )
    return phi_tilde


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0)) if x < math.inf else math.inf
