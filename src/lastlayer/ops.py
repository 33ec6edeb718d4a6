"""The operations that the predictive formula needs, in NumPy, torch, CasADi and plain Python."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy import ndarray


class NumPyOps:
    """Arrays whose first axis counts members. An exported model carries a copy of this class: NumPy alone."""

    matmul, square, exp, log, sqrt, tanh, sin = np.matmul, np.square, np.exp, np.log, np.sqrt, np.tanh, np.sin
    join = np.concatenate
    minimum, maximum = np.minimum, np.maximum
    at_least, at_most = np.maximum, np.minimum
    affine = staticmethod(lambda x, weight, bias: np.matmul(x, weight) + bias)
    erf = staticmethod(lambda x: np.asarray(np.frompyfunc(math.erf, 1, 1)(x), dtype=float))
    logaddexp = staticmethod(lambda x, y: np.maximum(x, y) + np.log1p(np.exp(-np.abs(x - y))))  # NumPy's own is slow
    sigmoid = staticmethod(lambda x: np.exp(np.minimum(x, 0.0)) / (1 + np.exp(-np.abs(x))))
    block_sum = staticmethod(lambda x, n: x.reshape(*x.shape[:-1], n, x.shape[-1] // n).sum(-1))
    row_mean = staticmethod(lambda x: x.sum(-1, keepdims=True) / x.shape[-1])
    total = staticmethod(lambda x: x.sum(0))
    average = staticmethod(lambda x: x.mean(0))
    pick = staticmethod(lambda x, i: x[i])
    outer = staticmethod(lambda a, b: a[..., :, None] * b[..., None, :])

    @staticmethod
    def softmax(x: ndarray) -> ndarray:
        shares: ndarray = np.exp(x - x.max(0))
        return shares / shares.sum(0)

    @staticmethod
    def beside(a: ndarray, b: ndarray) -> ndarray:
        """Columns of both, as many rows and members as `a` has."""
        both = np.empty((*a.shape[:-1], a.shape[-1] + b.shape[-1]))
        both[..., : a.shape[-1]], both[..., a.shape[-1] :] = a, b
        return both


class FloatOps:
    """Python's own numbers: one point, one member, one output. A tenth of what arrays of one number cost."""

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
    """Tensors whose first axis counts members."""

    matmul, square, exp, log, sqrt = torch.matmul, torch.square, torch.exp, torch.log, torch.sqrt
    tanh, sin = torch.tanh, torch.sin
    join = torch.cat
    logaddexp, sigmoid, erf = torch.logaddexp, torch.sigmoid, torch.erf
    minimum, maximum = torch.minimum, torch.maximum
    at_least, at_most = torch.clamp_min, torch.clamp_max
    affine = staticmethod(lambda x, weight, bias: torch.baddbmm(bias, x, weight))
    block_sum = staticmethod(lambda x, n: x.sum(-1, keepdim=True) if n == 1 else x.unflatten(-1, (n, -1)).sum(-1))
    row_mean = staticmethod(lambda x: x.mean(-1, keepdim=True))
    total = staticmethod(lambda x: x.sum(0))
    average = staticmethod(lambda x: x.mean(0))
    pick = staticmethod(lambda x, i: x[i])
    softmax = staticmethod(lambda x: torch.softmax(x, dim=0))
    outer = staticmethod(lambda a, b: a[..., :, None] * b[..., None, :])


class Each:
    """One CasADi row per member; arithmetic is member by member, and other operands serve all members."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)

    def map(self, function: Callable[..., Any], *others: Any) -> "Each":
        columns = [other.parts if isinstance(other, Each) else [other] * len(self.parts) for other in others]
        return Each([function(*each) for each in zip(self.parts, *columns, strict=True)])

    __add__ = __radd__ = lambda self, other: self.map(operator.add, other)
    __mul__ = __rmul__ = lambda self, other: self.map(operator.mul, other)
    __sub__ = lambda self, other: self.map(operator.sub, other)
    __rsub__ = lambda self, other: self.map(operator.neg) + other
    __truediv__ = lambda self, other: self.map(operator.truediv, other)
    __neg__ = lambda self: self.map(operator.neg)


class CasADiOps:
    """Expressions of one point: rows (1, k), one per member in an `Each`."""

    def __init__(self, casadi: Any) -> None:
        ca = self.casadi = casadi
        self.join = Each
        self.matmul, self.square = self._of(ca.mtimes), self._of(lambda x: x * x)
        self.affine = self._of(lambda x, weight, bias: ca.mtimes(x, weight) + bias)
        self.exp, self.log, self.sqrt = self._of(ca.exp), self._of(ca.log), self._of(ca.sqrt)
        self.tanh, self.sin, self.erf = self._of(ca.tanh), self._of(ca.sin), self._of(ca.erf)
        self.minimum = self.at_most = self._of(ca.fmin)
        self.maximum = self.at_least = self._of(ca.fmax)
        self.logaddexp = self._of(self._logaddexp)
        self.sigmoid = self._of(lambda x: 0.5 * (1 + ca.tanh(0.5 * x)))
        self.block_sum = self._of(lambda x, n: ca.horzcat(*map(ca.sum2, ca.horzsplit(x, x.shape[1] // n))))
        self.row_mean = self._of(lambda x: ca.sum2(x) / x.shape[1])
        self.outer = self._of(lambda a, b: ca.mtimes(a.T, b))

    @staticmethod
    def _of(function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(x: Any, *others: Any) -> Any:
            if not isinstance(x, Each):
                first = next((other for other in others if isinstance(other, Each)), None)
                if first is None:
                    return function(x, *others)
                x = Each([x] * len(first.parts))
            return x.map(function, *others)

        return operation

    def _logaddexp(self, x: Any, y: Any) -> Any:
        """Nothing can overflow, and at x = y the derivative is right too: there CasADi takes that of fabs for zero."""
        ca, apart = self.casadi, self.casadi.fabs(x - y)
        return 0.5 * (x + y + apart) + ca.log1p(ca.exp(-apart))

    def softmax(self, x: Each) -> Each:
        ca = self.casadi
        joined = ca.horzcat(*x.parts)
        shares = ca.exp(joined - ca.mmax(joined))
        return Each(ca.horzsplit(shares / ca.sum2(shares)))

    @staticmethod
    def total(x: Each) -> Any:
        return sum(x.parts)

    @staticmethod
    def pick(x: Each, i: int) -> Any:
        return x.parts[i]

    def average(self, x: Each) -> Any:
        return self.total(x) / len(x.parts)
