"""A torch network as a CasADi expression of one point, read from its `torch.export` graph."""

import copy
import math
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lastlayer import formula
from lastlayer.errors import InputError
from lastlayer.formula.ops import CasADiOps

CLOSE = 1e-10
"""Largest accepted difference between expression and network, relative to the largest entry."""
MOVES = re.compile(
    "alias|cat|chunk|clone|contiguous|detach|dropout|expand|flatten|flip|index_select|narrow|permute|repeat|reshape|select"
    "|slice|split|split_with_sizes|squeeze|stack|swapaxes|t|transpose|unbind|unflatten|unsafe_view|unsqueeze|view"
)
UNARY = re.compile("acos|asin|atan|ceil|cos|cosh|erf|exp|expm1|floor|log|log1p|sign|sin|sinh|sqrt|tan|tanh")
POINTWISE: dict[str, Callable[..., Any]] = {
    "abs": lambda ca, a: ca.fabs(a),
    "add": lambda ca, a, b, alpha=1.0: a + alpha * b,
    "div": lambda ca, a, b: a / b,
    "maximum": lambda ca, a, b: ca.fmax(a, b),
    "minimum": lambda ca, a, b: ca.fmin(a, b),
    "mul": lambda ca, a, b: a * b,
    "neg": lambda ca, a: -a,
    "pow": lambda ca, a, b: a**b,
    "reciprocal": lambda ca, a: 1 / a,
    "rsqrt": lambda ca, a: 1 / ca.sqrt(a),
    "rsub": lambda ca, a, b: b - a,
    "square": lambda ca, a: a * a,
    "sub": lambda ca, a, b, alpha=1.0: a - alpha * b,
}


@dataclass(frozen=True)
class Array:
    """A tensor as a CasADi column."""

    column: Any
    shape: tuple[int, ...]


def to_expression(ops: CasADiOps, network: nn.Module, z: Any) -> Any:
    """Write the features of a network as an expression, and compare it with the network at a few points."""
    ca, network = ops.casadi, copy.deepcopy(network).double().eval()
    kind, d = type(network).__name__, z.shape[0]
    points = torch.randn(5, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.export.export(network, (points[:1],)).run_decompositions({})
            wanted = network(points).numpy()
        point = ca.MX.sym("z", d)
        found = _Reader(ops, program).read(Array(point, (1, d)))
        function = ca.Function("backbone", [point], [found.column])
        values = np.stack([np.array(function(point))[:, 0] for point in points.numpy()])
    except Exception as error:  # any kind: torch cannot trace the network, or an operation has unsupported arguments
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"the backbone ({kind}) could not be written as a CasADi expression: {str(error).strip().splitlines()[0]}. "
            "Use layers that docs/control.md lists, or hidden=... for the built-in network"
        ) from error
    if values.shape != wanted.shape or not np.abs(values - wanted).max() <= CLOSE * np.abs(wanted).max():
        raise InputError(
            f"the CasADi expression of the backbone ({kind}) computes other values; use hidden=... instead"
        )
    return function(z)


