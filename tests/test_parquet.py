"""Folders of Parquet files: every row once over all processes, row groups read by one of them; errors name the file."""

import numpy as np
import pytest
import torch
from helpers import alone_and_by_two, close, refused
from hypothesis import given
from hypothesis import strategies as st

from lastlayer import BLLRegressor, sources
from lastlayer.data.distributed import ProcessGroup
from lastlayer.data.parquet import ParquetSource
from lastlayer.data.sources import ArraySource, scales_of
from lastlayer.errors import InputError, MissingPackageError

pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
GROUP_ROWS = 12


def table(m: int) -> tuple[np.ndarray, np.ndarray]:
    X = np.stack([np.arange(m), np.cos(np.arange(m))], 1)
    return X, np.sin(X[:, 0] / 9)


def write(path, first, last, **columns) -> None:
    """Rows `first` to `last` of the table, in row groups of twelve."""
    X, y = (part[first:last] for part in table(last))
    content = {"a": X[:, 0], "b": X[:, 1], "y": y, "weight": X[:, 0] + 1, "text": ["x"] * len(y)} | columns
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(content), path, row_group_size=GROUP_ROWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """130 rows in three files of 4, 5 and 3 row groups, as an engine writes them: beside files that are no tables."""
    folder = tmp_path_factory.mktemp("table")
    for i, (first, last) in enumerate([(0, 40), (40, 96), (96, 130)]):
        write(folder / f"part-{i}.parquet", first, last)
    (folder / "_SUCCESS").touch()
    (folder / ".part-0.crc").touch()
    return folder


@pytest.fixture(scope="module")
def source(folder):
    return ParquetSource(folder, ["a", "b"], ["y"])


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    monkeypatch.setattr(sources, "POOL_NUMBERS", 60)


def numbers(source, size=7, **options) -> list[int]:
    """The numbers of the rows in the order in which they come; row i has i as its first input."""
    return [int(x) for batch in source.batches(size, **options) for x in batch.X[:, 0]]


def test_a_folder_a_pattern_a_list_and_an_address_are_the_same_rows(folder, source):
    files = sorted(folder.glob("*.parquet"))
    for paths in (str(folder), f"{folder}/part-*.parquet", files, f"file://{folder}"):
        other = ParquetSource(paths, ["a", "b"], ["y"])
        assert other.n_rows == source.n_rows == 130
        assert numbers(other) == list(range(130))
        assert numbers(other, seed=1) == numbers(source, seed=1)
    assert numbers(ParquetSource(files[1], ["a"], ["y"])) == list(range(40, 96))


@given(size=st.integers(1, 60), world=st.integers(1, 5), seed=st.none() | st.integers(0, 9))
def test_processes_share_the_rows_and_can_join_half_way(source, size, world, seed):
    groups = [ProcessGroup(rank, world) for rank in range(world)]
    shares = [list(source.batches(size, seed=seed, process_group=group)) for group in groups]
    rows = torch.cat([batch.X[:, 0] for share in shares for batch in share])
    assert sorted(rows.int().tolist()) == list(range(130))
    alone = list(source.batches(size, seed=seed))
    for whole, *parts in zip(alone, *shares, strict=True):
        assert whole.total == len(whole.X) <= size
        assert {part.total for part in parts} == {whole.total}
        assert [len(part.X) for part in parts] == [group.local_count(whole.total) for group in groups]
    half = len(alone) // 2
    for group, share in zip(groups, shares, strict=True):
        rest = source.batches(size, seed=seed, first=half, process_group=group)
        for later, batch in zip(rest, share[half:], strict=size >= world):  # a process may have no rows to come
            assert torch.equal(later.X, batch.X)
            assert torch.equal(later.T, batch.T)


@pytest.fixture
def seen(monkeypatch):
    """The row groups that were read."""
    read, seen = ParquetSource.read, []
    monkeypatch.setattr(ParquetSource, "read", lambda self, unit: seen.append(unit) or read(self, unit))
    return seen


@pytest.mark.parametrize("seed", [None, 3])
def test_a_row_group_is_read_by_one_process_or_by_the_two_whose_border_it_holds(source, seen, seed):
    units, world = len(source.unit_rows), 3
    for rank in range(world):
        list(source.batches(13, seed=seed, process_group=ProcessGroup(rank, world)))
    assert set(seen) == set(range(units))
    assert len(seen) <= units + world - 1


def test_a_pool_is_all_that_is_in_memory(source, seen):
    """Ten rows a batch, 30 rows a pool: a batch is not waited for by more than four row groups."""
    waiting = [len(seen) * GROUP_ROWS - 10 * i for i, _ in enumerate(source.batches(10, seed=0))]
    assert max(waiting) <= 40 + 2 * GROUP_ROWS


