"""The numbers of a fitted model that the predictive formula takes, as tensors; and its evaluation in blocks of rows."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Num
from numpy import ndarray
from torch import Tensor

from lastlayer._internal.chunks import CHUNK_ROWS, row_chunks
from lastlayer.calibration.curve import Calibration, Shrinkage, StackedCurves, Tails
from lastlayer.calibration.fit import SHARPNESS
from lastlayer.data.scaling import Standardizer
from lastlayer.errors import InputError
from lastlayer.formula import Components, State
from lastlayer.formula.ops import TorchOps
from lastlayer.networks.groups import grouped, numbers_of
from lastlayer.predictor.member import Member
from lastlayer.settings.types import FOURIER, Family

CACHED = 2**16
"""Numbers of an intermediate array per thread: half a megabyte stays in the cache, and in the memory of the process.
Larger blocks are returned to the system and requested again at every step, which can cost more than their arithmetic.
"""


class BlockOps(TorchOps):
    """Operations on tensors, with networks and last layers evaluated in blocks of rows that stay in the cache."""

    @staticmethod
    def by_rows(function: Callable[[Tensor], list[Tensor]], z: Num[Tensor, "m *d"], layer: State) -> list[Tensor]:
        """Evaluate a function of the rows, whose widest array has `layer.width` numbers per row."""
        size = rows_in_cache(layer.width) if z.device.type == "cpu" else CHUNK_ROWS // len(layer.places) + 1
        parts = [function(z[rows]) for rows in row_chunks(len(z), size)]
        return parts[0] if len(parts) == 1 else [torch.cat(each, 1) for each in zip(*parts, strict=True)]


def rows_in_cache(width: int) -> int:
    """Number of rows of `width` numbers to process at a time."""
    return CACHED * torch.get_num_threads() // width + 1


def state_of(
    members: Sequence[Member],
    inputs: Standardizer | None,
    targets: Standardizer,
    calibration: Calibration | None,
    process: Member | None = None,
) -> State:
    """Collect the numbers of a model; `process` is the Gaussian process, if it is needed and is not a member."""
    posteriors, tuned = [member.posterior for member in members], any(member.tuned is not None for member in members)
    groups = grouped([member.network for member in members])
    places = [i for group in groups for i in group]
    tails, shrinkage, head, outside = Tails(), Shrinkage(), None, None
    if calibration is not None:
        tails, shrinkage, head, outside = (
            calibration.tails,
            calibration.shrinkage,
            calibration.head,
            calibration.outside,
        )
    scale = targets.scale
    noise_cov = torch.stack([p.Sigma_E.cpu() for p in posteriors]) * scale[:, None] * scale
    curve = curves_of([member.family for member in members], calibration, noise_cov)
    root = (0.5 * curve.log_slope).exp()
    weigh = calibration is not None and len(members) > 1
    precision = None if not shrinkage.precision else math.log(shrinkage.precision) - 2 * scale.log()
    state = State(
        input_mean=None if inputs is None else inputs.mean,
        input_scale=None if inputs is None else inputs.scale,
        layers=[_layer([members[i] for i in group], group, targets, tuned=tuned) for group in groups],
        order=None if places == sorted(places) else torch.tensor(np.argsort(places)),
        curve=curve,
        head=None if head is None else State(**vars(head)),
        outside=None if outside is None else _outside(outside.inside, members, process, targets),
        centre=targets.mean,
        noise_cov=noise_cov,
        roots=torch.linalg.cholesky(noise_cov * root * root.mT),
        log_noise_var=noise_cov.diagonal(dim1=-2, dim2=-1).log()[:, None],
        log_precision=precision,
        sharpness=_number(SHARPNESS if weigh else 0.0),
        widening=_number(tails.widening),
    )
    device = posteriors[0].Sigma_E.device
    moved: State = state.map(lambda value: value.detach().to(device))
    return moved


def _layer(members: Sequence[Member], places: list[int], targets: Standardizer, *, tuned: bool) -> State:
    """Members whose features have the same shape: networks and last layers, targets in original units."""
    posteriors = [member.posterior for member in members]
    mean = [p.affine_map() for p in posteriors]
    each = list(zip(members, posteriors, [centre for centre, _, _ in mean], strict=True))
    star = [p.whitening(centre) for _, p, centre in each]
    used = [
        own if member.tuned is None else p.whitening(centre, member.tuned)
        for own, (member, p, centre) in zip(star, each, strict=True)
    ]
    scale, middle = targets.scale.to(mean[0][1]), targets.mean.to(mean[0][1])
    network = numbers_of([member.network for member in members])
    root = torch.stack([root for root, _ in used])
    widths = [w.shape[-1] for w in (root, *members[0].network.parameters()) if w.dim()]
    return State(
        network=network,
        centre=torch.stack([centre for centre, _, _ in mean])[:, None],
        weights=torch.stack([W for _, W, _ in mean]) * scale,
        offset=torch.stack([offset for _, _, offset in mean])[:, None] * scale + middle,
        root=root,
        shift=torch.stack([shift for _, shift in used])[:, None],
        root_star=torch.stack([root for root, _ in star]) if tuned else None,
        shift_star=torch.stack([shift for _, shift in star])[:, None] if tuned else None,
        n_costs=len(targets.mean) if posteriors[0].statistics.by_output else 1,
        places=list(places),
        width=len(members) * max(widths),
    )


def _outside(inside: float, members: Sequence[Member], process: Member | None, targets: Standardizer) -> State:
    """The Gaussian process, by which points outside the data are told."""
    place = next((i for i, member in enumerate(members) if member.family == FOURIER), None)
    found = process if place is None else members[place]
    assert found is not None  # a model file, or `Fitted.alone`, has seen to it
    noise = found.posterior.Sigma_E.cpu().diagonal() * targets.scale.square()
    at_star = Member(found.network, found.posterior, found.family)
    layer = _layer([at_star], [0], targets, tuned=False) if place is None else None
    return State(inside=_number(inside), log_noise=noise.log().mean(), place=place or 0, process=layer)


def curves_of(families: Sequence[Family], calibration: Calibration | None, noise_cov: Float[Tensor, "c q q"]) -> State:
    """The curve of each member."""
    stacked = StackedCurves.of(families, calibration, noise_cov)._asdict()
    return State(**{name: None if numbers is None else _number(numbers) for name, numbers in stacked.items()})


def as_array(values: Tensor) -> ndarray:
    """Convert a tensor to float64, or keep it if it holds integers."""
    array: ndarray = values.detach().cpu().numpy()
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _number(value: Any) -> Tensor:
    """Numbers in float64, scalars included, since ONNX would keep Python's numbers in float32."""
    return torch.as_tensor(value, dtype=torch.float64)


def as_arrays(parts: Components) -> Components:
    """Convert components from tensors to arrays with one row per point."""
    return Components(*(as_array(x.expand(-1, parts.mean.shape[1], -1)) for x in vars(parts).values()))


def check_answer(values: Tensor | ndarray) -> None:
    """Raise an error for predictions that are not finite, which only a user's network can cause."""
    if not bool(np.isfinite(as_array(values) if isinstance(values, Tensor) else values).all()):
        raise InputError(
            "the model has no finite prediction for these rows: its network maps some of them to features that are "
            "NaN, infinite or huge; drop these rows, or let the network return finite numbers"
        )
