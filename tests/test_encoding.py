"""Piecewise-linear encoding: bins against a slow form, stacks of them, networks that see them, and models that have
such networks as members."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import close
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lastlayer import BLLRegressor, formula
from lastlayer.formula.ops import TorchOps
from lastlayer.networks.architecture import Architecture
from lastlayer.networks.mlp import (
    MLP,
    InputSkip,
    PiecewiseEncoding,
    StackedMLP,
    bins_of,
    encoded,
    grouped,
    numbers_of,
    parts_of,
)
from lastlayer.settings.resolve import resolve
from lastlayer.settings.types import ADDITIVE, NETWORK, Family, Linear, Network, Shape

pytestmark = pytest.mark.usefixtures("small_process")

M, D, S = 40, 3, 3
NO_WIDTH = {
    "a constant": [2.5] * 20,
    "many copies of one value": [0.0, 1.0] + [3.0] * 16 + [4.0, 7.0],
    "a step at a quantile": [-1.0] + [0.0] * 20 + [1.0] * 8 + [2.0, 3.0],  # rank 20 of 31 rows at 2/3, but for rounding
}


def table(m: int = M, seed: int = 0) -> torch.Tensor:
    """A column of numbers, one of few values, one of which most are the same."""
    rng = np.random.default_rng(seed)
    columns = rng.normal(size=m), rng.integers(0, 4, m), np.where(rng.random(m) < 0.6, 1.0, rng.normal(size=m))
    return torch.from_numpy(np.stack(columns, 1))


def slow(Z: np.ndarray, n_bins: list[int], X: np.ndarray) -> np.ndarray:
    """Column by column, knot by knot, row by row."""
    columns = []
    for j, n in enumerate(n_bins):
        knots = [np.quantile(Z[:, j], i / n) for i in range(n + 1)]
        for low, high in pairwise(knots):
            share = lambda x, low=low, high=high: min(max((x - low) / (high - low), 0.0), 1.0) if high > low else 0.0
            columns.append([share(x) for x in X[:, j]])
    return np.array(columns).T


def encodings(dtype: torch.dtype = torch.float64) -> list[PiecewiseEncoding]:
    """Of the same inputs, each by rows of its own."""
    n_bins = bins_of(table())
    return [PiecewiseEncoding.of(table(seed=seed), n_bins).to(dtype) for seed in range(S)]


def stack(dtype: torch.dtype = torch.float64, activation: str = "tanh") -> tuple[InputSkip, list[InputSkip]]:
    """Networks of encoded inputs as one, and each alone."""
    own, generators = encodings(dtype), [torch.Generator().manual_seed(seed) for seed in range(S)]
    inner = StackedMLP(len(own[0].column), (6, 5), generators=generators, activation=activation).to(dtype)
    alone = [encoded(encoding, inner.member(i), D) for i, encoding in enumerate(own)]
    return encoded(PiecewiseEncoding.stacked(own), inner, D), alone


@pytest.mark.parametrize("n_bins", [[1, 1, 1], [8, 3, 5], [2, 7, 4]], ids=str)
@pytest.mark.parametrize("m", [2, 11, M])
def test_bins_are_those_of_the_slow_form(m, n_bins, generator):
    Z = table(m)
    X = torch.cat([Z, 3 * torch.randn(50, D, generator=generator, dtype=torch.float64)])
    encoding = PiecewiseEncoding.of(Z, torch.tensor(n_bins))
    close(encoding(X), torch.from_numpy(slow(Z.numpy(), n_bins, X.numpy())))
    assert encoding.column.tolist() == [j for j, n in enumerate(n_bins) for _ in range(n)]


@given(st.lists(st.floats(-10, 10, width=16), min_size=2, max_size=30), st.integers(1, 8))
def test_bins_rise_from_zero_to_one_each_after_the_one_before(values, n):
    """And stay there outside the data; those of no width are left out."""
    z = torch.tensor(values, dtype=torch.float64)
    encoding = PiecewiseEncoding.of(z[:, None], torch.tensor([n]))
    inside = torch.linspace(float(z.min()), float(z.max()), 101, dtype=torch.float64)
    x = torch.cat([z.min() - torch.tensor([1e6, 1.0]).double(), inside, z.max() + torch.tensor([1.0, 1e6]).double()])
    bins = encoding(x[:, None])
    wide = encoding.slope > 0
    assert bool((bins[:2] == 0).all())
    assert bool((bins[-2:] == wide.double()).all())
    bins = bins[:, wide]
    assert bool((bins.diff(dim=0) >= 0).all())
    begun, ended = bins[:, 1:] > 1e-6, bins[:, :-1] > 1 - 1e-6
    assert bool((ended | ~begun).all())


@pytest.mark.parametrize("values", NO_WIDTH.values(), ids=NO_WIDTH)
def test_bins_without_width_are_zero_everywhere(values):
    """Where values repeat, two quantiles are the same number."""
    z, n = np.array(values), 3
    encoding = PiecewiseEncoding.of(torch.from_numpy(z)[:, None], torch.tensor([n]))
    without = np.diff(np.quantile(z, np.linspace(0, 1, n + 1))) == 0
    assert without.any()
    x = torch.linspace(-9, 9, 201, dtype=torch.float64)[:, None]
    assert bool((encoding(x)[:, without] == 0).all())
    assert bool(torch.isfinite(encoding.shift).all())


def test_a_sum_of_bins_is_any_function_that_bends_at_the_quantiles(generator):
    """Heights at the knots, straight lines between them."""
    z = torch.randn(50, 1, generator=generator, dtype=torch.float64)
    heights = torch.randn(6, generator=generator, dtype=torch.float64)
    bins = PiecewiseEncoding.of(z, torch.tensor([5]))(z)
    knots = np.quantile(z.numpy(), np.linspace(0, 1, 6))
    close(heights[0] + bins @ heights.diff(), torch.from_numpy(np.interp(z[:, 0].numpy(), knots, heights.numpy())))


def test_how_many_bins_an_input_has(generator):
    rand = lambda m, d: torch.randn(m, d, generator=generator, dtype=torch.float64)
    assert bins_of(rand(80, 2)).tolist() == [8, 8]
    assert bins_of(rand(10_000, 2)).tolist() == [8, 8]
    assert bins_of(rand(79, 2)).tolist() == [7, 7]  # ten rows for each
    assert bins_of(rand(9, 2)).tolist() == [2, 2]
    assert [sorted(set(bins_of(rand(90, d)).tolist())) for d in (50, 51, 100, 300)] == [[8], [7], [4], [2]]
    few = torch.arange(90)[:, None] % torch.tensor([1, 2, 3, 9, 10])
    assert bins_of(few.double()).tolist() == [1, 1, 2, 8, 8]  # one between each value and the next


def test_a_stack_of_encodings_is_each_of_them_alone():
    own, X = encodings(), table(seed=9)
    together = PiecewiseEncoding.stacked(own)
    assert not torch.equal(own[0].slope, own[1].slope)
    assert torch.equal(together(X), torch.stack([encoding(X) for encoding in own]))
    each = torch.stack([X, X + 1, 2 * X])
    assert torch.equal(together(each), torch.stack([encoding(x) for encoding, x in zip(own, each, strict=True)]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_stack_of_encoded_networks_is_each_of_them_alone(dtype):
    together, alone = stack(dtype)
    X = table(seed=9).to(dtype)
    close(together(X), torch.stack([network(X) for network in alone]))
    assert grouped(alone) == [[0, 1, 2]]
    close(formula.features(TorchOps, numbers_of(alone), X), together(X))


def test_additive_members_are_one_group_and_others_keep_apart():
    additive = [encoded(encoding, nn.Identity(), D) for encoding in encodings()]
    _, networks = stack()
    X, raw = table(seed=9), MLP(D, (6, 5), generator=torch.Generator())
    mixed = [additive[0], networks[0], nn.Identity(), additive[1], InputSkip(raw), networks[1], additive[2]]
    assert sorted(grouped(mixed)) == [[0, 3, 6], [1, 5], [2], [4]]
    for places in grouped(mixed):
        phi = formula.features(TorchOps, numbers_of([mixed[i] for i in places]), X)
        close(phi.expand(len(places), *phi.shape[-2:]), torch.stack([mixed[i](X) for i in places]))


@pytest.mark.parametrize("inner", [nn.Identity(), MLP(9, (4,), generator=torch.Generator())], ids=["sum", "network"])
def test_inputs_are_passed_on_scaled_down(inner):
    encoding = PiecewiseEncoding.of(table(), torch.tensor([4, 3, 2]))
    network, X = encoded(encoding, inner, D), table(seed=9)
    phi = network(X)
    close(phi[:, :-D], inner(torch.from_numpy(slow(table().numpy(), [4, 3, 2], X.numpy()))))
    close(phi[:, -D:], 0.3 * X, loose=1e3)  # the factor may be that of float32
    assert parts_of(network)[:2] == (inner, encoding)


def test_an_architecture_builds_the_network_of_its_family():
    settings = resolve(BLLRegressor((6, 5)).get_params(), Shape((M, D)), seed=0)
    encoding, X = encodings()[0], table(seed=9)
    build = lambda family: Architecture(settings).build(D, torch.Generator().manual_seed(3), family, encoding)
    start = MLP(len(encoding.column), (6, 5), generator=torch.Generator().manual_seed(3))
    for family, inner in ((replace(NETWORK, encoding="piecewise"), start), (ADDITIVE, nn.Identity())):
        close(build(family)(X), encoded(encoding, inner, D)(X))


SMALL = {"hidden": (4,), "encoding": "piecewise", "max_epochs": 5, "random_state": 0}


def rows(m: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A step, a wave, and what they have between them; inputs in units of their own."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (m, 2))
    y = np.where(X[:, 0] > 0.3, 1.0, -1.0) + np.sin(2 * X[:, 1]) + 0.5 * X[:, 0] * X[:, 1] + 0.1 * rng.normal(size=m)
    return X * [1.0, 50.0] + [0.0, 300.0], y


@pytest.fixture(scope="module")
def mixed() -> BLLRegressor:
    return BLLRegressor((4,), preset="fast", encoding="piecewise", max_epochs=5, random_state=0).fit(*rows())


def members_of(model: BLLRegressor, kind: type[Family]) -> list[int]:
    families = [member.family for member in model.fitted_.members]
    return [i for i, family in enumerate(families) if (type(family), family.encoding) == (kind, "piecewise")]


def test_the_mean_of_an_additive_member_is_a_sum_of_functions_of_single_inputs(mixed):
    """f(a, b) - f(a, b') - f(a', b) + f(a', b') = 0, inside the data and outside; not so that of a network."""
    X, other = (rows(seed=seed)[0] * 1.5 for seed in (1, 2))
    corners = [X, other, np.stack([X[:, 0], other[:, 1]], 1), np.stack([other[:, 0], X[:, 1]], 1)]

    def mixed_difference(member: int) -> float:
        """Of a member alone, before it is shrunk."""
        fitted, posterior = mixed.fitted_, mixed.fitted_.members[member].posterior
        means = (posterior.mean(fitted.features(member, fitted.standardized(corner))) for corner in corners)
        a, b, c, d = means
        return float((a + b - c - d).abs().max())

    additive, networks = members_of(mixed, Linear), members_of(mixed, Network)
    assert len(additive) == len(networks) == 5
    assert max(mixed_difference(i) for i in additive) < 1e-10
    assert min(mixed_difference(i) for i in networks) > 1e-3


def test_far_outside_bins_are_constant_and_the_variance_grows(mixed):
    """What is left there are the inputs passed on, scaled down."""
    X, _ = rows()
    centre, scale = X.mean(0), X.std(0)
    away = [centre + scale * [size, 0.0] for size in (10.0, 100.0, 1000.0)]
    for i in members_of(mixed, Linear) + members_of(mixed, Network):
        member = mixed.fitted_.members[i]
        phi = mixed.fitted_.features(i, mixed.fitted_.standardized(np.array(away)))
        close(phi[1:, :-3], phi[:1, :-3].expand(2, -1))
        cost = member.posterior.variance_ratio(phi)
        assert float(cost[2] / cost[1]) == pytest.approx(100, rel=0.1)
