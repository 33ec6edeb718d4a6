"""A fitted model as one `torch.nn.Module`, with everything that the predictive formula needs as buffers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Num
from numpy import ndarray
from torch import Tensor, nn

from lastlayer import formula
from lastlayer._internal.chunks import CHUNK_ROWS, row_chunks
from lastlayer.bayes.posterior import Posterior
from lastlayer.calibration.curve import Calibration, Curve, Shrinkage, Tails
from lastlayer.calibration.fit import SHARPNESS
from lastlayer.data.scaling import Standardizer
from lastlayer.formula.ops import TorchOps
from lastlayer.networks.mlp import NetworkGroup, grouped
from lastlayer.networks.structured import converted
from lastlayer.predictor.unseen import NOTHING, Unseen
from lastlayer.settings.types import FOURIER, NETWORK, Family

CACHED = 2**16
"""Numbers of an intermediate array per thread: half a megabyte stays in the cache, and in the memory of the process.
Larger blocks are returned to the system and requested again at every step, which can cost more than their arithmetic.
"""
OUTPUTS = ("mean", "var", "epistemic_var", "noise_var", "affine_cost")
"""Entries of a prediction, under the names of `Prediction`."""


@dataclass(frozen=True)
class Member:
    """One network of the mixture and the posterior of its last layer."""

    network: nn.Module
    posterior: Posterior
    family: Family = NETWORK
    unseen: Unseen = NOTHING
    """Rows of the training table that neither the network nor its last layer was fitted to."""


class LayerGroup(nn.Module):
    """Members whose features have the same shape: networks and last layers, targets in original units."""

    centre: Tensor
    weights: Tensor
    offset: Tensor
    root: Tensor
    shift: Tensor
    root_star: Tensor | None
    shift_star: Tensor | None

    def __init__(
        self,
        group: NetworkGroup,
        posteriors: Sequence[Posterior],
        log_alphas: Sequence[float] | None,
        targets: Standardizer,
    ) -> None:
        """Build a group; `log_alphas` are those of the variance, where they were tuned."""
        super().__init__()
        self.group, self.places = group, group.places
        mean = [p.affine_map() for p in posteriors]
        star = [p.whitening(centre) for p, (centre, _, _) in zip(posteriors, mean, strict=True)]
        used = star
        if log_alphas is not None:
            used = [
                own if a == float(p.log_alpha) else p.whitening(centre, a)
                for own, p, a, (centre, _, _) in zip(star, posteriors, log_alphas, mean, strict=True)
            ]
        self.n_costs = len(targets.mean) if posteriors[0].ratio_by_output else 1
        """Affine costs per point: one, or one per output where outputs were observed at different rows."""
        scale, middle = targets.scale.to(mean[0][1]), targets.mean.to(mean[0][1])
        for name, value in (
            ("centre", torch.stack([centre for centre, _, _ in mean])[:, None]),
            ("weights", torch.stack([W for _, W, _ in mean]) * scale),
            ("offset", torch.stack([offset for _, _, offset in mean])[:, None] * scale + middle),
            ("root", torch.stack([root for root, _ in used])),
            ("shift", torch.stack([shift for _, shift in used])[:, None]),
            ("root_star", None if log_alphas is None else torch.stack([root for root, _ in star])),
            ("shift_star", None if log_alphas is None else torch.stack([shift for _, shift in star])[:, None]),
        ):
            self.register_buffer(name, None if value is None else value.detach().clone())
        self.width = len(posteriors) * max(w.shape[-1] for w in (self.root, *group.parameters()) if w.dim())
        """Numbers per row of the widest intermediate array, as far as the shapes of the weights show."""

    def features(self, _: object, z: Num[Tensor, "m *d"]) -> Float[Tensor, "c m k"]:
        """Centred linear features of standardised inputs."""
        return self.group(converted(z, self.centre.dtype)) - self.centre


class Buffers(nn.Module):
    """Numbers as float64 buffers, scalars included, since ONNX would keep Python's numbers in float32."""

    log_noise: Tensor
    log_slope: Tensor
    place: int | None = None
    """Index of the Gaussian process among the members."""

    def __init__(self, **numbers: Tensor | ndarray | float) -> None:
        super().__init__()
        for name, number in numbers.items():
            self.register_buffer(name, torch.as_tensor(number, dtype=torch.float64).detach().clone())


