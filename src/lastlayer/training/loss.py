"""`BLLLoss`: the evidence as a loss for your own training loop, in one process or several."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.bayes.posterior import Posterior
from lastlayer.data.distributed import ProcessGroup
from lastlayer.errors import InputError, check_choice
from lastlayer.settings.types import BIAS_PRIORS, NOISE_STRUCTURES, BiasPrior, NoiseStructure
from lastlayer.training.bound import FrozenLayer
from lastlayer.training.running_posterior import RunningPosterior, Snapshot


class BLLLoss(nn.Module):
    """Loss of a mini-batch: an upper bound on the negative log marginal likelihood per sample.

    It is called with the features that a last layer would take, and the targets. The last layer itself is part of the
    loss, in the form of running statistics, and is not trained: its weights, noise and alpha follow in closed form. In
    training mode a call adds the batch to the statistics; in evaluation mode it only returns the bound for these rows.
    `state_dict` contains the statistics.

    With an initialised torch.distributed group, the statistics are those of all processes, and the mean of losses and
    gradients over processes, as DistributedDataParallel computes it, equals that of a single process with all rows: row
    i of the whole batch belongs to process i modulo their number, with as many rows on each.

    Parameters
    ----------
    n_rows : int
        Number of samples in one pass over the data, on all processes; sample weights average to one.
    noise : {"diagonal", "full"}, default "diagonal"
        Structure of the noise covariance between outputs.
    bias_prior : {"flat", "shared"}, default "flat"
        Prior of the bias: flat, or the same as that of the weights.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> X, network = torch.rand(64, 2), nn.Sequential(nn.Linear(2, 8), nn.Tanh())
    >>> loss = BLLLoss(n_rows=len(X))
    >>> loss(network(X), X.sum(1)).backward()
    >>> type(loss.posterior()).__name__
    'Posterior'
    """

    def __init__(self, n_rows: int, *, noise: NoiseStructure = "diagonal", bias_prior: BiasPrior = "flat") -> None:
        super().__init__()
        check_choice("noise", noise, NOISE_STRUCTURES)
        check_choice("bias_prior", bias_prior, BIAS_PRIORS)
        if int(n_rows) != n_rows or n_rows < 2:
            raise InputError(f"n_rows={n_rows!r} must be the number of samples in one pass, 2 or more")
        self.n_rows = int(n_rows)
        count = torch.tensor(float(n_rows), dtype=torch.float64)
        self.running = RunningPosterior(count, self.n_rows, noise=noise, bias_prior=bias_prior)

    def forward(
        self,
        phi_tilde: Float[Tensor, "r k"],
        targets: Float[Tensor, "r q"] | Float[Tensor, " r"],
        sample_weight: Float[Tensor, " r"] | None = None,
        *,
        drift: float = 1.0,
    ) -> Float[Tensor, ""]:
        """Compute the bound for a batch; in training mode, update the running statistics first.

        Parameters
        ----------
        phi_tilde : Tensor of shape (r, k)
            Features, without a constant column.
        targets : Tensor of shape (r, q) or (r,)
            Targets.
        sample_weight : Tensor of shape (r,), default None
            Weights of the rows. None: 1 for each.
        drift : float, default 1.0
            How fast the features change, such as the learning rate over its initial value: the slower, the longer the
            memory.
        """
        T = (targets[:, None] if targets.dim() == 1 else targets).to(phi_tilde)
        if phi_tilde.dim() != 2 or T.dim() != 2 or len(T) != len(phi_tilde):
            raise InputError(
                f"features of shape {tuple(phi_tilde.shape)} and targets of shape {tuple(targets.shape)}: give (r, k) "
                "and (r, q) or (r,), one row per sample"
            )
        running = self._running_on(phi_tilde.device)
        running.process_group = ProcessGroup.current()
        total = len(T) * running.process_group.world_size
        with torch.no_grad():
            if self.training:
                rows = running.step(phi_tilde.detach(), T, sample_weight, total=total, drift=drift)
            else:
                rows = self._started().rows(phi_tilde.detach(), T, sample_weight, scale=self.n_rows / total)
            value = running.now.frozen.offset + running.process_group.world_size * rows.loss
        # its value is the bound, and its gradient in the features is the one computed above
        carrier = running.process_group.world_size * (phi_tilde * rows.gradient).sum().double()
        return value + carrier - carrier.detach()

    def posterior(self) -> Posterior:
        """Return the posterior of the weights given the running statistics, in the units of the targets."""
        self._started()
        return self.running.posterior()

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return the running statistics for `state_dict`."""
        snapshot = self.running.snapshot
        return {} if snapshot is None else snapshot.tensors() | {"steps": torch.tensor(self.running.steps)}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore the running statistics from `state_dict`."""
        if state:
            here = {name: value.to(self.running.count.device) for name, value in state.items()}
            self.running.snapshot = Snapshot.of(here, self.running.bias_prior)
            self.running.steps = int(state["steps"])

    def _running_on(self, device: torch.device) -> RunningPosterior:
        """The running posterior, moved to the device of the features if necessary."""
        if self.running.count.device != device:
            state = self.get_extra_state()
            self.running.count = self.running.count.to(device)
            self.set_extra_state(state)
        return self.running

    def _started(self) -> FrozenLayer:
        if self.running.snapshot is None:
            raise InputError("BLLLoss has seen no batch yet: call it in training mode first, loss.train()")
        return self.running.snapshot.frozen
