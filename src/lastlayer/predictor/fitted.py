"""`Fitted`: a fitted model as a frozen value, with its predictions in original units."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Num
from numpy import ndarray
from sklearn.exceptions import NotFittedError
from torch import Tensor

from lastlayer import formula
from lastlayer._internal.arrays import converted
from lastlayer._internal.work import CHUNK_ROWS, threads_for
from lastlayer.calibration.curve import LOG_FRACTION, Calibration, Curve, Tails
from lastlayer.calibration.fit import SHARPNESS
from lastlayer.calibration.shape import ShapeHead
from lastlayer.data.observe import Functionals, StandardFunctionals
from lastlayer.data.rows import Points, Rows
from lastlayer.data.scaling import FARTHEST, Scales, Standardizer
from lastlayer.errors import InputError
from lastlayer.formula import Components, Functions, State
from lastlayer.formula.ops import NumPyOps, TorchOps
from lastlayer.likelihoods.base import Gaussian, Likelihood
from lastlayer.networks.mlp import grouped, numbers_of
from lastlayer.predictions.joint import FunctionalPrediction, JointPrediction
from lastlayer.predictions.mixture import MixturePrediction
from lastlayer.predictions.prediction import Prediction
from lastlayer.predictor.member import Member
from lastlayer.predictor.module import Predictor
from lastlayer.settings.types import DTYPES, FOURIER, Family, Given, Settings

CACHED = 2**16
"""Numbers of an intermediate array per thread: larger ones leave the cache, and are allocated anew at every step."""
_double = partial(torch.as_tensor, dtype=torch.float64)
"""Numbers as a tensor, scalars included, since ONNX would keep Python's numbers in float32."""


