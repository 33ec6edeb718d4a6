"""A fitted model as NumPy arrays, and the predictions of its last layers: microseconds per row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from lastlayer import formula
from lastlayer.bayes.recursion import Whitened
from lastlayer.calibration.curve import Calibration
from lastlayer.data.scaling import FARTHEST, LARGEST_TARGET, Standardizer
from lastlayer.data.validation import LARGEST_INPUT
from lastlayer.errors import InputError
from lastlayer.formula import State
from lastlayer.formula.ops import FloatOps, NumPyOps, TorchOps
from lastlayer.networks.mlp import LARGEST_FEATURE
from lastlayer.online.layers import LayerStack
from lastlayer.predictor.fitted import Fitted
from lastlayer.predictor.state import as_array, curves_of

KEPT = (
    *("order", "curve", "head", "outside", "centre", "noise_cov"),
    *("log_noise_var", "log_precision", "sharpness", "widening"),
)
"""What the predictive formula takes beside the last layers."""


@dataclass(frozen=True)
class Features:
    """Features of the networks of a layer: in NumPy, or in torch where that gives other numbers."""

    network: State
    n_networks: int
    place: torch.Tensor | None
    """A tensor of the type and on the device of the inputs; None: in NumPy."""

    @classmethod
    def of(cls, layer: State, fitted: Fitted) -> "Features":
        """Features of MLPs in float64 of a table are computed in NumPy."""
        network, s = layer.network, fitted.settings
        double = network.one is None or network.one.dtype == s.place.torch_dtype == torch.float64
        if double and network.own is None and fitted.inputs is not None:
            return cls(network.map(as_array), len(layer.places), None)
        return cls(network, len(layer.places), torch.zeros(0, dtype=s.place.torch_dtype, device=s.place.torch_device))

    def features(self, z: Float[ndarray, "m *d"]) -> Float[ndarray, "c m k"]:
        """Compute the features of standardised inputs."""
        if self.place is None:
            phi: ndarray = formula.features(NumPyOps, self.network, z)
        else:
            with torch.no_grad():
                phi = formula.features(TorchOps, self.network, torch.tensor(z).to(self.place)).double().cpu().numpy()
        return np.array(np.broadcast_to(phi, (self.n_networks, *phi.shape[-2:])))


@dataclass(frozen=True)
class ModelArrays:
    """A fitted model without its last layers, as arrays."""

    networks: list[Features]
    input_mean: ndarray | float
    input_scale: ndarray | float
    target_mean: Float[ndarray, " q"]
    target_scale: Float[ndarray, " q"]
    formula: State
    """Arrays under the names that `lastlayer.formula` uses."""
    input_reach: ndarray | float
    """Distances from the mean up to which inputs need no further check."""
    target_reach: Float[ndarray, " q"]
    """Distances from the mean up to which targets need no further check."""
    numbers: State | None
    """`formula` as Python numbers; None if there are several members or outputs, or the noise depends on the input."""

    @classmethod
    def of(cls, fitted: Fitted, networks: list[Features]) -> "ModelArrays":
        """Convert a fitted model."""
        inputs, targets, one = fitted.inputs, fitted.targets, len(fitted.members) == fitted.n_outputs == 1
        state = State(**{name: getattr(fitted.state, name) for name in KEPT})
        of_one = State(**vars(state) | {"order": None, "noise_cov": None})
        return cls(
            networks,
            0.0 if inputs is None else inputs.mean.numpy(),
            1.0 if inputs is None else inputs.scale.numpy(),
            targets.mean.numpy(),
            targets.scale.numpy(),
            state.map(as_array),
            0.0 if inputs is None else _reach(inputs, FARTHEST[fitted.settings.place.dtype], LARGEST_INPUT),
            _reach(targets, FARTHEST["float64"], LARGEST_TARGET),
            of_one.map(float) if one and state.head is None else None,
        )

    def calibrated(self, fitted: Fitted, calibration: Calibration) -> "ModelArrays":
        """Replace the calibration curves of the members."""
        noise_cov = torch.from_numpy(self.formula.noise_cov)
        curve = curves_of([member.family for member in fitted.members], calibration, noise_cov)
        swapped = lambda model, convert: State(**vars(model) | {"curve": curve.map(convert)})
        numbers = None if self.numbers is None else swapped(self.numbers, float)
        return replace(self, formula=swapped(self.formula, as_array), numbers=numbers)

    def near(self, X: Float[ndarray, "m d"]) -> bool:
        """Whether all inputs are finite and close enough; if False, they need a full check."""
        return bool((np.abs(X - self.input_mean) <= self.input_reach).all())

    def near_targets(self, y: Float[ndarray, "m q"]) -> bool:
        """Whether all targets are finite and close enough; if False, they need a full check."""
        return bool((np.abs(y - self.target_mean) <= self.target_reach).all())

    def standardized_targets(self, y: Float[ndarray, "m q"]) -> Float[ndarray, "m q"]:
        """Standardise targets."""
        return (y - self.target_mean) / self.target_scale


class Look:
    """Rows before they are learned: features and predictions, each computed once on demand."""

    def __init__(self, arrays: ModelArrays, layers: Sequence[LayerStack], X: Float[ndarray, "m *d"]) -> None:
        self._arrays, self._layers = arrays, layers
        self.z: ndarray = (X - arrays.input_mean) / arrays.input_scale
        self.features = [network.features(self.z) for network in arrays.networks]
        if not all((np.abs(phi) <= LARGEST_FEATURE).all() for phi in self.features):
            raise InputError(
                f"the network mapped some of these rows to features that are NaN, infinite or beyond "
                f"{LARGEST_FEATURE:g}: drop these rows, or let it return finite numbers"
            )

    @cached_property
    def whitened(self) -> list[list[Whitened]]:
        """Whitened rows for each group of layers, at every alpha."""
        return [layers.whitened(phi) for layers, phi in zip(self._layers, self.features, strict=True)]

    @cached_property
    def _predicted(self) -> list[ndarray]:
        """Mean (c, m, q) in original units; cost (c, m, 1) at the alpha in use, and at alpha* where that differs."""
        each = [layers.predicted(rows) for layers, rows in zip(self._layers, self.whitened, strict=True)]
        mean, *costs = each[0] if len(each) == 1 else formula.joined(NumPyOps, self._arrays.formula, each)
        return [mean * self._arrays.target_scale + self._arrays.target_mean, *costs]

    @cached_property
    def _single(self) -> formula.Components | None:
        """Components of one row and one member as Python numbers; None if there are more."""
        numbers = self._arrays.numbers
        if numbers is None or len(self.z) > 1:
            return None
        parts: formula.Components = formula.components(FloatOps, numbers, [x.item() for x in self._predicted], None)
        return parts

    @cached_property
    def components(self) -> formula.Components:
        """Calibrated predictions of the members, as arrays with one row per point."""
        if self._single is not None:
            return formula.Components(*(np.full((1, 1, 1), x) for x in vars(self._single).values()))
        parts = formula.components(NumPyOps, self._arrays.formula, self._predicted, self.z)
        shape = parts.mean.shape[:2]
        return formula.Components(*(_rows(x, shape) for x in vars(parts).values()))

    @cached_property
    def moments(self) -> tuple[Float[ndarray, "m q"], Float[ndarray, "m q"]]:
        """Mean and variance of the targets."""
        if self._single is None:
            mean, epistemic, noise, _ = formula.moments(NumPyOps, self._arrays.formula, self.components)
            return mean, epistemic + noise
        mean, epistemic, noise, _ = formula.moments(FloatOps, self._arrays.numbers, self._single)
        return np.array([[mean]]), np.array([[epistemic + noise]])


def _reach(scaler: Standardizer, farthest: float, largest: float) -> ndarray:
    return np.minimum(scaler.scale.numpy(), largest / farthest) * farthest


def _rows(x: ndarray, shape: tuple[int, ...]) -> ndarray:
    return x if x.shape[:2] == shape else np.broadcast_to(x, (*shape, x.shape[-1]))
