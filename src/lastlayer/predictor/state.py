"""The numbers of a fitted model that the predictive formula takes, as tensors; and its evaluation in blocks of rows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Num
from numpy import ndarray
from torch import Tensor

from lastlayer._internal.chunks import CHUNK_ROWS
from lastlayer._internal.threads import threads_for
from lastlayer.calibration.curve import LOG_FRACTION, Calibration, Curve
from lastlayer.calibration.fit import SHARPNESS
from lastlayer.data.scaling import Standardizer
from lastlayer.errors import InputError
from lastlayer.formula import Components, State
from lastlayer.formula.ops import TorchOps
from lastlayer.networks.mlp import grouped, numbers_of
from lastlayer.predictor.member import Member
from lastlayer.settings.types import FOURIER, Family

if TYPE_CHECKING:
    from lastlayer.predictor.fitted import Fitted

CACHED = 2**16
"""Numbers of an intermediate array per thread: half a megabyte stays in the cache, and in the memory of the process.
Larger blocks are returned to the system and requested again at every step, which can cost more than their arithmetic.
"""
_double = partial(torch.as_tensor, dtype=torch.float64)
"""Numbers as a tensor, scalars included, since ONNX would keep Python's numbers in float32."""


class BlockOps(TorchOps):
    """Operations on tensors, with networks and last layers evaluated in blocks of rows that stay in the cache."""

    @staticmethod
    def by_rows(function: Callable[[Tensor], list[Tensor]], z: Num[Tensor, "m *d"], layer: State) -> list[Tensor]:
        """Evaluate a function of the rows, whose widest array has `layer.width` numbers per row."""
        size = rows_in_cache(layer.width) if z.device.type == "cpu" else CHUNK_ROWS // len(layer.places) + 1
        parts = [function(rows) for rows in z.split(size)]
        return parts[0] if len(parts) == 1 else [torch.cat(each, 1) for each in zip(*parts, strict=True)]


def rows_in_cache(width: int) -> int:
    """Number of rows of `width` numbers to process at a time."""
    return CACHED * torch.get_num_threads() // width + 1


def state_of(fitted: "Fitted") -> State:
    """The numbers of a fitted model."""
    members, targets, scale, found = fitted.members, fitted.targets, fitted.targets.scale, fitted.calibration
    posteriors, tuned = [member.posterior for member in members], any(member.tuned is not None for member in members)
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
            process = fitted.process if place is None else members[place]
            assert process is not None  # a model file, or `Fitted.alone`, has seen to it
            outside = State(
                inside=_double(found.outside.inside),
                log_noise=(process.posterior.Sigma_E.cpu().diagonal() * scale.square()).log().mean(),
                place=place or 0,
                process=None
                if place is not None
                else _layer([replace(process, tuned=None)], [0], targets, tuned=False),
            )
        state = State(
            input_mean=None if fitted.inputs is None else fitted.inputs.mean,
            input_scale=None if fitted.inputs is None else fitted.inputs.scale,
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
        )
        device = posteriors[0].Sigma_E.device
        return state if device.type == "cpu" else state.map(lambda value: value.to(device))


def _layer(members: Sequence[Member], places: list[int], targets: Standardizer, *, tuned: bool) -> State:
    """Members whose features have the same shape: networks and last layers, targets in original units."""
    posteriors = [member.posterior for member in members]
    centre, weights, offset = map(torch.stack, zip(*[p.affine_map() for p in posteriors], strict=True))
    star = [p.whitening(own) for p, own in zip(posteriors, centre, strict=True)]
    used = [
        own if member.tuned is None else member.posterior.whitening(middle, member.tuned)
        for own, member, middle in zip(star, members, centre, strict=True)
    ]
    (root, shift), (root_star, shift_star) = (map(torch.stack, zip(*each, strict=True)) for each in (used, star))
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
    return Components(*(as_array(x.expand(-1, parts.mean.shape[1], -1)) for x in vars(parts).values()))


def check_answer(*values: ndarray) -> None:
    """Raise an error for predictions that are not finite, which only a user's network can cause."""
    if not all(np.isfinite(each).all() for each in values):
        raise InputError(
            "the model has no finite prediction for these rows: its network maps some of them to features that are "
            "NaN, infinite or huge; drop these rows, or let the network return finite numbers"
        )
