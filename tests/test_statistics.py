import pytest
import torch
from helpers import close, problem, refused
from hypothesis import given
from hypothesis import strategies as st

from lastlayer.bayes.features import affine_features
from lastlayer.bayes.precision import NormalEquations
from lastlayer.bayes.statistics import Readings, Statistics
from lastlayer.errors import InputError


def same(a: Statistics, b: Statistics, *, loose: float = 1.0) -> None:
    for name in ("count", "mean", "scatter"):
        close(getattr(a, name), getattr(b, name), loose=loose)


def of(P, T, **options):
    return Statistics.from_features(affine_features(P), T, **options)


@given(m=st.integers(2, 30), k=st.integers(0, 6), q=st.integers(0, 3), offset=st.sampled_from([0.0, 1.0, -1e6]))
def test_they_are_the_moments(m, k, q, offset):
    P, T = problem(m, max(k, 1), max(q, 1), seed=m)
    P, T = P[:, :k] + offset, T[:, :q]
    s = of(P, T)
    rows = torch.cat([P, T], 1)
    Z = rows - rows.mean(0)
    assert s.count == m
    assert (s.n_linear, s.n_outputs) == (k, q)
    close(s.mean, rows.mean(0))
    close(s.scatter, Z.T @ Z, loose=max(1.0, abs(offset)))  # the slow form itself loses the digits of the offset


def test_the_raw_moments_follow_from_them():
    P, T = problem()
    raw = NormalEquations.of(of(P, T), "shared")
    Phi = affine_features(P)
    close(raw.gram, Phi.T @ Phi)
    close(raw.cross, Phi.T @ T)
    close(raw.targets, T.T @ T)


@given(cut=st.integers(1, 39), seed=st.integers(0, 5))
def test_parts_add_up_to_the_whole_and_can_be_taken_out_again(cut, seed):
    P, T = problem(40, seed=seed)
    whole, a, b = of(P, T), of(P[:cut], T[:cut]), of(P[cut:], T[cut:])
    same(a + b, whole)
    same(b + a, whole)
    rest = whole - a
    close(rest.mean, b.mean, loose=10)
    # removal subtracts what was added: right relative to the whole, not to what is left
    assert (rest.scatter - b.scatter).abs().max() < 1e-13 * whole.scatter.abs().max()


def test_batches_from_an_iterator_add_up_whatever_their_type():
    P, T = problem(50)
    batches = ((affine_features(P[i : i + 7].float()), T[i : i + 7].float()) for i in range(0, 50, 7))
    got = Statistics.from_batches(batches)
    same(got, of(P.float().double(), T.float().double()))
    assert got.scatter.dtype == torch.float64


def test_float32_rows_are_accumulated_in_float64():
    m = 70_000  # several chunks
    P = torch.rand(m, 1, generator=torch.Generator().manual_seed(0)) + 100
    s = of(P, P)
    Z = P.double() - P.double().mean()
    close(s.scatter[0, 0], (Z * Z).sum())


def test_a_weight_is_a_number_of_copies():
    P, T = problem(12)
    copies = torch.tensor([0, 1, 2, 3] * 3)
    same(of(P, T, sample_weight=copies.double()), of(P.repeat_interleave(copies, 0), T.repeat_interleave(copies, 0)))
    same(of(P, T).scaled(3.0), of(P.repeat(3, 1), T.repeat(3, 1)))


def test_a_batch_of_problems_is_each_of_them():
    problems = [problem(seed=s) for s in range(3)]
    P, T = (torch.stack(x) for x in zip(*problems, strict=True))
    weight = torch.rand(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight[0, :20] = 0
    together = of(P, T, sample_weight=weight)
    for i, (p, t) in enumerate(problems):
        one = of(p, t, sample_weight=weight[i])
        close(together.scatter[i], one.scatter)
        close(together.mean[i], one.mean)


def test_a_large_offset_costs_no_digits():
    P, T = problem(60)
    plain, moved = of(P, T), of(P + 2.0**30, T)
    kept = (P + 2.0**30) - 2.0**30  # what float64 keeps of the rows themselves
    close(moved.scatter, of(kept, T).scatter)
    close(moved.scatter, plain.scatter, loose=1e4)


@pytest.mark.parametrize("offset", [2.0**40, 2.0**44])
def test_a_huge_offset_costs_no_more_digits_than_the_rows_lose(offset):
    P, T = problem(60)
    kept = (P + offset) - offset
    close(of(P + offset, T).scatter, of(kept, T).scatter)


def test_energy_is_what_ever_went_in():
    P, T = problem(40)
    whole, a, b = of(P, T), of(P[:15], T[:15]), of(P[15:], T[15:])
    close((a + b).energy, whole.scatter.diagonal())
    close(whole.scaled(0.25).energy, 0.25 * whole.energy)
    assert bool(((whole - a).energy > whole.energy).all())


def test_what_was_never_added_cannot_be_removed():
    P, T = problem(40)
    with pytest.raises(InputError, match="not all added before"):
        of(P, T) - of(5 * P[:20] + 3, T[:20])
    with pytest.raises(InputError, match="some must remain"):
        of(P, T) - of(P, T)


def test_errors_name_what_was_given(as_a_user):
    P, T = problem(10)
    refused("10 rows of features and 9 of targets", Statistics.from_linear_features, P, T[:9])
    refused("is empty", Statistics.from_batches, iter([]))
    with pytest.raises(InputError, match="5 features and 2 targets"):
        of(P, T) + of(P[:, :3], T)
    refused("factor=-1", of(P, T).scaled, -1.0)


@given(seed=st.integers(0, 99), known=st.booleans())
def test_a_sum_has_the_finer_layout_and_takes_the_rows_away_again(seed, known):
    """Of each output the moments of the rows that read it, whichever rows were added or split first."""
    (P, T), g = problem(12, 3, 2, seed=seed), torch.Generator().manual_seed(seed)
    scale = torch.where(torch.rand(6, 2, generator=g) < 0.3, torch.inf, 1.0).double()
    scale[0] = 1.0
    var = torch.rand(6, 2, generator=g, dtype=torch.float64) if known else None
    shared, noise = of(P[6:], T[6:]), torch.tensor([0.5, 2.0], dtype=torch.float64)
    apart = Statistics.of(P[:6], Readings(T[:6], scale, var), noise_var=noise)
    total = apart + shared
    assert [s.by_output for s in (shared, apart, total)] == [False, True, True]
    same(shared + apart, total)
    same(total - shared, apart, loose=100)
    own = torch.cat([1 / (scale + (0.0 if var is None else var / noise)), torch.ones(6, 2, dtype=torch.float64)])
    for j in range(2):
        same(total.output(j), of(P, T[:, j : j + 1], sample_weight=own[:, j]))
        assert float(total.n[j]) == 6 + float((scale[:, j] < torch.inf).sum())
        close(total.log_scale[j], -own[own[:, j] > 0, j].log().sum())


def test_they_move_between_devices():
    P, T = problem()
    assert of(P, T).to("meta").scatter.device.type == "meta"