def test_weights_and_folders_that_name_a_column_and_numbers_of_any_kind(tmp_path):
    for year, kind in ((2023, pa.int32()), (2024, pa.decimal128(12, 2))):
        numbers = pa.array(range(5), pa.int32()).cast(kind)
        write(tmp_path / f"year={year}" / "rows.parquet", 0, 5, a=numbers, b=[True, False] * 2 + [True])
    (batch,) = ParquetSource(tmp_path, ["a", "b", "year"], ["y"], sample_weight="weight").batches(10)
    X, y = table(5)
    for rows, year in ((slice(5), 2023), (slice(5, 10), 2024)):
        assert np.array_equal(batch.X[rows], np.stack([X[:, 0], [1, 0, 1, 0, 1], np.full(5, year)], 1))
        assert np.array_equal(batch.T[rows, 0], y)
        assert np.array_equal(batch.weight[rows], X[:, 0] + 1)
    write(tmp_path / "large" / "0.parquet", 0, 2, a=pa.array([2**60 + 1, 3], pa.int64()))
    (batch,) = ParquetSource(tmp_path / "large", ["a"], ["y"]).batches(10)
    assert batch.X[:, 0].tolist() == [2.0**60, 3.0]  # integers beyond those of float64 are rounded


def test_a_model_of_a_folder_is_that_of_the_same_rows_in_memory(source, folder):
    X, y = table(130)
    parameters = {"hidden": (6,), "batch_size": 200, "max_epochs": 3, "random_state": 0}
    one = BLLRegressor(**parameters).fit_source(source)
    other = BLLRegressor(**parameters).fit_source(ArraySource(X, y))
    assert one.fitted_.feature_names == ("a", "b")
    assert np.allclose(
        one.predictive(pd.DataFrame(X, columns=["a", "b"])).mean, other.predictive(X).mean, rtol=1e-3, atol=1e-4
    )  # order of float32 sums
    scales = [scales_of(each, 20) for each in (source, ArraySource(X, y))]
    assert torch.allclose(scales[0].inputs.mean, scales[1].inputs.mean, rtol=1e-12)


def test_what_is_wrong_with_files_is_said(folder, tmp_path, as_a_user):
    def n_rows(paths, inputs=("a",), targets=("y",)) -> int:
        return ParquetSource(paths, list(inputs), list(targets)).n_rows

    refused(r"part-0.parquet has no columns \['c', 'd'\]; it has \['a', 'b'", n_rows, folder, inputs=("c", "a", "d"))
    refused(r"'text' of .*part-0.parquet is of type string: .* numbers", n_rows, folder, inputs=("text",))
    refused(r"no file or folder .*nowhere, and as a pattern it matches nothing", n_rows, tmp_path / "nowhere")
    refused(r"no file .*absent.parquet", n_rows, [tmp_path / "absent.parquet"])
    refused("has no rows: 0 Parquet files", n_rows, tmp_path)
    refused(r"inputs='a' must be a list", ParquetSource, folder, "a", ["y"])
    write(tmp_path / "mixed" / "0.parquet", 0, 20)
    write(tmp_path / "mixed" / "1.parquet", 0, 20, a=["one"] * 20)
    refused(r"'a' of .*1.parquet is of type string: .* in every file", n_rows, tmp_path / "mixed")
    write(tmp_path / "nulls" / "0.parquet", 0, 20, b=[1.0] * 15 + [None] * 3 + [2.0] * 2)
    with pytest.raises(InputError, match=r"'b' of .*0.parquet has 3 nulls in row group 1: drop or impute"):
        BLLRegressor().fit_source(ParquetSource(tmp_path / "nulls", ["a", "b"], ["y"]))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    refused(r"broken.parquet.* cannot be read as Parquet", n_rows, tmp_path / "broken.parquet")


def test_without_pyarrow_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"lastlayer\[parquet\]"):
        ParquetSource("x.parquet", ["a"], ["b"]).n_rows  # noqa: B018


RANK_SCRIPT = """
    import sys, numpy as np, pandas as pd, torch
    from lastlayer import BLLRegressor
    from lastlayer.data.distributed import join
    from lastlayer.data.parquet import ParquetSource
    from lastlayer.data.sources import scales_of

    torch.set_num_threads(1)
    group = join()
    source = ParquetSource(f"{sys.argv[1]}/rows", ["a", "b"], ["y"])
    scales = scales_of(source, 40, process_group=group)
    fit = lambda **words: BLLRegressor(hidden=(16,), batch_size=40, random_state=0, **words).fit_source(source)
    model, untrained = fit(max_epochs=10), fit(max_epochs=0)
    X = pd.DataFrame({"a": np.linspace(0, 130, 20), "b": np.zeros(20)})
    out = {
        "scale": torch.cat([scales.inputs.scale, scales.targets.scale]),
        "untrained": torch.tensor(untrained.predictive(X).var),
        "trained": torch.tensor(model.predictive(X).var),
    }
    torch.save(out, f"{sys.argv[1]}/{group.world_size}-{group.rank}.pt")
    group.shutdown()
"""


def test_two_processes_fit_one_model_each_from_its_own_row_groups(tmp_path, as_a_user):
    """Before any step the last layer is exact for the same rows; steps then see other batches than one process does."""
    noise = 0.1 * np.random.default_rng(0).normal(size=130)
    for i, (first, last) in enumerate([(0, 50), (50, 130)]):
        smooth = np.sin(np.arange(first, last) / 30) + noise[first:last]
        write(tmp_path / "rows" / f"{i}.parquet", first, last, y=smooth)
    one, *two = alone_and_by_two(RANK_SCRIPT, tmp_path)
    for other in two:
        close(other["scale"], one["scale"])
        close(other["untrained"], one["untrained"], loose=1e4)  # float32 features, summed in another order
    close(two[0]["trained"], two[1]["trained"])
    assert not torch.allclose(two[0]["trained"], two[0]["untrained"], rtol=1e-3)
