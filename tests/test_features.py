import math

import pytest
import torch
from helpers import close

from lastlayer.errors import InputError
from lastlayer.features import ACTIVATIONS, MLP, affine_features, linear_features


def test_affine_features_are_the_linear_ones_and_a_one():
    P = torch.randn(7, 3, dtype=torch.float64)
    Phi = affine_features(P)
    assert Phi.shape == (7, 4)
    close(Phi[:, :3], P)
    assert bool((Phi[:, 3] == 1).all())
    close(linear_features(Phi), P)


def test_features_without_a_bias_are_refused():
    with pytest.raises(InputError, match="affine_features"):
        linear_features(torch.randn(5, 3))


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
    gain = 1.0 if activation in ("tanh", "sigmoid") else math.sqrt(2)
    bound = gain * math.sqrt(6 / 80)
    assert 0.98 * bound < float(net[0].weight.detach().abs().max()) <= bound
    assert bool((net[0].bias == 0).all())


def test_same_generator_same_network():
    a, b = (MLP(3, (5,), generator=torch.Generator().manual_seed(2)) for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert sum(p.abs().sum() for p in a.parameters()) > 0


def test_bad_words_and_widths_speak():
    with pytest.raises(InputError, match=r"did you mean 'tanh'"):
        MLP(2, (3,), activation="tahn")
    with pytest.raises(InputError, match=r"hidden=\(3, 0\)"):
        MLP(2, (3, 0))
