"""A stack of built-in networks by the profiled evidence: `FullBatch` and `MiniBatches` with explicit passes."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer._internal.numbers import TINY
from lastlayer.bayes.statistics import Statistics
from lastlayer.data.rows import Points
from lastlayer.networks.mlp import InputSkip, StackedMLP, neg_log_hidden_prior, parts_of
from lastlayer.training.bound import FrozenLayer
from lastlayer.training.engine import Problem
from lastlayer.training.objectives import Profiled
from lastlayer.training.problems import STACK_CHECK, MiniBatches


class StackPass:
    """Moments of features, and backpropagation of their gradient, for a stack of MLPs with or without `InputSkip`."""

    def __init__(self, network: nn.Module, n_rows: int, n_outputs: int) -> None:
        """Allocate buffers for at most `n_rows` rows at a time."""
        stack, self.encoding, self.scale = parts_of(network)
        assert isinstance(stack, StackedMLP)
        self.stack, self.skips, self.n_outputs = stack, isinstance(network, InputSkip), n_outputs
        first = stack.weights[0]
        s, d = len(first), first.shape[1] if self.scale is None else self.scale.shape[-1]
        widths = [W.shape[-1] for W in stack.weights]
        self.width = widths[-1]
        columns = self.width + d * self.skips + n_outputs + 1

        def buffer(*shape: int, like: torch.dtype = first.dtype) -> Tensor:
            return torch.zeros(s, *shape, dtype=like, device=first.device)

        self.layers, self.slopes = ([buffer(n_rows, width) for width in widths] for _ in range(2))
        self.rows, self.exact = buffer(n_rows, columns), buffer(n_rows, columns, like=torch.float64)
        self.moments = buffer(columns, columns, like=torch.float64)
        self.products = buffer(self.width, columns, like=torch.float64)
        self.centre = buffer(columns - 1)
        """Approximate means of the features, subtracted before products are taken; zero in the other columns."""
        self.gradients = [torch.zeros_like(p) for p in (*stack.weights, *stack.biases)]
        """Gradients in the order of the stack's parameters."""
        tanh = isinstance(stack.activation, nn.Tanh)
        self.activations = [Tanh() if tanh else Elementwise(stack.activation) for _ in widths]

    def load(self, X: Float[Tensor, "*s r d"], T: Float[Tensor, "*s r q"], weight: Tensor | None) -> None:
        """Set the rows: shared by all networks of the stack, or separate for each."""
        h, r = self.width, X.shape[-2]
        inputs = X.to(self.rows.dtype) if self.encoding is None else self.encoding(X.to(self.rows.dtype))
        self.n_rows, self.inputs = r, inputs.expand(len(self.rows), r, inputs.shape[-1])
        self.root = None if weight is None else weight.to(self.rows.dtype).sqrt()[..., None]
        passed = X if self.scale is None else X * self.scale
        fixed = torch.cat([*([passed] if self.skips else []), T, torch.ones_like(T[..., :1])], dim=-1)
        exact = self.exact[:, :r, h:]
        exact.copy_(fixed if weight is None else fixed * weight.sqrt()[..., None])
        self.rows[:, :r, h:] = exact
        torch.bmm(exact.mT, exact, out=self.moments[:, h:, h:])

    def statistics(self) -> Statistics:
        """Run the forward pass and return the statistics, which are valid until the next one."""
        a, h, r = self.inputs, self.width, self.n_rows
        for W, b, out, act in zip(self.stack.weights, self.stack.biases, self.layers, self.activations, strict=True):
            a = act.forward(torch.baddbmm(b, a, W, out=out[:, :r]))
        features = torch.sub(a, self.centre[:, None, :h], out=self.rows[:, :r, :h])
        if self.root is not None:
            features *= self.root
        exact, M = self.exact[:, :r], self.moments
        exact[..., :h] = features
        M[:, :h] = torch.bmm(exact[..., :h].mT, exact, out=self.products)
        M[:, h:, :h] = M[:, :h, h:].mT
        count = M[:, -1, -1]
        rest = M[:, :-1, -1] / count.clamp_min(TINY)[:, None]
        scatter = torch.baddbmm(M[:, :-1, :-1], M[:, :-1, -1:], rest[:, None], alpha=-1)
        energy = scatter.diagonal(dim1=-2, dim2=-1)
        return Statistics(count.clone(), self.centre.double() + rest, scatter, energy, self.n_outputs)

    def backward(self, frozen: FrozenLayer, scale: float = 1.0) -> None:
        """Compute the gradient for the rows of the last forward pass, each of which stands for `scale` rows."""
        r, n = self.n_rows, len(self.layers)
        slopes = frozen.gradient_map(self.centre.double(), self.width, scale).to(self.rows.dtype)
        g = torch.bmm(self.rows[:, :r], slopes, out=self.slopes[-1][:, :r])
        if self.root is not None:
            g *= self.root
        for i in reversed(range(n)):
            g = self.activations[i].backward(g)
            below = self.activations[i - 1].out if i else self.inputs
            torch.bmm(below.mT, g, out=self.gradients[i])
            torch.sum(g, 1, keepdim=True, out=self.gradients[n + i])
            if i:
                g = torch.bmm(g, self.stack.weights[i].mT, out=self.slopes[i - 1][:, :r])

    def follow(self, statistics: Statistics) -> None:
        """Set the centre to the present mean of the features."""
        self.centre[:, : self.width] = statistics.mean[:, : self.width]


