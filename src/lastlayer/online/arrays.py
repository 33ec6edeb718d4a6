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
from lastlayer.predictor.fitted import Fitted, as_array, curves_of
from lastlayer.settings.types import DTYPES


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
        network, place = layer.network, fitted.settings.place
        double = network.one is None or network.one.dtype == DTYPES[place.dtype] == torch.float64
        if double and network.own is None and fitted.inputs is not None:
            return cls(network.map(as_array), len(layer.places), None)
        return cls(network, len(layer.places), torch.zeros(0, dtype=DTYPES[place.dtype], device=place.device))

    def features(self, z: Float[ndarray, "m *d"]) -> Float[ndarray, "c m k"]:
        if self.place is None:
            phi: ndarray = formula.features(NumPyOps, self.network, z)
        else:
            with torch.no_grad():
                phi = formula.features(TorchOps, self.network, torch.tensor(z).to(self.place)).double().cpu().numpy()
        return np.array(np.broadcast_to(phi, (self.n_networks, *phi.shape[-2:])))


@dataclass(frozen=True)
class Scaler:
    """Standardisation in NumPy, and the distances from the mean up to which values need no further check."""

    mean: ndarray | float = 0.0
    scale: ndarray | float = 1.0
    reach: ndarray | float = 0.0

    @classmethod
    def of(cls, scaler: Standardizer, dtype: str, largest: float) -> "Scaler":
        """Convert a standardizer of finite values of at most this size."""
        mean, scale = scaler.mean.numpy(), scaler.scale.numpy()
        return cls(mean, scale, np.minimum(scale, largest / FARTHEST[dtype]) * FARTHEST[dtype])

    def forward(self, values: Float[ndarray, "m *n"]) -> Float[ndarray, "m *n"]:
        return (values - self.mean) / self.scale

    def near(self, values: Float[ndarray, "m n"]) -> bool:
        """Whether all values are finite and close enough; if False, they need a full check."""
        return bool((np.abs(values - self.mean) <= self.reach).all())


@dataclass(frozen=True)
class ModelArrays:
    """A fitted model without its last layers, as arrays."""

    networks: list[Features]
    inputs: Scaler
    targets: Scaler
    formula: State
    """What the predictive formula takes beside the last layers."""
    numbers: State | None
    """`formula` as Python numbers; None for several members or outputs, or noise that depends on the input."""

    @classmethod
    def of(cls, fitted: Fitted, networks: list[Features]) -> "ModelArrays":
        state = State(**vars(fitted.state) | {"layers": [], "roots": None, "input_mean": None, "input_scale": None})
        of_one = State(**vars(state) | {"order": None, "noise_cov": None})
        one = len(fitted.members) == fitted.n_outputs == 1 and state.head is state.shape is None
        return cls(
            networks,
            Scaler() if fitted.inputs is None else Scaler.of(fitted.inputs, fitted.settings.place.dtype, LARGEST_INPUT),
            Scaler.of(fitted.targets, "float64", LARGEST_TARGET),
            state.map(as_array),
            of_one.map(float) if one else None,
        )

    def calibrated(self, fitted: Fitted, calibration: Calibration) -> "ModelArrays":
        noise_cov = torch.from_numpy(self.formula.noise_cov)
        curve = curves_of([member.family for member in fitted.members], calibration, noise_cov)
        swapped = lambda model, convert: State(**vars(model) | {"curve": curve.map(convert)})
        numbers = None if self.numbers is None else swapped(self.numbers, float)
        return replace(self, formula=swapped(self.formula, as_array), numbers=numbers)


class Look:
    """Rows before they are learned: features and predictions, each computed once on demand."""

    def __init__(self, arrays: ModelArrays, layers: Sequence[LayerStack], X: Float[ndarray, "m *d"]) -> None:
        self._arrays, self._layers = arrays, layers
        self.z: ndarray = arrays.inputs.forward(X)
        self.features = [network.features(self.z) for network in arrays.networks]
        if not all((np.abs(phi) <= LARGEST_FEATURE).all() for phi in self.features):
            raise InputError(
                f"the network mapped some of these rows to features that are NaN, infinite or beyond "
                f"{LARGEST_FEATURE:g}: drop these rows, or let it return finite numbers"
            )

    @cached_property
    def whitened(self) -> list[list[Whitened]]:
        """Whitened rows for each group of layers, at every alpha."""
        pairs = zip(self._layers, self.features, strict=True)
        return [[recursion.whitened(phi) for recursion in layers.recursions] for layers, phi in pairs]

    @cached_property
    def _predicted(self) -> list[ndarray]:
        """Mean (c, m, q) in original units; cost (c, m, 1) at the alpha in use, and at alpha* where that differs."""
        each = [layers.predicted(rows) for layers, rows in zip(self._layers, self.whitened, strict=True)]
        mean, *costs = each[0] if len(each) == 1 else formula.joined(NumPyOps, self._arrays.formula, each)
        return [mean * self._arrays.targets.scale + self._arrays.targets.mean, *costs]

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
            return formula.Components(*(np.full((1, 1, 1), x) for x in self._single[:-1]))
        parts = formula.components(NumPyOps, self._arrays.formula, self._predicted, self.z)
        shape = parts.mean.shape[:2]
        whole = lambda x: x if x.shape[:2] == shape else np.broadcast_to(x, (*shape, x.shape[-1]))
        return formula.Components(*[*map(whole, parts[:-1]), parts.shape])

    @cached_property
    def moments(self) -> tuple[Float[ndarray, "m q"], Float[ndarray, "m q"]]:
        if self._single is None:
            mean, epistemic, noise, _ = formula.moments(NumPyOps, self._arrays.formula, self.components)
            return mean, epistemic + noise
        mean, epistemic, noise, _ = formula.moments(FloatOps, self._arrays.numbers, self._single)
        return np.array([[mean]]), np.array([[epistemic + noise]])
