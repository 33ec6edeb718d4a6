"""Piecewise-linear encoding of inputs: each number becomes its position within each of several bins."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lastlayer import formula
from lastlayer.formula.ops import TorchOps

NO_WIDTH = 1e-5
"""Minimum width of a bin, for standardised inputs: less cannot be told from rounding in float32."""
MOST_ROWS = 2**24
"""Maximum number of rows for torch's quantiles."""
MOST_BINS, MOST_IN_ALL, ROWS_PER_BIN = 8, 400, 10
"""Maximum number of bins per input and of all inputs together; rows of the table per bin of an input."""


class PiecewiseEncoding(nn.Module):
    """Encode inputs by the bins of every input side by side; a leading dimension of the buffers indexes networks."""

    column: Tensor
    slope: Tensor
    shift: Tensor

    def __init__(self, column: Int[Tensor, " k"], slope: Float[Tensor, "*s k"], shift: Float[Tensor, "*s k"]) -> None:
        super().__init__()
        for name, value in (("column", column), ("slope", slope), ("shift", shift)):
            self.register_buffer(name, value)

    @classmethod
    def of(cls, Z: Float[Tensor, "m d"], n_bins: Int[Tensor, " d"]) -> "PiecewiseEncoding":
        """Bins between quantiles of the rows; bins of no width, where values repeat, are zero everywhere."""
        slopes, shifts = [], []
        for z, n in zip(Z.double().mT, n_bins.tolist(), strict=True):
            knots = z[:MOST_ROWS].quantile(torch.linspace(0, 1, n + 1, dtype=z.dtype, device=z.device))
            width = knots.diff()
            slope = torch.where(width > NO_WIDTH, 1 / width.clamp_min(NO_WIDTH), 0.0)
            slopes.append(slope)
            shifts.append(-knots[:-1] * slope)
        column = torch.arange(len(n_bins), device=Z.device).repeat_interleave(n_bins.to(Z.device))
        return cls(column, torch.cat(slopes), torch.cat(shifts))

    @classmethod
    def stacked(cls, encodings: "Sequence[PiecewiseEncoding]") -> "PiecewiseEncoding":
        """Stack the encodings of several networks, each with its own bins of the same inputs."""
        each = lambda name: torch.stack([getattr(encoding, name) for encoding in encodings])[:, None]
        return cls(encodings[0].column, each("slope"), each("shift"))

    def forward(self, x: Float[Tensor, "*s m d"]) -> Float[Tensor, "*t m k"]:
        bins: Tensor = formula.encoded(TorchOps, self, x.index_select(-1, self.column))
        return bins


class Encoded(nn.Module):
    def __init__(self, encoding: PiecewiseEncoding, network: nn.Module) -> None:
        super().__init__()
        self.encoding, self.network = encoding, network

    def forward(self, x: Float[Tensor, "*s m d"]) -> Float[Tensor, "*t m k"]:
        phi: Tensor = self.network(self.encoding(x))
        return phi


def bins_of(Z: Float[Tensor, "m d"]) -> Int[Tensor, " d"]:
    """Number of bins of each input: at most the number of steps between its distinct values."""
    most = max(2, min(MOST_BINS, MOST_IN_ALL // Z.shape[1], len(Z) // ROWS_PER_BIN))
    return torch.tensor([max(1, min(most, len(z.unique()) - 1)) for z in Z.mT])