class Predictor(nn.Module):
    """Maps x to {mean, var, epistemic_var, noise_var: (m, q), affine_cost: (m,)}, in original units.

    The moments are those of `predictive`, members and calibration included. Gradients flow to the inputs; the model's
    parameters are frozen. The module is a copy and always in evaluation mode: changing it does not change the model.
    """

    input_mean: Tensor
    input_scale: Tensor
    centre: Tensor
    noise_cov: Tensor
    log_noise_var: Tensor
    sharpness: Tensor
    widening: Tensor
    log_precision: Tensor | None
    order: Tensor | None

    def __init__(
        self,
        inputs: Standardizer | None,
        targets: Standardizer,
        members: Sequence[Member],
        log_alphas: Sequence[float],
        calibration: Calibration | None,
        process: Member | None = None,
    ) -> None:
        """Build the module; `process` is the Gaussian process, if it is needed and is not a member."""
        super().__init__()
        posteriors = [member.posterior for member in members]
        tuned = any(a != float(p.log_alpha) for a, p in zip(log_alphas, posteriors, strict=True))
        groups = grouped([member.network for member in members])
        self.layers = nn.ModuleList(
            LayerGroup(
                group,
                [posteriors[i] for i in group.places],
                [log_alphas[i] for i in group.places] if tuned else None,
                targets,
            )
            for group in groups
        )
        places = [i for group in groups for i in group.places]
        device = posteriors[0].Sigma_E.device
        order = None if places == sorted(places) else torch.tensor(np.argsort(places), device=device)
        self.register_buffer("order", order)
        tails, shrinkage, head = Tails(), Shrinkage(), None
        if calibration is not None:
            tails, shrinkage, head = calibration.tails, calibration.shrinkage, calibration.head
        self.head = None if head is None else Buffers(**vars(head))
        scale = targets.scale
        noise_cov = torch.stack([p.Sigma_E.cpu() for p in posteriors]) * scale[:, None] * scale
        self.curve = curves_of([member.family for member in members], calibration, noise_cov)
        self.outside: Buffers | None = None
        self.process: LayerGroup | None = None
        if calibration is not None and calibration.outside is not None:
            place = next((i for i, member in enumerate(members) if member.family == FOURIER), None)
            if place is None:
                assert process is not None
                self.process = LayerGroup(grouped([process.network])[0], [process.posterior], None, targets)
            of_process = process if place is None else members[place]
            noise = of_process.posterior.Sigma_E.cpu().diagonal() * scale.square()  # type: ignore[union-attr]
            self.outside = Buffers(inside=calibration.outside.inside, log_noise=noise.log().mean())
            self.outside.place = place
        weigh = calibration is not None and len(members) > 1
        precision = None if not shrinkage.precision else math.log(shrinkage.precision) - 2 * scale.log()
        numbers = Buffers(
            input_mean=0.0 if inputs is None else inputs.mean,
            input_scale=1.0 if inputs is None else inputs.scale,
            centre=targets.mean,
            noise_cov=noise_cov,
            log_noise_var=noise_cov.diagonal(dim1=-2, dim2=-1).log()[:, None],
            sharpness=SHARPNESS if weigh else 0.0,
            widening=tails.widening,
        )
        for name, value in numbers.named_buffers():
            self.register_buffer(name, value)
        self.register_buffer("log_precision", precision)
        self.to(device).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "Predictor":
        """Keep the module in evaluation mode."""
        return super().train(False)

    def groups(self) -> list[LayerGroup]:
        """Groups of members whose features have the same shape."""
        return [layer for layer in self.layers if isinstance(layer, LayerGroup)]

    def last_layers(self, z: Num[Tensor, "m *d"], say: Callable[..., Any] = formula.last_layer) -> list[Tensor]:
        """Outputs of the last layers for standardised inputs, computed in chunks of rows."""
        said = []
        for layer in self.groups():
            size = rows_in_cache(layer.width) if z.device.type == "cpu" else CHUNK_ROWS // len(layer.root) + 1
            parts = [say(TorchOps, layer, layer.features(TorchOps, z[rows])) for rows in row_chunks(len(z), size)]
            said.append(parts[0] if len(parts) == 1 else [torch.cat(each, 1) for each in zip(*parts, strict=True)])
        return list(formula.joined(TorchOps, self, said))

    def converted(self, x: Num[Tensor, "m *d"]) -> Num[Tensor, "m *d"]:
        """Convert inputs to the model's device, and floating-point ones to its dtype."""
        return converted(x, self.input_mean.dtype, self.input_mean.device)

    def standardized(self, x: Num[Tensor, "m *d"]) -> Num[Tensor, "m *d"]:
        """Standardise inputs; integer ids stay unchanged."""
        x = self.converted(x)
        z: Tensor = formula.standardized(self, x) if x.is_floating_point() else x
        return z

    def components(self, x: Num[Tensor, "m *d"]) -> formula.Components:
        """Calibrated predictions of each member."""
        return self.components_of(self.standardized(x))

    def components_of(self, z: Num[Tensor, "m *d"]) -> formula.Components:
        """Calibrated predictions of each member for standardised inputs."""
        return formula.components(TorchOps, self, self.last_layers(z), z, self._far(z))

    def _far(self, z: Num[Tensor, "m *d"]) -> Float[Tensor, "m 1"] | None:
        """`formula.log_far` by a Gaussian process that is not a member."""
        if self.process is None:
            return None
        said = formula.last_layer(TorchOps, self.process, self.process.features(TorchOps, z))
        far: Tensor = formula.log_far(TorchOps, self.outside, said[-1][0])
        return far

    def mean(self, x: Num[Tensor, "m *d"]) -> Float[Tensor, "m q"]:
        """Mean of the mixture; costs are not computed where they affect neither weights nor shrinkage."""
        if self.log_precision is None and not self.sharpness:
            z = self.standardized(x)
            return self.last_layers(z, formula.layer_mean)[0].mean(0)
        parts = self.components(x)
        return TorchOps.total(parts.weights * parts.mean)

    def stretched(self, x: Num[Tensor, "m *d"]) -> tuple[formula.Components, list[list[Float[Tensor, "m r"]]]]:
        """Components, and the whitened features of each member scaled to its calibrated variance, tails included."""
        z = self.standardized(x)
        found: tuple[formula.Components, list[list[Tensor]]] = formula.stretched(TorchOps, self, z, self._far(z))
        return found

    def functions(self, x: Num[Tensor, "m *d"]) -> formula.Functions:
        """The function at some points, jointly over points and outputs."""
        return self.functions_of(self.standardized(x))

    def functions_of(self, z: Num[Tensor, "m *d"]) -> formula.Functions:
        """The function at standardised inputs."""
        found: formula.Functions = formula.functions(TorchOps, self, z, self._far(z))
        return found

    @property
    def roots(self) -> Float[Tensor, "c q q"]:
        """Root of the covariance between the outputs of each member's function, before scaling."""
        root: Tensor = torch.linalg.cholesky(self.function_cov)
        return root

    @property
    def function_cov(self) -> Float[Tensor, "c q q"]:
        """Covariance between the outputs of each member's function, before scaling."""
        root = (0.5 * self.curve.log_slope).exp()
        return self.noise_cov * root * root.mT

    def forward(self, x: Num[Tensor, "m *d"]) -> dict[str, Tensor]:
        """Predict the moments of the targets."""
        x = self.converted(x)
        # without chunks, since exported graphs take any number of rows
        at_once = self.process is None and x.is_floating_point()
        parts = formula.predict(TorchOps, self, x) if at_once else self.components(x)
        mean, epistemic, noise, cost = formula.moments(TorchOps, self, parts)
        return dict(zip(OUTPUTS, (mean, epistemic + noise, epistemic, noise, cost[..., 0]), strict=True))


