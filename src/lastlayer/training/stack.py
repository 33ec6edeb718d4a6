"""Stacks of built-in networks by the profiled evidence, with passes written out: gradients, last layers and batches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from torch import Tensor, nn

from lastlayer.bayes.precision import ROUNDING, Cholesky
from lastlayer.bayes.statistics import Readings, Statistics, log_scales
from lastlayer.data.rows import Points
from lastlayer.likelihoods.base import Likelihood
from lastlayer.networks.mlp import InputSkip, StackedMLP, parts_of
from lastlayer.settings.types import BiasPrior, NoiseStructure
from lastlayer.training.bound import FrozenLayer
from lastlayer.training.engine import Problem
from lastlayer.training.objectives import INITIAL_LOG_ALPHA, INITIAL_LOG_SIGMA_E
from lastlayer.training.passes import StackPass
from lastlayer.training.running_posterior import SCHEDULE, effective_after, share_of, tensors_of
from lastlayer.training.sites import LEAST

STACK_CHECK = 25
"""Steps between two checks for finite values."""
LEAST_RIDGE, LEAST_NOISE = 30.0, 1e-4
"""Least alpha^-1 over the resolution of moments in float32, and noise variance over that of the targets, for which
float32 is enough: below them, products of features are taken in float64."""
LEAST_LEARNED = 1e-12
"""Least learned noise variance beside known ones, for standardised targets."""
MOST_WATCHED = 400
"""Most rows of each network by which its training is watched."""
SITES_EVERY, OUTLYING = 5, 10.0
"""Steps between the sites of a likelihood for the same rows, after the first ones; limit of the squared errors by which
its training is watched, over their median."""


class StackedNetworks(Problem):
    """MLPs of one shape, each on its own rows of a table: all of them in every step, or mini-batches.

    In every step the last layer of each network is at its optimum: for all rows, or for a running average over batches.
    Outputs have moments of their own where targets are missing or some noise is known.

    Parameters
    ----------
    network : Module
        A `StackedMLP`, perhaps with encoded inputs and with inputs passed on.
    data : Points
        Rows of the table.
    parts, watched : sequence of ndarray
        Rows on which each network is trained, and rows by which its training is watched.
    prior_precision : Tensor of shape (s,)
        Of the hidden weights.
    noise, bias_prior : str
        Structure of the noise, and prior of the bias.
    batch_size, seed : int
        Rows of each network per step, and the seed of their order. None: all rows.
    likelihood : Likelihood, optional
        Replaces the readings by sites. None: they stay the same.
    """

    check_every = STACK_CHECK

    def __init__(
        self,
        network: nn.Module,
        data: Points,
        parts: Sequence[Int[ndarray, "_"]],
        *,
        prior_precision: Float[Tensor, " s"],
        watched: Sequence[Int[ndarray, "_"]] = (),
        noise: NoiseStructure = "diagonal",
        bias_prior: BiasPrior = "flat",
        batch_size: int | None = None,
        seed: int = 0,
        likelihood: Likelihood | None = None,
    ) -> None:
        stack, _, scale = parts_of(network)
        assert isinstance(stack, StackedMLP)
        super().__init__(network, torch.Size([len(parts)]), [*stack.weights, *stack.biases])
        self.network, self.noise, self.bias_prior, self.seed = network, noise, bias_prior, seed
        self.likelihood = likelihood
        device, dtype, self.n_outputs = data.X.device, stack.weights[0].dtype, data.readings.t.shape[-1]
        X, T = data.X.to(dtype), data.readings.t.to(dtype)
        passed = X[:, :0] if not isinstance(network, InputSkip) else X if scale is None else X * scale.reshape(-1)
        self.X, self.fixed, self.weight = X, torch.cat([passed, T, torch.ones_like(T[:, :1])], -1), data.weight
        readings = data.readings
        self.readings = None if readings.complete else readings.map(lambda x: x.expand_as(T))
        # each network takes as many of its rows in a step; shorter lists are filled up
        longest = max(map(len, parts))
        self.n_batches = 1 if batch_size is None else -(-longest // batch_size)
        n = -(-longest // self.n_batches)
        self.parts = [torch.from_numpy(part).to(device) for part in parts]
        weight = torch.ones_like(T[:, 0], dtype=torch.float64) if data.weight is None else data.weight.double()
        self.count = torch.stack([weight[part].sum() for part in self.parts])
        spread = lambda part: part[:: -(-len(part) // MOST_WATCHED)]  # rows are sorted by their inputs
        self.watched = [torch.from_numpy(spread(part)).to(device) for part in watched]
        self.passes = StackPass(network, n, self.n_outputs)
        # the prior of the hidden weights
        share = prior_precision.double().to(device) / self.count
        fans = [*(W.shape[-2] for W in stack.weights), *(1 for _ in stack.biases)]
        self.shares = [(share * fan).to(dtype)[:, None, None] for fan in fans] if bool((share > 0).any()) else []
        """Slopes of `neg_log_hidden_prior` per sample in each parameter, over the parameter; none without a prior."""
        # the last layers
        self.log_alpha = torch.full_like(self.count, INITIAL_LOG_ALPHA)
        self.noise_var = torch.full_like(T[:1], math.exp(2 * INITIAL_LOG_SIGMA_E), dtype=torch.float64).repeat(
            len(parts), 1
        )
        """Learned noise where some is known; otherwise it follows from the moments."""
        self.exact = dtype == torch.float64 or device.type == "cuda"
        self.frozen: FrozenLayer
        """Last layers of the last step."""
        self.running: list[Tensor] | None = None
        """Running averages over batches, times all rows."""
        self.updates, self.effective_rows, self.loaded = 0, 0.0, False
        self.nlml = torch.zeros_like(self.count)
        self.multiplications = 3 * n * sum(p.numel() for p in self.parameters)
        k, q = self.fixed.shape[-1] - self.n_outputs - 1 + self.passes.width, self.n_outputs
        self.columns = torch.tensor([[*range(k), k + j, k + q] for j in range(q)], device=device)
        """Columns of a row that belong to each output."""
        state = [self.log_alpha, self.noise_var, self.passes.centre]
        alike = device.type == "cuda" and likelihood is None
        self.step: Callable[[], Tensor] = Replayed(self._step, state) if alike else self._step

    def gradient(self, batch: Any, speed: float) -> Float[Tensor, " s"]:
        """Compute the gradient of NLML and penalty, and return the NLML."""
        if self.n_batches > 1 or not self.loaded:
            self._load()
        nlml = self._step(speed) if self.n_batches > 1 else self.step()
        for p, gradient in zip(self.parameters, self.passes.gradients, strict=True):
            p.grad = gradient
        self.updates += 1
        return nlml

    def evaluate(self) -> Float[Tensor, " s"]:
        """NLML before the last step: whether parameters are finite is checked beside it."""
        return self.nlml

    @torch.no_grad()
    def watch(self) -> float:
        """Mean log squared error of the networks for the rows that watch them, by the last layers of the last step."""
        rows, act = _filled(self.watched), self.passes.activations[-1]
        X = self.X[rows] if self.passes.encoding is None else self.passes.encoding(self.X[rows])
        fixed, k, q = self.fixed[rows], self.frozen.weights.shape[-2] - 1, self.n_outputs
        W = self.frozen.weights.to(X.dtype)
        W = W if self.readings is None else W[..., 0].mT
        phi = torch.cat([act.scale * self.passes.features(X) + act.shift, fixed[..., : -q - 1]], -1)
        squares = (fixed[..., -q - 1 : -1] - phi @ W[:, :k] - W[:, k:]).square()
        read = torch.ones_like(squares) if self.readings is None or (r := self.readings.read) is None else r[rows]
        if self.likelihood is not None:  # outliers hide what the networks learn
            squares = squares.minimum(OUTLYING * squares.flatten(1).median(1).values[:, None, None])
        errors = (squares * read).sum((1, 2)) / read.sum((1, 2)).clamp_min(1)
        return float(errors.clamp_min(1e-12).log().nanmean())  # without networks that are lost

    def memory(self) -> dict[str, Tensor]:
        """Alphas, noise, centre, and the running averages with the layer and the order of the rows."""
        numbers = {"updates": self.updates, "effective_rows": self.effective_rows, "exact": self.exact}
        kept = {"log_alpha": self.log_alpha, "noise_var": self.noise_var, "centre": self.passes.centre}
        kept |= {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
        if self.updates:
            kept |= {"order": self.order} | {f"frozen.{k}": v for k, v in tensors_of(self.frozen).items()}
        return kept | {f"running.{i}": x for i, x in enumerate(self.running or [])}

    def remember(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `memory` returned."""
        for name in ("log_alpha", "noise_var"):
            getattr(self, name).copy_(tensors[name])
        self.passes.centre.copy_(tensors["centre"])
        self.updates, self.exact = int(tensors["updates"]), bool(tensors["exact"])
        self.effective_rows = float(tensors["effective_rows"])
        if "order" in tensors:
            self.order = tensors["order"]
            own = {name.removeprefix("frozen."): v for name, v in tensors.items() if name.startswith("frozen.")}
            self.frozen = FrozenLayer(**own, bias_prior=self.bias_prior)
            self.running = [tensors[name] for name in sorted(tensors) if name.startswith("running.")] or None

    def _load(self) -> None:
        """Set the rows of the next step."""
        lengths = torch.tensor([len(part) for part in self.parts], device=self.X.device)
        n, longest, at = self.passes.rows.shape[1], int(lengths.max()), self.updates % self.n_batches
        if self.n_batches == 1:
            self.order = _filled(self.parts)
        elif not at:
            generator = torch.Generator().manual_seed((self.seed + 1_000_003 * self.updates) % 2**63)
            mixed = (part[torch.randperm(len(part), generator=generator).to(part.device)] for part in self.parts)
            self.order = _filled(list(mixed))
        index = self.order[:, min(at * n, longest - n) :][:, :n]
        weight = None if self.weight is None else self.weight[index]
        if self.n_batches == 1 and int(lengths.min()) < longest:
            used = (torch.arange(longest, device=index.device) < lengths[:, None]).double()
            weight = used if weight is None else used * weight
        self.batch_weight = torch.full_like(self.count, n) if weight is None else weight.double().sum(-1)
        of = lambda x: x.index_select(0, index.flatten()).unflatten(0, index.shape)  # twice as fast as x[index]
        self.own = None if self.readings is None else self.readings.map(of)
        self.passes.load(of(self.X), of(self.fixed), weight)
        self.loaded = True

    @torch.no_grad()
    def _step(self, speed: float = 1.0) -> Float[Tensor, " s"]:
        passes, own = self.passes, self.own
        precision = None
        if own is not None and (relative := own.precision(self.noise_var)) is not None:
            precision = relative.expand_as(own.t).to(passes.rows)
        refresh = None
        if self.likelihood is not None and precision is not None and self.updates:
            early = self.n_batches > 1 or self.updates < SCHEDULE.settle
            refresh = partial(self._stand_in, precision) if early or self.updates % SITES_EVERY == 0 else None
        statistics = self._statistics(passes.moments(precision, exact=self.exact, refresh=refresh), precision, speed)
        due = self.n_batches == 1 or self.updates < SCHEDULE.settle or self.updates % SCHEDULE.every == 0
        frozen = FrozenLayer.of(
            statistics,
            self.log_alpha if own is None else self.log_alpha[:, None],
            noise=self.noise,
            bias_prior=self.bias_prior,
            noise_cov=None if own is None or own.known is None else self.noise_var[..., None, None],
            logdet_from=None if due else self.frozen,
            seen=1.0 if self.n_batches == 1 else min(self.effective_rows / max(map(len, self.parts)), 1.0),
        )
        if not self.exact and bool(_coarse(statistics, frozen).any()):
            self.exact, self.running, self.updates = True, None, 0
            return self._step(speed)
        self.frozen = frozen
        passes.backward(self._slopes(frozen), precision)
        for gradient, share, p in zip(passes.gradients, self.shares, self.parameters, strict=bool(self.shares)):
            gradient.addcmul_(share, p)
        if own is not None and precision is not None and own.known is not None:
            self._learn_noise(frozen, own, precision)
        if due and (self.updates or self.n_batches == 1):
            self.log_alpha.copy_(frozen.next_log_alpha(self.log_alpha, by_output=own is not None))
            self._follow(statistics)
        nlml = frozen.nlml if own is None else (frozen.nlml * frozen.count).sum(-1) / self.count
        self.nlml = nlml
        return nlml

    def _statistics(self, moments: Float[Tensor, "*s c c"], precision: Tensor | None, speed: float) -> Statistics:
        """Statistics of all rows, from the moments of a step; of each output if readings have a precision."""
        sums, k, q = [moments], moments.shape[-1] - self.n_outputs - 1, self.n_outputs
        centre = self.passes.centre.double()
        if precision is not None:
            weight = torch.ones_like(precision) if self.passes.root is None else self.passes.root.square()
            logs = log_scales(precision.mT, weight.mT.expand_as(precision.mT))
            sums += [(weight * (precision > 0)).sum(1).double(), logs.double()]
        if self.n_batches > 1:
            over = lambda total, like: total.reshape(-1, *[1] * (like.dim() - 1))
            new = [x.mul_(over(self.count / self.batch_weight, x)) for x in sums]
            n, before = self.passes.rows.shape[1], self.running
            share = share_of(n, k, self.effective_rows, speed)
            self.effective_rows = float(n) if before is None else effective_after(self.effective_rows, share, n)
            for old, x in zip(before or (), new, strict=before is not None):
                fine = over(torch.isfinite(old.flatten(1).sum(1)), x)  # a network that was lost starts again
                old.copy_(torch.lerp(old, x, share) if bool(fine.all()) else torch.where(fine, old.lerp(x, share), x))
            sums = new if before is None else before
            self.running = sums
        moments, *counts = sums
        if not counts:
            return Statistics.of_moments(moments, centre, q, exact=self.exact)
        at, columns = torch.arange(q, device=moments.device), self.columns
        own = moments[:, at[:, None, None], columns[:, :, None], columns[:, None, :]]
        found = Statistics.of_moments(own, centre[:, None, : k + 1], 1, exact=self.exact)
        return replace(found, observations=counts[0], log_scale=counts[1], by_output=True)

    def _slopes(self, frozen: FrozenLayer) -> Float[Tensor, "*s c h"]:
        """Maps from a row to the gradient in its features, of each output if it has moments of its own."""
        share, centre, q = self.count / self.batch_weight, self.passes.centre.double(), self.n_outputs
        if self.own is None:
            return frozen.gradient_map(centre, self.passes.width, share)
        k = centre.shape[-1] - q
        scale = share[:, None] * frozen.count / self.count[:, None]
        each = frozen.gradient_map(centre[:, None, : k + 1].expand(-1, q, -1), self.passes.width, scale)
        slopes = each.new_zeros(len(each), q, k + q + 1, each.shape[-1])
        slopes[:, :, :k], slopes[:, :, -1] = each[:, :, :k], each[:, :, -1]
        for j in range(q):
            slopes[:, j, k + j] = each[:, j, k]
        return slopes

    def _stand_in(self, precision: Float[Tensor, "s n q"]) -> None:
        """Replace the readings by their sites under the last layers of the last step."""
        own, frozen, likelihood, root = self.own, self.frozen, self.likelihood, self.passes.root
        assert own is not None
        assert likelihood is not None
        errors = [self._errors(frozen, j) for j in range(self.n_outputs)]
        errors = errors if root is None else [(x / root.double()).nan_to_num(0.0, 0.0, 0.0) for x in errors]
        ratio = torch.stack([x[..., 1:].square().sum(-1) for x in errors], -1) + 1 / frozen.count[:, None]
        noise = frozen.noise_cov[..., 0, 0][:, None].clamp_min(LEAST)
        residual = torch.stack([x[..., 0] for x in errors], -1)
        scale = likelihood.sites(own, own.t - residual, ratio * noise, noise).scale
        assert scale is not None
        scale = torch.where(scale.isnan(), 1.0, scale)  # of a network that is lost
        self.own = replace(own, scale=scale)
        precision.copy_(1 / scale)

    def _errors(self, frozen: FrozenLayer, j: int) -> Float[Tensor, "s n c"]:
        """Residuals of an output, and columns whose squares add up to the variance ratio without that of the bias."""
        k, rows, q = frozen.weights.shape[-2] - 1, self.passes.rows, self.n_outputs
        centre = self.passes.centre[:, :k].double()
        W, b = frozen.weights[:, j, :k], frozen.weights[:, j, k:]
        L = Cholesky.of(frozen.inverse[:, j, :k, :k]).L
        off = torch.cat([-centre[:, None] @ W - b, (centre - frozen.centre[:, j])[:, None] @ L], -1)
        maps = torch.cat([torch.cat([-W, L], -1), torch.zeros_like(off).expand(-1, q, -1), off], 1)
        maps[:, k + j, 0] = 1.0
        return (rows @ maps.to(rows)).double()

    def _learn_noise(self, frozen: FrozenLayer, own: Readings, precision: Float[Tensor, "s n q"]) -> None:
        """One step of expectation maximisation for the learned noise beside the known one."""
        assert own.known is not None
        scale = torch.ones_like(own.t) if own.scale is None else own.scale
        learns = (scale > 0) & torch.isfinite(scale)
        root = torch.ones_like(self.passes.rows[..., :1]) if self.passes.root is None else self.passes.root
        weight = root[..., 0].double().square()
        for j in range(self.n_outputs):
            W, inverse, errors = frozen.weights[:, j, :-1], frozen.inverse[:, j], self._errors(frozen, j).square()
            p, known, now = precision[..., j].double(), own.known[..., j], self.noise_var[:, j : j + 1]
            # E of a squared error of the function, of the learned part of the noise, and of the squared weights
            square = errors[..., 0] + now * (errors[..., 1:].sum(-1) + weight / frozen.count[:, j : j + 1])
            part = scale[..., j].nan_to_num(0.0, 0.0, 0.0) * p.square() * square + weight * known * p
            size = frozen.ridge[:, j] * (W.square().sum((1, 2)) + now[:, 0] * torch.linalg.diagonal(inverse).sum(-1))
            rows_here = self.batch_weight / self.count
            total = (part * learns[..., j]).sum(-1) + rows_here * size
            new = total / ((learns[..., j] * weight).sum(-1) + rows_here * inverse.shape[-1])
            self.noise_var[:, j] = torch.where(torch.isfinite(new), new.clamp_min(LEAST_LEARNED), now[:, 0])

    def _follow(self, statistics: Statistics) -> None:
        """Centre the features at their present means, which changes the running moments."""
        h, mean = self.passes.width, statistics.mean if self.own is None else statistics.mean[:, 0]
        step = torch.zeros_like(self.passes.centre, dtype=torch.float64)
        step[:, :h] = (mean[:, :h] - self.passes.centre[:, :h]).nan_to_num(0.0)
        self.passes.centre += step.to(self.passes.centre)
        if self.running is not None:
            step = torch.cat([step, torch.zeros_like(step[:, :1])], -1)
            M = self.running[0]
            step = step if self.own is None else step[:, None]
            last = M[..., -1]
            cross = step[..., :, None] * last[..., None, :]
            self.running[0] = M - cross - cross.mT + step[..., :, None] * step[..., None, :] * M[..., -1:, -1:]


