"""A Bayesian last layer on batches of any structure, with any number of rows per sample."""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor, nn

from lastlayer.bayes.readings import Readings
from lastlayer.data.rows import Points
from lastlayer.data.sources import Samples
from lastlayer.errors import InputError
from lastlayer.estimators.regressor import BLLRegressor
from lastlayer.networks.feature_extractor import FeatureExtractor
from lastlayer.networks.mlp import copied
from lastlayer.networks.structured import Inputs, as_inputs, call, moved, output_tensor
from lastlayer.predictor.module import Predictor

IGNORED = -100
"""Integer target of a position without a target, as in `torch.nn.functional.cross_entropy`."""
MASK = "attention_mask"
"""Name of the input that is 0 at padded positions."""


class AttachedRegressor(BLLRegressor):
    """A model made by `lastlayer.attach` for structured inputs, or for several rows per sample.

    X is whatever the network is called with: a tensor, a tuple of tensors, or a dictionary. Each position that the last
    layer is applied to, such as a token, a node or a pixel, is a row: `predict` returns arrays shaped like the targets;
    `predictive`, `joint`, `sample_y` and `extrapolation` return one row per position, in the order of the flattened
    positions. Targets may be NaN at positions without a target. `fitted_` is a model of the features, a table: for
    ONNX, CasADi, `OnlineModel` and functionals, use `model.features(X)`.

    Examples
    --------
    The loader yields batches such as `{"input_ids": ..., "attention_mask": ..., "labels": ...}`.

    >>> model = lastlayer.attach(network, loader)  # doctest: +SKIP
    >>> mean, std = model.predict({"input_ids": ids, "attention_mask": mask}, return_std=True)  # doctest: +SKIP
    """

    def fit(self, *_: Any, **__: Any) -> "AttachedRegressor":
        """Raise an error: the network was trained elsewhere."""
        raise InputError("an attached model is not trained: call lastlayer.attach(network, loader) again")

    def features(self, X: Any) -> Float[ndarray, "n k"]:
        """Compute the features of a batch, one row per position.

        Parameters
        ----------
        X : Tensor, tuple of Tensor or dict of str to Tensor
            Inputs of the network.
        """
        return _rows(self._features(as_inputs(X)))

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        """Predict the mean of the targets, and optionally their standard deviation.

        Parameters
        ----------
        X : Tensor, tuple of Tensor or dict of str to Tensor
            Inputs of the network.
        return_std : bool, default False
            Whether to return the standard deviation, noise included, as well.
        return_cov : bool, default False
            Not supported; use `joint`.
        """
        if return_cov:
            raise InputError("return_cov needs one row per sample: use joint(X), whose rows are the positions")
        phi_tilde, fitted = self._features(as_inputs(X)), self._fitted()
        mean, var = fitted.mean_and_var(_rows(phi_tilde))
        mean, std = (self._at_positions(x, phi_tilde.shape[:-1]) for x in (mean, np.sqrt(var)))
        return (mean, std) if return_std else mean

    def module(self) -> "AttachedPredictor":  # type: ignore[override]
        """Return network and predictive formula as a `torch.nn.Module`, called as the network is."""
        return AttachedPredictor(copied(self._network), self._fitted().module())

    def _packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, header = super()._packed()
        weights = self._network.state_dict()  # some of them may be shared, which safetensors refuses
        return tensors | {f"backbone.{name}": value.clone() for name, value in weights.items()}, header

    @classmethod
    def _restore(cls, tensors: dict[str, Tensor], header: dict[str, Any], backbone: nn.Module | None) -> BLLRegressor:
        if backbone is None:
            raise ValueError("it needs the network: load(path, backbone=FeatureExtractor(network, layer))")
        model = super()._restore(tensors, header, nn.Identity())
        model.backbone = copied(backbone)
        own = {name.removeprefix("backbone."): x for name, x in tensors.items() if name.startswith("backbone.")}
        model.backbone.load_state_dict(own)
        return model

    @property
    def _network(self) -> nn.Module:
        assert isinstance(self.backbone, nn.Module)
        return self.backbone

    def _features(self, inputs: Inputs) -> Float[Tensor, "*s k"]:
        place = next(self._network.parameters(), torch.zeros(()))
        with torch.no_grad():
            return features_at(self._network, moved(inputs, place))

    def _at_positions(self, values: Float[ndarray, "n q"], where: tuple[int, ...]) -> ndarray:
        """Reshape values of all rows to the shape of the targets."""
        if self._fitted().y_ndim == 1:
            return values.reshape(where)
        return np.moveaxis(values.reshape(*where, -1), -1, outputs_axis(self._network))

    def _checked(self, X: Any) -> ndarray:
        return self.features(X)

    def _checked_rows(self, X: Any, y: Any, *, partly: bool = False) -> tuple[ndarray, ndarray]:
        rows = self._labelled(X, y, None)
        return _rows(rows.X), _rows(rows.T)

    def _rows(self, X: Any, y: Any, sample_weight: Any = None) -> Points:
        rows = self._labelled(X, y, sample_weight)
        weight = None if rows.weight is None else rows.weight.double().numpy(force=True)
        return self._fitted().data(_rows(rows.X), _rows(rows.T), weight)

    def _labelled(self, X: Any, y: Any, sample_weight: Any) -> Points:
        inputs, weight = as_inputs(X), None if sample_weight is None else torch.as_tensor(sample_weight)
        samples = Samples(inputs, torch.as_tensor(y), weight)
        rows = labelled_rows(self._features(inputs), samples, axis=outputs_axis(self._network))
        q = self._fitted().n_outputs
        if rows.T.shape[1] != q:
            raise InputError(f"y has {rows.T.shape[1]} outputs, but the model was fitted to {q}")
        return rows


