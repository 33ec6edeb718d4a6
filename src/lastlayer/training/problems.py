"""Problems for the training engine: networks on all rows at every step, whole or in chunks, or on mini-batches."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer._internal.work import CHUNK_ROWS, SMALL_STEP
from lastlayer.bayes.features import affine_features
from lastlayer.bayes.held_out import held_out_lpd
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Statistics
from lastlayer.data.distributed import ONE, ProcessGroup
from lastlayer.data.rows import Batch, Points, Rows
from lastlayer.data.sources import Source
from lastlayer.errors import InputError
from lastlayer.networks.mlp import neg_log_hidden_prior
from lastlayer.training.bound import FrozenLayer
from lastlayer.training.engine import Problem, TrainingHistory
from lastlayer.training.objectives import Objective, Profiled
from lastlayer.training.running_posterior import RunningPosterior, Snapshot
from lastlayer.training.sites import stand_in

STACK_CHECK, BATCH_CHECK = 25, 100
"""Steps between two checks for finite values, for stacks and for mini-batches."""
SITES_EVERY, START_ROUNDS = 5, 10
"""Steps between the sites of a likelihood for the same rows, and rounds in the first of them."""


class FullBatch(Problem):
    """One network, or a stack, trained by an objective of all rows.

    Parameters
    ----------
    network, objective : Module, Objective
        What is trained.
    rows : Rows
        Standardised rows; with several processes, those of this one.
    prior_precision : float or Tensor, default 0
        Of the hidden weights: -log p / m is added to the loss.
    chunk_size : int, optional
        Rows in memory at a time, with the same gradient.
    process_group : ProcessGroup
        The processes that share the rows.
    """

    def __init__(
        self,
        network: nn.Module,
        objective: Objective,
        rows: Rows,
        *,
        prior_precision: float | Tensor = 0.0,
        chunk_size: int | None = None,
        process_group: ProcessGroup = ONE,
    ) -> None:
        super().__init__(nn.ModuleList([network, objective]), objective.log_alpha.shape)
        self.network, self.objective, self.process_group = network, objective, process_group
        self.log_alpha = objective.log_alpha
        self.check_every = STACK_CHECK if self.shape else 1
        main, T = rows.main, rows.main.readings.t
        readings = replace(main.readings, t=T.expand(*self.shape, *T.shape[-2:]))
        self.rows, self.updates = replace(rows, main=replace(main, readings=readings)), 0
        self.chunk_size = len(main.X) if chunk_size is None and process_group.world_size > 1 else chunk_size
        count = T.new_tensor(len(main.X)) if main.weight is None else main.weight.sum(-1)
        precision = torch.as_tensor(prior_precision, dtype=torch.float64, device=T.device)
        self.prior_share = precision / process_group.sum_(count.double())
        self.with_prior = bool((precision > 0).any()) and any(True for _ in network.parameters())
        # on a table each weight is used about three times per row; other inputs may reuse weights
        work = 3 * len(main.X) * sum(p.numel() for p in self.parameters)
        self.multiplications = work if main.X.dim() == 2 else SMALL_STEP

    def gradient(self, batch: Any, speed: float) -> Float[Tensor, "*s"]:
        """Add the gradient of NLML and penalty to the parameters, and return the NLML.

        Parameters
        ----------
        batch, speed : object, float
            Not used here.
        """
        if self.chunk_size is not None:
            nlml = chunked_nlml(
                self.network, self.objective, self.rows.main, self.chunk_size, process_group=self.process_group
            )
            if self.with_prior:
                self.penalty().sum().backward()
            return nlml / self.process_group.world_size
        if self.rows.likelihood.iterated:
            if self.updates % SITES_EVERY == 0:
                self._stand_in(rounds=START_ROUNDS if self.updates == 0 else 1)
            self.updates += 1
        nlml = self.evaluate()
        (nlml + self.penalty() if self.with_prior else nlml).sum().backward()
        return nlml

    @torch.no_grad()
    def _stand_in(self, rounds: int) -> None:
        """Replace the readings by their sites under the last layer of the present network."""
        rows, log_alpha = self.rows, float(self.log_alpha)
        prior = self.objective.bias_prior
        phi = self.network(rows.main.X)
        main = stand_in(rows.likelihood, rows.main, phi, log_alpha, bias_prior=prior, rounds=rounds)
        self.rows = replace(rows, main=main)

    def evaluate(self) -> Float[Tensor, "*s"]:
        """NLML in the present state."""
        if self.chunk_size is None:
            return self.objective.of_rows(self.network, self.rows)
        return chunked_nlml(
            self.network,
            self.objective,
            self.rows.main,
            self.chunk_size,
            process_group=self.process_group,
            backward=False,
        )

    def held_out_score(self, held: Points) -> Float[Tensor, ""]:
        rest, likelihood = self.rows.main, self.rows.likelihood
        phi, phi_held = self.network(rest.X), self.network(held.X)
        if not likelihood.iterated:
            return self.objective.held_out_score(phi, rest, phi_held, held)
        statistics = Statistics.of(phi.double(), rest.readings, weight=rest.weight)
        posterior = Posterior(statistics, float(self.log_alpha), bias_prior=self.objective.bias_prior, checked=False)
        found = posterior.predict(affine_features(phi_held).double())
        noise = found.noise_cov.diagonal()
        of = (held.readings.values, found.mean, found.variance_ratio * noise, noise)
        return torch.tensor(-likelihood.log_density(*(x.numpy(force=True) for x in of)).mean())

    def penalty(self) -> Float[Tensor, "*s"]:
        """Negative log prior of the hidden weights, per sample."""
        if not self.with_prior:
            return super().penalty()
        return self.prior_share * neg_log_hidden_prior(self.network)


class SampledRows(FullBatch):
    """Full-batch objectives on mini-batches, each with its own last layer, as if its rows stood for all."""

    def __init__(
        self, network: nn.Module, objective: Objective, rows: Rows, *, batch_size: int, seed: int, **more: Any
    ) -> None:
        super().__init__(network, objective, rows, **more)
        self.seed, self.n_rows = seed, rows.main.T.shape[-2]
        self.n_steps = -(-self.n_rows // batch_size)

    def steps(self, epoch: int, first: int) -> Iterator[Tensor]:
        """Yield batches of nearly equal size, in a new order in every epoch."""
        if self.rows.likelihood.iterated:
            self._stand_in(rounds=START_ROUNDS if epoch == 0 else 1)
        generator = torch.Generator().manual_seed((self.seed + 1_000_003 * epoch) % 2**63)
        order = torch.randperm(self.n_rows, generator=generator).to(self.rows.main.X.device)
        yield from order.tensor_split(self.n_steps)[first:]

    def gradient(self, batch: Any, speed: float) -> Float[Tensor, "*s"]:
        """Add the gradient on a batch to the parameters, and return its NLML."""
        nlml = self.objective.of_rows(self.network, self.rows.sampled(batch))
        (nlml + self.penalty() if self.with_prior else nlml).sum().backward()
        return nlml


class MiniBatches(Problem):
    """One network, or a stack, trained by the bound of a running posterior; no step waits for the device.

    Rows are standardised, in the type and on the device of the network. The running posterior ends as the average of
    the last batches.

    Parameters
    ----------
    network, source : Module, Source
        What is trained, and its rows.
    running : RunningPosterior
        Last layer during training.
    batch_size, seed : int
        Rows per step, and the seed of their order.
    prior_precision : float or Tensor, default 0
        Of the hidden weights.
    is_table : bool, default True
        Whether inputs are rows of a table, each of which uses a weight once.
    """

    check_every = BATCH_CHECK

    def __init__(
        self,
        network: nn.Module,
        source: Source,
        running: RunningPosterior,
        *,
        batch_size: int,
        seed: int = 0,
        prior_precision: float | Tensor = 0.0,
        is_table: bool = True,
    ) -> None:
        super().__init__(network, running.count.shape, [p for p in network.parameters() if p.requires_grad])
        self.network, self.source, self.running, self.batch_size, self.seed = network, source, running, batch_size, seed
        self.process_group = running.process_group
        self.n_steps = max(1, -(-running.n_rows // batch_size))
        self.prior = torch.as_tensor(prior_precision, dtype=torch.float64, device=running.count.device) / running.count
        self.with_prior = bool((self.prior > 0).any())
        work = 3 * batch_size * sum(p.numel() for p in self.parameters)
        self.multiplications = work if is_table else SMALL_STEP  # other inputs may reuse weights

    def steps(self, epoch: int, first: int) -> Iterator[Batch]:
        """Yield batches, in a new order in every epoch.

        Parameters
        ----------
        epoch, first : int
            Number of the epoch, and of its first step.
        """
        seed = (self.seed + 1_000_003 * epoch) % 2**63
        return self.source.batches(self.batch_size, seed=seed, first=first, process_group=self.process_group)

    def gradient(self, batch: Any, speed: float) -> Float[Tensor, "*s"]:
        """Add the gradient of the bound on a batch to the parameters, and return the bound.

        Parameters
        ----------
        batch, speed : Points, float
            The batch, and the learning rate over its initial value.
        """
        phi = self.network(batch.X)
        with torch.no_grad():
            rows = self.running.step(phi.detach(), batch.T, batch.weight, total=batch.total, drift=speed)
        if phi.requires_grad:
            phi.backward(rows.gradient)
        self.process_group.sum_gradients(self.parameters)
        if self.with_prior:
            (self.prior * neg_log_hidden_prior(self.network)).sum().backward()
        return self.running.now.frozen.offset / self.process_group.world_size + rows.loss

    def evaluate(self) -> Float[Tensor, "*s"]:
        """Return zeros: mini-batch training is checked by its parameters only."""
        return torch.zeros_like(self.running.count)

    def held_out_score(self, held: Points) -> Float[Tensor, ""]:
        Phi = affine_features(self.network(held.float().X)).double()
        return torch.tensor(-held_out_lpd(self.running.posterior(), Phi, held.T))

    def gap(self, history: TrainingHistory) -> float | None:
        """Distance of the last bound from the evidence; None if the running posterior is not that of the network.

        Parameters
        ----------
        history : TrainingHistory
            What training kept.
        """
        if history.best_epoch != len(history.nlml) or self.running.snapshot is None:
            return None
        return float(self.running.gap(streamed_statistics(self.network, self.source.batches(CHUNK_ROWS))).nanmean())

    @property
    def log_alpha(self) -> Tensor:  # type: ignore[override]
        """Present log alpha of the running posterior."""
        return self.running.now.log_alpha

    def memory(self) -> dict[str, Tensor]:
        """State of the running posterior."""
        kept = {} if self.running.snapshot is None else self.running.snapshot.tensors()
        return {**kept, "updates": torch.tensor(self.running.steps)}

    def remember(self, tensors: dict[str, Tensor]) -> None:
        """Restore the running posterior.

        Parameters
        ----------
        tensors : dict of Tensor
            What `memory` returned.
        """
        self.running.steps = int(tensors["updates"])
        if "log_alpha" in tensors:
            self.running.snapshot = Snapshot.of(tensors, self.running.bias_prior)


def chunked_nlml(
    network: nn.Module,
    objective: Objective,
    data: Points,
    size: int,
    *,
    process_group: ProcessGroup = ONE,
    backward: bool = True,
) -> Float[Tensor, ""]:
    """Profiled NLML; with `backward`, its gradient is added to the parameters of network and objective."""
    if not isinstance(objective, Profiled):
        name = type(objective).__name__.lower()
        raise InputError(f'chunk_size needs objective="profiled", whose gradient splits into rows, not "{name}"')
    statistics = streamed_statistics(network, data.chunks(size), process_group=process_group)
    frozen = FrozenLayer.of(
        statistics, objective.log_alpha.detach(), noise=objective.noise, bias_prior=objective.bias_prior
    )
    if backward:
        for part in data.chunks(size):
            phi = network(part.X)
            phi.backward(frozen.rows(phi.detach(), part.T, part.weight).gradient)
        process_group.sum_gradients([p for p in network.parameters() if p.requires_grad])
        slope, so_far = frozen.log_alpha_slope, objective.log_alpha.grad
        objective.log_alpha.grad = slope if so_far is None else so_far + slope
    return frozen.bound(statistics)


def streamed_statistics(
    network: nn.Module, parts: Iterable[Points], *, process_group: ProcessGroup = ONE
) -> Statistics:
    """Exact statistics of the network's features over the rows of all processes, with one part in memory at a time."""
    total: Statistics | None = None
    with torch.no_grad():
        for part in parts:
            more = Statistics.from_linear_features(network(part.X), part.T, sample_weight=part.weight)
            total = more if total is None else total + more
    if total is None:
        raise InputError("there are no rows: the source of data yielded no batch")
    return process_group.reduce(total)
