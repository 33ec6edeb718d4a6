"""A fitted model as plain arrays: all that its predictive formula needs, for writing it down in another language.

With z the standardised inputs and phi_tilde(z) a member's linear features,

    m    = (phi_tilde - centre) W + offset                                  target units
    h    = (phi_tilde - centre) root + shift,      v = h h'                 the affine cost
    cov  = widening * D C D,                       D^2 = diag(noise_cov) (a + b v^gamma),   C = its correlation
    mean = anchor + (m - anchor) / (1 + precision D^2)                      v at alpha*

and a draw of the function is the mean plus h E, E normal with covariance noise_cov between its columns. Members count
alike, or each by a power of its calibrated precision at the point; their spread adds to the covariance.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from lastlayer.calibration import Curve, Member, NoiseHead, Tails
from lastlayer.calibration.curve import SHARPNESS
from lastlayer.errors import InputError
from lastlayer.features import MLP, WithInputs
from lastlayer.model import LastLayerModel
from lastlayer.precision import Precision


@dataclass(frozen=True)
class Dense:
    """a = activation(x weight + bias)."""

    weight: Float[ndarray, "d h"]
    bias: Float[ndarray, " h"]
    activation: type[nn.Module]


@dataclass(frozen=True)
class Spread:
    """Rows h = (phi_tilde - centre) root + shift with h h' = phi' Lambda_bar^-1 phi, the affine cost."""

    root: Float[ndarray, "k r"]
    shift: Float[ndarray, " r"]


@dataclass(frozen=True)
class MemberDescription:
    """One network and its last layer: standardised inputs, target units."""

    network: nn.Module
    """Its linear features, the inputs among them if they are passed on."""
    centre: Float[ndarray, " k"]
    weights: Float[ndarray, "k q"]
    offset: Float[ndarray, " q"]
    noise_cov: Float[ndarray, "q q"]
    """Before calibration."""
    curve: Curve
    spread: Spread
    """At the alpha in use: what the variance comes from."""
    spread_at_star: Spread
    """At alpha*: what the weights of calibrated members come from; the same object unless alpha was tuned."""

    @property
    def passes_inputs(self) -> bool:
        """Whether the inputs stand behind the features of the network."""
        return isinstance(self.network, WithInputs)

    @property
    def inner(self) -> nn.Module:
        """The network without its passed-on inputs."""
        return self.network.network if isinstance(self.network, WithInputs) else self.network

    @property
    def layers(self) -> tuple[Dense, ...] | None:
        """The built-in network layer by layer, empty if the inputs are the features; None for a user's backbone."""
        if isinstance(self.inner, nn.Identity):
            return ()
        if not isinstance(self.inner, MLP):
            return None
        modules = list(self.inner)
        return tuple(
            Dense(_array(linear.get_parameter("weight")).T, _array(linear.get_parameter("bias")), type(activation))
            for linear, activation in zip(modules[0::2], modules[1::2], strict=True)
        )

    def features(self, Z: Float[ndarray, "m d"]) -> Float[ndarray, "m k"]:
        """phi_tilde - centre of standardised inputs."""
        dtype = next((p.dtype for p in self.network.parameters()), torch.float64)
        with torch.no_grad():
            phi: ndarray = self.network(torch.from_numpy(Z).to(dtype)).double().numpy()
        return phi - self.centre


@dataclass(frozen=True)
class Description:
    """Everything that `predictive` uses."""

    input_mean: Float[ndarray, "*d"]
    """Of every column of a table; inputs of more dimensions are passed on as they are: a single zero, scale one."""
    input_scale: Float[ndarray, "*d"]
    members: tuple[MemberDescription, ...]
    tails: Tails
    anchor: Float[ndarray, " q"]
    """Where the means of members return to."""
    anchor_precision: Float[ndarray, " q"]
    """0: they do not."""
    noise_head: NoiseHead | None
    """What multiplies the noise at each standardised input."""
    sharpness: float
    """Members count by this power of their precision, its geometric mean over the outputs; 0: alike."""
    sample_cost: Float[ndarray, " n"]
    """Quantiles, evenly spaced from 0 to 1, of what training points would cost if they were new."""

    def uncalibrated(self) -> "Description":
        """The posteriors as they stand, all members alike."""
        plain = Curve.identity(self.n_outputs)
        members = tuple(replace(member, curve=plain) for member in self.members)
        free = np.zeros(self.n_outputs)
        return replace(self, members=members, tails=Tails(), anchor_precision=free, noise_head=None, sharpness=0.0)

    @property
    def anchored(self) -> bool:
        """Whether means return."""
        return bool(self.anchor_precision.any())

    @property
    def n_inputs(self) -> int:
        """Columns of the table."""
        if not self.input_mean.ndim:
            raise InputError(
                "the model takes inputs of more than two dimensions: only a model of tables can be written so"
            )
        return len(self.input_mean)

    @property
    def n_outputs(self) -> int:
        return len(self.members[0].offset)


def describe(model: LastLayerModel) -> Description:
    """The arrays of a fitted model; they are copies, and later updates of the model do not reach them."""
    check_is_fitted(model)
    calibration, inputs = model.calibration_, model._inputs
    return Description(
        input_mean=np.zeros(()) if inputs is None else inputs.mean.numpy().copy(),
        input_scale=np.ones(()) if inputs is None else inputs.scale.numpy().copy(),
        members=tuple(_member(model, i) for i in range(len(model.members_))),
        tails=model._tails(),
        anchor=model._targets.mean.numpy().copy(),
        anchor_precision=model._anchor().precision / np.square(model._targets.scale.numpy()),
        noise_head=None if calibration is None else calibration.head,
        sharpness=0.0 if calibration is None or len(model.members_) == 1 else SHARPNESS,
        sample_cost=_array(model._sample_cost),
    )


def _member(model: LastLayerModel, i: int) -> MemberDescription:
    member: Member = model.members_[i]
    posterior, log_alpha = member.layer.posterior, model._log_alphas[i]
    scale, mean = model._targets.scale.numpy(), model._targets.mean.numpy()
    W, equations = _array(posterior.precision.penalised_weights), posterior.equations
    at_star = _spread(posterior.precision)
    if posterior.bias_prior == "flat":
        centre, offset = _array(equations.feature_mean), _array(equations.target_mean)
    else:  # the bias is the last of the features: it becomes the offset
        centre, W, offset = np.zeros(len(W) - 1), W[:-1], W[-1]
    return MemberDescription(
        network=member.network,
        centre=centre,
        weights=W * scale,
        offset=offset * scale + mean,
        noise_cov=_array(posterior.Sigma_E) * np.outer(scale, scale),
        curve=model._curve(i),
        spread=at_star if log_alpha == posterior.log_alpha else _spread(equations.spectral_at(log_alpha)),
        spread_at_star=at_star,
    )


def _spread(precision: Precision) -> Spread:
    """The half of Lambda_bar^-1, with the variance of a free bias as one more column."""
    equations = precision.equations
    eye = torch.eye(equations.n_penalised, dtype=equations.gram.dtype, device=equations.gram.device)
    root = _array(precision.factor.half(eye))
    if equations.bias_prior == "shared":
        return Spread(root[:-1], root[-1])
    column, bias = np.zeros((len(root), 1)), np.sqrt(float(equations.bias_variance))
    return Spread(np.hstack([root, column]), np.append(np.zeros(len(root)), bias))


def _array(tensor: Tensor) -> ndarray:
    array: ndarray = tensor.detach().cpu().double().numpy().copy()
    return array
