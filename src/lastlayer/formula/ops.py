"""The operations of the predictive formula, in NumPy, torch, CasADi and plain Python."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from torch.nn import functional

BLOCK, MOSTLY = 32, 0.9
"""Rows per block of a matrix product in CasADi, and the share of nonzero entries above which it is not split."""


class NumPyOps:
    """Operations on arrays whose first axis indexes members. Exported models contain a copy of this class."""

    activation = staticmethod(lambda name: None)
    matmul, square, exp, log, sqrt, tanh, sin = np.matmul, np.square, np.exp, np.log, np.sqrt, np.tanh, np.sin
    join = np.concatenate
    minimum, maximum = np.minimum, np.maximum
    at_least, at_most = np.maximum, np.minimum
    affine = staticmethod(lambda x, weight, bias: np.matmul(x, weight) + bias)
    erf = staticmethod(lambda x: np.asarray(np.frompyfunc(math.erf, 1, 1)(x), dtype=float))
    logaddexp = staticmethod(lambda x, y: np.maximum(x, y) + np.log1p(np.exp(-np.abs(x - y))))  # np.logaddexp is slow
    sigmoid = staticmethod(lambda x: np.exp(np.minimum(x, 0.0)) / (1 + np.exp(-np.abs(x))))
    block_sum = staticmethod(lambda x, n: x.reshape(*x.shape[:-1], n, x.shape[-1] // n).sum(-1))
    row_mean = staticmethod(lambda x: x.sum(-1, keepdims=True) / x.shape[-1])
    total = staticmethod(lambda x: x.sum(0))
    average = staticmethod(lambda x: x.mean(0))
    pick = staticmethod(lambda x, i: x[i])
    outer = staticmethod(lambda a, b: a[..., :, None] * b[..., None, :])
    kron = np.kron
    stack = staticmethod(lambda parts: np.stack(parts, -1))
    columns = staticmethod(lambda parts: np.concatenate(parts, -1))
    members = staticmethod(lambda x: x.T[..., None])
    blocks = staticmethod(lambda x, n: np.split(x, n, -1))
    by_output = staticmethod(lambda x: list(np.moveaxis(x, -1, 0).swapaxes(1, 2)))
    by_rows = staticmethod(lambda function, z, layer: function(z))
    take = staticmethod(lambda x, column: x[..., column])
    like = staticmethod(lambda x, one: x)

    @staticmethod
    def softmax(x: ndarray) -> ndarray:
        """Softmax over the members."""
        shares: ndarray = np.exp(x - x.max(0))
        return shares / shares.sum(0)

    @staticmethod
    def beside(a: ndarray, b: ndarray) -> ndarray:
        """Concatenate columns; rows and members are broadcast."""
        shape = np.broadcast_shapes(a.shape[:-1], b.shape[:-1])
        both = np.empty((*shape, a.shape[-1] + b.shape[-1]))
        both[..., : a.shape[-1]], both[..., a.shape[-1] :] = a, b
        return both


class FloatOps:
    """Operations on Python floats: one point, one member, one output; ten times faster than arrays of one number."""

    log, sqrt = math.log, math.sqrt
    minimum = at_most = min
    maximum = at_least = max
    square = staticmethod(lambda x: x * x)
    exp = staticmethod(lambda x: math.exp(x) if x < 709.0 else math.inf)
    logaddexp = staticmethod(lambda x, y: max(x, y) + math.log1p(math.exp(-abs(x - y))))
    sigmoid = staticmethod(lambda x: math.exp(min(x, 0.0)) / (1 + math.exp(-abs(x))))
    row_mean = total = average = staticmethod(lambda x: x)
    pick = staticmethod(lambda x, i: x)
    softmax = staticmethod(lambda x: 1.0)


class TorchOps:
    """Operations on tensors whose first axis indexes members."""

    ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
        "elu": functional.elu,
        "gelu": functional.gelu,
        "leaky_relu": functional.leaky_relu,
        "relu": torch.relu,
        "selu": torch.selu,
        "sigmoid": torch.sigmoid,
        "silu": functional.silu,
        "sin": torch.sin,
        "softplus": functional.softplus,
        "tanh": torch.tanh,
    }
    activation = staticmethod(ACTIVATIONS.get)
    matmul, square, exp, log, sqrt = torch.matmul, torch.square, torch.exp, torch.log, torch.sqrt
    tanh, sin = torch.tanh, torch.sin
    join = torch.cat
    logaddexp, sigmoid, erf = torch.logaddexp, torch.sigmoid, torch.erf
    minimum, maximum = torch.minimum, torch.maximum
    at_least, at_most = torch.clamp_min, torch.clamp_max
    affine = staticmethod(lambda x, weight, bias: torch.baddbmm(bias, x.expand(len(weight), *x.shape[-2:]), weight))
    block_sum = staticmethod(lambda x, n: x.sum(-1, keepdim=True) if n == 1 else x.unflatten(-1, (n, -1)).sum(-1))
    row_mean = staticmethod(lambda x: x.mean(-1, keepdim=True))
    total = staticmethod(lambda x: x.sum(0))
    average = staticmethod(lambda x: x.mean(0))
    pick = staticmethod(lambda x, i: x[i])
    softmax = staticmethod(lambda x: torch.softmax(x, dim=0))
    outer = staticmethod(lambda a, b: a[..., :, None] * b[..., None, :])
    kron = torch.kron
    stack = staticmethod(lambda parts: torch.stack(parts, -1))
    columns = staticmethod(lambda parts: torch.cat(parts, -1))
    members = staticmethod(lambda x: x.mT[..., None])
    blocks = staticmethod(lambda x, n: [x] if n == 1 else x.unflatten(-1, (n, -1)).unbind(-2))
    by_output = staticmethod(lambda x: x.permute(2, 1, 0).unbind(0))
    by_rows = staticmethod(lambda function, z, layer: function(z))
    take = staticmethod(lambda x, column: x.index_select(-1, column))
    like = staticmethod(lambda x, one: x.to(one.dtype) if x.is_floating_point() else x)

    @staticmethod
    def beside(a: Tensor, b: Tensor) -> Tensor:
        """Concatenate columns; rows and members are broadcast."""
        shape = torch.broadcast_shapes(a.shape[:-1], b.shape[:-1])
        return torch.cat([a.expand(*shape, a.shape[-1]), b.expand(*shape, b.shape[-1])], -1)


class Columns:
    """A CasADi matrix with one column per member, or one for all: the transpose of NumPy's layout at one point."""

    def __init__(self, casadi: Any, value: Any) -> None:
        self.casadi, self.value = casadi, value

    def map(self, function: Callable[..., Any], *others: Any) -> "Columns":
        """Apply a function to matrices, broadcast to one shape, or numbers."""
        values = [other.value if isinstance(other, Columns) else other for other in (self, *others)]
        shapes = [value.shape for value in values if not isinstance(value, float | int)]
        rows, columns = (max(lengths) for lengths in zip(*shapes, strict=True))
        return Columns(self.casadi, function(*[self._spread(value, rows, columns) for value in values]))

    def _spread(self, value: Any, rows: int, columns: int) -> Any:
        if isinstance(value, float | int) or value.shape in ((1, 1), (rows, columns)):
            return value
        return self.casadi.repmat(value, rows // value.shape[0], columns // value.shape[1])

    __add__ = __radd__ = lambda self, other: self.map(operator.add, other)
    __mul__ = __rmul__ = lambda self, other: self.map(operator.mul, other)
    __sub__ = lambda self, other: self.map(operator.sub, other)
    __rsub__ = lambda self, other: self.map(lambda x, y: y - x, other)
    __truediv__ = lambda self, other: self.map(operator.truediv, other)
    __neg__ = lambda self: self.map(operator.neg)


class CasADiOps:
    """Expressions of one point: a `Columns` with one column per member; weights (k, n) are stored as (n, k)."""

    activation = staticmethod(lambda name: None)
    by_rows = staticmethod(lambda function, z, layer: function(z))
    like = staticmethod(lambda x, one: x)

    def __init__(self, casadi: Any, blas: str = "reference") -> None:
        """`blas`: the linear algebra backend that CasADi uses for matrix products."""
        ca, self.blas = casadi, blas
        self.casadi = casadi
        self.square = self._of(lambda x: x * x)
        self.exp, self.log, self.sqrt = self._of(ca.exp), self._of(ca.log), self._of(ca.sqrt)
        self.tanh, self.sin, self.erf = self._of(ca.tanh), self._of(ca.sin), self._of(ca.erf)
        self.minimum = self.at_most = self._of(ca.fmin)
        self.maximum = self.at_least = self._of(ca.fmax)
        self.logaddexp = self._of(self._logaddexp)
        self.sigmoid = self._of(lambda x: 0.5 * (1 + ca.tanh(0.5 * x)))
        self.row_mean = self._of(lambda x: ca.sum1(x) / x.shape[0])
        self.total = self._of(ca.sum2)
        self.average = self._of(lambda x: ca.sum2(x) / x.shape[1])

    def array(self, value: Any) -> Columns:
        """Wrap a CasADi matrix."""
        return Columns(self.casadi, value)

    @staticmethod
    def _of(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *others: x.map(function, *others)

    def _logaddexp(self, x: Any, y: Any) -> Any:
        """Cannot overflow, and has the right derivative at x = y, where CasADi takes that of fabs as zero."""
        ca, apart = self.casadi, self.casadi.fabs(x - y)
        return 0.5 * (x + y + apart) + ca.log1p(ca.exp(-apart))

    def join(self, parts: Sequence[Columns]) -> Columns:
        """Concatenate members."""
        return self.array(self.casadi.horzcat(*[part.value for part in parts]))

    def matmul(self, x: Columns, weight: Columns) -> Columns:
        return self.affine(x, weight, self.array(self.casadi.DM.zeros(weight.value.shape[0])))

    def affine(self, x: Columns, weight: Columns, bias: Columns) -> Columns:
        """Product with constant weights plus a bias."""
        ca, W, b = self.casadi, weight.value, bias.value
        blocks = [
            ca.mac(ca.MX(W[rows, columns]), x.value[columns], ca.MX(b[rows]), self.blas)
            for rows, columns in _filled_blocks(np.asarray(W))
        ]
        return self.array(ca.vertcat(*blocks))

    def block_sum(self, x: Columns, n: int) -> Columns:
        """Sums over n blocks of rows of equal size."""
        ca = self.casadi
        return self.columns([self.array(ca.sum1(block.value)) for block in self.blocks(x, n)])

    def outer(self, a: Columns, b: Columns) -> Columns:
        """Outer product of each member's columns, row by row: q^2 numbers per member."""
        ca = self.casadi
        return self.array(ca.vertcat(*[(self.array(row) * b).value for row in ca.vertsplit(a.value)]))

    def softmax(self, x: Columns) -> Columns:
        """Softmax over the members."""
        ca = self.casadi
        if x.value.shape[1] == 1:
            return self.array(ca.DM(1.0))
        shares = ca.exp(x.value - ca.mmax(x.value))
        return self.array(shares / ca.sum2(shares))

    def pick(self, x: Columns, i: int) -> Columns:
        """The column of one member, or the column that is that of all."""
        return self.array(x.value[:, i if x.value.shape[1] > 1 else 0])

    def columns(self, parts: Sequence[Columns]) -> Columns:
        """Concatenate what other libraries have in columns of a row."""
        return self.array(self.casadi.vertcat(*[part.value for part in parts]))

    def members(self, x: Columns) -> Columns:
        """One member for each column of a row."""
        return self.array(x.value.T)

    def blocks(self, x: Columns, n: int) -> list[Columns]:
        """Split into n blocks of rows of equal size."""
        return [self.array(block) for block in self.casadi.vertsplit(x.value, x.value.shape[0] // n)]

    def beside(self, *parts: Columns) -> Columns:
        return self.columns(parts)

    def take(self, x: Columns, column: ndarray) -> Columns:
        """The inputs of every bin."""
        return self.array(x.value[column.tolist()])

    def by_output(self, x: Columns) -> list[Columns]:
        """The values of all members for each output."""
        return [self.array(row.T) for row in self.casadi.vertsplit(x.value)]


def _filled_blocks(W: ndarray) -> list[tuple[slice, slice]]:
    """Blocks of rows, each with the columns from its first to its last nonzero entry."""
    found = []
    for start in range(0, len(W), BLOCK):
        rows = slice(start, min(start + BLOCK, len(W)))
        filled = np.flatnonzero(W[rows].any(0))
        found.append((rows, slice(int(filled[0]), int(filled[-1]) + 1) if len(filled) else slice(0, 1)))
    if sum((r.stop - r.start) * (c.stop - c.start) for r, c in found) > MOSTLY * W.size:
        return [(slice(0, len(W)), slice(0, W.shape[1]))]
    return found
