"""Many networks on one table, trained by the profiled evidence as one batch: folds, strengths and members together."""

from threading import Event

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from tqdm import tqdm

from lastlayer.evidence import profiled_nlml
from lastlayer.features import affine_features, weight_energy
from lastlayer.training.loop import MAX_SETBACKS, Optimiser, Training
from lastlayer.training.objectives import INITIAL_LOG_ALPHA, Data
from lastlayer.training.threads import threads_for
from lastlayer.types import BiasPrior, NoiseStructure

CHECK_EPOCHS = 25
"""How often every network is looked at: one that failed goes back to where it was, with smaller steps."""


def train_stack(
    network: nn.Module,
    data: Data,
    weight: Float[Tensor, "s m"],
    *,
    strength: Float[Tensor, " s"],
    noise: NoiseStructure,
    bias_prior: BiasPrior,
    optimiser: Optimiser,
    stop: Event | None = None,
    progress: bool = False,
    label: str = "fit",
) -> Training:
    """Full-batch Adam on every network at once, in place; network i sees row j with weight[i, j].

    The loss is the profiled NLML plus the prior on the hidden weights, -log p / m. Adam works entry by entry, so a
    network moves as if it were alone. `stop` ends it after the present epoch.
    """
    s, m = weight.shape
    log_alpha = torch.full((s,), INITIAL_LOG_ALPHA, dtype=torch.float64, device=weight.device, requires_grad=True)
    parameters = [*network.parameters(), log_alpha]
    T = data.T.expand(s, *data.T.shape)
    prior_share = strength / weight.sum(-1)
    steps = torch.optim.Adam(parameters, lr=optimiser.learning_rate)
    pace: Tensor | None = None  # share of Adam's step that each network takes; None: all of it
    good = [p.detach().clone() for p in parameters]
    means, record = [], Training()

    def nlmls() -> Float[Tensor, " s"]:
        Phi = affine_features(network(data.X))
        return profiled_nlml(Phi, T, log_alpha, noise=noise, bias_prior=bias_prior, sample_weight=weight)

    def failed() -> Bool[Tensor, " s"]:
        """Asked of the state after the last step, since the loss was of the one before."""
        with torch.no_grad():
            return ~(torch.isfinite(nlmls()) & finite(parameters))

    bar = tqdm(range(optimiser.max_epochs), disable=not progress, desc=label, unit="epoch", mininterval=0.5)
    try:
        with threads_for(3 * m * sum(p.numel() for p in parameters)):
            for epoch in bar:
                if stop is not None and stop.is_set():
                    raise KeyboardInterrupt
                for group in steps.param_groups:
                    group["lr"] = optimiser.rate(epoch)
                steps.zero_grad()
                nlml = nlmls()
                (nlml + prior_share * weight_energy(network)).sum().backward()
                before = None if pace is None else [p.detach().clone() for p in parameters]
                steps.step()
                if before is not None and pace is not None:
                    shorten(parameters, before, pace)
                means.append(nlml.detach().nanmean())
                record.learning_rate.append(optimiser.rate(epoch))
                if epoch % CHECK_EPOCHS == CHECK_EPOCHS - 1 or epoch == optimiser.max_epochs - 1:
                    lost = failed()
                    step_back(parameters, good, steps, lost)
                    if lost.any():
                        pace = torch.where(lost, 0.3, 1.0) * (1.0 if pace is None else pace)
                    record.setbacks += int(lost.sum())
                    bar.set_postfix_str(f"mean NLML {float(means[-1]):.4f}", refresh=False)
                    if record.setbacks > MAX_SETBACKS * s:
                        record.stopped = "diverged"
                        break
    except KeyboardInterrupt:
        record.stopped = "interrupted"
        step_back(parameters, good, steps, failed())
    finally:
        bar.close()
    record.nlml = torch.stack(means).tolist() if means else []
    record.log_alpha = [float(log_alpha.detach().mean())]
    record.best_epoch = len(means)
    return record


def finite(parameters: list[Tensor], lead: int = 1) -> Bool[Tensor, "*s"]:
    """Which networks are: `lead` dimensions of every parameter count them."""
    fine = [torch.isfinite(p.detach()).reshape(*p.shape[:lead], -1).all(-1) for p in parameters]
    return torch.stack(fine).all(0)


def shorten(parameters: list[Tensor], before: list[Tensor], pace: Float[Tensor, "*s"]) -> None:
    """Take back a part of the last step, network by network."""
    with torch.no_grad():
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old + pace.to(p).reshape(*pace.shape, *[1] * (p.dim() - pace.dim())) * (p - old))


def step_back(
    parameters: list[Tensor], good: list[Tensor], steps: torch.optim.Optimizer, failed: Bool[Tensor, "*s"]
) -> None:
    """Networks that failed return to their last good state, with an optimiser that starts anew; the rest is kept."""
    with torch.no_grad():
        for p, kept in zip(parameters, good, strict=True):
            p[failed] = kept[failed]
            kept.copy_(p)
            for name in ("exp_avg", "exp_avg_sq"):
                if failed.any() and name in steps.state[p]:
                    steps.state[p][name][failed] = 0
