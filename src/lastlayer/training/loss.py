"""`BLLLoss`: the evidence as a loss for a training loop of one's own, on one process or several."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastlayer.distributed import ProcessGroup
from lastlayer.errors import InputError, check_choice
from lastlayer.posterior import Posterior
from lastlayer.training.bound import FrozenLayer
from lastlayer.training.running_posterior import RunningPosterior, Snapshot
from lastlayer.types import BIAS_PRIORS, NOISE_STRUCTURES, BiasPrior, NoiseStructure


class BLLLoss(nn.Module):
    """(features, targets) of a mini-batch -> an upper bound on the negative log marginal likelihood per sample.

    The features are what a last layer would take; the layer itself lives here, as running statistics, and is never
    trained: its weights, noise and alpha follow from them in closed form. In training mode a call takes the batch in;
    in evaluation mode it only says the bound for these rows. `state_dict` holds the statistics.

    With an initialised torch.distributed group the statistics are those of all processes, and the mean over them of
    losses and gradients, as DistributedDataParallel takes it, is what one process would have got from the rows of all:
    row i of the whole batch on process i modulo their number, as many rows on each.

    Parameters
    ----------
    n_rows : samples in one pass over the data, on all processes; weights average to one.
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
        """`drift`: how fast the features move, say the learning rate over its first value: slower, longer memory."""
        T = (targets[:, None] if targets.dim() == 1 else targets).to(phi_tilde)
        if phi_tilde.dim() != 2 or T.dim() != 2 or len(T) != len(phi_tilde):
            raise InputError(
                f"features of shape {tuple(phi_tilde.shape)} and targets of shape {tuple(targets.shape)}: give (r, k) "
                "and (r, q) or (r,), one row a sample"
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
        # a loss whose gradient in the features is known, and whose value is the bound
        carrier = running.process_group.world_size * (phi_tilde * rows.gradient).sum().double()
        return value + carrier - carrier.detach()

    def posterior(self) -> Posterior:
        """What the running statistics say of the last layer's weights, in the units of the targets."""
        self._started()
        return self.running.posterior()

    def get_extra_state(self) -> dict[str, Tensor]:
        snapshot = self.running.snapshot
        return {} if snapshot is None else snapshot.tensors() | {"steps": torch.tensor(self.running.steps)}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        if state:
            here = {name: value.to(self.running.count.device) for name, value in state.items()}
            self.running.snapshot = Snapshot.of(here, self.running.bias_prior)
            self.running.steps = int(state["steps"])

    def _running_on(self, device: torch.device) -> RunningPosterior:
        """Statistics live where the features do."""
        if self.running.count.device != device:
            state = self.get_extra_state()
            self.running.count = self.running.count.to(device)
            self.set_extra_state(state)
        return self.running

    def _started(self) -> FrozenLayer:
        if self.running.snapshot is None:
            raise InputError("BLLLoss has seen no batch yet: call it in training mode first, loss.train()")
        return self.running.snapshot.frozen