def _coarse(statistics: Statistics, frozen: FrozenLayer) -> Bool[Tensor, "*s"]:
    """Whether moments in float32 are not enough for a last layer, or a factorisation failed."""
    energy, q = statistics.energy, statistics.n_outputs
    resolution = ROUNDING * energy[..., :-q].sum(-1)
    little = torch.linalg.diagonal(frozen.noise_cov) < LEAST_NOISE * energy[..., -q:] / statistics.n[..., None]
    return (frozen.ridge < LEAST_RIDGE * resolution) | little.any(-1) | ~torch.isfinite(frozen.logdet)


def _filled(parts: Sequence[Int[Tensor, "_"]]) -> Int[Tensor, "s n"]:
    """Lists of rows side by side; shorter ones start again."""
    longest = max(map(len, parts))
    return torch.stack([part.repeat(-(-longest // len(part)))[:longest] for part in parts])


class Replayed:
    """A function without arguments that works in its own memory, replayed as a CUDA graph."""

    def __init__(self, function: Callable[[], Tensor], state: list[Tensor]) -> None:
        self.function, self.state = function, state
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> Tensor:
        if self.graph is None:
            self.graph = self._recorded()
        self.graph.replay()
        return self.result

    def _recorded(self) -> torch.cuda.CUDAGraph:
        aside, before = torch.cuda.Stream(), [x.clone() for x in self.state]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries are initialised at first use, which cannot be recorded
            for _ in range(3):
                self.function()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.result = self.function()
        for x, kept in zip(self.state, before, strict=True):
            x.copy_(kept)
        return graph