class AttachedPredictor(nn.Module):
    """The network and the predictive formula of its last layer, as one module."""

    def __init__(self, network: nn.Module, predictor: Predictor) -> None:
        super().__init__()
        self.network, self.predictor = network, predictor

    def train(self, mode: bool = True) -> "AttachedPredictor":
        """Keep the module in evaluation mode."""
        return super().train(False)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
        """Predict the moments of the targets at every position."""
        phi_tilde = output_tensor(self.network(*args, **kwargs))
        where = phi_tilde.shape[:-1]
        said = self.predictor(phi_tilde.flatten(0, -2))
        return {name: values.unflatten(0, where) for name, values in said.items()}


def outputs_axis(network: nn.Module) -> int:
    """Return the axis of the targets that indexes the outputs."""
    return 1 if isinstance(network, FeatureExtractor) and network.channels_first else -1


def features_at(network: nn.Module, inputs: Inputs) -> Float[Tensor, "*s k"]:
    """Compute the linear features of every position of a batch."""
    phi_tilde = output_tensor(call(network, inputs))
    if phi_tilde.dim() < 2:
        raise InputError(
            f"the network gave features of shape {tuple(phi_tilde.shape)}: give one row of them per sample, or per "
            "position, (samples, features) or (samples, positions, features)"
        )
    return phi_tilde


def labelled_rows(phi_tilde: Float[Tensor, "*s k"], samples: Samples, *, axis: int = -1) -> Points:
    """Collect one row per position that has a target."""
    T, weight, where = samples.y, samples.weight, phi_tilde.shape[:-1]
    T = T.movedim(axis, -1) if T.dim() > len(where) else T
    T = T[..., None] if T.dim() == len(where) else T
    if T.shape[:-1] != where:
        raise InputError(
            f"the features have shape {tuple(phi_tilde.shape)} and the targets {tuple(samples.y.shape)}: the layer is "
            f"evaluated at {math.prod(where)} positions, and each needs its targets. If the network pools the outputs "
            "of the layer, let it pool the features instead"
        )
    weight = None if weight is None else weight.reshape(*weight.shape, *[1] * (len(where) - weight.dim())).expand(where)
    if len(where) == 1:
        weight = None if weight is None else weight.to(phi_tilde.device)
        return Points(phi_tilde, Readings(T.to(phi_tilde.device).double()), weight)
    missing = T.isnan() if T.is_floating_point() else T == IGNORED
    kept = ~missing.all(-1)
    mask = samples.inputs.get(MASK) if isinstance(samples.inputs, dict) else None
    if mask is not None and mask.shape == where:
        kept &= mask.to(kept.device) != 0
    if bool(missing[kept].any()):
        raise InputError(
            "some positions have only a part of their targets (the others are NaN): set all targets of such positions "
            "to NaN, or attach one model per output"
        )
    kept = kept.to(phi_tilde.device)
    there = lambda values: values.to(phi_tilde.device)[kept]
    return Points(phi_tilde[kept], Readings(there(T).double()), None if weight is None else there(weight))


def _rows(values: Float[Tensor, "*s c"]) -> Float[ndarray, "n c"]:
    array: ndarray = values.flatten(0, -2).double().numpy(force=True)
    return array