class StackedNetworks(Problem):
    """MLPs of one shape, each with its own rows: X (s, m, d), T (s, m, q), weights (s, m), zero for padding."""

    check_every = STACK_CHECK

    def __init__(
        self, network: nn.Module, objective: Profiled, data: Points, *, prior_precision: Float[Tensor, " s"]
    ) -> None:
        super().__init__(nn.ModuleList([network, objective]), objective.log_alpha.shape)
        m, q = data.T.shape[-2:]
        self.network, self.objective = network, objective
        self.rows = StackPass(network, m, q)
        with torch.no_grad():
            self.rows.load(data.X, data.T, data.weight)
        self.prior_share = prior_precision.double() / self.rows.moments[:, -1, -1]
        self.with_prior = bool((prior_precision > 0).any())
        self.multiplications = 3 * m * sum(p.numel() for p in self.parameters)
        self.gradients = [*self.rows.gradients, torch.zeros_like(objective.log_alpha)]
        self.step = Replayed(self._step, data.X.device)

    def gradient(self, batch: Any, speed: float) -> Float[Tensor, " s"]:
        """Compute the gradient of NLML and penalty, and return the NLML."""
        nlml = self.step()
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            p.grad = gradient
        return nlml

    def _step(self) -> Float[Tensor, " s"]:
        with torch.no_grad():
            statistics, frozen = self._last_layers()
            self.rows.backward(frozen)
            self.rows.follow(statistics)
            self.gradients[-1].copy_(frozen.log_alpha_slope)
            nlml = frozen.nlml
        if self.with_prior:
            for gradient, own in zip(
                self.gradients, torch.autograd.grad(self.penalty().sum(), self.parameters[:-1]), strict=False
            ):
                gradient += own
        return nlml

    @torch.no_grad()
    def evaluate(self) -> Float[Tensor, " s"]:
        """NLML in the present state."""
        statistics, frozen = self._last_layers()
        return frozen.bound(statistics)

    def penalty(self) -> Float[Tensor, " s"]:
        """Negative log prior of the hidden weights, per sample."""
        return self.prior_share * neg_log_hidden_prior(self.network)

    @property
    def log_alpha(self) -> Tensor:
        """Present log alpha of each network."""
        return self.objective.log_alpha

    def _last_layers(self) -> tuple[Statistics, FrozenLayer]:
        """Statistics and last layers at their optimum for the present features."""
        statistics, o = self.rows.statistics(), self.objective
        return statistics, FrozenLayer.of(statistics, o.log_alpha.detach(), noise=o.noise, bias_prior=o.bias_prior)


class StackedBatches(MiniBatches):
    """A stack on mini-batches shared by all networks; weights (s, m) assign rows to networks."""

    rows: StackPass | None = None

    def gradient(self, batch: Any, speed: float) -> Float[Tensor, " s"]:
        """Compute the gradient of the bound on a batch, and return the bound."""
        if self.rows is None:
            self.rows = StackPass(self.network, self.batch_size, batch.T.shape[-1])
        with torch.no_grad():
            if self.running.snapshot is not None:
                self.rows.follow(self.running.snapshot.statistics)
            self.rows.load(batch.X, batch.T, batch.weight)
            part = self.rows.statistics()
            frozen = self.running.absorb(part, len(batch.X), drift=speed)
            self.rows.backward(frozen, self.running.n_rows / len(batch.X))
        for p, gradient in zip(self.parameters, self.rows.gradients, strict=True):
            p.grad = gradient
        if self.with_prior:
            (self.prior * neg_log_hidden_prior(self.network)).sum().backward()
        return frozen.bound(part.weighing(self.running.count))


class Replayed:
    """A function without arguments that works in its own memory, replayed as a CUDA graph on a GPU."""

    def __init__(self, function: Callable[[], Tensor], device: torch.device) -> None:
        self.function, self.on_gpu = function, device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> Tensor:
        if not self.on_gpu:
            return self.function()
        if self.graph is None:
            self.graph = self._recorded()
        self.graph.replay()
        return self.result

    def _recorded(self) -> torch.cuda.CUDAGraph:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries are initialised at first use, which cannot be recorded
            for _ in range(3):
                self.function()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.result = self.function()
        return graph


class Tanh:
    """Tanh, in place."""

    out: Tensor

    def forward(self, z: Tensor) -> Tensor:
        """Apply the activation."""
        if z.dtype == torch.float32 and z.device.type == "cpu":  # accurate enough for training, in a third of the time
            self.out = z.mul_(2).sigmoid_().mul_(2).sub_(1)
        else:
            self.out = z.tanh_()
        return self.out

    def backward(self, g: Tensor) -> Tensor:
        """Backpropagate a gradient."""
        return torch.ops.aten.tanh_backward.grad_input(g, self.out, grad_input=g)


class Elementwise:
    """Any other activation, by autograd."""

    out: Tensor

    def __init__(self, activation: nn.Module) -> None:
        self.activation = activation

    def forward(self, z: Tensor) -> Tensor:
        """Apply the activation."""
        with torch.enable_grad():
            self.z = z.detach().requires_grad_()
            self.graph = self.activation(self.z)
        self.out = self.graph.detach()
        return self.out

    def backward(self, g: Tensor) -> Tensor:
        """Backpropagate a gradient."""
        return torch.autograd.grad(self.graph, self.z, g)[0]
