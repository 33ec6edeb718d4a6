"""Peers with a Bayesian last layer: vbll and laplace-torch, trained as their documentation shows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from benchmarks.uci.networks import held_out_error
from benchmarks.uci.protocol import Task, hold_out, most_epochs
from benchmarks.uci.stacks import Recipe, Standard, refit, search, squared_error, standardised

VBLL_EPOCHS, VBLL_STEPS, VBLL_BATCH, VBLL_RATE, VBLL_CHECKS = 600, 8000, 64, 1e-2, 40
VBLL_ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.ReLU, nn.ELU)
WISHART_SCALE = 0.1
LAPLACE = Recipe(1e-2, batch_size=100, max_epochs=800, decays=(0.0, 1e-5, 1e-4, 1e-3))
LAPLACE_ACTIVATIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {nn.ReLU: torch.relu, nn.Tanh: torch.tanh}
MARGLIK_STEPS = 1000


@standardised
def vbll(x: Tensor, t: Tensor, task: Task) -> Standard:
    t = t[:, None]
    fit, held = hold_out(len(x), task.seed)
    budget = max(most_epochs(VBLL_EPOCHS, len(x)), round(VBLL_STEPS * VBLL_BATCH / len(x)))
    tried = []
    for activation in VBLL_ACTIVATIONS:
        losses: list[tuple[float, int]] = []

        def look(epoch: int, model: nn.Module, losses: list[tuple[float, int]] = losses) -> None:
            losses.append((float(model(x[held]).val_loss_fn(t[held])), epoch))

        _train_vbll(x[fit], t[fit], activation, task, budget, look=look)
        tried.append((*min(losses), activation))
    _, epochs, activation = min(tried, key=lambda one: one[0])
    model = _train_vbll(x, t, activation, task, budget, epochs)

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        predictive = model(x).predictive
        return predictive.mean[:, 0], predictive.variance[:, 0]

    return predict


def _train_vbll(
    x: Tensor, t: Tensor, activation: type[nn.Module], task: Task, budget: int, epochs: int = 0, look: Any = None
) -> nn.Module:
    import vbll as package  # type: ignore[import-not-found, unused-ignore]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        features = nn.Sequential(nn.Linear(x.shape[1], task.hidden), activation())
        last = package.Regression(task.hidden, 1, 1 / len(x), prior_scale=1.0, wishart_scale=WISHART_SCALE)
        model = nn.Sequential(features, last).to(x.device)
        parts = ((features, 1e-4), (last, 0.0))
        groups = [{"params": part.parameters(), "weight_decay": decay} for part, decay in parts]
        optimizer = torch.optim.AdamW(groups, lr=VBLL_RATE, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, budget, VBLL_RATE / 100)
        for epoch in range(1, (epochs or budget) + 1):
            for rows in torch.randperm(len(x)).to(x.device).split(VBLL_BATCH):
                optimizer.zero_grad()
                model(x[rows]).train_loss_fn(t[rows]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            schedule.step()
            if look is not None and epoch % max(1, budget // VBLL_CHECKS) == 0:
                with torch.no_grad():
                    look(epoch, model)
    return model


@standardised
def laplace(x: Tensor, t: Tensor, task: Task) -> Standard:
    fit, held = hold_out(len(x), task.seed)
    tried = []
    for activation, function in LAPLACE_ACTIVATIONS.items():
        recipe = replace(LAPLACE, activation=function)
        for i, one in enumerate(search(x, t, squared_error, recipe, held_out_error, task)):
            mean, var = _laplace(_as_network(one.weights, activation), x[fit], t[fit])(x[held])
            nll = -float(torch.distributions.Normal(mean, var.sqrt()).log_prob(t[held]).mean())
            tried.append((nll, one.epoch, i, activation, recipe))
    _, epoch, chosen, activation, recipe = min(tried, key=lambda one: one[0])
    stack = refit(x, t, squared_error, recipe, chosen, epoch, task)
    return _laplace(_as_network(dict(stack.named_parameters()), activation), x, t)


def _as_network(weights: dict[str, Tensor], activation: type[nn.Module]) -> nn.Module:
    first, last = weights["first"][0], weights["last"][0]
    network = nn.Sequential(nn.Linear(*first.shape), activation(), nn.Linear(*last.shape)).to(first.device)
    state = {"0.weight": first.T, "0.bias": weights["first_bias"][0, 0]}
    state |= {"2.weight": last.T, "2.bias": weights["last_bias"][0, 0]}
    network.load_state_dict({name: value.detach().clone() for name, value in state.items()})
    return network


def _laplace(network: nn.Module, x: Float[Tensor, "m d"], t: Float[Tensor, " m"]) -> Standard:
    """Tune prior precision and noise by the marginal likelihood, as in the package's regression example."""
    from laplace import Laplace  # type: ignore[import-not-found, unused-ignore]
    from torch.utils.data import DataLoader, TensorDataset

    la: Any = Laplace(network, "regression", subset_of_weights="last_layer", hessian_structure="full")
    la.fit(DataLoader(TensorDataset(x, t[:, None]), batch_size=min(len(x), 4096)))
    log_prior = torch.ones(1, device=x.device, requires_grad=True)
    log_sigma = torch.ones(1, device=x.device, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
    for _ in range(MARGLIK_STEPS):
        optimizer.zero_grad()
        (-la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())).backward()
        optimizer.step()

    def predict(x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        with torch.no_grad():
            mean, cov = la(x, pred_type="glm")
        return mean[:, 0].detach(), (cov[:, 0, 0] + la.sigma_noise.square()).detach()

    return predict