def rows_in_cache(width: int) -> int:
    """Number of rows of `width` numbers to process at a time."""
    return CACHED * torch.get_num_threads() // width + 1


def curves_of(
    families: Sequence[Family], calibration: Calibration | None, noise_cov: Float[Tensor, "c q q"]
) -> Buffers:
    """The curve of each member, in logarithms: (c, 1, q) or (c, 1, 1). The members of a family share its trust."""
    identity = Curve.identity(noise_cov.shape[-1])
    curves = [identity if calibration is None else calibration.curves[family] for family in families]
    log_noise, log_slope = (np.log([c.widening * getattr(c, name) for c in curves]) for name in ("noise", "slope"))
    more = {}
    if calibration is not None and calibration.outside is not None:
        factor = np.log([calibration.outside.of(family) for family in families])
        variance = noise_cov.diagonal(dim1=-2, dim2=-1).log().numpy() + log_slope
        more["log_share"] = (factor - variance.mean(-1))[:, None, None]
    return Buffers(
        **more,
        log_noise=log_noise[:, None],
        log_slope=log_slope[:, None],
        power=np.array([curve.power for curve in curves])[:, None, None],
        log_trust=np.log([c.trust / families.count(f) for c, f in zip(curves, families, strict=True)])[:, None, None],
        log_reach=np.array([curve.log_reach for curve in curves])[:, None, None],
    )