class _Reader(torch.fx.Interpreter):
    """Interpreter of an exported graph: one method per torch operation, found by its name."""

    def __init__(self, ops: CasADiOps, program: Any) -> None:
        super().__init__(program.graph_module)
        self.extra_traceback = False  # messages of errors stay as they are
        self.ops, self.ca, self.program = ops, ops.casadi, program

    def read(self, x: Array) -> Array:
        numbers = {**self.program.state_dict, **self.program.constants}
        targets = [spec.target for spec in self.program.graph_signature.input_specs]
        inputs = [x if target is None else self.constant(numbers[target]) for target in targets]
        (out,) = self.run(*inputs, enable_io_processing=False)
        return out

    def call_function(self, target: Any, args: Any, words: Any) -> Any:
        if target is operator.getitem:
            return args[0][args[1]]
        name = target._schema.name.removeprefix("aten::").lstrip("_")
        if MOVES.fullmatch(name):
            return self.move(target, args)
        if UNARY.fullmatch(name):
            return self.map(getattr(self.ca, name), args[0])
        if name in POINTWISE:
            return self.map(partial(POINTWISE[name], self.ca, **words), *args)
        own = getattr(self, f"op_{name}", None)
        if own is not None:
            return own(*args, **words)
        if name in formula.ACTIVATIONS:
            activation = formula.ACTIVATIONS[name]
            return self.map(lambda x: activation(self.ops, self.ops.array(x)).value, args[0])
        raise InputError(
            f"the backbone uses {target}, which has no CasADi expression here; use layers that docs/control.md lists, "
            "or hidden=... for the built-in network"
        )

    def constant(self, values: Tensor) -> Array:
        column = self.ca.MX(self.ca.DM(values.detach().cpu().double().numpy().reshape(-1, 1)))
        return Array(column, tuple(values.shape))

    def move(self, target: Any, args: Sequence[Any]) -> Any:
        """Apply an operation of torch to the positions of the entries."""
        arrays: list[Array] = []
        positions: list[Tensor] = []

        def position(arg: Any) -> Any:
            if isinstance(arg, list | tuple):
                return [position(part) for part in arg]
            if not isinstance(arg, Array):
                return arg
            start = sum(math.prod(array.shape) for array in arrays)
            arrays.append(arg)
            positions.append(start + torch.arange(math.prod(arg.shape)).view(arg.shape))
            return positions[-1]

        moved = target(*[position(arg) for arg in args])
        whole = self.ca.vertcat(*[array.column for array in arrays])
        taken = lambda index: Array(whole[index.reshape(-1).tolist(), 0], tuple(index.shape))
        return taken(moved) if isinstance(moved, Tensor) else [taken(index) for index in moved]

    def map(self, function: Callable[..., Any], *args: Any) -> Array:
        """Apply a function entry by entry, after broadcasting shapes as torch does."""
        shape = torch.broadcast_shapes(*[arg.shape for arg in args if isinstance(arg, Array)])
        equal = [self.spread(arg, shape).column if isinstance(arg, Array) else arg for arg in args]
        return Array(function(*equal), tuple(shape))

    def spread(self, x: Array, shape: Sequence[int]) -> Array:
        return x if x.shape == tuple(shape) else self.move(torch.Tensor.expand, (x, list(shape)))

    def over(self, x: Array, dims: Sequence[int] | int | None, keep: bool, function: Callable[[Any], Any]) -> Array:
        """Apply a function that reduces each column of a matrix to one number, where `dims` run along the columns."""
        n = len(x.shape)
        wanted = range(n) if dims is None else [dims] if isinstance(dims, int) else dims
        taken = sorted(dim % n for dim in wanted)
        others = [dim for dim in range(n) if dim not in taken]
        length = math.prod(x.shape[dim] for dim in taken)
        there = self.move(torch.Tensor.permute, (x, [*others, *taken]))
        values = function(self.ca.reshape(there.column, length, -1)).T
        shape = [1 if dim in taken else x.shape[dim] for dim in range(n)] if keep else [x.shape[dim] for dim in others]
        return Array(values, tuple(shape))

    # operations, with the arguments that torch passes

    def op_clamp(self, x: Array, low: float | None = None, high: float | None = None) -> Array:
        above = x if low is None else self.map(lambda a: self.ca.fmax(a, low), x)
        return above if high is None else self.map(lambda a: self.ca.fmin(a, high), above)

    def op_sum(self, x: Array, dims: Any = None, keep: bool = False) -> Array:
        return self.over(x, dims, keep, self.ca.sum1)

    def op_mean(self, x: Array, dims: Any = None, keep: bool = False) -> Array:
        return self.over(x, dims, keep, lambda a: self.ca.sum1(a) / a.shape[0])

    def op_amax(self, x: Array, dims: Any = None, keep: bool = False) -> Array:
        return self.over(x, dims, keep, lambda a: self.ca.horzcat(*map(self.ca.mmax, self.ca.horzsplit(a))))

    def op_softmax(self, x: Array, dim: int, *_: Any) -> Array:
        shares = self.map(lambda a, top: self.ca.exp(a - top), x, self.op_amax(x, dim, True))
        return self.map(operator.truediv, shares, self.op_sum(shares, dim, True))

    def op_linear(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        n, k = weight.shape
        W, columns = self.ca.reshape(weight.column, k, n).T, self.ca.reshape(x.column, k, -1)
        out = Array(self.ca.vec(self.ca.mtimes(W, columns, self.ops.blas)), (*x.shape[:-1], n))
        return self.affine(out, bias)

    def op_matmul(self, x: Array, y: Array) -> Array:
        """Product of batches of matrices."""
        (m, k), n = x.shape[-2:], y.shape[-1]
        lead = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        lefts = self.ca.horzsplit(self.ca.reshape(self.spread(x, [*lead, m, k]).column, k, -1), m)
        rights = self.ca.horzsplit(self.ca.reshape(self.spread(y, [*lead, k, n]).column, n, -1), k)
        products = [self.ca.vec(self.ca.mtimes(b, a)) for a, b in zip(lefts, rights, strict=True)]
        return Array(self.ca.vertcat(*products), (*lead, m, n))

    op_bmm = op_mm = op_matmul

    def op_addmm(self, bias: Array, x: Array, y: Array) -> Array:
        return self.affine(self.op_matmul(x, y), bias)

    def op_scaled_dot_product_attention(self, q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        turned = self.move(torch.Tensor.transpose, (k, -2, -1))
        scores = self.map(lambda a: a / math.sqrt(q.shape[-1]), self.op_matmul(q, turned))
        return self.op_matmul(self.op_softmax(self.affine(scores, mask), -1), v)

    def op_layer_norm(
        self, x: Array, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
    ) -> Array:
        dims = list(range(-len(shape), 0))
        apart = self.map(operator.sub, x, self.op_mean(x, dims, True))
        var = self.op_mean(self.map(lambda a: a * a, apart), dims, True)
        out = self.map(lambda a, v: a / self.ca.sqrt(v + eps), apart, var)
        return self.affine(out, bias, weight)

    def op_native_batch_norm_legit_no_training(
        self, x: Array, weight: Any, bias: Any, mean: Array, var: Array, _: float, eps: float
    ) -> list[Array]:
        over = (1, -1, *[1] * (len(x.shape) - 2))  # channels are the second dimension
        mean, var, weight, bias = (p and self.move(torch.Tensor.view, (p, over)) for p in (mean, var, weight, bias))
        out = self.map(lambda a, m, v: (a - m) / self.ca.sqrt(v + eps), x, mean, var)
        return [self.affine(out, bias, weight)]

    def affine(self, x: Array, bias: Array | None, weight: Array | None = None) -> Array:
        out = x if weight is None else self.map(operator.mul, x, weight)
        return out if bias is None else self.map(operator.add, out, bias)

    def op_cdist(self, x: Array, y: Array, p: float = 2.0, *_: Any) -> Array:
        if p != 2.0:
            raise InputError(
                f"the backbone uses torch.cdist with p={p}: only Euclidean distances have an expression here"
            )
        a, b = (self.move(torch.Tensor.unsqueeze, (each, dim)) for each, dim in ((x, -2), (y, -3)))
        return self.map(self.ca.sqrt, self.op_sum(self.map(lambda x, y: (x - y) * (x - y), a, b), -1))
