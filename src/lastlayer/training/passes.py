"""Passes through a stack of MLPs, written out: moments of its rows, and gradients from them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.networks.mlp import InputSkip, StackedMLP, parts_of

ROWS_PER_SUM = 1_024
"""Rows whose products are summed in the networks' type."""


class Tanh:
    """Tanh in place, as 2 sigmoid(2z) - 1: a third of the time, and factors and shift are those of the weights."""

    factor, scale, shift = 2.0, 2.0, -1.0
    out: Tensor

    def forward(self, z: Tensor) -> Tensor:
        self.out = z.sigmoid_()
        return self.out

    def backward(self, g: Tensor) -> Tensor:
        """Backpropagate a gradient, up to factor and scale."""
        return torch.ops.aten.sigmoid_backward.grad_input(g, self.out, grad_input=g)


class SiLU:
    factor, scale, shift = 1.0, 1.0, 0.0
    out: Tensor

    def forward(self, z: Tensor) -> Tensor:
        self.z, self.out = z, nn.functional.silu(z)
        return self.out

    def backward(self, g: Tensor) -> Tensor:
        return torch.ops.aten.silu_backward.grad_input(g, self.z, grad_input=g)


class Elementwise:
    """Any other activation, by autograd."""

    factor, scale, shift = 1.0, 1.0, 0.0
    out: Tensor

    def __init__(self, activation: nn.Module) -> None:
        self.activation = activation

    def forward(self, z: Tensor) -> Tensor:
        with torch.enable_grad():
            self.z = z.detach().requires_grad_()
            self.graph = self.activation(self.z)
        self.out = self.graph.detach()
        return self.out

    def backward(self, g: Tensor) -> Tensor:
        return torch.autograd.grad(self.graph, self.z, g)[0]


class StackPass:
    """Passes through a stack of MLPs, with or without `InputSkip`: moments of their rows, and gradients from them."""

    def __init__(self, network: nn.Module, n_rows: int, n_outputs: int) -> None:
        """Allocate buffers for `n_rows` rows of each network."""
        stack, self.encoding, scale = parts_of(network)
        assert isinstance(stack, StackedMLP)
        self.stack, first = stack, stack.weights[0]
        passed = 0 if not isinstance(network, InputSkip) else first.shape[1] if scale is None else scale.shape[-1]
        widths = [W.shape[-1] for W in stack.weights]
        self.width = widths[-1]
        buffer = lambda *shape: torch.zeros(len(first), *shape, dtype=first.dtype, device=first.device)
        self.layers, self.slopes = ([buffer(n_rows, width) for width in widths] for _ in range(2))
        self.rows = buffer(n_rows, self.width + passed + n_outputs + 1)
        """[features - centre, inputs passed on, targets, 1], times the root of the weights of the rows."""
        self.centre = buffer(self.rows.shape[-1] - 1)
        """Approximate means of the features, subtracted so that products keep their digits; zero in other columns."""
        self.gradients = [torch.zeros_like(p) for p in (*stack.weights, *stack.biases)]
        passes: dict[type[nn.Module], Callable[[], Tanh | SiLU]] = {nn.Tanh: Tanh, nn.SiLU: SiLU}
        act = stack.activation
        self.activations = [passes[type(act)]() if type(act) in passes else Elementwise(act) for _ in widths]

    def load(self, X: Float[Tensor, "s n d"], fixed: Float[Tensor, "s n c"], weight: Tensor | None) -> None:
        """Set the rows: inputs, columns that no parameter changes, and weights, which may differ from 1 at the end."""
        self.inputs = X if self.encoding is None else self.encoding(X)
        self.rows[..., self.width :] = fixed
        self.root, self.first = None, len(self.rows[0])
        if weight is not None:
            self.root = weight.to(self.rows.dtype).sqrt()[..., None]
            self.first = int((self.root[..., 0] == 1).all(0).cumprod(0).sum())
            self.rows[:, self.first :, self.width :] *= self.root[:, self.first :]

    def features(self, inputs: Float[Tensor, "s n i"], layers: Sequence[Tensor] | None = None) -> Tensor:
        """Outputs of the last layer's activation, of which the features are `scale` times plus `shift`."""
        a, scale, shift = inputs, 1.0, 0.0
        for i, (W, b, act) in enumerate(zip(self.stack.weights, self.stack.biases, self.activations, strict=True)):
            b = b + shift * W.sum(1, keepdim=True) if shift else b
            out = None if layers is None else layers[i]
            a = act.forward(torch.baddbmm(act.factor * b, a, (act.factor * scale) * W, out=out))
            scale, shift = act.scale, act.shift
        return a

    def moments(
        self,
        precision: Float[Tensor, "s n q"] | None = None,
        *,
        exact: bool,
        refresh: Callable[[], object] | None = None,
    ) -> Float[Tensor, "*s c c"]:
        """Products of the columns summed over the rows, for each output if each reading has a precision of its own.

        `refresh` may change the precision in place, once the rows are set.
        """
        act, h = self.activations[-1], self.width
        a = self.features(self.inputs, self.layers)
        torch.add(act.shift - self.centre[:, None, :h], a, alpha=act.scale, out=self.rows[..., :h])
        if self.root is not None:
            self.rows[:, self.first :, :h] *= self.root[:, self.first :]
        if refresh is not None:
            refresh()
        totals: list[Any] = []
        for each in [None] if precision is None else precision.split(1, -1):
            totals.append(0.0)
            for i in range(0, self.rows.shape[1], ROWS_PER_SUM):
                rows = self.rows[:, i : i + ROWS_PER_SUM]
                rows = rows.double() if exact else rows
                weighted = rows if each is None else rows * each[:, i : i + ROWS_PER_SUM].to(rows)
                totals[-1] = totals[-1] + torch.bmm(weighted.mT, rows).double()
        return totals[0] if precision is None else torch.stack(totals, 1)

    def backward(self, slopes: Float[Tensor, "*s c h"], precision: Float[Tensor, "s n q"] | None = None) -> None:
        """Compute the gradients, given the maps from a row to the gradient in its features."""
        n, slopes = len(self.layers), slopes.to(self.rows.dtype)
        g = torch.bmm(self.rows, slopes if precision is None else slopes[:, 0], out=self.slopes[-1])
        if precision is not None:
            g *= precision[..., :1]
            for j in range(1, precision.shape[-1]):
                g.addcmul_(torch.bmm(self.rows, slopes[:, j]), precision[..., j : j + 1])
        if self.root is not None:
            g[:, self.first :] *= self.root[:, self.first :]
        for i in reversed(range(n)):
            act = self.activations[i]
            g, c = act.backward(g), act.factor * act.scale
            bias = torch.sum(g, 1, keepdim=True, out=self.gradients[n + i]).mul_(c)
            if i:
                below = self.activations[i - 1]
                torch.baddbmm(bias, below.out.mT, g, beta=below.shift, alpha=c * below.scale, out=self.gradients[i])
                g = torch.bmm(g, c * self.stack.weights[i].mT, out=self.slopes[i - 1])
            else:
                torch.bmm(self.inputs.mT, g, out=self.gradients[0]).mul_(c)
