import math

import pytest
import torch
from helpers import close, refused
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lastlayer.bayes.features import affine_features, linear_features
from lastlayer.bayes.posterior import Posterior
from lastlayer.bayes.statistics import Statistics
from lastlayer.networks.mlp import ACTIVATIONS, MLP, InputSkip


def test_affine_features_are_the_linear_ones_and_a_one():
    P = torch.randn(7, 3, dtype=torch.float64)
    Phi = affine_features(P)
    assert Phi.shape == (7, 4)
    close(Phi[:, :3], P)
    assert bool((Phi[:, 3] == 1).all())
    close(linear_features(Phi), P)


def test_features_without_a_bias_are_refused():
    refused("affine_features", linear_features, torch.randn(5, 3))


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_mlp_is_the_composition_of_affine_maps_and_activations(activation):
    net = MLP(2, (4, 3), activation=activation, generator=torch.Generator().manual_seed(1))
    x = torch.randn(6, 2, dtype=torch.float64)
    a, net = x, net.requires_grad_(False)
    for W, b in zip(*[iter(net.parameters())] * 2, strict=True):
        a = ACTIVATIONS[activation]()(a @ W.T + b)
    close(net(x), a)
    assert net.n_features == 3


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_weights_start_at_the_scale_that_suits_the_activation(activation):
    net = MLP(30, (50,), activation=activation, generator=torch.Generator().manual_seed(0))
    gain = 1.0 if activation in ("tanh", "sigmoid", "sin") else math.sqrt(2)
    bound = gain * math.sqrt(6 / 80)
    assert 0.98 * bound < float(net[0].weight.detach().abs().max()) <= bound
    assert bool((net[0].bias == 0).all())


def test_same_generator_same_network():
    a, b = (MLP(3, (5,), generator=torch.Generator().manual_seed(2)) for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert sum(p.abs().sum() for p in a.parameters()) > 0


def test_bad_words_and_widths_speak():
    refused(r"did you mean 'tanh'", MLP, 2, (3,), activation="tahn")
    refused(r"hidden=\(3, 0\)", MLP, 2, (3, 0))


def ratio(samples: Tensor, points: Tensor, log_alpha: float) -> Tensor:
    """phi' Lambda_bar^-1 phi with the flat bias prior."""
    moments = Statistics.from_linear_features(samples, samples.new_zeros(len(samples), 0))
    with torch.no_grad():
        return Posterior(moments, log_alpha, checked=False).variance_ratio(affine_features(points))


def network_and_data(m: int, d: int, k: int, seed: int, activation: str = "tanh") -> tuple[InputSkip, Tensor]:
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(m, d, generator=g, dtype=torch.float64)
    return InputSkip(MLP(d, (k,), activation=activation, generator=g)).requires_grad_(False), X


def test_inputs_stand_beside_the_features():
    network, X = network_and_data(6, 2, 3, 0)
    close(network(X), torch.cat([network.network(X), X], 1))


@given(
    m=st.integers(2, 30),
    d=st.integers(1, 4),
    k=st.integers(1, 8),
    seed=st.integers(0, 999),
    log_alpha=st.floats(-6, 8),
    distance=st.sampled_from([0.1, 1.0, 100.0]),
    activation=st.sampled_from(["tanh", "relu", "silu"]),
)
def test_the_variance_is_never_below_that_of_linear_regression(m, d, k, seed, log_alpha, distance, activation):
    """More features only add constraints to the affine-cost programme, at the same alpha."""
    network, X = network_and_data(m, d, k, seed, activation)
    points = distance * torch.randn(5, d, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    with_features, linear = ratio(network(X), network(points), log_alpha), ratio(X, points, log_alpha)
    assert bool((with_features >= linear * (1 - 1e-9)).all())


@given(
    m=st.integers(3, 30), d=st.integers(1, 3), k=st.integers(1, 6), seed=st.integers(0, 999), log_alpha=st.floats(-4, 6)
)
def test_far_away_the_variance_grows_with_the_square_of_the_distance(m, d, k, seed, log_alpha):
    """Bounded features are left behind: v / t^2 tends to u' B u, B the block of (G + I / alpha)^-1 of the inputs."""
    network, X = network_and_data(m, d, k, seed)
    u = torch.randn(d, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    u = u / u.norm()
    Z = network(X) - network(X).mean(0)
    A = Z.T @ Z + math.exp(-log_alpha) * torch.eye(k + d, dtype=torch.float64)
    limit = u @ torch.linalg.inv(A)[k:, k:] @ u
    t = 1e7
    v = ratio(network(X), network(t * torch.stack([u, 2 * u])), log_alpha)
    torch.testing.assert_close(v / t**2, limit * torch.tensor([1.0, 4.0]).double(), rtol=1e-4, atol=0.0)
    centred = X - X.mean(0)
    linear = u @ torch.linalg.inv(centred.T @ centred + math.exp(-log_alpha) * torch.eye(d).double()) @ u
    assert float(limit) >= float(linear) * (1 - 1e-9)