@dataclass(frozen=True)
class Extrapolation:
    """How far points lie outside the training data, as measured in feature space."""

    affine_cost: Float[ndarray, " m"]
    """Affine cost at alpha*, the variance of the function over that of the noise (Theorem 2); mean over the members."""
    quantile: Float[ndarray, " m"]
    """Share of training points that would cost less if new; 1: outside, be it only for process or additive model."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted model: scalers, members, calibration, alphas in use, costs of the training rows and settings.

    Networks are copies in evaluation mode, without gradients. Revisions make a new value (`predictor.revisions`), so
    the predictions of models, modules and controllers that hold this one do not change.
    """

    inputs: Standardizer | None
    """Scaler of the inputs; None for integer ids and inputs of more than two dimensions, which are not scaled."""
    targets: Standardizer
    """Scaler of the targets."""
    members: tuple[Member, ...]
    """Members of the mixture; those of the best family come first."""
    sample_cost: Float[Tensor, " n"]
    """Quantiles, evenly spaced from 0 to 1, of the affine costs that training points would have if they were new."""
    settings: Settings
    """Resolved settings of the fit."""
    n_features_in: int
    """Number of inputs."""
    likelihood: Likelihood = Gaussian()  # noqa: RUF009
    """Distribution of the targets given the function."""
    y_ndim: int = 2
    """Number of dimensions of the targets, and so of predictions."""
    feature_names: tuple[str, ...] | None = None
    """Names of the inputs, if the training table had any."""
    calibration: Calibration | None = None
    """Calibration of the variance; None if uncalibrated."""
    family_scores: dict[Family, float] = field(default_factory=dict)
    """Held-out LPD of each family that was tried."""
    conformal_scores: Float[ndarray, "r q"] | None = None
    """Scores that set the width of conformal intervals; None if there are none."""
    process: Member | None = None
    """The Gaussian process that gives the variance outside the data, where it is needed but is not a member."""

    @cached_property
    def state(self) -> State:
        """The model as tensors for the predictive formula."""
        members, targets, scale, found = self.members, self.targets, self.targets.scale, self.calibration
        posteriors = [member.posterior for member in members]
        tuned = any(member.tuned is not None for member in members)
        widest = max(p.statistics.mean.shape[-1] for p in posteriors)
        # threads as in calibration, so that a loaded model predicts bitwise the same; outlives torch.inference_mode
        with threads_for(widest**3 // 20), torch.inference_mode(False):
            groups = grouped([member.network for member in members])
            places = [i for group in groups for i in group]
            noise_cov = torch.stack([p.Sigma_E.cpu() for p in posteriors]) * scale[:, None] * scale
            curve = curves_of([member.family for member in members], found, noise_cov)
            root = (0.5 * curve.log_slope).exp()
            outside, precision = None, 0.0 if found is None else found.shrinkage.precision
            if found is not None and found.outside is not None:
                place = next((i for i, member in enumerate(members) if member.family == FOURIER), None)
                process = self.process if place is None else members[place]
                assert process is not None  # a model file, or `alone`, has seen to it
                beside = _layer([replace(process, tuned=None)], [0], targets, tuned=False) if place is None else None
                outside = State(
                    inside=_double(found.outside.inside),
                    log_noise=(process.posterior.Sigma_E.cpu().diagonal() * scale.square()).log().mean(),
                    place=place or 0,
                    process=beside,
                )
            state = State(
                input_mean=None if self.inputs is None else self.inputs.mean,
                input_scale=None if self.inputs is None else self.inputs.scale,
                layers=[_layer([members[i] for i in group], group, targets, tuned=tuned) for group in groups],
                order=None if places == sorted(places) else torch.tensor(np.argsort(places)),
                curve=curve,
                head=None if found is None or found.head is None else State(**vars(found.head)),
                outside=outside,
                centre=targets.mean,
                noise_cov=noise_cov,
                roots=torch.linalg.cholesky(noise_cov * root * root.mT),
                log_noise_var=noise_cov.diagonal(dim1=-2, dim2=-1).log()[:, None],
                log_precision=math.log(precision) - 2 * scale.log() if precision else None,
                sharpness=_double(SHARPNESS if found is not None and len(members) > 1 else 0.0),
                widening=_double(1.0 if found is None else found.tails.widening),
                shape=None if found is None or found.shape is None else self._shape(found.shape),
            )
            device = posteriors[0].Sigma_E.device
            return state if device.type == "cpu" else state.map(lambda value: value.to(device))

    def _shape(self, head: ShapeHead) -> State:
        """The shape head, and the members that tell from which cost on the mixture itself comes back."""
        families = [member.family for member in self.members]
        judge = FOURIER if FOURIER in families else families[0]
        judges = [i for i, family in enumerate(families) if family == judge]
        edges = [State(places=own, inside=_double(at)) for own, at in [(judges, head.reach), *self.references]]
        return State(**vars(head.state()), scale=self.targets.scale, edges=edges)

    def module(self) -> Predictor:
        """Return the model as a `torch.nn.Module`."""
        return Predictor(self.needs("module()", linear=True).state)

    def alone(self, i: int) -> "Fitted":
        """Return a single member with the calibration it has in the mixture.

        Parameters
        ----------
        i : int
            Index of the member.
        """
        own, process = self.members[i], None
        if self.calibration is not None and self.calibration.outside is not None and own.family != FOURIER:
            process = next((member for member in self.members if member.family == FOURIER), self.process)
        found = self.calibration and replace(self.calibration, shape=None)
        return replace(self, members=(own,), process=process, calibration=found)

    @property
    def n_outputs(self) -> int:
        return len(self.targets.mean)

    @property
    def by_output(self) -> bool:
        """Whether outputs were observed at different rows, so that each has its own variance."""
        return self.members[0].posterior.statistics.by_output

    def needs(
        self, use: str, *, linear: bool = False, bell: bool = False, shared: bool = False, table: bool = False
    ) -> "Fitted":
        """Check what a use needs: Gaussian predictions of targets, no shape of the noise, all outputs at the same rows,
        a table of inputs."""
        if linear:
            self.likelihood.check_linear(use)
        if bell and self.calibration is not None and self.calibration.shape is not None:
            raise InputError(
                f"{use} needs Gaussian noise, and calibration found another shape of it, which predictive() gives at "
                'each point: fit a model with likelihood="gaussian"'
            )
        if shared and self.by_output:
            raise InputError(
                f"{use} needs a model fitted to targets that are all known, without noise_std and observations: fit one"
            )
        if table and self.inputs is None:
            raise InputError(f"{use} needs a table: this model has inputs of more than two dimensions, or integers")
        return self

    @property
    def tails(self) -> Tails:
        return Tails() if self.calibration is None else self.calibration.tails

    @property
    def best(self) -> tuple[Member, ...]:
        """Members of the first family, the best one on its own."""
        first = self.members[0].family
        return tuple(member for member in self.members if member.family == first)

    @property
    def log_alphas(self) -> tuple[float, ...]:
        return tuple(member.log_alpha for member in self.members)

    @property
    def noise_cov(self) -> Float[ndarray, "c q q"]:
        """Noise covariance of each member before calibration."""
        return as_array(self.state.noise_cov)

    @property
    def noise_std(self) -> Float[ndarray, "c q"]:
        return np.sqrt(np.diagonal(self.noise_cov, axis1=1, axis2=2))

    @property
    def correlation(self) -> Float[ndarray, "c q q"] | None:
        """Noise correlation between the outputs; None: independent."""
        if self.settings.layer.noise != "full":
            return None
        return self.noise_cov / self.noise_std[:, :, None] / self.noise_std[:, None, :]

    def curve(self, i: int) -> Curve:
        """Return the curve from affine cost to variance of a member.

        Parameters
        ----------
        i : int
            Index of the member.
        """
        if self.calibration is None:
            return Curve.identity(self.n_outputs)
        return self.calibration.curves[self.members[i].family]

    def standardized(self, X: ndarray) -> Tensor:
        """Scale inputs and convert them to the networks' dtype and device.

        Parameters
        ----------
        X : ndarray of shape (m, d)
            Inputs in original units.
        """
        Z = torch.from_numpy(np.array(X, order="C"))
        Z = Z if self.inputs is None else self.inputs.forward(Z)
        return converted(Z, DTYPES[self.settings.place.dtype], self.settings.place.device)

    def check_reach(self, X: ndarray, y: Float[ndarray, "m q"] | None = None) -> None:
        """Check that rows are close enough to the training data for finite predictions."""
        if self.inputs is not None:
            self.inputs.check_reach(X, "X", FARTHEST[self.settings.place.dtype])
        if y is not None:
            self.targets.check_reach(y, "y")

    def data(self, X: ndarray, y: ndarray, sample_weight: ndarray | None = None) -> Points:
        """Convert rows to training data."""
        given = Given(X, np.asarray(y, dtype=float).reshape(len(y), -1), sample_weight)
        rows = Rows.of(given, self.likelihood, Scales(self.inputs, self.targets)).main
        return rows.to(self.settings.place.device, DTYPES[self.settings.place.dtype])

    def features(self, i: int, Z: Tensor) -> Float[Tensor, "m p"]:
        """Compute the affine features of a member.

        Parameters
        ----------
        i, Z : int, Tensor
            Index of the member, and standardised inputs.
        """
        return self.members[i].features(Z)

    def point(self, X: ndarray) -> Float[ndarray, "m q"]:
        """Predict one number for each target: `Prediction.point`."""
        if not self.likelihood.linear:
            return self.predictive(X).with_output_axis().point
        return self._evaluated(X, lambda *of: [formula.predict_mean(*of)])[0]

    def point_and_std(self, X: ndarray) -> tuple[Float[ndarray, "m q"], Float[ndarray, "m q"]]:
        """Predict `point` and the standard deviation of the targets, noise included."""
        if not self.likelihood.linear:
            p = self.predictive(X).with_output_axis()
            return p.point, p.std
        moments = lambda ops, model, x: formula.moments(ops, model, formula.predict(ops, model, x))
        mean, epistemic, noise, _ = self._evaluated(X, moments)
        return mean, np.sqrt(epistemic + noise)

    def predictive(self, X: ndarray, *, noise: bool = True) -> Prediction:
        """Predict the distribution of the targets, or of the function.

        Parameters
        ----------
        X, noise : ndarray of shape (m, d), bool, default True
            Inputs in original units, and whether to include the noise; False gives the distribution of the function.
        """
        return self.likelihood.predict(self.working(X, noise=noise))

    def working(self, X: ndarray, *, noise: bool = True) -> MixturePrediction:
        """Predict the working targets, which `likelihood` makes of the targets."""
        return self.prediction(Components(*self._evaluated(X, formula.predict)), noise=noise)

    def prediction(self, parts: Components, *, noise: bool = True) -> MixturePrediction:
        """Assemble the mixture of calibrated members and its tails, merged outside the data."""
        found, families = self.calibration, [member.family for member in self.members]
        beyond = None
        if found is not None:  # judged by the Gaussian process, or else by the first family
            judge = FOURIER if FOURIER in families else families[0]
            star = parts.cost_star[[family == judge for family in families]]
            beyond = star.mean(-1).mean(0) > found.curves[judge].reach
        correlation, references = self.correlation, self.references
        outside = formula.outside_fraction(np, references, parts.cost_star)[:, 0] if references else None
        prediction = MixturePrediction(
            component_mean=parts.mean,
            component_epistemic_var=parts.epistemic,
            component_noise_var=parts.noise * float(noise),
            affine_cost=parts.cost.mean(-1).mean(0),
            weights=parts.weights[..., 0],
            correlation=correlation,
            conformal_scores=self.conformal_scores if noise else None,
            beyond_reach=beyond,
            y_ndim=self.y_ndim,
        )
        if found is not None and (share := found.tails.share):
            widths = [1.0, found.tails.factor]
            prediction = prediction.split([1 - share, share], widths, widths)
        prediction = prediction if outside is None else prediction.merged(outside)
        return prediction if parts.shape is None else prediction.shaped(*np.split(parts.shape, 3, -1), noise=noise)

    @cached_property
    def references(self) -> list[tuple[list[int], float]]:
        """Members that can tell points outside the data, and their largest cost inside."""
        inside = {} if self.calibration is None else self.calibration.inside
        places = {family: [i for i, member in enumerate(self.members) if member.family == family] for family in inside}
        return [(own, inside[family]) for family, own in places.items() if own]

    def joint(self, X: ndarray, *, noise: bool = True) -> JointPrediction:
        """Predict the Gaussian over all points and outputs jointly; O(m^2) numbers per member.

        Parameters
        ----------
        X, noise : ndarray of shape (m, d), bool, default True
            Inputs in original units, and whether to include the noise; False gives the distribution of the function.
        """
        return self.needs("joint", linear=True, bell=True)._joint(X, noise)

    def _joint(self, X: ndarray, noise: bool) -> JointPrediction:
        """The joint Gaussian of what the members model."""
        functions, c, q = self.functions(X), len(self.members), self.n_outputs
        parts = functions.parts
        mean = self.prediction(parts).with_output_axis().mean  # summed in the same order, to the last bit
        correlation = np.broadcast_to(np.eye(q), (c, q, q)) if self.correlation is None else self.correlation
        each = formula.output_cov(NumPyOps, correlation[:, None], 0.0 * parts.noise, parts.noise)
        noise_cov: ndarray = self.tails.widening * NumPyOps.total(parts.weights[..., None] * each) * float(noise)
        return JointPrediction(replace(functions, mean=mean), noise_cov, self.y_ndim)

    def sample(self, X: ndarray, n: int, rng: np.random.RandomState, *, noise: bool = True) -> Float[ndarray, "n m q"]:
        """Draw whole functions of the targets; a draw takes one set of weights per member and costs O(p) per point.

        Parameters
        ----------
        X, n, rng : ndarray of shape (m, d), int, RandomState
            Inputs in original units, number of draws, and random number generator.
        noise : bool, default True
            Whether to include the noise; False gives the distribution of the function.
        """
        joint = self.needs("a draw of functions", bell=True)._joint(X, noise)
        return self.likelihood.draw(
            joint.functions.sample(n, rng.standard_normal), joint.noise_cov if noise else None, rng
        )

    def predictive_of(self, functionals: Sequence[Functionals]) -> FunctionalPrediction:
        """Predict linear functionals of the function."""
        means, rows = [], []
        inputs = self.needs("a linear functional", linear=True, bell=True, table=True).inputs
        assert inputs is not None
        with torch.no_grad():
            for some in functionals:
                if not 0 <= some.output < self.n_outputs:
                    raise InputError(f"output={some.output} is not one of the {self.n_outputs}: counted from 0")
                linear = lambda z, j=some.output: formula.functions(TorchOps, self.state, z).linear(j)
                affine = StandardFunctionals.of(some, inputs).apply(linear, self.state.centre)
                means.append(as_array(affine[:, 0]))
                rows.append(as_array(affine[:, 1:]))
        return FunctionalPrediction(np.concatenate(means), np.concatenate(rows))

    def extrapolation(self, X: ndarray) -> Extrapolation:
        """Compute the affine cost of points at alpha*, and its rank among the training points.

        Parameters
        ----------
        X : ndarray of shape (m, d)
            Inputs in original units.
        """
        (cost,) = self._evaluated(X, lambda *of: [formula.predict(*of).cost_star])
        sample_cost = as_array(self.sample_cost.sort().values)
        return Extrapolation(cost.mean(-1).mean(0), formula.extrapolation(np, self.references, sample_cost, cost))

    def functions(self, X: ndarray) -> Functions:
        """Compute the function at some points, jointly over points and outputs, as arrays."""
        with torch.no_grad():
            found = formula.functions(TorchOps, self.state, formula.standardized(self.state, self._inputs(X)))
        check_answer(as_array(found.mean))
        return replace(found.map(as_array, outputs=as_array), ops=NumPyOps, parts=as_arrays(found.parts))

    def _evaluated(self, X: ndarray, evaluate: Callable[..., Iterable[Tensor]]) -> list[ndarray]:
        """Arrays of a function of (operations, state, inputs), with one row per row of X, computed in chunks."""
        size, parts = min(CHUNK_ROWS, rows_in_cache(len(self.members) * len(self.targets.mean))), []
        for first in range(0, len(X), size):
            x = self._inputs(X[first : first + size])
            with torch.no_grad():
                found = evaluate(BlockOps, self.state, x)
            given = [each for each in found if each is not None]
            parts.append([each.expand(*each.shape[:-2], len(x), -1).numpy(force=True) for each in given])
        arrays = parts[0] if len(parts) == 1 else [np.concatenate(each, axis=-2) for each in zip(*parts, strict=True)]
        check_answer(*arrays)
        return arrays

    def _inputs(self, X: ndarray) -> Tensor:
        """Inputs in float64, or the integers that they are, on the model's device; a copy without negative strides."""
        x = torch.from_numpy(np.array(X, order="C")).to(self.state.centre.device)
        return x.double() if x.is_floating_point() else x


def as_fitted(model: Any, use: str, *, bell: bool = False, shared: bool = False, table: bool = False) -> Fitted:
    """Return the fitted value of a model, for a use that needs Gaussian predictions, and more as in `Fitted.needs`."""
    found = model if isinstance(model, Fitted) else getattr(model, "fitted_", None)
    if not isinstance(found, Fitted):
        raise NotFittedError(f"this {type(model).__name__} holds no fitted Bayesian last layer: call fit first")
    return found.needs(use, linear=True, bell=bell, shared=shared, table=table)


class BlockOps(TorchOps):
    """Operations on tensors, with networks and last layers evaluated in blocks of rows that stay in the cache."""

    @staticmethod
    def by_rows(function: Callable[[Tensor], list[Tensor]], z: Num[Tensor, "m *d"], layer: State) -> list[Tensor]:
        """Evaluate a function of the rows, whose widest array has `layer.width` numbers per row."""
        size = rows_in_cache(layer.width) if z.device.type == "cpu" else CHUNK_ROWS // len(layer.places) + 1
        parts = [function(rows) for rows in z.split(size)]
        return parts[0] if len(parts) == 1 else [torch.cat(each, 1) for each in zip(*parts, strict=True)]


def rows_in_cache(width: int) -> int:
    return CACHED * torch.get_num_threads() // width + 1


def _layer(members: Sequence[Member], places: list[int], targets: Standardizer, *, tuned: bool) -> State:
    """Members whose features have the same shape: networks and last layers, targets in original units."""
    posteriors = [member.posterior for member in members]
    star = [p.affine() for p in posteriors]
    used = [
        own if member.tuned is None else member.posterior.affine(member.tuned)
        for own, member in zip(star, members, strict=True)
    ]
    centre, weights, offset, root, shift = map(torch.stack, zip(*used, strict=True))
    *_, root_star, shift_star = map(torch.stack, zip(*star, strict=True))
    scale, mean = targets.scale.to(weights), targets.mean.to(weights)
    widths = [w.shape[-1] for w in (root, *members[0].network.parameters()) if w.dim()]
    return State(
        network=numbers_of([member.network for member in members]),
        centre=centre[:, None],
        weights=weights * scale,
        offset=offset[:, None] * scale + mean,
        root=root,
        shift=shift[:, None],
        root_star=root_star if tuned else None,
        shift_star=shift_star[:, None] if tuned else None,
        n_costs=len(mean) if posteriors[0].statistics.by_output else 1,
        places=list(places),
        width=len(members) * max(widths),
    )


def curves_of(families: Sequence[Family], calibration: Calibration | None, noise_cov: Float[Tensor, "c q q"]) -> State:
    """The curve of each of c members: arrays of shape (c, 1, q), or (c, 1, 1). A family's members share its trust."""
    if calibration is None:
        curves = [Curve(*np.ones((2, noise_cov.shape[-1])))] * len(families)
    else:
        curves = [calibration.curves[family] for family in families]
    column = lambda numbers: _double(np.array(numbers)[:, None, None])
    log_noise, log_slope = (np.log([c.widening * getattr(c, name) for c in curves]) for name in ("noise", "slope"))
    log_share = None
    if calibration is not None and calibration.outside is not None:
        factor = math.log(calibration.outside.factor) + np.array([LOG_FRACTION.get(family, 0.0) for family in families])
        variance = noise_cov.diagonal(dim1=-2, dim2=-1).log().numpy() + log_slope
        log_share = column(factor - variance.mean(-1))
    return State(
        log_noise=_double(log_noise[:, None]),
        log_slope=_double(log_slope[:, None]),
        power=column([curve.power for curve in curves]),
        log_trust=column(np.log([c.trust / families.count(f) for c, f in zip(curves, families, strict=True)])),
        log_reach=column([curve.reach for curve in curves]).log(),
        log_share=log_share,
    )


def as_array(values: Tensor) -> ndarray:
    """Convert a tensor to float64, or keep it if it holds integers."""
    array: ndarray = values.detach().cpu().numpy()
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def as_arrays(parts: Components) -> Components:
    """Convert components from tensors to arrays with one row per point."""
    return Components(*(as_array(x.expand(-1, parts.mean.shape[1], -1)) for x in parts if x is not None))


def check_answer(*values: ndarray) -> None:
    """Raise an error for predictions that are not finite, which only a user's network can cause."""
    if not all(np.isfinite(each).all() for each in values):
        raise InputError(
            "the model has no finite prediction for these rows: its network maps some of them to features that are "
            "NaN, infinite or huge; drop these rows, or let the network return finite numbers"
        )
