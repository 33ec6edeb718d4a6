"""Where rows come from: every row once a pass, the same order for the same seed, and nothing copied whole."""

import numpy as np
import pytest
import torch
from helpers import refused
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lastlayer import BLLRegressor, sources
from lastlayer.bayes.statistics import Readings
from lastlayer.data.distributed import ProcessGroup
from lastlayer.data.rows import Points
from lastlayer.data.scaling import Standardizer
from lastlayer.data.sources import ArraySource, LoaderSource, Source, StandardizedSource, Without, scales_of


def table(m: int) -> tuple[np.ndarray, np.ndarray]:
    X = np.stack([np.arange(m), np.cos(np.arange(m))], 1)
    return X, np.sin(X[:, 0] / 9)


def numbers(source: Source, size: int = 7, **options) -> list[int]:
    """The numbers of the rows in the order in which they come; row i has i as its first input."""
    return [int(x) for batch in source.batches(size, **options) for x in batch.X[:, 0]]


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    monkeypatch.setattr(sources, "POOL_NUMBERS", 60)
    monkeypatch.setattr(sources, "BLOCK_ROWS", 10)


def tensor_source(m: int) -> Points:
    X, y = table(m)
    return Points(torch.from_numpy(X), Readings(torch.from_numpy(y)[:, None]))


@pytest.mark.parametrize("make", [tensor_source, lambda m: ArraySource(*table(m))])
@given(m=st.integers(1, 150), size=st.integers(1, 40), world=st.integers(1, 3), seed=st.integers(0, 9))
def test_a_pass_gives_every_row_once_and_can_be_joined_half_way(make, m, size, world, seed):
    source = make(m)
    assert isinstance(source, Source)
    assert source.n_rows == m
    assert numbers(source, size) == list(range(m))
    shuffled = numbers(source, size, seed=seed)
    assert sorted(shuffled) == list(range(m))
    assert shuffled == numbers(source, size, seed=seed)
    whole = list(source.batches(size, seed=seed))
    assert all(batch.total == len(batch.X) <= size for batch in whole)
    rest = list(source.batches(size, seed=seed, first=len(whole) // 2))
    for later, batch in zip(rest, whole[len(whole) // 2 :], strict=True):
        assert torch.equal(later.X, batch.X)
        assert torch.equal(later.T, batch.T)
    shares = [list(source.batches(size, seed=seed, process_group=ProcessGroup(rank, world))) for rank in range(world)]
    for batch, *parts in zip(whole, *shares, strict=True):
        assert all(part.total == batch.total for part in parts)
        for rank, part in enumerate(parts):
            assert torch.equal(part.X, batch.X[rank::world])


def test_rows_left_out_never_come():
    X, y = table(95)
    left_out = np.array([0, 9, 10, 37, 94])
    source = Without(ArraySource(X, y, np.arange(95.0)), left_out)
    assert sorted(numbers(source, seed=1)) == [i for i in range(95) if i not in left_out]
    for batch in source.batches(8, seed=1):
        assert torch.equal(batch.weight, batch.X[:, 0])


def test_large_data_are_shuffled_across_blocks():
    order = numbers(ArraySource(*table(3000)), 50, seed=0)
    correlation = np.corrcoef(order, np.arange(3000))[0, 1]
    assert abs(correlation) < 0.3


def test_scales_of_a_stream_are_those_of_the_whole():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(230, 3)) * [1, 1e3, 1e-3] + [0, 1e5, 0], rng.normal(size=(230, 2)) + 5
    X = np.column_stack([X, np.full(230, 7.25)])
    weight = rng.uniform(size=230)
    scales = scales_of(ArraySource(X, y, weight), 32)
    for mine, whole in ((scales.inputs, X), (scales.targets, y)):
        truth = Standardizer.fit(torch.from_numpy(whole), sample_weight=torch.from_numpy(weight))
        assert torch.allclose(mine.mean, truth.mean, rtol=1e-10)
        assert torch.allclose(mine.scale, truth.scale, rtol=1e-8)
    assert scales.n_rows == 230
    assert scales.count == pytest.approx(weight.sum())
    standard = StandardizedSource(ArraySource(X, y), scales, torch.device("cpu"), torch.float32)
    batch = next(standard.batches(10))
    assert batch.X.dtype == batch.T.dtype == torch.float32
    assert torch.allclose(batch.X, scales.inputs.forward(torch.from_numpy(X[: len(batch.X)])).float())


def test_what_is_wrong_with_rows_is_said():
    X, y = table(50)
    X[33, 1] = np.nan
    refused(r"X has NaN.*row 3 of the batch after 30 rows", scales_of, ArraySource(X, y), 10)
    refused("X has 50 rows and y has 49", ArraySource, X, y[:-1])
    refused("gave 0 rows", scales_of, LoaderSource([]), 10)
    refused("in place of", scales_of, LoaderSource([{"x": 1}]), 10)


def test_a_memory_map_stays_on_disk(tmp_path, as_a_user, monkeypatch):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "X.npy", rng.normal(size=(3000, 2)).astype(np.float32))
    X = np.load(tmp_path / "X.npy", mmap_mode="r")
    y = np.sin(X[:, 0]) + 0.1 * rng.normal(size=3000)
    monkeypatch.setattr(sources, "BLOCK_ROWS", 100)
    largest = []
    read = ArraySource.read
    monkeypatch.setattr(ArraySource, "read", lambda self, unit: largest.append(read(self, unit)) or largest[-1])
    model = BLLRegressor(hidden=(8,), batch_size=200, max_epochs=8, random_state=0).fit(X, y)
    assert max(len(part[0]) for part in largest) <= 100
    assert model.calibration_ is not None
    assert model.history_["gap"] >= 0
    assert model.predict(X[:5]).shape == (5,)
    assert np.sqrt(np.mean((model.predict(X) - np.sin(X[:, 0])) ** 2)) < 0.1
    assert model.noise_std_[0] == pytest.approx(0.1, rel=0.2)


class Stream(IterableDataset):
    def __iter__(self):
        X, y = table(60)
        return iter(zip(torch.from_numpy(X).float() / 60, torch.from_numpy(y)[:, None].float(), strict=True))


def test_loaders(as_a_user):
    X, y = table(60)
    rows = TensorDataset(torch.from_numpy(X).float(), torch.from_numpy(y).float())
    shuffled = LoaderSource(DataLoader(rows, batch_size=8, shuffle=True))
    assert sorted(numbers(shuffled, seed=3)) == list(range(60))
    model = BLLRegressor(hidden=(6,), max_epochs=3, random_state=0)
    model.fit_source(LoaderSource(DataLoader(Stream(), batch_size=16)), validation_data=(X / 60, y))
    assert np.isfinite(model.predictive(X / 60).std).all()
    refused("n_members=3", BLLRegressor(n_members=3).fit_source, shuffled)


def test_a_source_of_images_gives_a_model_that_takes_images():
    rng = np.random.default_rng(0)
    images, y = rng.normal(size=(40, 1, 4, 4)), rng.normal(size=40)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    model = BLLRegressor(backbone=network, max_epochs=1, random_state=0).fit_source(ArraySource(images, y))
    assert model.predict(images).shape == (40,)
