"""Readings: precisions against the definition, and which targets are read."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lastlayer.bayes.statistics import Readings


@given(st.integers(0, 2**31), st.booleans(), st.booleans())
def test_the_precision_is_that_of_scaled_learned_noise_and_known_noise(seed: int, holes: bool, known: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    T, noise_var = torch.randn(7, 2, generator=g).double(), torch.rand(2, generator=g).double() + 0.1
    variance = torch.rand(7, 2, generator=g).double() if known else None
    if holes:
        T[torch.rand(7, 2, generator=g) < 0.3] = torch.nan
    readings = Readings.of(T, variance)
    got = readings.precision(noise_var)
    want = torch.zeros(7, 2).double()
    for i in range(7):
        for j in range(2):
            total = noise_var[j] + (0.0 if variance is None else variance[i, j])
            want[i, j] = 0.0 if T[i, j].isnan() else noise_var[j] / total
    assert got is None if readings.complete else torch.allclose(got, want, rtol=1e-14, atol=0)
    assert torch.isfinite(readings.t).all()
    some = readings.map(lambda x: x[[3, 1]])
    assert torch.equal(some.t, readings.t[[3, 1]])
    if not readings.complete:
        assert torch.equal(some.precision(noise_var), got[[3, 1]])


def test_no_learned_noise_is_scale_zero() -> None:
    readings = Readings(torch.zeros(2, 1), scale=torch.zeros(2, 1), known=torch.tensor([[0.5], [2.0]]))
    assert torch.allclose(readings.precision(torch.tensor([0.25])), torch.tensor([[0.5], [0.125]]))
